//! Runs whose steps trainers outside compute, while those, the gateway, the trainer, control and ingest are
//! killed at random, in every phase of lease, training, upload and commit. Two trainers are on one line. Every
//! run ends with all of its steps, an acknowledged commit is a step, and nothing is trained on twice.
//!
//! `make chaos NAME=door` runs it longer: `SPRINGTIDE_DOOR_KILLS`, `_SEED`. The figures are also in
//! `target/chaos/door.json`.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};
use serde_json::json;
use sqlx::PgPool;

use super::kills::{self, end_of, get, note, noted, state};
use fixture::servers::{Servers, Supervised};
use fixture::write_figures;

/// For a run to end once nothing is killed any more.
const CALM: Duration = Duration::from_secs(300);
/// Mean time between two kills.
const PAUSE: Duration = Duration::from_millis(2500);
/// In `make test`.
const KILLS: usize = 5;
/// For a process to be there to be killed.
const PATIENCE: Duration = Duration::from_secs(60);
const TRAINERS: usize = 2;
const STEPS: i64 = 6;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Outside,
    Train,
    Control,
    Gateway,
    Ingest,
    Postgres,
}

/// The trainers outside are killed as often as all others together.
const KINDS: [Kind; 10] = [
    Kind::Outside,
    Kind::Train,
    Kind::Outside,
    Kind::Control,
    Kind::Outside,
    Kind::Gateway,
    Kind::Outside,
    Kind::Ingest,
    Kind::Outside,
    Kind::Postgres,
];

struct Processes {
    gateway: Supervised,
    train: Supervised,
    control: Supervised,
    ingest: Supervised,
    outside: Vec<Supervised>,
}

impl Processes {
    fn kill(&self, servers: &Servers, kind: Kind, rng: &mut StdRng) -> bool {
        match kind {
            Kind::Outside => self.outside.choose(rng).is_some_and(Supervised::kill),
            Kind::Train => self.train.kill(),
            Kind::Control => self.control.kill(),
            Kind::Gateway => self.gateway.kill(),
            Kind::Ingest => self.ingest.kill(),
            Kind::Postgres => servers.postgres.kill(),
        }
    }

    fn all(&self) -> impl Iterator<Item = &Supervised> {
        [&self.gateway, &self.train, &self.control, &self.ingest]
            .into_iter()
            .chain(&self.outside)
    }
}

/// A commit that was acknowledged.
#[derive(Debug, Deserialize)]
struct Noted {
    run: uuid::Uuid,
    step: i64,
    version: i64,
}

