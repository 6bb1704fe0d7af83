//! A fleet of one handler. It answers completions with the model of a line's head and logs its
//! samples, like `springtide serve`. The engine itself is tested elsewhere.

use super::world::{POLICY, ensure_assigned, generate, register, sampler_key};
use artifact::sign::TrustedKeys;
use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::post;
use event_log::Producer;
use event_log::event::{Body, Event, FinishReason, Generation, Proof, Purpose, VersionSpan, signed_bytes};
use event_log::lease::Lease;
use model::exact::ExactModel;
use serde_json::{Value, json};
use sqlx::PgPool;
use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use store::Store;
use uuid::Uuid;

/// Which rollouts are logged with log-probabilities that are not the model's, or which requests fail.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Wrong {
    None,
    /// By 1 nat.
    OneOfEachGroup,
    /// By 1e-5 nats, as a machine with other code would compute.
    EachSlightly,
    /// One of four requests of rollouts is answered with 500.
    FailsSometimes,
    /// One of four requests of rollouts is logged and answered with 503.
    LosesSome,
}

#[derive(Clone)]
pub struct Fleet {
    pub pool: PgPool,
    pub store: Store,
    pub trusted: Arc<TrustedKeys>,
    pub producer: Producer,
    pub seeds: Arc<AtomicU64>,
    /// The groups that it has answered requests of.
    pub groups: Arc<Mutex<HashSet<String>>>,
    pub wrong: Wrong,
}

impl Fleet {
    /// Serves on a free port. Returns the base URL.
    pub async fn serve(self) -> String {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = axum::Router::new()
            .route("/v1/completions", post(complete))
            .route("/lease/{lease}/v1/completions", post(complete_turn))
            .route("/lease/{lease}/v1/chat/completions", post(answer_turn))
            .with_state(self);
        tokio::spawn(async move { axum::serve(listener, router).await });
        format!("http://{address}")
    }
}

/// The same for a conversation. Its prompt is the last message.
async fn answer_turn(
    fleet: State<Fleet>,
    lease: Path<String>,
    Json(mut request): Json<Value>,
) -> Result<Json<Value>, StatusCode> {
    let last = request["messages"].as_array().unwrap().last().unwrap();
    request["prompt"] = last["content"].clone();
    let Json(mut answer) = complete_turn(fleet, lease, Json(request)).await?;
    let text = answer["choices"][0]["text"].take();
    answer["choices"][0]["message"] = json!({"role": "assistant", "content": text});
    Ok(Json(answer))
}

/// A turn of a leased rollout, labeled as `springtide serve` labels it.
async fn complete_turn(
    State(fleet): State<Fleet>,
    Path(lease): Path<String>,
    Json(mut request): Json<Value>,
) -> Result<Json<Value>, StatusCode> {
    let lease = Lease::read(&lease).unwrap();
    request["model"] = lease.model.into();
    request["user"] = lease.run_id.to_string().into();
    request["priority"] = 100.into();
    request["surface"] = Lease::SURFACE.into();
    request["session_id"] = lease.id.to_string().into();
    let mut metadata = json!({
        "purpose": "rollout", "run_id": lease.run_id, "task_id": lease.task_id, "group_id": lease.group_id,
    });
    for asked in ["segment", "train"] {
        metadata[asked] = request["metadata"][asked].take();
    }
    request["metadata"] = metadata;
    complete(State(fleet), Json(request)).await
}

