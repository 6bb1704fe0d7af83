//! Canary strings: texts of users, token ids and API keys are sent to every role of a real stack,
//! with errors of many kinds, at log level debug and with traces on. Then they are looked for where
//! they must not be: logs of roles and servers, traces, metrics, answers to other callers, process
//! arguments, environments that others can read, and files that others can read. Tables, the log and
//! the dead-letter queue hold them.
//!
//! What callers choose as identifiers (ids and sources of events, ids of tasks) is no secret.

mod requests;
mod secrets;
mod world;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::Duration;

use event_log::event::{Constraint, Generation, Sampling};
use nix::sys::signal::{Signal, kill};
use serde_json::json;
use sqlx::postgres::PgPoolOptions;
use uuid::Uuid;

use crate::up::Place;
use fixture::telemetry::Collector as TraceCollector;
use fixture::{SPRINGTIDE, eventually};
use requests::{bad_requests, feedback, forged, poison, prompt, questions};
use secrets::{Secrets, readable, visible_of_process};
use world::{Beside, Keys, World, configure, stop};

const START: Duration = Duration::from_secs(300);
const SOON: Duration = Duration::from_secs(300);

/// Part of every text.
const CANARY: &str = "qzcanary7f3a";
/// Ids of a prompt, and of a logged generation. No process has a reason to print them in a row.
const PROMPT_IDS: [u32; 12] = [1717, 911, 1203, 87, 1999, 642, 1388, 205, 1871, 33, 1502, 760];
const SAMPLED_IDS: [u32; 8] = [1931, 407, 1166, 58, 1777, 930, 1245, 19];

fn text(kind: &str) -> String {
    format!("{CANARY}-{kind}")
}

