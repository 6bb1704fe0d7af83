//! What is watched of an arm's answers, each by a test of its own ([`crate::change`]).
//!
//! A policy can gain by what no reward shows. Cursor found two such policies when it trained on what
//! users did: one made calls of tools that could not be read, and such answers were never scored; one
//! asked a question where the risky edit should have been. What is scored looks better then. How much is
//! scored, how long answers are and what they are like does not.

use serde::{Deserialize, Serialize};

use crate::change::{Design, Direction, Unit};

/// All but [`Figure::Shown`] are of answers that were shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Figure {
    /// The policy did not decline, and the surface showed the answer.
    Shown,
    /// The user accepted it.
    Accepted,
    /// The user sent what should have been written instead: `demonstration`.
    Edited,
    /// No feedback came until the horizon.
    Unanswered,
    /// It closed without a reward, for whatever reason.
    Unscored,
    /// Signals disagree: accepted and rejected, accepted with a reward below 0, or rejected with one
    /// above 0. A number below 0 counts as a reject.
    Disagreement,
    /// The harness sent `tool_failed`.
    ToolFailed,
    /// Sampled tokens.
    Length,
    /// The share of 4-grams that occurred before in the answer: 1 − distinct / all, seq-rep-4 of Welleck
    /// et al., *Neural text generation with unlikelihood training*, 2020. Of the last 512 tokens.
    Repetition,
    /// Mean −ln μ of the sampled tokens, nats per token: an estimate of the entropy that was sampled from.
    Entropy,
}

impl Figure {
    pub const ALL: [Figure; 10] = [
        Figure::Shown,
        Figure::Accepted,
        Figure::Edited,
        Figure::Unanswered,
        Figure::Unscored,
        Figure::Disagreement,
        Figure::ToolFailed,
        Figure::Length,
        Figure::Repetition,
        Figure::Entropy,
    ];

    /// In events, metrics and tables.
    pub fn name(self) -> &'static str {
        match self {
            Figure::Shown => "shown",
            Figure::Accepted => "accepted",
            Figure::Edited => "edited",
            Figure::Unanswered => "unanswered",
            Figure::Unscored => "unscored",
            Figure::Disagreement => "disagreement",
            Figure::ToolFailed => "tool_failed",
            Figure::Length => "length",
            Figure::Repetition => "repetition",
            Figure::Entropy => "entropy",
        }
    }

    /// How its changes are looked for. The other three: see [`Design`].
    pub fn design(self, margin: f64, values_per_false_alarm: f64, reference: u32) -> Design {
        let (unit, direction) = match self {
            Figure::Shown | Figure::Accepted => (Unit::Share, Direction::Down),
            Figure::Edited
            | Figure::Unanswered
            | Figure::Unscored
            | Figure::Disagreement
            | Figure::ToolFailed
            | Figure::Repetition => (Unit::Share, Direction::Up),
            Figure::Length | Figure::Entropy => (Unit::Amount, Direction::Both),
        };
        Design {
            unit,
            direction,
            margin,
            values_per_false_alarm,
            reference,
        }
    }
}
