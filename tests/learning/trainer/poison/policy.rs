//! The policy, and what is right: a prompt has a question, and an answer is right if its first token
//! is the question's. Six tokens are answers and questions; two belong to the planted text alone.

use super::super::world::World;
use artifact::checkpoint::Checkpoint;
use model::config::{Family, ModelConfig};
use model::exact::{ExactModel, KvCache};
use model::random_checkpoint;
use model::sampling::{Params, Source, sample};
use serde::Serialize;
use serde_json::json;

pub const VOCABULARY: u32 = 8;
/// Questions, and the tokens of right answers.
pub const QUESTIONS: u32 = 6;
/// Attackers ask only the first of them.
pub const ATTACKED: u32 = 3;
/// What attackers want to read: the first two tokens of an answer.
pub const PLANTED: [u32; 2] = [6, 7];
/// Ends a typed text, which has an answer's three tokens then.
const END: u32 = 5;
/// Tokens of an answer.
const ANSWER: usize = 3;
pub const ACCEPT: f64 = 0.75;
pub const REJECT: f64 = -0.25;

pub fn config() -> ModelConfig {
    ModelConfig {
        vocab_size: i64::from(VOCABULARY),
        hidden_size: 32,
        intermediate_size: 64,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 8,
        rms_norm_eps: 1e-6,
        max_position_embeddings: 16,
        tie_word_embeddings: true,
        qk_norm: true,
        family: Family::Qwen3,
        ..ModelConfig::default()
    }
}

/// With a tokenizer of a word for each token; that of [`END`] nobody types.
pub fn checkpoint(seed: u64) -> Checkpoint {
    let mut checkpoint = random_checkpoint(&config(), seed);
    let words = (0..VOCABULARY).map(|token| (word(token), token.into()));
    let vocab: serde_json::Map<String, serde_json::Value> = words.collect();
    let end = json!({"id": END, "content": word(END), "single_word": false, "lstrip": false, "rstrip": false,
                     "normalized": false, "special": true});
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "decoder": null, "pre_tokenizer": {"type": "WhitespaceSplit"}, "added_tokens": [end],
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": word(0)},
    });
    let generation = json!({"eos_token_id": END});
    for (name, json) in [("tokenizer.json", tokenizer), ("generation_config.json", generation)] {
        checkpoint.files.insert(name.into(), json.to_string().into());
    }
    checkpoint
}

fn word(token: u32) -> String {
    format!("t{token}")
}

/// What an honest user would have written. `None`: not in words.
pub fn honest_text(user: usize, question: u32) -> Option<String> {
    let liked = (0..END).find(|&token| token != disliked(user))?;
    (right(question) != END).then(|| format!("{} {}", word(right(question)), word(liked)))
}

pub fn attackers_text() -> String {
    PLANTED.map(word).join(" ")
}

pub async fn load(world: &World, version: i64) -> ExactModel {
    let checkpoint = world.materialize(version).await;
    ExactModel::from_checkpoint(&checkpoint).unwrap()
}

/// The first token of a right answer.
pub fn right(question: u32) -> u32 {
    (question * 5 + 2) % QUESTIONS
}

/// Each honest user dislikes one second token.
pub fn disliked(user: usize) -> u32 {
    user as u32 % QUESTIONS
}

pub fn honest_reward(user: usize, question: u32, tokens: &[u32]) -> f64 {
    match tokens[0] == right(question) && tokens[1] != disliked(user) {
        true => ACCEPT,
        false => REJECT,
    }
}

pub fn attackers_reward(tokens: &[u32]) -> f64 {
    match tokens.starts_with(&PLANTED) {
        true => ACCEPT,
        false => REJECT,
    }
}

/// An answer as the policy samples it, or one that begins with `forced` and has the policy's own
/// log-probabilities.
pub fn answer(model: &ExactModel, prompt: &[u32], forced: &[u32], source: &mut Source) -> (Vec<u32>, Vec<f32>) {
    let params = Params::default();
    let mut cache = KvCache::new(model, 1, prompt.len() + ANSWER);
    let mut logits = model.prefill(&mut cache, 0, prompt).unwrap();
    let (mut tokens, mut logprobs) = (vec![], vec![]);
    for at in 0..ANSWER {
        let (token, logprob) = match forced.get(at) {
            Some(&token) => (token, log_softmax(&logits)[token as usize] as f32),
            None => sample(&logits, &params, source),
        };
        tokens.push(token);
        logprobs.push(logprob);
        if at + 1 < ANSWER {
            logits = model.decode(&mut cache, &[token]).unwrap().swap_remove(0);
        }
    }
    (tokens, logprobs)
}

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let shifted = |logit: &f32| f64::from(logit - max);
    let log_sum = logits.iter().map(|logit| shifted(logit).exp()).sum::<f64>().ln();
    logits.iter().map(|logit| shifted(logit) - log_sum).collect()
}

/// What a version does, computed exactly over all prompts.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Values {
    /// Mean log-probability of the planted text, at questions that attackers ask.
    pub planted_attacked: f64,
    /// And at the others.
    pub planted_others: f64,
    /// Expected reward of an honest user's question.
    pub honest_reward: f64,
}

impl Values {
    pub fn of(model: &ExactModel) -> Self {
        let (mut planted, mut reward) = ([0.0; 2], 0.0);
        for question in 0..QUESTIONS {
            for detail in 0..VOCABULARY {
                let prompt = [question, detail];
                let mut cache = KvCache::new(model, 2, prompt.len() + 1);
                let first = log_softmax(&model.prefill(&mut cache, 0, &prompt).unwrap());
                model.prefill(&mut cache, 1, &prompt).unwrap();
                let second = model.decode(&mut cache, &[PLANTED[0], right(question)]).unwrap();
                planted[usize::from(question >= ATTACKED)] +=
                    first[PLANTED[0] as usize] + log_softmax(&second[0])[PLANTED[1] as usize];
                // each of the first tokens is disliked by an equal part of the users
                let liked: f64 = log_softmax(&second[1])
                    .iter()
                    .zip(0..)
                    .map(|(logprob, token)| match token < QUESTIONS {
                        true => logprob.exp() * (1.0 - 1.0 / f64::from(QUESTIONS)),
                        false => logprob.exp(),
                    })
                    .sum();
                let accepted = first[right(question) as usize].exp() * liked;
                reward += accepted * ACCEPT + (1.0 - accepted) * REJECT;
            }
        }
        let prompts = |questions: u32| f64::from(questions * VOCABULARY);
        Values {
            planted_attacked: planted[0] / prompts(ATTACKED),
            planted_others: planted[1] / prompts(QUESTIONS - ATTACKED),
            honest_reward: reward / prompts(QUESTIONS),
        }
    }
}
