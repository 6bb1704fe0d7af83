//! What attackers make a policy learn, with caps and without: a small policy that really learns from
//! the users of its own answers, through the selection, the caps and the learner of a running trainer.
//!
//! Honest users accept what they find right. Attackers accept only a planted text, or type it. Small here; `make
//! bench NAME=poison` runs every case with several seeds and prints the table of `docs/measurements/poison.md`. The
//! variables `SPRINGTIDE_POISON_…` are the parameters: `CASES` (names separated by semicolons, or
//! `all`), `SEEDS`, `STEPS`, `WARM_UP`, `USERS`, `PARALLEL`, and `JSON`, the file to write.

mod policy;
mod report;
mod traffic;

use super::world::{Running, World, ensure_assigned, register, sampler_key};
use futures::{StreamExt as _, stream};
use policy::Values;
use report::{Outcome, Summary};
use runs::Options;
use runs::select::caps::Caps;
use runs::settings::Loss;
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::task::{block_in_place, spawn_blocking};
use traffic::Traffic;

/// Trajectories of a step.
const COHORT: usize = 32;
/// Honest trajectories of a round: more than a cohort, because users have caps too.
const HONEST_IN_A_ROUND: usize = 48;
/// Of Adam. Far above the default, so that a run shows in minutes what takes hours.
const LEARNING_RATE: f64 = 3e-3;
/// Steps between two points of a curve.
const MEASURE_EVERY: usize = 4;
/// A round that did not fill the cohort is followed by another after this time.
const NEXT_ROUND: Duration = Duration::from_secs(1);
/// A step may take long on a busy machine.
const DEADLINE: Duration = Duration::from_secs(120);

/// Who attacks, and how.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Attack {
    Nobody,
    /// A share of the users, who send `factor` times as much as others.
    Users {
        share: f64,
        factor: f64,
    },
    /// A stolen sampler key: forged answers, more than a cohort before every honest one.
    Key {
        new_user_each: bool,
    },
}

const fn users(share: f64, factor: f64) -> Attack {
    Attack::Users { share, factor }
}

/// Of those that begin with [`TYPED`] all users also type what they would have written, and that is learned.
const CASES: [(&str, Attack); 16] = [
    ("nobody", Attack::Nobody),
    ("1%", users(0.01, 1.0)),
    ("2%", users(0.02, 1.0)),
    ("5%", users(0.05, 1.0)),
    ("1% × 20", users(0.01, 20.0)),
    ("2% × 20", users(0.02, 20.0)),
    ("5% × 20", users(0.05, 20.0)),
    ("key, one user", Attack::Key { new_user_each: false }),
    ("key, new users", Attack::Key { new_user_each: true }),
    ("typed, nobody", Attack::Nobody),
    ("typed, 1%", users(0.01, 1.0)),
    ("typed, 2%", users(0.02, 1.0)),
    ("typed, 5%", users(0.05, 1.0)),
    ("typed, 1% × 20", users(0.01, 20.0)),
    ("typed, 2% × 20", users(0.02, 20.0)),
    ("typed, 5% × 20", users(0.05, 20.0)),
];
const TYPED: &str = "typed, ";
/// Of a cohort, as `trainer.realtime.demonstration_share_max`.
const TYPED_SHARE_MAX: f64 = 0.5;

fn parameter<T: std::str::FromStr>(name: &str, default: T) -> T {
    let set = std::env::var(format!("SPRINGTIDE_POISON_{name}")).ok();
    set.filter(|text| !text.is_empty())
        .map_or(default, |text| text.parse().ok().unwrap())
}

/// One run.
#[derive(Debug, Clone, Copy)]
struct Plan {
    case: usize,
    caps: bool,
    seed: u64,
    users: usize,
    /// Steps on honest users alone, before the attack.
    warm_up: usize,
    /// Steps during the attack.
    steps: usize,
}

impl Plan {
    fn attack(&self) -> Attack {
        CASES[self.case].1
    }

    /// Users type what they would have written.
    fn types(&self) -> bool {
        CASES[self.case].0.starts_with(TYPED)
    }