/// The text of `/metrics` of every role.
async fn metrics(place: &Place, world: &World) -> String {
    let mut all = String::new();
    let train = format!("http://127.0.0.1:{}", place.ports[3]);
    for base in [
        &world.serve,
        &world.ingest,
        &world.control,
        &train,
        &world.relay,
        &world.collector,
    ] {
        // a role that lost the database may be about to start again
        let answer = eventually(&format!("{base} answers"), SOON, async || {
            reqwest::get(format!("{base}/metrics")).await.ok()
        })
        .await;
        assert_eq!(answer.status(), 200, "{base}");
        all += &answer.text().await.unwrap();
    }
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn texts_and_keys_are_found_only_in_tables_and_in_the_log() {
    let place = Place::new();
    let keys = Keys::make(&place).await;
    let (traces, address) = TraceCollector::start().await;
    configure(&place, &keys, &address.to_string());
    let temporary = place.dir.path().join("tmp");
    fs::create_dir(&temporary).unwrap();
    fs::set_permissions(&temporary, fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = Command::new("sh");
    command
        .current_dir(place.dir.path())
        .args(["-c", "umask 022 && exec \"$0\" up", &SPRINGTIDE])
        .env("TMPDIR", &temporary)
        .env("OTEL_BSP_SCHEDULE_DELAY", "200");
    let mut up = place.start_command(command);
    up.says(&["Springtide is up."], START).await;

    let [serve, ingest, control, ..] = place.ports.map(|port| format!("http://127.0.0.1:{port}"));
    let caller_key = text("caller-key");
    let store = format!("file://{}", place.state("store").display());
    let secrets_of_relay = [("SPRINGTIDE__RELAY__CALLER_KEY", &*caller_key)];
    let listen = "SPRINGTIDE__RELAY__LISTEN";
    let relay = Beside::start(
        &place,
        "relay",
        &["relay", "--upstream", &store],
        listen,
        &secrets_of_relay,
    )
    .await;
    let spool = place.state("collector-spool").display().to_string();
    let secrets_of_collector = [
        ("SPRINGTIDE__SPOOL__CALLER_KEY", &*caller_key),
        ("SPRINGTIDE__SPOOL__API_KEY", &*keys.collector),
    ];
    let args = ["ingest", "--spool", &spool, "--upstream", &ingest];
    let listen = "SPRINGTIDE__LISTEN__INGEST";
    let collector = Beside::start(&place, "collector", &args, listen, &secrets_of_collector).await;
    let world = World {
        http: reqwest::Client::new(),
        serve,
        ingest,
        control,
        relay: relay.url.clone(),
        collector: collector.url.clone(),
        pool: PgPoolOptions::new()
            .max_connections(4)
            .connect_lazy(&place.database_url())
            .unwrap(),
    };

    let mut secrets = Secrets(vec![]);
    secrets.text("a canary", CANARY);
    for key in keys.all() {
        // the whole key, and one that is cut off
        secrets.text("an API key", &key[..24]);
    }
    secrets.tokens("a prompt's tokens", &PROMPT_IDS);
    secrets.tokens("a generation's tokens", &SAMPLED_IDS);

    // Completions, and everything that is said about them.
    let completions = format!("{}/v1/completions", world.serve);
    let mut choices = Vec::new();
    for index in 0..8 {
        let mut body = prompt();
        match index {
            1 => body["stream"] = json!(true),
            2 => body["prompt"] = json!(PROMPT_IDS),
            3 => body["surface"] = json!("broken"),
            4 => body["surface"] = json!(text("surface")),
            _ => {}
        }
        let answer = world.until(200, &completions, &keys.app, &body).await;
        choices.extend(answer["choices"].get(0).cloned());
    }
    assert!(choices.len() >= 7, "all but the stream: {choices:?}");
    for choice in &choices {
        let ids: Vec<u32> = serde_json::from_value(choice["token_ids"].clone()).unwrap();
        secrets.tokens("a completion's tokens", &ids);
        let sampled = choice["text"].as_str().unwrap().trim();
        // bytes that are no UTF-8 look alike when they are printed
        if sampled.len() >= 16 && !sampled.contains(char::REPLACEMENT_CHARACTER) {
            secrets.0.push(("a completion".to_owned(), sampled.to_owned()));
        }
    }
    let generations: Vec<&str> = choices
        .iter()
        .map(|choice| choice["generation_id"].as_str().unwrap())
        .collect();
    let said = format!("{}/v1/feedback", world.ingest);
    let mut comment = feedback(generations[0], "comment", text("comment"));
    for (about, metric, value) in [
        (generations[0], "demonstration", json!(text("demonstration"))),
        (generations[0], "accept", json!(true)),
        (generations[2], "comment", json!(text("reward-error"))), // the surface whose expression fails
    ] {
        let (status, answer) = world.post(&said, &keys.app, &feedback(about, metric, value)).await;
        assert_eq!(status, 200, "{metric}: {answer}");
    }
    assert_eq!(world.post(&said, &keys.app, &comment).await.0, 200);
    comment["value"] = json!(text("another-comment"));
    assert_eq!(world.post(&said, &keys.app, &comment).await.0, 409);
    let generation = Generation {
        user_key: text("logged-user"),
        prompt_ids: PROMPT_IDS.to_vec(),
        sampling: Some(Sampling {
            constraint: Some(Constraint {
                format: "json_schema/1 llguidance/1.9.1".to_owned(),
                schema: json!({"const": text("schema")}).to_string(),
            }),
            ..Sampling::default()
        }),
        ..fixture::ingest::generation()
    };
    let logged = format!("{}/v1/generations", world.ingest);
    let body = serde_json::to_value(&generation).unwrap();
    let (status, answer) = world.post(&logged, &keys.app, &body).await;
    assert_eq!(status, 200, "{answer}");
    let forgery = forged(&place, &choices[0]);
    let (status, answer) = world.post(&logged, &keys.app, &forgery).await;
    assert_eq!(status, 200, "{answer}");
    let praise = feedback(forgery["generation_id"].as_str().unwrap(), "accept", true);
    let (status, answer) = world.post(&said, &keys.app, &praise).await;
    assert_eq!(status, 200, "{answer}");
    // Through the collector, also what only the upstream refuses.
    let spooled = format!("{}/v1/feedback", world.collector);
    let late = feedback(generations[1], "comment", text("spooled"));
    assert_eq!(world.post(&spooled, &caller_key, &late).await.0, 202);
    comment["value"] = json!(text("spooled-conflict"));
    assert_eq!(world.post(&spooled, &caller_key, &comment).await.0, 202);
    // Runs: one that finds nothing to learn, and one whose prompt does not fit.
    let runs = format!("{}/v1/runs", world.control);
    let task = json!({"prompt": text("task-prompt"), "answer": text("task-answer")});
    let run =
        json!({"kind": "grpo", "steps": 1, "group_size": 2, "tasks_per_step": 1, "max_tokens": 4, "tasks": [task]});
    let (status, made) = world.post(&runs, &keys.app, &run).await;
    assert_eq!(status, 201, "{made}");
    let run = made["id"].as_str().unwrap().to_owned();
    let long: String = (0..200)
        .map(|index| format!("{} {index} ", text("long-task")))
        .collect();
    let task = json!({"prompt": long, "answer": text("task-answer")});
    let body = json!({"kind": "grpo", "steps": 1, "group_size": 2, "tasks_per_step": 1, "tasks": [task]});
    assert_eq!(world.post(&runs, &keys.app, &body).await.0, 201);

    // Everything that is refused, by every role, with every key.
    let mut statuses = BTreeSet::new();
    for (role, method, url, headers, body) in bad_requests(&world) {
        let headers: Vec<(&str, &str)> = headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
        let own = match role {
            "relay" | "collector" => &caller_key,
            _ => &keys.app,
        };
        let wrong = text("unknown-key");
        for key in [own, &wrong, &keys.revoked, &keys.other, &String::new()] {
            statuses.insert(world.send(method, &url, key, &headers, body.clone()).await.0);
        }
    }
    assert!(
        [400, 401, 403, 404].iter().all(|status| statuses.contains(status)),
        "{statuses:?}"
    );
    poison(&place).await;
    let rows = "select count(*) from trajectory where censor_code = 'reward_error'";
    world.becomes("the broken expression fails", rows, 1).await;
    let rows = "select count(*) from disposition where code = 'quarantined_logprob'";
    world.becomes("the forgery is quarantined", rows, 1).await;
    let rows = "select count(*) from run where kind = 'grpo' and status in ('failed', 'succeeded', 'paused')";
    world.becomes("both runs end", rows, 2).await;
    let dead = "springtide_ingest_dead_letters_total";
    eventually("poison and conflicts are dead letters", SOON, async || {
        let text = metrics(&place, &world).await;
        let lines = text.lines().filter(|line| line.starts_with(dead));
        let count: f64 = lines
            .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
            .sum();
        (count >= 2.0).then_some(())
    })
    .await;

    // The database refuses a row, and fails under traffic.
    let insert = "insert into feedback (id, tenant_id, metric_name, value_text, given_at) \
                  values ($1, 'default', 'comment', $2, now())"; // without a target
    let violation = sqlx::query(insert)
        .bind(Uuid::now_v7())
        .bind(text("violation"))
        .execute(&world.pool)
        .await;
    assert!(violation.is_err());
    kill(up.parts()["postgres"], Signal::SIGKILL).unwrap();
    // Some of these fail and some wait until it is back, depending on when its restart is done.
    let mut accepted = 0;
    for _ in 0..20 {
        let comment = feedback(generations[3], "comment", text("without-database"));
        accepted += i64::from(world.post(&said, &keys.app, &comment).await.0 == 200);
        let dry = format!("{said}?dryrun=true");
        world.post(&dry, &keys.app, &comment).await;
        let ledger = format!("{}/v1/ledger", world.control);
        world.send("GET", &ledger, &keys.app, &[], vec![]).await;
    }
    up.says(&["postgres is back"], START).await;
    let rows = "select count(*) from feedback where value_text like 'qzcanary7f3a-without%'";
    eventually("the sink goes on", SOON, async || {
        let count: i64 = sqlx::query_scalar(rows).fetch_one(&world.pool).await.ok()?;
        // more, if one was logged and its answer did not arrive in time
        (count >= accepted).then_some(())
    })
    .await;

    // What others are told.
    let mut answers = Vec::new();
    for url in questions(&world, generations[0], &run) {
        for key in [&keys.other, &String::new()] {
            let (status, answer) = world.send("GET", &url, key, &[], vec![]).await;
            answers.extend(format!("\n{status} {url}\n").into_bytes());
            answers.extend(answer);
        }
    }
    let theirs = [
        (&said, comment.clone()),
        (&said, feedback(generations[0], "comment", "mine")),
        (&logged, json!({"generation_id": generations[0]})),
    ];
    for (url, mut body) in theirs {
        body["value"] = json!("mine");
        body["tags"] = json!({});
        let (_, answer) = world.post(url, &keys.other, &body).await;
        answers.extend(answer.to_string().into_bytes());
    }

    let metrics = metrics(&place, &world).await;
    let mut processes = Vec::new();
    let mut family: Vec<i32> = up.family().into_iter().collect();
    family.extend([relay.pid(), collector.pid()]);
    for pid in family {
        processes.extend(visible_of_process(pid));
        processes.push(b'\n');
    }
    // Now they are in the tables: what follows looks for something that was really there.
    for rows in [
        "select count(*) from feedback where value_text = 'qzcanary7f3a-comment'",
        "select count(*) from feedback where value_text = 'qzcanary7f3a-spooled'",
        "select count(*) from feedback where value_text = 'qzcanary7f3a-demonstration'",
        "select count(*) from generation where user_key = 'qzcanary7f3a-user'",
        "select count(*) from task where prompt = 'qzcanary7f3a-task-prompt'",
    ] {
        world.becomes(rows, rows, 1).await;
    }

    // The last lines and spans come at the end.
    world.pool.close().await;
    relay.stop();
    collector.stop();
    stop(&place, up).await;
    let spans = traces.bytes();
    let seen = String::from_utf8_lossy(&spans).into_owned();
    for role in ["springtide-serve", "springtide-ingest", "springtide-control"] {
        assert!(seen.contains(role), "no spans of {role}");
    }
    for attribute in [
        "gen_ai.request.model",
        "gen_ai.usage.output_tokens",
        "gen_ai.response.finish_reasons",
    ] {
        assert!(seen.contains(attribute), "no span has {attribute}");
    }
    secrets.assert_absent("a span", &spans);
    secrets.assert_absent("a metric", metrics.as_bytes());
    secrets.assert_absent("an answer to another caller", &answers);
    secrets.assert_absent("the arguments or the environment of a process", &processes);
    let mut logs = 0;
    for folder in [place.state("log"), place.dir.path().to_owned()] {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "log") {
                let log = fs::read(&path).unwrap();
                assert!(!log.is_empty(), "{} is empty", path.display());
                secrets.assert_absent(&path.display().to_string(), &log);
                logs += 1;
            }
        }
    }
    assert!(
        logs >= 9,
        "four roles, two servers, the supervisor, relay and collector: {logs}"
    );
    let mut files = Vec::new();
    readable(place.dir.path(), &mut files);
    for file in &files {
        secrets.assert_absent(&file.display().to_string(), &fs::read(file).unwrap());
    }
}
