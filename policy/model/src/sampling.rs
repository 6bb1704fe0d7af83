//! From logits to a token and its log-probability. Pure arithmetic on slices: no tensors, no threads, no clock.
//!
//! The log-probability returned is that of the distribution actually sampled from, after everything in [`Params`]: it is what
//! the log records and what the trainer's importance ratios divide by. With l the logits and T the temperature, in this
//! order, which is vLLM's:
//!
//! ```text
//! z = l + bias                                       every id in `logit_bias`
//! z = z < 0 ? z · r : z / r                          every id of the prompt or sampled before (repetition penalty r)
//! z = z − f · n − p · [n > 0]                        n: how often the id was sampled before (frequency f, presence p)
//! w = exp((z − max z) · (1 / T))
//! keep i if wᵢ ≥ min_p                               (max w is 1)
//! keep the top_k largest of these
//! keep the fewest largest of these whose w reach top_p of the sum of w
//! log p(i) = ln(wᵢ / Σ w over what is kept)
//! ```
//!
//! z is f32 arithmetic, what follows f64 with sums in the order of ids, and `exp` and `ln` are code of the program, not of the
//! machine's C library: the same logits give the same bits on every machine, in the sampler and wherever the log-probability
//! is computed again. Each filter keeps a beginning of one order, the largest z first and of equal ones the lower id, so
//! that what was kept follows from the logits, and with the order from its size alone ([`Drawn::kept`]). vLLM and `transformers`
//! keep more than `top_k` where ids tie for the last place.
//!
//! Greedy (`temperature` 0) takes the largest z. A point mass would say nothing as a log-probability: there the value is that of
//! the softmax of z at temperature 1, for people to read; such a token is never trained on.

mod shape;

use std::collections::BTreeMap;

use rand::{Rng, SeedableRng, rngs::StdRng};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use shape::{Order, Shaped};

/// The sampling parameters. This is their only declaration: the completions API deserializes it, the engine samples with
/// it, and the log takes its fields from it.
///
/// The default of each field is its neutral value, so the default `Params` is the model's own distribution. In JSON,
/// an absent or null field has its default. [`Params::check`] has the ranges.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default)]
pub struct Params {
    /// Logits are divided by it; 0 is greedy.
    #[serde(deserialize_with = "null_as_one")]
    pub temperature: f32,
    /// Keeps the smallest set of most probable tokens whose probability reaches this; 1 keeps all.
    #[serde(deserialize_with = "null_as_one")]
    pub top_p: f32,
    /// Keeps this many most probable tokens; 0 keeps all, and so does −1 in JSON.
    #[serde(deserialize_with = "count_or_all")]
    pub top_k: u32,
    /// Keeps tokens with at least this share of the largest probability; 0 keeps all.
    #[serde(deserialize_with = "null_as_zero")]
    pub min_p: f32,
    /// Divides positive logits and multiplies negative ones of ids in the prompt or sampled before; 1 is none.
    #[serde(deserialize_with = "null_as_one")]
    pub repetition_penalty: f32,
    /// Subtracted from the logits of ids that were sampled before.
    #[serde(deserialize_with = "null_as_zero")]
    pub presence_penalty: f32,
    /// Subtracted from the logits of ids, once for each time they were sampled before.
    #[serde(deserialize_with = "null_as_zero")]
    pub frequency_penalty: f32,
    /// Added to the logits of ids.
    #[serde(deserialize_with = "by_id")]
    pub logit_bias: BTreeMap<u32, f32>,
}

impl Default for Params {
    fn default() -> Self {
        Params {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: BTreeMap::new(),
        }
    }
}

fn null_as_one<'de, D: Deserializer<'de>>(json: D) -> Result<f32, D::Error> {
    Ok(Option::deserialize(json)?.unwrap_or(1.0))
}

fn null_as_zero<'de, D: Deserializer<'de>>(json: D) -> Result<f32, D::Error> {
    Ok(Option::deserialize(json)?.unwrap_or(0.0))
}

fn count_or_all<'de, D: Deserializer<'de>>(json: D) -> Result<u32, D::Error> {
    match Option::<i64>::deserialize(json)?.unwrap_or(0) {
        -1 => Ok(0),
        k => {
            u32::try_from(k).map_err(|_| D::Error::custom(format!("top_k is {k}; give 1 or more, or 0 or -1 for all")))
        }
    }
}

