//! From logits to a token and its log-probability. Pure arithmetic on slices.
//!
//! The log-probability is that of the distribution sampled from, after all [`Params`]. It is
//! logged, and the trainer's importance ratios divide by it. With logits l and temperature T, the
//! steps and their order are vLLM's:
//!
//! ```text
//! z = l + bias                                       every id in `logit_bias`
//! z = z < 0 ? z · r : z / r                          every id in the prompt or sampled before (repetition penalty r)
//! z = z − f · n − p · [n > 0]                        n: times the id was sampled before (frequency f, presence p)
//! w = exp((z − max z) · (1 / T))
//! keep i if wᵢ ≥ min_p                               (max w is 1)
//! keep the top_k largest of these
//! keep the largest of these until their w reach top_p of the sum of w
//! log p(i) = ln(wᵢ / Σ w over the candidates)        candidates: the ids that are kept
//! ```
//!
//! z is f32; the rest is f64, with sums in the order of ids. `exp` and `ln` are compiled in, not
//! the machine's C library. The same logits therefore give the same bits on every machine.
//!
//! Every filter keeps a prefix of one order: the largest z first, and the lower id first among
//! equals. The candidates therefore follow from the logits and their number
//! ([`Drawn::candidates`]). vLLM and `transformers` keep more than `top_k` ids if some tie for the
//! last place.
//!
//! Greedy sampling (`temperature` 0) takes the largest z. Its log-probability is that of the
//! softmax of z at temperature 1, because a point mass's is always 0. Only losses that read the
//! policy's own probabilities are trained on such tokens.

mod probabilities;

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use probabilities::{Order, Probabilities};
use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha12Rng;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};

/// Temperatures at which answers to users may be trained on. Colder ones multiply the gradient by the
/// inverse of the temperature, hotter ones make rare tokens likely.
pub const TRAINABLE_TEMPERATURES: RangeInclusive<f32> = 0.5..=1.5;

/// The sampling parameters, declared once: the completions API deserializes them, the engine
/// samples with them, and the log copies their fields.
///
/// Each default is neutral, so the default `Params` is the model's own distribution. In JSON, a
/// missing or null field has its default. [`Params::check`] has the ranges.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default)]
pub struct Params {
    /// Divides the logits; 0 is greedy.
    #[serde(deserialize_with = "null_as_one")]
    pub temperature: f32,
    /// Keeps the fewest most probable tokens whose total probability reaches this; 1 keeps all.
    #[serde(deserialize_with = "null_as_one")]
    pub top_p: f32,
    /// Keeps this many of the most probable tokens; 0, or −1 in JSON, keeps all.
    #[serde(deserialize_with = "count_or_all")]
    pub top_k: u32,
    /// Keeps tokens with at least this fraction of the largest probability; 0 keeps all.
    #[serde(deserialize_with = "null_as_zero")]
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of ids in the prompt or sampled before; 1 is
    /// neutral.
    #[serde(deserialize_with = "null_as_one")]
    pub repetition_penalty: f32,
    /// Subtracted once from the logits of ids sampled before.
    #[serde(deserialize_with = "null_as_zero")]
    pub presence_penalty: f32,
    /// Subtracted from the logit of an id for each time it was sampled before.
    #[serde(deserialize_with = "null_as_zero")]
    pub frequency_penalty: f32,
    /// Added to the logits of the given ids.
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

/// JSON keys are strings. They stay strings where serde buffers a value, so they are parsed here.
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
    /// Checks the ranges. They are those of OpenAI's and vLLM's APIs, and 0.01 to 10 for the
    /// repetition penalty.
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

    /// Whether the distribution is the model's own at some temperature above 0.
    pub fn is_plain(&self) -> bool {
        let plain = Params {
            temperature: self.temperature,
            ..Params::default()
        };
        self.temperature > 0.0 && *self == plain
    }

