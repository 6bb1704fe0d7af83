//! How far a run has come: what the replay has done and counted, which the terminal shows and the
//! report is made from.

use std::{collections::BTreeMap, time::Duration};

use serde::Serialize;

use crate::{
    client::{Delivery, Failure},
    stats::Outcome,
};

/// What does not change during a run.
#[derive(Debug, Clone, Copy)]
pub struct Run {
    pub length: Duration,
    pub users: usize,
    pub seed: u64,
    pub tau: f64,
}

/// What the replay counted besides outcomes.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Counts {
    /// Pauses that were due.
    pub due: u64,
    /// Not asked for, because too many completions or pauses were open.
    pub shed: u64,
    /// Completions that failed.
    pub failed: u64,
    /// Prompts that the server refused as too long. They were sent again with less context.
    pub prompts_shortened: u64,
    pub feedback_acknowledged: u64,
    pub feedback_retries: u64,
    /// The longest delay of the replay itself at an arrival.
    pub arrival_lateness_ms_max: u64,
    pub errors: BTreeMap<String, u64>,
}

impl Counts {
    pub fn count_error(&mut self, error: String) {
        *self.errors.entry(error).or_default() += 1;
    }
}

/// The outcomes and counts of a run so far.
#[derive(Debug, Default)]
pub struct Progress {
    pub outcomes: Vec<Outcome>,
    pub counts: Counts,
    pub interrupted: bool,
}

impl Progress {
    /// Counts a pause that is over.
    pub fn add(&mut self, pause: FinishedPause) {
        let counts = &mut self.counts;
        counts.prompts_shortened += u64::from(pause.prompts_shortened);
        for delivery in pause.deliveries {
            counts.feedback_retries += delivery.retries;
            match delivery.failure {
                Some(failure) => counts.count_error(failure.to_string()),
                None => counts.feedback_acknowledged += 1,
            }
        }
        match pause.outcome {
            Ok(outcome) => self.outcomes.push(outcome),
            Err(failure) => {
                counts.failed += 1;
                counts.count_error(failure.to_string());
            }
        }
    }
}

/// One pause that is over.
pub struct FinishedPause {
    pub outcome: Result<Outcome, Failure>,
    pub prompts_shortened: u32,
    pub deliveries: Vec<Delivery>,
}