/// Ids are text as keys of JSON, and stay text where serde has buffered them.
fn by_id<'de, D: Deserializer<'de>>(json: D) -> Result<BTreeMap<u32, f32>, D::Error> {
    let biases = Option::<BTreeMap<String, f32>>::deserialize(json)?.unwrap_or_default();
    let pairs = biases.into_iter().map(|(id, bias)| Some((id.parse().ok()?, bias)));
    pairs
        .collect::<Option<_>>()
        .ok_or_else(|| D::Error::custom("logit_bias must be an object from token ids to numbers"))
}

/// A parameter that is out of range.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{field} is {value}; give {range}")]
pub struct Invalid {
    pub field: &'static str,
    pub value: f32,
    pub range: &'static str,
}

impl Params {
    /// Checks the ranges: those of OpenAI's and vLLM's APIs, and 0.01 to 10 for the repetition penalty.
    pub fn check(&self) -> Result<(), Invalid> {
        let in_range = |min: f32, value: f32, max: f32| (min..=max).contains(&value);
        let bias = self
            .logit_bias
            .values()
            .copied()
            .find(|bias| !in_range(-100.0, *bias, 100.0));
        let (repetition, presence) = (self.repetition_penalty, self.presence_penalty);
        let (frequency, top_p) = (self.frequency_penalty, self.top_p);
        let checks = [
            (
                "temperature",
                self.temperature,
                in_range(0.0, self.temperature, 2.0),
                "0 to 2",
            ),
            (
                "top_p",
                top_p,
                top_p > 0.0 && top_p <= 1.0,
                "more than 0, at most 1; temperature 0 is greedy",
            ),
            ("min_p", self.min_p, in_range(0.0, self.min_p, 1.0), "0 to 1"),
            (
                "repetition_penalty",
                repetition,
                in_range(0.01, repetition, 10.0),
                "0.01 to 10",
            ),
            ("presence_penalty", presence, in_range(-2.0, presence, 2.0), "-2 to 2"),
            (
                "frequency_penalty",
                frequency,
                in_range(-2.0, frequency, 2.0),
                "-2 to 2",
            ),
            ("logit_bias", bias.unwrap_or_default(), bias.is_none(), "-100 to 100"),
        ];
        match checks.iter().find(|(_, _, valid, _)| !valid) {
            Some(&(field, value, _, range)) => Err(Invalid { field, value, range }),
            None => Ok(()),
        }
    }

    /// Whether the distribution is the model's own, at some temperature above 0.
    pub fn is_plain(&self) -> bool {
        let plain = Params {
            temperature: self.temperature,
            ..Params::default()
        };
        self.temperature > 0.0 && *self == plain
    }

    /// Whether ids may be left out of what can be drawn.
    pub fn truncates(&self) -> bool {
        self.top_p < 1.0 || self.top_k > 0 || self.min_p > 0.0
    }

    /// Whether what was there before a token matters.
    pub fn looks_back(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }
}

/// What penalties look back on: the ids before a token.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct History {
    /// How often each id was sampled; an id that the prompt alone has is there with 0.
    sampled: BTreeMap<u32, u32>,
}

impl History {
    pub fn new(prompt: &[u32]) -> Self {
        History {
            sampled: prompt.iter().map(|&id| (id, 0)).collect(),
        }
    }

    /// What a token that comes after `prompt` and `sampled` looks back on.
    pub fn of(prompt: &[u32], sampled: &[u32]) -> Self {
        let mut history = History::new(prompt);
        sampled.iter().for_each(|&id| history.push(id));
        history
    }

