//! The result of a run: `report.json` for programs, a table for the terminal and a page for the
//! browser, all with the same numbers.

mod collect;
mod conclusion;
mod page;
#[cfg(test)]
pub mod sample;
mod table;

use std::collections::BTreeMap;

use report::Interval;
use serde::Serialize;

pub use self::collect::{collect, patiently};
use crate::{
    queries::{Phase, Traffic},
    references::References,
    stage::{Facts, Setup},
    stats::{ArmStats, Arms, FOLLOWING, FROZEN, LEARNING, Period, VersionServed},
};

#[derive(Debug, Default, Serialize)]
pub struct RunReport {
    pub parameters: Parameters,
    #[serde(flatten)]
    pub facts: Facts,
    pub arms: Arms,
    /// Reward per pause, learning arm minus frozen arm.
    pub difference: Option<Interval>,
    pub difference_accepts_per_100: Option<Interval>,
    /// Reward per pause, following arm minus frozen arm.
    pub following_difference: Option<Interval>,
    pub following_difference_accepts_per_100: Option<Interval>,
    /// The first, second and last third of the run.
    pub thirds: Vec<Period>,
    pub versions_served: Vec<VersionServed>,
    /// Every content hash that an answer named is the one that the trainer committed for that
    /// version.
    #[serde(rename = "roots_agree")]
    pub content_hashes_agree: bool,
    /// The parts of the time from feedback to serving, in order.
    pub feedback_to_serving_phases: Vec<Phase>,
    /// What other policies would have earned on the same pauses. `None`: not measured.
    #[serde(rename = "headroom")]
    pub references: Option<References>,
    /// The run in periods of equal length.
    pub timeline: Vec<TimelineEntry>,
    pub staleness: Staleness,
}

/// Bounds of an arm.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Served {
    /// Its users' requests are sampled at this temperature at most.
    pub temperature_max: Option<f64>,
    /// It shows no text whose probability is lower.
    pub probability_min: Option<f64>,
}

#[derive(Debug, Default, Serialize)]
pub struct Parameters {
    #[serde(flatten)]
    pub setup: Setup,
    /// How the learning arm is served.
    pub learning: Served,
    /// How the arm that follows is served.
    pub following: Served,
    pub tau: f64,
    pub silent_share: f64,
    pub delay_median_seconds: f64,
    pub delay_sigma: f64,
    pub completions_in_flight_max: usize,
}

#[derive(Debug, Serialize)]
pub struct TimelineEntry {
    /// As the demo saw it.
    #[serde(flatten)]
    pub period: Period,
    /// As the tables have it, by arm.
    pub traffic: BTreeMap<String, Traffic>,
}

/// What the learning arm lost because too many steps were made before it could be trained on.
#[derive(Debug, Default, Serialize)]
pub struct Staleness {
    pub dropped: i64,
    /// Of the learning arm.
    pub generations: i64,
    pub share: Option<f64>,
}

impl Staleness {
    fn of(arm: &str, timeline: &[TimelineEntry]) -> Self {
        let traffic = || timeline.iter().filter_map(|entry| entry.traffic.get(arm));
        let dropped = traffic().map(|traffic| traffic.stale).sum();
        let generations = traffic().map(|traffic| traffic.generations).sum();
        Self {
            dropped,
            generations,
            share: (generations > 0).then(|| dropped as f64 / generations as f64),
        }
    }
}

impl RunReport {
    /// The statistics of the learning arm, of the one that follows it and of the frozen one.
    fn all_arms(&self) -> [ArmStats; 3] {
        [LEARNING, FOLLOWING, FROZEN].map(|arm| self.arms.get(arm).cloned().unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_json_has_the_members_that_readers_rely_on() {
        let json = serde_json::to_value(sample::report()).unwrap();
        let has = |value: &serde_json::Value, members: &[&str]| {
            for member in members {
                assert!(value.get(member).is_some(), "{member} is not in {value}");
            }
        };
        for arm in [LEARNING, FOLLOWING, FROZEN] {
            has(&json["arms"][arm], &["reward_mean", "accept_rate", "show_rate", "n"]);
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
        ];
        has(&json["ledger"], &dispositions);
        has(&json["ledger"], &["balanced", "trained_stale", "reasons"]);
        has(&json["feedback_to_serving_seconds"], &["p50", "p95", "n"]);
        has(&json["difference"], &["mean", "ci95"]);
        has(&json["following_difference"], &["mean", "ci95"]);
        has(&json["thirds"][2], &["arms", "difference", "following_difference"]);
        has(
            &json["timeline"][0],
            &["from_seconds", "until_seconds", "arms", "difference", "traffic"],
        );
        has(&json["headroom"]["beforehand"][0], &["name", "figures"]);
        has(&json["headroom"]["shadows"][0], &["name", "whole", "thirds"]);
        has(&json["versions_served"][0]["answers"], &["learner"]);
        has(&json, &["roots_agree", "steps_taken", "staleness", "alarms"]);
        has(&json, &["seconds", "counts", "steps", "swap_pause_ms_p50"]);
        has(&json["parameters"], &["seed", "minutes", "users", "tau"]);
    }
}