    /// Whether a filter may exclude ids.
    pub fn truncates(&self) -> bool {
        self.top_p < 1.0 || self.top_k > 0 || self.min_p > 0.0
    }

    /// The code of why an answer may not be trained on if a caller chose these parameters; `None`: it
    /// may. A caller who makes tokens likely could teach any text by accepting it token by token.
    /// Filters make no token likely that is not likely anyway.
    pub fn untrainable(&self) -> Option<&'static str> {
        if self.has_penalties() || !self.logit_bias.is_empty() {
            return Some("steered_sampling");
        }
        let in_range = TRAINABLE_TEMPERATURES.contains(&self.temperature);
        (!in_range).then_some("temperature_out_of_range")
    }

    /// Whether the distribution depends on previous tokens.
    pub fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }
}

/// The tokens before the one to sample. Penalties depend on them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PreviousTokens {
    /// How often each id was sampled. An id that is only in the prompt has 0.
    sampled: BTreeMap<u32, u32>,
}

impl PreviousTokens {
    pub fn new(prompt: &[u32]) -> Self {
        PreviousTokens {
            sampled: prompt.iter().map(|&id| (id, 0)).collect(),
        }
    }

    /// The tokens of `prompt`, then of `sampled`.
    pub fn of(prompt: &[u32], sampled: &[u32]) -> Self {
        let mut previous = PreviousTokens::new(prompt);
        sampled.iter().for_each(|&id| previous.push(id));
        previous
    }

    /// Adds a sampled token.
    pub fn push(&mut self, id: u32) {
        *self.sampled.entry(id).or_insert(0) += 1;
    }
}

/// The random numbers of one request. They depend only on its seed, not on other requests in a
/// batch. The generator is named, because `StdRng` may be another one in the next version of `rand`.
#[derive(Debug, Clone)]
pub struct Source(ChaCha12Rng);

impl Source {
    pub fn new(seed: u64) -> Self {
        Source(ChaCha12Rng::seed_from_u64(seed))
    }

    /// Uniform in [0, 1).
    pub fn uniform(&mut self) -> f64 {
        const ULP: f64 = 1.0 / (1u64 << 53) as f64;
        (self.0.next_u64() >> 11) as f64 * ULP
    }
}

/// A sampled token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Drawn {
    pub id: u32,
    /// In nats.
    pub log_prob: f32,
    /// How many ids could have been drawn, this one included.
    pub candidates: u32,
}

/// [`draw`] without previous tokens. Returns the id and its log-probability in nats.
pub fn sample(logits: &[f32], params: &Params, source: &mut Source) -> (u32, f32) {
    let drawn = draw(logits, params, &PreviousTokens::default(), source);
    (drawn.id, drawn.log_prob)
}

/// Draws one token from `logits` `[V]`, whose values are finite or suppressed. Takes one number
/// from `source`, or none if sampling is greedy.
pub fn draw(logits: &[f32], params: &Params, previous: &PreviousTokens, source: &mut Source) -> Drawn {
    let probabilities = Probabilities::new(logits, params, previous, None);
    let id = match &probabilities {
        Probabilities::Greedy { best, .. } => *best,
        Probabilities::Weights { weights, total, .. } => {
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
        log_prob: probabilities.log_prob(id),
        candidates: probabilities.candidates(),
    }
}

/// The log-probability that [`draw`] returns if it draws `id`, bit for bit. −∞ if `id` cannot be
/// drawn.
///
/// # Panics
/// If `id` is not below the vocabulary's size.
pub fn log_prob_of(logits: &[f32], params: &Params, previous: &PreviousTokens, id: u32) -> f32 {
    Distribution::new(logits, params, previous, None).log_prob(id)
}

/// The distribution that a token was drawn from, computed again from the logits.
pub struct Distribution<'a> {
    logits: &'a [f32],
    params: &'a Params,
    previous: &'a PreviousTokens,
    probabilities: Probabilities<'a>,
}