    /// Adds a token that was sampled.
    pub fn push(&mut self, id: u32) {
        *self.sampled.entry(id).or_insert(0) += 1;
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

/// One token, drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Drawn {
    pub id: u32,
    /// In nats.
    pub log_prob: f32,
    /// How many ids could have been drawn, this one among them: the first so many in the order of [`keep_set`].
    pub kept: u32,
}

/// Draws one token from `logits` (one value per vocabulary entry, finite or suppressed), looking back on nothing. Returns its id
/// and its log-probability in nats.
pub fn sample(logits: &[f32], params: &Params, source: &mut Source) -> (u32, f32) {
    let drawn = draw(logits, params, &History::default(), source);
    (drawn.id, drawn.log_prob)
}

/// Draws one token from `logits`, one value per vocabulary entry, finite or suppressed. Takes one number from `source`, or none
/// where it is greedy.
pub fn draw(logits: &[f32], params: &Params, history: &History, source: &mut Source) -> Drawn {
    let shaped = Shaped::new(logits, params, history, None);
    let id = match &shaped {
        Shaped::Greedy { best, .. } => *best,
        Shaped::Weights { weights, total, .. } => {
            let target = source.uniform() * total;
            let mut seen = 0.0;
            let mut chosen = None;
            for (id, &weight) in weights.iter().enumerate() {
                if weight > 0.0 {
                    seen += weight;
                    chosen = Some(id);
                    if target < seen {
                        break;
                    }
                }
            }
            chosen.unwrap_or_else(|| argmax(logits))
        }
    };
    Drawn {
        id: id as u32,
        log_prob: shaped.log_prob(id),
        kept: shaped.kept(),
    }
}

/// The log-probability that [`draw`] gives `id` where it draws it: the same bits, from the same logits, parameters and history.
/// −∞ where it cannot be drawn. `id` is below the vocabulary's size.
pub fn log_prob_of(logits: &[f32], params: &Params, history: &History, id: u32) -> f32 {
    Distribution::rebuilt(logits, params, history, None).log_prob(id)
}

/// The distribution that a token was drawn from, for whoever has its logits again.
pub struct Distribution<'a> {
    logits: &'a [f32],
    params: &'a Params,
    history: &'a History,
    shaped: Shaped<'a>,
}

impl<'a> Distribution<'a> {
    /// `kept`: how many ids could be drawn, where that was logged; else it follows from the parameters. Where the logits are the
    /// sampler's own bits, both are the same.
    pub fn rebuilt(logits: &'a [f32], params: &'a Params, history: &'a History, kept: Option<u32>) -> Self {
        Distribution {
            logits,
            params,
            history,
            shaped: Shaped::new(logits, params, history, kept),
        }
    }

    /// In nats; −∞ where it could not be drawn. `id` is below the vocabulary's size.
    pub fn log_prob(&self, id: u32) -> f32 {
        self.shaped.log_prob(id as usize)
    }

    /// A factor and a summand for every logit, before the temperature: with them a network's own logits have this distribution's
    /// softmax, and a gradient. The summand of what could not be drawn is −∞.
    pub fn affine(&self) -> (Vec<f32>, Vec<f32>) {
        let (factors, mut summands) = shape::affine(self.logits, self.params, self.history);
        if let Shaped::Weights { weights, .. } = &self.shaped {
            for (summand, _) in summands.iter_mut().zip(weights).filter(|(_, weight)| **weight == 0.0) {
                *summand = f32::NEG_INFINITY;
            }
        }
        (factors, summands)
    }
}

/// The ids that [`draw`] can draw, rising. A function of the logits' bits, the parameters and the history alone.
pub fn keep_set(logits: &[f32], params: &Params, history: &History) -> Vec<u32> {
    match Shaped::new(logits, params, history, None) {
        Shaped::Greedy { best, .. } => vec![best as u32],
        Shaped::Weights { weights, .. } => {
            let kept = weights.iter().enumerate().filter(|(_, weight)| **weight > 0.0);
            kept.map(|(id, _)| id as u32).collect()
        }
    }
}

/// Takes a token out of what can be drawn: [`sample`] then draws from the distribution over the others, and its
/// log-probability is the one under that distribution.
pub fn suppress(logits: &mut [f32], id: u32) {
    if let Some(logit) = logits.get_mut(id as usize) {
        *logit = f32::NEG_INFINITY;
    }
}

/// The coin of exploration: whether a request with this seed is one of a `share` of all. Depends on nothing else, and is
/// independent of the tokens that [`Source`] draws from the same seed. A coin is the first 8 bytes (little-endian) of
/// BLAKE3(`"springtide explore 1\0" seed`) over 2^64, the seed as 8 bytes little-endian.
pub fn explores(seed: u64, share: f64) -> bool {
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"springtide explore 1\0");
    hasher.update(&seed.to_le_bytes());
    let mut first = [0; 8];
    first.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
    // 53 bits: as many as a double holds exactly
    ((u64::from_le_bytes(first) >> 11) as f64 / (1u64 << 53) as f64) < share
}

/// Log-probabilities of the `k` most probable tokens at temperature 1, most probable first.
pub fn top_logprobs(logits: &[f32], k: usize) -> Vec<(u32, f32)> {
    let mut order = Order::new(logits.iter().copied().enumerate());
    let lse = log_sum_exp(logits, 1.0);
    order
        .take(k)
        .map(|id| (id as u32, (f64::from(logits[id]) - lse) as f32))
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
    let sum: f64 = logits.iter().map(|&l| shape::exp(f64::from(l) / t - max)).sum();
    max + libm::log(sum)
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
mod tests;
