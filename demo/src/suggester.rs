//! A policy in this process: suggestions for many pauses at once, as the serving engine would make
//! them, without a server. Used for the reference policies; a run asks the stack. Synchronous.

use std::{borrow::Cow, num::NonZero};

use anyhow::{Context, anyhow, ensure};
use artifact::checkpoint::Checkpoint;
use model::exact::{ExactModel, KvCache};
use model::sampling::{self, Params, Source};
use text::{kept::Kept, tokenizer::Tokenizer};

use crate::{
    client::{CONTEXT_CHARS_MAX, SHORTENINGS_MAX},
    corpus::{pauses::SUGGESTION_TOKENS_MAX, tokenizer::CUT},
    developer::Pause,
};

/// Sequences that are decoded together.
const SLOTS: usize = 32;

/// How a suggestion is chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Method {
    /// As served: declining is a token like any other.
    Sampled {
        temperature: f32,
        seed: u64,
        /// Declining is masked: something must be shown.
        suppressed: bool,
    },
    /// The most probable token each time, except declining. Whether it would have declined is
    /// noted.
    Greedy,
}

impl Method {
    /// As users get it.
    pub fn sampled(temperature: f32, seed: u64) -> Self {
        Self::Sampled {
            temperature,
            seed,
            suppressed: false,
        }
    }
}

/// One suggestion, whether it is shown or not.
#[derive(Debug, Clone, Default)]
pub struct Draft {
    /// Tokens sampled so far, the one that ends the suggestion included.
    pub tokens: Vec<u32>,
    /// Log-probability of each token, nats, of the same distribution as that of the whole.
    pub log_probs: Vec<f32>,
    /// Log-probability of the whole suggestion, nats: of the distribution sampled from, or at
    /// temperature 1 if greedy.
    pub log_prob: f64,
    /// The model chose to show nothing, or would have if greedy.
    pub declined: bool,
    pub text: String,
}

/// Weights, tokenizer and KV cache.
pub struct Suggester {
    model: ExactModel,
    tokenizer: Tokenizer,
    cache: KvCache,
}

struct Sequence {
    /// In the cache.
    slot: usize,
    prompt: usize,
    method: usize,
    how: Method,
    source: Source,
    draft: Draft,
}

impl Suggester {
    pub fn new(checkpoint: &Checkpoint) -> anyhow::Result<Self> {
        let model = ExactModel::from_checkpoint(checkpoint).context("build the model")?;
        let context = model.config().context() as usize;
        ensure!(
            context > SUGGESTION_TOKENS_MAX,
            "the model's context of {context} tokens leaves no room for a prompt"
        );
        Ok(Self {
            tokenizer: Tokenizer::from_checkpoint(checkpoint).context("read the tokenizer")?,
            cache: KvCache::new(&model, SLOTS, context),
            model,
        })
    }

    pub fn encode(&self, prompt: &str) -> anyhow::Result<Vec<u32>> {
        self.tokenizer.encode_prompt(prompt).context("tokenize a prompt")
    }

    /// What keeping the first `characters` of a suggestion says of its tokens.
    pub fn kept(&self, tokens: &[u32], characters: usize, accepted: bool) -> anyhow::Result<Option<Kept>> {
        Kept::of(&self.tokenizer, tokens, characters, accepted).context("read a suggestion")
    }

    /// The prompt of a pause. `None`: it never fits.
    pub fn prompt(&self, pause: &Pause) -> anyhow::Result<Option<Vec<u32>>> {
        self.fitting(CONTEXT_CHARS_MAX, |chars| format!("{}{CUT}", pause.context(chars)))
    }

    /// The tokens of `prompt(chars)`, shortened as the demo's client does it. `None`: it never fits.
    pub fn fitting(&self, mut chars: usize, prompt: impl Fn(usize) -> String) -> anyhow::Result<Option<Vec<u32>>> {
        let most = self.cache.context() - SUGGESTION_TOKENS_MAX;
        for _ in 0..=SHORTENINGS_MAX {
            let ids = self.encode(&prompt(chars))?;
            if ids.len() <= most {
                return Ok(Some(ids));
            }
            chars = chars * 3 / 4;
        }
        Ok(None)
    }

