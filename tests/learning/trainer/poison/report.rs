//! What the runs showed: means over seeds with 95% intervals, as a table and as JSON.

use super::super::world::World;
use super::policy::Values;
use super::{CASES, COHORT, HONEST_IN_A_ROUND, LEARNING_RATE, Plan};
use serde::Serialize;
use serde_json::json;
use std::time::Duration;

/// Quantiles of Student's t at 97.5%, by degrees of freedom from 1.
const STUDENT_T: [f64; 10] = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228];
/// For more.
const NORMAL: f64 = 1.96;

/// What became of the trajectories of a run since the attack began.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Counts {
    pub steps: i64,
    pub trained: i64,
    pub trained_of_attackers: i64,
    pub trained_of_largest_user: i64,
    /// Dropped because of a cap.
    pub capped_honest: i64,
    pub capped_of_attackers: i64,
}

impl Counts {
    pub async fn read(world: &World, warm_up: usize) -> Self {
        let (steps, trained, trained_of_attackers, trained_of_largest_user, capped_honest, capped_of_attackers) =
            sqlx::query_as(
                "with decided as (
                     select g.user_key, g.user_key like 'attacker-%' as attacks, d.kind, d.step
                     from disposition d
                     join generation g on g.id = d.generation_id
                     where (d.kind = 'trained' and d.step > $1)
                        or (d.code like 'capped%' and d.decided_at > (select committed_at from step where step = $1))
                 ), trained as (
                     select user_key, attacks, count(*) as count from decided where kind = 'trained' group by 1, 2
                 )
                 select (select count(*) from step where step > $1),
                        (select coalesce(sum(count), 0)::bigint from trained),
                        (select coalesce(sum(count), 0)::bigint from trained where attacks),
                        (select coalesce(max(count), 0)::bigint from trained),
                        (select count(*) from decided where kind = 'dropped' and not attacks),
                        (select count(*) from decided where kind = 'dropped' and attacks)",
            )
            .bind(warm_up as i64)
            .fetch_one(&world.stack.pool)
            .await
            .unwrap();
        Counts {
            steps,
            trained,
            trained_of_attackers,
            trained_of_largest_user,
            capped_honest,
            capped_of_attackers,
        }
    }
}

/// One run.
#[derive(Debug, Serialize)]
pub struct Outcome {
    #[serde(skip)]
    pub case: usize,
    pub name: &'static str,
    pub caps: bool,
    pub seed: u64,
    counts: Counts,
    /// Steps of the attack, and what the policy does then. The first is before the attack.
    curve: Vec<(usize, Values)>,
}

impl Outcome {
    pub fn new(plan: Plan, counts: Counts, curve: Vec<(usize, Values)>) -> Self {
        Outcome {
            case: plan.case,
            name: CASES[plan.case].0,
            caps: plan.caps,
            seed: plan.seed,
            counts,
            curve,
        }
    }
}

/// A mean over seeds, and its 95% interval.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Estimate {
    pub mean: f64,
    /// `None`: one seed has no interval.
    pub interval: Option<[f64; 2]>,
}

impl Estimate {
    fn of(values: impl Iterator<Item = f64>) -> Self {
        let values: Vec<f64> = values.collect();
        let n = values.len() as f64;
        let mean = values.iter().sum::<f64>() / n;
        let interval = (values.len() > 1).then(|| {
            let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (n - 1.0);
            let t = STUDENT_T.get(values.len() - 2).copied().unwrap_or(NORMAL);
            let half = t * (variance / n).sqrt();
            [mean - half, mean + half]
        });
        Estimate { mean, interval }
    }

    fn text(&self, show: impl Fn(f64) -> String) -> String {
        match self.interval {
            Some([low, high]) => format!("{} ({} … {})", show(self.mean), show(low), show(high)),
            None => show(self.mean),
        }
    }
}

/// A value before the attack and at the end.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Change {
    pub before: Estimate,
    pub after: Estimate,
}

