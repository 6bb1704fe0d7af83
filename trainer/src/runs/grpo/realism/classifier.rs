//! Whether a classifier can tell rollouts from production. Pure, and the same for the same pairs.
//!
//! This is a classifier two-sample test (Lopez-Paz & Oquab 2017, "Revisiting classifier two-sample
//! tests") on matched pairs: a production trace and a rollout of the same prompt. A pair's two traces
//! differ in nothing but who they were for, so how prompts differ does not matter, nor how often each
//! was asked.
//!
//! ```text
//! half of the prompts    logistic regression on differences   w = argmax Σ ln σ(w·(r − p)) − λ/2 |w|²
//! the other half         which trace of a pair has the higher w·x?
//! ```
//! The first is conditional logistic regression of pairs (Breslow & Day 1980, chapter 7). The share of
//! pairs in which the rollout scores higher (equal scores: half) is the AUC within prompts. If both are
//! samples of one distribution, each pair is a fair coin, whatever the weights: they come from other
//! prompts. So the number of heads is binomial, and the interval is Wilson's (1927). Cross-validation
//! would test on every pair, but its folds train on each other, so their errors are correlated: with
//! five folds, such an interval missed 0.5 in 11% of the simulated sets below, with halves in 5%.

use super::trace::{Feature, Trace, features};
use serde::Serialize;
use std::collections::BTreeMap;

/// λ: weights of standardized features are like samples of a standard normal distribution.
const PENALTY: f64 = 1.0;
/// Passes over all weights. Fewer would only keep the weights smaller.
const PASSES: usize = 50;
/// Features that are reported.
const DIFFERENCES_MAX: usize = 5;
/// The 97.5% quantile of the normal distribution.
const NORMAL_975: f64 = 1.959_963_984_540_054;

/// Two traces of one prompt.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Pair {
    /// Hash of the prompt's tokens.
    pub prompt: i64,
    pub production: Trace,
    pub rollout: Trace,
}

/// What the classifier could do.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Comparison {
    /// Pairs of the prompts that it was trained on.
    pub pairs_trained: usize,
    /// Pairs of the other prompts.
    pub pairs_tested: usize,
    /// Share of the tested pairs in which it tells which one is the rollout: 0.5 by guessing.
    pub right_share: f64,
    pub right_share_interval: [f64; 2],
    /// The features with the largest weights.
    pub differences: Vec<Difference>,
}

/// How the tested pairs differ in a feature.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Difference {
    pub what: String,
    /// Mean of the production traces.
    pub production: f64,
    /// Mean of the rollouts.
    pub rollouts: f64,
}

/// Trains on one half of the prompts and tests on the other. `None`: a half has fewer pairs than
/// `half_min`.
pub(super) fn compare(pairs: &[Pair], half_min: usize) -> Option<Comparison> {
    let [train, test] = halves(pairs);
    if train.len().min(test.len()) < half_min.max(1) {
        return None;
    }
    let scales = scales(&train);
    let differences =
        |pairs: &[&Pair]| -> Vec<Vec<f64>> { pairs.iter().map(|pair| difference(&scales, pair)).collect() };
    let weights = fit(&differences(&train), scales.len());
    let right: f64 = differences(&test).iter().map(|x| rightness(&weights, x)).sum();
    let right_share = right / test.len() as f64;
    Some(Comparison {
        pairs_trained: train.len(),
        pairs_tested: test.len(),
        right_share,
        right_share_interval: wilson(right_share, test.len()),
        differences: largest(&scales, &weights, &test),
    })
}

/// All pairs of a prompt are in one half. The halves have about as many pairs.
fn halves(pairs: &[Pair]) -> [Vec<&Pair>; 2] {
    let mut prompts: BTreeMap<i64, Vec<&Pair>> = BTreeMap::new();
    for pair in pairs {
        prompts.entry(pair.prompt).or_default().push(pair);
    }
    let mut prompts: Vec<Vec<&Pair>> = prompts.into_values().collect();
    // stable: prompts with as many pairs stay in the order of their hashes
    prompts.sort_by_key(|pairs| std::cmp::Reverse(pairs.len()));
    let [mut one, mut other] = [Vec::new(), Vec::new()];
    for pairs in prompts {
        let half = if one.len() <= other.len() { &mut one } else { &mut other };
        half.extend(pairs);
    }
    [one, other]
}

/// On a logarithmic scale, so that a few long traces do not decide.
fn scaled(feature: Feature, trace: &Trace) -> f64 {
    feature.value(trace).ln_1p()
}

/// The features that differ among the traces of these pairs, with their standard deviations.
fn scales(pairs: &[&Pair]) -> Vec<(Feature, f64)> {
    let traces: Vec<&Trace> = pairs
        .iter()
        .flat_map(|pair| [&pair.production, &pair.rollout])
        .collect();
    let count = traces.len() as f64;
    let deviation = |feature: Feature| {
        let values: Vec<f64> = traces.iter().map(|trace| scaled(feature, trace)).collect();
        let mean = values.iter().sum::<f64>() / count;
        (values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / count).sqrt()
    };
    let all = features(&traces)
        .into_iter()
        .map(|feature| (feature, deviation(feature)));
    all.filter(|(_, deviation)| *deviation > 1e-9).collect()
}

