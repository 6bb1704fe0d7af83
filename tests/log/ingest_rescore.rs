//! Rescoring closed trajectories with another definition gives the same result as if that
//! definition had been in force. The stories of [`crate::ingest_order`] run under one definition,
//! and again under the other in another database.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Output, Stdio};
use std::time::Duration;

use event_log::Producer;
use event_log::event::Event;
use futures::future::try_join_all;
use ingest::reward::{Definition, MetricType};
use rand::SeedableRng;
use rand::rngs::StdRng;
use serde_json::Value;
use sqlx::PgPool;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tokio::process::Command;
use uuid::Uuid;

use crate::ingest_order::{StoryCopy, hold_the_closer, options, release_the_closer, story};
use fixture::ingest::{Service, accept, count, generation, send};
use fixture::{SPRINGTIDE, Stack, eventually};

pub const SEED: u64 = 20_261_123;
pub const STORIES: usize = 150;
const PATIENCE: Duration = Duration::from_secs(120);
const SURFACES: [&str; 3] = ["waiting", "ending", "graded"];

/// Definitions with other horizons, rewards, expressions and rules for closing early.
fn others() -> [ingest::Options; 2] {
    let change = |change: fn(usize, &mut Definition)| {
        let mut options = options();
        options
            .surface
            .iter_mut()
            .enumerate()
            .for_each(|(nth, surface)| change(nth, surface));
        options
    };
    [
        change(|nth, surface| match nth {
            0 => {
                surface.horizon_seconds = 0.9;
                (surface.accept, surface.reject, surface.decline) = (2.0, -1.0, None);
            }
            1 => (surface.close_on_episode_end, surface.horizon_seconds) = (false, 3.25),
            _ => {
                surface.close_on_feedback = false;
                surface.reward = Some("score == null ? null : score - 0.5 * double(all.score.size())".to_owned());
            }
        }),
        change(|nth, surface| match nth {
            0 => {
                surface.close_on_episode_end = true;
                surface.reward = Some("declined ? 0.1 : accept == null ? null : 1.0 / (accept ? 1.0 : 0.0)".to_owned());
            }
            1 => (surface.close_on_episode_end, surface.close_on_feedback) = (false, true),
            _ => {
                (surface.close_on_feedback, surface.close_on_episode_end) = (false, true);
                (surface.metric, surface.metric_type) = ("accept".to_owned(), MetricType::Boolean);
            }
        }),
    ]
}

/// Writes a file for `--definition`.
pub fn write(options: &ingest::Options, file: &Path) {
    let surfaces = serde_json::to_value(&options.surface).unwrap();
    let text = toml::to_string(&serde_json::json!({"ingest": {"surface": surfaces}})).unwrap();
    std::fs::write(file, text).unwrap();
}

