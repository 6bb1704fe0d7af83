//! Off-policy estimates recover a known value, and are refused without overlap.

use evidence::offpolicy::{Limits, Prediction, Refusal, Row, value};
use rand::{Rng, SeedableRng, rngs::StdRng};

/// Users differ in how much they like action 1. The log takes it with probability `logged`, the
/// candidate with `candidate`. The true value of the candidate is 0.2 + 0.5 · candidate.
fn rows(seed: u64, logged: f64, candidate: f64, predicted: f64) -> Vec<Row<u64>> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut rows = Vec::new();
    for user in 0..80 {
        let taste = 0.7 + 0.4 * (rng.random::<f64>() - 0.5);
        for _ in 0..rng.random_range(2..12) {
            let acts = rng.random_bool(logged);
            let mean = if acts { taste } else { 0.2 };
            let probability = |share: f64| if acts { share } else { 1.0 - share };
            rows.push(Row {
                user,
                reward: f64::from(u8::from(rng.random_bool(mean))),
                weight: probability(candidate) / probability(logged),
                prediction: Some(Prediction {
                    action: if acts { predicted } else { 0.2 },
                    candidate: 0.2 + (predicted - 0.2) * candidate,
                }),
            });
        }
    }
    rows
}

#[test]
fn intervals_of_all_estimates_cover_the_true_value() {
    let runs = 1000;
    // Right and wrong models of the reward.
    for predicted in [0.7, 0.1] {
        let mut covered = [0; 3];
        let mut variances = [0.0; 3];
        for seed in 0..runs {
            let value = value(&rows(seed, 0.3, 0.7, predicted), &Limits::default()).unwrap();
            let estimates = [value.ips, value.self_normalized, value.doubly_robust.unwrap()];
            for (index, estimate) in estimates.into_iter().enumerate() {
                let [low, high] = estimate.interval().ci95;
                covered[index] += u32::from((low..=high).contains(&0.55));
                variances[index] += estimate.variance;
            }
        }
        for covered in covered {
            let coverage = f64::from(covered) / runs as f64;
            assert!(
                (0.92..=0.975).contains(&coverage),
                "{coverage} with the model {predicted}"
            );
        }
        assert!(variances[1] < variances[0], "normalization helps here: {variances:?}");
        assert_eq!(
            variances[2] < variances[1],
            predicted == 0.7,
            "only a good model helps: {variances:?}"
        );
    }
}

#[test]
fn a_constant_in_the_reward_moves_the_self_normalized_estimate_by_itself() {
    let rows = rows(1, 0.3, 0.7, 0.5);
    let shifted = rows.iter().map(|row| Row {
        reward: row.reward + 10.0,
        ..*row
    });
    let limits = Limits::default();
    let (before, after) = (
        value(&rows, &limits).unwrap(),
        value(&shifted.collect::<Vec<_>>(), &limits).unwrap(),
    );
    assert!((after.self_normalized.mean - before.self_normalized.mean - 10.0).abs() < 1e-9);
    assert!((after.self_normalized.variance - before.self_normalized.variance).abs() < 1e-9);
}

#[test]
fn the_logging_policy_has_its_own_mean() {
    let rows = rows(2, 0.4, 0.4, 0.5);
    let value = value(&rows, &Limits::default()).unwrap();
    let mean = rows.iter().map(|row| row.reward).sum::<f64>() / rows.len() as f64;
    assert!((value.ips.mean - mean).abs() < 1e-9 && (value.self_normalized.mean - mean).abs() < 1e-9);
    assert!((value.effective_rows - rows.len() as f64).abs() < 1e-6);
}

#[test]
fn too_little_overlap_is_refused_with_its_reason() {
    let limits = Limits::default();
    let refused = |rows: &[Row<u64>], limits: &Limits| value(rows, limits).unwrap_err();
    // One action in a hundred is logged, and the candidate takes it nearly always.
    assert!(
        matches!(refused(&rows(3, 0.01, 0.99, 0.5), &limits), Refusal::EffectiveShare { share, .. } if share < 0.05)
    );
    let strict = Limits {
        weight_share_max: 0.001,
        ..limits
    };
    assert!(matches!(
        refused(&rows(3, 0.3, 0.7, 0.5), &strict),
        Refusal::WeightShare { .. }
    ));
    // The log never takes action 1 but claims propensities as if it did.
    let missing = rows(4, 0.5, 0.8, 0.5)
        .into_iter()
        .filter(|row| row.weight < 1.0)
        .collect::<Vec<_>>();
    assert!(matches!(refused(&missing, &limits), Refusal::WeightMean { mean, .. } if mean < 0.5));
    let never = rows(5, 0.5, 0.8, 0.5).into_iter().map(|row| Row { weight: 0.0, ..row });
    assert_eq!(refused(&never.collect::<Vec<_>>(), &limits), Refusal::NoOverlap);
    assert_eq!(refused(&[], &limits), Refusal::Users { needed: 30, got: 0 });
}

#[test]
fn rows_that_cannot_be_are_refused_by_number_and_field() {
    let with = |change: fn(&mut Row<u64>)| {
        let mut rows = rows(6, 0.3, 0.7, 0.5);
        change(&mut rows[7]);
        value(&rows, &Limits::default()).unwrap_err().to_string()
    };
    assert_eq!(
        with(|row| row.weight = -1.0),
        "row 7: the weight is -1, which is out of range"
    );
    assert!(with(|row| row.weight = 1e200).contains("the weight"));
    assert!(with(|row| row.weight = f64::NAN).contains("the weight is NaN"));
    assert!(with(|row| row.reward = f64::NAN).contains("the reward is NaN"));
    assert!(with(|row| row.prediction = None).contains("row 7 differs"));
}
