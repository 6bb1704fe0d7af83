//! What a run leaves behind: `report.json` for programs; a table and a page with the same numbers for people. Holds no
//! queries and no maths of its own.

mod chart;
mod page;
#[cfg(test)]
pub mod sample;
mod table;
mod verdict;

use std::{collections::BTreeMap, path::PathBuf};

use serde::Serialize;

use super::{
    history::{Alarm, StepTaken, Swap, Traffic},
    interval::Interval,
    records::{FeedbackToServing, Ledger, Phase, Recorded},
    references::Headroom,
    replay::Counts,
    tally::{Figures, VersionServed, Versions},
};

#[derive(Debug, Serialize)]
pub struct Report {
    pub parameters: Parameters,
    /// RFC 3339.
    pub started_at: String,
    /// Length of the replay, without the settling.
    pub seconds: f64,
    /// Ended early by hand.
    pub interrupted: bool,
    pub arms: BTreeMap<String, Figures>,
    /// Reward per pause, learning arm minus frozen arm; 95% interval clustered by user.
    pub difference: Option<Interval>,
    pub difference_accepts_per_100: Option<Interval>,
    /// The first, second and last third of the run.
    pub thirds: Vec<Third>,
    pub versions_served: Vec<VersionServed>,
    /// Every root that an answer named is the one that the trainer committed under that serial.
    pub roots_agree: bool,
    pub feedback_to_serving_seconds: FeedbackToServing,
    pub swap_pause_ms: SwapPause,
    /// Bytes of all deltas of the run, of the bytes of the versions that they made.
    pub delta_ratio: Option<f64>,
    pub steps: i64,
    /// Largest |Δ log p| between a logged and a recomputed token over all steps of the run, nats.
    pub parity_log_prob_difference_max: Option<f64>,
    pub ledger: Ledger,
    /// Nothing was left open, and no full cohort was left queued, when the figures were taken.
    pub settled: bool,
    /// The trajectory table's view of the same pauses, to hold against `arms.*.recorded`.
    pub trajectories: BTreeMap<String, Recorded>,
    pub completion_latency_ms: Latency,
    pub counts: Counts,
    /// What other policies would have earned on the same pauses. None: not measured.
    pub headroom: Option<Headroom>,
    /// The run in stretches of equal length.
    pub timeline: Vec<Stretch>,
    /// The learning arm by version, in groups with enough answers each.
    pub by_version: Vec<Versions>,
    pub steps_taken: Vec<StepTaken>,
    pub swaps: Vec<Swap>,
    /// What the realtime run warned of meanwhile, such as that its arm had fallen silent.
    pub alarms: Vec<Alarm>,
    /// Where the time from an answer to serving goes.
    pub feedback_to_serving_phases: Vec<Phase>,
    pub staleness: Staleness,
}

#[derive(Debug, Serialize)]
pub struct Parameters {
    pub policy: String,
    pub seed: u64,
    pub minutes: f64,
    pub rate: f64,
    pub temperature: f32,
    /// Answers were permuted: there was nothing to learn.
    pub control: bool,
    pub users: super::Users,
    pub developers: usize,
    pub files: usize,
    /// None: the demo split of the crates that this build fetched.
    pub corpus: Option<PathBuf>,
    pub tau: f64,
    pub horizon_seconds: f64,
    pub silent_share: f64,
    pub delay_median_seconds: f64,
    pub delay_sigma: f64,
    pub completions_in_flight_max: usize,
}

#[derive(Debug, Serialize)]
pub struct Third {
    pub arms: BTreeMap<String, Figures>,
    pub difference: Option<Interval>,
}

#[derive(Debug, Serialize)]
pub struct SwapPause {
    pub p50: Option<f64>,
    pub max: Option<f64>,
    pub n: i64,
}

#[derive(Debug, Serialize)]
pub struct Latency {
    pub p50: Option<f64>,
    pub p95: Option<f64>,
}

/// A stretch of the run, seconds since the first pause.
#[derive(Debug, Serialize)]
pub struct Stretch {
    pub from_seconds: f64,
    pub until_seconds: f64,
    /// As the demo saw them.
    pub arms: BTreeMap<String, Figures>,
    /// Reward per pause, learning arm minus frozen arm.
    pub difference: Option<Interval>,
    /// As the tables have them.
    pub traffic: BTreeMap<String, Traffic>,
}