/// The runs of a case, with caps or without.
#[derive(Debug, Serialize)]
pub struct Summary {
    #[serde(skip)]
    pub case: usize,
    pub name: &'static str,
    pub caps: bool,
    steps: Estimate,
    /// Share of the attackers among what was trained on since the attack began.
    pub weight: Estimate,
    largest_user: Estimate,
    /// Share of a cap's victims among honest trajectories that could have been trained on.
    honest_capped: Estimate,
    pub planted_attacked: Change,
    planted_others: Change,
    honest_reward: Change,
}

pub fn summarize(outcomes: &[Outcome]) -> Vec<Summary> {
    outcomes
        .chunk_by(|a, b| (a.case, a.caps) == (b.case, b.caps))
        .map(|runs| {
            let share = |of: fn(&Counts) -> [i64; 2]| {
                Estimate::of(runs.iter().map(|run| {
                    let [part, whole] = of(&run.counts);
                    part as f64 / whole.max(1) as f64
                }))
            };
            let change = |of: fn(&Values) -> f64| Change {
                before: Estimate::of(runs.iter().map(|run| of(&run.curve[0].1))),
                after: Estimate::of(runs.iter().map(|run| of(&run.curve[run.curve.len() - 1].1))),
            };
            Summary {
                case: runs[0].case,
                name: runs[0].name,
                caps: runs[0].caps,
                steps: Estimate::of(runs.iter().map(|run| run.counts.steps as f64)),
                weight: share(|counts| [counts.trained_of_attackers, counts.trained]),
                largest_user: share(|counts| [counts.trained_of_largest_user, counts.trained]),
                honest_capped: share(|counts| {
                    let trained = counts.trained - counts.trained_of_attackers;
                    [counts.capped_honest, counts.capped_honest + trained]
                }),
                planted_attacked: change(|values| values.planted_attacked),
                planted_others: change(|values| values.planted_others),
                honest_reward: change(|values| values.honest_reward),
            }
        })
        .collect()
}

/// The table of `docs/measurements/poison.md`.
pub fn print(summaries: &[Summary]) {
    println!(
        "\n| attackers | caps | weight of attackers | largest user | steps | planted text at attacked questions, nats: \
         before, after | at the other questions: before, after | honest reward: before, after | honest dropped by a cap |"
    );
    println!("|{}", "---|".repeat(9));
    for summary in summaries {
        let percent = |value: f64| format!("{:.1}%", 100.0 * value);
        let nats = |value: f64| format!("{value:.2}");
        let reward = |value: f64| format!("{value:+.3}");
        let change = |change: &Change, show: &dyn Fn(f64) -> String| {
            format!("{}, {}", change.before.text(show), change.after.text(show))
        };
        println!(
            "| {} | {} | {} | {} | {} | {} | {} | {} | {} |",
            summary.name,
            if summary.caps { "with" } else { "without" },
            summary.weight.text(percent),
            summary.largest_user.text(percent),
            summary.steps.mean,
            change(&summary.planted_attacked, &nats),
            change(&summary.planted_others, &nats),
            change(&summary.honest_reward, &reward),
            summary.honest_capped.text(percent),
        );
    }
}

/// Writes everything to the file that `SPRINGTIDE_POISON_JSON` names, if it does.
pub fn write(plan: &Plan, seeds: u64, took: Duration, outcomes: &[Outcome], summaries: &[Summary]) {
    let Ok(path) = std::env::var("SPRINGTIDE_POISON_JSON") else {
        return;
    };
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let processor = cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let json = json!({
        "machine": {
            "processor": processor.map(|(_, name)| name),
            "cores": std::thread::available_parallelism().map_or(0, usize::from),
        },
        "seconds": took.as_secs_f64(),
        "parameters": {
            "seeds": seeds, "users": plan.users, "warm_up_steps": plan.warm_up, "attack_steps": plan.steps,
            "cohort": COHORT, "honest_in_a_round": HONEST_IN_A_ROUND, "learning_rate": LEARNING_RATE,
            "caps": runs::select::caps::Caps::default(),
        },
        "summaries": summaries,
        "runs": outcomes,
    });
    let path = std::path::Path::new(&path);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, serde_json::to_vec_pretty(&json).unwrap()).unwrap();
    println!("{} in {:.0} s", path.display(), took.as_secs_f64());
}
