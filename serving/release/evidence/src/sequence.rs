//! Confidence sequences: intervals that hold at all looks together.
//!
//! The difference of two groups of users is estimated by report's [`Clusters`]: Σy / Σn for each
//! group, with a variance that is clustered by user. Δ̂ is the difference of both ratios, V the sum
//! of both variances, and I = 1/V the information. The score S = I Δ̂ is treated as a Brownian motion
//! with drift Δ at time I.
//!
//! **Boundary.** The likelihood ratio against a true difference θ is averaged over a normal prior
//! for the difference, with variance τ² = 1/ρ (Robbins 1970, *Statistical methods related to the law
//! of the iterated logarithm*; the mSPRT of Johari, Koomen, Pekelis and Walsh, *Always valid
//! inference*, 2022). With s = I (Δ̂ − θ):
//!
//! ```text
//! two-sided  M(s) = √(ρ / (I + ρ)) · exp(s² / (2 (I + ρ)))
//! one-sided  M(s) = 2 √(ρ / (I + ρ)) · exp(s² / (2 (I + ρ))) · Φ(s / √(I + ρ))
//! ```
//!
//! The one-sided form averages over the positive half of the prior (Howard, Ramdas, McAuliffe and
//! Sekhon, *Time-uniform, nonparametric, nonasymptotic confidence sequences*, 2021, §3.2). M is a
//! nonnegative supermartingale that starts at 1. By Ville's inequality it ever reaches 1/α with
//! probability at most α. The confidence sequence holds every θ with M < 1/α. Two-sided this is
//!
//! ```text
//! Δ̂ ± √((I + ρ) · ln((I + ρ) / (α² ρ))) / I
//! ```
//!
//! The one-sided boundary is found by bisection. The always-valid p-value is min(1, 1/M) at θ = 0.
//!
//! **Scale.** τ must be chosen before the first look. A team declares the effect δ that it wants to
//! see soonest. At Δ̂ = δ the two-sided interval excludes 0 at the information (1 + 1/k) ln((1 + k)/α²)
//! / δ², with k = I / ρ. The derivative is zero where
//!
//! ```text
//! k = ln((1 + k) / α²),    τ² = δ² k / (1 + k),    I = (1 + k) / δ²
//! ```
//!
//! So τ is a little below δ. Howard et al. (§3.5) give the same optimum through Lambert's W, and
//! advise to use 2α in place of α for one side. Other effects are also found, only later than with
//! the scale that suits them. A wrong δ costs time but never validity.
//!
//! **Validity.** The guarantee is asymptotic: means of many users are nearly normal and V is nearly
//! known (Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas, *Time-uniform central limit theory and
//! asymptotic confidence sequences*, 2024). So [`Design`] gives no bounds below a minimum number of
//! users, nor without variation between users. If one group alone has none (a version that is always
//! silent), its users get the variance of the other group's.
//!
//! Users come back, so an estimate is not a sum of independent terms. S behaves like a Brownian
//! motion if the covariance of an earlier and a later estimate is the later one's variance
//! (Scharfstein, Tsiatis and Robins 1997). That holds if each user's share of the observations
//! stays about the same, or if all users have equally many. If the users who came first have more
//! than their share, estimates are correlated more strongly. Then one side is crossed less often
//! (Slepian's inequality). If a few new users come to dominate, the guarantee is lost, and
//! [`Bounds::information`] falls from one look to the next. `docs/measurements/evidence.md` has measured rates.

use std::collections::BTreeMap;

use report::{Clusters, Estimate};
use serde::Serialize;

/// What is declared before the first look. Immutable, so that no look can change it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Design {
    alpha: f64,
    sides: Sides,
    soonest: f64,
    users_min: u64,
    /// k = I / ρ, where the bounds are as far from the estimate as `soonest`.
    k: f64,
}

