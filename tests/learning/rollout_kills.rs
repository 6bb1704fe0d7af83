//! Offline runs with a harness outside, while harnesses, the worlds of rollouts, the gateway, the
//! trainer, control and ingest are killed at random. Every run ends with all of its steps, no rewarded
//! rollout is lost, and nothing is trained on twice.
//!
//! `make chaos NAME=rollouts` runs it longer: `SPRINGTIDE_ROLLOUT_KILLS`, `_SEED`. The figures are also in
//! `target/chaos/rollouts.json`.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sqlx::PgPool;

use super::kills::{self, end_of, get, note, noted, state};
use fixture::process::descendants;
use fixture::servers::{Servers, Supervised};
use fixture::write_figures;

/// For a run to end once nothing is killed any more.
const CALM: Duration = Duration::from_secs(300);
/// Mean time between two kills.
const PAUSE: Duration = Duration::from_secs(4);
/// For a process to be there to be killed.
const PATIENCE: Duration = Duration::from_secs(60);
const HARNESSES: usize = 2;
const STEPS: i64 = 6;
const GROUP: i64 = 4;
const TASKS_PER_STEP: i64 = 2;
const STALENESS_MAX: i64 = 3;
/// Rollouts of leases that expire are offered again while the run goes on.
const LEASE_SECONDS: u32 = 10;

fn config() -> String {
    format!(
        "policy.base = '{}/demo/models/base'\n\
         [trainer]\npoll_ms = 50\n[trainer.realtime]\nenabled = false\n\
         [serve]\nslots = 8\nslots_reserved_for_production = 0\n\
         [telemetry]\nfilter = \"warn,springtide=info\"\n",
        env!("CARGO_MANIFEST_DIR")
    )
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Harness,
    /// The program in a sandbox that rewards a rollout.
    World,
    Gateway,
    Trainer,
    Control,
    Ingest,
}

const KINDS: [Kind; 6] = [
    Kind::Harness,
    Kind::World,
    Kind::Gateway,
    Kind::Trainer,
    Kind::Control,
    Kind::Ingest,
];

/// Everything that is killed.
struct Processes {
    gateway: Supervised,
    trainer: Supervised,
    control: Supervised,
    ingest: Supervised,
    harnesses: Vec<Supervised>,
}

impl Processes {
    fn kill(&self, kind: Kind, rng: &mut StdRng) -> bool {
        let harness = self.harnesses.choose(rng);
        match kind {
            Kind::Harness => harness.is_some_and(Supervised::kill),
            Kind::World => harness.is_some_and(kill_world),
            Kind::Gateway => self.gateway.kill(),
            Kind::Trainer => self.trainer.kill(),
            Kind::Control => self.control.kill(),
            Kind::Ingest => self.ingest.kill(),
        }
    }

    fn all(&self) -> impl Iterator<Item = &Supervised> {
        [&self.gateway, &self.trainer, &self.control, &self.ingest]
            .into_iter()
            .chain(&self.harnesses)
    }
}

/// False: the harness has none now.
fn kill_world(harness: &Supervised) -> bool {
    let Some(pid) = harness.pid() else { return false };
    let worlds = descendants(u32::try_from(pid.as_raw()).unwrap(), "bwrap");
    let Some(first) = worlds.first() else { return false };
    // it may have ended meanwhile
    nix::sys::signal::kill(*first, Signal::SIGKILL).is_ok()
}

/// What a harness noted.
#[derive(Debug, Deserialize)]
struct Rewarded {
    rollout: uuid::Uuid,
    reward: f64,
}

