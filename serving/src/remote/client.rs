//! What the pool and the updater need of an engine, whatever speaks at its address.

use super::http::{Error, Http, Timeouts};
use super::openai::OpenAi;
use super::options::{InFlight, Options};
use super::protocol::{Stream, Weights};
use super::sglang::Sglang;
use super::vllm::Vllm;
use crate::engine::SampleRequest;
use anyhow::bail;
use serde_json::json;
use std::path::Path;
use std::time::Duration;

/// As vLLM's own default.
const SLOTS_DEFAULT: usize = 256;

#[derive(Debug)]
pub enum Client {
    Vllm(Vllm),
    Sglang(Sglang),
    OpenAi(OpenAi),
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

    fn http(&self) -> &Http {
        match self {
            Client::Vllm(engine) => &engine.http,
            Client::Sglang(engine) => &engine.http,
            Client::OpenAi(engine) => &engine.http,
        }
    }

    pub fn url(&self) -> &str {
        self.http().url()
    }

    pub fn kind(&self) -> &'static str {
        match self {
            Client::Vllm(_) => "vllm",
            Client::Sglang(_) => "sglang",
            Client::OpenAi(_) => "openai",
        }
    }

    /// Whether we may replace its weights.
    pub fn takes_weights(&self) -> bool {
        self.names_weights() && self.http().is_controlled()
    }

    /// Whether it takes adapters beside its base weights.
    pub fn takes_adapters(&self) -> bool {
        matches!(self, Client::Vllm(_)) && self.http().takes_adapters()
    }

    /// Loads PEFT's folder as the adapter `name`. It reads the folder again whenever it has dropped it from its memory.
    pub async fn load_adapter(&self, name: &str, folder: &Path) -> anyhow::Result<()> {
        match self {
            Client::Vllm(engine) => engine.load_adapter(name, folder).await,
            Client::Sglang(_) | Client::OpenAi(_) => bail!("{} takes no adapters", self.url()),
        }
    }

    pub async fn unload_adapter(&self, name: &str) -> anyhow::Result<()> {
        match self {
            Client::Vllm(engine) => engine.unload_adapter(name).await,
            Client::Sglang(_) | Client::OpenAi(_) => Ok(()),
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
    pub async fn weights_name(&self) -> anyhow::Result<Option<String>> {
        match self {
            Client::Vllm(engine) => engine.weights_name().await.map(Some),
            Client::Sglang(engine) => engine.weights_name().await.map(Some),
            Client::OpenAi(engine) => engine.check().await.map(|()| None),
        }
    }

    /// Longest prompt and completion together, in tokens. `None`: it does not say.
    pub async fn context(&self) -> anyhow::Result<Option<usize>> {
        match self {
            Client::Vllm(_) | Client::Sglang(_) => self.http().context().await.map(Some),
            Client::OpenAi(engine) => engine.context().await,
        }
    }

    /// Replaces its weights, and clears its caches. Requests that still run are cut off, or go on with the new
    /// weights, as `in_flight` says. An error leaves it paused or with unknown weights: it must not get traffic
    /// before the next success.
    pub async fn update(&self, weights: Weights<'_>, in_flight: InFlight) -> anyhow::Result<()> {
        match self {
            Client::Vllm(engine) => engine.update(weights, in_flight).await,
            Client::Sglang(engine) => engine.update(weights, in_flight).await,
            Client::OpenAi(_) => bail!("{} takes no weights", self.url()),
        }
    }

    /// Lets its workers get a patch while it answers, so that `update` has only to write. They have asked for it
    /// then. `false`: they ask during the update.
    pub async fn stage(&self, patch: &str, from: &str, to: &str) -> anyhow::Result<bool> {
        match self {
            Client::Vllm(engine) => engine.beside(json!({"stage": patch, "from": from, "to": to})).await,
            Client::Sglang(_) | Client::OpenAi(_) => Ok(false),
        }
    }

    /// Has its workers say what they hold, while it answers. They have begun then. `false`: they cannot.
    pub async fn prove(&self, url: &str, to: &str) -> anyhow::Result<bool> {
        match self {
            Client::Vllm(engine) => engine.beside(json!({"prove": url, "to": to})).await,
            Client::Sglang(_) | Client::OpenAi(_) => Ok(false),
        }
    }

    /// Forgets which routes the engine had, before its probe: it may have been started anew with others.
    pub fn forget_routes(&self) {
        match self {
            Client::Vllm(engine) => engine.forget_routes(),
            Client::Sglang(_) | Client::OpenAi(_) => {}
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