/// Of the rollout's features from those of the production trace.
fn difference(scales: &[(Feature, f64)], pair: &Pair) -> Vec<f64> {
    let of = |&(feature, scale): &(Feature, f64)| {
        (scaled(feature, &pair.rollout) - scaled(feature, &pair.production)) / scale
    };
    scales.iter().map(of).collect()
}

/// The weights that maximize the objective above, one at a time: each step maximizes a parabola below
/// it, because the second derivative of ln σ is at least −1/4 (Böhning & Lindsay 1988).
fn fit(differences: &[Vec<f64>], width: usize) -> Vec<f64> {
    let mut weights = vec![0.0; width];
    let mut margins = vec![0.0; differences.len()];
    let curvature = |column: usize| PENALTY + differences.iter().map(|x| x[column].powi(2)).sum::<f64>() / 4.0;
    let curvatures: Vec<f64> = (0..width).map(curvature).collect();
    for _ in 0..PASSES {
        for column in 0..width {
            let slopes = differences
                .iter()
                .zip(&margins)
                .map(|(x, margin)| x[column] / (1.0 + f64::exp(*margin)));
            let slope = slopes.sum::<f64>() - PENALTY * weights[column];
            let step = slope / curvatures[column];
            weights[column] += step;
            for (x, margin) in differences.iter().zip(&mut margins) {
                *margin += step * x[column];
            }
        }
    }
    weights
}

/// 1: the rollout has the higher score. Equal scores are a coin that is not tossed.
fn rightness(weights: &[f64], difference: &[f64]) -> f64 {
    let margin: f64 = weights.iter().zip(difference).map(|(w, x)| w * x).sum();
    match margin.total_cmp(&0.0) {
        _ if margin == 0.0 => 0.5,
        std::cmp::Ordering::Greater => 1.0,
        _ => 0.0,
    }
}

/// The 95% interval of a share of `count` (Wilson 1927, "Probable inference, the law of succession, and
/// statistical inference").
fn wilson(share: f64, count: usize) -> [f64; 2] {
    let (count, square) = (count as f64, NORMAL_975.powi(2));
    let center = (share + square / (2.0 * count)) / (1.0 + square / count);
    let variance = share * (1.0 - share) / count + square / (4.0 * count * count);
    let half = NORMAL_975 / (1.0 + square / count) * variance.sqrt();
    [center - half, center + half]
}