#[derive(Debug, Default, Serialize)]
struct Report {
    seed: u64,
    seconds: f64,
    kills: BTreeMap<Kind, usize>,
    runs: usize,
    steps: i64,
    /// Rewards that the control role has acknowledged.
    acknowledged: usize,
    /// Of those, the ones that no step, nor a group without a difference, came of.
    lost: i64,
    /// Rows of turns that were trained on a second time.
    trained_twice: i64,
    trained: i64,
    /// Rollouts that ended without a reward, by why.
    without_reward: BTreeMap<String, i64>,
    /// Turns by how many steps the head was ahead of their version.
    staleness: BTreeMap<i64, i64>,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn runs_end_and_no_rewarded_rollout_is_lost_or_used_twice_while_everything_is_killed() {
    let Some(python) = std::env::var_os("SPRINGTIDE_PYTHON") else {
        eprintln!("not run: SPRINGTIDE_PYTHON names no Python with the package springtide");
        return;
    };
    let parameter = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let kills = parameter("SPRINGTIDE_ROLLOUT_KILLS").map_or(KINDS.len(), |kills| kills.try_into().unwrap());
    let seed = parameter("SPRINGTIDE_ROLLOUT_SEED").unwrap_or_else(|| rand::random::<u32>().into());
    println!("SPRINGTIDE_ROLLOUT_SEED={seed}");
    let mut rng = StdRng::seed_from_u64(seed);

    let servers = Servers::start(&config(), &[]).await;
    let folder = servers.path();
    let runs_file = folder.join("runs");
    let processes = Processes {
        control: servers.role("control", "control", &[]),
        trainer: servers.role("train", "train", &[]),
        ingest: servers.role("ingest", "ingest", &[]),
        gateway: servers.role("serve", "serve", &[]),
        harnesses: vec![],
    };
    let began = Instant::now();
    let mut runs = vec![create(&servers).await];
    note(&runs_file, &runs);
    let harnesses = (0..HARNESSES).map(|nth| harness(&servers, &python, &runs_file, nth));
    let processes = Processes {
        harnesses: harnesses.collect(),
        ..processes
    };
    let mut wanted: Vec<Kind> = KINDS.into_iter().cycle().take(kills).collect();
    wanted.shuffle(&mut rng);
    let mut report = Report {
        seed,
        ..Report::default()
    };
    for kind in wanted {
        tokio::time::sleep(PAUSE.mul_f64(2.0 * rng.random::<f64>())).await;
        // a run that ends gives way to the next, or there would be no world to kill
        let until = Instant::now() + PATIENCE;
        loop {
            if state(&servers, &runs)
                .await
                .is_some_and(|run| run["finished_at"].is_string())
            {
                runs.push(create(&servers).await);
                note(&runs_file, &runs);
            }
            if processes.kill(kind, &mut rng) {
                break;
            }
            assert!(Instant::now() < until, "not within {PATIENCE:?}: {kind:?} is there");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        *report.kills.entry(kind).or_default() += 1;
        eprintln!("{kind:?} killed in run {}", runs.len());
    }
    let ended = tokio::time::timeout(CALM, async {
        loop {
            match state(&servers, &runs).await {
                Some(run) if run["finished_at"].is_string() => return,
                _ => tokio::time::sleep(Duration::from_millis(200)).await,
            }
        }
    });
    if ended.await.is_err() {
        for process in processes.all() {
            println!("--- {}\n{}", process.name, end_of(&process.output()));
        }
        panic!("the run does not end: {:?}", state(&servers, &runs).await);
    }
    report.runs = runs.len();
    report.seconds = began.elapsed().as_secs_f64();
    audit(
        &servers.pool(),
        &noted::<Rewarded>((0..HARNESSES).map(|nth| notes_of(folder, nth))),
        &mut report,
    )
    .await;
    println!("{}", serde_json::to_string_pretty(&report).unwrap());
    write_figures("rollouts.json", &report);

    for run in &runs {
        let run = get(&format!("{}/v1/runs/{run}", servers.control())).await.unwrap();
        let done = (run["status"].as_str(), run["steps_done"].as_i64());
        assert_eq!(done, (Some("succeeded"), Some(STEPS)), "{run}");
    }
    assert_eq!((report.lost, report.trained_twice), (0, 0), "{report:#?}");
    assert_eq!(report.steps, STEPS * i64::try_from(runs.len()).unwrap());
    assert!(report.acknowledged > 0 && report.trained > 0, "{report:#?}");
    let oldest = report.staleness.keys().max().copied();
    assert!(oldest.is_some_and(|steps| steps <= STALENESS_MAX), "{report:#?}");
}

/// A run.
async fn create(servers: &Servers) -> String {
    let request = json!({
        "kind": "grpo",
        "environment": {"kind": "pull", "lease_seconds": LEASE_SECONDS},
        "tasks": (0..8).map(|nth| json!({"id": format!("t{nth}"), "prompt": format!("fn f{nth}("), "answer": ""})).collect::<Vec<_>>(),
        "group_size": GROUP,
        "tasks_per_step": TASKS_PER_STEP,
        "steps": STEPS,
        "staleness_max": STALENESS_MAX,
        "learning_rate": 1e-5,
    });
    kills::create(servers, &request).await
}

fn notes_of(folder: &Path, nth: usize) -> PathBuf {
    folder.join(format!("rewarded-{nth}.jsonl"))
}

fn harness(servers: &Servers, python: &OsString, runs: &Path, nth: usize) -> Supervised {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/learning/rollout_kills/harness.py");
    let arguments = vec![script, runs.to_owned(), notes_of(servers.path(), nth)];
    kills::program(servers, &format!("harness-{nth}"), python, arguments)
}

async fn audit(pool: &PgPool, rewarded: &[Rewarded], report: &mut Report) {
    let (ids, rewards): (Vec<_>, Vec<_>) = rewarded.iter().map(|one| (one.rollout, one.reward)).unzip();
    report.acknowledged = ids.len();
    report.lost = sqlx::query_scalar(
        "select count(*) from unnest($1::uuid[], $2::float8[]) as noted (id, reward) \
         left join rollout o on o.id = noted.id and o.state = 'spent' and o.code is null and o.reward = noted.reward \
         where o.id is null",
    )
    .bind(&ids)
    .bind(&rewards)
    .fetch_one(pool)
    .await
    .unwrap();
    (report.trained, report.trained_twice) = kills::trained(pool).await;
    report.steps = sqlx::query_scalar("select count(*) from step")
        .fetch_one(pool)
        .await
        .unwrap();
    let without = "select code, count(*) from rollout where code is not null group by code";
    let without: Vec<(String, i64)> = sqlx::query_as(without).fetch_all(pool).await.unwrap();
    report.without_reward = without.into_iter().collect();
    let notes: Vec<Value> = sqlx::query_scalar("select metrics -> 'notes' -> 'staleness' from step")
        .fetch_all(pool)
        .await
        .unwrap();
    for (steps, turns) in notes.iter().filter_map(Value::as_object).flatten() {
        *report.staleness.entry(steps.parse().unwrap()).or_default() += turns.as_i64().unwrap();
    }
}