/// On which sides the difference is bounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Sides {
    /// Below and above. Both bounds together fail with probability at most α.
    Both,
    /// Below alone. Shows that a candidate is better.
    Lower,
    /// Above alone. Shows that a candidate is worse.
    Upper,
}

/// A design that cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum Error {
    #[error("alpha is {0}; it must be above 0 and at most 0.5")]
    Alpha(f64),
    #[error("the effect to see soonest is {0}; it must be a positive number in units of reward")]
    Soonest(f64),
    #[error("users_min is {0}; a variance between users needs at least 2")]
    UsersMin(u64),
}

/// Why there are no bounds yet.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum NotYet {
    #[error("the candidate has {candidate} users and the baseline {baseline}; both need {needed}")]
    Users { needed: u64, candidate: u64, baseline: u64 },
    #[error("there is no variation between users, so the error cannot be estimated")]
    NoVariation,
    #[error("a value is not a finite number")]
    NotFinite,
}

/// The difference candidate − baseline at one look.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Bounds {
    /// The estimate Δ̂, in units of reward.
    pub difference: f64,
    /// In units of reward. −∞ with [`Sides::Upper`] (JSON: null).
    pub low: f64,
    /// In units of reward. ∞ with [`Sides::Lower`] (JSON: null).
    pub high: f64,
    /// Always-valid p-value of "no difference", with one side of "not better" or "not worse".
    pub p: f64,
    /// 1 / (variance of Δ̂), in 1/reward².
    pub information: f64,
    /// Users of the candidate and of the baseline.
    pub users: [u64; 2],
}

impl Design {
    /// `alpha`: probability of a wrong bound at any look. `soonest`: the effect that should be seen
    /// soonest, in units of reward. `users_min`: users that each group needs before the first look.
    ///
    /// # Errors
    /// A parameter that is out of range.
    pub fn new(alpha: f64, sides: Sides, soonest: f64, users_min: u64) -> Result<Self, Error> {
        if !(alpha > 0.0 && alpha <= 0.5) {
            return Err(Error::Alpha(alpha));
        }
        if !(soonest.is_finite() && soonest > 0.0) {
            return Err(Error::Soonest(soonest));
        }
        if users_min < 2 {
            return Err(Error::UsersMin(users_min));
        }
        let two_sided = if sides == Sides::Both { alpha } else { 2.0 * alpha };
        Ok(Self {
            alpha,
            sides,
            soonest,
            users_min,
            k: best_ratio(two_sided),
        })
    }

    /// Standard deviation τ of the prior, in units of reward.
    pub fn scale(&self) -> f64 {
        self.soonest * (self.k / (1.0 + self.k)).sqrt()
    }

    /// Information in 1/reward² at which two-sided bounds are `soonest` away from the estimate. The
    /// number of observations follows: for independent ones with variance σ², n/2 in each of two
    /// groups have the information n / (4σ²).
    pub fn information_planned(&self) -> f64 {
        (1.0 + self.k) / (self.soonest * self.soonest)
    }

    /// The bounds of candidate − baseline. Each group needs users of its own: a user who is in both
    /// makes the variance wrong.
    ///
    /// # Errors
    /// [`NotYet`] if there is too little evidence for any bound.
    pub fn between<K: Ord>(&self, candidate: &Clusters<K>, baseline: &Clusters<K>) -> Result<Bounds, NotYet> {
        match (candidate.estimate(), baseline.estimate()) {
            (Some(candidate), Some(baseline)) => self.of(candidate, baseline),
            _ => Err(NotYet::Users {
                needed: self.users_min,
                candidate: candidate.len() as u64,
                baseline: baseline.len() as u64,
            }),
        }
    }

