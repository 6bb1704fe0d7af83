//! An engine with vLLM's routes that can be stopped in the middle of an update, as a real one cannot.
//! It samples with our exact model.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use artifact::checkpoint::Checkpoint;
use artifact::patch::{Contents, LocalPart};
use artifact::tensor::TensorData;
use axum::Router;
use axum::body::Bytes;
use axum::extract::{Json, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::routing::{get, post};
use model::exact::{ExactModel, KvCache};
use model::sampling::{self, Params, PreviousTokens, Source};
use serde_json::{Value, json};

const CONTEXT: usize = 64;

struct Held {
    name: String,
    checkpoint: Checkpoint,
    model: Arc<ExactModel>,
    /// An update was broken off: it refuses patches.
    broken: bool,
    stalls: bool,
    updating: bool,
    sampled: usize,
    loads: usize,
    keys: Vec<String>,
    /// The patch that it got last.
    patch: Option<Contents>,
}

#[derive(Clone)]
pub struct Engine {
    pub url: String,
    held: Arc<Mutex<Held>>,
}

impl Engine {
    /// As vLLM starts: with weights that nobody has named.
    pub async fn start(checkpoint: &Checkpoint) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let engine = Self {
            url: format!("http://{}", listener.local_addr().unwrap()),
            held: Arc::new(Mutex::new(Held {
                name: "default".into(),
                model: Arc::new(ExactModel::from_checkpoint(checkpoint).unwrap()),
                checkpoint: checkpoint.clone(),
                broken: false,
                stalls: false,
                updating: false,
                sampled: 0,
                loads: 0,
                keys: vec![],
                patch: None,
            })),
        };
        let done = || async { Json(json!({})) };
        let router = Router::new()
            .route("/weight_info", get(weight_info))
            .route(
                "/v1/models",
                get(|| async { Json(json!({"data": [{"max_model_len": CONTEXT}]})) }),
            )
            .route("/pause", post(done))
            .route("/start_weight_update", post(done))
            .route("/update_weights", post(update))
            .route("/finish_weight_update", post(finish))
            .route("/resume", post(done))
            .route("/inference/v1/generate", post(generate))
            .layer(middleware::from_fn_with_state(engine.clone(), note_key))
            .with_state(engine.clone());
        tokio::spawn(async move { axum::serve(listener, router).await });
        engine
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap()
    }

    pub fn holds(&self) -> Checkpoint {
        self.held().checkpoint.clone()
    }

    pub fn stall_updates(&self, stall: bool) {
        self.held().stalls = stall;
    }

    pub fn is_updating(&self) -> bool {
        self.held().updating
    }

    /// As an update leaves it that was applied in part: the name is the old one.
    pub fn break_weights(&self) {
        let mut held = self.held();
        for tensor in held.checkpoint.tensors.values_mut() {
            let mut bytes = tensor.bytes.to_vec();
            bytes[1] ^= 1;
            *tensor = TensorData::new(tensor.dtype, tensor.shape.clone(), bytes).unwrap();
        }
        held.model = Arc::new(ExactModel::from_checkpoint(&held.checkpoint).unwrap());
        held.broken = true;
    }

    pub fn sampled(&self) -> usize {
        self.held().sampled
    }

    /// How often it has loaded all weights.
    pub fn loads(&self) -> usize {
        self.held().loads
    }

    /// The keys of all requests.
    pub fn keys(&self) -> Vec<String> {
        self.held().keys.clone()
    }
}

async fn note_key(State(engine): State<Engine>, request: Request, next: Next) -> Response {
    let key = request.headers().get(header::AUTHORIZATION);
    let key = key.map_or("none".into(), |key| key.to_str().unwrap().to_owned());
    engine.held().keys.push(key);
    next.run(request).await
}

async fn weight_info(State(engine): State<Engine>) -> Json<Value> {
    Json(json!({"weight_version": engine.held().name}))
}

