//! A made-up report for tests, large enough to look at. Its page is written to the temporary folder
//! by `cargo test -p demo sample_page -- --ignored`.

use std::{collections::BTreeMap, time::Duration};

use report::Interval;

use super::{Parameters, RunReport, Staleness, TimelineEntry};
use crate::{
    progress::Counts,
    queries::{FeedbackToServing, Ledger, LedgerCounts, LoopTotals, Phase, Step, Traffic},
    random::Draws,
    references::{Capability, Comparison, Paired, Reference, References},
    stage::{Facts, Latency, Setup},
    stats::{self, ArmStats, FOLLOWING, FROZEN, LEARNING, Measure, Observation, Outcome, Reaction, tests::outcome},
};

const SECONDS: u64 = 600;
const PAUSES: u64 = 4800;
const USERS: usize = 300;
const TAU: f64 = 0.25;

/// Ten minutes in which the learning arm comes to show less and to be right more often.
pub fn report() -> RunReport {
    let length = Duration::from_secs(SECONDS);
    let outcomes = outcomes();
    let timeline = timeline(&outcomes, length);
    RunReport {
        arms: stats::arms(&outcomes, TAU),
        difference: stats::difference(&outcomes, LEARNING, Measure::Reward, TAU),
        difference_accepts_per_100: stats::difference(&outcomes, LEARNING, Measure::Accepts, TAU),
        following_difference: stats::difference(&outcomes, FOLLOWING, Measure::Reward, TAU),
        following_difference_accepts_per_100: stats::difference(&outcomes, FOLLOWING, Measure::Accepts, TAU),
        thirds: stats::periods(&outcomes, length, 3, TAU),
        versions_served: stats::versions_served(&outcomes),
        facts: Facts {
            feedback_to_serving_seconds: FeedbackToServing {
                p50: Some(8.4),
                p95: Some(14.9),
                served: 1510,
                not_served: 32,
            },
            totals: LoopTotals {
                steps: 92,
                parity_max: Some(3.1e-6),
                delta_ratio: Some(0.0231),
                swaps: 92,
                swap_pause_ms_p50: Some(0.21),
                swap_pause_ms_max: Some(1.94),
            },
            ledger: ledger((PAUSES as usize - stats::of_arm(&outcomes, LEARNING).count()) as i64),
            completion_latency_ms: Latency {
                p50: Some(61.0),
                p95: Some(148.0),
            },
            counts: Counts {
                due: PAUSES,
                errors: BTreeMap::from([("completion: http 503".to_owned(), 3)]),
                failed: 3,
                ..Counts::default()
            },
            steps_taken: steps(),
            ..empty().facts
        },
        references: Some(references(&outcomes)),
        staleness: Staleness::of(LEARNING, &timeline),
        feedback_to_serving_phases: [("horizon", 3.1, 3.9), ("step", 1.2, 1.9), ("swap", 0.3, 0.8)]
            .map(|(name, p50, p95)| Phase {
                name: name.to_owned(),
                p50,
                p95,
            })
            .into(),
        timeline,
        ..empty()
    }
}

/// A run in which nothing happened.
pub fn empty() -> RunReport {
    RunReport {
        parameters: Parameters {
            setup: Setup {
                policy: "demo".to_owned(),
                minutes: 10.0,
                developers: USERS,
                ..Setup::default()
            },
            tau: TAU,
            ..Parameters::default()
        },
        facts: Facts {
            started_at: "2026-11-21T10:00:00Z".to_owned(),
            seconds: 604.2,
            ledger: Ledger {
                balanced: true,
                ..Ledger::default()
            },
            settled: true,
            ..Facts::default()
        },
        content_hashes_agree: true,
        ..RunReport::default()
    }
}

pub fn outcomes() -> Vec<Outcome> {
    let outcomes = (0..PAUSES).map(|nth| {
        let mut draws = Draws::new("sample report", &[nth]);
        let user = draws.below(USERS);
        // 60% learner, 20% champion, 20% base
        let arm = [LEARNING, LEARNING, LEARNING, FOLLOWING, FROZEN][user * 5 / USERS];
        let learning = arm != FROZEN;
        let progress = if learning {
            0.9 * nth as f64 / PAUSES as f64
        } else {
            0.0
        };
        let skill = 0.06 * ((user % 7) as f64 - 3.0) / 3.0;
        let reaction = reaction(&mut draws, 0.92 - 0.3 * progress, 0.34 + skill + 0.2 * progress);
        Outcome {
            at: Duration::from_secs_f64(SECONDS as f64 * nth as f64 / PAUSES as f64),
            version: if learning { 1 + (nth / 52) as i64 } else { 1 },
            root: "5f".repeat(32),
            ..outcome(user, arm, reaction, draws.chance(0.8))
        }
    });
    outcomes.collect()
}

