//! What a run leaves behind: `report.json`, and the same as a table for people. Holds no queries and no maths of its own.

use std::{collections::BTreeMap, fmt::Write, path::PathBuf};

use serde::Serialize;

use super::{
    interval::Interval,
    live::or_dash,
    records::{FeedbackToServing, Ledger, Phase, Recorded},
    replay::Counts,
    tally::{FROZEN, Figures, LEARNING, VersionServed},
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
    /// Its parts, one after the other.
    pub feedback_to_serving_phases: Vec<Phase>,
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
}

#[derive(Debug, Serialize)]
pub struct Parameters {
    pub policy: String,
    pub seed: u64,
    pub minutes: f64,
    pub rate: f64,
    pub users: usize,
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

impl Report {
    /// The report for people. Ends with a newline.
    pub fn table(&self) -> String {
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = self.write_table(&mut text);
        text
    }

    fn write_table(&self, out: &mut String) -> std::fmt::Result {
        writeln!(
            out,
            "{:<20} {:>8} {:>8} {:>8} {:>20} {:>8} {:>8} {:>8}",
            "", "users", "pauses", "reward", "95%", "accepts", "of shown", "shown"
        )?;
        for name in [LEARNING, FROZEN] {
            write_arm(out, "whole run", name, &self.arms)?;
        }
        for (third, label) in self.thirds.iter().zip(["1st third", "2nd third", "3rd third"]) {
            for name in [LEARNING, FROZEN] {
                write_arm(out, label, name, &third.arms)?;
            }
        }
        writeln!(
            out,
            "\naccepts: per 100 pauses; reward: accept {:+.2}, reject {:+.2}, decline 0; {} unanswered left out",
            1.0 - self.parameters.tau,
            -self.parameters.tau,
            self.arms.values().map(|arm| arm.unanswered).sum::<u64>()
        )?;
        writeln!(
            out,
            "{LEARNING} − {FROZEN}: reward {}, accepts per 100 {}",
            interval(self.difference, 3),
            interval(self.difference_accepts_per_100, 1)
        )?;
        writeln!(
            out,
            "feedback to serving: p50 {} s, p95 {} s (n {}); {} steps, {} versions answered, roots {}",
            or_dash(self.feedback_to_serving_seconds.p50, 1),
            or_dash(self.feedback_to_serving_seconds.p95, 1),
            self.feedback_to_serving_seconds.n,
            self.steps,
            self.versions_served.len(),
            if self.roots_agree { "agree" } else { "DISAGREE" },
        )?;
        if !self.feedback_to_serving_phases.is_empty() {
            let phases = self.feedback_to_serving_phases.iter();
            let parts: Vec<String> = phases
                .map(|p| format!("{} {:.1} ({:.1})", p.name, p.p50, p.p95))
                .collect();
            writeln!(out, "  of which p50 (p95) s: {}", parts.join(", "))?;
        }
        writeln!(
            out,
            "swap pause: p50 {} ms, max {} ms; delta {} % of a version; parity max |Δ log p| {}",
            or_dash(self.swap_pause_ms.p50, 3),
            or_dash(self.swap_pause_ms.max, 3),
            or_dash(self.delta_ratio.map(|ratio| 100.0 * ratio), 2),
            self.parity_log_prob_difference_max
                .map_or("–".to_owned(), |parity| format!("{parity:.1e}")),
        )?;
        let ledger = &self.ledger;
        writeln!(
            out,
            "ledger: {} generations = {} trained + {} held out + {} censored + {} dropped + {} queued + {} open + {} erased: {}",
            ledger.generations,
            ledger.trained,
            ledger.held_out,
            ledger.censored,
            ledger.dropped,
            ledger.queued,
            ledger.open,
            ledger.erased,
            if ledger.balanced { "balanced" } else { "NOT BALANCED" },
        )?;
        for (reason, generations) in &ledger.reasons {
            writeln!(out, "  {reason} {generations}")?;
        }
        let lost = &ledger.lost_to_staleness;
        writeln!(
            out,
            "lost to staleness 0: {} of {LEARNING}'s rewarded, {} %: sampled during a cohort's last horizons, its step and the swap",
            lost.dropped,
            or_dash(lost.share.map(|share| 100.0 * share), 1),
        )?;
        let counts = &self.counts;
        writeln!(
            out,
            "pauses: {} due, {} shed, {} failed, {} prompts shortened, {} answers acknowledged after {} retries",
            counts.due,
            counts.shed,
            counts.failed,
            counts.prompts_shortened,
            counts.feedback_acknowledged,
            counts.feedback_retries
        )?;
        for (error, n) in &counts.errors {
            writeln!(out, "  {error} {n}")?;
        }
        if self.interrupted {
            writeln!(out, "ended by hand after {:.0} s", self.seconds)?;
        }
        if !self.settled {
            writeln!(
                out,
                "not settled: some generations were still on their way when the figures were taken"
            )?;
        }
        Ok(())
    }
}

fn write_arm(out: &mut String, label: &str, name: &str, arms: &BTreeMap<String, Figures>) -> std::fmt::Result {
    let Some(arm) = arms.get(name) else {
        return Ok(());
    };
    let interval = arm
        .reward_ci95
        .map_or("–".to_owned(), |[low, high]| format!("{low:+.3} … {high:+.3}"));
    writeln!(
        out,
        "{label:<10} {name:<9} {:>8} {:>8} {:>8} {interval:>20} {:>8} {:>8} {:>8}",
        arm.users,
        arm.pauses,
        arm.reward_mean.map_or("–".to_owned(), |reward| format!("{reward:+.3}")),
        or_dash(arm.accepts_per_100, 1),
        or_dash(arm.accept_rate, 3),
        or_dash(arm.show_rate, 3),
    )
}

fn interval(interval: Option<Interval>, digits: usize) -> String {
    interval.map_or(
        "–".to_owned(),
        |Interval {
             mean,
             ci95: [low, high],
         }| { format!("{mean:+.digits$} (95% {low:+.digits$} … {high:+.digits$}, by user)") },
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::records::Lost;
    use crate::demo::tally::{self, Measure, Verdict, tests::outcome};

    fn report() -> Report {
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
                users: 300,
                files: 400,
                corpus: None,
                tau: 0.25,
                horizon_seconds: 4.0,
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
            feedback_to_serving_phases: vec![Phase {
                name: "horizon".to_owned(),
                p50: 3.25,
                p95: 4.0,
            }],
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
                lost_to_staleness: Lost {
                    dropped: 3,
                    share: Some(0.6),
                },
                ..Ledger::default()
            },
            settled: true,
            trajectories: BTreeMap::new(),
            completion_latency_ms: Latency {
                p50: Some(50.0),
                p95: Some(60.0),
            },
            counts: Counts::default(),
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
        assert_eq!(json["feedback_to_serving_phases"][0]["name"], "horizon");
        assert_eq!(json["ledger"]["lost_to_staleness"]["share"], 0.6);
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

    #[test]
    fn the_table_says_what_was_left_out_and_whether_the_ledger_balances() {
        let mut report = report();
        let table = report.table();
        assert!(
            table.contains("reward: accept +0.75, reject -0.25, decline 0; 1 unanswered left out"),
            "{table}"
        );
        assert!(
            table
                .contains("= 2 trained + 0 held out + 1 censored + 0 dropped + 0 queued + 0 open + 0 erased: balanced")
        );
        assert!(!table.contains("not settled"));
        assert!(table.contains("of which p50 (p95) s: horizon 3.2 (4.0)"), "{table}");
        assert!(
            table.contains("lost to staleness 0: 3 of champion's rewarded, 60.0 %"),
            "{table}"
        );
        (report.settled, report.ledger.balanced) = (false, false);
        assert!(report.table().contains("NOT BALANCED") && report.table().contains("not settled"));
    }
}
