//! What a candidate would have earned on logged traffic, from logged propensities.
//!
//! A row is an action a with reward r that the logging policy took with probability μ(a|x), and the
//! candidate would have taken with π(a|x). With w = π / μ and n rows, three estimates of the
//! candidate's mean reward are:
//!
//! ```text
//! IPS    Σ w r / n                      Horvitz and Thompson 1952
//! SNIPS  R = Σ w r / Σ w                Swaminathan and Joachims 2015 (Hájek's ratio)
//! DR     Σ (v + w (r − q)) / n          Dudík, Langford and Li 2011
//! ```
//!
//! q is a model's prediction of the reward of a, and v = Σ_b π(b|x) q(b) its prediction for the
//! candidate. The model must not have been fitted on the same rows. IPS and DR are unbiased if μ is
//! right and above 0 wherever π is; a wrong model makes DR's variance larger but adds no bias. SNIPS
//! is biased by O(1/n), does not change when a constant is added to all rewards, and usually varies
//! least without a model.
//!
//! Variances are clustered by user ([`Clusters`]). SNIPS is linearized: the residuals
//! w (r − R) / mean(w) of a user are summed.
//!
//! **Overlap.** If the candidate often does what was seldom logged, few rows carry the estimate. The
//! effective sample size is (Σw)² / Σw² (Kish 1965). There is no estimate if its share of the rows is
//! small, if one row has a large share of all weights, or if the mean weight is far from 1: its
//! expectation is 1, unless propensities are wrong or the log lacks actions of the candidate.
//!
//! The intervals of these estimates ([`Estimate::interval`]) are for one look at a time that is fixed
//! in advance. They judge a candidate before a release and do not decide one.

use report::{Clusters, Estimate};
use serde::Serialize;

/// One logged action. `K` names the user.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Row<K> {
    pub user: K,
    /// In units of reward.
    pub reward: f64,
    /// w = π(a|x) / μ(a|x): the candidate's probability of the action over that of the logging policy. At
    /// least 0. For a sequence of tokens it is the product of their ratios.
    pub weight: f64,
    /// `None` in every row: no doubly robust estimate.
    pub prediction: Option<Prediction>,
}

/// What a model of the reward predicts, in units of reward.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prediction {
    /// q: for the logged action.
    pub action: f64,
    /// v: for the candidate's actions on average.
    pub candidate: f64,
}

/// How much overlap an estimate needs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Limits {
    /// Users.
    pub users_min: u64,
    /// Effective sample size / rows, 0 to 1.
    pub effective_share_min: f64,
    /// Largest weight / sum of weights, 0 to 1.
    pub weight_share_max: f64,
    /// |mean weight − 1| in standard errors.
    pub weight_mean_z_max: f64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            users_min: 30,
            effective_share_min: 0.05,
            weight_share_max: 0.05,
            weight_mean_z_max: 4.0,
        }
    }
}

/// Why there is no estimate.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Refusal {
    #[error("row {row}: {name} is {value}, which is out of range")]
    OutOfRange { row: usize, name: &'static str, value: f64 },
    #[error("row {0} differs from the first in whether it has a prediction")]
    MixedPredictions(usize),
    #[error("there are {got} users; {needed} are needed")]
    Users { needed: u64, got: u64 },
    #[error("the candidate has probability 0 for every logged action")]
    NoOverlap,
    #[error("too little overlap: {share:.4} of the rows are effective, {min} are needed")]
    EffectiveShare { share: f64, min: f64 },
    #[error("too little overlap: one row has {share:.4} of all weight, at most {max} is allowed")]
    WeightShare { share: f64, max: f64 },
    #[error("the mean weight is {mean:.4}, {z:.1} standard errors from 1: propensities are wrong or actions missing")]
    WeightMean { mean: f64, z: f64 },
}

/// Estimates of the candidate's mean reward, and how much evidence carries them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Value {
    /// By inverse propensities, in units of reward.
    pub ips: Estimate,
    /// SNIPS, in units of reward. The one to quote if there are no predictions.
    pub self_normalized: Estimate,
    /// In units of reward. `None` without predictions.
    pub doubly_robust: Option<Estimate>,
    pub rows: u64,
    pub users: u64,
    /// Rows.
    pub effective_rows: f64,
    /// Largest weight / sum of weights.
    pub weight_share: f64,
    /// Its expectation is 1.
    pub weight_mean: f64,
}

