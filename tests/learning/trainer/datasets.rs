//! Datasets of sessions, and runs over datasets while something else happens: the store of payloads
//! is down, generations expire, a consent is withdrawn.

use super::context::{refer, shorten_to};
use super::episodes::{close, log, turn};
use super::offline::{control, get};
use super::uses::{SOON, dataset, insert, lines, post, run};
use super::world::{Sampled, World};
use event_log::payload::{self, TOKEN_IDS};
use fixture::eventually;
use runs::dataset::store;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::PathBuf;
use uuid::Uuid;

/// Only offline runs.
fn offline(world: &World) -> runs::Options {
    let mut options = world.options();
    options.offline.enabled = true;
    options.realtime.enabled = false;
    options
}

/// A session that closed a minute ago. Its last turn is of this arm.
async fn session(world: &World, turns: u32, reward: f64, arm: &str) -> Vec<Sampled> {
    let (mut context, mut sampled) = (Vec::new(), Vec::new());
    for at in 0..turns {
        sampled.push(turn(world, world.base, &mut context, &[7 + at, 3]).await);
    }
    let episode = Uuid::now_v7();
    log(world, episode, 0, 0, &sampled).await;
    close(world, episode, reward, &vec![None; turns as usize]).await;
    let ids: Vec<Uuid> = sampled.iter().map(|one| one.id).collect();
    for (sql, of) in [
        (
            "update trajectory set closed_at = closed_at - interval '1 minute' where generation_id = any ($1)",
            &ids[..],
        ),
        (
            "update generation set arm = $2 where id = any ($1)",
            &ids[ids.len() - 1..],
        ),
    ] {
        let query = sqlx::query(sql).bind(of);
        let query = if sql.contains("$2") { query.bind(arm) } else { query };
        query.execute(&world.stack.pool).await.unwrap();
    }
    sampled
}

/// The moment of a generation, which is that of its id.
fn moment(one: &Sampled) -> String {
    let (seconds, nanoseconds) = one.id.get_timestamp().unwrap().to_unix();
    let nanoseconds = i128::from(seconds) * 1_000_000_000 + i128::from(nanoseconds);
    let at = time::OffsetDateTime::from_unix_timestamp_nanos(nanoseconds).unwrap();
    at.format(&time::format_description::well_known::Rfc3339).unwrap()
}

fn size(made: &Value) -> (i64, i64) {
    let number = |field: &str| made[field].as_i64().unwrap();
    (number("trajectories"), number("generations"))
}