/// What the learning arm lost because training takes only what the newest version sampled.
#[derive(Debug, Default, Serialize)]
pub struct Staleness {
    pub dropped: i64,
    /// Of the learning arm.
    pub generations: i64,
    pub share: Option<f64>,
}

impl Staleness {
    /// Over the whole run.
    pub fn of(arm: &str, timeline: &[Stretch]) -> Self {
        let traffic = || timeline.iter().filter_map(|stretch| stretch.traffic.get(arm));
        let dropped = traffic().map(|traffic| traffic.stale).sum();
        let generations = traffic().map(|traffic| traffic.generations).sum();
        Self {
            dropped,
            generations,
            share: (generations > 0).then(|| dropped as f64 / generations as f64),
        }
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::demo::tally::{self, FROZEN, LEARNING, Measure, Verdict, tests::outcome};

    /// Of three pauses.
    pub fn report() -> Report {
        let outcomes = [
            outcome(1, LEARNING, Verdict::Right, true),
            outcome(2, LEARNING, Verdict::Wrong, true),
            outcome(3, FROZEN, Verdict::Right, false),
        ];
        Report {
            parameters: Parameters {
                policy: "demo".to_owned(),
                seed: 1,
                minutes: 10.0,
                rate: 8.0,
                temperature: 1.0,
                control: false,
                users: crate::demo::Users::Plain,
                developers: 300,
                files: 400,
                corpus: None,
                tau: 0.25,
                horizon_seconds: 3.0,
                silent_share: 0.2,
                delay_median_seconds: 1.0,
                delay_sigma: 0.5,
                completions_in_flight_max: 64,
            },
            started_at: "2026-01-01T00:00:00Z".to_owned(),
            seconds: 600.0,
            interrupted: false,
            arms: tally::arms(outcomes.iter(), 0.25),
            difference: tally::difference(&outcomes, Measure::Reward, 0.25),
            difference_accepts_per_100: None,
            thirds: Vec::new(),
            versions_served: tally::versions_served(&outcomes),
            roots_agree: true,
            feedback_to_serving_seconds: FeedbackToServing::default(),
            swap_pause_ms: SwapPause {
                p50: Some(1.5),
                max: Some(3.0),
                n: 2,
            },
            delta_ratio: Some(0.03),
            steps: 2,
            parity_log_prob_difference_max: Some(2e-6),
            ledger: Ledger {
                generations: 3,
                trained: 2,
                censored: 1,
                balanced: true,
                ..Ledger::default()
            },
            settled: true,
            trajectories: BTreeMap::new(),
            completion_latency_ms: Latency {
                p50: Some(50.0),
                p95: Some(60.0),
            },
            counts: Counts::default(),
            headroom: None,
            timeline: Vec::new(),
            by_version: Vec::new(),
            steps_taken: Vec::new(),
            swaps: Vec::new(),
            alarms: Vec::new(),
            feedback_to_serving_phases: Vec::new(),
            staleness: Staleness::default(),
        }
    }

    #[test]
    fn the_json_has_the_members_that_readers_rely_on() {
        let json = serde_json::to_value(report()).unwrap();
        for arm in [LEARNING, FROZEN] {
            for member in ["reward_mean", "accept_rate", "show_rate", "n"] {
                assert!(json["arms"][arm].get(member).is_some(), "arms.{arm}.{member}");
            }
        }
        let dispositions = [
            "generations",
            "open",
            "queued",
            "trained",
            "censored",
            "dropped",
            "held_out",
            "erased",
            "balanced",
        ];
        assert!(dispositions.iter().all(|member| json["ledger"].get(member).is_some()));
        assert!(
            ["p50", "p95"]
                .iter()
                .all(|member| json["feedback_to_serving_seconds"].get(member).is_some())
        );
        assert!(
            ["p50", "max"]
                .iter()
                .all(|member| json["swap_pause_ms"].get(member).is_some())
        );
        assert_eq!(json["arms"]["champion"]["reward_mean"], 0.25);
        assert_eq!(json["versions_served"][0]["answers"]["champion"], 2);
        assert!(
            json["difference"].is_null(),
            "with one answering user in one arm there is no difference to report"
        );
    }
}
