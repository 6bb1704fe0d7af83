//! The engines that sample: ours in this process, and vLLM servers, both as `springtide serve` uses
//! them.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use artifact::checkpoint::Checkpoint;
use artifact::quant::{self, Spec};
use artifact::threads::Threads;
use demo::corpus::pauses::SUGGESTION_TOKENS_MAX as TOKENS_MAX;
use futures::future::try_join_all;
use model::exact::{Arithmetic, Compute, ExactModel};
use model::sampling::Params;
use serving::engine::caller::Caller;
use serving::engine::exact::{ExactBackend, Staging};
use serving::engine::{
    self, Config, Engine, Handle, LoadedVersion, SampleEvent, SampleRequest, TrafficClass, events_max,
};
use serving::remote::{Options, Pool, Server, Updater};
use text::chat::Templates;
use text::tokenizer::Tokenizer;
use tokio::sync::{Mutex, mpsc};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

const SLOTS: usize = 32;
/// Longest prompt and answer together, in tokens: the demo's model has no more.
pub const CONTEXT: usize = 256;
/// A probe only says that the weights are the right ones: it is not what is measured here.
const PROBE_ERROR_MAX: f32 = 0.5;

const CONFIG: Config = Config {
    queue_choices_max: 1024,
    queue_wait_max: Duration::from_secs(300),
    prompt_tokens_per_pass_max: 256,
    slots_reserved_for_production: 0,
    parked_max: Duration::from_secs(600),
};

/// What was sampled for one request.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    pub tokens: Vec<u32>,
    pub logprobs: Vec<f32>,
}

/// Who samples for a run.
pub enum Sampler<'a> {
    Exact(&'a Exact, Option<Spec>),
    Remote(&'a Remote, Option<Spec>),
}

impl Sampler<'_> {
    /// What generations name.
    pub fn engine(&self) -> Option<String> {
        match self {
            Sampler::Exact(_, None) => None,
            // samples are judged as those of another engine
            Sampler::Exact(_, Some(spec)) => Some(format!("ours {spec}")),
            Sampler::Remote(_, None) => Some("vllm".to_owned()),
            Sampler::Remote(_, Some(spec)) => Some(format!("vllm {spec}")),
        }
    }

    /// The copy that it serves.
    pub fn quantized(&self) -> Option<Spec> {
        match self {
            Sampler::Exact(_, quantized) | Sampler::Remote(_, quantized) => *quantized,
        }
    }

    /// Answers each prompt once with this version. `seed`: of our engine; vLLM draws its own numbers.
    pub async fn answer(
        &self,
        version: &Version,
        prompts: impl Iterator<Item = Arc<[u32]>>,
        seed: u64,
    ) -> anyhow::Result<Vec<Answer>> {
        match self {
            Sampler::Exact(exact, _) => exact.answer(version, prompts, seed).await,
            Sampler::Remote(remote, _) => remote.answer(version, prompts, seed).await,
        }
    }
}

/// A version, as engines need it.
pub struct Version {
    pub checkpoint: Arc<Checkpoint>,
    /// Served in its place.
    quantized: Option<Spec>,
    pub loaded: Arc<LoadedVersion>,
}

impl Version {
    /// `quantized`: the copy that is served in its place.
    pub fn new(
        serial: i64,
        checkpoint: Arc<Checkpoint>,
        quantized: Option<Spec>,
        tokenizer: &Tokenizer,
    ) -> anyhow::Result<Self> {
        let arithmetic = Arithmetic {
            quantized,
            ..Arithmetic::default()
        };
        let model = ExactModel::with_arithmetic(&checkpoint, &arithmetic)?;
        let loaded = LoadedVersion {
            serial,
            root: checkpoint.root(),
            line: "bench".into(),
            adapts: None,
            context: CONTEXT,
            vocab: u32::try_from(tokenizer.vocab_size())?,
            stop_ids: tokenizer.stop_ids().to_vec(),
            experts: None,
            decline_id: tokenizer.decline_id(),
            tokenizer: None,
            reference: model::reference::of(&model)?.map(Arc::new),
            templates: Templates::from_checkpoint(&checkpoint).map(Arc::new).map_err(Arc::new),
        };
        Ok(Version {
            checkpoint,
            quantized,
            loaded: Arc::new(loaded),
        })
    }
}

/// Our own engine.
pub struct Exact {
    handle: Handle,
    arithmetic: Arithmetic,
}

