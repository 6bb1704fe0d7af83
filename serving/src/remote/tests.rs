//! Pool and updater with engines that fail in ways in which a real one cannot be made to fail: they
//! report success and keep their weights, end an answer in the middle, or restart at once. The
//! engines here sample with our exact model behind vLLM's routes. `make bench-engines` has the real
//! one.

mod quotes;
mod schemas;

use super::placement::State;
use super::{EXPECT_WEIGHTS, InFlight, OpenAiServer, Options, Pool, Server, Updater};
use crate::engine::caller::Caller;
use crate::engine::{
    Config, Engine, Finish, LoadedVersion, SampleEvent, SampleRequest, Started, TokensOfVersion, TrafficClass,
    events_max,
};
use crate::routing::tests::no_templates;
use artifact::assignment::Target;
use artifact::checkpoint::Checkpoint;
use artifact::tensor::TensorData;
use axum::Router;
use axum::body::Body;
use axum::extract::{Json, State as Extract};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use model::exact::{Arithmetic, ExactModel, KvCache};
use model::sampling::{self, Params, PreviousTokens, Source};
use safetensors::SafeTensors;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use text::tokenizer::Tokenizer;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

const CONTEXT: usize = 64;
const VOCAB: u32 = 96;

/// What goes wrong from now on.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Faults {
    /// Patches succeed without effect.
    pub(crate) ignores_patches: bool,
    /// So do folders.
    pub(crate) ignores_folders: bool,
    /// Answers end after this many tokens, without a reason.
    pub(crate) cut_after: Option<usize>,
    /// Answers stall after this many tokens, until their caller has left.
    pub(crate) stalls_after: Option<usize>,
    /// The same, until the fault is over.
    pub(crate) waits_after: Option<usize>,
    /// As with a follower in front: a request that expects other weights gets 409.
    pub(crate) compares_weights: bool,
    /// Its name is asked for in vain.
    pub(crate) silent: bool,
    /// Every request to sample gets 503.
    pub(crate) refuses: bool,
    /// Answers say that other weights sampled the tokens from this one on.
    pub(crate) crosses_at: Option<usize>,
}

pub(crate) struct Held {
    pub(crate) name: String,
    checkpoint: Checkpoint,
    model: Arc<ExactModel>,
    faults: Faults,
    /// Patches and folders that it was given.
    updates: Vec<&'static str>,
    /// How it was paused for them.
    pub(crate) pauses: Vec<String>,
    /// Tokens that it sampled.
    pub(crate) sampled: usize,
    /// Answers that are being sampled.
    pub(crate) running: usize,
    /// Requests that expected other weights.
    conflicts: usize,
    /// What kept the caches of its requests apart, in their order.
    salts: Vec<String>,
}

/// A server with vLLM's routes.
#[derive(Clone)]
pub(crate) struct Fake {
    pub(crate) url: String,
    held: Arc<Mutex<Held>>,
}

impl Fake {
    pub(crate) async fn start() -> Fake {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let fake = Fake::new(url);
        let router = fake.router();
        tokio::spawn(async move { axum::serve(listener, router).await });
        fake
    }

    /// The same without a port.
    pub(crate) fn start_on_socket(path: &Path) -> Fake {
        let listener = tokio::net::UnixListener::bind(path).unwrap();
        let fake = Fake::new(format!("unix:{}", path.display()));
        let router = fake.router();
        tokio::spawn(async move { axum::serve(listener, router).await });
        fake
    }

    fn new(url: String) -> Fake {
        let checkpoint = first();
        let held = Held {
            name: "default".into(),
            model: Arc::new(ExactModel::from_checkpoint(&checkpoint).unwrap()),
            checkpoint,
            faults: Faults::default(),
            updates: Vec::new(),
            pauses: Vec::new(),
            sampled: 0,
            conflicts: 0,
            salts: Vec::new(),
            running: 0,
        };
        Fake {
            url,
            held: Arc::new(Mutex::new(held)),
        }
    }

    fn router(&self) -> Router {
        let done = || async { Json(json!({})) };
        Router::new()
            .route("/weight_info", get(weight_info))
            .route(
                "/v1/models",
                get(|| async { Json(json!({"data": [{"max_model_len": CONTEXT}]})) }),
            )
            .route("/pause", post(pause))
            .route("/start_weight_update", post(done))
            .route("/update_weights", post(update))
            .route("/finish_weight_update", post(finish))
            .route("/resume", post(done))
            .route("/inference/v1/generate", post(generate))
            .route("/v1/completions", post(complete))
            .with_state(self.clone())
    }

    pub(crate) fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap()
    }

    pub(crate) fn set(&self, faults: Faults) {
        self.held().faults = faults;
    }

    /// As a process that was killed and started again.
    pub(crate) fn restart(&self) {
        let mut held = self.held();
        held.name = "default".into();
        held.checkpoint = first();
        held.model = Arc::new(ExactModel::from_checkpoint(&held.checkpoint).unwrap());
    }

    pub(crate) fn updates(&self) -> Vec<&'static str> {
        std::mem::take(&mut self.held().updates)
    }
}