/// The candidate's value on logged `rows`.
///
/// # Errors
/// [`Refusal`] if a row is invalid or the overlap is too small.
pub fn value<K: Ord + Clone>(rows: &[Row<K>], limits: &Limits) -> Result<Value, Refusal> {
    for (index, row) in rows.iter().enumerate() {
        check(index, row)?;
        if row.prediction.is_some() != rows[0].prediction.is_some() {
            return Err(Refusal::MixedPredictions(index));
        }
    }
    let weights = clusters(rows, |row| row.weight);
    let users = weights.len() as u64;
    let too_few = Refusal::Users {
        needed: limits.users_min.max(2),
        got: users,
    };
    let Some(weight) = weights.estimate().filter(|_| users >= limits.users_min) else {
        return Err(too_few);
    };
    let n = rows.len() as f64;
    let sum = weight.mean * n;
    if sum <= 0.0 {
        return Err(Refusal::NoOverlap);
    }
    let squares = rows.iter().map(|row| row.weight.powi(2)).sum::<f64>();
    let largest = rows.iter().map(|row| row.weight).fold(0.0, f64::max);
    let (effective_rows, weight_share) = (sum * sum / squares, largest / sum);
    let effective_share = effective_rows / n;
    if effective_share < limits.effective_share_min {
        return Err(Refusal::EffectiveShare {
            share: effective_share,
            min: limits.effective_share_min,
        });
    }
    if weight_share > limits.weight_share_max {
        return Err(Refusal::WeightShare {
            share: weight_share,
            max: limits.weight_share_max,
        });
    }
    // Equal weights have no variance. Rounding must not make them differ from 1.
    let z = (weight.mean - 1.0).abs() / weight.variance.sqrt().max(1e-9);
    if z > limits.weight_mean_z_max {
        return Err(Refusal::WeightMean { mean: weight.mean, z });
    }

    let ratio = rows.iter().map(|row| row.weight * row.reward).sum::<f64>() / sum;
    let estimate = |value: &dyn Fn(&Row<K>) -> f64| clusters(rows, value).estimate();
    let residual = estimate(&|row| row.weight * (row.reward - ratio) / weight.mean);
    let robust = |row: &Row<K>| {
        row.prediction.map_or(f64::NAN, |prediction| {
            prediction.candidate + row.weight * (row.reward - prediction.action)
        })
    };
    let (Some(ips), Some(residual)) = (estimate(&|row| row.weight * row.reward), residual) else {
        return Err(too_few);
    };
    Ok(Value {
        ips,
        self_normalized: Estimate {
            mean: ratio,
            ..residual
        },
        doubly_robust: rows[0].prediction.and_then(|_| estimate(&robust)),
        rows: rows.len() as u64,
        users,
        effective_rows,
        weight_share,
        weight_mean: weight.mean,
    })
}

fn clusters<K: Ord + Clone>(rows: &[Row<K>], value: impl Fn(&Row<K>) -> f64) -> Clusters<K> {
    rows.iter().map(|row| (row.user.clone(), value(row))).collect()
}

fn check<K>(index: usize, row: &Row<K>) -> Result<(), Refusal> {
    let prediction = row.prediction.unwrap_or(Prediction {
        action: 0.0,
        candidate: 0.0,
    });
    // A weight whose square overflows is out of range too.
    let fields = [
        ("the reward", row.reward, row.reward.is_finite()),
        (
            "the weight",
            row.weight,
            row.weight >= 0.0 && row.weight.powi(2).is_finite(),
        ),
        ("the predicted reward", prediction.action, prediction.action.is_finite()),
        (
            "the candidate's predicted reward",
            prediction.candidate,
            prediction.candidate.is_finite(),
        ),
    ];
    match fields.into_iter().find(|(_, _, valid)| !valid) {
        Some((name, value, _)) => Err(Refusal::OutOfRange {
            row: index,
            name,
            value,
        }),
        None => Ok(()),
    }
}
