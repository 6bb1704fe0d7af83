//! The report of a run of sessions: JSON for programs, and a table for the terminal.

use std::fmt::Write;

use report::{
    Interval,
    number::{decimal, interval, percent, range, signed},
};
use serde::Serialize;

use super::{
    start::Start,
    stats::{ArmStats, Difference, Part, Rewards},
};
use crate::{
    queries::Episodes,
    stage::{Facts, Setup},
    stats::{FOLLOWING, FROZEN, LEARNING},
};

/// A base that solves fewer sessions gives nothing to learn from; one that solves more leaves little
/// to learn.
pub const START_SHARES: std::ops::RangeInclusive<f64> = 0.05..=0.50;

#[derive(Debug, Serialize)]
pub struct SessionReport {
    pub parameters: Parameters,
    /// How well the base did before the run.
    pub start: Start,
    #[serde(flatten)]
    pub facts: Facts,
    pub conclusion: &'static str,
    pub whole: Part,
    /// First and second half of the run.
    pub halves: [Part; 2],
    pub episodes: Episodes,
}

#[derive(Debug, Serialize)]
pub struct Parameters {
    #[serde(flatten)]
    pub setup: Setup,
    /// Users accepted or rejected each suggestion too.
    pub turn_signals: bool,
    pub rewards: Rewards,
    pub turns_max: usize,
    pub silent_share: f64,
    pub message_share: f64,
    pub delay_median_seconds: f64,
}

/// What the intervals allow to say.
pub fn conclude(start: &Start, learner: Difference, champion: Difference) -> &'static str {
    match (start.success, learner.success, champion.success) {
        (None, ..) => "No claim: it is not known how many sessions the base solves",
        (Some(start), ..) if start.mean < *START_SHARES.start() => {
            "No claim: the base solves too few sessions to learn from"
        }
        (Some(start), ..) if start.mean > *START_SHARES.end() => {
            "No claim: the base solves too many sessions to tell what was learned"
        }
        (_, Some(learner), _) if learner.is_below_zero() => "It got worse",
        (_, Some(learner), Some(champion)) if learner.is_above_zero() && champion.is_above_zero() => "It learned",
        (_, Some(learner), _) if learner.is_above_zero() => "It learned; the arm that follows is not clearly better",
        (_, Some(_), _) => "No clear difference",
        _ => "Too little happened to tell",
    }
}

impl SessionReport {
    /// Ends with a newline.
    pub fn table(&self) -> String {
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = self.write_table(&mut text);
        text
    }

    fn write_table(&self, out: &mut String) -> std::fmt::Result {
        writeln!(out, "{}", self.start)?;
        writeln!(
            out,
            "{:<20} {:>6} {:>8} {:>8} {:>18} {:>8} {:>18} {:>6} {:>11} {:>8} {:>8}",
            "", "users", "sessions", "solved", "95%", "reward", "95%", "turns", "per success", "declined", "of shown"
        )?;
        write_arms(out, "whole run", &self.whole)?;
        for (half, label) in self.halves.iter().zip(["1st half", "2nd half"]) {
            write_arms(out, label, half)?;
        }
        let Rewards { accept, reject } = self.parameters.rewards;
        writeln!(
            out,
            "\nreward: good {}, bad {}, over the sessions with a verdict; intervals are by user",
            signed(Some(accept), 2),
            signed(Some(reject), 2),
        )?;
        for (label, part) in [("", &self.whole), ("2nd half: ", &self.halves[1])] {
            for (arm, difference) in [(LEARNING, part.learner), (FOLLOWING, part.champion)] {
                writeln!(
                    out,
                    "{label}{arm} − {FROZEN}: solved {}, reward {}",
                    interval(difference.success, 3),
                    interval(difference.reward, 3)
                )?;
            }
        }
        let episodes = &self.episodes;
        writeln!(
            out,
            "sessions in the tables: {} of {} turns; {} closed as a whole, {} censored; {} trained on, {} of them whole, \
             {} in more than one step; turns: {} trained on, {} stale",
            episodes.episodes,
            episodes.turns,
            episodes.closed,
            episodes.censored,
            episodes.trained,
            episodes.trained_whole,
            episodes.divided,
            episodes.turns_trained,
            episodes.turns_stale,
        )?;
        writeln!(out, "{}", self.facts)?;
        if self.facts.counts.shed + self.facts.counts.failed > 0 {
            let counts = &self.facts.counts;
            writeln!(
                out,
                "of {} sessions, {} were shed and {} failed",
                counts.due, counts.shed, counts.failed
            )?;
        }
        if !self.facts.settled {
            writeln!(
                out,
                "some generations had no final disposition when the figures were taken"
            )?;
        }
        writeln!(
            out,
            "{}. The users are simulated, and this is one run with one seed.",
            self.conclusion
        )
    }
}

fn write_arms(out: &mut String, label: &str, part: &Part) -> std::fmt::Result {
    for name in [LEARNING, FOLLOWING, FROZEN] {
        let Some(arm) = part.arms.get(name) else { continue };
        let ArmStats {
            success,
            success_ci95,
            reward,
            reward_ci95,
            ..
        } = *arm;
        writeln!(
            out,
            "{label:<10} {name:<9} {:>6} {:>8} {:>8} {:>18} {:>8} {:>18} {:>6} {:>11} {:>8} {:>8}",
            arm.users,
            arm.sessions,
            percent(success, 1),
            range(success_ci95, 3),
            signed(reward, 3),
            range(reward_ci95, 3),
            decimal(arm.turns_per_session, 2),
            decimal(arm.turns_per_success, 2),
            percent(arm.declined, 0),
            percent(arm.right_of_shown, 0),
        )?;
    }
    Ok(())
}

impl std::fmt::Display for Start {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Interval {
            mean,
            ci95: [low, high],
        } = self.success.unwrap_or(Interval {
            mean: f64::NAN,
            ci95: [f64::NAN; 2],
        });
        write!(
            f,
            "start: the base solves {} ({} … {}) of {} sessions of other users; by turn {}; it declines {} of its turns",
            percent(Some(mean), 1),
            percent(Some(low), 1),
            percent(Some(high), 1),
            self.sessions,
            self.success_by_turn.map(|share| percent(Some(share), 1)).join(", "),
            percent(self.declined, 0),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn around(mean: f64) -> Option<Interval> {
        Some(Interval {
            mean,
            ci95: [mean - 0.02, mean + 0.02],
        })
    }

    fn conclusion(start: f64, learner: f64, champion: f64) -> &'static str {
        let start = Start {
            success: around(start),
            ..Start::default()
        };
        let difference = |mean| Difference {
            success: around(mean),
            reward: None,
        };
        conclude(&start, difference(learner), difference(champion))
    }

    #[test]
    fn the_conclusion_follows_the_intervals() {
        assert_eq!(conclusion(0.3, 0.1, 0.1), "It learned");
        assert!(conclusion(0.3, 0.1, 0.0).starts_with("It learned; the arm that follows"));
        assert_eq!(conclusion(0.3, 0.01, 0.1), "No clear difference");
        assert_eq!(conclusion(0.3, -0.1, -0.1), "It got worse");
    }

    #[test]
    fn nothing_is_claimed_for_a_base_that_solves_too_few_or_too_many_sessions() {
        for start in [0.01, 0.049, 0.51, 0.9] {
            assert!(conclusion(start, 0.1, 0.1).starts_with("No claim"), "{start}");
        }
        let unknown = conclude(&Start::default(), Difference::default(), Difference::default());
        assert!(unknown.starts_with("No claim"));
    }
}
