//! What the pool and the updater need of an engine, whatever speaks at its address.

use super::http::{Error, Events, Timeouts};
use super::openai::OpenAi;
use super::options::{InFlight, Options};
use super::sglang::Sglang;
use super::vllm::Vllm;
use crate::engine::{SampleRequest, Token};
use anyhow::{anyhow, bail};
use serde::Deserialize;
use serde_json::Value;
use std::path::Path;
use std::time::Duration;

/// vLLM's smallest logit bias. It makes a token e^-100 times as likely.
pub const BIAS_MIN: f32 = -100.0;
/// As vLLM's own default.
const SLOTS_DEFAULT: usize = 256;

#[derive(Debug)]
pub enum Client {
    Vllm(Vllm),
    Sglang(Sglang),
    OpenAi(OpenAi),
}

/// New weights for an engine.
#[derive(Debug, Clone, Copy)]
pub enum Weights<'a> {
    /// A file of [`artifact::patch`].
    Patch(&'a Path),
    /// A Hugging Face folder.
    Folder(&'a Path),
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

impl Client {
    /// Of all configured engines, in this order: vLLM, SGLang, others.
    pub fn all(options: &Options) -> anyhow::Result<Vec<Client>> {
        let timeouts = Timeouts {
            answer: Duration::from_millis(options.timeout_ms),
            first_token: Duration::from_millis(options.first_token_ms),
        };
        let vllm = options.vllm.iter();
        let vllm = vllm.map(|server| Ok(Client::Vllm(Vllm::new(server.clone(), timeouts, options.in_flight)?)));
        let sglang = options.sglang.iter();
        let sglang = sglang.map(|server| Ok(Client::Sglang(Sglang::new(server.clone(), timeouts)?)));
        let openai = options.openai.iter();
        let openai = openai.map(|server| Ok(Client::OpenAi(OpenAi::new(server, timeouts)?)));
        vllm.chain(sglang).chain(openai).collect()
    }

    /// Sequences that it samples together. `None`: it does not say.
    async fn slots(&self) -> Option<usize> {
        let slots = match self {
            Client::Vllm(engine) => engine.slots().await,
            Client::Sglang(engine) => engine.slots().await,
            Client::OpenAi(_) => Ok(None),
        };
        slots.ok().flatten().filter(|&slots| slots > 0)
    }

    pub fn url(&self) -> &str {
        match self {
            Client::Vllm(engine) => engine.url(),
            Client::Sglang(engine) => engine.url(),
            Client::OpenAi(engine) => engine.url(),
        }
    }

    /// What generations are logged with as their engine.
    pub fn kind(&self) -> &'static str {
        match self {
            Client::Vllm(_) => "vllm",
            Client::Sglang(_) => "sglang",
            Client::OpenAi(_) => "openai",
        }
    }

    /// Whether we may replace its weights.
    pub fn takes_weights(&self) -> bool {
        match self {
            Client::Vllm(engine) => engine.is_controlled(),
            Client::Sglang(engine) => engine.is_controlled(),
            Client::OpenAi(_) => false,
        }
    }

    /// Whether it says which weights it holds.
    pub fn names_weights(&self) -> bool {
        !matches!(self, Client::OpenAi(_))
    }

    /// The alias whose version it is said to hold. Such an engine returns no token ids, so nothing can
    /// prove what it holds.
    pub fn vouched_alias(&self) -> Option<&str> {
        match self {
            Client::OpenAi(engine) => engine.alias(),
            Client::Vllm(_) | Client::Sglang(_) => None,
        }
    }

    /// The name of the weights that it holds; `None`: it does not name them. Fails if it does not
    /// answer.
    pub async fn weights(&self) -> anyhow::Result<Option<String>> {
        match self {
            Client::Vllm(engine) => engine.weights().await.map(Some),
            Client::Sglang(engine) => engine.weights().await.map(Some),
            Client::OpenAi(engine) => engine.check().await.map(|()| None),
        }
    }

    /// Longest prompt and completion together, in tokens. `None`: it does not say.
    pub async fn context(&self) -> anyhow::Result<Option<usize>> {
        match self {
            Client::Vllm(engine) => engine.context().await.map(Some),
            Client::Sglang(engine) => engine.context().await.map(Some),
            Client::OpenAi(engine) => engine.context().await,
        }
    }

    /// Replaces its weights and names them, and clears its caches. Requests that still run are cut off,
    /// or go on with the new weights, as `in_flight` says. An error leaves it paused or with unknown
    /// weights: it must not get traffic before the next success.
    pub async fn update(
        &self,
        weights: Weights<'_>,
        from: &str,
        to: &str,
        name: &str,
        in_flight: InFlight,
    ) -> anyhow::Result<()> {
        match self {
            Client::Vllm(engine) => engine.update(weights, from, to, name, in_flight).await,
            Client::Sglang(engine) => engine.update(weights, name, in_flight).await,
            Client::OpenAi(_) => bail!("{} takes no weights", self.url()),
        }
    }

    /// Forgets which routes the engine had, before its probe: it may have been started anew with others.
    pub fn forget_routes(&self) {
        if let Client::Vllm(engine) = self {
            engine.forget_routes();
        }
    }

    /// Starts to sample. `weights`: the name of those that were probed, which a follower in front of the
    /// engine checks. `seeds`: whether the engine gets the request's seed.
    pub async fn generate(&self, request: &SampleRequest, weights: &str, seeds: bool) -> Result<Stream, Error> {
        match self {
            Client::Vllm(engine) => engine.generate(request, weights, seeds).await,
            Client::Sglang(engine) => engine.generate(request, weights, seeds).await,
            Client::OpenAi(engine) => engine.generate(request, seeds).await,
        }
    }
}

/// Sequences that one engine samples together: as configured, or the fewest that an engine says. What an
/// engine gets beyond its own waits there.
pub async fn slots(options: &Options) -> anyhow::Result<usize> {
    if let Some(slots) = options.slots {
        return Ok(slots);
    }
    let clients = Client::all(options)?;
    let said = futures::future::join_all(clients.iter().map(Client::slots)).await;
    let slots = said.into_iter().flatten().min().unwrap_or(SLOTS_DEFAULT);
    tracing::info!(slots, "sequences that an engine samples together");
    Ok(slots)
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
        // engines elsewhere do not report experts
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