async fn pause(Extract(fake): Extract<Fake>, uri: axum::http::Uri) -> Json<Value> {
    fake.held().pauses.push(uri.query().unwrap_or_default().into());
    Json(json!({}))
}

async fn weight_info(Extract(fake): Extract<Fake>) -> Json<Value> {
    while fake.held().faults.silent {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Json(json!({"weight_version": fake.held().name}))
}

async fn update(Extract(fake): Extract<Fake>, Json(body): Json<Value>) -> Result<Json<Value>, (StatusCode, String)> {
    let info = &body["update_info"];
    let mut held = fake.held();
    let (kind, ignored, next) = match (info["patch"].as_str(), info["folder"].as_str()) {
        (Some(path), _) => {
            if info["from"] != held.checkpoint.root().to_string() {
                return Err((StatusCode::INTERNAL_SERVER_ERROR, "another version".into()));
            }
            ("patch", held.faults.ignores_patches, patched(&held.checkpoint, path))
        }
        (None, Some(folder)) => {
            let checkpoint = Checkpoint::read_dir(Path::new(folder)).unwrap();
            ("folder", held.faults.ignores_folders, checkpoint)
        }
        (None, None) => return Err((StatusCode::BAD_REQUEST, "no weights".into())),
    };
    held.updates.push(kind);
    if !ignored {
        held.model = Arc::new(ExactModel::from_checkpoint(&next).unwrap());
        held.checkpoint = next;
    }
    Ok(Json(json!({})))
}

fn patched(checkpoint: &Checkpoint, path: &str) -> Checkpoint {
    let file = std::fs::read(path).unwrap();
    let patch = SafeTensors::deserialize(&file).unwrap();
    let mut checkpoint = checkpoint.clone();
    for (name, tensor) in &mut checkpoint.tensors {
        let Ok(indices) = patch.tensor(&format!("{name}|i")) else {
            continue;
        };
        let values = patch.tensor(&format!("{name}|v")).unwrap();
        let width = values.data().len() / values.shape()[0];
        let mut bytes = tensor.bytes.to_vec();
        for (index, value) in indices.data().chunks_exact(8).zip(values.data().chunks_exact(width)) {
            let index = i64::from_le_bytes(index.try_into().unwrap()) as usize;
            bytes[index * width..][..width].copy_from_slice(value);
        }
        *tensor = TensorData::new(tensor.dtype, tensor.shape.clone(), bytes).unwrap();
    }
    checkpoint
}

async fn finish(Extract(fake): Extract<Fake>, Json(body): Json<Value>) -> Json<Value> {
    fake.held().name = body["weight_version"].as_str().unwrap().into();
    Json(json!({}))
}

async fn generate(Extract(fake): Extract<Fake>, headers: HeaderMap, Json(body): Json<Value>) -> Response {
    let expected = headers
        .get(EXPECT_WEIGHTS)
        .map(|name| name.to_str().unwrap().to_owned());
    {
        let mut held = fake.held();
        if held.faults.compares_weights && expected.is_some_and(|expected| expected != held.name) {
            held.conflicts += 1;
            return StatusCode::CONFLICT.into_response();
        }
    }
    let params = &body["sampling_params"];
    let count = params["max_tokens"].as_u64().unwrap() as usize;
    let crosses_at = {
        let mut held = fake.held();
        held.salts.extend(body["cache_salt"].as_str().map(Into::into));
        held.faults.crosses_at
    };
    let (names, naming) = (Mutex::new(Vec::new()), fake.clone());
    let event = move |index: usize, id: u32, logprob: f32| {
        let mut names: MutexGuard<'_, Vec<String>> = names.lock().unwrap();
        names.push(match crosses_at {
            Some(at) if index >= at => "springtide-9-other".into(),
            _ => naming.held().name.clone(),
        });
        let last = index + 1 == count;
        let mut end = 0;
        let spans = names.chunk_by(|one, next| one == next).map(|span| {
            end += span.len();
            json!({"version": span[0], "start": end - span.len(), "end": end})
        });
        let choice = json!({
            "token_ids": [id],
            "logprobs": {"content": [{"token_id": id, "logprob": logprob}]},
            "finish_reason": last.then_some("length"),
            "weight_versions": last.then(|| spans.collect::<Vec<_>>()),
        });
        json!({"choices": [choice]})
    };
    sample(fake, &body["token_ids"], &params["temperature"], count, event)
}

/// `/v1/completions`: token ids for a prompt of ids, and the text `ab` for a prompt of text.
async fn complete(Extract(fake): Extract<Fake>, Json(body): Json<Value>) -> Response {
    if body["prompt"].is_string() {
        let events = [("a", Value::Null), ("b", "stop".into())];
        let event = |(text, finish): (&str, Value)| {
            let choice = json!({"index": 0, "text": text, "finish_reason": finish});
            format!("data: {}\n\n", json!({"choices": [choice]}))
        };
        return (events.map(event).concat() + "data: [DONE]\n\n").into_response();
    }
    let count = body["max_tokens"].as_u64().unwrap() as usize;
    let event = move |index: usize, id: u32, logprob: f32| {
        let choice = json!({
            "index": 0, "text": "", "token_ids": [id],
            "logprobs": {"token_logprobs": [logprob], "top_logprobs": [{}]},
            "finish_reason": (index + 1 == count).then_some("length"),
        });
        json!({"choices": [choice]})
    };
    sample(fake, &body["prompt"], &body["temperature"], count, event)
}

/// Samples with the model that the engine holds now. `event`: of the index, id and log-probability of
/// a token.
fn sample(
    fake: Fake,
    prompt: &Value,
    temperature: &Value,
    count: usize,
    event: impl Fn(usize, u32, f32) -> Value + Send + 'static,
) -> Response {
    let (model, faults) = {
        let mut held = fake.held();
        held.running += 1;
        (held.model.clone(), held.faults)
    };
    let running = Running(fake.clone());
    if faults.refuses {
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    }
    let ids = prompt.as_array().unwrap().iter();
    let mut next: Vec<u32> = ids.map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect();
    let params = Params {
        temperature: temperature.as_f64().unwrap() as f32,
        ..Params::default()
    };
    let stream = async_stream(move |events| {
        let _running = running;
        let mut cache = KvCache::new(&model, 1, CONTEXT);
        let mut source = Source::new(next.iter().map(|&id| u64::from(id)).sum());
        for index in 0..count {
            if faults.cut_after == Some(index) {
                return;
            }
            let stalls =
                |fake: &Fake| faults.stalls_after == Some(index) || fake.held().faults.waits_after == Some(index);
            while stalls(&fake) && !events.is_closed() {
                std::thread::sleep(Duration::from_millis(5));
            }
            // an answer goes on with the weights that the engine has by then
            let model = fake.held().model.clone();
            let logits = model.prefill(&mut cache, 0, &next).unwrap();
            let drawn = sampling::draw(&logits, &params, &PreviousTokens::default(), &mut source);
            next = vec![drawn.id];
            fake.held().sampled += 1;
            let event = format!("data: {}\n\n", event(index, drawn.id, drawn.log_prob));
            if events.blocking_send(event).is_err() {
                return;
            }
        }
        let _ = events.blocking_send("data: [DONE]\n\n".into());
    });
    Body::from_stream(stream).into_response()
}

/// One answer that is being sampled.
struct Running(Fake);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.held().running -= 1;
    }
}

