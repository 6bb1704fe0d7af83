//! This build reads what earlier builds wrote. `tests/upgrade/DATE.tar.gz` contains a small store,
//! the database, the records of all topics, a follower's state and a collector's spool, as the
//! commit of that date wrote them (`tests/upgrade/README.md`). Archives are never changed. A change
//! of a format adds one. `rows.rs` migrates a database with many rows.

mod rows;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use base64::Engine;
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord};
use serde::Deserialize;
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};
use tokio::net::TcpListener;

use crate::ingest::{Service, count};
use crate::spine::Fleet;
use crate::spool;
use crate::support::{SPRINGTIDE, Stack, eventually};

const SOON: Duration = Duration::from_secs(90);
/// The newest version of the archive, which `champion` named.
const NEWEST: i64 = 17;

/// Unpacks the archive into the stack's folder.
fn unpack(stack: &Stack) -> PathBuf {
    let archive = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/upgrade/2026-11-22.tar.gz");
    let folder = stack.dir.path().join("old");
    std::fs::create_dir(&folder).unwrap();
    let mut tar = Command::new("tar");
    let status = tar.arg("-xzf").arg(archive).arg("-C").arg(&folder).status().unwrap();
    assert!(status.success(), "tar -xzf failed");
    folder
}

fn read_json(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Runs `springtide policy …` on the archive's store and returns what it printed.
fn policy(folder: &Path, arguments: &[&str]) -> String {
    let output = Command::new(SPRINGTIDE)
        .arg("policy")
        .args(arguments)
        .args(["--policy", "demo", "--store"])
        .arg(format!("file://{}", folder.join("store").display()))
        .arg("--keys")
        .arg(folder.join("keys"))
        .current_dir(folder)
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "policy {arguments:?}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_old_store_is_sound_and_its_versions_have_the_bytes_they_had() {
    let stack = Stack::start("upgrade_store").await;
    let folder = unpack(&stack);
    policy(&folder, &["fsck"]);
    let before = read_json(&folder.join("versions.json"));
    for version in before.as_array().unwrap() {
        let serial = version["version"].to_string();
        let printed = policy(&folder, &["verify", &serial]);
        let root = version["root"].as_str().unwrap();
        assert!(printed.contains(root), "version {serial} is not {root}: {printed}");
    }
    assert_eq!(before.as_array().unwrap().len() as i64, NEWEST);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_old_database_and_store_go_on_where_they_were() {
    let stack = Stack::start("upgrade_database").await;
    let fleet = old_database_goes_on(&stack, "").await;
    // no arms are configured, so it has the new default ones: learner begins where champion was
    assert_eq!(
        arms(&stack).await,
        json!([{"alias": "learner", "weight": 0.3, "explore": 0.02},
               {"alias": "champion", "weight": 0.5, "explore": 0.0},
               {"alias": "base", "weight": 0.2, "explore": 0.0}])
    );
    eventually("the run learns from learner", SOON, async || {
        (learns_from(&stack).await == "learner").then_some(())
    })
    .await;
    let first = "select version from assignment where alias = 'learner' order by epoch limit 1";
    assert_eq!(count(&stack.pool, first).await, NEWEST);
    fleet.springtide(&["audit", "verify"]);
}

/// The arms that the configuration of that time named, without `trainer.realtime.alias`.
const OLD_ARMS: &str = "
    [[release.arm]]
    alias = 'champion'
    weight = 0.6
    explore = 0.02
    [[release.arm]]
    alias = 'base'
    weight = 0.4";

#[tokio::test(flavor = "multi_thread")]
async fn an_old_configuration_goes_on_learning_from_champion() {
    let stack = Stack::start("upgrade_arms").await;
    let fleet = old_database_goes_on(&stack, OLD_ARMS).await;
    assert_eq!(
        arms(&stack).await,
        json!([{"alias": "champion", "weight": 0.6, "explore": 0.02},
               {"alias": "base", "weight": 0.4, "explore": 0.0}])
    );
    assert_eq!(learns_from(&stack).await, "champion");
    let learner = "select count(*) from assignment where alias = 'learner'";
    assert_eq!(count(&stack.pool, learner).await, 0);
    fleet.springtide(&["audit", "verify"]);
}

/// The arms in force, which the release loop wrote from the configuration and without a salt.
async fn arms(stack: &Stack) -> Value {
    let sql = "select arms from experiment where source = 'configuration' and salt = ''";
    sqlx::query_scalar(sql).fetch_one(&stack.pool).await.unwrap()
}

async fn learns_from(stack: &Stack) -> String {
    let sql = "select coalesce((select data ->> 'learns_from' from run_event where data ? 'learns_from'
                                order by id desc limit 1), 'champion')";
    sqlx::query_scalar(sql).fetch_one(&stack.pool).await.unwrap()
}

