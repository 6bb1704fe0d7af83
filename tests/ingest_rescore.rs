//! What was closed by one definition is scored again by another as if that one had been in force: the stories of
//! [`crate::ingest_order`] told under the first, then again under the other, in a database of its own.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Output, Stdio};
use std::time::Duration;

use futures::future::try_join_all;
use ingest::event::Event;
use ingest::log::Producer;
use ingest::reward::{Definition, MetricType};
use rand::SeedableRng;
use rand::rngs::StdRng;
use serde_json::Value;
use sqlx::PgPool;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tokio::process::Command;
use uuid::Uuid;

use crate::ingest::{Service, accept, count, generation, send};
use crate::ingest_order::{Telling, hold_the_closer, options, release_the_closer, story};
use crate::support::{SPRINGTIDE, Stack, eventually};

const SEED: u64 = 20_261_123;
const STORIES: usize = 150;
const PATIENCE: Duration = Duration::from_secs(120);
const SURFACES: [&str; 3] = ["waiting", "ending", "graded"];

/// Shorter and longer horizons, other worths, expressions, and other ways to close early, each of them on some surface.
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

/// As a file that `--definition` takes.
fn write(options: &ingest::Options, file: &Path) {
    let surfaces = serde_json::to_value(&options.surface).unwrap();
    let text = toml::to_string(&serde_json::json!({"ingest": {"surface": surfaces}})).unwrap();
    std::fs::write(file, text).unwrap();
}

async fn springtide(stack: &Stack, config: &Path, args: &[&str]) -> Output {
    let output = Command::new(SPRINGTIDE)
        .args(["--config", config.to_str().unwrap(), "reward"])
        .args(args)
        .env("SPRINGTIDE__POSTGRES__URL", &stack.database_url)
        .env("SPRINGTIDE__KAFKA__BROKERS", &stack.kafka.brokers)
        .env("SPRINGTIDE__KAFKA__TOPIC_PREFIX", &stack.kafka.topic_prefix)
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

/// By generation: what it is worth, why, and until when it was waited for.
type Scores = BTreeMap<Uuid, String>;

fn in_words(
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
                in_words(reward, code.as_deref(), signal.as_deref(), [feedback_at, closes_at]),
            )
        })
        .collect()
}

fn lines(output: &[u8]) -> Vec<Value> {
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
            let score = in_words(
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
    let mut all = Scores::new();
    for surface in SURFACES {
        let args = ["rescore", "--surface", surface, "--definition", definition];
        let output = springtide(stack, config, &[&args[..], more].concat()).await;
        all.extend(scores(&lines(&output.stdout)));
    }
    all
}

fn assert_alike(one: &Scores, other: &Scores, what: &str) {
    assert_eq!(one.len(), other.len(), "{what}");
    for (id, score) in one {
        assert_eq!(Some(score), other.get(id), "{what}: {id}");
    }
}

/// Tells `in_time`, lets everything close, and tells what comes late.
async fn tell(name: &str, options: ingest::Options, in_time: &[Event], late: &[Event]) -> Stack {
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
async fn another_definition_scores_what_was_closed_as_if_it_had_been_in_force() {
    let mut rng = StdRng::seed_from_u64(SEED);
    let begin = OffsetDateTime::now_utc() - Duration::from_secs(60);
    let (mut in_time, mut late) = (Vec::new(), Vec::new());
    for nth in 0..STORIES {
        let telling = Telling::new(begin, nth as u64);
        for (nth, told) in story(&mut rng).iter().enumerate() {
            let event = telling.event(told);
            // Some of what is said comes when all is closed, though it may have happened in time.
            let comes_late = nth % 4 == 3 && told.is_about_something();
            if comes_late { &mut late } else { &mut in_time }.push(event);
        }
    }
    let all = [&in_time[..], &late[..]].concat();
    let first = tell("rescore", options(), &in_time, &late).await;
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
    // By what scored it, as it was seen: the same.
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
        let fresh = tell(&format!("rescore-{nth}"), other, &all, &[]).await;
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
    // What came late counts by its own time, also by the same definition.
    let fresh = tell("rescore-same", options(), &all, &[]).await;
    let again = rescored(&first, &config, "1", &[]).await;
    assert_alike(&again, &closed(&fresh.pool).await, "all in time");
    assert_ne!(again, before, "something came late");
    assert_eq!(closed(&first.pool).await, before, "what was trained on stays");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_researcher_scores_again_what_nobody_had_defined_and_waits_for_longer_horizons() {
    let stack = Stack::start("rescore-undefined").await;
    let file = |name: &str| stack.dir.path().join(name);
    let config = file("springtide.toml");
    write(&crate::ingest::options(), &config);
    let service = Service::start_with(&stack, crate::ingest::options()).await;
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
    // The feedback is stored, and the horizon of a second over, before the tables are known to reach so far.
    tokio::time::sleep(Duration::from_secs(3)).await;
    let (lines_now, told) = wait(1.0).await;
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
    assert!(told.contains("2 trajectories: 1 rewarded"), "{told}");
    assert!(told.contains("2 differ"), "{told}");
    let (later, told) = wait(3600.0).await;
    assert!(later.is_empty(), "{later:?}");
    assert!(told.contains("left out: 2"), "{told}");
    let none = springtide(&stack, &config, &["definitions", "--surface", "new"]).await;
    assert!(none.stdout.is_empty() && String::from_utf8_lossy(&none.stderr).contains("ever in force"));
    let known = springtide(&stack, &config, &["definitions", "--surface", "completion"]).await;
    let known = lines(&known.stdout);
    assert_eq!(
        (known.len(), &known[0]["version"], &known[0]["definition"]["accept"]),
        (1, &1.into(), &0.75.into())
    );
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_open_when_its_horizon_becomes_longer_waits_for_the_longer_one() {
    let stack = Stack::start("longer-horizon").await;
    let mut options = crate::ingest::options();
    options.surface[0].horizon_seconds = 1.0;
    let service = Service::start_with(&stack, options.clone()).await;
    hold_the_closer(&stack.pool, &stack.kafka.topics().generation).await;
    let generation = crate::ingest::generation();
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
    let trajectory = crate::ingest::trajectory(&stack.pool, id).await;
    assert_eq!(trajectory, crate::ingest::Trajectory::rewarded(0.75, "accept"));
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
