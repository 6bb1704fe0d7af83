//! Sequential test for sample-ratio mismatch: did users reach the arms in the declared shares?
//!
//! If they did not, users were lost or assigned in a way that depends on the arm, and no comparison
//! of the arms can be trusted. With n_i users in arm i, n in all, declared shares w and a Dirichlet
//! prior around them (a_i = c w_i, so Σa = c), the Bayes factor against the declared shares is
//!
//! ```text
//! B(a + n) / B(a) · Π w_i^−n_i,    B(a) = Π Γ(a_i) / Γ(Σ a_i)
//! ```
//!
//! It is a martingale under the declared shares, so it ever reaches 1/α with probability at most α
//! (Lindon and Malek, *Anytime-valid inference for multinomial count data*, 2022). Nothing is
//! asymptotic. c says how close the prior is to the declared shares: a large c finds small
//! deviations with less evidence, a small c finds gross ones sooner.
//!
//! Count users, not requests: requests of one user share an arm.

use serde::Serialize;

/// The prior's weight in users, if a caller has no reason for another.
pub const CONCENTRATION: f64 = 100.0;
const ARMS_MAX: usize = 100;

/// Why a test cannot be made, or a look cannot be added.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    #[error("there are {0} arms; there must be 2 to {ARMS_MAX}")]
    Arms(usize),
    #[error("a share is {0}; every share must be a positive number")]
    Share(f64),
    #[error("the concentration is {0}; it must be a positive number")]
    Concentration(f64),
    #[error("{got} counts for {expected} arms")]
    Counts { expected: usize, got: usize },
    #[error("arm {arm} had {before} users and now has {now}; counts must not fall")]
    Fell { arm: usize, before: u64, now: u64 },
}

/// The test, with what it has seen.
#[derive(Debug, Clone)]
pub struct SampleRatio {
    shares: Vec<f64>,
    concentration: f64,
    counts: Vec<u64>,
    /// Of completed phases.
    log_before: f64,
    log_max: f64,
}

/// The evidence against the declared shares at one look.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Look {
    /// Natural logarithm of the Bayes factor against the declared shares.
    pub log_bayes_factor: f64,
    /// Always-valid p-value of the declared shares, over all looks so far.
    pub p: f64,
}

impl SampleRatio {
    /// `weights`: of each arm, in any unit; only their ratio counts. `concentration`: see
    /// [`CONCENTRATION`].
    ///
    /// # Errors
    /// Too few or too many arms, or a parameter that is not a positive number.
    pub fn new(weights: &[f64], concentration: f64) -> Result<Self, Error> {
        if !(concentration.is_finite() && concentration > 0.0) {
            return Err(Error::Concentration(concentration));
        }
        Ok(Self {
            shares: shares(weights)?,
            concentration,
            counts: vec![0; weights.len()],
            log_before: 0.0,
            log_max: 0.0,
        })
    }

    /// `users`: how many users were first seen in each arm in this phase, up to now.
    ///
    /// # Errors
    /// Another number of arms, or a count below that of an earlier look.
    pub fn look(&mut self, users: &[u64]) -> Result<Look, Error> {
        if users.len() != self.counts.len() {
            return Err(Error::Counts {
                expected: self.counts.len(),
                got: users.len(),
            });
        }
        for (arm, (&before, &now)) in self.counts.iter().zip(users).enumerate() {
            if now < before {
                return Err(Error::Fell { arm, before, now });
            }
        }
        self.counts.copy_from_slice(users);
        let log_bayes_factor = self.log_before + self.log_phase();
        self.log_max = self.log_max.max(log_bayes_factor);
        Ok(Look {
            log_bayes_factor,
            p: (-self.log_max).exp(),
        })
    }

    /// The declared shares change, as in a ramp. Later looks count users from 0 again: those who are
    /// first seen from now on. The Bayes factors of all phases are multiplied, which keeps the
    /// martingale.
    ///
    /// # Errors
    /// As [`SampleRatio::new`], or another number of arms.
    pub fn next_phase(&mut self, weights: &[f64]) -> Result<(), Error> {
        if weights.len() != self.shares.len() {
            return Err(Error::Counts {
                expected: self.shares.len(),
                got: weights.len(),
            });
        }
        let shares = shares(weights)?;
        self.log_before += self.log_phase();
        self.shares = shares;
        self.counts.fill(0);
        Ok(())
    }

    fn log_phase(&self) -> f64 {
        let n = self.counts.iter().sum::<u64>() as f64;
        let arms = self.shares.iter().zip(&self.counts).map(|(share, &count)| {
            let (prior, count) = (self.concentration * share, count as f64);
            libm::lgamma(prior + count) - libm::lgamma(prior) - count * share.ln()
        });
        arms.sum::<f64>() + libm::lgamma(self.concentration) - libm::lgamma(self.concentration + n)
    }
}

fn shares(weights: &[f64]) -> Result<Vec<f64>, Error> {
    if !(2..=ARMS_MAX).contains(&weights.len()) {
        return Err(Error::Arms(weights.len()));
    }
    let total = weights.iter().sum::<f64>();
    if let Some(&weight) = weights.iter().find(|weight| !(weight.is_finite() && **weight > 0.0)) {
        return Err(Error::Share(weight));
    }
    if !total.is_finite() {
        return Err(Error::Share(total));
    }
    Ok(weights.iter().map(|weight| weight / total).collect())
}