impl Exact {
    pub fn start(threads: usize) -> anyhow::Result<Self> {
        Ok(Exact {
            handle: engine::spawn(CONFIG).context("start the engine's thread")?.handle,
            arithmetic: Arithmetic::new(Compute::F32, threads)?,
        })
    }

    async fn answer(
        &self,
        version: &Version,
        prompts: impl Iterator<Item = Arc<[u32]>>,
        seed: u64,
    ) -> anyhow::Result<Vec<Answer>> {
        let staging = Staging {
            arithmetic: Arithmetic {
                quantized: version.quantized,
                ..self.arithmetic.clone()
            },
            packing: Threads::ONE,
            slots: SLOTS,
            context: CONTEXT,
        };
        let backend = ExactBackend::stage(&version.checkpoint, &staging)?;
        self.handle
            .install(version.loaded.clone(), Box::new(backend))
            .await
            .context("install a version")?;
        ask(&self.handle, &version.loaded, prompts, seed).await
    }
}

/// A vLLM server.
pub struct Remote {
    pool: Pool,
    updater: Mutex<Updater>,
    stop: CancellationToken,
    watch: JoinHandle<()>,
}

impl Remote {
    pub async fn connect(url: &str, quantized: Option<Spec>) -> anyhow::Result<Self> {
        let options = Options {
            vllm: vec![Server {
                url: url.to_owned(),
                ..Server::default()
            }],
            probe_error_max: PROBE_ERROR_MAX,
            quantized,
            ..Options::default()
        };
        let pool = Pool::new(&options, SLOTS, CONFIG)?;
        let stop = CancellationToken::new();
        let watch = tokio::spawn(pool.clone().watch(stop.clone()));
        let updater = Updater::new(pool.clone(), options)?;
        updater.context().await.with_context(|| format!("look at {url}"))?;
        Ok(Remote {
            pool,
            updater: Mutex::new(updater),
            stop,
            watch,
        })
    }

    async fn answer(
        &self,
        version: &Version,
        prompts: impl Iterator<Item = Arc<[u32]>>,
        seed: u64,
    ) -> anyhow::Result<Vec<Answer>> {
        let given = match version.quantized {
            None => version.checkpoint.clone(),
            Some(spec) => Arc::new(quant::quantize(&version.checkpoint, spec, &Threads::ONE)?),
        };
        let mut updater = self.updater.lock().await;
        let began = Instant::now();
        while let Err(error) = updater.place(&version.loaded, &given, &BTreeSet::new()).await {
            // a server is seen within seconds
            if began.elapsed() > Duration::from_secs(20) {
                return Err(error);
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        ask(&self.pool, &version.loaded, prompts, seed).await
    }

    pub async fn stop(self) {
        self.stop.cancel();
        let _ = self.watch.await;
    }
}

async fn ask(
    engine: &dyn Engine,
    version: &Arc<LoadedVersion>,
    prompts: impl Iterator<Item = Arc<[u32]>>,
    seed: u64,
) -> anyhow::Result<Vec<Answer>> {
    let mut answers = Vec::new();
    for (number, prompt) in (0..).zip(prompts) {
        let (events, receiver) = mpsc::channel(events_max(TOKENS_MAX));
        let request = SampleRequest {
            version: version.clone(),
            prompt,
            max_tokens: TOKENS_MAX,
            params: Params::default(),
            seed: seed << 32 | number,
            suppressed: None,
            constraint: None,
            ends: Default::default(),
            score_prompt: None,
            top_logprobs: 0,
            caller: Caller::new("bench", None),
            class: TrafficClass::Production,
            priority: 0,
            session: None,
            events,
            submitted: Instant::now(),
        };
        engine.submit(vec![request])?;
        answers.push(collect(receiver));
    }
    try_join_all(answers).await
}

async fn collect(mut events: mpsc::Receiver<SampleEvent>) -> anyhow::Result<Answer> {
    let mut answer = Answer {
        tokens: Vec::new(),
        logprobs: Vec::new(),
    };
    while let Some(event) = events.recv().await {
        match event {
            SampleEvent::Token(token) => {
                answer.tokens.push(token.id);
                answer.logprobs.push(token.logprob);
            }
            // a version's engine has no other while it answers
            SampleEvent::Versions(_) | SampleEvent::Started(_) => {}
            SampleEvent::Finished(_) => return Ok(answer),
            other => bail!("a request was not answered: {other:?}"),
        }
    }
    bail!("an answer has no end")
}
