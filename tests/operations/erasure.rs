//! Erasing what one user left: rows, texts, what comes later, what a restored database has again. What is not trained
//! on is in `tests/learning/trainer/erasure.rs`.

use std::collections::BTreeMap;
use std::path::Path;

use event_log::event::{self, Body, Event, Feedback, Generation, Retraction, Target, Value};
use fixture::control::Control;
use fixture::ingest::{SOON, SOURCE, Service, generation, send, stored};
use fixture::{SPRINGTIDE, Stack, eventually};
use serde_json::json;
use sqlx::{PgPool, Row};
use uuid::Uuid;

/// What the user's rows say: a text, and an id of a token.
const TEXT: &str = "zebra-crossing-81";
const TOKEN: i32 = 8_181_818;
const USER: &str = "user-of-the-zebra";

fn of_user(user: &str) -> Generation {
    Generation {
        user_key: user.to_owned(),
        prompt_ids: vec![TOKEN.cast_unsigned(), 11],
        ..generation()
    }
}

fn comment(generation_id: Uuid) -> Event {
    let feedback = Feedback {
        id: Uuid::now_v7(),
        target: Target::Generation(generation_id),
        metric_name: "comment".to_owned(),
        value: Value::Text(TEXT.to_owned()),
        tags: BTreeMap::from([("note".to_owned(), TEXT.to_owned())]),
    };
    feedback.into_event("default", SOURCE, event::now())
}

fn take_back(feedback: &Event) -> Event {
    let Body::Feedback(feedback) = &feedback.body else {
        panic!("no feedback")
    };
    let retraction = Retraction {
        id: Uuid::now_v7(),
        feedback_id: feedback.id,
        reason: TEXT.to_owned(),
    };
    retraction.into_event("default", SOURCE, event::now())
}

/// Rows of any table that say something of the user.
async fn traces(pool: &PgPool) -> Vec<String> {
    let tables = "select c.relname::text from pg_class c join pg_namespace n on n.oid = c.relnamespace
                  where c.relkind = 'r' and n.nspname = current_schema() and c.relname <> '_sqlx_migrations'";
    let mut found = vec![];
    for table in sqlx::query_scalar::<_, String>(tables).fetch_all(pool).await.unwrap() {
        let rows = sqlx::query(sqlx::AssertSqlSafe(format!(
            "select t::text from \"{table}\" t where t::text ~ $1"
        )));
        for row in rows
            .bind(format!("{TEXT}|{TOKEN}|{USER}"))
            .fetch_all(pool)
            .await
            .unwrap()
        {
            found.push(format!("{table}: {}", row.get::<String, _>(0)));
        }
    }
    found
}