    /// The same for estimates that [`Clusters`] or a database made. Their degrees of freedom are the
    /// number of users − 1.
    ///
    /// # Errors
    /// [`NotYet`] if there is too little evidence for any bound.
    pub fn of(&self, candidate: Estimate, baseline: Estimate) -> Result<Bounds, NotYet> {
        let users = [candidate, baseline].map(|group| (group.freedom + 1.0).round() as u64);
        if users.into_iter().any(|users| users < self.users_min) {
            return Err(NotYet::Users {
                needed: self.users_min,
                candidate: users[0],
                baseline: users[1],
            });
        }
        // less than this is rounding
        let of_users = |group: Estimate| match group.variance {
            variance if variance <= 1e-18 * (1.0 + group.mean * group.mean) => 0.0,
            variance => variance,
        };
        let information = match [candidate, baseline].map(of_users) {
            // An answer that is always the same, such as silence, is not known better than others are.
            [0.0, of_baseline] => 1.0 / (of_baseline * (1.0 + users[1] as f64 / users[0] as f64)),
            [of_candidate, 0.0] => 1.0 / (of_candidate * (1.0 + users[0] as f64 / users[1] as f64)),
            [of_candidate, of_baseline] => 1.0 / (of_candidate + of_baseline),
        };
        if information.is_infinite() {
            return Err(NotYet::NoVariation);
        }
        self.at(candidate.mean - baseline.mean, information, users)
    }

    /// The bounds of several periods together, such as the steps of a release with other shares of users:
    /// candidate and baseline in each. Pooled means would mix the difference with what changed over time,
    /// so periods are compared apart. With differences dₖ and information Iₖ ([`Design::of`]):
    ///
    /// ```text
    /// Δ̂ = Σ wₖ dₖ,   wₖ = Iₖ / Σ I
    /// V = max(1 / Σ I,  m / (m − 1) · Σᵤ (Σₖ wₖ ψᵤₖ)²),   ψᵤₖ = ± (yᵤₖ − Rₖ nᵤₖ) / Nₖ
    /// ```
    ///
    /// ψ is what user u adds to the estimate of the period, R the side's mean and N its observations; minus
    /// for the baseline. The same users come in several periods, also on both sides, so a period adds less
    /// than its own information. m is the smallest number of users of a side in a period.
    ///
    /// `estimate` gives the mean of a side and its variance, such as [`Clusters::estimate`]. A period without
    /// bounds of its own counts nothing. [`Bounds::users`] are those of the period with most information.
    ///
    /// # Errors
    /// Why the last period has no bounds, if none has.
    pub fn across<K: Ord>(
        &self,
        periods: &[[Clusters<K>; 2]],
        estimate: fn(&Clusters<K>) -> Option<Estimate>,
    ) -> Result<Bounds, NotYet> {
        let mut missing = NotYet::Users {
            needed: self.users_min,
            candidate: 0,
            baseline: 0,
        };
        let mut counted = Vec::new();
        for sides in periods {
            let [Some(candidate), Some(baseline)] = [estimate(&sides[0]), estimate(&sides[1])] else {
                continue;
            };
            match self.of(candidate, baseline) {
                Ok(bounds) => counted.push((sides, [candidate.mean, baseline.mean], bounds)),
                Err(reason) => missing = reason,
            }
        }
        let most = counted.iter().map(|(.., bounds)| *bounds);
        let most = most
            .max_by(|a, b| a.information.total_cmp(&b.information))
            .ok_or(missing)?;
        let information: f64 = counted.iter().map(|(.., bounds)| bounds.information).sum();
        let mut difference = 0.0;
        let mut added: BTreeMap<&K, f64> = BTreeMap::new();
        for (sides, means, bounds) in &counted {
            let weight = bounds.information / information;
            difference += weight * bounds.difference;
            for (clusters, (mean, sign)) in sides.iter().zip(means.iter().zip([1.0, -1.0])) {
                let all = clusters.n() as f64;
                for (user, sum, n) in clusters.iter() {
                    *added.entry(user).or_default() += sign * weight * (sum - mean * n) / all;
                }
            }
        }
        let fewest = counted.iter().flat_map(|(.., bounds)| bounds.users).min();
        let fewest = fewest.unwrap_or(self.users_min) as f64;
        let by_user = fewest / (fewest - 1.0) * added.values().map(|added| added * added).sum::<f64>();
        self.at(difference, 1.0 / by_user.max(1.0 / information), most.users)
    }