/// What `work` sends, from a thread of its own.
fn async_stream(
    work: impl FnOnce(mpsc::Sender<String>) + Send + 'static,
) -> impl futures::Stream<Item = Result<String, std::io::Error>> {
    let (sender, receiver) = mpsc::channel(1);
    tokio::task::spawn_blocking(move || work(sender));
    futures::stream::unfold(receiver, |mut receiver| async move {
        let event = receiver.recv().await?;
        Some((Ok(event), receiver))
    })
}

fn first() -> Checkpoint {
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../policy/model/tests/golden/qwen3");
    Checkpoint::read_dir(Path::new(golden)).unwrap()
}

/// A version and its weights; each serial has others.
pub(crate) fn version(serial: i64) -> (Arc<LoadedVersion>, Arc<Checkpoint>) {
    let mut checkpoint = first();
    for tensor in checkpoint.tensors.values_mut() {
        let mut bytes = tensor.bytes.to_vec();
        let width = artifact::tensor::weight_bytes(tensor.dtype);
        for weight in bytes.chunks_exact_mut(width).step_by(3) {
            weight[width - 2] ^= (serial as u8) & 0x3f;
        }
        *tensor = TensorData::new(tensor.dtype, tensor.shape.clone(), bytes).unwrap();
    }
    let version = LoadedVersion {
        serial,
        root: checkpoint.root(),
        line: "realtime".into(),
        context: CONTEXT,
        vocab: VOCAB,
        stop_ids: vec![],
        experts: None,
        decline_id: None,
        tokenizer: None,
        templates: no_templates(),
    };
    (Arc::new(version), Arc::new(checkpoint))
}

/// A pool over some engines, watched, and its updater.
struct Stand {
    fakes: Vec<Fake>,
    pool: Pool,
    updater: Updater,
    patches: tempfile::TempDir,
    watch: Option<tokio_util::sync::DropGuard>,
}

impl Stand {
    async fn new(engines: usize) -> Stand {
        Stand::with(engines, |fakes| Options {
            vllm: fakes.iter().map(vllm).collect(),
            ..Options::default()
        })
        .await
    }

    async fn with(engines: usize, options: impl FnOnce(&[Fake]) -> Options) -> Stand {
        let mut fakes = Vec::new();
        for _ in 0..engines {
            fakes.push(Fake::start().await);
        }
        let patches = tempfile::tempdir().unwrap();
        let options = Options {
            patch_dir: PathBuf::from(patches.path()),
            ..options(&fakes)
        };
        let config = Config {
            queue_choices_max: 64,
            queue_wait_max: Duration::from_secs(300),
            prompt_tokens_per_pass_max: 0,
            slots_reserved_for_production: 0,
        };
        let pool = Pool::new(&options, 4, config).unwrap();
        let stop = CancellationToken::new();
        tokio::spawn(pool.clone().watch(stop.clone()));
        let updater = Updater::new(pool.clone(), options, Arithmetic::default()).unwrap();
        Stand {
            fakes,
            pool,
            updater,
            patches,
            watch: Some(stop.drop_guard()),
        }
    }