async fn single(world: &World, reward: f64) -> Sampled {
    let one = Sampled {
        reward: Some(reward),
        ..world.sample(world.base, 1).await.remove(0)
    };
    insert(world, std::slice::from_ref(&one)).await;
    one
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_is_in_a_dataset_as_a_whole_or_not_at_all_and_counts_once() {
    let world = World::start("dataset_sessions").await;
    world.follow(1, world.base, 0).await;
    let first = single(&world, 0.75).await;
    let long = session(&world, 5, -0.25, "champion").await;
    session(&world, 2, 0.5, "base").await;
    let last = single(&world, 0.75).await;
    let control = control(&world).await;
    let all = dataset(&control, "all", json!({})).await;
    assert_eq!(size(&all), (4, 9));
    assert_eq!(
        size(&dataset(&control, "two", json!({"limit": 2})).await),
        (2, 6),
        "cut between trajectories"
    );
    let arms = dataset(&control, "champions", json!({"arms": ["champion"]})).await;
    assert_eq!(size(&arms), (3, 7), "one turn of a session is of another arm");
    // a session is as old as its last turn
    let (begin, end) = (moment(&long[0]), moment(&long[4]));
    assert_ne!(begin, end);
    assert_eq!(
        size(&dataset(&control, "later", json!({"sampled_from": end})).await),
        (3, 8)
    );
    assert_eq!(
        size(&dataset(&control, "earlier", json!({"sampled_until": end})).await),
        (1, 1)
    );
    let around = json!({"sampled_from": begin, "sampled_until": end});
    let (status, _) = post(
        format!("{control}/v1/datasets"),
        &json!({"name": "inside", "query": around}),
    )
    .await;
    assert_eq!(status, 409, "only its first turns are of this time");

    let running = world.run(offline(&world));
    let evaluate = json!({"kind": "evaluate", "dataset": "champions@1", "base_version": world.base});
    let measured = run(&control, evaluate).await["result"].clone();
    assert_eq!(size(&measured), (3, 7));
    let close = |field: &str, want: f64| {
        let got = measured[field].as_f64().unwrap();
        assert!((got - want).abs() < 1e-9, "{field}: {got} instead of {want}");
    };
    // five turns with the reward of one session, which counts once; on-policy every weight is 1
    close("reward_mean", (0.75 - 0.25 + 0.75) / 3.0);
    close("reward_weighted", (0.75 - 0.25 + 0.75) / 3.0);
    close("effective_sample_size", 3.0);
    close("weights_clipped", 0.0);
    let exported = run(&control, json!({"kind": "export", "dataset": "champions@1"})).await;
    assert_eq!(size(&exported["result"]), (3, 7));
    let file = reqwest::get(format!("{control}/v1/datasets/champions/1/export"))
        .await
        .unwrap();
    let rows = lines(&file.text().await.unwrap());
    let ids: Vec<&str> = rows.iter().map(|row| row["generation_id"].as_str().unwrap()).collect();
    let expected: Vec<String> = [&first]
        .into_iter()
        .chain(&long)
        .chain([&last])
        .map(|one| one.id.to_string())
        .collect();
    assert_eq!(ids, expected, "a session's turns one after another");
    assert_eq!(rows[3]["prompt_ids"], json!(long[2].prompt));
    let sft = json!({"kind": "sft", "dataset": "champions@1", "base_version": world.base, "batch_size": 2});
    let sft = run(&control, sft).await;
    assert_eq!(sft["steps_done"], 2, "two batches of trajectories");
    let of_steps: Vec<(i64, i64)> = sqlx::query_as(
        "select (metrics ->> 'trajectories')::bigint, (metrics ->> 'sequences')::bigint from step order by step",
    )
    .fetch_all(&world.stack.pool)
    .await
    .unwrap();
    assert_eq!(of_steps.iter().map(|step| step.0).collect::<Vec<_>>(), [2, 1]);
    assert_eq!(of_steps.iter().map(|step| step.1).sum::<i64>(), 7);
    running.stop().await;

    // retention deletes a turn, and with it the session is gone
    let gone = "with gone as (delete from generation where id = $1) delete from trajectory where generation_id = $1";
    sqlx::query(gone)
        .bind(long[0].id)
        .execute(&world.stack.pool)
        .await
        .unwrap();
    let shown = get(format!("{control}/v1/datasets/champions/1")).await;
    assert_eq!(
        (&shown["available"], &shown["available_trajectories"], &shown["expired"]),
        (&json!(2), &json!(2), &json!(5)),
        "{shown}"
    );
}

/// The store of payloads of a world, which does not answer while this exists.
struct Down {
    folder: PathBuf,
    aside: PathBuf,
}

impl Down {
    fn new(world: &World) -> Self {
        let folder = world.stack.dir.path().join("payloads").join("payload");
        let aside = folder.with_file_name("aside");
        std::fs::rename(&folder, &aside).unwrap();
        // A folder that is a file: an error that is not `NotFound`.
        std::fs::write(&folder, "").unwrap();
        Down { folder, aside }
    }

    fn end(self) {
        std::fs::remove_file(&self.folder).unwrap();
        std::fs::rename(&self.aside, &self.folder).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn runs_wait_for_a_store_of_payloads_that_is_down_and_miss_nothing() {
    let world = World::start("payloads_down").await;
    world.follow(1, world.base, 0).await;
    let sampled = world.sample(world.base, 4).await;
    insert(&world, &sampled).await;
    for one in &sampled[..2] {
        let bytes = payload::token_bytes(&one.prompt[..2]);
        let prompt = world.payloads().put("default", bytes.into(), TOKEN_IDS).await.unwrap();
        refer(&world.stack.pool, one.id, "prompt", &prompt).await;
        shorten_to(&world.stack.pool, one.id, &one.prompt[2..]).await;
    }
    let control = control(&world).await;
    assert_eq!(size(&dataset(&control, "all", json!({})).await), (4, 4));
    let running = world.run(offline(&world));
    for kind in ["evaluate", "sft", "export"] {
        let down = Down::new(&world);
        let (status, created) = post(format!("{control}/v1/runs"), &json!({"kind": kind, "dataset": "all@1"})).await;
        assert_eq!(status, 201, "{created}");
        let url = format!("{control}/v1/runs/{}", created["id"].as_str().unwrap());
        let messages = async || -> Vec<String> {
            let events = get(format!("{url}/events")).await;
            let events = events["data"].as_array().unwrap().iter();
            events
                .map(|event| event["message"].as_str().unwrap().to_owned())
                .collect()
        };
        eventually("the run says that it waits", SOON, async || {
            let waits = |message: &String| message.starts_with("waits until the store of payloads answers");
            messages().await.iter().any(waits).then_some(())
        })
        .await;
        world.settled().await;
        assert_eq!(get(url.clone()).await["status"], "running", "{kind}");
        down.end();
        let ended = eventually("the run ends", SOON, async || {
            let run = get(url.clone()).await;
            run["finished_at"].is_string().then_some(run)
        })
        .await;
        assert_eq!(ended["status"], "succeeded", "{ended}");
        let used: i64 =
            sqlx::query_scalar("select count(distinct generation_id) from trajectory_use where run_id = $1")
                .bind(created["id"].as_str().unwrap().parse::<Uuid>().unwrap())
                .fetch_one(&world.stack.pool)
                .await
                .unwrap();
        assert_eq!(used, 4, "{kind}: none is missing because of the outage");
        assert!(
            messages()
                .await
                .contains(&"the store of payloads answers again".to_owned())
        );
    }

    // a person can end a run that waits
    let down = Down::new(&world);
    let (_, created) = post(
        format!("{control}/v1/runs"),
        &json!({"kind": "evaluate", "dataset": "all@1"}),
    )
    .await;
    let url = format!("{control}/v1/runs/{}", created["id"].as_str().unwrap());
    eventually("the run waits", SOON, async || {
        (get(url.clone()).await["status"] == "running").then_some(())
    })
    .await;
    post(format!("{url}/cancel"), &json!({})).await;
    eventually("the run is cancelled", SOON, async || {
        (get(url.clone()).await["status"] == "cancelled").then_some(())
    })
    .await;
    down.end();

    // a payload that does not exist is something else
    let folder = world.stack.dir.path().join("payloads").join("payload");
    std::fs::remove_dir_all(folder).unwrap();
    let left = run(&control, json!({"kind": "evaluate", "dataset": "all@1"})).await;
    assert_eq!(left["result"]["refused"], json!({"payload_missing": 2}));
    assert_eq!(size(&left["result"]), (2, 2));
    running.stop().await;
}

/// The generations that each step of a run was trained on.
async fn trained(world: &World, run: Uuid, step: i64) -> BTreeSet<Uuid> {
    let ids: Vec<Uuid> = sqlx::query_scalar("select generation_id from trajectory_use where run_id = $1 and step = $2")
        .bind(run)
        .bind(step)
        .fetch_all(&world.stack.pool)
        .await
        .unwrap();
    ids.into_iter().collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_supervised_run_goes_on_behind_its_last_trajectory_although_others_have_expired() {
    let world = World::start("supervised_restart").await;
    world.follow(1, world.base, 0).await;
    let sampled = world.sample(world.base, 13).await;
    insert(&world, &sampled).await;
    let control = control(&world).await;
    assert_eq!(size(&dataset(&control, "all", json!({})).await), (13, 13));
    // pauses after the first step, whatever the speed
    let pause = "create function pause_after_the_first() returns trigger language plpgsql as
                 $$ begin update run set requested = 'pause' where id = new.run_id and new.step = 1; return new; end $$;
                 create trigger pause_after_the_first after insert on step
                 for each row execute function pause_after_the_first()";
    sqlx::raw_sql(pause).execute(&world.stack.pool).await.unwrap();
    let running = world.run(offline(&world));
    let sft = json!({"kind": "sft", "dataset": "all@1", "base_version": world.base, "batch_size": 3});
    let (status, created) = post(format!("{control}/v1/runs"), &sft).await;
    assert_eq!((status, &created["steps_total"]), (201, &json!(5)));
    let id: Uuid = created["id"].as_str().unwrap().parse().unwrap();
    let url = format!("{control}/v1/runs/{id}");
    let reaches = async |wanted: &str| {
        eventually(wanted, SOON, async || {
            (get(url.clone()).await["status"] == wanted).then_some(())
        })
        .await;
    };
    reaches("paused").await;
    let first = trained(&world, id, 1).await;
    assert_eq!(first.len(), 3);
    // two that were trained on expire, and three that were not
    let rest: Vec<Uuid> = sampled
        .iter()
        .map(|one| one.id)
        .filter(|id| !first.contains(id))
        .collect();
    let expired: Vec<Uuid> = first.iter().take(2).chain(&rest[..3]).copied().collect();
    for sql in [
        "delete from generation where id = any ($1)",
        "delete from trajectory where generation_id = any ($1)",
    ] {
        sqlx::query(sql)
            .bind(&expired)
            .execute(&world.stack.pool)
            .await
            .unwrap();
    }
    let (status, _) = post(format!("{url}/resume"), &json!({})).await;
    assert_eq!(status, 200);
    reaches("succeeded").await;
    running.stop().await;
    let left: BTreeSet<Uuid> = rest[3..].iter().copied().collect();
    let mut pass = Vec::new();
    for step in 2..=4 {
        pass.extend(trained(&world, id, step).await);
    }
    assert_eq!(pass.len(), 7, "three, three and one: none comes twice");
    assert_eq!(pass.into_iter().collect::<BTreeSet<_>>(), left, "none is skipped");
    let passes: Vec<i64> = sqlx::query_scalar("select (metrics -> 'notes' ->> 'pass')::bigint from step order by step")
        .fetch_all(&world.stack.pool)
        .await
        .unwrap();
    assert_eq!(passes, [1, 1, 1, 1, 2]);
}

/// The files under the folder of exports.
fn exported_files(world: &World) -> usize {
    let folder = world.stack.dir.path().join("payloads").join("export");
    let tenants = std::fs::read_dir(folder).into_iter().flatten();
    tenants
        .map(|tenant| std::fs::read_dir(tenant.unwrap().path()).unwrap().count())
        .sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_export_is_deleted_when_one_of_its_rows_expires() {
    let world = World::start("export_expires").await;
    world.follow(1, world.base, 0).await;
    let sampled = world.sample(world.base, 3).await;
    insert(&world, &sampled).await;
    let control = control(&world).await;
    dataset(&control, "all", json!({})).await;
    let running = world.run(offline(&world));
    run(&control, json!({"kind": "export", "dataset": "all@1"})).await;
    let file = format!("{control}/v1/datasets/all/1/export");
    assert_eq!(reqwest::get(&file).await.unwrap().status(), 200);
    assert_eq!(exported_files(&world), 1);
    let expire = "insert into generation_horizon (until_id) values ($1)";
    sqlx::query(expire)
        .bind(sampled[1].id)
        .execute(&world.stack.pool)
        .await
        .unwrap();
    eventually("the file is deleted", SOON, async || {
        (exported_files(&world) == 0).then_some(())
    })
    .await;
    let problem = get(file.clone()).await;
    assert_eq!(problem["status"], 409, "{problem}");
    assert!(
        problem["detail"].as_str().unwrap().contains("export the dataset again"),
        "{problem}"
    );
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_query_of_a_dataset_ends_in_time_and_a_tenant_sees_its_own() {
    let world = World::start("dataset_rows").await;
    for (tenant, version) in [("default", 1), ("theirs", 2)] {
        sqlx::query(
            "insert into dataset (policy, name, version, tenant_id, query, created_by, trajectories, generations, digest)
             values ('demo', 'all', $2, $1, '{}', 'x', 1, 1, '')",
        )
        .bind(tenant)
        .bind(version)
        .execute(&world.stack.pool)
        .await
        .unwrap();
    }
    let pool = world.stack.pool_of("control");
    let mut transaction = store::begin(&pool, Some("theirs")).await.unwrap();
    let timeout: String = sqlx::query_scalar("show statement_timeout")
        .fetch_one(&mut *transaction)
        .await
        .unwrap();
    assert_eq!(timeout, "5min");
    // without any condition
    let seen = "select tenant_id from dataset order by version";
    let rows: Vec<String> = sqlx::query_scalar(seen).fetch_all(&mut *transaction).await.unwrap();
    assert_eq!(rows, ["theirs"]);
    let next: i32 = sqlx::query_scalar("select next_dataset_version('demo', 'all')")
        .fetch_one(&mut *transaction)
        .await
        .unwrap();
    assert_eq!(next, 3, "a name is of the policy");
    transaction.rollback().await.unwrap();
    let rows: Vec<String> = sqlx::query_scalar(seen).fetch_all(&pool).await.unwrap();
    assert_eq!(rows, [""; 0], "whoever names no tenant");
    let mut transaction = store::begin(&pool, None).await.unwrap();
    let rows: Vec<String> = sqlx::query_scalar(seen).fetch_all(&mut *transaction).await.unwrap();
    assert_eq!(rows, ["default", "theirs"], "an administrator");
    let forged = "insert into dataset select 'demo', 'all', 3, 'default', '{}', 'x', now(), 1, 1, ''";
    let mut forger = store::begin(&pool, Some("theirs")).await.unwrap();
    assert!(
        sqlx::query(forged).execute(&mut *forger).await.is_err(),
        "for another tenant"
    );
}
