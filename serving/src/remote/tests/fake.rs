//! A server with vLLM's routes that samples with our exact model, and fails as it is told.

use super::*;

pub(crate) const CONTEXT: usize = 64;
pub(crate) const VOCAB: u32 = 96;
pub(crate) const SLOTS: usize = 48;

/// What goes wrong from now on.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Faults {
    /// Patches succeed without effect.
    pub(crate) ignores_patches: bool,
    /// So do updates to all weights.
    pub(crate) ignores_all: bool,
    /// Its workers are not ready for patches, and do not say what they hold.
    pub(crate) refuses_patches: bool,
    /// Patches are written but for one weight.
    pub(crate) forgets_a_weight: bool,
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
    /// Every request gets 503.
    pub(crate) dead: bool,
    /// A command to pause is never answered.
    pub(crate) hangs: bool,
    /// Answers say that other weights sampled the tokens from this one on.
    pub(crate) crosses_at: Option<usize>,
}

pub(crate) struct Held {
    pub(crate) name: String,
    pub(crate) checkpoint: Checkpoint,
    /// Of the version that it was given last, as its workers remember it.
    pub(crate) root: String,
    pub(crate) model: Arc<ExactModel>,
    pub(crate) faults: Faults,
    /// What it was given: a patch, or all weights.
    pub(crate) updates: Vec<&'static str>,
    /// How it was paused for them.
    pub(crate) pauses: Vec<String>,
    /// Patches that it was to get before the pause, and those of them that it had then.
    pub(crate) staged: [usize; 2],
    /// The last of them, with its URL.
    pub(crate) patch: Option<(String, Contents)>,
    /// How often it has said what it holds.
    pub(crate) proofs: usize,
    /// Tokens that it sampled.
    pub(crate) sampled: usize,
    /// Answers that are being sampled.
    pub(crate) running: usize,
    /// Requests that expected other weights.
    pub(crate) conflicts: usize,
    /// What kept the caches of its requests apart, in their order.
    pub(crate) salts: Vec<String>,
    /// By name.
    pub(crate) adapters: BTreeMap<String, Arc<ExactModel>>,
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
            root: String::new(),
            faults: Faults::default(),
            updates: Vec::new(),
            pauses: Vec::new(),
            staged: [0, 0],
            patch: None,
            proofs: 0,
            sampled: 0,
            conflicts: 0,
            salts: Vec::new(),
            adapters: BTreeMap::new(),
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
            .route(
                "/server_info",
                get(|| async { Json(json!({"vllm_config": {"scheduler_config": {"max_num_seqs": SLOTS}}})) }),
            )
            .route("/pause", post(pause))
            .route("/start_weight_update", post(done))
            .route("/update_weights", post(update))
            .route("/finish_weight_update", post(finish))
            .route("/resume", post(done))
            .route("/inference/v1/generate", post(generate))
            .route("/v1/completions", post(complete))
            .route("/v1/load_lora_adapter", post(load_adapter))
            .route("/v1/unload_lora_adapter", post(unload_adapter))
            .layer(axum::middleware::from_fn_with_state(self.clone(), dead))
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
        held.adapters.clear();
        held.checkpoint = first();
        held.root.clear();
        held.model = Arc::new(ExactModel::from_checkpoint(&held.checkpoint).unwrap());
    }

    pub(crate) fn updates(&self) -> Vec<&'static str> {
        std::mem::take(&mut self.held().updates)
    }
}

async fn dead(Extract(fake): Extract<Fake>, request: axum::extract::Request, next: axum::middleware::Next) -> Response {
    if fake.held().faults.dead {
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    }
    next.run(request).await
}