async fn update(State(engine): State<Engine>, Json(body): Json<Value>) -> Result<Json<Value>, StatusCode> {
    if let Some(url) = body["update_info"]["stage"].as_str() {
        stage(&engine, url).await;
        return Ok(Json(json!({})));
    }
    if body["update_info"]["prove"].is_string() {
        return Err(StatusCode::BAD_REQUEST);
    }
    engine.held().updating = true;
    while engine.held().stalls {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let info = &body["update_info"];
    let all = match info["all"].as_str() {
        Some(url) => Some(load(url, engine.holds()).await),
        None => None,
    };
    let mut held = engine.held();
    held.updating = false;
    held.checkpoint = match (info["patch"].as_str(), all) {
        (Some(_), _) => {
            if held.broken || info["from"] != held.checkpoint.root().to_string() {
                return Err(StatusCode::INTERNAL_SERVER_ERROR);
            }
            let patch = held.patch.take().unwrap();
            patched(&held.checkpoint, &patch)
        }
        (None, Some(checkpoint)) => {
            held.loads += 1;
            held.broken = false;
            checkpoint
        }
        (None, None) => return Err(StatusCode::BAD_REQUEST),
    };
    held.model = Arc::new(ExactModel::from_checkpoint(&held.checkpoint).unwrap());
    Ok(Json(json!({})))
}

/// What the only worker of an engine asks. `None`: with GET.
async fn ask(url: &str, what: &str, body: Option<Value>) -> Bytes {
    let url = format!("{url}{what}?worker=0&replica=0&of=1");
    let client = reqwest::Client::new();
    let request = match body {
        None => client.get(url),
        Some(body) => client.post(url).json(&body),
    };
    let answer = request.send().await.unwrap().error_for_status().unwrap();
    answer.bytes().await.unwrap()
}

/// All weights, of the same form as what it holds.
async fn load(url: &str, mut checkpoint: Checkpoint) -> Checkpoint {
    ask(url, "", None).await;
    let mut bytes = ask(url, "/weights", None).await;
    for tensor in checkpoint.tensors.values_mut() {
        tensor.bytes = bytes.split_to(tensor.bytes.len()).into();
    }
    ask(url, "/end", Some(json!({"failed": null}))).await;
    checkpoint
}

/// As an engine with one worker, whose memories are the tensors.
async fn stage(engine: &Engine, url: &str) {
    ask(url, "", None).await;
    let part = |(name, tensor): (&String, &TensorData)| {
        let elements = tensor.shape.iter().product();
        LocalPart {
            tensor: name.clone(),
            first: 0,
            axes: vec![(elements, 1, 1)],
            at: 0,
            memory: elements,
        }
    };
    let parts: Vec<LocalPart> = engine.held().checkpoint.tensors.iter().map(part).collect();
    let patch = ask(url, "/patch", Some(json!(parts))).await;
    engine.held().patch = Some(Contents::from_bytes(&patch).unwrap());
    ask(url, "/end", Some(json!({"failed": null}))).await;
}

fn patched(checkpoint: &Checkpoint, patch: &Contents) -> Checkpoint {
    let mut checkpoint = checkpoint.clone();
    let names: Vec<String> = checkpoint.tensors.keys().cloned().collect();
    for (number, changes) in &patch.tensors {
        let tensor = checkpoint
            .tensors
            .get_mut(&names[number.parse::<usize>().unwrap()])
            .unwrap();
        let mut bytes = tensor.bytes.to_vec();
        let width = changes.values.bytes.len() / changes.count();
        for (index, value) in changes.indices().zip(changes.values.bytes.chunks_exact(width)) {
            bytes[index * width..][..width].copy_from_slice(value);
        }
        *tensor = TensorData::new(tensor.dtype, tensor.shape.clone(), bytes).unwrap();
    }
    checkpoint
}

async fn finish(State(engine): State<Engine>, body: Bytes) -> Json<Value> {
    // without a body it ends what was begun before the pause
    if let Ok(body) = serde_json::from_slice::<Value>(&body) {
        engine.held().name = body["weight_version"].as_str().unwrap().into();
    }
    Json(json!({}))
}

/// One event with all tokens.
async fn generate(State(engine): State<Engine>, Json(body): Json<Value>) -> String {
    let (model, name) = {
        let held = engine.held();
        (held.model.clone(), held.name.clone())
    };
    let params = Params {
        temperature: body["sampling_params"]["temperature"].as_f64().unwrap() as f32,
        ..Params::default()
    };
    let count = body["sampling_params"]["max_tokens"].as_u64().unwrap();
    let ids = body["token_ids"].as_array().unwrap().iter();
    let mut next: Vec<u32> = ids.map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect();
    let drawn = tokio::task::spawn_blocking(move || {
        let mut cache = KvCache::new(&model, 1, CONTEXT);
        let mut source = Source::new(7);
        let mut drawn = vec![];
        for _ in 0..count {
            let logits = model.prefill(&mut cache, 0, &next).unwrap();
            let one = sampling::draw(&logits, &params, &PreviousTokens::default(), &mut source);
            next = vec![one.id];
            drawn.push(one);
        }
        drawn
    });
    let drawn = drawn.await.unwrap();
    engine.held().sampled += drawn.len();
    let logprobs = drawn
        .iter()
        .map(|one| json!({"token_id": one.id, "logprob": one.log_prob}));
    let choice = json!({
        "token_ids": drawn.iter().map(|one| one.id).collect::<Vec<_>>(),
        "logprobs": {"content": logprobs.collect::<Vec<_>>()},
        "finish_reason": "length",
        "weight_versions": [{"version": name, "start": 0, "end": count}],
    });
    format!("data: {}\n\ndata: [DONE]\n\n", json!({"choices": [choice]}))
}
