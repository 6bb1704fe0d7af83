//! Prompts and answers at `control`: who may read them, and that the audit says who did.

use artifact::checkpoint::Checkpoint;
use edge::audit::Actor;
use edge::auth::key::{self, Grant, NewKey};
use edge::auth::{Scope, Scopes};
use runs::publish::import_checkpoint;
use serde_json::{Value, json};
use sqlx::AssertSqlSafe;
use std::sync::Arc;
use text::tokenizer::Tokenizer;
use uuid::Uuid;

use crate::trainer::world::World;
use fixture::control::Control;

const PROMPT: &str = "fn main() {\n    println";
const ACTOR: Actor<'static> = Actor {
    key: None,
    name: "tests",
};

struct Texts {
    world: World,
    _control: Control,
    url: String,
    tokenizer: Tokenizer,
}

impl Texts {
    /// Two versions with the demo's tokenizer, and a control role that needs keys.
    async fn start() -> Self {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/demo/models/base");
        let checkpoint = Checkpoint::read_dir(folder.as_ref()).unwrap();
        let tokenizer = Tokenizer::from_checkpoint(&checkpoint).unwrap();
        let world = World::start_from("texts", checkpoint.clone()).await;
        import_checkpoint(&world.publisher, Arc::new(checkpoint), "other")
            .await
            .unwrap();
        let keys = world.stack.keys_dir.display().to_string();
        let variables = [
            ("SPRINGTIDE__POLICY__STORE", &*world.stack.store_url),
            ("SPRINGTIDE__POLICY__KEYS", &keys),
            ("SPRINGTIDE__AUTH__REQUIRED", "true"),
            ("SPRINGTIDE__SERVE__API_KEY", "unused"),
            ("SPRINGTIDE__TRAINER__API_KEY", "unused"),
        ];
        let control = Control::start(&world.stack, &variables).await;
        Texts {
            url: format!("http://127.0.0.1:{}", control.port),
            _control: control,
            world,
            tokenizer,
        }
    }

    async fn key(&self, scopes: &[Scope]) -> String {
        let new = NewKey {
            tenant: "default",
            grant: Grant::Scopes(Scopes::of(scopes)),
            label: "ada",
            expires_at: None,
            replica: None,
            requests_per_second: None,
        };
        key::create(&self.world.stack.pool, &new, ACTOR, "")
            .await
            .unwrap()
            .secret
    }

    /// An answer of the tenant. `shared`: tokens of its prompt that are stored with its parent.
    async fn answer(&self, tenant: &str, version: i64, prompt: &str, answer: &str, shared: i32) -> Uuid {
        let ids = |text: &str| -> Vec<i32> {
            let ids = self.tokenizer.encode(text).unwrap();
            ids.into_iter().map(|id| id as i32).collect()
        };
        let id = Uuid::now_v7();
        sqlx::query(
            "with known as (insert into tenant (id) values ($2) on conflict do nothing)
             insert into generation
                 (id, tenant_id, policy, version, version_oldest, version_spans, root, line, replica, purpose, surface,
                  episode_id, user_key, arm, arm_probability, prompt_ids, prompt_prefix_len, token_ids, logprobs,
                  temperature, top_p, finish_reason, declined, sampled_at)
             select $1, $2, 'demo', $3, $3, '[]', '', 'realtime', 'replica', 'production', 'completion',
                    uuidv7(), 'u', 'champion', 1, $4, $6, $5, array_fill(-1::real, array[cardinality($5)]),
                    1, 1, 'stop', false, clock_timestamp()",
        )
        .bind(id)
        .bind(tenant)
        .bind(version)
        .bind(ids(prompt))
        .bind(ids(answer))
        .bind(shared)
        .execute(&self.world.stack.pool)
        .await
        .unwrap();
        id
    }

    async fn get(&self, key: &str, path: &str) -> (u16, String) {
        let request = reqwest::Client::new()
            .get(format!("{}{path}", self.url))
            .bearer_auth(key);
        let answer = request.send().await.unwrap();
        (answer.status().as_u16(), answer.text().await.unwrap())
    }

    async fn read(&self, key: &str, id: Uuid, asked: Value) -> (u16, Value) {
        let url = format!("{}/v1/generations/{id}/texts", self.url);
        let request = reqwest::Client::new().post(url).bearer_auth(key).json(&asked);
        let answer = request.send().await.unwrap();
        (answer.status().as_u16(), answer.json().await.unwrap())
    }

    /// The page, as its form asks for it.
    async fn page(&self, key: &str, id: Uuid, fields: &[(&str, &str)]) -> (u16, String) {
        let url = format!("{}/trajectories/{id}/texts", self.url);
        // nothing in the fields needs to be escaped
        let fields: Vec<String> = fields.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let request = reqwest::Client::new().post(url).bearer_auth(key).body(fields.join("&"));
        let request = request.header("content-type", "application/x-www-form-urlencoded");
        let answer = request.send().await.unwrap();
        (answer.status().as_u16(), answer.text().await.unwrap())
    }

