//! Turns the sampled token ids of one choice into text. Pure.

use super::outcome::{SampledToken, TokenText};
use super::request::GenerationRequest;
use super::stop::StopMatcher;
use crate::engine::Token;
use text::answer::Layout;
use text::tokenizer::{Decoder, Error, Tokenizer};

pub struct TextBuilder<'a> {
    tokenizer: Option<&'a Tokenizer>,
    decoder: Option<Decoder>,
    stops: StopMatcher,
    /// The caller's ids that end the answer: no part of its text.
    hidden: Vec<u32>,
    /// Tokens to come in which no stop string counts.
    unstoppable: usize,
    /// Whether the caller wants each token's own text.
    token_texts: bool,
    /// Text that was returned by `push`.
    released: String,
    /// No token has come yet.
    is_first: bool,
    /// Characters decoded so far, released or held back.
    decoded: usize,
}

impl<'a> TextBuilder<'a> {
    pub fn new(tokenizer: Option<&'a Tokenizer>, request: &GenerationRequest, layout: &Layout) -> Self {
        TextBuilder {
            tokenizer,
            decoder: tokenizer.map(|tokenizer| tokenizer.decoder_showing(layout.marks())),
            stops: StopMatcher::new(request.stops.clone()),
            hidden: request.ends.stop_ids.clone(),
            unstoppable: request.ends.min_tokens,
            token_texts: request.logprobs.is_some(),
            released: String::new(),
            is_first: true,
            decoded: 0,
        }
    }

    /// Returns the token with its text, the text that may be shown now, and the stop string that
    /// ended it.
    pub fn push(&mut self, token: &Token) -> Result<(SampledToken, String, Option<String>), Error> {
        let mut sampled = SampledToken {
            id: token.id,
            logprob: token.logprob,
            candidates: token.candidates,
            offset: self.decoded,
            ..SampledToken::default()
        };
        if self.token_texts {
            self.name(&mut sampled, token, self.is_first)?;
        }
        self.is_first = false;
        let piece = match &mut self.decoder {
            Some(decoder) if !self.hidden.contains(&token.id) => decoder.push(token.id)?,
            _ => String::new(),
        };
        self.decoded += piece.chars().count();
        let (text, stop) = match self.unstoppable {
            0 => self.stops.push(&piece),
            _ => (piece, None),
        };
        self.unstoppable = self.unstoppable.saturating_sub(1);
        self.released.push_str(&text);
        Ok((sampled, text, stop))
    }

    /// The prompt's tokens with their texts. `scored`: all but the first.
    pub fn prompt(&self, first: u32, scored: &[Token]) -> Result<Vec<SampledToken>, Error> {
        let mut tokens: Vec<SampledToken> = Vec::with_capacity(scored.len() + 1);
        let first = Token {
            id: first,
            ..Token::default()
        };
        let mut offset = 0;
        for token in std::iter::once(&first).chain(scored) {
            let mut named = SampledToken {
                id: token.id,
                logprob: token.logprob,
                offset,
                ..SampledToken::default()
            };
            self.name(&mut named, token, tokens.is_empty())?;
            offset += named.text.text.chars().count();
            tokens.push(named);
        }
        Ok(tokens)
    }

    /// Adds the texts of a token and of the most probable ones at its place.
    fn name(&self, sampled: &mut SampledToken, token: &Token, is_first: bool) -> Result<(), Error> {
        sampled.text = self.token_text(token.id, is_first)?;
        let top = token.top.iter();
        let top = top.map(|&(id, logprob)| Ok((self.token_text(id, is_first)?, logprob)));
        sampled.top = top.collect::<Result<_, Error>>()?;
        sampled.top_ids = token.top.iter().map(|(id, _)| *id).collect();
        Ok(())
    }

    fn token_text(&self, id: u32, is_first: bool) -> Result<TokenText, Error> {
        let bytes = match self.tokenizer {
            Some(tokenizer) => tokenizer.token_bytes(id, is_first)?,
            None => None,
        };
        let text = match &bytes {
            Some(bytes) => String::from_utf8_lossy(bytes).into_owned(),
            None => format!("token_id:{id}"),
        };
        Ok(TokenText { text, bytes })
    }

    /// The whole text. Text held back belongs to it, unless a stop string ended it.
    pub fn finish(mut self, stopped: bool) -> Result<String, Error> {
        if !stopped {
            if let Some(decoder) = &mut self.decoder {
                let rest = decoder.finish()?;
                self.released.push_str(&self.stops.push(&rest).0);
            }
            self.released.push_str(&self.stops.finish());
        }
        Ok(self.released)
    }
}