fn reaction(draws: &mut Draws, show: f64, right: f64) -> Reaction {
    match (draws.chance(show), draws.chance(right)) {
        (false, _) => Reaction::Declined,
        (true, true) => Reaction::Right,
        (true, false) => Reaction::Wrong,
    }
}

fn timeline(outcomes: &[Outcome], length: Duration) -> Vec<TimelineEntry> {
    let entries = stats::periods(outcomes, length, 20, TAU)
        .into_iter()
        .zip(0_i64..)
        .map(|(period, nth)| {
            let traffic = |(arm, stats): (&String, &ArmStats)| {
                let is_learning = i64::from(arm == LEARNING);
                let traffic = Traffic {
                    generations: stats.pauses as i64,
                    closed: stats.pauses as i64,
                    censored: stats.unanswered as i64,
                    stale: is_learning * (3 + nth * 7 % 5),
                    tokens_mean: Some(7.1 - 0.06 * (is_learning * nth) as f64),
                };
                (arm.clone(), traffic)
            };
            let traffic = period.arms.iter().map(traffic).collect();
            TimelineEntry { period, traffic }
        });
    entries.collect()
}

fn references(outcomes: &[Outcome]) -> References {
    let learning = ArmStats::of(
        stats::of_arm(outcomes, LEARNING).map(|outcome| outcome.observation),
        TAU,
    );
    let policies = [
        ("base, T = 1", 0.93, 0.34),
        ("base, greedy", 0.93, 0.41),
        ("base, greedy, best threshold", 0.62, 0.58),
        ("oracle: greedy, only where right", 0.75, 1.0),
    ];
    let policies = policies.map(|(name, show, right)| {
        let observations = (0..2000).map(|nth| Observation {
            user: nth as usize % 180,
            answers: true,
            reaction: reaction(&mut Draws::new("sample reference", &[nth]), show, right),
        });
        (name.to_owned(), ArmStats::of(observations, TAU))
    });
    let comparison = |(name, stats): &(String, ArmStats)| {
        let mean = learning.reward_mean.unwrap() - stats.reward_mean.unwrap();
        let paired = || Paired {
            reference: stats.clone(),
            reward: Some(Interval {
                mean,
                ci95: [mean - 0.017, mean + 0.017],
            }),
            accepts_per_100: None,
        };
        Comparison {
            name: name.clone(),
            whole: paired(),
            thirds: [(); 3].map(|()| paired()).into(),
            together: paired(),
        }
    };
    References {
        comparisons: policies.iter().map(comparison).collect(),
        beforehand: policies.map(|(name, stats)| Reference { name, stats }).into(),
        capability: Some(capability(600.0, 93, 2.1)),
        earlier: vec![capability(200.0, 32, 0.9), capability(400.0, 63, 1.6)],
    }
}

fn capability(at_seconds: f64, version: i64, right: f64) -> Capability {
    let interval = |mean: f64, half: f64| {
        Some(Interval {
            mean,
            ci95: [mean - half, mean + half],
        })
    };
    Capability {
        at_seconds,
        version,
        pauses: 1500,
        base_right_per_100: interval(41.0, 2.6),
        version_right_per_100: interval(41.0 + right, 2.7),
        right_per_100: interval(right, 1.4),
        reward_as_served: interval(0.071, 0.02),
        reward_greedy: interval(0.034, 0.018),
        reward_minus_best: interval(0.012, 0.014),
    }
}

fn steps() -> Vec<Step> {
    let steps = (1..=92).map(|step| {
        let mut draws = Draws::new("sample step", &[step]);
        Step {
            step: step as i64,
            version: step as i64 + 1,
            at_seconds: 6.4 * step as f64,
            trajectories: Some(32),
            entropy: Some(1.9 - 0.006 * step as f64 + 0.05 * draws.normal()),
            kl: Some(2e-4 * (1.0 + 0.3 * draws.normal().abs())),
            density: Some(0.041 + 0.006 * draws.normal()),
            delta_ratio: Some(0.023 + 0.002 * draws.normal()),
        }
    });
    steps.collect()
}

fn ledger(held_out: i64) -> Ledger {
    let (generations, trained, censored, queued) = (PAUSES as i64, 1542, 711, 20);
    let dropped = generations - held_out - trained - censored - queued;
    Ledger {
        counts: LedgerCounts {
            generations,
            queued,
            trained,
            censored,
            dropped,
            held_out,
            ..LedgerCounts::default()
        },
        balanced: true,
        reasons: BTreeMap::from([
            ("censored: no_feedback".to_owned(), censored),
            ("dropped: stale".to_owned(), dropped),
        ]),
    }
}
