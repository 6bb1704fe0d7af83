//! A process is killed while it asks, stores and sends answers: every text gets exactly one.

use std::fs;
use std::net::SocketAddr;
use std::time::Duration;

use event_log::event::Generation;
use serde_json::json;
use tokio::process::{Child, Command};

use super::endpoint::{Endpoint, Reply};
use super::world::{SOON, becomes, feedback_id, judge_of, on, send_queued, with_judges};
use fixture::ingest::{Service, Trajectory, count, trajectory};
use fixture::{Stack, eventually, process};

const TEXTS: usize = 60;
const KILLS: usize = 4;
const CANARY: &str = "qzcanary";
const ANSWERS: &str = "select count(*) from feedback where metric_name = 'dissatisfied'";

/// `springtide ingest` with a judge whose key it must not print.
async fn start(stack: &Stack, endpoint: &Endpoint) -> Child {
    let options = with_judges([judge_of(endpoint)]);
    let mut judges = serde_json::to_value(&options.judge).unwrap();
    judges[0]["api_key"] = json!(format!("{CANARY}-key"));
    judges[0]["concurrency"] = json!(3);
    let judge = judges[0].as_object_mut().unwrap();
    judge.retain(|_, value| !value.is_null()); // TOML has no null
    let config = json!({"ingest": {
        "surface": serde_json::to_value(&options.surface).unwrap(),
        "metric": [{"name": "dissatisfied", "type": "boolean"}, {"name": "mood", "type": "float"},
                   {"name": "follow_up", "type": "comment"}],
        "judge": judges,
    }});
    fs::write(
        stack.dir.path().join("springtide.toml"),
        toml::to_string(&config).unwrap(),
    )
    .unwrap();
    let [port] = edge::bind::free_ports().unwrap();
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let mut command = stack.springtide(&["ingest"]);
    command
        .env("SPRINGTIDE__LISTEN__INGEST", address.to_string())
        .env("SPRINGTIDE__POSTGRES__URLS__INGEST", stack.url_of("ingest"))
        .env("SPRINGTIDE__TELEMETRY__FILTER", "debug")
        .envs(stack.kafka_environment());
    process::start(Command::from(command), address, &log(stack)).await
}

fn log(stack: &Stack) -> std::path::PathBuf {
    stack.dir.path().join("ingest.log")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_process_leaves_each_text_with_exactly_one_answer_and_no_text_in_its_log() {
    let stack = Stack::start("judge-kills").await;
    let endpoint = Endpoint::start(|text, before| match before {
        // Some of them fail at first, so that there is something to log.
        0 if text.ends_with('7') => Reply::Status(500, None),
        _ => Reply::answer(text.contains("bad")),
    })
    .await;
    let mut process = start(&stack, &endpoint).await;
    let words: Vec<String> = (0..TEXTS)
        .map(|nth| format!("{CANARY}-text {} {nth}", if nth % 3 == 0 { "bad" } else { "good" }))
        .collect();
    let generations: Vec<Generation> = words.iter().map(|_| on("chat")).collect();
    let turns: Vec<(&Generation, &str)> = generations.iter().zip(words.iter().map(String::as_str)).collect();
    for (nth, some) in turns.chunks(TEXTS / (KILLS + 1)).enumerate() {
        let asked = endpoint.questions().len();
        send_queued(&stack, some).await;
        if nth < KILLS {
            eventually("it asks", SOON, async || {
                (endpoint.questions().len() > asked).then_some(())
            })
            .await;
            process.kill().await.unwrap();
            process = start(&stack, &endpoint).await;
        }
    }
    for (generation, text) in &turns {
        let reward = if text.contains("bad") { -1.0 } else { 0.5 };
        assert_eq!(
            trajectory(&stack.pool, generation.id).await,
            Trajectory::rewarded(reward, "expression"),
            "{text}"
        );
    }
    assert_eq!(count(&stack.pool, ANSWERS).await, TEXTS as i64);
    let judged = "select count(distinct j.feedback_id) from judgement j join feedback a on a.id = j.answer_id";
    assert_eq!(count(&stack.pool, judged).await, TEXTS as i64);
    becomes(
        &stack.pool,
        "select count(*) from judgement where next_at is not null",
        0,
    )
    .await;
    process.kill().await.unwrap();
    let printed = fs::read_to_string(log(&stack)).unwrap();
    assert!(
        printed.contains("the judge did not answer"),
        "it logs that requests fail"
    );
    assert!(!printed.contains(CANARY), "a text or the key is in the log");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_was_stored_is_sent_and_one_that_was_sent_is_the_same_event() {
    let stack = Stack::start("judge-resend").await;
    let endpoint = Endpoint::start(|_, _| Reply::answer(true)).await;
    let options = with_judges([judge_of(&endpoint)]);
    let service = Service::start_with(&stack, options.clone()).await;
    let (sent, unsent) = (on("chat"), on("chat"));
    let texts = send_queued(
        &stack,
        &[(&sent, "killed after sending"), (&unsent, "killed before sending")],
    )
    .await;
    becomes(&stack.pool, "select count(*) from judgement where next_at is null", 2).await;
    becomes(&stack.pool, ANSWERS, 2).await;
    service.stop().await;
    // What a process leaves that is killed between the steps.
    let answer = "select answer_id from judgement where feedback_id = $1";
    let answer: uuid::Uuid = sqlx::query_scalar(answer)
        .bind(feedback_id(&texts[1]))
        .fetch_one(&stack.pool)
        .await
        .unwrap();
    for undo in [
        "delete from feedback where id = $1",
        "delete from event_key where event_id = ($1::uuid)::text",
        "update judgement set next_at = now() where answered_at is not null and $1::uuid is not null",
    ] {
        sqlx::query(undo).bind(answer).execute(&stack.pool).await.unwrap();
    }
    let service = Service::start_with(&stack, options).await;
    becomes(&stack.pool, "select count(*) from judgement where next_at is null", 2).await;
    becomes(&stack.pool, ANSWERS, 2).await;
    let same = "select count(*) from judgement j join feedback a on a.id = j.answer_id and a.value_bool = j.value_bool";
    assert_eq!(count(&stack.pool, same).await, 2);
    assert_eq!(endpoint.questions().len(), 2, "nobody was asked again");
    eventually("both records are read", Duration::from_secs(120), async || {
        let read = "select coalesce(sum(next_offset), 0)::bigint from consumer_offset where consumer = 'sink'";
        // Two generations, two texts, and each answer twice.
        (count(&stack.pool, read).await == 8).then_some(())
    })
    .await;
    assert_eq!(count(&stack.pool, ANSWERS).await, 2);
    service.stop().await;
}