pub async fn springtide(stack: &Stack, config: &Path, args: &[&str]) -> Output {
    let output = Command::new(&*SPRINGTIDE)
        .args(["--config", config.to_str().unwrap(), "reward"])
        .args(args)
        .env("SPRINGTIDE__POSTGRES__URL", &stack.database_url)
        .envs(stack.kafka_environment())
        .stdin(Stdio::null())
        .output()
        .await
        .unwrap();
    assert!(
        output.status.success(),
        "{args:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

/// By generation: the reward, its reason and the closing times, as text.
type Scores = BTreeMap<Uuid, String>;

fn as_text(
    reward: Option<f64>,
    code: Option<&str>,
    signal: Option<&str>,
    times: [Option<OffsetDateTime>; 2],
) -> String {
    format!("{reward:?} {code:?} {signal:?} {times:?}")
}

async fn closed(pool: &PgPool) -> Scores {
    type Row = (
        Uuid,
        Option<f64>,
        Option<String>,
        Option<String>,
        Option<OffsetDateTime>,
        Option<OffsetDateTime>,
    );
    let rows: Vec<Row> =
        sqlx::query_as("select generation_id, reward, censor_code, signal, feedback_at, closes_at from trajectory")
            .fetch_all(pool)
            .await
            .unwrap();
    rows.into_iter()
        .map(|(id, reward, code, signal, feedback_at, closes_at)| {
            (
                id,
                as_text(reward, code.as_deref(), signal.as_deref(), [feedback_at, closes_at]),
            )
        })
        .collect()
}

pub fn lines(output: &[u8]) -> Vec<Value> {
    let text = str::from_utf8(output).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn scores(lines: &[Value]) -> Scores {
    let time = |value: &Value| {
        value
            .as_str()
            .map(|text| OffsetDateTime::parse(text, &Rfc3339).unwrap())
    };
    lines
        .iter()
        .map(|line| {
            let times = [time(&line["feedback_at"]), time(&line["closes_at"])];
            let score = as_text(
                line["reward"].as_f64(),
                line["censor_code"].as_str(),
                line["signal"].as_str(),
                times,
            );
            (line["generation_id"].as_str().unwrap().parse().unwrap(), score)
        })
        .collect()
}

async fn rescored(stack: &Stack, config: &Path, definition: &str, more: &[&str]) -> Scores {
    scores(&rescored_lines(stack, config, SURFACES, definition, more).await)
}

pub async fn rescored_lines(
    stack: &Stack,
    config: &Path,
    surfaces: [&str; 3],
    definition: &str,
    more: &[&str],
) -> Vec<Value> {
    let mut all = Vec::new();
    for surface in surfaces {
        let args = ["rescore", "--surface", surface, "--definition", definition];
        let output = springtide(stack, config, &[&args[..], more].concat()).await;
        all.extend(lines(&output.stdout));
    }
    all
}

fn assert_alike(one: &Scores, other: &Scores, what: &str) {
    assert_eq!(one.len(), other.len(), "{what}");
    for (id, score) in one {
        assert_eq!(Some(score), other.get(id), "{what}: {id}");
    }
}

/// Sends `in_time`, waits until everything has closed, and then sends `late`.
pub async fn run_service(name: &str, options: ingest::Options, in_time: &[Event], late: &[Event]) -> Stack {
    let stack = Stack::start(name).await;
    let service = Service::start_with(&stack, options).await;
    hold_the_closer(&stack.pool, &stack.kafka.topics().generation).await;
    let producer = Producer::new(&stack.kafka).unwrap();
    let read = "select coalesce(sum(next_offset), 0)::bigint from consumer_offset where consumer = 'sink'";
    let mut sent = 0;
    for events in [in_time, late] {
        for some in events.chunks(500) {
            let sends = some.iter().map(|event| producer.send_event(event));
            try_join_all(sends).await.unwrap();
        }
        sent += i64::try_from(events.len()).unwrap();
        eventually("the sink reads everything", PATIENCE, async || {
            (count(&stack.pool, read).await == sent).then_some(())
        })
        .await;
        release_the_closer(&stack.pool).await;
        eventually("everything closes", PATIENCE, async || {
            (count(&stack.pool, "select count(*) from open_generation").await == 0).then_some(())
        })
        .await;
    }
    service.stop().await;
    stack
}

#[tokio::test(flavor = "multi_thread")]
async fn rescoring_equals_scoring_under_the_other_definition_from_the_start() {
    let mut rng = StdRng::seed_from_u64(SEED);
    let begin = OffsetDateTime::now_utc() - Duration::from_secs(60);
    let (mut in_time, mut late) = (Vec::new(), Vec::new());
    for nth in 0..STORIES {
        let copy = StoryCopy::new(begin, nth as u64);
        for (nth, step) in story(&mut rng).iter().enumerate() {
            let event = copy.event(step);
            // Some feedback arrives after closing, although it may have been given in time.
            let comes_late = nth % 4 == 3 && step.is_feedback();
            if comes_late { &mut late } else { &mut in_time }.push(event);
        }
    }
    let all = [&in_time[..], &late[..]].concat();
    let first = run_service("rescore", options(), &in_time, &late).await;
    let file = |name: &str| first.dir.path().join(name);
    let config = file("springtide.toml");
    write(&options(), &config);
    let before = closed(&first.pool).await;
    assert!(before.len() > STORIES);

    for late in [
        "select count(*) from feedback where late",
        "select count(*) from retraction where late",
    ] {
        assert!(count(&first.pool, late).await > 10, "{late}");
    }
    // The same definition with the feedback seen at closing gives the same scores.
    assert_alike(
        &rescored(&first, &config, "1", &["--as-seen"]).await,
        &before,
        "the same definition",
    );
    for (nth, other) in others().into_iter().enumerate() {
        let name = format!("other-{nth}.toml");
        let definition = file(&name);
        write(&other, &definition);
        let again = rescored(&first, &config, definition.to_str().unwrap(), &[]).await;
        let fresh = run_service(&format!("rescore-{nth}"), other, &all, &[]).await;
        assert_alike(&again, &closed(&fresh.pool).await, &name);
        let changed = again
            .iter()
            .filter(|(id, score)| before.get(*id) != Some(*score))
            .count();
        assert!(
            changed > before.len() / 4,
            "{name} changed {changed} of {}",
            before.len()
        );
    }
    // Late feedback counts by the time it was given, also under the same definition.
    let fresh = run_service("rescore-same", options(), &all, &[]).await;
    let again = rescored(&first, &config, "1", &[]).await;
    assert_alike(&again, &closed(&fresh.pool).await, "all in time");
    assert_ne!(again, before, "some feedback was late");
    assert_eq!(closed(&first.pool).await, before, "stored trajectories are unchanged");
}

#[tokio::test(flavor = "multi_thread")]
async fn rescoring_handles_undefined_surfaces_and_waits_for_longer_horizons() {
    let stack = Stack::start("rescore-undefined").await;
    let file = |name: &str| stack.dir.path().join(name);
    let config = file("springtide.toml");
    write(&fixture::ingest::options(), &config);
    let service = Service::start_with(&stack, fixture::ingest::options()).await;
    let (mut answered, mut silent) = (generation(), generation());
    for generation in [&mut answered, &mut silent] {
        generation.surface = "new".to_owned();
    }
    let ids = [answered.id, silent.id];
    let feedback = accept(answered.id, true);
    let source = "tests/rescore";
    send(
        &stack,
        &[
            answered.into_event("default", source),
            silent.into_event("default", source),
            feedback,
        ],
    )
    .await;
    eventually("they close", PATIENCE, async || {
        (count(
            &stack.pool,
            "select count(*) from trajectory where censor_code = 'unknown_surface'",
        )
        .await
            == 2)
            .then_some(())
    })
    .await;
    let wait = async |seconds: f64| {
        let definition = Definition {
            name: "new".to_owned(),
            horizon_seconds: seconds,
            ..Definition::completion()
        };
        let options = ingest::Options {
            surface: vec![definition],
            ..ingest::Options::default()
        };
        let (next, out) = (file(&format!("{seconds}.toml")), file(&format!("{seconds}.jsonl")));
        write(&options, &next);
        let args = [
            "rescore",
            "--surface",
            "new",
            "--since",
            "1h",
            "--tenant",
            "default",
            "--definition",
        ];
        let args = [&args[..], &[next.to_str().unwrap(), "--out", out.to_str().unwrap()]].concat();
        let output = springtide(&stack, &config, &args).await;
        (
            lines(&std::fs::read(&out).unwrap()),
            String::from_utf8(output.stderr).unwrap(),
        )
    };
    // Waits until the tables are known to reach beyond the horizon of one second.
    tokio::time::sleep(Duration::from_secs(3)).await;
    let (lines_now, summary) = wait(1.0).await;
    let found = |id: Uuid| {
        lines_now
            .iter()
            .find(|line| line["generation_id"] == id.to_string())
            .unwrap()
    };
    assert_eq!(found(ids[0])["reward"], 0.75);
    assert_eq!(found(ids[0])["closed"]["censor_code"], "unknown_surface");
    assert_eq!(found(ids[0])["closed"]["definition"], 0);
    assert_eq!(found(ids[1])["censor_code"], "no_feedback");
    assert!(summary.contains("2 trajectories: 1 rewarded"), "{summary}");
    assert!(summary.contains("2 differ"), "{summary}");
    let (later, summary) = wait(3600.0).await;
    assert!(later.is_empty(), "{later:?}");
    assert!(summary.contains("left out: 2"), "{summary}");
    let none = springtide(&stack, &config, &["definitions", "--surface", "new"]).await;
    assert!(none.stdout.is_empty() && String::from_utf8_lossy(&none.stderr).contains("ever in force"));
    let known = springtide(&stack, &config, &["definitions", "--surface", "completion", "--json"]).await;
    let known: Vec<Value> = serde_json::from_slice(&known.stdout).unwrap();
    assert_eq!(
        (known.len(), &known[0]["version"], &known[0]["definition"]["accept"]),
        (1, &1.into(), &0.75.into())
    );
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_open_generation_gets_the_longer_horizon_after_a_change() {
    let stack = Stack::start("longer-horizon").await;
    let mut options = fixture::ingest::options();
    options.surface[0].horizon_seconds = 1.0;
    let service = Service::start_with(&stack, options.clone()).await;
    hold_the_closer(&stack.pool, &stack.kafka.topics().generation).await;
    let generation = fixture::ingest::generation();
    let (id, began) = (generation.id, OffsetDateTime::now_utc());
    send(&stack, &[generation.into_event("default", "tests/rescore")]).await;
    eventually("it is stored", PATIENCE, async || {
        (count(&stack.pool, "select count(*) from open_generation").await == 1).then_some(())
    })
    .await;
    service.stop().await;
    options.surface[0].horizon_seconds = 6.0;
    let service = Service::start_with(&stack, options).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    send(&stack, &[accept(id, true)]).await;
    release_the_closer(&stack.pool).await;
    let trajectory = fixture::ingest::trajectory(&stack.pool, id).await;
    assert_eq!(trajectory, fixture::ingest::Trajectory::rewarded(0.75, "accept"));
    let (version, closes_at): (i32, OffsetDateTime) =
        sqlx::query_as("select reward_definition, closes_at from trajectory where generation_id = $1")
            .bind(id)
            .fetch_one(&stack.pool)
            .await
            .unwrap();
    assert_eq!(version, 2);
    assert!(closes_at - began > Duration::from_secs(5), "{closes_at}");
    service.stop().await;
}
