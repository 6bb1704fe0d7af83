//! From logits to a token and its log-probability. Pure arithmetic on slices: no tensors, no threads, no clock.
//!
//! The log-probability returned is that of the distribution actually sampled from, after temperature and top-p: it is what
//! the log records and what the trainer's importance ratios divide by.

use rand::{Rng, SeedableRng, rngs::StdRng};

/// How tokens are drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Params {
    /// Logits are divided by it; 0 is greedy.
    pub temperature: f32,
    /// The smallest set of most probable tokens whose probability reaches this is kept; 1 keeps all.
    pub top_p: f32,
}

impl Default for Params {
    fn default() -> Self {
        Params {
            temperature: 1.0,
            top_p: 1.0,
        }
    }
}

/// A request's own source of randomness: its tokens depend on its seed alone, never on what it is batched with.
#[derive(Debug, Clone)]
pub struct Source(StdRng);

impl Source {
    pub fn new(seed: u64) -> Self {
        Source(StdRng::seed_from_u64(seed))
    }

    /// Uniform in [0, 1).
    pub fn uniform(&mut self) -> f64 {
        self.0.random::<f64>()
    }
}

/// Draws one token from `logits` (one value per vocabulary entry, finite). Returns its id and its log-probability in nats.
///
/// Greedy (`temperature` 0) is a point mass, whose log-probability would say nothing: there the value is that of the
/// softmax at temperature 1, for people to read; such a token is never trained on.
pub fn sample(logits: &[f32], params: &Params, source: &mut Source) -> (u32, f32) {
    if params.temperature <= 0.0 {
        let best = argmax(logits);
        return (best as u32, log_softmax_at(logits, 1.0, best));
    }
    let t = f64::from(params.temperature);
    let max = f64::from(logits[argmax(logits)]);
    let mut weights: Vec<f64> = logits.iter().map(|&l| ((f64::from(l) - max) / t).exp()).collect();
    if params.top_p < 1.0 {
        keep_top_p(&mut weights, f64::from(params.top_p));
    }
    let total: f64 = weights.iter().sum();
    let target = source.uniform() * total;
    let mut seen = 0.0;
    let mut chosen = None;
    for (id, &w) in weights.iter().enumerate() {
        if w > 0.0 {
            seen += w;
            chosen = Some(id);
            if target < seen {
                break;
            }
        }
    }
    let id = chosen.unwrap_or_else(|| argmax(logits));
    (id as u32, (weights[id] / total).ln() as f32)
}

/// Log-probabilities of the `k` most probable tokens at temperature 1, most probable first.
pub fn top_logprobs(logits: &[f32], k: usize) -> Vec<(u32, f32)> {
    let mut ids: Vec<usize> = (0..logits.len()).collect();
    ids.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    let lse = log_sum_exp(logits, 1.0);
    ids.into_iter()
        .take(k)
        .map(|i| (i as u32, (f64::from(logits[i]) - lse) as f32))
        .collect()
}

/// Log-probability of token `id` at a temperature above 0, over the whole vocabulary; nats. `id` is below the vocabulary's size.
pub fn log_prob(logits: &[f32], temperature: f32, id: u32) -> f32 {
    log_softmax_at(logits, f64::from(temperature), id as usize)
}

fn log_softmax_at(logits: &[f32], t: f64, id: usize) -> f32 {
    (f64::from(logits[id]) / t - log_sum_exp(logits, t)) as f32
}

fn log_sum_exp(logits: &[f32], t: f64) -> f64 {
    let max = f64::from(logits[argmax(logits)]) / t;
    let sum: f64 = logits.iter().map(|&l| (f64::from(l) / t - max).exp()).sum();
    max + sum.ln()
}

/// Zeroes every weight outside the nucleus. Ties keep the lower id, so the set is a function of the logits alone.
fn keep_top_p(weights: &mut [f64], top_p: f64) {
    let total: f64 = weights.iter().sum();
    let mut ids: Vec<usize> = (0..weights.len()).collect();
    ids.sort_by(|&a, &b| weights[b].total_cmp(&weights[a]).then(a.cmp(&b)));
    let mut reached = 0.0;
    let mut kept = 0;
    for &id in &ids {
        reached += weights[id];
        kept += 1;
        if reached >= top_p * total {
            break;
        }
    }
    for &id in &ids[kept..] {
        weights[id] = 0.0;
    }
}

fn argmax(values: &[f32]) -> usize {
    let mut best = 0;
    for (i, v) in values.iter().enumerate() {
        if *v > values[best] {
            best = i;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequencies_follow_the_softmax() {
        let logits = [1.0f32, 0.0, -1.0, 2.0];
        let params = Params {
            temperature: 0.7,
            top_p: 1.0,
        };
        let mut source = Source::new(7);
        let n = 40_000;
        let mut counts = [0usize; 4];
        let mut logprobs = [0f32; 4];
        for _ in 0..n {
            let (id, lp) = sample(&logits, &params, &mut source);
            counts[id as usize] += 1;
            logprobs[id as usize] = lp;
        }
        for id in 0..4 {
            let p = f64::from(logprobs[id]).exp();
            let seen = counts[id] as f64 / f64::from(n);
            assert!((p - seen).abs() < 0.01, "token {id}: {p} against {seen}");
        }
        let sum: f64 = logprobs.iter().map(|&l| f64::from(l).exp()).sum();
        assert!((sum - 1.0).abs() < 1e-6);
    }

    #[test]
    fn top_p_keeps_the_nucleus_and_renormalises() {
        // probabilities 0.5, 0.3, 0.2: 0.6 needs the first two
        let logits = [0.5f32.ln(), 0.3f32.ln(), 0.2f32.ln()];
        let params = Params {
            temperature: 1.0,
            top_p: 0.6,
        };
        let mut source = Source::new(1);
        for _ in 0..200 {
            let (id, lp) = sample(&logits, &params, &mut source);
            let expected = [0.5f64 / 0.8, 0.3 / 0.8][id as usize].ln();
            assert!((f64::from(lp) - expected).abs() < 1e-6);
        }
    }

    #[test]
    fn the_same_seed_gives_the_same_tokens() {
        let logits: Vec<f32> = (0..100).map(|i| (i as f32 * 0.37).sin()).collect();
        let draw = |seed| {
            let mut s = Source::new(seed);
            (0..20)
                .map(|_| sample(&logits, &Params::default(), &mut s).0)
                .collect::<Vec<_>>()
        };
        assert_eq!(draw(5), draw(5));
        assert_ne!(draw(5), draw(6));
    }

    #[test]
    fn greedy_takes_the_best_and_reports_the_plain_softmax() {
        let (id, lp) = sample(
            &[0.0, 3.0, 1.0],
            &Params {
                temperature: 0.0,
                top_p: 1.0,
            },
            &mut Source::new(0),
        );
        assert_eq!(id, 1);
        let expected = 3.0 - (1.0 + 3f64.exp() + 1f64.exp()).ln();
        assert!((f64::from(lp) - expected).abs() < 1e-6);
        assert_eq!(top_logprobs(&[0.0, 3.0, 1.0], 2)[0], (id, lp));
    }
}
