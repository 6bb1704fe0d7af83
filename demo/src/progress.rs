//! How far a run has come: what the replay has done and counted, which the terminal shows and the
//! report is made from.

use std::{collections::BTreeMap, time::Duration};

use serde::Serialize;

use crate::client::{Delivery, Failure};

/// What does not change during a run.
#[derive(Debug, Clone, Copy)]
pub struct Run {
    pub length: Duration,
    pub users: usize,
    pub seed: u64,
    pub tau: f64,
}

/// What a run counted besides outcomes. In a run of sessions, a pause is a session.
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
#[derive(Debug)]
pub struct Progress<T> {
    pub outcomes: Vec<T>,
    pub counts: Counts,
    pub interrupted: bool,
}

impl<T> Default for Progress<T> {
    fn default() -> Self {
        Self {
            outcomes: Vec::new(),
            counts: Counts::default(),
            interrupted: false,
        }
    }
}

impl<T> Progress<T> {
    /// Counts what is over.
    pub fn add(&mut self, ended: Ended<T>) {
        let counts = &mut self.counts;
        counts.prompts_shortened += u64::from(ended.prompts_shortened);
        for delivery in ended.deliveries {
            counts.feedback_retries += delivery.retries;
            match delivery.failure {
                Some(failure) => counts.count_error(failure.to_string()),
                None => counts.feedback_acknowledged += 1,
            }
        }
        match ended.outcome {
            Ok(outcome) => self.outcomes.extend(outcome),
            Err(failure) => {
                counts.failed += 1;
                counts.count_error(failure.to_string());
            }
        }
    }
}

/// One pause or session that is over.
pub struct Ended<T> {
    /// `None`: nothing was answered.
    pub outcome: Result<Option<T>, Failure>,
    pub prompts_shortened: u32,
    pub deliveries: Vec<Delivery>,
}