    fn options(&self, world: &World) -> Options {
        let mut options = world.options();
        options.poll_ms = 5;
        options.squash = false;
        options.realtime.cohort_size = COHORT as u32;
        options.realtime.step.optimizer.learning_rate = LEARNING_RATE;
        if self.types() {
            options.realtime.step.loss = Loss::Verdicts { weight_max: 20.0 };
            options.realtime.demonstration_share_max = TYPED_SHARE_MAX;
        }
        if !self.caps {
            options.realtime.caps = Caps {
                user_share_max: 1.0,
                tenant_share_max: 1.0,
                surface_share_max: 1.0,
                replica_share_max: 1.0,
                ..Caps::default()
            };
        }
        options
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn caps_bound_what_attackers_teach() {
    let chosen: String = parameter("CASES", "nobody; typed, 5% × 20; key, one user".to_owned());
    let is_chosen = |name: &str| chosen == "all" || chosen.split(';').any(|chosen| chosen.trim() == name);
    let cases = (0..CASES.len()).filter(|&case| is_chosen(CASES[case].0));
    let (seeds, parallel) = (parameter("SEEDS", 1), parameter("PARALLEL", 2));
    let plans: Vec<Plan> = cases
        .flat_map(|case| [false, true].map(|caps| (case, caps)))
        .flat_map(|(case, caps)| {
            (1..=seeds).map(move |seed| Plan {
                case,
                caps,
                seed,
                users: parameter("USERS", 200),
                warm_up: parameter("WARM_UP", 8),
                steps: parameter("STEPS", 8),
            })
        })
        .collect();
    let started = Instant::now();
    let mut outcomes: Vec<Outcome> = stream::iter(plans.clone())
        .map(async |plan| {
            let runtime = Handle::current();
            spawn_blocking(move || runtime.block_on(run(plan))).await.unwrap()
        })
        .buffer_unordered(parallel)
        .collect()
        .await;
    outcomes.sort_by_key(|outcome| (outcome.case, outcome.caps, outcome.seed));
    let summaries = report::summarize(&outcomes);
    report::print(&summaries);
    report::write(&plans[0], seeds, started.elapsed(), &outcomes, &summaries);
    check(&summaries);
}

/// What every run of every size has to show.
fn check(summaries: &[Summary]) {
    for summary in summaries {
        let found = summaries
            .iter()
            .find(|other| other.case == summary.case && other.caps != summary.caps);
        let other = found.unwrap();
        if !summary.caps {
            continue;
        }
        let (weight, without) = (summary.weight.mean, other.weight.mean);
        match CASES[summary.case].1 {
            Attack::Nobody => assert_eq!((weight, without), (0.0, 0.0)),
            Attack::Users { factor: 20.0, .. } => {
                assert!(
                    weight < 0.6 * without,
                    "{}: {weight} with caps, {without} without",
                    summary.name
                );
            }
            Attack::Users { share, .. } => assert!(weight <= 3.0 * share, "{}: {weight}", summary.name),
            Attack::Key { new_user_each: false } => {
                assert_eq!(without, 1.0);
                assert!(weight < 0.1, "{weight}");
                let (planted, without) = (summary.planted_attacked.after.mean, other.planted_attacked.after.mean);
                assert!(
                    planted < without - 0.5,
                    "log-probability {planted} with caps, {without} without"
                );
            }
            Attack::Key { new_user_each: true } => assert!(weight < without, "{weight} with caps"),
        }
    }
}

/// A policy that first learns from honest users and is then attacked.
async fn run(plan: Plan) -> Outcome {
    let world = World::start_from("poison", policy::checkpoint(plan.seed)).await;
    world.follow(1, world.base, 0).await;
    for replica in traffic::REPLICAS {
        register(&world.stack.pool, &sampler_key(replica), replica).await;
    }
    let running = world.run(plan.options(&world));
    let mut traffic = Traffic::new(plan);
    let mut head = world.base;
    let mut curve = vec![];
    for step in 0..=plan.warm_up + plan.steps {
        let model = policy::load(&world, head).await;
        let attacked = step >= plan.warm_up;
        let last = step == plan.warm_up + plan.steps;
        if attacked && (last || (step - plan.warm_up).is_multiple_of(MEASURE_EVERY)) {
            let values = block_in_place(|| Values::of(&model));
            curve.push((step - plan.warm_up, values));
        }
        if last {
            break;
        }
        ensure_assigned(&world.stack.pool, "champion", head).await;
        head = next_version(&world, &running, head, || {
            block_in_place(|| traffic.round(&model, attacked))
        })
        .await;
    }
    let counts = report::Counts::read(&world, plan.warm_up).await;
    let typed = "select coalesce(sum((metrics->>'typed')::bigint), 0)::bigint from step";
    let typed: i64 = sqlx::query_scalar(typed).fetch_one(&world.stack.pool).await.unwrap();
    assert_eq!(typed > 0, plan.types(), "{typed} typed texts were trained on");
    running.stop().await;
    Outcome::new(plan, counts, curve)
}

/// Sends rounds of traffic until there is a next version.
async fn next_version(
    world: &World,
    running: &Running,
    head: i64,
    mut round: impl FnMut() -> Vec<traffic::Row>,
) -> i64 {
    let started = Instant::now();
    loop {
        assert!(!running.has_ended(), "the trainer ended");
        traffic::insert(&world.stack.pool, head, &round()).await;
        let sent = Instant::now();
        while sent.elapsed() < NEXT_ROUND {
            let (next, _) = world.line().await;
            if next != head {
                return next;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        assert!(
            started.elapsed() < DEADLINE,
            "no step in {DEADLINE:?}: {:?}",
            world.status().await
        );
    }
}
