//! The demo's users without its clocks: where they pause, and what they think of an answer.

use std::sync::Arc;

use anyhow::{Context, ensure};
use artifact::checkpoint::Checkpoint;
use clap::Parser;
use demo::corpus::pauses::SUGGESTION_TOKENS_MAX;
use demo::corpus::tokenizer::CUT;
use demo::developer::{self, FilePart, Pause};
use demo::{Corpus, Reaction};
use text::tokenizer::Tokenizer;

use crate::engines::CONTEXT;

/// Of 400 users, every fourth is held out.
const USERS: usize = 400;
const HELD_OUT_ONE_IN: usize = 4;
/// Seed of the pauses of held-out users: the same in every run.
const HELD_OUT_SEED: u64 = 1_000_003;

pub struct Users {
    parts: Vec<Vec<FilePart>>,
    tokenizer: Tokenizer,
    context_chars: usize,
}

/// A place where a user waits for a suggestion.
pub struct Request {
    pub pause: Pause,
    pub prompt: Arc<[u32]>,
}

#[derive(Debug, Parser)]
struct Defaults {
    #[command(flatten)]
    corpus: Corpus,
}

impl Users {
    pub fn new(base: &Checkpoint, context_chars: usize) -> anyhow::Result<Self> {
        let files = Defaults::parse_from(["users"]).corpus.files()?;
        Ok(Users {
            parts: developer::deal(&files, USERS)?,
            tokenizer: Tokenizer::from_checkpoint(base).context("read the tokenizer")?,
            context_chars,
        })
    }

    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The pauses of one step of a run.
    pub fn cohort(&self, seed: u64, step: u32, size: usize) -> anyhow::Result<Vec<Request>> {
        let from = step as usize * size;
        self.requests(seed, from..from + size, |user| user % HELD_OUT_ONE_IN != 0)
    }

    /// The pauses of users who are never learned from.
    pub fn held_out(&self, size: usize) -> anyhow::Result<Vec<Request>> {
        self.requests(HELD_OUT_SEED, 0..size, |user| user % HELD_OUT_ONE_IN == 0)
    }

    fn requests(
        &self,
        seed: u64,
        numbers: std::ops::Range<usize>,
        is_among: impl Fn(usize) -> bool,
    ) -> anyhow::Result<Vec<Request>> {
        let users: Vec<usize> = (0..USERS).filter(|&user| is_among(user)).collect();
        let request = |number: usize| {
            let user = users[number % users.len()];
            let pause =
                developer::pause(&self.parts[user], seed, user, number as u64).context("a user without code")?;
            let prompt = self.prompt(&pause)?.into();
            Ok(Request { pause, prompt })
        };
        numbers.map(request).collect()
    }

    /// The prompt of a pause, shortened as the demo's client does it if it does not fit.
    fn prompt(&self, pause: &Pause) -> anyhow::Result<Vec<u32>> {
        let mut chars = self.context_chars;
        loop {
            let prompt = format!("{}{CUT}", pause.context(chars));
            let prompt = self.tokenizer.encode_prompt(&prompt).context("tokenize a prompt")?;
            if prompt.len() + SUGGESTION_TOKENS_MAX <= CONTEXT {
                return Ok(prompt);
            }
            ensure!(chars > 0, "a prompt without characters is too long");
            chars = chars * 3 / 4;
        }
    }

    /// The user's verdict on the sampled ids.
    pub fn judge(&self, request: &Request, tokens: &[u32]) -> anyhow::Result<Reaction> {
        if tokens.iter().any(|id| Some(*id) == self.tokenizer.decline_id()) {
            return Ok(Reaction::Declined);
        }
        let stopped = tokens
            .last()
            .is_some_and(|last| self.tokenizer.stop_ids().contains(last));
        let written = &tokens[..tokens.len() - usize::from(stopped)];
        Ok(request.pause.judge(&self.tokenizer.decode(written)?))
    }
}

/// The demo's rewards: showing costs τ = 0.25.
pub fn reward(reaction: Reaction) -> f64 {
    match reaction {
        Reaction::Right => 0.75,
        Reaction::Wrong => -0.25,
        Reaction::Declined => 0.0,
    }
}
