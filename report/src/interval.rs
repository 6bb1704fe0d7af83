//! Means with 95% intervals, clustered by user.
//!
//! Observations of one user are not independent, so the user is the sampling unit. User i has a sum
//! yᵢ and a number of observations nᵢ. The mean is the ratio R = Σy / Σn. Its variance follows from
//! the delta method (the ratio estimator of cluster sampling; Cochran, *Sampling Techniques*, 3rd
//! ed., §6.3 and §9A), with m users:
//!
//! ```text
//! Var(R) = m / (m − 1) · Σ (y − R n)² / (Σn)²
//! ```
//!
//! The difference of two disjoint groups of users has the sum of both variances and Welch's degrees
//! of freedom (Welch 1947). The quantile is Student's t.
//!
//! Such an interval covers the truth in 95% of cases when it is read once, at a time fixed in
//! advance. Whoever stops as soon as it excludes zero is wrong more often.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Sum and count of each cluster's values. `K` names a cluster, such as a user.
#[derive(Debug, Clone)]
pub struct Clusters<K>(BTreeMap<K, Cluster>);

#[derive(Debug, Clone, Copy, Default)]
struct Cluster {
    sum: f64,
    n: f64,
}

impl<K> Default for Clusters<K> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<K: Ord> Clusters<K> {
    pub fn add(&mut self, key: K, value: f64) {
        self.add_many(key, value, 1.0);
    }

    /// Adds `count` values at once, whose sum is `sum`.
    pub fn add_many(&mut self, key: K, sum: f64, count: f64) {
        let cluster = self.0.entry(key).or_default();
        cluster.sum += sum;
        cluster.n += count;
    }

    /// Each cluster's key, sum and number of values.
    pub fn iter(&self) -> impl Iterator<Item = (&K, f64, f64)> {
        self.0.iter().map(|(key, cluster)| (key, cluster.sum, cluster.n))
    }

    /// How many clusters there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many values were added.
    pub fn n(&self) -> u64 {
        self.0.values().map(|cluster| cluster.n).sum::<f64>() as u64
    }

    /// The mean of all values. `None` without values.
    pub fn mean(&self) -> Option<f64> {
        let sum = self.0.values().map(|cluster| cluster.sum).sum::<f64>();
        (self.n() > 0).then(|| sum / self.n() as f64)
    }

    /// The mean with its variance. `None` with fewer than two clusters.
    pub fn estimate(&self) -> Option<Estimate> {
        let clusters = self.0.len() as f64;
        if clusters < 2.0 {
            return None;
        }
        let (mean, n) = (self.mean()?, self.n() as f64);
        let squares = self.0.values().map(|cluster| (cluster.sum - mean * cluster.n).powi(2));
        Some(Estimate {
            mean,
            variance: clusters / (clusters - 1.0) * squares.sum::<f64>() / (n * n),
            freedom: clusters - 1.0,
        })
    }

    /// The mean with its interval. `None` with fewer than two clusters.
    pub fn interval(&self) -> Option<Interval> {
        self.estimate().map(Estimate::interval)
    }
}

impl<K: Ord> FromIterator<(K, f64)> for Clusters<K> {
    fn from_iter<I: IntoIterator<Item = (K, f64)>>(values: I) -> Self {
        let mut clusters = Self::default();
        for (key, value) in values {
            clusters.add(key, value);
        }
        clusters
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    pub mean: f64,
    pub variance: f64,
    /// Degrees of freedom.
    pub freedom: f64,
}

impl Estimate {
    pub fn interval(self) -> Interval {
        let half = t_975(self.freedom) * self.variance.sqrt();
        Interval {
            mean: self.mean,
            ci95: [self.mean - half, self.mean + half],
        }
    }

    /// `self` − `other`. The two must come from disjoint sets of users.
    pub fn minus(self, other: Self) -> Interval {
        let variance = self.variance + other.variance;
        let freedom = if variance > 0.0 {
            variance.powi(2) / (self.variance.powi(2) / self.freedom + other.variance.powi(2) / other.freedom)
        } else {
            1.0
        };
        Estimate {
            mean: self.mean - other.mean,
            variance,
            freedom,
        }
        .interval()
    }
}

/// A mean, or a difference of means, with its 95% interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    pub mean: f64,
    pub ci95: [f64; 2],
}

impl Interval {
    /// The whole interval is above 0.
    pub fn is_above_zero(&self) -> bool {
        self.ci95[0] > 0.0
    }

    /// The whole interval is below 0.
    pub fn is_below_zero(&self) -> bool {
        self.ci95[1] < 0.0
    }
}

