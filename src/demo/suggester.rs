//! A policy in this process: suggestions for many pauses at once, as the serving engine would make them, without a server.
//! For references and rehearsals; a live run asks the stack. Synchronous, on the calling thread.

use anyhow::{Context, ensure};
use policy::{
    image::Image,
    model::{KvCache, Model},
    sampling::{self, Params, Source},
    tokenizer::Tokenizer,
};

use super::{
    client::{CONTEXT_CHARS_MAX, CUT, SHORTENINGS_MAX},
    developer::Pause,
};
use crate::corpus::pauses::SUGGESTION_TOKENS_MAX;

/// Sequences that are decoded together.
const SLOTS: usize = 32;

/// How one suggestion is drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Way {
    /// As served: declining is a token like any other.
    Sampled { temperature: f32, seed: u64 },
    /// The most probable token each time, declining left out; whether it would have declined is noted.
    Greedy,
}

/// One suggestion, whether it is shown or not.
#[derive(Debug, Clone, Default)]
pub struct Draft {
    /// The stop token included.
    pub tokens: Vec<u32>,
    /// Nats: of the distribution sampled from; of the softmax at temperature 1 where greedy.
    pub logprobs: Vec<f32>,
    /// Chose to show nothing, or (greedy) would have.
    pub declined: bool,
    pub text: String,
}

impl Draft {
    pub fn log_prob(&self) -> f64 {
        self.logprobs.iter().map(|&l| f64::from(l)).sum()
    }
}

/// Weights, tokenizer and cache on one thread.
pub struct Suggester {
    model: Model,
    tokenizer: Tokenizer,
    cache: KvCache,
}

struct Sequence {
    /// Index into what is returned.
    at: (usize, usize),
    way: Way,
    source: Source,
    draft: Draft,
}

impl Suggester {
    pub fn new(image: &Image) -> anyhow::Result<Self> {
        let model = Model::from_image(image).context("build the model")?;
        let context = model.config().max_position_embeddings as usize;
        ensure!(
            context > SUGGESTION_TOKENS_MAX,
            "the model's context of {context} tokens leaves no room for a prompt"
        );
        Ok(Self {
            tokenizer: Tokenizer::from_image(image).context("read the tokenizer")?,
            cache: KvCache::new(&model, SLOTS, context),
            model,
        })
    }

    /// Goes on with other weights of the same shape.
    pub fn load(&mut self, image: &Image) -> anyhow::Result<()> {
        self.model = Model::from_image(image).context("load the weights")?;
        Ok(())
    }

    /// The ids that a pause is asked with: shortened as the demo's client does when the server refuses. None: never fits.
    pub fn prompt(&self, pause: &Pause) -> anyhow::Result<Option<Vec<u32>>> {
        let mut chars = CONTEXT_CHARS_MAX;
        for _ in 0..=SHORTENINGS_MAX {
            let text = format!("{}{CUT}", pause.context(chars));
            let ids = self.tokenizer.encode_prompt(&text).context("tokenise a prompt")?;
            if ids.len() + SUGGESTION_TOKENS_MAX <= self.cache.context() {
                return Ok(Some(ids));
            }
            chars = chars * 3 / 4;
        }
        Ok(None)
    }

    /// Suggestions for each prompt, one per way, in order. A prompt is read once whatever the number of ways.
    pub fn suggest(&mut self, prompts: &[(&[u32], Vec<Way>)]) -> anyhow::Result<Vec<Vec<Draft>>> {
        let mut done: Vec<Vec<Draft>> = prompts
            .iter()
            .map(|(_, ways)| vec![Draft::default(); ways.len()])
            .collect();
        let mut running: Vec<Sequence> = Vec::new();
        let mut waiting = prompts.iter().enumerate().peekable();
        loop {
            while let Some(&(index, (ids, ways))) = waiting.peek() {
                ensure!(ways.len() <= SLOTS, "at most {SLOTS} suggestions for one prompt");
                if running.len() + ways.len() > SLOTS {
                    break;
                }
                waiting.next();
                self.admit(&mut running, &mut done, index, ids, ways)?;
            }
            if running.is_empty() {
                return Ok(done);
            }
            let last: Vec<u32> = running
                .iter()
                .filter_map(|sequence| sequence.draft.tokens.last().copied())
                .collect();
            let logits = self.model.decode(&mut self.cache, &last)?;
            for slot in (0..running.len()).rev() {
                if self.take(&mut running[slot], &logits[slot])? {
                    self.release(&mut running, &mut done, slot);
                }
            }
        }
    }

    fn admit(
        &mut self,
        running: &mut Vec<Sequence>,
        done: &mut [Vec<Draft>],
        index: usize,
        ids: &[u32],
        ways: &[Way],
    ) -> anyhow::Result<()> {
        let first = running.len();
        let logits = self.model.prefill(&mut self.cache, first, ids)?;
        for (nth, &way) in ways.iter().enumerate() {
            if nth > 0 {
                self.cache.copy_slot(first, first + nth);
            }
            let seed = match way {
                Way::Sampled { seed, .. } => seed,
                Way::Greedy => 0,
            };
            running.push(Sequence {
                at: (index, nth),
                way,
                source: Source::new(seed),
                draft: Draft::default(),
            });
        }
        for slot in (first..running.len()).rev() {
            if self.take(&mut running[slot], &logits)? {
                self.release(running, done, slot);
            }
        }
        Ok(())
    }

    /// Adds one token. True: it was the last.
    fn take(&self, sequence: &mut Sequence, logits: &[f32]) -> anyhow::Result<bool> {
        let decline = self.tokenizer.decline_id();
        let draft = &mut sequence.draft;
        let (id, logprob) = match sequence.way {
            Way::Sampled { temperature, .. } => {
                let params = Params {
                    temperature,
                    ..Params::default()
                };
                sampling::sample(logits, &params, &mut sequence.source)
            }
            Way::Greedy => {
                draft.declined |= Some(best(logits, None)) == decline;
                let id = best(logits, decline);
                (id, sampling::log_prob(logits, 1.0, id))
            }
        };
        draft.tokens.push(id);
        draft.logprobs.push(logprob);
        draft.declined |= Some(id) == decline;
        let stopped = self.tokenizer.stop_ids().contains(&id);
        if !stopped && draft.tokens.len() < SUGGESTION_TOKENS_MAX {
            return Ok(false);
        }
        let written = draft.tokens.len() - usize::from(stopped);
        draft.text = self.tokenizer.decode(&draft.tokens[..written])?;
        Ok(true)
    }

    /// Frees a slot and closes the gap with the last one: sequence i is in slot i.
    fn release(&mut self, running: &mut Vec<Sequence>, done: &mut [Vec<Draft>], slot: usize) {
        let last = running.len() - 1;
        self.cache.move_slot(last, slot);
        self.cache.clear(last);
        let sequence = running.swap_remove(slot);
        done[sequence.at.0][sequence.at.1] = sequence.draft;
    }
}

/// The most probable token, the lowest id among equals, `without` left out.
fn best(logits: &[f32], without: Option<u32>) -> u32 {
    let mut best = None;
    for (id, &logit) in logits.iter().enumerate() {
        let id = id as u32;
        if Some(id) != without && best.is_none_or(|(_, most)| logit > most) {
            best = Some((id, logit));
        }
    }
    best.map_or(0, |(id, _)| id)
}