    /// Who read what, and why.
    async fn noted(&self) -> Vec<(String, String, String)> {
        sqlx::query_as("select actor, subject, reason from audit where action = 'texts.read' order by id")
            .fetch_all(&self.world.stack.pool)
            .await
            .unwrap()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn texts_are_shown_to_those_who_may_and_the_audit_says_who_read_them() {
    let texts = Texts::start().await;
    let first = texts.answer("default", 1, PROMPT, "!(\"a\");", 0).await;
    let second = texts.answer("default", 2, PROMPT, "!(\"<b>\");", 0).await;
    let another = texts.answer("default", 2, "let x = 1;", " // one", 0).await;
    let long = texts.answer("default", 2, PROMPT, "!();", 7).await;
    let of_others = texts.answer("others", 1, PROMPT, "!(\"secret\");", 0).await;
    let reader = texts.key(&[Scope::Read, Scope::Release]).await;
    let key = texts.key(&[Scope::Read, Scope::Texts]).await;

    let (status, problem) = texts.read(&reader, first, json!({"reason": "curious"})).await;
    assert_eq!(status, 403, "{problem}");
    for reason in ["", "  "] {
        let (status, problem) = texts.read(&key, first, json!({"reason": reason})).await;
        assert!(
            status == 400 && problem["detail"].as_str().unwrap().starts_with("reason"),
            "{problem}"
        );
    }
    for id in [of_others, Uuid::nil()] {
        let (status, problem) = texts.read(&key, id, json!({"reason": "look"})).await;
        assert_eq!(status, 404, "{problem}");
    }
    let (status, problem) = texts
        .read(&key, first, json!({"reason": "look", "beside": of_others}))
        .await;
    assert_eq!(status, 404, "{problem}");
    assert_eq!(texts.noted().await, [], "nothing was shown, so nobody read anything");

    let (status, found) = texts
        .read(&key, first, json!({"reason": "bad answers", "beside": ""}))
        .await;
    assert_eq!(status, 200, "{found}");
    let shown = found["texts"].as_array().unwrap();
    assert_eq!(shown.len(), 2, "{found}");
    for (text, (id, version, answer)) in shown.iter().zip([(first, 1, "!(\"a\");"), (second, 2, "!(\"<b>\");")]) {
        assert_eq!(
            (&text["generation"], &text["version"]),
            (&id.to_string().into(), &version.into()),
            "{found}"
        );
        assert_eq!(
            (&text["prompt"], &text["answer"]),
            (&PROMPT.into(), &answer.into()),
            "{found}"
        );
    }
    let reading = |id: Uuid, why: &str| ("ada".to_owned(), id.to_string(), why.to_owned());
    assert_eq!(
        texts.noted().await,
        [reading(first, "bad answers"), reading(second, "bad answers")]
    );

    let another = another.to_string();
    let (status, page) = texts
        .page(&key, first, &[("reason", "page"), ("beside", &another)])
        .await;
    assert_eq!(status, 200, "{page}");
    assert!(
        page.contains("println") && page.contains("let x = 1;") && page.contains("// one"),
        "{page}"
    );
    let (_, page) = texts.page(&key, second, &[("reason", "page"), ("beside", "")]).await;
    assert!(page.contains("&lt;b&gt;") && !page.contains("<b>\""), "{page}");
    assert_eq!(texts.noted().await.len(), 6);
    let (_, page) = texts.get(&key, &format!("/trajectories/{first}")).await;
    assert!(page.contains("Read the texts"), "{page}");
    let (_, page) = texts.get(&reader, &format!("/trajectories/{first}")).await;
    assert!(
        page.contains("scope texts") && !page.contains("Read the texts"),
        "{page}"
    );
    assert_eq!(texts.page(&reader, first, &[("reason", "page")]).await.0, 403);

    let (status, found) = texts.read(&key, long, json!({"reason": "long"})).await;
    assert_eq!((status, found["texts"].as_array().unwrap().len()), (200, 1), "{found}");
    assert_eq!(
        (&found["texts"][0]["prompt"], &found["texts"][0]["answer"]),
        (&Value::Null, &"!();".into()),
        "{found}"
    );

    // of a version that never was, which hides no other answer
    let unknown = texts.answer("default", 99, PROMPT, "!();", 0).await;
    let (status, problem) = texts.read(&key, unknown, json!({"reason": "look"})).await;
    assert!(
        status == 404 && problem["detail"].as_str().unwrap().contains("tokenizer"),
        "{problem}"
    );
    assert_eq!(texts.read(&key, first, json!({"reason": "look"})).await.0, 200);

    // whoever can run SQL as this role reads no text without a row of the audit that stays
    let control = texts.world.stack.pool_of("control");
    let note = format!(
        "insert into audit (id, at, actor, tenant, action, subject, detail, reason, previous, hash)
         select max(id) + 1, clock_timestamp(), 'thief', 'default', 'texts.read', '{unknown}', '', '', '', '' from audit"
    );
    for before in ["", &note] {
        let mut transaction = edge::database::begin_with(&control, "begin; set local springtide.all_tenants = 'on'")
            .await
            .unwrap();
        if !before.is_empty() {
            sqlx::query(AssertSqlSafe(before))
                .execute(&mut *transaction)
                .await
                .unwrap();
        }
        let read = sqlx::query("select * from generation_texts(array[$1])").bind(unknown);
        let refused = read.execute(&mut *transaction).await.unwrap_err();
        let code = refused
            .as_database_error()
            .and_then(|error| error.code().map(String::from));
        assert_eq!(code.as_deref(), Some("42501"), "{refused}");
        transaction.rollback().await.unwrap();
    }
}