    /// As the follower: tries until an engine serves the version.
    async fn place(&mut self, serial: i64, kept: &[i64]) -> Arc<LoadedVersion> {
        let (version, checkpoint) = version(serial);
        let kept: BTreeSet<i64> = kept.iter().copied().collect();
        while self.updater.place(&version, &checkpoint, &kept).await.is_err() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        version
    }

    /// As the follower: gives engines the versions that they should hold, until `serial` has `engines`.
    async fn mend(&mut self, shares: &[(i64, f64)], serial: i64, engines: usize) {
        while self.pool.placement(|placement| placement.servers(serial)) < engines {
            match self.updater.next_change(shares) {
                Some((engine, wanted)) => {
                    let (version, checkpoint) = version(wanted);
                    let _ = self.updater.change(engine, &version, &checkpoint).await;
                }
                None => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    }

    /// All events of a request.
    async fn ask(&self, version: &Arc<LoadedVersion>, max_tokens: usize) -> Vec<SampleEvent> {
        let mut events = self.submit(version, max_tokens);
        let mut all = Vec::new();
        while let Some(event) = events.recv().await {
            all.push(event);
        }
        all
    }

    fn submit(&self, version: &Arc<LoadedVersion>, max_tokens: usize) -> mpsc::Receiver<SampleEvent> {
        self.submit_turn(version, max_tokens, None)
    }

    fn submit_turn(
        &self,
        version: &Arc<LoadedVersion>,
        max_tokens: usize,
        session: Option<Uuid>,
    ) -> mpsc::Receiver<SampleEvent> {
        let (sender, events) = mpsc::channel(events_max(max_tokens));
        let request = self.request(version, max_tokens, session, sender);
        self.pool.submit(vec![request]).unwrap();
        events
    }

    fn request(
        &self,
        version: &Arc<LoadedVersion>,
        max_tokens: usize,
        session: Option<Uuid>,
        events: mpsc::Sender<SampleEvent>,
    ) -> SampleRequest {
        SampleRequest {
            version: version.clone(),
            prompt: Arc::new([1, 2, 3]),
            max_tokens,
            params: Params::default(),
            seed: 0,
            suppressed: None,
            constraint: None,
            top_logprobs: 0,
            caller: Caller::new("default", None),
            class: TrafficClass::Production,
            priority: 0,
            session,
            events,
            submitted: Instant::now(),
        }
    }
}

fn vllm(fake: &Fake) -> Server {
    Server {
        url: fake.url.clone(),
        ..Server::default()
    }
}

fn openai(fake: &Fake, alias: Option<&str>) -> OpenAiServer {
    OpenAiServer {
        url: fake.url.clone(),
        alias: alias.map(str::to_owned),
        ..OpenAiServer::default()
    }
}

/// The next event after those that a sequence begins with.
async fn next(events: &mut mpsc::Receiver<SampleEvent>) -> Option<SampleEvent> {
    loop {
        let event = events.recv().await;
        if !matches!(event, Some(SampleEvent::Started(_))) {
            return event;
        }
    }
}

fn finished(events: &[SampleEvent]) -> bool {
    matches!(events.last(), Some(SampleEvent::Finished(_)))
}

#[tokio::test(flavor = "multi_thread")]
async fn new_versions_reach_an_engine_as_patches_and_nothing_is_left_behind() {
    let mut stand = Stand::new(1).await;
    let first = stand.place(1, &[]).await;
    assert!(finished(&stand.ask(&first, 5).await));
    let second = stand.place(2, &[]).await;
    assert!(finished(&stand.ask(&second, 5).await));
    assert_eq!(stand.fakes[0].updates(), ["folder", "patch"]);
    let folder = std::fs::read_dir(stand.patches.path()).unwrap().next();
    let left = std::fs::read_dir(folder.unwrap().unwrap().path()).unwrap();
    let left: Vec<_> = left.map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["lock"]);
    // nobody serves the first version any more, and its requests would wait
    assert!(stand.pool.unavailable(&first).is_some());
    assert!(stand.pool.unavailable(&second).is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_reports_success_and_keeps_its_weights_gets_no_traffic() {
    let mut stand = Stand::new(1).await;
    stand.place(1, &[]).await;
    stand.fakes[0].set(Faults {
        ignores_patches: true,
        ..Faults::default()
    });
    // the probe notices, and all weights are loaded
    stand.place(2, &[]).await;
    assert_eq!(stand.fakes[0].updates(), ["folder", "patch", "folder"]);
    stand.fakes[0].set(Faults {
        ignores_patches: true,
        ignores_folders: true,
        ..Faults::default()
    });
    let (third, checkpoint) = version(3);
    let refused = stand
        .updater
        .place(&third, &checkpoint, &BTreeSet::new())
        .await
        .unwrap_err();
    assert!(format!("{refused:#}").contains("probe_error_max"), "{refused:#}");
    assert!(!stand.updater.serves(3) && !stand.updater.serves(2));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_changes_after_its_answers_have_ended() {
    let mut stand = Stand::new(1).await;
    let first = stand.place(1, &[]).await;
    let mut events = stand.submit(&first, 40);
    assert!(matches!(next(&mut events).await, Some(SampleEvent::Token(_))));
    drop(first);
    stand.place(2, &[]).await;
    let mut last = None;
    while let Ok(event) = events.try_recv() {
        last = Some(event);
    }
    // all 40 tokens were there before the change
    assert!(matches!(last, Some(SampleEvent::Finished(_))), "{last:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_without_a_token_goes_to_another_engine() {
    let mut stand = Stand::new(2).await;
    let version = stand.place(1, &[]).await;
    stand.mend(&[(1, 1.0)], 1, 2).await;
    for fake in &stand.fakes {
        fake.held().sampled = 0;
    }
    stand.fakes[0].set(Faults {
        refuses: true,
        ..Faults::default()
    });
    for _ in 0..3 {
        assert!(finished(&stand.ask(&version, 4).await));
    }
    let sampled: Vec<usize> = stand.fakes.iter().map(|fake| fake.held().sampled).collect();
    assert_eq!(sampled, [0, 12]);
    // it answers again, and is probed first
    stand.fakes[0].set(Faults::default());
    stand.mend(&[(1, 1.0)], 1, 2).await;
    assert!(stand.fakes[0].held().sampled > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_ends_in_the_middle_fails_and_its_engine_is_probed_again() {
    let mut stand = Stand::new(1).await;
    let version = stand.place(1, &[]).await;
    stand.fakes[0].set(Faults {
        cut_after: Some(2),
        ..Faults::default()
    });
    let events = stand.ask(&version, 5).await;
    assert_eq!(events.len(), 4, "{events:?}"); // begun, two tokens, failed
    assert!(matches!(events.last(), Some(SampleEvent::Failed(_))), "{events:?}");
    // soon after the caller knows
    while stand.updater.serves(1) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    stand.fakes[0].set(Faults::default());
    stand.mend(&[(1, 1.0)], 1, 1).await;
    assert!(finished(&stand.ask(&version, 5).await));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_engine_gets_its_version_before_traffic() {
    let mut stand = Stand::new(1).await;
    let version = stand.place(7, &[]).await;
    stand.fakes[0].updates();
    stand.fakes[0].restart();
    // the watch asks every second
    while stand.updater.serves(7) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    stand.mend(&[(7, 1.0)], 7, 1).await;
    // the patch starts from what it no longer holds
    assert_eq!(stand.fakes[0].updates(), ["folder"]);
    assert!(finished(&stand.ask(&version, 5).await));
}

#[tokio::test(flavor = "multi_thread")]
async fn every_arm_keeps_an_engine() {
    let mut stand = Stand::new(2).await;
    stand.place(1, &[]).await;
    stand.place(2, &[1]).await;
    let (third, checkpoint) = version(3);
    let kept = BTreeSet::from([1, 2]);
    let refused = stand.updater.place(&third, &checkpoint, &kept).await.unwrap_err();
    assert!(refused.to_string().contains("start more engines"), "{refused}");
    assert!(stand.updater.serves(1) && stand.updater.serves(2));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_who_leaves_ends_the_request_in_the_engine() {
    let mut stand = Stand::new(1).await;
    let version = stand.place(1, &[]).await;
    stand.fakes[0].set(Faults {
        stalls_after: Some(2),
        ..Faults::default()
    });
    let mut events = stand.submit(&version, 60);
    assert!(matches!(next(&mut events).await, Some(SampleEvent::Token(_))));
    assert_eq!(stand.pool.running(0), 1);
    drop(events);
    while stand.pool.running(0) > 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    // and not as a failure of the engine
    assert!(stand.updater.serves(1));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_other_weights_finished_is_refused_and_its_engine_is_probed_again() {
    let mut stand = Stand::new(1).await;
    let version = stand.place(1, &[]).await;
    stand.fakes[0].set(Faults {
        crosses_at: Some(3),
        ..Faults::default()
    });
    let events = stand.ask(&version, 5).await;
    let Some(SampleEvent::Failed(error)) = events.last() else {
        panic!("{events:?}");
    };
    assert!(error.contains("springtide-9-other"), "{error}");
    while stand.updater.serves(1) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_turns_of_a_session_stay_on_one_engine_and_move_when_it_fails() {
    let mut stand = Stand::new(2).await;
    let version = stand.place(1, &[]).await;
    stand.mend(&[(1, 1.0)], 1, 2).await;
    let sampled = |stand: &Stand| -> Vec<usize> {
        let fakes = stand.fakes.iter();
        fakes.map(|fake| std::mem::take(&mut fake.held().sampled)).collect()
    };
    let session = Some(Uuid::from_u128(3));
    let turn = async |stand: &Stand| {
        let mut events = stand.submit_turn(&version, 2, session);
        let mut last = None;
        while let Some(event) = events.recv().await {
            last = Some(event);
        }
        assert!(matches!(last, Some(SampleEvent::Finished(_))), "{last:?}");
    };
    sampled(&stand);
    for _ in 0..4 {
        turn(&stand).await;
    }
    let by_engine = sampled(&stand);
    let home = usize::from(by_engine[1] > 0);
    assert_eq!((by_engine[home], by_engine[1 - home]), (8, 0));
    stand.fakes[home].set(Faults {
        refuses: true,
        ..Faults::default()
    });
    turn(&stand).await;
    assert_eq!(sampled(&stand)[1 - home], 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_takes_no_weights_serves_the_version_that_a_probe_proves() {
    let mut stand = Stand::with(1, |fakes| Options {
        openai: vec![openai(&fakes[0], None)],
        ..Options::default()
    })
    .await;
    // as by the fleet's own deployment
    let hold = |stand: &Stand, checkpoint: &Checkpoint| {
        stand.fakes[0].held().model = Arc::new(ExactModel::from_checkpoint(checkpoint).unwrap());
    };
    let (first, first_weights) = version(1);
    let (second, second_weights) = version(2);
    hold(&stand, &first_weights);
    let kept = BTreeSet::new();
    // until the watch has seen it
    while stand.updater.place(&first, &first_weights, &kept).await.is_err() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(finished(&stand.ask(&first, 5).await));
    let refused = stand.updater.place(&second, &second_weights, &kept).await.unwrap_err();
    assert!(refused.to_string().contains("version 2"), "{refused}");
    assert!(stand.updater.serves(1) && !stand.updater.serves(2));
    hold(&stand, &second_weights);
    stand.updater.place(&second, &second_weights, &kept).await.unwrap();
    assert!(stand.updater.serves(2) && !stand.updater.serves(1));
    assert!(finished(&stand.ask(&second, 5).await));
    assert_eq!(stand.fakes[0].updates(), [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_without_token_ids_answers_for_its_alias_and_its_answers_are_untrainable() {
    let stand = Stand::with(1, |fakes| Options {
        openai: vec![openai(&fakes[0], Some("partner"))],
        ..Options::default()
    })
    .await;
    let (version, _) = version(4);
    let version = LoadedVersion {
        tokenizer: Some(letters()),
        stop_ids: vec![3],
        ..Arc::into_inner(version).unwrap()
    };
    let version = Arc::new(version);
    let target = |version: &LoadedVersion| Target {
        version: version.serial,
        root: version.root,
    };
    stand.updater.vouch(&[("champion".into(), target(&version))].into());
    while stand.pool.state(0) == State::Down {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(!stand.updater.serves(4), "another alias");
    stand.updater.vouch(&[("partner".into(), target(&version))].into());
    assert!(stand.updater.serves(4));
    let events = stand.ask(&version, 5).await;
    let ids = events.iter().filter_map(|event| match event {
        SampleEvent::Token(token) => Some((token.id, token.logprob)),
        _ => None,
    });
    // a, b, and the token that stands for the end
    assert_eq!(ids.collect::<Vec<_>>(), [(0, 0.0), (1, 0.0), (3, 0.0)]);
    assert!(events.contains(&SampleEvent::Untrainable("no_token_ids")));
    assert_eq!(events.last(), Some(&SampleEvent::Finished(Finish::Stop(3))));
    // what it cannot be asked for is refused by name
    let (sender, mut events) = mpsc::channel(events_max(1));
    let request = SampleRequest {
        params: Params {
            top_k: 3,
            ..Params::default()
        },
        ..stand.request(&version, 1, None, sender)
    };
    stand.pool.submit(vec![request]).unwrap();
    let Some(SampleEvent::Refused(error)) = next(&mut events).await else {
        panic!("a refusal was expected");
    };
    assert!(error.contains("top_k"), "{error}");
    assert!(stand.updater.serves(4));
}

/// `a`, `b`, `c` and a special token for the end.
fn letters() -> Tokenizer {
    let end = json!({"id": 3, "content": "<|end|>", "single_word": false, "lstrip": false, "rstrip": false,
                     "normalized": false, "special": true});
    let json = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [end],
        "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": {"type": "Fuse"},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                  "vocab": {"a": 0, "b": 1, "c": 2, "<|end|>": 3}, "merges": []}
    });
    let files = [
        ("tokenizer.json", json.to_string()),
        ("generation_config.json", json!({"eos_token_id": 3}).to_string()),
        ("config.json", "{}".to_owned()),
    ];
    let files = files.map(|(name, text)| (name.to_owned(), text.into()));
    Tokenizer::from_checkpoint(&Checkpoint {
        files: files.into(),
        ..Checkpoint::default()
    })
    .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_free_slot_goes_to_the_tenant_with_fewer_slots_and_to_users_before_rollouts() {
    let mut stand = Stand::new(1).await;
    let version = stand.place(1, &[]).await;
    let submit = |tenant: &str, class, max_tokens| {
        let (sender, events) = mpsc::channel(events_max(max_tokens));
        let request = SampleRequest {
            caller: Caller::new(tenant, None),
            class,
            ..stand.request(&version, max_tokens, None, sender)
        };
        stand.pool.submit(vec![request]).unwrap();
        events
    };
    stand.fakes[0].set(Faults {
        stalls_after: Some(1),
        ..Faults::default()
    });
    let mut running: Vec<_> = (0..4).map(|_| submit("a", TrafficClass::Production, 5)).collect();
    for events in &mut running {
        assert!(matches!(next(events).await, Some(SampleEvent::Token(_))));
    }
    stand.fakes[0].set(Faults::default());
    stand.fakes[0].held().salts.clear();
    let waiting = [
        submit("c", TrafficClass::Background, 5),
        submit("a", TrafficClass::Production, 5),
        submit("b", TrafficClass::Production, 5),
    ];
    // one free slot, so each begins after the one before has ended
    running.pop();
    for mut events in waiting {
        let mut last = None;
        while let Some(event) = events.recv().await {
            last = Some(event);
        }
        assert!(matches!(last, Some(SampleEvent::Finished(_))), "{last:?}");
    }
    assert_eq!(stand.fakes[0].held().salts, ["tenant-b", "tenant-a", "tenant-c"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_may_cross_versions_by_setting_if_all_are_known() {
    let mut stand = Stand::with(1, |fakes| Options {
        vllm: fakes.iter().map(vllm).collect(),
        in_flight: InFlight::Cross,
        ..Options::default()
    })
    .await;
    let first = stand.place(1, &[]).await;
    stand.fakes[0].set(Faults {
        crosses_at: Some(3),
        ..Faults::default()
    });
    let other = version(9).0;
    stand.pool.know("springtide-9-other".into(), &other);
    let events = stand.ask(&first, 5).await;
    let of = |version: &LoadedVersion, tokens| TokensOfVersion {
        serial: version.serial,
        root: version.root,
        tokens,
    };
    let expected = SampleEvent::Versions(vec![of(&first, 3), of(&other, 2)]);
    assert!(events.contains(&expected) && finished(&events), "{events:?}");
    assert!(stand.updater.serves(1));
}

/// An engine whose four answers wait after two tokens, which have arrived. What the first one began
/// with.
async fn busy_while_crossing() -> (Stand, Arc<LoadedVersion>, Vec<mpsc::Receiver<SampleEvent>>, Started) {
    let mut stand = Stand::with(1, |fakes| Options {
        vllm: fakes.iter().map(vllm).collect(),
        in_flight: InFlight::Cross,
        ..Options::default()
    })
    .await;
    let first = stand.place(1, &[]).await;
    stand.updater.in_force(&BTreeMap::new(), [1].into());
    stand.fakes[0].set(Faults {
        waits_after: Some(2),
        ..Faults::default()
    });
    let mut answers: Vec<_> = (0..4).map(|_| stand.submit(&first, 5)).collect();
    let Some(SampleEvent::Started(started)) = answers[0].recv().await else {
        panic!("the first event says who samples");
    };
    for events in &mut answers {
        for _ in 0..2 {
            assert!(matches!(next(events).await, Some(SampleEvent::Token(_))));
        }
    }
    (stand, first, answers, started)
}

#[tokio::test(flavor = "multi_thread")]
async fn during_a_crossing_update_answers_go_on_and_what_waits_is_routed_again() {
    let (mut stand, first, answers, started) = busy_while_crossing().await;
    let mut waiting = stand.submit(&first, 5);
    assert_eq!(started.engine, "vllm");
    assert!((started.holds)().await);
    let (second, checkpoint) = version(2);
    let name = stand.fakes[0].held().name.clone();
    let resume = async {
        while stand.fakes[0].held().name == name {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        stand.fakes[0].set(Faults::default());
    };
    let (changed, ()) = tokio::join!(stand.updater.change(0, &second, &checkpoint), resume);
    changed.unwrap();
    // an answer that ends here does not say which version sampled it
    assert!(!(started.holds)().await);
    stand.updater.in_force(&BTreeMap::new(), [2].into());
    assert_eq!(waiting.recv().await, Some(SampleEvent::VersionGone));
    let of = |version: &LoadedVersion, tokens| TokensOfVersion {
        serial: version.serial,
        root: version.root,
        tokens,
    };
    let expected = SampleEvent::Versions(vec![of(&first, 2), of(&second, 3)]);
    for mut events in answers {
        let mut all = Vec::new();
        while let Some(event) = events.recv().await {
            all.push(event);
        }
        assert!(finished(&all) && all.contains(&expected), "{all:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_passed_on_of_what_weights_sampled_that_failed_their_probe() {
    let (mut stand, _, answers, _) = busy_while_crossing().await;
    let (second, checkpoint) = version(2);
    let name = stand.fakes[0].held().name.clone();
    let resume = async {
        while stand.fakes[0].held().name == name {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let mut held = stand.fakes[0].held();
        held.faults = Faults {
            ignores_folders: true,
            ..Faults::default()
        };
        // the patch went wrong
        held.model = Arc::new(ExactModel::from_checkpoint(&version(3).1).unwrap());
    };
    let (changed, ()) = tokio::join!(stand.updater.change(0, &second, &checkpoint), resume);
    let error = format!("{:#}", changed.unwrap_err());
    assert!(error.contains("probe_error_max"), "{error}");
    for mut events in answers {
        assert!(matches!(events.recv().await, Some(SampleEvent::Failed(_))));
        assert_eq!(events.recv().await, None);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_changed_its_weights_by_itself_does_not_vouch_for_answers_that_end_early() {
    let mut follower = Stand::new(1).await;
    let url = follower.fakes[0].url.clone();
    let mut gateway = Stand::with(0, |_| Options {
        vllm: vec![Server {
            url,
            control: false,
            ..Server::default()
        }],
        ..Options::default()
    })
    .await;
    follower.place(1, &[]).await;
    let first = gateway.place(1, &[]).await;
    follower.fakes[0].set(Faults {
        waits_after: Some(1),
        ..Faults::default()
    });
    let mut events = gateway.submit(&first, 5);
    let Some(SampleEvent::Started(started)) = events.recv().await else {
        panic!("the first event says who samples");
    };
    assert!((started.holds)().await);
    follower.fakes[0].held().name = "springtide-2-other".into();
    assert!(!(started.holds)().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_a_follower_controls_serves_what_it_names_after_a_probe() {
    let mut follower = Stand::new(1).await;
    let url = follower.fakes[0].url.clone();
    let mut gateway = Stand::with(0, |_| Options {
        vllm: vec![Server {
            url,
            control: false,
            ..Server::default()
        }],
        ..Options::default()
    })
    .await;
    follower.place(1, &[]).await;
    let first = gateway.place(1, &[]).await;
    assert!(finished(&gateway.ask(&first, 4).await));
    // the name of another version is enough to know that it cannot be this one
    let (second, checkpoint) = version(2);
    assert!(
        gateway
            .updater
            .place(&second, &checkpoint, &BTreeSet::new())
            .await
            .is_err()
    );
    follower.place(2, &[]).await;
    while gateway.updater.serves(1) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let candidates = [version(1), version(2)];
    while !gateway.updater.serves(2) {
        gateway.updater.recognize(&candidates).await.unwrap();
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(finished(&gateway.ask(&second, 4).await));
    // a name alone proves nothing
    follower.fakes[0].restart();
    let name = format!("springtide-1-{}", first.root.short());
    follower.fakes[0].held().name = name;
    while gateway.updater.serves(2) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    gateway.updater.recognize(&candidates).await.unwrap();
    assert!(!gateway.updater.serves(1));
    // all updates were the follower's
    assert_eq!(follower.fakes[0].updates(), ["folder", "patch"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_for_weights_that_an_engine_has_lost_goes_to_another_engine_and_nothing_fails() {
    let mut follower = Stand::new(2).await;
    for fake in &follower.fakes {
        fake.set(Faults {
            compares_weights: true,
            ..Faults::default()
        });
    }
    let servers = follower.fakes.iter().map(|fake| Server {
        control: false,
        ..vllm(fake)
    });
    let vllm = servers.collect();
    let mut gateway = Stand::with(0, |_| Options {
        vllm,
        ..Options::default()
    })
    .await;
    let first = follower.place(1, &[]).await;
    follower.mend(&[(1, 1.0)], 1, 2).await;
    let candidates = [version(1), version(2)];
    while gateway.pool.placement(|engines| engines.servers(1)) < 2 {
        gateway.updater.recognize(&candidates).await.unwrap();
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // from here on, nobody but requests looks at the engines
    gateway.watch.take();
    let fakes = &follower.fakes;
    let conflicts = || fakes.iter().map(|fake| fake.held().conflicts).sum::<usize>();
    let (second, checkpoint) = version(2);
    follower.updater.change(0, &second, &checkpoint).await.unwrap();
    // without a look, the gateway believes that both hold version 1: one request is turned away
    let before = conflicts();
    for _ in 0..3 {
        assert!(finished(&gateway.ask(&first, 4).await));
    }
    assert_eq!(conflicts() - before, 1);
    assert_eq!(gateway.pool.state(0), State::Unproven);
    assert_eq!(gateway.pool.state(1), State::Serving(1));
    // it was not ejected as broken: a probe finds what it holds now
    assert!(
        gateway
            .updater
            .place(&second, &checkpoint, &BTreeSet::from([1]))
            .await
            .is_ok()
    );
    assert!(finished(&gateway.ask(&second, 4).await));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_for_weights_that_nobody_holds_any_more_waits_for_them() {
    let mut follower = Stand::new(1).await;
    follower.fakes[0].set(Faults {
        compares_weights: true,
        ..Faults::default()
    });
    let server = Server {
        control: false,
        ..vllm(&follower.fakes[0])
    };
    let mut gateway = Stand::with(0, |_| Options {
        vllm: vec![server],
        ..Options::default()
    })
    .await;
    let first = follower.place(1, &[]).await;
    gateway.place(1, &[]).await;
    gateway.watch.take();
    follower.place(2, &[]).await;
    let mut events = gateway.submit(&first, 4);
    while gateway.pool.state(0) != State::Unproven {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    while let Ok(event) = events.try_recv() {
        assert!(matches!(event, SampleEvent::Started(_)), "{event:?}");
    }
    // back again, as after a rollback
    follower.place(1, &[]).await;
    let (first, checkpoint) = version(1);
    gateway
        .updater
        .place(&first, &checkpoint, &BTreeSet::new())
        .await
        .unwrap();
    let mut all = Vec::new();
    while let Some(event) = events.recv().await {
        all.push(event);
    }
    assert!(finished(&all));
}