    /// Suggestions for each prompt, one for each of its methods. A prompt is read only once.
    pub fn suggest<const N: usize>(&mut self, prompts: &[(Vec<u32>, [Method; N])]) -> anyhow::Result<Vec<[Draft; N]>> {
        const { assert!(N <= SLOTS) };
        let mut drafts = vec![std::array::from_fn(|_| Draft::default()); prompts.len()];
        let mut running: Vec<Sequence> = Vec::new();
        let mut waiting = prompts.iter().enumerate();
        loop {
            while running.len() + N <= SLOTS
                && let Some((prompt, (ids, methods))) = waiting.next()
            {
                let is_free = |slot: &usize| running.iter().all(|sequence| sequence.slot != *slot);
                let free: Vec<usize> = (0..SLOTS).filter(is_free).take(N).collect();
                let first = running.len();
                self.cache.clear(free[0]);
                let logits = self.model.prefill(&mut self.cache, free[0], ids)?;
                for ((method, &how), &slot) in methods.iter().enumerate().zip(&free) {
                    self.cache.copy_prefix(free[0], slot, ids.len());
                    let seed = match how {
                        Method::Sampled { seed, .. } => seed,
                        Method::Greedy => 0,
                    };
                    let (source, draft) = (Source::new(seed), Draft::default());
                    running.push(Sequence {
                        slot,
                        prompt,
                        method,
                        how,
                        source,
                        draft,
                    });
                }
                for index in (first..running.len()).rev() {
                    self.step(&mut running, &mut drafts, index, &logits)?;
                }
            }
            if running.is_empty() {
                return Ok(drafts);
            }
            let last = |sequence: &Sequence| sequence.draft.tokens.last().copied().unwrap_or(0);
            let last: Vec<(usize, [u32; 1])> = running.iter().map(|one| (one.slot, [last(one)])).collect();
            let segments: Vec<(usize, &[u32])> = last.iter().map(|(slot, id)| (*slot, &id[..])).collect();
            let logits = self.model.advance(&mut self.cache, &segments, None)?;
            for index in (0..running.len()).rev() {
                self.step(&mut running, &mut drafts, index, &logits[index])?;
            }
        }
    }

    /// Adds one token to a sequence. After the last one it stores the draft and frees the slot.
    fn step<const N: usize>(
        &mut self,
        running: &mut Vec<Sequence>,
        drafts: &mut [[Draft; N]],
        index: usize,
        logits: &[f32],
    ) -> anyhow::Result<()> {
        let Sequence { how, source, draft, .. } = &mut running[index];
        let decline = self.tokenizer.decline_id();
        let (id, log_prob) = match *how {
            Method::Sampled {
                temperature,
                suppressed,
                ..
            } => {
                let params = Params {
                    temperature,
                    ..Params::default()
                };
                let mut logits = Cow::Borrowed(logits);
                if let Some(decline) = decline.filter(|_| suppressed) {
                    sampling::suppress(logits.to_mut(), decline);
                }
                sampling::sample(&logits, &params, source)
            }
            Method::Greedy => {
                draft.declined |= Some(most_probable(logits, None)) == decline;
                let id = most_probable(logits, decline);
                (id, sampling::log_prob(logits, 1.0, id))
            }
        };
        draft.tokens.push(id);
        draft.log_probs.push(log_prob);
        draft.log_prob += f64::from(log_prob);
        draft.declined |= Some(id) == decline;
        let stopped = self.tokenizer.stop_ids().contains(&id);
        if !stopped && draft.tokens.len() < SUGGESTION_TOKENS_MAX {
            return Ok(());
        }
        let written = draft.tokens.len() - usize::from(stopped);
        draft.text = self.tokenizer.decode(&draft.tokens[..written])?;
        let ended = running.swap_remove(index);
        drafts[ended.prompt][ended.method] = ended.draft;
        Ok(())
    }
}

/// Does `work` with parts of the numbered items on all cores, each with a suggester of its own. Returns
/// all results in order.
pub fn on_all_cores<I: Sync, T: Send + Clone>(
    checkpoint: &Checkpoint,
    items: &[I],
    work: impl Fn(&mut Suggester, &[(u64, &I)]) -> anyhow::Result<Vec<T>> + Sync,
) -> anyhow::Result<Vec<T>> {
    let workers = std::thread::available_parallelism().map_or(1, NonZero::get);
    let numbered: Vec<(u64, &I)> = (0..).zip(items).collect();
    std::thread::scope(|scope| {
        let parts = numbered.chunks(items.len().div_ceil(workers).max(1));
        let handles: Vec<_> = parts
            .map(|part| scope.spawn(|| work(&mut Suggester::new(checkpoint)?, part)))
            .collect();
        let results = handles
            .into_iter()
            .map(|handle| handle.join().map_err(|_| anyhow!("a worker panicked"))?);
        Ok(results.collect::<anyhow::Result<Vec<_>>>()?.concat())
    })
}

/// The most probable token except `without`; the lowest id among equals.
fn most_probable(logits: &[f32], without: Option<u32>) -> u32 {
    let candidates = (0..).zip(logits).filter(|(id, _)| Some(*id) != without);
    let best = candidates.reduce(|best, next| if next.1 > best.1 { next } else { best });
    best.map_or(0, |(id, _)| id)
}