async fn pause(Extract(fake): Extract<Fake>, uri: axum::http::Uri) -> Json<Value> {
    fake.held().pauses.push(uri.query().unwrap_or_default().into());
    while fake.held().faults.hangs {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
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
    if let Some(url) = info["stage"].as_str().or_else(|| info["prove"].as_str()) {
        let worker = Worker::ask(fake, url).await;
        tokio::spawn(match info["prove"].is_string() {
            true => worker.prove().boxed(),
            false => worker.stage().boxed(),
        });
        return Ok(Json(json!({})));
    }
    let all = match info["all"].as_str() {
        Some(url) => Some(Worker::ask(fake.clone(), url).await.load().await),
        None => None,
    };
    let mut held = fake.held();
    let (kind, ignored, next) = match (info["patch"].as_str(), all) {
        (Some(url), _) => {
            if info["from"] != held.root {
                return Err((StatusCode::INTERNAL_SERVER_ERROR, "another version".into()));
            }
            assert_eq!(held.staged[0], held.staged[1], "a patch is there before the pause");
            let (of, patch) = held.patch.take().unwrap();
            assert_eq!(of, url);
            let forgets = held.faults.forgets_a_weight;
            (
                "patch",
                held.faults.ignores_patches,
                patched(&held.checkpoint, &patch, forgets),
            )
        }
        (None, Some(checkpoint)) => ("all", held.faults.ignores_all, checkpoint),
        (None, None) => return Err((StatusCode::BAD_REQUEST, "no weights".into())),
    };
    held.updates.push(kind);
    held.root = info["to"].as_str().unwrap().into();
    if !ignored {
        held.model = Arc::new(ExactModel::from_checkpoint(&next).unwrap());
        held.checkpoint = next;
    }
    Ok(Json(json!({})))
}

/// The only worker of a fake. Its memories are the tensors.
struct Worker {
    fake: Fake,
    url: String,
    parts: Vec<LocalPart>,
}

impl Worker {
    async fn ask(fake: Fake, url: &str) -> Self {
        let versions: Value = reqwest::get(format!("{url}?worker=0&replica=0&of=1"))
            .await
            .unwrap()
            .json()
            .await
            .unwrap();
        let tensors = versions["tensors"].as_object().unwrap().iter();
        let parts = tensors.map(|(name, form)| {
            let elements = form[1]
                .as_array()
                .unwrap()
                .iter()
                .map(|size| size.as_u64().unwrap() as usize)
                .product();
            LocalPart {
                tensor: name.clone(),
                first: 0,
                axes: vec![(elements, 1, 1)],
                at: 0,
                memory: elements,
            }
        });
        Self {
            parts: parts.collect(),
            fake,
            url: url.into(),
        }
    }

    /// The body of the answer. The update may have ended.
    async fn post(&self, what: &str, body: &impl serde::Serialize) -> axum::body::Bytes {
        let url = format!("{}/{what}?worker=0&replica=0&of=1", self.url);
        let answer = reqwest::Client::new().post(url).json(body).send().await;
        match answer {
            Ok(answer) => answer.bytes().await.unwrap_or_default(),
            Err(_) => axum::body::Bytes::new(),
        }
    }

    async fn load(self) -> Checkpoint {
        let url = format!("{}/weights?worker=0&replica=0&of=1", self.url);
        let bytes = reqwest::get(url).await.unwrap().bytes().await.unwrap();
        self.post("end", &json!({"failed": null})).await;
        with_bytes(self.fake.held().checkpoint.clone(), bytes)
    }

    async fn stage(self) {
        let failed = self.fake.held().faults.refuses_patches.then_some("no patches");
        if failed.is_none() {
            self.fake.held().staged[0] += 1;
            let patch = Contents::from_bytes(&self.post("patch", &self.parts).await).unwrap();
            tokio::time::sleep(Duration::from_millis(20)).await;
            let mut held = self.fake.held();
            held.staged[1] += 1;
            held.patch = Some((self.url.clone(), patch));
        }
        self.post("end", &json!({"failed": failed})).await;
    }

    async fn prove(self) {
        let checkpoint = self.fake.held().checkpoint.clone();
        if self.fake.held().faults.refuses_patches {
            self.post("end", &json!({"failed": "no proofs"})).await;
            return;
        }
        let held = self.parts.iter().map(|part| HeldPart {
            part: part.clone(),
            sha256: part.digest(&checkpoint.tensors[&part.tensor]).unwrap(),
        });
        self.post("held", &held.collect::<Vec<_>>()).await;
        self.post("end", &json!({"failed": null})).await;
        self.fake.held().proofs += 1;
    }
}

/// A version of the same form, of the bytes of its tensors.
fn with_bytes(mut checkpoint: Checkpoint, mut bytes: axum::body::Bytes) -> Checkpoint {
    for tensor in checkpoint.tensors.values_mut() {
        tensor.bytes = bytes.split_to(tensor.bytes.len()).into();
    }
    assert!(bytes.is_empty());
    checkpoint
}

fn patched(checkpoint: &Checkpoint, patch: &Contents, forgets_a_weight: bool) -> Checkpoint {
    let mut checkpoint = checkpoint.clone();
    let names: Vec<String> = checkpoint.tensors.keys().cloned().collect();
    let mut forgotten = usize::from(forgets_a_weight);
    for (number, changes) in &patch.tensors {
        let tensor = checkpoint
            .tensors
            .get_mut(&names[number.parse::<usize>().unwrap()])
            .unwrap();
        let mut bytes = tensor.bytes.to_vec();
        let width = changes.values.bytes.len() / changes.count();
        let changes = changes.indices().zip(changes.values.bytes.chunks_exact(width));
        for (index, value) in changes.skip(std::mem::take(&mut forgotten)) {
            bytes[index * width..][..width].copy_from_slice(value);
        }
        *tensor = TensorData::new(tensor.dtype, tensor.shape.clone(), bytes).unwrap();
    }
    checkpoint
}

async fn finish(Extract(fake): Extract<Fake>, body: axum::body::Bytes) -> Json<Value> {
    // without a body it ends what was begun before the pause
    if let Ok(body) = serde_json::from_slice::<Value>(&body) {
        fake.held().name = body["weight_version"].as_str().unwrap().into();
    }
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
    let adapter = body["model"].as_str().map(str::to_owned);
    let unknown = |name: &String| !fake.held().adapters.contains_key(name);
    if adapter.as_ref().is_some_and(unknown) {
        return StatusCode::NOT_FOUND.into_response();
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
    sample(fake, adapter, &body["token_ids"], &params["temperature"], count, event)
}

async fn load_adapter(Extract(fake): Extract<Fake>, Json(body): Json<Value>) -> StatusCode {
    let adapter = Adapter::read_dir(Path::new(body["lora_path"].as_str().unwrap())).unwrap();
    let mut held = fake.held();
    let version = held
        .checkpoint
        .with_adapter(&adapter.version_of(&held.checkpoint).unwrap());
    let model = ExactModel::from_checkpoint(&version).unwrap();
    let name = body["lora_name"].as_str().unwrap().to_owned();
    match held.adapters.insert(name, Arc::new(model)) {
        None => StatusCode::OK,
        Some(_) => StatusCode::BAD_REQUEST,
    }
}

async fn unload_adapter(Extract(fake): Extract<Fake>, Json(body): Json<Value>) -> StatusCode {
    match fake.held().adapters.remove(body["lora_name"].as_str().unwrap()) {
        Some(_) => StatusCode::OK,
        None => StatusCode::NOT_FOUND,
    }
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
    sample(fake, None, &body["prompt"], &body["temperature"], count, event)
}

/// Samples with an adapter, or with the model that the engine holds now. `event`: of the index, id and log-probability of
/// a token.
fn sample(
    fake: Fake,
    adapter: Option<String>,
    prompt: &Value,
    temperature: &Value,
    count: usize,
    event: impl Fn(usize, u32, f32) -> Value + Send + 'static,
) -> Response {
    let with = move |held: &Held| match &adapter {
        // as vLLM's CPU build does
        None => held.adapters.values().next().unwrap_or(&held.model).clone(),
        Some(name) => held.adapters[name].clone(),
    };
    let (model, faults) = {
        let mut held = fake.held();
        held.running += 1;
        (with(&held), held.faults)
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
            let model = with(&fake.held());
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

pub(crate) fn first() -> Checkpoint {
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
    loaded(serial, None, checkpoint)
}

/// An adapter of what an engine starts with; each serial has others.
pub(crate) fn adapter(serial: i64) -> (Arc<LoadedVersion>, Arc<Checkpoint>) {
    let base = first();
    let mut adapter = Adapter::fresh(model::lora::Config::default(), &base, serial as u64).unwrap();
    for pair in adapter.pairs.values_mut() {
        pair.b.fill(0.05 + 0.01 * serial as f32);
    }
    loaded(serial, Some(1), base.with_adapter(&adapter.version_of(&base).unwrap()))
}

pub(super) fn loaded(
    serial: i64,
    adapts: Option<i64>,
    checkpoint: Checkpoint,
) -> (Arc<LoadedVersion>, Arc<Checkpoint>) {
    let model = ExactModel::from_checkpoint(&checkpoint).unwrap();
    let version = LoadedVersion {
        serial,
        root: checkpoint.root(),
        line: "realtime".into(),
        adapts,
        context: CONTEXT,
        vocab: VOCAB,
        stop_ids: vec![],
        experts: None,
        decline_id: None,
        tokenizer: None,
        reference: model::reference::of(&model).unwrap().map(Arc::new),
        templates: no_templates(),
    };
    (Arc::new(version), Arc::new(checkpoint))
}