/// The features with the largest weights, with their means in the tested pairs.
fn largest(scales: &[(Feature, f64)], weights: &[f64], pairs: &[&Pair]) -> Vec<Difference> {
    let mut weighted: Vec<(f64, Feature)> = weights
        .iter()
        .map(|w| w.abs())
        .zip(scales.iter().map(|s| s.0))
        .collect();
    weighted.sort_by(|a, b| b.0.total_cmp(&a.0));
    let mean = |feature: Feature, of: fn(&Pair) -> &Trace| {
        pairs.iter().map(|pair| feature.value(of(pair))).sum::<f64>() / pairs.len() as f64
    };
    let reported = weighted.into_iter().take(DIFFERENCES_MAX);
    reported
        .map(|(_, feature)| Difference {
            what: feature.to_string(),
            production: mean(feature, |pair| &pair.production),
            rollouts: mean(feature, |pair| &pair.rollout),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::trace::Turn;
    use super::*;
    use crate::runs::random::Random;
    use std::collections::BTreeSet;

    /// Uniform in [0, 1).
    fn uniform(random: &mut Random) -> f64 {
        (random.draw() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// A trace of a prompt. Prompts differ in how long answers are, how many turns they take, what they
    /// begin with and how often they are declined.
    fn trace(random: &mut Random, prompt: u64, lengthen: f64) -> Trace {
        let mut of_prompt = Random(prompt);
        let (length, turns, token) = (
            5.0 + 200.0 * uniform(&mut of_prompt),
            of_prompt.draw() % 4,
            of_prompt.draw() % 6,
        );
        let declines = 0.5 * uniform(&mut of_prompt);
        let turn = |random: &mut Random| {
            let usual = uniform(random) < 0.7;
            Turn {
                tokens: (lengthen * length * (0.5 + uniform(random))) as u32,
                first: vec![
                    if usual { token } else { random.draw() % 6 } as i32,
                    (random.draw() % 20) as i32,
                ],
                ended: uniform(random) < 0.8,
                shown: uniform(random) >= declines,
            }
        };
        let turns = 1 + turns * u64::from(uniform(random) < 0.5);
        Trace((0..turns).map(|_| turn(random)).collect())
    }

    /// One to four pairs of each prompt.
    fn pairs(random: &mut Random, prompts: u64, lengthen: f64) -> Vec<Pair> {
        let mut pairs = Vec::new();
        for _ in 0..prompts {
            let prompt = random.draw();
            for _ in 0..1 + prompt % 4 {
                pairs.push(Pair {
                    prompt: prompt.cast_signed(),
                    production: trace(random, prompt, 1.0),
                    rollout: trace(random, prompt, lengthen),
                });
            }
        }
        pairs
    }

    #[test]
    fn without_a_difference_the_interval_misses_one_half_as_rarely_as_it_says() {
        let mut random = Random(1);
        let (sets, mut missed, mut alarms, mut sum) = (400, 0, 0, 0.0);
        for _ in 0..sets {
            let found = compare(&pairs(&mut random, 60, 1.0), 20).unwrap();
            let [low, high] = found.right_share_interval;
            missed += usize::from(!(low..=high).contains(&0.5));
            alarms += usize::from(low > 0.6);
            sum += found.right_share;
        }
        // 5% of 400 are 20, with a standard deviation of 4.4
        assert!(missed <= 20, "{missed} of {sets}");
        assert_eq!(alarms, 0);
        let mean = sum / f64::from(sets);
        assert!((mean - 0.5).abs() < 0.01, "{mean}");
    }

    #[test]
    fn longer_rollouts_are_told_from_production_with_the_reason() {
        let found = compare(&pairs(&mut Random(2), 100, 2.0), 20).unwrap();
        assert!(found.right_share_interval[0] > 0.6, "{found:?}");
        let tokens: Vec<_> = found
            .differences
            .iter()
            .filter(|one| one.what.starts_with("sampled tokens"))
            .collect();
        assert!(!tokens.is_empty(), "{found:?}");
        assert!(
            tokens.iter().all(|one| one.rollouts > 1.5 * one.production),
            "{found:?}"
        );
    }

    #[test]
    fn one_more_token_at_the_start_is_told_from_production() {
        let mut random = Random(3);
        let mut pairs = pairs(&mut random, 100, 1.0);
        for pair in &mut pairs {
            if uniform(&mut random) < 0.8 {
                pair.rollout.0[0].first.insert(0, 99);
            }
        }
        let found = compare(&pairs, 20).unwrap();
        assert!(found.right_share_interval[0] > 0.7, "{found:?}");
        let first = &found.differences[0];
        assert_eq!(first.what, "token 1 of the first turn is id 99");
        assert!(first.production == 0.0 && first.rollouts > 0.7, "{first:?}");
    }

    #[test]
    fn a_prompt_is_in_one_half_and_the_halves_are_about_as_large() {
        let pairs = pairs(&mut Random(4), 51, 1.0);
        let [one, other] = halves(&pairs);
        assert_eq!(one.len() + other.len(), pairs.len());
        assert!(one.len().abs_diff(other.len()) <= 4, "{} {}", one.len(), other.len());
        let prompts = |half: &[&Pair]| -> BTreeSet<i64> { half.iter().map(|pair| pair.prompt).collect() };
        assert!(prompts(&one).is_disjoint(&prompts(&other)));
    }

    #[test]
    fn too_few_pairs_or_prompts_say_nothing() {
        let few = pairs(&mut Random(5), 4, 3.0);
        assert_eq!(compare(&few, 20), None);
        let mut of_one_prompt = pairs(&mut Random(5), 40, 3.0);
        for pair in &mut of_one_prompt {
            pair.prompt = 1;
        }
        assert_eq!(compare(&of_one_prompt, 20), None);
        assert_eq!(compare(&[], 0), None);
    }

    #[test]
    fn equal_traces_are_a_coin_that_is_not_tossed() {
        let mut equal = pairs(&mut Random(6), 40, 1.0);
        for pair in &mut equal {
            pair.rollout = pair.production.clone();
        }
        let found = compare(&equal, 20).unwrap();
        assert_eq!(found.right_share, 0.5);
    }

    #[test]
    fn the_weights_maximize_the_penalized_likelihood() {
        // one feature: Σ ±σ(∓w) = w, so 3 σ(−w) − σ(w) = w
        let differences = [vec![1.0], vec![1.0], vec![1.0], vec![-1.0]];
        let w = fit(&differences, 1)[0];
        let sigmoid = |x: f64| 1.0 / (1.0 + f64::exp(-x));
        assert!((3.0 * sigmoid(-w) - sigmoid(w) - w).abs() < 1e-9, "{w}");
    }

    #[test]
    fn the_interval_of_a_share_is_that_of_the_tables() {
        // 8 of 10: Newcombe (1998) has 0.4902 to 0.9433
        let [low, high] = wilson(0.8, 10);
        assert!(
            (low - 0.4902).abs() < 1e-4 && (high - 0.9433).abs() < 1e-4,
            "{low} {high}"
        );
        let [low, high] = wilson(1.0, 10);
        assert!(low > 0.7 && (high - 1.0).abs() < 1e-9);
    }
}