async fn erase(control: &Control, folder: &Path, stack: &Stack) -> serde_json::Value {
    let output = tokio::process::Command::new(&*SPRINGTIDE)
        .current_dir(folder)
        .args([
            "erase",
            "--user",
            USER,
            "--reason",
            "request 7",
            "--receipt",
            "receipt.json",
            "--yes",
            "--json",
        ])
        .env(
            "SPRINGTIDE__CLIENT__CONTROL",
            format!("http://127.0.0.1:{}", control.port),
        )
        .env("SPRINGTIDE__STATE_DIR", stack.dir.path())
        .output()
        .await
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_is_erased_everywhere_and_stays_erased() {
    let stack = Stack::start("erasure").await;
    let service = Service::start(&stack).await;
    let control = Control::start(&stack, &[]).await;
    let (theirs, late, honest) = (of_user(USER), of_user(USER), generation());
    let said = comment(theirs.id);
    let events = [
        theirs.clone().into_event("default", SOURCE),
        said.clone(),
        honest.clone().into_event("default", SOURCE),
    ];
    send(&stack, &events).await;
    stored(&stack.pool, 3).await;
    assert!(traces(&stack.pool).await.len() >= 2, "what is to be erased");

    let folder = tempfile::tempdir().unwrap();
    let receipt = erase(&control, folder.path(), &stack).await;
    assert_eq!((&receipt["generations"], &receipt["feedback"]), (&json!(1), &json!(1)));
    assert_eq!(traces(&stack.pool).await, Vec::<String>::new());
    let verify = ["erase", "--verify", "receipt.json", "--json"];
    let verified = async |bytes: Option<Vec<u8>>| {
        if let Some(bytes) = bytes {
            std::fs::write(folder.path().join("receipt.json"), bytes).unwrap();
        }
        let command = tokio::process::Command::new(&*SPRINGTIDE)
            .current_dir(folder.path())
            .args(verify)
            .env("SPRINGTIDE__STATE_DIR", stack.dir.path())
            .output()
            .await;
        command.unwrap().status.success()
    };
    let bytes = std::fs::read(folder.path().join("receipt.json")).unwrap();
    assert!(verified(None).await);
    let mut forged: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
    forged["payload"] = json!("e30=");
    assert!(!verified(Some(serde_json::to_vec(&forged).unwrap())).await);

    // others are untouched, and the ledger adds up
    let kept: Vec<i32> = sqlx::query_scalar("select prompt_ids from generation where id = $1")
        .bind(honest.id)
        .fetch_one(&stack.pool)
        .await
        .unwrap();
    assert_eq!(kept, [10, 11, 12, 13]);
    let ledger = control.json("/v1/ledger").await;
    assert_eq!(
        (&ledger["generations"], &ledger["erased"], &ledger["balanced"]),
        (&json!(2), &json!(1), &json!(true)),
        "{ledger}"
    );

    // what comes later is unlinked: an event of the log, comments, a reason, and the first event again
    let again = theirs.clone().into_event("default", SOURCE);
    send(
        &stack,
        &[
            late.clone().into_event("default", SOURCE),
            comment(late.id),
            comment(theirs.id),
            take_back(&said),
            again,
        ],
    )
    .await;
    stored(&stack.pool, 8).await;
    assert_eq!(traces(&stack.pool).await, Vec::<String>::new());
    let erased: i64 = sqlx::query_scalar("select count(*) from disposition where kind = 'erased'")
        .fetch_one(&stack.pool)
        .await
        .unwrap();
    assert_eq!(erased, 2);

    // a database from before the erasure: its rows are back, and the registry is empty
    sqlx::query("delete from erasure").execute(&stack.pool).await.unwrap();
    let restored = of_user(USER);
    send(
        &stack,
        &[restored.clone().into_event("default", SOURCE), comment(restored.id)],
    )
    .await;
    stored(&stack.pool, 10).await;
    assert!(!traces(&stack.pool).await.is_empty());
    // and one that was cut off after it had begun
    let cut_off = of_user("another-zebra");
    send(&stack, &[cut_off.clone().into_event("default", SOURCE)]).await;
    stored(&stack.pool, 11).await;
    let register = "select register_erasure($1, 'default', user_digest('default', $2), 'a test')";
    let register = sqlx::query(register).bind(Uuid::now_v7()).bind(&cut_off.user_key);
    register.execute(&stack.pool).await.unwrap();
    drop(control);
    let control = Control::start(&stack, &[]).await;
    eventually("the erasures are repeated", SOON, async || {
        let left: i64 = sqlx::query_scalar("select count(*) from generation where user_key = 'another-zebra'")
            .fetch_one(&stack.pool)
            .await
            .ok()?;
        (left == 0 && traces(&stack.pool).await.is_empty()).then_some(())
    })
    .await;
    let listed = control.json("/v1/erasures").await;
    let ids: Vec<&serde_json::Value> = listed["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| &one["id"])
        .collect();
    assert!(
        ids.len() == 2 && ids.contains(&&receipt["id"]),
        "the same erasure: {listed}"
    );
    let user: String = sqlx::query_scalar("select user_key from generation where id = $1")
        .bind(cut_off.id)
        .fetch_one(&stack.pool)
        .await
        .unwrap();
    assert_eq!(user, format!("anonymous-{}", cut_off.id));
    service.stop().await;
}
