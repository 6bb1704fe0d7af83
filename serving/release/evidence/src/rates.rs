//! Does the candidate fail more often? An exact test that answers within a few requests.
//!
//! Outcomes are yes or no: an error, an empty answer. They are taken in blocks of n_c outcomes of the
//! candidate and n_b of the baseline, in their order of arrival. For rates θ_c > θ_b that depend
//! only on earlier blocks, the block with y_c and y_b failures has
//!
//! ```text
//! θ₀ = (n_c θ_c + n_b θ_b) / (n_c + n_b)
//!
//!     θ_c^y_c (1 − θ_c)^(n_c − y_c) · θ_b^y_b (1 − θ_b)^(n_b − y_b)
//! E = ─────────────────────────────────────────────────────────────
//!            θ₀^(y_c + y_b) (1 − θ₀)^(n_c + n_b − y_c − y_b)
//! ```
//!
//! E is an e-variable: whatever the common rate is, its mean is at most 1 (Turner, Ly and Grünwald,
//! *Generic E-variables for exact sequential k-sample tests that allow for optional stopping*, 2024,
//! Theorem 1). It grows with y_c and falls with y_b, so the mean is also at most 1 for every
//! candidate that fails less often. The rates are the posterior means of beta priors (§3.2 there). A
//! prior affects only how soon an alarm comes: give the baseline's history as its prior if there is
//! one. A block counts as E = 1 if the rates are not in the order θ_c > θ_b. The product over all blocks is a supermartingale under "not worse". By Ville's
//! inequality it ever reaches 1/α with probability at most α. Nothing is asymptotic.
//!
//! **What it needs.** Within a block, outcomes must be independent with one rate per arm. That rate
//! may change from block to block. A user whose requests all fail breaks this, so count one request
//! of each user where alarms must keep α. Count all requests where speed matters more.

use std::collections::VecDeque;

use serde::Serialize;

/// How many outcomes wait for the other arm to fill a block. Above it the oldest are dropped. That
/// depends on no outcome, so the test stays valid.
const WAITING_MAX: usize = 1_000;
const BLOCK_MAX: u32 = 100;

/// Whose request an outcome is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Arm {
    Candidate,
    Baseline,
}

/// What is declared before the first outcome.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Design {
    /// Probability of an alarm about a candidate that does not fail more often. In (0, 0.5].
    pub alpha: f64,
    /// Outcomes of candidate and baseline in a block, 1 to 100 each. About in the ratio of traffic.
    pub block: [u32; 2],
    /// Beta priors of candidate and baseline: failures and successes that count as seen. Above 0.
    pub priors: [[f64; 2]; 2],
}

impl Default for Design {
    fn default() -> Self {
        Self {
            alpha: 0.01,
            block: [1, 1],
            // Failures of the baseline are expected to be rare.
            priors: [[0.2, 0.2], [0.05, 0.95]],
        }
    }
}

/// A design that cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum Error {
    #[error("alpha is {0}; it must be above 0 and at most 0.5")]
    Alpha(f64),
    #[error("a block has {0} outcomes of one arm; it must have 1 to {BLOCK_MAX}")]
    Block(u32),
    #[error("a beta prior has the parameter {0}; it must be a positive number")]
    Prior(f64),
}

/// The test, with what it has seen.
#[derive(Debug, Clone)]
pub struct Rates {
    design: Design,
    groups: [Group; 2],
    log_e: f64,
    log_e_max: f64,
}

#[derive(Debug, Clone, Default)]
struct Group {
    waiting: VecDeque<bool>,
    /// Failures and successes of complete blocks, with those of the prior.
    seen: [f64; 2],
}

impl Group {
    fn rate(&self) -> f64 {
        self.seen[0] / (self.seen[0] + self.seen[1])
    }
}

impl Rates {
    /// # Errors
    /// A parameter of `design` that is out of range.
    pub fn new(design: Design) -> Result<Self, Error> {
        if !(design.alpha > 0.0 && design.alpha <= 0.5) {
            return Err(Error::Alpha(design.alpha));
        }
        if let Some(size) = design.block.into_iter().find(|size| !(1..=BLOCK_MAX).contains(size)) {
            return Err(Error::Block(size));
        }
        let mut parameters = design.priors.into_iter().flatten();
        if let Some(parameter) = parameters.find(|parameter| !(parameter.is_finite() && *parameter > 0.0)) {
            return Err(Error::Prior(parameter));
        }
        let groups = design.priors.map(|seen| Group {
            waiting: VecDeque::new(),
            seen,
        });
        Ok(Self {
            design,
            groups,
            log_e: 0.0,
            log_e_max: 0.0,
        })
    }

    /// Adds one outcome. It counts as soon as its block is complete.
    pub fn observe(&mut self, arm: Arm, failed: bool) {
        let waiting = &mut self.groups[arm as usize].waiting;
        waiting.push_back(failed);
        if waiting.len() > WAITING_MAX {
            waiting.pop_front();
        }
        let [candidate, baseline] = self.design.block.map(|size| size as usize);
        while self.groups[0].waiting.len() >= candidate && self.groups[1].waiting.len() >= baseline {
            let failures = [(0, candidate), (1, baseline)].map(|(group, size)| {
                let block = self.groups[group].waiting.drain(..size);
                block.filter(|failed| *failed).count() as f64
            });
            self.complete(failures);
        }
    }

    fn complete(&mut self, failures: [f64; 2]) {
        let sizes = self.design.block.map(f64::from);
        let rates = [self.groups[0].rate(), self.groups[1].rate()];
        if rates[0] > rates[1] {
            let common = (sizes[0] * rates[0] + sizes[1] * rates[1]) / (sizes[0] + sizes[1]);
            for arm in 0..2 {
                self.log_e += failures[arm] * (rates[arm] / common).ln()
                    + (sizes[arm] - failures[arm]) * ((1.0 - rates[arm]) / (1.0 - common)).ln();
            }
            self.log_e_max = self.log_e_max.max(self.log_e);
        }
        for arm in 0..2 {
            self.groups[arm].seen[0] += failures[arm];
            self.groups[arm].seen[1] += sizes[arm] - failures[arm];
        }
    }

    /// The natural logarithm of the e-value now.
    pub fn log_e(&self) -> f64 {
        self.log_e
    }

    /// Always-valid p-value of "the candidate does not fail more often".
    pub fn p(&self) -> f64 {
        (-self.log_e_max).exp()
    }

    /// The candidate fails more often. Stays so once it is.
    pub fn is_alarm(&self) -> bool {
        self.log_e_max >= -self.design.alpha.ln()
    }
}
