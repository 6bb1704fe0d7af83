//! The scale that an arm is read on: what other policies would have earned on the very same pauses. Reported only; the
//! trainer never sees any of it.

use serde::Serialize;

use super::{interval::Interval, tally::Figures};

/// What one policy earns on a set of pauses.
#[derive(Debug, Clone, Serialize)]
pub struct Reference {
    /// E.g. `base, T = 1`, `base, greedy, best threshold`, `oracle`.
    pub name: String,
    pub figures: Figures,
}

/// The learning arm against one reference on the learning arm's own pauses.
#[derive(Debug, Clone, Serialize)]
pub struct Shadow {
    pub name: String,
    pub whole: Comparison,
    /// First, second and last third of the run.
    pub thirds: Vec<Comparison>,
}

/// Paired: the same pauses on both sides; intervals clustered by user.
#[derive(Debug, Clone, Serialize)]
pub struct Comparison {
    pub reference: Figures,
    /// Learning arm minus reference, reward per pause.
    pub reward: Option<Interval>,
    /// Learning arm minus reference, accepts per 100 pauses.
    pub accepts_per_100: Option<Interval>,
}

/// One pause, and what two versions suggest there (greedily, so that chance plays no part).
#[derive(Debug, Clone, Serialize)]
pub struct Example {
    pub file: String,
    /// The last lines before the cursor; the last one ends at it.
    pub context: String,
    /// What the developer really typed to the end of the line.
    pub typed: String,
    pub before: Suggested,
    pub after: Suggested,
}

#[derive(Debug, Clone, Serialize)]
pub struct Suggested {
    pub version: i64,
    /// None: it declined, nothing was shown.
    pub text: Option<String>,
    pub right: bool,
}

/// The whole scale of a run.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Headroom {
    /// Measured before the run on other users' pauses, where thresholds are chosen too.
    pub beforehand: Vec<Reference>,
    /// On the learning arm's own pauses.
    pub shadows: Vec<Shadow>,
    /// Ten pauses, before and after.
    pub examples: Vec<Example>,
}
