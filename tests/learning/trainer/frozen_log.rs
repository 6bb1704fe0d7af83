//! On a frozen log the trainer makes the same versions, to the bit, however often it is killed.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use edge::bind::free_ports;
use rand::{Rng, SeedableRng, rngs::StdRng};
use runs::publish::run_state::{self, RunState};
use serde::Serialize;
use sqlx::Row;
use tokio::process::{Child, Command};

use super::theft::manifest_file;
use super::world::World;
use fixture::write_figures;

const COHORT: usize = 8;
/// Generations of the base may be this far behind the head, so there are no more steps.
const STEPS: usize = 64;
/// For one step, the start of a process included.
const STEP_MAX: Duration = Duration::from_secs(60);

/// What a step left behind.
#[derive(Debug, PartialEq)]
struct Left {
    /// Content hash of the version.
    root: String,
    /// Value and weight of each baseline, as bits.
    baselines: BTreeMap<String, (u64, u64)>,
    trained: Vec<uuid::Uuid>,
}

#[derive(Debug, Serialize)]
struct Report {
    seed: u64,
    kills: usize,
    steps: usize,
    generations: usize,
    /// How many steps were done after each kill.
    killed_after_steps: Vec<i64>,
    /// Kills after which the store had a version that the database had not.
    between_manifest_and_commit: usize,
    same: bool,
}

/// The role, as its own process.
fn trainer(world: &World) -> Child {
    let stack = &world.stack;
    let [port] = free_ports().unwrap();
    let command = stack.springtide(&["train"]);
    let mut command = Command::from(command);
    let log = std::fs::File::options()
        .create(true)
        .append(true)
        .open(log_file(world))
        .unwrap();
    command
        .envs(stack.kafka_environment())
        .env("SPRINGTIDE__POLICY__STORE", &stack.store_url)
        .env("SPRINGTIDE__POLICY__KEYS", &stack.keys_dir)
        .env("SPRINGTIDE__POSTGRES__URLS__TRAIN", stack.url_of("train"))
        .env("SPRINGTIDE__LISTEN__TRAIN", format!("127.0.0.1:{port}"))
        .env("SPRINGTIDE__TRAINER__POLL_MS", "20")
        .env("SPRINGTIDE__TRAINER__OFFLINE__ENABLED", "false")
        .env("SPRINGTIDE__TRAINER__REALTIME__ALIAS", "champion")
        .env("SPRINGTIDE__TRAINER__REALTIME__BASELINE", "ema")
        .env("SPRINGTIDE__TRAINER__REALTIME__COHORT_SIZE", COHORT.to_string())
        .env("SPRINGTIDE__TRAINER__REALTIME__STALENESS_MAX", STEPS.to_string())
        .stdout(Stdio::null())
        .stderr(log)
        .kill_on_drop(true);
    command.spawn().unwrap()
}