/// Restores the archive's database and store, and runs this build on them until the run that was
/// there has made a version that `champion` serves. `sections` are added to the configuration.
async fn old_database_goes_on(stack: &Stack, sections: &str) -> Fleet {
    let folder = unpack(stack);
    restore(stack, &std::fs::read_to_string(folder.join("database.sql")).unwrap()).await;
    sqlx::migrate!().run(&stack.pool).await.unwrap();
    for part in ["store", "keys"] {
        std::fs::rename(folder.join(part), stack.dir.path().join(part)).unwrap();
    }
    let follower = stack.dir.path().join(".springtide/serve");
    std::fs::create_dir_all(&follower).unwrap();
    std::fs::rename(folder.join("follow-demo.json"), follower.join("follow-demo.json")).unwrap();

    // the topics of this test's broker are empty: the tables were filled from another log
    let more = format!("accept_other_log = true\nretention_days = 0{sections}");
    let fleet = Fleet::start_with(stack, &folder.join("base"), &more);
    let first = eventually("the fleet answers", SOON, async || fleet.complete("someone").await).await;
    let before = read_json(&folder.join("versions.json"));
    let named = before
        .as_array()
        .unwrap()
        .iter()
        .find(|v| v["version"] == first["version"]);
    assert_eq!(first["root"], named.unwrap()["root"], "the version has other bytes now");

    // the run goes on from its old state: the next version is made from the newest one
    let trained = fleet.until_version_above(NEWEST, &mut Vec::new()).await;
    let serial = trained["version"].as_i64().unwrap();
    let parent: i64 = sqlx::query_scalar("select parent from version where policy = 'demo' and serial = $1")
        .bind(NEWEST + 1)
        .fetch_one(&stack.pool)
        .await
        .unwrap();
    assert_eq!(parent, NEWEST, "version {serial} serves");
    let steps = "select count(*) from step where step > 16";
    assert!(count(&stack.pool, steps).await >= 1, "steps are numbered on");

    let trained = "select count(*) from disposition where kind = 'trained' and step <= 16";
    let before = read_json(&folder.join("ledger.json"))["trained"].as_i64().unwrap();
    assert_eq!(count(&stack.pool, trained).await, before, "old dispositions stand");
    let used = "select count(*) from trajectory_use u join disposition d using (generation_id, run_id, step)
                where u.purpose = 'trained' and d.kind = 'trained' and step <= 16 and u.used_at = d.decided_at";
    assert_eq!(count(&stack.pool, used).await, before, "each is a use");
    fleet
}

/// Puts a dump into the stack's database, in place of everything there.
async fn restore(stack: &Stack, dump: &str) {
    // psql's own commands
    let statements: Vec<&str> = dump.lines().filter(|line| !line.starts_with('\\')).collect();
    let mut connection = PgConnection::connect(&stack.database_url).await.unwrap();
    let empty = "drop schema public cascade; create schema public";
    connection.execute(AssertSqlSafe(empty)).await.unwrap();
    connection.execute(AssertSqlSafe(statements.join("\n"))).await.unwrap();
    connection.close().await.unwrap();
}

/// A record of a topic as it was; bytes are in Base64.
#[derive(Deserialize)]
struct ArchivedRecord {
    topic: String,
    partition: i32,
    key: String,
    headers: Vec<(String, String)>,
    value: String,
}

#[tokio::test(flavor = "multi_thread")]
async fn an_old_topic_is_read_to_the_same_rows() {
    let stack = Stack::start("upgrade_topic").await;
    let folder = unpack(&stack);
    let records: Vec<ArchivedRecord> = serde_json::from_value(read_json(&folder.join("topics.json"))).unwrap();
    let bytes = |text: &str| base64::engine::general_purpose::STANDARD.decode(text).unwrap();
    let topics = stack.kafka.topics();
    let producer: FutureProducer = stack.kafka.config(&[]).create().unwrap();
    for record in records.iter().filter(|record| record.topic != "dlq") {
        let topic = match record.topic.as_str() {
            "generation" => &topics.generation,
            "feedback" => &topics.feedback,
            _ => &topics.version,
        };
        let headers = record
            .headers
            .iter()
            .fold(OwnedHeaders::new(), |headers, (key, value)| {
                headers.insert(Header {
                    key,
                    value: Some(&bytes(value)),
                })
            });
        let (key, value) = (bytes(&record.key), bytes(&record.value));
        let sent = FutureRecord::to(topic)
            .partition(record.partition)
            .key(&key)
            .payload(&value)
            .headers(headers);
        producer.send(sent, SOON).await.unwrap();
    }

    let service = Service::start(&stack).await;
    for (query, rows) in [
        ("select count(*) from generation", 480),
        ("select count(*) from feedback", 388),
        ("select count(*) from retraction", 1),
        ("select count(*) from episode_end", 1),
    ] {
        eventually(&format!("{rows} rows of {query}"), SOON, async || {
            (count(&stack.pool, query).await == rows).then_some(())
        })
        .await;
    }
    // one record was no event
    crate::ingest::dead_letters(&stack, 1).await;
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_old_spool_is_forwarded() {
    let stack = Stack::start("upgrade_spool").await;
    let folder = unpack(&stack);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let upstream = listener.local_addr().unwrap();
    let _ingest = spool::ingest(&stack, listener);
    let _collector = spool::Collector::start(&folder, upstream, None).await;
    eventually("the three events of the spool are stored", SOON, async || {
        (count(&stack.pool, "select count(*) from feedback").await == 3).then_some(())
    })
    .await;
}
