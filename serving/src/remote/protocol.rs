//! What the protocols of all engines share: new weights, and the events of an answer.

use super::http::{Error, Events};
use crate::engine::{SampleRequest, Token};
use anyhow::anyhow;
use model::sampling::Params;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;

/// vLLM's smallest logit bias. It makes a token e^-100 times as likely.
const BIAS_MIN: f32 = -100.0;

/// The distribution that a request is sampled from, and the ids that end it, as vLLM and SGLang name them.
pub fn sampling(request: &SampleRequest) -> Value {
    // without `..`: a new parameter must reach the engine, or it samples from another distribution
    let Params {
        temperature,
        top_p,
        top_k,
        min_p,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        mut logit_bias,
    } = request.params.clone();
    if let Some(suppressed) = request.suppressed {
        logit_bias.insert(suppressed, BIAS_MIN);
    }
    let mut sampling = json!({
        "temperature": temperature,
        "top_p": top_p,
        "top_k": if top_k == 0 { -1 } else { i64::from(top_k) },
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "stop_token_ids": request.stop_ids(),
    });
    if !logit_bias.is_empty() {
        let biases: BTreeMap<String, f32> = logit_bias.iter().map(|(id, bias)| (id.to_string(), *bias)).collect();
        sampling["logit_bias"] = json!(biases);
    }
    sampling
}

/// New weights for an engine.
#[derive(Debug, Clone, Copy)]
pub struct Weights<'a> {
    /// Where its workers get them.
    pub url: &'a str,
    /// Content hash of the version that they are changed from. `None`: all weights are loaded.
    pub from: Option<&'a str>,
    /// Content hash.
    pub to: &'a str,
    /// What the engine calls them.
    pub name: &'a str,
    /// How long the engine may take for them.
    pub limit: Duration,
}

/// Output tokens `start` to `end` (exclusive).
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct VersionOfTokens {
    pub version: String,
    pub start: usize,
    pub end: usize,
}

/// Why an engine stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// At a stop id, which is its last token.
    Stop,
    Length,
}

impl Ending {
    /// Of the name that an engine gives it. Other names than these fail the answer: a filter for
    /// contents is the caller's concern, but an abort is the engine's.
    pub fn named(name: &str) -> Result<Ending, Error> {
        match name {
            "stop" => Ok(Ending::Stop),
            "length" => Ok(Ending::Length),
            "abort" | "error" => Err(Error::Engine(anyhow!("the engine broke its answer off"))),
            "content_filter" => Err(Error::Answer("the engine's content filter ended the answer")),
            _ => Err(Error::Answer(
                "the engine ended the answer for a reason that is not known here",
            )),
        }
    }
}

/// What one event of an answer says.
#[derive(Debug, Default, PartialEq)]
pub struct Piece {
    /// Further tokens, with as many of the most probable ones as the engine sent.
    pub tokens: Vec<Token>,
    /// Why there are no more.
    pub ending: Option<Ending>,
    /// The names of the weights that sampled the tokens of the answer, at its end if the engine knows.
    pub versions: Option<Vec<VersionOfTokens>>,
}

/// Reads the events of one answer.
pub trait Read: Send {
    /// `data`: of one event.
    fn read(&mut self, data: &[u8]) -> Result<Piece, Error>;
}

/// An answer. Dropping it aborts the request in the engine.
pub struct Stream {
    events: Events,
    reader: Box<dyn Read>,
}

impl Stream {
    pub fn new(events: Events, reader: impl Read + 'static) -> Self {
        Stream {
            events,
            reader: Box::new(reader),
        }
    }

    /// `None`: the engine has said that it is done.
    pub async fn next(&mut self) -> Result<Option<Piece>, Error> {
        match self.events.next().await? {
            Some(data) => self.reader.read(&data).map(Some),
            None => Ok(None),
        }
    }
}

/// What keeps the prompts of tenants apart in an engine's cache, so that one tenant cannot learn from
/// response times what another one's prompts were.
pub fn cache_salt(request: &SampleRequest) -> String {
    format!("tenant-{}", request.caller.tenant())
}

/// An error in the middle of an answer.
#[derive(Debug, Deserialize)]
pub struct Failure {
    message: String,
    /// An HTTP status, or a name.
    #[serde(default)]
    code: Value,
}

impl From<Failure> for Error {
    fn from(Failure { message, code }: Failure) -> Self {
        match code.as_u64().and_then(|code| u16::try_from(code).ok()) {
            Some(status) => Error::of_status(status, message),
            None => Error::Engine(anyhow!("the engine ended its answer with an error")),
        }
    }
}

/// Reads an event's JSON.
pub fn parse<'a, T: Deserialize<'a>>(data: &'a [u8]) -> Result<T, Error> {
    serde_json::from_slice(data).map_err(|error| {
        // its message quotes values
        let (kind, column) = (error.classify(), error.column());
        Error::Engine(anyhow!(
            "an event of the engine cannot be read: {kind:?} error in column {column}"
        ))
    })
}

/// A token with the checks that need nothing but itself. `top`: unordered, perhaps with repetitions.
pub fn token(id: u32, logprob: f32, candidates: Option<usize>, mut top: Vec<(u32, f32)>) -> Token {
    top.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    top.dedup_by_key(|(id, _)| *id);
    Token {
        id,
        // slightly above 0 by rounding
        logprob: logprob.min(0.0),
        candidates: candidates
            .and_then(|count| u32::try_from(count).ok())
            .filter(|&count| count > 0),
        routing: model::router::Routing::default(),
        top,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_probable_tokens_come_first_and_once() {
        let token = token(5, -3.0, None, vec![(5, -3.0), (2, -0.1), (9, -2.5), (5, -3.0)]);
        assert_eq!(token.top, [(2, -0.1), (9, -2.5), (5, -3.0)]);
    }
}