/// The 97.5% quantile of Student's t, expanded around the normal quantile (Abramowitz & Stegun
/// 26.7.5). The error is below 1% from 4 degrees of freedom on, and below 0.01% from 20 on.
fn t_975(freedom: f64) -> f64 {
    let z: f64 = 1.959_963_984_540_054;
    z + (z.powi(3) + z) / (4.0 * freedom)
        + (5.0 * z.powi(5) + 16.0 * z.powi(3) + 3.0 * z) / (96.0 * freedom.powi(2))
        + (3.0 * z.powi(7) + 19.0 * z.powi(5) + 17.0 * z.powi(3) - 15.0 * z) / (384.0 * freedom.powi(3))
}

#[cfg(test)]
mod tests {
    use rand::{Rng, SeedableRng, rngs::StdRng};

    use super::*;

    fn near(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-9
    }

    #[test]
    fn the_ratio_and_its_variance_match_a_calculation_by_hand() {
        // Sums 1, 3, 0 of 2, 4, 2 values: R = 4/8; residuals 0, 1, −1; variance 3/2 · 2/64.
        let values = [(1, [1.0, 0.0].as_slice()), (2, &[1.0, 1.0, 1.0, 0.0]), (3, &[0.0, 0.0])];
        let values = values
            .into_iter()
            .flat_map(|(user, values)| values.iter().map(move |&v| (user, v)));
        let estimate = values.collect::<Clusters<_>>().estimate().unwrap();
        assert!(near(estimate.mean, 0.5));
        assert!(near(estimate.variance, 3.0 / 64.0));
        assert!(near(estimate.freedom, 2.0));
    }

    #[test]
    fn with_one_value_per_user_it_is_the_ordinary_standard_error() {
        let clusters = (0..).zip([1.0, 2.0, 4.0, 5.0]).collect::<Clusters<_>>();
        // Sample variance 10/3, over 4.
        assert!(near(clusters.estimate().unwrap().variance, 10.0 / 3.0 / 4.0));
    }

    #[test]
    fn a_difference_adds_the_variances_of_both_groups() {
        let of = |mean, variance| Estimate {
            mean,
            variance,
            freedom: 1e9,
        };
        let difference = of(0.5, 0.03).minus(of(0.2, 0.01));
        assert!(near(difference.mean, 0.3));
        assert!((difference.ci95[0] - (0.3 - 1.959964 * 0.2)).abs() < 1e-6);
        assert!((difference.ci95[1] - (0.3 + 1.959964 * 0.2)).abs() < 1e-6);
    }

    #[test]
    fn one_user_gives_no_interval_and_no_spread_gives_a_point() {
        assert!(Clusters::<u64>::default().estimate().is_none());
        assert!(
            [(1, 3.0), (1, 4.0)]
                .into_iter()
                .collect::<Clusters<_>>()
                .estimate()
                .is_none()
        );
        let flat = [(1, 0.5), (2, 0.5)]
            .into_iter()
            .collect::<Clusters<_>>()
            .estimate()
            .unwrap();
        assert_eq!(
            flat.minus(flat),
            Interval {
                mean: 0.0,
                ci95: [0.0, 0.0]
            }
        );
    }

    #[test]
    fn quantiles_of_t_agree_with_the_tables() {
        let table = [
            (4.0, 2.7764, 0.01),
            (10.0, 2.2281, 0.001),
            (30.0, 2.0423, 1e-4),
            (120.0, 1.9799, 1e-4),
        ];
        for (freedom, expected, tolerance) in table {
            let got = t_975(freedom);
            assert!((got / expected - 1.0).abs() < tolerance, "{freedom} degrees: {got}");
        }
    }

    /// Users differ in how many values they have and in their mean. The groups have 60 and 40
    /// users.
    #[test]
    fn the_interval_covers_the_true_difference_in_95_of_100_simulated_runs() {
        let runs = 6000;
        let mut rng = StdRng::seed_from_u64(1);
        let mut simulate = |users: u64, shift: f64| {
            let mut clusters = Clusters::default();
            for user in 0..users {
                let accepts = 0.1 + 0.4 * rng.random::<f64>();
                for _ in 0..rng.random_range(4..24) {
                    let value = match (rng.random_bool(0.3), rng.random_bool(accepts)) {
                        (true, _) => 0.0,
                        (false, true) => 0.75,
                        (false, false) => -0.25,
                    };
                    clusters.add(user, value + shift);
                }
            }
            clusters.estimate().unwrap()
        };
        let covered = (0..runs).filter(|_| {
            let [low, high] = simulate(60, 0.1).minus(simulate(40, 0.0)).ci95;
            (low..=high).contains(&0.1)
        });
        let coverage = covered.count() as f64 / runs as f64;
        assert!((0.935..=0.965).contains(&coverage), "coverage {coverage}");
    }
}