    fn at(&self, difference: f64, information: f64, users: [u64; 2]) -> Result<Bounds, NotYet> {
        if !(difference.is_finite() && information.is_finite() && information > 0.0) {
            return Err(NotYet::NotFinite);
        }
        let half = self.half_width(information);
        let score = difference * information;
        let log_mixture = match self.sides {
            Sides::Both => log_two_sided(score, information, self.rho()),
            Sides::Lower => log_one_sided(score, information, self.rho()),
            Sides::Upper => log_one_sided(-score, information, self.rho()),
        };
        Ok(Bounds {
            difference,
            low: if self.sides == Sides::Upper {
                f64::NEG_INFINITY
            } else {
                difference - half
            },
            high: if self.sides == Sides::Lower {
                f64::INFINITY
            } else {
                difference + half
            },
            p: (-log_mixture).exp().min(1.0),
            information,
            users,
        })
    }

    /// Distance of a bound from the estimate, in units of reward. `information` is in 1/reward².
    pub fn half_width(&self, information: f64) -> f64 {
        let rho = self.rho();
        let two_sided = ((information + rho) * ((information + rho) / (self.alpha.powi(2) * rho)).ln()).sqrt();
        if self.sides == Sides::Both {
            return two_sided / information;
        }
        // The one-sided mixture is at least the two-sided one for s ≥ 0, so its boundary is lower.
        let (mut below, mut above) = (0.0, two_sided);
        for _ in 0..60 {
            let middle = 0.5 * (below + above);
            if log_one_sided(middle, information, rho) < -self.alpha.ln() {
                below = middle;
            } else {
                above = middle;
            }
        }
        above / information
    }

    fn rho(&self) -> f64 {
        self.scale().powi(-2)
    }
}

/// k = ln((1 + k) / α²). The map contracts by 1 / (1 + k) a step.
fn best_ratio(alpha: f64) -> f64 {
    (0..200).fold(1.0, |k: f64, _| (1.0 + k).ln() - 2.0 * alpha.ln())
}

fn log_two_sided(s: f64, information: f64, rho: f64) -> f64 {
    0.5 * (rho / (information + rho)).ln() + s * s / (2.0 * (information + rho))
}

fn log_one_sided(s: f64, information: f64, rho: f64) -> f64 {
    let x = s / (information + rho).sqrt();
    // 2 Φ(x)
    log_two_sided(s, information, rho) + libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2).ln()
}

/// All looks together: the smallest p-value and the intersection of all bounds.
///
/// The bounds of all looks hold together with probability 1 − α, so their intersection does too.
/// That needs one true difference for the whole release. An empty intersection says that there was
/// none (the difference changed over time), or that some bounds were wrong.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Running {
    low: f64,
    high: f64,
    p: f64,
}

impl Default for Running {
    fn default() -> Self {
        Self {
            low: f64::NEG_INFINITY,
            high: f64::INFINITY,
            p: 1.0,
        }
    }
}

impl Running {
    /// Adds a look. All looks of one `Running` must come from one [`Design`].
    pub fn look(&mut self, bounds: &Bounds) {
        self.low = self.low.max(bounds.low);
        self.high = self.high.min(bounds.high);
        self.p = self.p.min(bounds.p);
    }

    /// Low and high, in units of reward. `None` if the looks contradict each other.
    pub fn bounds(&self) -> Option<[f64; 2]> {
        (self.low <= self.high).then_some([self.low, self.high])
    }

    /// The always-valid p-value of all looks so far.
    pub fn p(&self) -> f64 {
        self.p
    }
}
