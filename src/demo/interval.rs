//! Means per pause and their 95% intervals, clustered by user. Pure.
//!
//! A user's pauses are not independent: they share files, habits and an arm. So a user is the unit. Per user there are a
//! sum y and a number of pauses n; an arm's mean is the ratio R = Σy / Σn, and its variance by the delta method (the
//! ratio estimator of cluster sampling, Cochran, Sampling Techniques, 3rd ed., §6.3 and §9A)
//!
//! ```text
//! Var(R) = m / (m − 1) · Σ (y − R n)² / (Σn)²      with m users
//! ```
//!
//! Arms are disjoint by user, so the variances of two arms add. Quantiles are Student's t with Welch's degrees of freedom.

use serde::Serialize;

/// All that one user contributes.
#[derive(Debug, Clone, Copy, Default)]
pub struct Cluster {
    pub sum: f64,
    pub n: f64,
}

impl Cluster {
    pub fn add(&mut self, value: f64) {
        self.sum += value;
        self.n += 1.0;
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    pub mean: f64,
    pub variance: f64,
    /// Users minus one.
    pub freedom: f64,
}

/// A mean, or a difference of means, with its interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Interval {
    pub mean: f64,
    pub ci95: [f64; 2],
}

/// The mean over all pauses of all users. None with fewer than two users that have any.
pub fn ratio(clusters: &[Cluster]) -> Option<Estimate> {
    let clusters = clusters.iter().filter(|cluster| cluster.n > 0.0);
    let (mut users, mut sum, mut n) = (0.0, 0.0, 0.0);
    for cluster in clusters.clone() {
        users += 1.0;
        sum += cluster.sum;
        n += cluster.n;
    }
    if users < 2.0 {
        return None;
    }
    let mean = sum / n;
    let squares = clusters
        .map(|cluster| (cluster.sum - mean * cluster.n).powi(2))
        .sum::<f64>();
    Some(Estimate {
        mean,
        variance: users / (users - 1.0) * squares / (n * n),
        freedom: users - 1.0,
    })
}

impl Estimate {
    pub fn interval(self) -> Interval {
        let half = t_975(self.freedom) * self.variance.sqrt();
        Interval {
            mean: self.mean,
            ci95: [self.mean - half, self.mean + half],
        }
    }

    /// `self` − `other`, of disjoint sets of users.
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

/// The 97.5% quantile of Student's t, by the expansion around the normal quantile (Abramowitz & Stegun 26.7.5).
/// Within 1% from 4 degrees of freedom on, within 0.01% from 20 on.
fn t_975(freedom: f64) -> f64 {
    let z: f64 = 1.959_963_984_540_054;
    z + (z.powi(3) + z) / (4.0 * freedom)
        + (5.0 * z.powi(5) + 16.0 * z.powi(3) + 3.0 * z) / (96.0 * freedom.powi(2))
        + (3.0 * z.powi(7) + 19.0 * z.powi(5) + 17.0 * z.powi(3) - 15.0 * z) / (384.0 * freedom.powi(3))
}

#[cfg(test)]
mod tests {
    use super::super::draw::Draws;
    use super::*;

    fn cluster(sum: f64, n: f64) -> Cluster {
        Cluster { sum, n }
    }

    fn near(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-9
    }

    #[test]
    fn the_ratio_and_its_variance_match_a_calculation_by_hand() {
        // R = 4/8; residuals 0, 1, −1; variance 3/2 · 2/64.
        let estimate = ratio(&[
            cluster(1.0, 2.0),
            cluster(3.0, 4.0),
            cluster(0.0, 2.0),
            cluster(0.0, 0.0),
        ])
        .unwrap();
        assert!(near(estimate.mean, 0.5));
        assert!(near(estimate.variance, 3.0 / 64.0));
        assert!(near(estimate.freedom, 2.0));
    }

    #[test]
    fn with_one_pause_per_user_it_is_the_ordinary_standard_error() {
        let values = [1.0, 2.0, 4.0, 5.0];
        let estimate = ratio(&values.map(|value| cluster(value, 1.0))).unwrap();
        // Sample variance 10/3, over 4.
        assert!(near(estimate.variance, 10.0 / 3.0 / 4.0));
    }

    #[test]
    fn the_difference_adds_the_variances_of_both_arms() {
        let a = Estimate {
            mean: 0.5,
            variance: 0.03,
            freedom: 1e9,
        };
        let b = Estimate {
            mean: 0.2,
            variance: 0.01,
            freedom: 1e9,
        };
        let difference = a.minus(b);
        assert!(near(difference.mean, 0.3));
        assert!((difference.ci95[0] - (0.3 - 1.959964 * 0.2)).abs() < 1e-6);
        assert!((difference.ci95[1] - (0.3 + 1.959964 * 0.2)).abs() < 1e-6);
    }

    #[test]
    fn too_few_users_give_no_interval_and_no_spread_gives_a_point() {
        assert!(ratio(&[]).is_none());
        assert!(ratio(&[cluster(3.0, 10.0)]).is_none());
        let flat = ratio(&[cluster(1.0, 2.0), cluster(2.0, 4.0)]).unwrap();
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
        for (freedom, expected, tolerance) in [
            (4.0, 2.7764, 0.01),
            (10.0, 2.2281, 0.001),
            (30.0, 2.0423, 1e-4),
            (120.0, 1.9799, 1e-4),
        ] {
            let got = t_975(freedom);
            assert!((got / expected - 1.0).abs() < tolerance, "{freedom} degrees: {got}");
        }
    }

    /// Users differ in how many pauses they have and in how good the policy is for them; arms of 60 and 40 users.
    #[test]
    fn the_interval_covers_the_true_difference_in_95_of_100_simulated_runs() {
        let runs = 1500;
        let simulate = |run: u64, arm: u64, users: u64, shift: f64| {
            let clusters = (0..users)
                .map(|user| {
                    let mut draws = Draws::new("coverage", &[run, arm, user]);
                    // The accept rate has mean 0.3 over users, whatever their number of pauses; a decline is worth 0.
                    let accepts = 0.1 + 0.4 * draws.unit();
                    let pauses = 4 + draws.below(20);
                    let sum = (0..pauses)
                        .map(|_| {
                            if draws.chance(0.3) {
                                0.0
                            } else if draws.chance(accepts) {
                                0.75
                            } else {
                                -0.25
                            }
                        })
                        .sum::<f64>();
                    cluster(sum + shift * pauses as f64, pauses as f64)
                })
                .collect::<Vec<_>>();
            ratio(&clusters).unwrap()
        };
        let covered = (0..runs)
            .filter(|&run| {
                let [low, high] = simulate(run, 0, 60, 0.1).minus(simulate(run, 1, 40, 0.0)).ci95;
                (low..=high).contains(&0.1)
            })
            .count();
        let coverage = covered as f64 / runs as f64;
        assert!((0.935..=0.965).contains(&coverage), "coverage {coverage}");
    }
}