/// Waits until there are this many steps.
async fn reach(world: &World, steps: i64) {
    let (mut last, mut until) = (-1, Instant::now());
    loop {
        let done = world.steps().await;
        if done >= steps {
            return;
        }
        if done > last {
            (last, until) = (done, Instant::now() + STEP_MAX);
        }
        let log = || std::fs::read_to_string(log_file(world)).unwrap();
        assert!(Instant::now() < until, "{done} steps of {steps}:\n{}", log());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Whether the store has the manifest of a version that the database has not.
async fn has_uncommitted_manifest(world: &World) -> bool {
    let newest: i64 = sqlx::query_scalar("select max(serial) from version")
        .fetch_one(&world.stack.pool)
        .await
        .unwrap();
    manifest_file(world, newest + 1).exists()
}

fn log_file(world: &World) -> PathBuf {
    world.stack.dir.path().join("train.log")
}

async fn left(world: &World) -> Vec<Left> {
    let pool = &world.stack.pool;
    let steps = sqlx::query("select step, encode(root, 'hex') as root from version where step > 0 order by step")
        .fetch_all(pool)
        .await
        .unwrap();
    let baselines: Vec<(i64, String, f64, f64)> = sqlx::query_as("select step, class, value, weight from baseline")
        .fetch_all(pool)
        .await
        .unwrap();
    let dispositions = world.dispositions().await;
    let of_step = |row: &sqlx::postgres::PgRow| {
        let step: i64 = row.get("step");
        let baselines = baselines.iter().filter(|(at, ..)| *at == step);
        let trained = dispositions.iter().filter(|one| one.step == Some(step));
        Left {
            root: row.get("root"),
            baselines: baselines
                .map(|(_, class, value, weight)| (class.clone(), (value.to_bits(), weight.to_bits())))
                .collect(),
            trained: trained.map(|one| one.id).collect(),
        }
    };
    steps.iter().map(of_step).collect()
}

/// The last step's run state, without what it says of times and of this run.
async fn last_run_state(world: &World) -> RunState {
    let row = sqlx::query("select run_id, step, version from step order by step desc limit 1")
        .fetch_one(&world.stack.pool)
        .await
        .unwrap();
    let (run, step, version) = (row.get("run_id"), row.get("step"), row.get("version"));
    let key = run_state::key(run, step, version);
    let mut state = world.publisher.read_run_state(&key, None).await.unwrap();
    state.record.run = uuid::Uuid::nil();
    state.record.metrics = serde_json::Value::Null;
    state
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trainer_killed_anywhere_makes_the_versions_of_one_that_was_not() {
    let parameter = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let kills = parameter("SPRINGTIDE_TRAINER_KILLS").unwrap_or(6) as usize;
    let seed = parameter("SPRINGTIDE_TRAINER_SEED").unwrap_or_else(|| rand::random::<u32>().into());
    println!("SPRINGTIDE_TRAINER_SEED={seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    // a life makes at most a step or two before it is killed
    let steps = (kills + 8).min(STEPS);
    let (calm, killed) = (World::start("calm").await, World::start("killed").await);
    let log = calm.sample(calm.base, steps * COHORT).await;
    for world in [&calm, &killed] {
        world.follow(1, world.base, 0).await;
        world.insert_all(&log, "champion").await;
    }

    let began = Instant::now();
    let process = trainer(&calm);
    reach(&calm, 1).await;
    let first = began.elapsed();
    reach(&calm, steps as i64).await;
    let step = (began.elapsed() - first) / (steps as u32 - 1);
    drop(process);
    let (mut killed_after_steps, mut between_manifest_and_commit) = (Vec::new(), 0);
    for _ in 0..kills {
        let before = killed.steps().await;
        if before >= steps as i64 {
            break; // it has nothing to do any more
        }
        let mut process = trainer(&killed);
        match rng.random_range(0..5) {
            // while it starts, restores the last step's state, or computes or publishes the next one
            0 | 1 => {
                let until = Instant::now() + first.mul_f64(rng.random::<f64>());
                while Instant::now() < until && killed.steps().await == before {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
            // while it computes or publishes the step after
            2 | 3 => {
                reach(&killed, before + 1).await;
                tokio::time::sleep(step.mul_f64(1.5 * rng.random::<f64>())).await;
            }
            // when the store has a version that the database has not, or the moment after
            _ => {
                let until = Instant::now() + STEP_MAX;
                while !has_uncommitted_manifest(&killed).await && killed.steps().await == before {
                    assert!(Instant::now() < until, "no manifest within {STEP_MAX:?}");
                }
            }
        }
        process.kill().await.unwrap();
        killed_after_steps.push(killed.steps().await);
        between_manifest_and_commit += usize::from(has_uncommitted_manifest(&killed).await);
    }
    let process = trainer(&killed);
    reach(&killed, steps as i64).await;
    drop(process);

    let states = (last_run_state(&calm).await, last_run_state(&killed).await);
    assert!(
        states.0 == states.1,
        "the last run states have other master weights, moments, random numbers or baselines"
    );
    let (calm, killed) = (left(&calm).await, left(&killed).await);
    assert_eq!(calm.len(), steps, "one version a step");
    assert!(calm.iter().all(|step| step.trained.len() == COHORT), "{calm:#?}");
    let same = calm == killed;
    write_figures(
        "trainer-kills.json",
        &Report {
            seed,
            kills: killed_after_steps.len(),
            steps,
            generations: log.len(),
            killed_after_steps,
            between_manifest_and_commit,
            same,
        },
    );
    let other = calm.iter().zip(&killed).position(|(calm, killed)| calm != killed);
    if let Some(other) = other {
        panic!("step {} differs: {:#?}\n{:#?}", other + 1, calm[other], killed[other]);
    }
    assert_eq!(killed.len(), steps);
}
