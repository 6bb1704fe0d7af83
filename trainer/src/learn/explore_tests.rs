//! Numbers computed by hand, sampler against trainer, and the estimator against the analytic
//! gradient.

use crate::learn::batch::MicroBatch;
use crate::learn::behavior::log_behavior;
use crate::learn::loss::reinforce_is;
use model::exact::Rows;
use model::sampling::{self, Params, Source};
use runs::explore::weight;
use tch::{Kind, Tensor};

/// The decline token.
const DECLINE: u32 = 2;

fn log_softmax(logits: &[f32], rows: i64) -> Tensor {
    Tensor::from_slice(logits).view([rows, -1]).log_softmax(-1, Kind::Float)
}

fn values(tensor: &Tensor) -> Vec<f32> {
    Vec::<f32>::try_from(tensor).unwrap()
}

/// One row of logits for each target, at a temperature.
fn behavior(logits: &[f32], targets: &[u32], suppressed: &[i64], temperature: f32, decline: Option<u32>) -> Vec<f32> {
    let batch = MicroBatch {
        targets: targets.iter().map(|&id| i64::from(id)).collect(),
        temperature: vec![temperature; targets.len()],
        suppressed: suppressed.to_vec(),
        ..MicroBatch::default()
    };
    let rows = Rows::from_values(logits.len(), logits.repeat(targets.len()));
    log_behavior(&rows, &batch, decline)
}

#[test]
fn a_masked_log_probability_is_renormalized_over_the_rest() {
    // π = 0.5, 0.3, 0.2; without the last 0.625, 0.375
    let row = [0.5f32.ln(), 0.3f32.ln(), 0.2f32.ln()];
    let masked = behavior(&row, &[1, 1, DECLINE], &[1], 1.0, Some(DECLINE));
    for (got, want) in masked.iter().zip([0.3f32, 0.375, 0.2]) {
        assert!((got - want.ln()).abs() < 1e-6, "{got} against ln {want}");
    }
    assert_eq!(
        behavior(&row, &[DECLINE], &[0], 1.0, Some(DECLINE)),
        [f32::NEG_INFINITY]
    );
    // without a decline token nothing is masked
    let all = behavior(&row, &[1, 1, DECLINE], &[], 1.0, Some(DECLINE));
    assert_eq!(behavior(&row, &[1, 1, DECLINE], &[1], 1.0, None), all);
}

#[test]
fn sampler_and_trainer_have_the_same_bits_even_if_declining_is_almost_certain() {
    // π(decline) = 1 − 3e-8 at temperature 0.8
    let logits = [0.3f32, -1.1, 14.0, 0.7, -0.2];
    let params = Params {
        temperature: 0.8,
        ..Params::default()
    };
    let mut source = Source::new(5);
    let mut masked = logits;
    sampling::suppress(&mut masked, DECLINE);
    for _ in 0..50 {
        let (token, logged) = sampling::sample(&masked, &params, &mut source);
        assert_eq!(behavior(&logits, &[token], &[0], 0.8, Some(DECLINE)), [logged]);
        let (token, logged) = sampling::sample(&logits, &params, &mut source);
        assert_eq!(behavior(&logits, &[token], &[], 0.8, Some(DECLINE)), [logged]);
    }
}

#[test]
fn only_declines_under_exploration_have_a_weight_above_one() {
    assert_eq!(weight(true, Some(0.2)), 1.0 / (1.0 - f64::from(0.2f32)));
    assert_eq!(weight(false, Some(0.2)), 1.0);
    assert_eq!(weight(true, None), 1.0);
}

/// Two arms that show something and one that declines, one token each: g_j = π_j (A_j − Σ π A).
#[test]
fn the_weighted_sample_mean_is_the_gradient_of_the_policy() {
    let logits = [0.2f32, -0.4, 1.1];
    let advantages = [0.8, -0.5, 0.3];
    let share = 0.3f32;
    let theta = Tensor::from_slice(&logits).set_requires_grad(true);
    let pi: Vec<f64> = values(&log_softmax(&logits, 1).flatten(0, 1))
        .iter()
        .map(|l| f64::from(*l).exp())
        .collect();
    let mean: f64 = pi.iter().zip(advantages).map(|(p, a)| p * a).sum();
    let analytic: Vec<f64> = pi.iter().zip(advantages).map(|(p, a)| p * (a - mean)).collect();

    let draws = 400_000u64;
    let mut masked = logits;
    sampling::suppress(&mut masked, DECLINE);
    let mut source = Source::new(17);
    let (mut targets, mut logged, mut weighted) = (Vec::new(), Vec::new(), Vec::new());
    for seed in 0..draws {
        let suppressed = sampling::explores(seed, f64::from(share));
        let from = if suppressed { &masked } else { &logits };
        let (token, logprob) = sampling::sample(from, &Params::default(), &mut source);
        let weight = weight(token == DECLINE, Some(share));
        targets.push(i64::from(token));
        logged.push(logprob);
        weighted.push((advantages[token as usize] * weight) as f32);
    }
    let logp = theta
        .log_softmax(-1, Kind::Float)
        .index_select(0, &Tensor::from_slice(&targets));
    let terms = reinforce_is(&logp, &Tensor::from_slice(&logged), &Tensor::from_slice(&weighted), 2.0);
    terms.per_token.mean(Kind::Float).backward();
    assert_eq!(terms.clipped.sum(Kind::Float).double_value(&[]), 0.0);
    for (got, want) in values(&theta.grad()).iter().zip(&analytic) {
        // the loss is minimized; a mean of 400 000 has a standard deviation below 0.001
        assert!((f64::from(-got) - want).abs() < 0.004, "{got} against −{want}");
    }
}