async fn complete(State(fleet): State<Fleet>, Json(request): Json<Value>) -> Result<Json<Value>, StatusCode> {
    let line = request["model"]
        .as_str()
        .unwrap()
        .split_once('@')
        .unwrap()
        .1
        .to_string();
    let head: i64 = sqlx::query_scalar("select head from line where policy = $1 and line = $2")
        .bind(POLICY)
        .bind(&line)
        .fetch_one(&fleet.pool)
        .await
        .unwrap();
    register(&fleet.pool, &sampler_key("test"), "test").await;
    ensure_assigned(&fleet.pool, &line, head).await;
    let checkpoint = fleet
        .store
        .materialize(POLICY, head, &fleet.trusted, &[])
        .await
        .unwrap()
        .checkpoint;
    let root = checkpoint.root().0;
    let prompt: Vec<u32> = request["prompt"]
        .as_str()
        .unwrap()
        .bytes()
        .map(|b| u32::from(b) % 61)
        .collect();
    let count = request["n"].as_u64().unwrap_or(1);
    let first = fleet.seeds.fetch_add(count, Ordering::Relaxed);
    let tokens_max = request["max_tokens"].as_u64().map_or(usize::MAX, |max| max as usize);
    let group = request["metadata"]["group_id"].as_str();
    if fleet.wrong == Wrong::FailsSometimes && group.is_some() && first % 4 == 1 {
        return Err(StatusCode::INTERNAL_SERVER_ERROR);
    }
    let sampled = {
        let prompt = prompt.clone();
        let work = move || {
            let model = ExactModel::from_checkpoint(&checkpoint).unwrap();
            (first..first + count)
                .map(|seed| generate(&model, &prompt, seed, None))
                .collect::<Vec<_>>()
        };
        tokio::task::spawn_blocking(work).await.unwrap()
    };
    let is_first = group.is_some_and(|group| fleet.groups.lock().unwrap().insert(group.to_owned()));
    let mut choices = Vec::new();
    for (nth, (mut token_ids, mut logprobs)) in sampled.into_iter().enumerate() {
        token_ids.truncate(tokens_max);
        logprobs.truncate(tokens_max);
        match fleet.wrong {
            Wrong::OneOfEachGroup if is_first && nth == 0 => logprobs[0] -= 1.0,
            Wrong::EachSlightly => logprobs[0] += 1e-5,
            _ => {}
        }
        let text: String = token_ids.iter().map(|&id| char::from(b'a' + (id % 26) as u8)).collect();
        let tokens = token_ids.len() as u32;
        let generation = generation(
            &request,
            &line,
            &prompt,
            token_ids,
            logprobs,
            VersionSpan {
                version: head,
                root,
                tokens,
            },
        );
        choices.push(json!({"text": text, "generation_id": generation.id, "version": head}));
        fleet.producer.send_event(&signed(generation)).await.unwrap();
    }
    if fleet.wrong == Wrong::LosesSome && group.is_some() && first % 4 == 1 {
        return Err(StatusCode::SERVICE_UNAVAILABLE);
    }
    Ok(Json(json!({"object": "text_completion", "choices": choices})))
}

/// The event with the proof of the replica `test`.
fn signed(generation: Generation) -> Event {
    let key = sampler_key("test");
    let digest = generation.unsigned_digest();
    let mut event = generation.into_event("default", "springtide/serve/test");
    let signature = key.sign(&signed_bytes(&event.tenant, event.time, &digest));
    if let Body::Generation(generation) = &mut event.body {
        let sampler = key.id().to_owned();
        generation.proof = Some(Proof { sampler, signature });
    }
    event
}

fn generation(
    request: &Value,
    line: &str,
    prompt: &[u32],
    token_ids: Vec<u32>,
    logprobs: Vec<f32>,
    span: VersionSpan,
) -> Generation {
    let metadata = &request["metadata"];
    let text = |value: &Value| value.as_str().map(String::from);
    let purpose = match metadata["purpose"].as_str() {
        Some("rollout") => Purpose::Rollout,
        Some("production") => Purpose::Production,
        _ => Purpose::Evaluation,
    };
    assert!(purpose != Purpose::Rollout || request["priority"] == 100);
    let is_short = request["max_tokens"]
        .as_u64()
        .is_some_and(|max| u64::from(span.tokens) < max);
    let id = Uuid::now_v7();
    let train_mask = (metadata["train"] == "false").then(|| vec![false; token_ids.len()]);
    Generation {
        id,
        episode_id: text(&request["session_id"]).map_or(id, |id| id.parse().unwrap()),
        segment: text(&metadata["segment"]).map_or(0, |segment| segment.parse().unwrap()),
        turn: 0,
        parent_id: None,
        policy: POLICY.into(),
        line: line.into(),
        versions: vec![span],
        replica: "test".into(),
        purpose,
        run_id: text(&metadata["run_id"]).map(|id| id.parse().unwrap()),
        task_id: text(&metadata["task_id"]),
        group_id: text(&metadata["group_id"]),
        surface: text(&request["surface"]).unwrap_or_else(|| "completion".into()),
        user_key: text(&request["user"]).unwrap(),
        arm: line.into(),
        arm_probability: 1.0,
        prompt_prefix: None,
        prompt_ids: prompt.to_vec(),
        token_ids,
        logprobs,
        train_mask,
        payload: None,
        experts: None,
        temperature: 1.0,
        top_p: 1.0,
        seed: None,
        finish_reason: match is_short {
            true => FinishReason::Stop,
            false => FinishReason::Length,
        },
        declined: false,
        shown: None,
        consent: true,
        decline_suppressed: false,
        exploration_share: None,
        sampling: None,
        untrainable: None,
        engine: None,
        proof: None,
    }
}
