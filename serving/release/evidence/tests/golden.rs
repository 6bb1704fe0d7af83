//! Against golden values that `golden/make.py` computed from the papers' definitions.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use evidence::offpolicy::{self, Limits, Prediction, Row};
use evidence::rates::{self, Arm, Rates};
use evidence::ratio::SampleRatio;
use evidence::sequence::{Design, Sides};
use evidence::{Clusters, Estimate};
use serde_json::Value;

fn cases(text: &str) -> Vec<Value> {
    let cases: Vec<Value> = serde_json::from_str(text).unwrap();
    assert!(!cases.is_empty());
    cases
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(number).collect()
}

#[track_caller]
fn near(got: f64, expected: f64) {
    let error = (got - expected).abs() / expected.abs().max(1.0);
    assert!(error < 1e-9, "{got} instead of {expected}");
}

#[test]
fn bounds_and_p_values_are_those_of_the_mixture_integrated_numerically() {
    for case in cases(include_str!("../golden/sequence.json")) {
        let sides = if case["sides"] == "both" {
            Sides::Both
        } else {
            Sides::Lower
        };
        let design = Design::new(number(&case["alpha"]), sides, number(&case["soonest"]), 30).unwrap();
        near(design.scale(), number(&case["scale"]));
        near(design.information_planned() / number(&case["planned"]), 1.0);
        let group = |mean| Estimate {
            mean,
            variance: 0.5 / number(&case["information"]),
            freedom: 99.0,
        };
        let difference = number(&case["difference"]);
        let bounds = design.of(group(difference), group(0.0)).unwrap();
        let low = difference - number(&case["half_width"]);
        near(bounds.low / low, 1.0);
        near(bounds.p, number(&case["p"]));
        // The other side is its mirror image.
        if sides == Sides::Lower {
            let design = Design::new(number(&case["alpha"]), Sides::Upper, number(&case["soonest"]), 30).unwrap();
            let mirrored = design.of(group(0.0), group(difference)).unwrap();
            near(mirrored.high / -low, 1.0);
            near(mirrored.p, bounds.p);
        }
    }
}

#[test]
fn e_values_of_rates_are_the_products_of_likelihood_ratios() {
    for case in cases(include_str!("../golden/rates.json")) {
        let pair = |value: &Value| -> [f64; 2] { numbers(value).try_into().unwrap() };
        let block = pair(&case["block"]).map(|size| size as u32);
        let mut rates = Rates::new(rates::Design {
            alpha: 0.01,
            block,
            priors: [pair(&case["priors"][0]), pair(&case["priors"][1])],
        })
        .unwrap();
        let (candidate, baseline) = (numbers(&case["candidate"]), numbers(&case["baseline"]));
        for (index, expected) in numbers(&case["log_e"]).into_iter().enumerate() {
            let part = |arm: &[f64], size: u32| arm[index * size as usize..][..size as usize].to_vec();
            // The candidate's outcomes wait for the baseline's.
            for failed in part(&candidate, block[0]) {
                rates.observe(Arm::Candidate, failed == 1.0);
            }
            for failed in part(&baseline, block[1]) {
                rates.observe(Arm::Baseline, failed == 1.0);
            }
            near(rates.log_e(), expected);
        }
    }
}

#[test]
fn the_bayes_factor_of_shares_is_the_product_of_predictive_probabilities() {
    for case in cases(include_str!("../golden/ratio.json")) {
        let mut test = SampleRatio::new(&numbers(&case["weights"]), number(&case["concentration"])).unwrap();
        let users = numbers(&case["users"]).into_iter().map(|users| users as u64);
        let look = test.look(&users.collect::<Vec<_>>()).unwrap();
        let expected = number(&case["log_bayes_factor"]);
        near(look.log_bayes_factor, expected);
        near(look.p, (-expected).exp().min(1.0));
    }
}

#[test]
fn off_policy_estimates_and_their_variances_are_the_sums_written_out() {
    for case in cases(include_str!("../golden/offpolicy.json")) {
        let rows = case["rows"].as_array().unwrap().iter().map(|row| {
            let row = numbers(row);
            Row {
                user: row[0] as u64,
                reward: row[1],
                weight: row[3] / row[2],
                prediction: Some(Prediction {
                    action: row[4],
                    candidate: row[5],
                }),
            }
        });
        let limits = Limits {
            users_min: 2,
            effective_share_min: 0.0,
            weight_share_max: 1.0,
            weight_mean_z_max: f64::INFINITY,
        };
        let rows = rows.collect::<Vec<_>>();
        let value = offpolicy::value(&rows, &limits).unwrap();
        let estimates = [
            ("ips", value.ips),
            ("self_normalized", value.self_normalized),
            ("doubly_robust", value.doubly_robust.unwrap()),
        ];
        for (name, estimate) in estimates {
            near(estimate.mean, number(&case[name][0]));
            near(estimate.variance / number(&case[name][1]), 1.0);
            assert_eq!(estimate.freedom + 1.0, value.users as f64);
        }
        near(value.effective_rows, number(&case["effective_rows"]));
        near(value.weight_share, number(&case["weight_share"]));
        near(value.weight_mean, number(&case["weight_mean"]));
    }
}

#[test]
fn estimates_with_users_of_their_own_need_no_rows() {
    let clusters = |shift: f64| {
        (0..40)
            .map(|user| (user, f64::from(user % 5) + shift))
            .collect::<Clusters<i32>>()
    };
    let design = Design::new(0.05, Sides::Both, 1.0, 30).unwrap();
    let (candidate, baseline) = (clusters(0.5), clusters(0.0));
    let from_rows = design.between(&candidate, &baseline).unwrap();
    let from_sums = design.of(candidate.estimate().unwrap(), baseline.estimate().unwrap());
    assert_eq!(from_rows, from_sums.unwrap());
    assert_eq!(from_rows.users, [40, 40]);
}