impl<'a> Distribution<'a> {
    /// `candidates` is the logged number of candidates, or `None` to apply the filters again. With
    /// bitwise equal logits both give the same distribution.
    pub fn new(logits: &'a [f32], params: &'a Params, previous: &'a PreviousTokens, candidates: Option<u32>) -> Self {
        Distribution {
            logits,
            params,
            previous,
            probabilities: Probabilities::new(logits, params, previous, candidates),
        }
    }

    /// In nats. −∞ if `id` is not a candidate.
    ///
    /// # Panics
    /// If `id` is not below the vocabulary's size.
    pub fn log_prob(&self, id: u32) -> f32 {
        self.probabilities.log_prob(id as usize)
    }

    /// A factor and a summand for every logit, `[V]` each, to apply before the temperature.
    ///
    /// The softmax of factor · l + summand is this distribution, in a form that has a gradient. The
    /// summand of an id that is not a candidate is −∞.
    pub fn affine(&self) -> (Vec<f32>, Vec<f32>) {
        let (factors, mut summands) = probabilities::affine(self.logits, self.params, self.previous);
        if let Probabilities::Weights { weights, .. } = &self.probabilities {
            for (summand, _) in summands.iter_mut().zip(weights).filter(|(_, weight)| **weight == 0.0) {
                *summand = f32::NEG_INFINITY;
            }
        }
        (factors, summands)
    }
}

/// Excludes a token: sampling then uses the distribution over the other tokens.
pub fn suppress(logits: &mut [f32], id: u32) {
    if let Some(logit) = logits.get_mut(id as usize) {
        *logit = f32::NEG_INFINITY;
    }
}

/// Whether a request with this seed explores. This holds for a fraction `share` of all seeds.
///
/// The decision depends only on the seed and is independent of the tokens that [`Source`] draws. It
/// compares `share` with the first 8 bytes (little-endian) of BLAKE3(`"springtide explore 1\0"
/// seed`) over 2^64, where the seed is 8 bytes little-endian.
pub fn explores(seed: u64, share: f64) -> bool {
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"springtide explore 1\0");
    hasher.update(&seed.to_le_bytes());
    let mut first = [0; 8];
    first.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
    // A double holds 53 bits exactly.
    ((u64::from_le_bytes(first) >> 11) as f64 / (1u64 << 53) as f64) < share
}

/// The `k` most probable ids and their log-probabilities at temperature 1 in nats, best first.
pub fn top_logprobs(logits: &[f32], k: usize) -> Vec<(u32, f32)> {
    let mut order = Order::new(logits.iter().copied().enumerate());
    let lse = log_sum_exp(logits, 1.0);
    order
        .take(k)
        .map(|id| (id as u32, (f64::from(logits[id]) - lse) as f32))
        .collect()
}

/// Log-probability of `id` over the whole vocabulary at a temperature above 0, in nats.
///
/// # Panics
/// If `id` is not below the vocabulary's size.
pub fn log_prob(logits: &[f32], temperature: f32, id: u32) -> f32 {
    log_softmax_at(logits, f64::from(temperature), id as usize)
}

fn log_softmax_at(logits: &[f32], t: f64, id: usize) -> f32 {
    (f64::from(logits[id]) / t - log_sum_exp(logits, t)) as f32
}

fn log_sum_exp(logits: &[f32], t: f64) -> f64 {
    let max = f64::from(logits[argmax(logits)]) / t;
    let sum: f64 = logits.iter().map(|&l| probabilities::exp(f64::from(l) / t - max)).sum();
    max + libm::log(sum)
}

/// The id that greedy decoding takes of all but `except`; the first of equals.
pub fn greedy(logits: &[f32], except: Option<u32>) -> u32 {
    let mut best = None;
    for (id, logit) in (0..).zip(logits) {
        let is_better = best.is_none_or(|(_, most)| logit > most);
        if Some(id) != except && is_better {
            best = Some((id, logit));
        }
    }
    best.map_or(0, |(id, _)| id)
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