#[derive(Debug, Default, Serialize)]
struct Report {
    seed: u64,
    seconds: f64,
    kills: BTreeMap<Kind, usize>,
    /// Kills while the cohort was in this state, or between two cohorts.
    kills_by_state: BTreeMap<String, usize>,
    runs: usize,
    steps: i64,
    /// Commits that a trainer was told of.
    acknowledged: usize,
    /// Of those, the ones that are no step with that version.
    lost: i64,
    trained: i64,
    /// Rows of generations that were trained on a second time.
    trained_twice: i64,
    /// Leases that began.
    leases: i64,
    cohorts_dropped: i64,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn runs_end_and_every_cohort_is_trained_on_once_while_everything_is_killed() {
    let Some(python) = std::env::var_os("SPRINGTIDE_PYTHON") else {
        eprintln!("not run: SPRINGTIDE_PYTHON names no Python with the package springtide");
        return;
    };
    let parameter = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let kills = parameter("SPRINGTIDE_DOOR_KILLS").map_or(KILLS, |kills| kills.try_into().unwrap());
    let seed = parameter("SPRINGTIDE_DOOR_SEED").unwrap_or_else(|| rand::random::<u32>().into());
    println!("SPRINGTIDE_DOOR_SEED={seed}");
    let mut rng = StdRng::seed_from_u64(seed);

    let config = format!(
        "policy.base = '{}/demo/models/base'\n\
         [trainer]\npoll_ms = 50\n[trainer.realtime]\nenabled = false\n\
         [serve]\nslots = 8\nslots_reserved_for_production = 0\n\
         [telemetry]\nfilter = \"warn,springtide=info\"\n",
        env!("CARGO_MANIFEST_DIR")
    );
    let servers = Servers::start(&config, &[]).await;
    let runs_file = servers.path().join("runs");
    let processes = Processes {
        control: servers.role("control", "control", &[]),
        train: servers.role("train", "train", &[]),
        ingest: servers.role("ingest", "ingest", &[]),
        gateway: servers.role("serve", "serve", &[]),
        outside: vec![],
    };
    let began = Instant::now();
    let mut runs = vec![create(&servers).await];
    note(&runs_file, &runs);
    let outside = (0..TRAINERS).map(|nth| trainer(&servers, &python, &runs_file, nth));
    let processes = Processes {
        outside: outside.collect(),
        ..processes
    };
    let mut wanted: Vec<Kind> = KINDS.into_iter().cycle().take(kills).collect();
    wanted.shuffle(&mut rng);
    let mut report = Report {
        seed,
        ..Report::default()
    };
    let pool = servers.pool();
    for kind in wanted {
        tokio::time::sleep(PAUSE.mul_f64(2.0 * rng.random::<f64>())).await;
        let until = Instant::now() + PATIENCE;
        loop {
            if state(&servers, &runs)
                .await
                .is_some_and(|run| run["finished_at"].is_string())
            {
                runs.push(create(&servers).await);
                note(&runs_file, &runs);
            }
            let phase: Option<String> = sqlx::query_scalar(
                "select state from cohort where state in ('filling', 'full', 'submitted') order by id desc limit 1",
            )
            .fetch_optional(&pool)
            .await
            .unwrap_or_default();
            if processes.kill(&servers, kind, &mut rng) {
                *report.kills_by_state.entry(phase.unwrap_or("none".into())).or_default() += 1;
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
            println!(
                "--- {}
{}",
                process.name,
                end_of(&process.output())
            );
        }
        panic!("the run does not end: {:?}", state(&servers, &runs).await);
    }
    report.runs = runs.len();
    report.seconds = began.elapsed().as_secs_f64();
    audit(
        &pool,
        &noted::<Noted>((0..TRAINERS).map(|nth| notes_of(servers.path(), nth))),
        &mut report,
    )
    .await;
    println!("{}", serde_json::to_string_pretty(&report).unwrap());
    write_figures("door.json", &report);

    for run in &runs {
        let run = get(&format!("{}/v1/runs/{run}", servers.control())).await.unwrap();
        let done = (run["status"].as_str(), run["steps_done"].as_i64());
        assert_eq!(done, (Some("succeeded"), Some(STEPS)), "{run}");
    }
    assert_eq!((report.lost, report.trained_twice), (0, 0), "{report:#?}");
    assert_eq!(report.steps, STEPS * i64::try_from(runs.len()).unwrap());
    assert!(report.acknowledged > 0 && report.trained > 0, "{report:#?}");
    let open: i64 = sqlx::query_scalar("select count(*) from cohort where state in ('full', 'submitted')")
        .fetch_one(&pool)
        .await
        .unwrap();
    assert_eq!(open, 0, "no cohort waits for ever");
}

/// A run.
async fn create(servers: &Servers) -> String {
    let request = json!({
        "kind": "grpo",
        "trainer": "external",
        "grader": {"type": "text_similarity", "evaluation_metric": "fuzzy_match", "input": "{{ sample.output_text }}",
                   "reference": "self, other: &Self) -> bool"},
        "tasks": (0..8).map(|nth| json!({"id": format!("t{nth}"), "prompt": format!("fn f{nth}("), "answer": ""})).collect::<Vec<_>>(),
        "group_size": 4,
        "tasks_per_step": 2,
        "steps": STEPS,
        "max_tokens": 8,
        "learning_rate": 1e-5,
    });
    kills::create(servers, &request).await
}

fn trainer(servers: &Servers, python: &OsString, runs: &Path, nth: usize) -> Supervised {
    let folder = servers.path();
    let (script, program) = (
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/learning/door_kills/trainer.py"),
        &*fixture::SPRINGTIDE,
    );
    let arguments = vec![
        script,
        program.into(),
        folder.join("springtide.toml"),
        runs.to_owned(),
        folder.join(format!("outside-{nth}")),
        notes_of(folder, nth),
    ];
    kills::program(servers, &format!("outside-{nth}"), python, arguments)
}

fn notes_of(folder: &Path, nth: usize) -> PathBuf {
    folder.join(format!("commits-{nth}.jsonl"))
}

async fn audit(pool: &PgPool, noted: &[Noted], report: &mut Report) {
    report.acknowledged = noted.len();
    for one in noted {
        let committed: bool =
            sqlx::query_scalar("select exists (select from step where run_id = $1 and step = $2 and version = $3)")
                .bind(one.run)
                .bind(one.step)
                .bind(one.version)
                .fetch_one(pool)
                .await
                .unwrap();
        report.lost += i64::from(!committed);
    }
    (report.trained, report.trained_twice) = kills::trained(pool).await;
    let counts = "select (select count(*) from step), (select coalesce(sum(fence), 0)::bigint from cohort),
                         (select count(*) from cohort where state = 'dropped')";
    (report.steps, report.leases, report.cohorts_dropped) = sqlx::query_as(counts).fetch_one(pool).await.unwrap();
}
