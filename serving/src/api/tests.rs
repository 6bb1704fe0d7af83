//! The API with a real engine, a fake model whose next token is known, and a fake log that can
//! fail. One file, because every test uses the same small server and log.

pub(crate) mod agents;
mod bar;
mod elsewhere;
mod health;
mod shadow;
mod temperature;

use super::*;
use crate::engine::backend::{Backend, Step};
use crate::engine::caller::Caller;
use crate::engine::{self, LoadedVersion};
use crate::options::LogAway;
use crate::routing::tests::assignment;
use artifact::checkpoint::Checkpoint;
use artifact::digest::Digest;
use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{Request, StatusCode};
use axum::response::Response;
use bytes::Bytes;
use event_log::event::{Body as EventBody, FinishReason, Generation, Purpose, signed_bytes};
use event_log::feedback_token::FeedbackToken;
use event_log::payload::{Experts, Store as Payloads};
use model::router;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tempfile::TempDir;
use text::chat::Templates;
use text::tokenizer::Tokenizer;
use time::OffsetDateTime;
use tower::ServiceExt;

/// Characters 0..=25 are a..=z, then these.
const NEWLINE: u32 = 26;
const DECLINE: u32 = 27;
const END: u32 = 28;
const VOCAB: u32 = 29;

/// Continues the alphabet after the prompt's last letter, and ends after z. If the prompt begins
/// with `x`, it declines at its third token.
struct Alphabet {
    slots: Vec<Vec<u32>>,
    pace: Duration,
}

impl Alphabet {
    fn logits(&self, slot: usize) -> Vec<f32> {
        let ids = &self.slots[slot];
        let next = match ids.as_slice() {
            [23, _, _, _] => DECLINE,
            [.., 25] => END,
            [.., last] => last + 1,
            [] => 0,
        };
        (0..VOCAB).map(|id| if id == next { 60.0 } else { 0.0 }).collect()
    }
}

impl Alphabet {
    /// A mixture of three experts in one layer, whose router takes the token id modulo 3.
    fn step(&self, slot: usize, read: usize) -> Step {
        let ids = &self.slots[slot];
        let mut routing = router::Routing::default();
        routing.record(1, ids[ids.len() - read..].iter().map(|id| id % 3).collect());
        Step {
            logits: self.logits(slot),
            routing,
        }
    }
}

impl Backend for Alphabet {
    fn slots(&self) -> usize {
        self.slots.len()
    }
    fn advance(&mut self, segments: &[(usize, &[u32])]) -> anyhow::Result<Vec<Step>> {
        if segments.iter().any(|(slot, _)| !self.slots[*slot].is_empty()) {
            std::thread::sleep(self.pace);
        }
        for (slot, ids) in segments {
            self.slots[*slot].extend_from_slice(ids);
        }
        Ok(segments.iter().map(|(slot, ids)| self.step(*slot, ids.len())).collect())
    }
    fn copy_prefix(&mut self, from: usize, to: usize, tokens: usize) {
        self.slots[to] = self.slots[from][..tokens].to_vec();
    }
}

fn tokenizer() -> Tokenizer {
    let mut vocab: BTreeMap<String, u32> = ('a'..='z').map(|c| (c.to_string(), c as u32 - 'a' as u32)).collect();
    vocab.insert("\n".into(), NEWLINE);
    vocab.insert("<|decline|>".into(), DECLINE);
    vocab.insert("<|end|>".into(), END);
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    };
    let json = json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [special(DECLINE, "<|decline|>"), special(END, "<|end|>")],
        "normalizer": null, "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "Fuse"},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                  "vocab": vocab, "merges": []}
    });
    let generation = json!({"eos_token_id": [END], "springtide_decline_token_id": DECLINE});
    Tokenizer::from_checkpoint(&Checkpoint {
        tensors: BTreeMap::new(),
        files: BTreeMap::from([
            ("tokenizer.json".to_string(), Bytes::from(json.to_string())),
            (
                "generation_config.json".to_string(),
                Bytes::from(generation.to_string()),
            ),
            ("config.json".to_string(), Bytes::from("{}")),
        ]),
    })
    .unwrap()
}

/// Keeps the events; can delay an acknowledgement, or refuse.
#[derive(Default)]
struct FakeLog {
    events: Mutex<Vec<Event>>,
    broken: AtomicBool,
    delayed: Mutex<Option<tokio::sync::oneshot::Receiver<()>>>,
}

impl Log for FakeLog {
    fn append<'a>(&'a self, event: &'a Event) -> BoxFuture<'a, Result<(), log::Error>> {
        Box::pin(async move {
            let delayed = self.delayed.lock().unwrap().take();
            if let Some(delayed) = delayed {
                let _ = delayed.await;
            }
            if self.broken.load(Ordering::Relaxed) {
                return Err(log::Error::Full);
            }
            event.check()?;
            self.events.lock().unwrap().push(event.clone());
            Ok(())
        })
    }
}

impl FakeLog {
    fn generations(&self) -> Vec<Generation> {
        let events = self.events.lock().unwrap();
        events
            .iter()
            .map(|event| match &event.body {
                EventBody::Generation(generation) => generation.clone(),
                other => panic!("serving logs generations, not {other:?}"),
            })
            .collect()
    }
}

struct Server {
    router: Router,
    log: Arc<FakeLog>,
    api: Arc<Api>,
    payloads: Payloads,
    _folder: TempDir,
}

/// What a server answers with.
struct FakeVersion {
    tokenizer: Tokenizer,
    template: String,
    context: usize,
    vocab: u32,
    stop_ids: Vec<u32>,
    experts: Option<u16>,
    decline_id: Option<u32>,
}

async fn server_with(pace_ms: u64, options: Options) -> Server {
    let template =
        "{% for message in messages %}{{ message.content }}{% endfor %}{% if add_generation_prompt %}m{% endif %}";
    let version = FakeVersion {
        tokenizer: tokenizer(),
        template: template.into(),
        context: 64,
        vocab: VOCAB,
        stop_ids: vec![END, DECLINE],
        experts: Some(3),
        decline_id: Some(DECLINE),
    };
    let slots = vec![Vec::new(); options.slots];
    let model = || {
        Box::new(Alphabet {
            slots: slots.clone(),
            pace: Duration::from_millis(pace_ms),
        }) as Box<dyn Backend>
    };
    server_of(options, version, model).await
}

async fn server_of(options: Options, fake: FakeVersion, model: impl Fn() -> Box<dyn Backend>) -> Server {
    let engine = engine::spawn(engine::Config {
        queue_choices_max: options.queue_choices_max,
        queue_wait_max: Duration::from_millis(options.queue_wait_ms_max),
        prompt_tokens_per_pass_max: options.prompt_tokens_per_pass_max,
        slots_reserved_for_production: options.slots_reserved_for_production,
        parked_max: Duration::from_millis(options.tide.parked_ms_max),
    })
    .unwrap()
    .handle;
    let checkpoint = Checkpoint {
        files: [("chat_template.jinja".to_owned(), Bytes::from(fake.template))].into(),
        ..Checkpoint::default()
    };
    let templates = Templates::from_checkpoint(&checkpoint).map(Arc::new).map_err(Arc::new);
    let mut versions = BTreeMap::new();
    for serial in [1, 7] {
        let version = Arc::new(LoadedVersion {
            serial,
            root: Digest([serial as u8; 32]),
            line: "realtime".into(),
            adapts: None,
            context: fake.context,
            vocab: fake.vocab,
            stop_ids: fake.stop_ids.clone(),
            experts: fake.experts,
            decline_id: fake.decline_id,
            tokenizer: Some(fake.tokenizer.clone()),
            reference: None,
            templates: templates.clone(),
        });
        engine.install(version.clone(), model()).await.unwrap();
        versions.insert(serial, version);
    }
    let routes = Arc::new(RouteTable::default());
    routes.apply(
        assignment(5, &[("champion", 7), ("base", 1)], &[("champion", 0.6), ("base", 0.4)]),
        versions,
    );
    let log = Arc::new(FakeLog::default());
    let folder = tempfile::tempdir().unwrap();
    let payloads = Payloads::open(&format!("file://{}", folder.path().display())).unwrap();
    let api = Arc::new(Api {
        policy: "demo".into(),
        prompts: Prompts::new(options.prompt_threads, options.queue_choices_max),
        options,
        engine: Arc::new(engine),
        routes,
        log: log.clone(),
        log_state: super::LogState::default(),
        lost: super::Lost::default(),
        payloads: Some(payloads.clone()),
        sessions: super::Sessions::default(),
        sampler: edge::sampler::SamplerKey::from_seed(&[1; 32]),
        shadow: Shadow::default(),
        choices: TaskTracker::new(),
    });
    Server {
        router: super::routes(api.clone())
            .protected_by(&edge::auth::Auth::fixed(None), "test")
            .layer(axum::middleware::from_fn(shape_errors)),
        log,
        api,
        payloads,
        _folder: folder,
    }
}

#[tokio::test]
async fn a_chat_request_is_answered_with_a_message_and_logged_like_any_completion() {
    let server = server().await;
    let body = |stream: bool| {
        json!({"model": "demo", "messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "k"}],
               "max_tokens": 3, "logprobs": true, "top_logprobs": 1, "stream": stream, "seed": 5})
    };
    let answer = text(server.post_to("/v1/chat/completions", body(false)).await).await;
    let answer: Value = serde_json::from_str(&answer).unwrap();
    assert_eq!(answer["object"], "chat.completion");
    assert!(answer["id"].as_str().unwrap().starts_with("chatcmpl-"));
    let choice = &answer["choices"][0];
    assert_eq!(choice["message"], json!({"role": "assistant", "content": "nop"}));
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(choice["logprobs"]["content"][0]["token"], "n");
    assert_eq!(
        choice["logprobs"]["content"][0]["top_logprobs"][0]["bytes"],
        json!([110])
    );
    let logged = server.log.generations().remove(0);
    assert_eq!(
        (logged.prompt_ids, logged.token_ids),
        (vec![0, 10, 12], vec![13, 14, 15])
    );

    let streamed = text(server.post_to("/v1/chat/completions", body(true)).await).await;
    let chunks: Vec<Value> = streamed
        .lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .filter(|data| *data != "[DONE]")
        .map(|data| serde_json::from_str(data).unwrap())
        .collect();
    assert!(chunks.iter().all(|chunk| chunk["object"] == "chat.completion.chunk"));
    let roles: Vec<_> = chunks
        .iter()
        .map(|chunk| chunk["choices"][0]["delta"]["role"].as_str())
        .collect();
    assert_eq!(roles[0], Some("assistant"));
    assert!(roles[1..].iter().all(Option::is_none));
    let content: String = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str())
        .collect();
    assert_eq!(content, "nop");

    let refused = server
        .post_to("/v1/chat/completions", json!({"model": "demo", "messages": []}))
        .await;
    assert_eq!(refused.status(), 400);
    assert!(text(refused).await.contains("send at least one"));
}

#[tokio::test]
async fn the_experts_are_stored_before_the_generation_is_logged() {
    let server = server().await;
    let body = json!({"model": "demo", "prompt": [1, 3, 5], "max_tokens": 3, "return_token_ids": true});
    let (status, answer) = server.complete(body).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["choices"][0]["token_ids"], json!([6, 7, 8]));
    let logged = server.log.generations().remove(0).experts.unwrap();
    let experts = Experts::decode(&server.payloads.get("default", &logged).await.unwrap()).unwrap();
    assert_eq!(
        (experts.first, experts.layers, experts.per_layer, experts.experts),
        (0, 1, 1, 3)
    );
    assert_eq!(
        experts.ids,
        [1, 0, 2, 0, 1],
        "of all tokens that were read; the last one was not"
    );
}

#[tokio::test]
async fn a_generation_is_signed_and_its_choice_has_a_feedback_token() {
    let server = server().await;
    let body = json!({"model": "demo", "prompt": "ab", "max_tokens": 2, "n": 2});
    let (_, answer) = server.complete(body).await;
    let key = edge::sampler::SamplerKey::from_seed(&[1; 32]).public_key();
    let events = server.log.events.lock().unwrap();
    assert_eq!(events.len(), 2);
    for event in events.iter() {
        let EventBody::Generation(generation) = &event.body else {
            panic!("{event:?}")
        };
        let signed = |digest: &[u8; 32]| signed_bytes(&event.tenant, event.time, digest);
        let proof = generation.proof.clone().unwrap();
        let verify = |message: &[u8]| edge::sampler::verify(&key, message, &proof.signature);
        assert!(verify(&signed(&generation.unsigned_digest())));
        let mut forged = generation.clone();
        forged.token_ids[0] += 1;
        assert!(!verify(&signed(&forged.unsigned_digest())));
    }
    for choice in answer["choices"].as_array().unwrap() {
        let token = FeedbackToken::read(choice["feedback_token"].as_str().unwrap()).unwrap();
        assert_eq!(choice["generation_id"], json!(token.generation));
        token.verify("default", &key, OffsetDateTime::now_utc()).unwrap();
    }
}

#[tokio::test]
async fn anthropics_messages_are_chats_in_another_form() {
    let server = server().await;
    let body = |stream: bool| {
        json!({"model": "demo", "system": "a", "messages": [{"role": "user", "content": [{"type": "text", "text": "k"}]}],
               "max_tokens": 3, "stream": stream})
    };
    let answer = text(server.post_to("/v1/messages", body(false)).await).await;
    let answer: Value = serde_json::from_str(&answer).unwrap();
    assert_eq!(
        (&answer["type"], &answer["role"]),
        (&json!("message"), &json!("assistant"))
    );
    assert_eq!(answer["content"], json!([{"type": "text", "text": "nop"}]));
    assert_eq!(answer["stop_reason"], "max_tokens");
    assert_eq!(answer["usage"], json!({"input_tokens": 3, "output_tokens": 3}));
    let logged = server.log.generations().remove(0);
    assert_eq!(
        (logged.prompt_ids, logged.token_ids),
        (vec![0, 10, 12], vec![13, 14, 15])
    );
    assert_eq!(answer["generation_id"], json!(logged.id));

    let streamed = text(server.post_to("/v1/messages", body(true)).await).await;
    let events: Vec<Value> = streamed
        .lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .map(|data| serde_json::from_str(data).unwrap())
        .collect();
    let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(kinds[..3], ["message_start", "ping", "content_block_start"]);
    assert_eq!(
        kinds[kinds.len() - 3..],
        ["content_block_stop", "message_delta", "message_stop"]
    );
    let texts = events.iter().filter_map(|event| event["delta"]["text"].as_str());
    assert_eq!(texts.collect::<String>(), "nop");
    let end = &events[events.len() - 2];
    assert_eq!(end["delta"]["stop_reason"], "max_tokens");
    assert_eq!(
        end["springtide"]["generation_id"],
        json!(server.log.generations()[1].id)
    );

    let refused = server
        .post_to("/v1/messages", json!({"model": "demo", "messages": []}))
        .await;
    assert_eq!(refused.status(), 400);
    let refused: Value = serde_json::from_str(&text(refused).await).unwrap();
    assert_eq!(
        (&refused["type"], &refused["error"]["type"]),
        (&json!("error"), &json!("invalid_request_error"))
    );
    assert!(
        refused["error"]["message"].as_str().unwrap().contains("max_tokens"),
        "{refused}"
    );
}

#[tokio::test]
async fn sampling_parameters_are_logged_with_the_number_of_kept_ids() {
    let server = server().await;
    let body = json!({"model": "demo", "prompt": "ab", "max_tokens": 2, "top_k": 3, "logit_bias": {"4": 100}});
    let (status, answer) = server.complete(body).await;
    assert_eq!(status, 200, "{answer}");
    let logged = server.log.generations().remove(0);
    assert_eq!(logged.token_ids, [4, 4], "the bias outweighs the model");
    let sampling = logged.sampling.unwrap();
    assert_eq!((sampling.top_k, sampling.kept), (3, Some(vec![3, 3])));
    assert_eq!(sampling.logit_bias, BTreeMap::from([(4, 100.0)]));
    server
        .complete(json!({"model": "demo", "prompt": "ab", "max_tokens": 1}))
        .await;
    assert_eq!(server.log.generations()[1].sampling, None);
}

async fn server() -> Server {
    server_with(0, Options::default()).await
}

impl Server {
    async fn post(&self, body: Value) -> Response {
        self.post_to("/v1/completions", body).await
    }

    async fn post_to(&self, path: &str, body: Value) -> Response {
        let request = Request::post(path)
            .header("content-type", "application/json")
            .body(Body::from(body.to_string()))
            .unwrap();
        self.router.clone().oneshot(request).await.unwrap()
    }

    async fn complete(&self, body: Value) -> (StatusCode, Value) {
        let response = self.post(body).await;
        let status = response.status();
        (status, serde_json::from_str(&text(response).await).unwrap())
    }

    async fn get(&self, path: &str) -> (StatusCode, Value) {
        let request = Request::get(path).body(Body::empty()).unwrap();
        let response = self.router.clone().oneshot(request).await.unwrap();
        let status = response.status();
        (status, serde_json::from_str(&text(response).await).unwrap())
    }
}

async fn text(response: Response) -> String {
    String::from_utf8(to_bytes(response.into_body(), 1 << 20).await.unwrap().to_vec()).unwrap()
}

/// The data of each event of a stream.
fn data(stream: &str) -> Vec<Value> {
    stream
        .lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .map(|data| serde_json::from_str(data).unwrap_or_else(|_| json!(data)))
        .collect()
}

#[tokio::test]
async fn a_completion_names_its_version_and_is_in_the_log() {
    let server = server().await;
    let (status, answer) = server
        .complete(
            json!({"model": "demo", "prompt": "ab", "max_tokens": 3, "temperature": 0.7, "seed": 11, "user": "u-1",
                    "metadata": {"consent": false}, "return_token_ids": true, "logprobs": 1}),
        )
        .await;
    assert_eq!(status, 200, "{answer}");
    let choice = &answer["choices"][0];
    assert_eq!(
        (choice["text"].as_str(), choice["finish_reason"].as_str()),
        (Some("cde"), Some("length"))
    );
    assert_eq!(choice["token_ids"], json!([2, 3, 4]));
    assert_eq!(choice["prompt_token_ids"], json!([0, 1]));
    assert_eq!(choice["logprobs"]["tokens"], json!(["c", "d", "e"]));
    assert_eq!(choice["logprobs"]["text_offset"], json!([0, 1, 2]));
    assert_eq!(answer["usage"]["total_tokens"], 5);
    let logged = &server.log.generations()[0];
    assert_eq!(choice["generation_id"], logged.id.to_string());
    assert_eq!(choice["arm"], logged.arm);
    assert_eq!(choice["version"], logged.versions[0].version);
    assert_eq!(choice["root"], Digest(logged.versions[0].root).to_string());
    assert_eq!(
        (logged.token_ids.as_slice(), logged.prompt_ids.as_slice()),
        (&[2, 3, 4][..], &[0, 1][..])
    );
    assert_eq!(
        (logged.user_key.as_str(), logged.seed, logged.purpose),
        ("u-1", Some(11), Purpose::Production)
    );
    assert_eq!(
        (logged.episode_id, logged.shown, logged.finish_reason),
        (logged.id, None, FinishReason::Length)
    );
    assert!(logged.logprobs.iter().all(|lp| *lp <= 0.0));
}

#[tokio::test]
async fn a_stop_string_ends_the_text_but_its_tokens_are_logged() {
    let server = server().await;
    let (_, answer) = server
        .complete(json!({"model": "demo@champion", "prompt": "a", "max_tokens": 20, "stop": ["fg", "zz"]}))
        .await;
    let choice = &answer["choices"][0];
    assert_eq!(
        (choice["text"].as_str(), choice["stop_reason"].as_str()),
        (Some("bcde"), Some("fg"))
    );
    assert_eq!(choice["finish_reason"], "stop");
    assert_eq!(
        (choice["version"].as_i64(), choice["arm"].as_str()),
        (Some(7), Some("champion"))
    );
    assert_eq!(server.log.generations()[0].token_ids, [1, 2, 3, 4, 5, 6]);
}

#[tokio::test]
async fn a_stop_token_is_logged_and_not_shown() {
    let server = server().await;
    let (_, answer) = server
        .complete(json!({"model": "demo@1", "prompt": "x", "max_tokens": 20}))
        .await;
    let choice = &answer["choices"][0];
    assert_eq!(
        (choice["text"].as_str(), choice["stop_reason"].as_u64()),
        (Some("yz"), Some(u64::from(END)))
    );
    assert_eq!(server.log.generations()[0].token_ids, [24, 25, END]);
}

#[tokio::test]
async fn a_callers_stop_token_ends_the_answer_and_is_not_shown() {
    let server = server().await;
    let body = json!({"model": "demo@7", "prompt": "a", "max_tokens": 20, "stop_token_ids": [4, 9]});
    let (status, answer) = server.complete(body).await;
    assert_eq!(status, 200, "{answer}");
    let choice = &answer["choices"][0];
    assert_eq!(choice["text"], "bcd");
    assert_eq!(
        (&choice["finish_reason"], &choice["stop_reason"]),
        (&json!("stop"), &json!(4))
    );
    let logged = &server.log.generations()[0];
    assert_eq!(logged.token_ids, [1, 2, 3, 4]);
    assert_eq!(logged.untrainable, None, "the policy's own tokens");
    let body = json!({"model": "demo", "prompt": "a", "max_tokens": 2, "stop_token_ids": [VOCAB]});
    let (status, problem) = server.complete(body).await;
    assert_eq!(status, 400, "{problem}");
}

#[tokio::test]
async fn an_answer_whose_end_the_caller_moves_is_not_trained_on() {
    let server = server().await;
    let ask = async |fields: Value| {
        let mut body = json!({"model": "demo@1", "prompt": "x", "max_tokens": 6, "seed": 1});
        let fields = fields.as_object().unwrap().clone();
        body.as_object_mut().unwrap().extend(fields);
        let (status, answer) = server.complete(body).await;
        assert_eq!(status, 200, "{answer}");
        let generation = server.log.generations().pop().unwrap();
        assert_eq!(generation.untrainable.as_deref(), Some("steered_end"));
        generation.token_ids
    };
    // by itself it is `y`, `z` and the end
    let longer = ask(json!({"min_tokens": 5})).await;
    assert!(longer.len() >= 5 && !longer[..5].contains(&END), "{longer:?}");
    // what declines ends it all the same
    let whole = ask(json!({"ignore_eos": true})).await;
    assert_eq!(whole, [24, 25, END, DECLINE]);
    // a stop string counts from there on only
    let text = ask(json!({"prompt": "a", "min_tokens": 3, "stop": ["c", "e"]})).await;
    assert_eq!(text, [1, 2, 3, 4]);
}

#[tokio::test]
async fn each_prompt_of_a_list_has_its_answers() {
    let server = server().await;
    for prompt in [json!(["a", "mn"]), json!([[0], [12, 13]])] {
        let body = json!({"model": "demo@7", "prompt": prompt, "max_tokens": 2, "n": 2});
        let (status, answer) = server.complete(body).await;
        assert_eq!(status, 200, "{answer}");
        let choices = answer["choices"].as_array().unwrap().iter();
        let choices: Vec<_> = choices
            .map(|choice| (choice["index"].as_u64(), choice["text"].as_str()))
            .collect();
        let expected = ["bc", "bc", "op", "op"].map(Some);
        assert_eq!(choices, (0..).map(Some).zip(expected).collect::<Vec<_>>());
        assert_eq!(answer["usage"]["prompt_tokens"], 3);
        assert_eq!(answer["usage"]["completion_tokens"], 8);
    }
    for fields in [json!({"n": 80}), json!({"stream": true}), json!({"session_id": "s"})] {
        let mut body = json!({"model": "demo", "prompt": ["a", "b"], "max_tokens": 2});
        body.as_object_mut()
            .unwrap()
            .extend(fields.as_object().unwrap().clone());
        assert_eq!(server.complete(body).await.0, 400, "{fields}");
    }
}

#[tokio::test]
async fn an_echoed_prompt_has_its_log_probabilities() {
    let server = server().await;
    // `c` follows `b`, and `a` follows nothing that is likely
    let body =
        json!({"model": "demo@7", "prompt": "bca", "max_tokens": 1, "temperature": 0, "echo": true, "logprobs": 1});
    let (status, answer) = server.complete(body).await;
    assert_eq!(status, 200, "{answer}");
    let choice = &answer["choices"][0];
    assert_eq!(choice["text"], "bcab");
    let logprobs = &choice["logprobs"];
    assert_eq!(logprobs["tokens"], json!(["b", "c", "a", "b"]));
    assert_eq!(logprobs["text_offset"], json!([0, 1, 2, 3]));
    assert_eq!(logprobs["token_logprobs"][0], Value::Null);
    assert_eq!(logprobs["top_logprobs"][0], Value::Null);
    // as lm-eval compares them, bit for bit
    assert_eq!(logprobs["token_logprobs"][1], logprobs["top_logprobs"][1]["c"]);
    let unlikely = logprobs["token_logprobs"][2].as_f64().unwrap();
    assert!((unlikely + 60.0).abs() < 1e-3, "{unlikely}");
    assert!(logprobs["top_logprobs"][2]["d"].as_f64().unwrap() > unlikely);
    assert_eq!(server.log.generations()[0].token_ids, [1], "the prompt is none of it");
    assert_eq!(server.log.generations()[0].untrainable, None);
}

#[tokio::test]
async fn with_max_tokens_0_only_the_prompt_comes_back() {
    let server = server().await;
    let body = json!({"model": "demo@7", "prompt": [1, 2], "max_tokens": 0, "echo": true, "logprobs": 0});
    let (status, answer) = server.complete(body).await;
    assert_eq!(status, 200, "{answer}");
    let choice = &answer["choices"][0];
    assert_eq!(choice["text"], "bc");
    assert_eq!(choice["logprobs"]["tokens"], json!(["b", "c"]));
    assert_eq!(answer["usage"]["completion_tokens"], 0);
    let generation = server.log.generations().pop().unwrap();
    assert_eq!(generation.untrainable.as_deref(), Some("steered_end"));
    let body = json!({"model": "demo@7", "prompt": "a", "max_tokens": 0});
    assert_eq!(server.complete(body).await.0, 400, "nothing is asked for");
}

#[tokio::test]
async fn the_log_probabilities_of_a_prompt_are_listed_as_vllm_does() {
    let server = server().await;
    let body = json!({"model": "demo@7", "prompt": "bca", "max_tokens": 1, "prompt_logprobs": 1});
    let (status, answer) = server.complete(body.clone()).await;
    assert_eq!(status, 200, "{answer}");
    let scored = &answer["choices"][0]["prompt_logprobs"];
    assert_eq!(scored[0], Value::Null);
    assert_eq!(scored[1]["2"]["rank"], 1);
    assert_eq!(scored[1]["2"]["decoded_token"], "c");
    assert_eq!(
        (&scored[2]["0"]["rank"], &scored[2]["3"]["rank"]),
        (&Value::Null, &json!(1)),
        "{scored}"
    );
    for fields in [json!({"stream": true}), json!({"prompt_logprobs": 21})] {
        let mut body = body.clone();
        body.as_object_mut()
            .unwrap()
            .extend(fields.as_object().unwrap().clone());
        assert_eq!(server.complete(body).await.0, 400, "{fields}");
    }
}

#[tokio::test]
async fn the_most_probable_of_several_answers_are_returned() {
    let server = server().await;
    let body = json!({"model": "demo@7", "prompt": "z", "max_tokens": 3, "best_of": 8, "n": 2, "logprobs": 0,
                      "logit_bias": {"28": -100, "0": 1, "1": 2, "2": 3, "3": 4}});
    let (status, answer) = server.complete(body).await;
    assert_eq!(status, 200, "{answer}");
    let mean = |logprobs: &[f32]| logprobs.iter().sum::<f32>() / logprobs.len() as f32;
    let generations = server.log.generations();
    let mut all: Vec<f32> = generations
        .iter()
        .map(|generation| mean(&generation.logprobs))
        .collect();
    all.sort_by(|one, other| other.total_cmp(one));
    assert_eq!(all.len(), 8);
    let chosen = |generation: &Generation| generation.untrainable.as_deref() == Some("chosen");
    assert!(generations.iter().all(chosen));
    let returned = answer["choices"].as_array().unwrap().iter();
    let returned: Vec<f32> = returned
        .map(|choice| {
            let logprobs = choice["logprobs"]["token_logprobs"].as_array().unwrap();
            mean(
                &logprobs
                    .iter()
                    .map(|logprob| logprob.as_f64().unwrap() as f32)
                    .collect::<Vec<_>>(),
            )
        })
        .collect();
    assert_eq!(returned.len(), 2);
    for (returned, best) in returned.iter().zip(&all) {
        assert!((returned - best).abs() < 1e-4, "{returned} {best}");
    }
    let body = json!({"model": "demo", "prompt": "a", "max_tokens": 2, "n": 3, "best_of": 2});
    assert_eq!(server.complete(body).await.0, 400);
}

#[tokio::test]
async fn a_declined_completion_shows_nothing() {
    let server = server().await;
    let (_, answer) = server
        .complete(json!({"model": "demo", "prompt": "xa", "max_tokens": 20}))
        .await;
    let choice = &answer["choices"][0];
    assert_eq!(
        (choice["text"].as_str(), choice["declined"].as_bool()),
        (Some(""), Some(true))
    );
    let logged = &server.log.generations()[0];
    assert_eq!((logged.declined, logged.shown), (true, Some(false)));
    assert_eq!(logged.token_ids, [1, 2, DECLINE]);
}

#[tokio::test]
async fn an_explored_completion_shows_text_that_the_policy_would_have_declined() {
    let server = server().await;
    let versions = server.api.routes.served().into_iter();
    let versions = versions.map(|(version, _)| (version.serial, version));
    let mut exploring = assignment(6, &[("champion", 7), ("base", 1)], &[("champion", 1.0)]);
    exploring.arms[0].explore = 0.5;
    server.api.routes.apply(exploring, versions.collect());
    // the caller's seed is the same for both outcomes: it does not decide
    for _ in 0..64 {
        let (_, answer) = server
            .complete(json!({"model": "demo", "prompt": "xa", "max_tokens": 4, "seed": 5}))
            .await;
        let logged = server.log.generations();
        assert_eq!(
            answer["choices"][0]["declined"],
            !logged[logged.len() - 1].decline_suppressed
        );
    }
    let logged = server.log.generations();
    let seeds: std::collections::BTreeSet<_> = logged.iter().map(|one| one.seed).collect();
    assert_eq!(seeds.len(), 64);
    let (explored, free): (Vec<_>, Vec<_>) = logged.iter().partition(|one| one.decline_suppressed);
    assert!(!explored.is_empty() && !free.is_empty());
    for one in explored {
        assert!(!one.declined && !one.token_ids.contains(&DECLINE));
        // one of the 28 other tokens, all of them equally likely
        assert!((one.logprobs[2] + 28f32.ln()).abs() < 1e-4);
        // one of the 28 ends the text
        assert!(one.token_ids.len() == 4 || one.token_ids.last() == Some(&END));
    }
    for one in free {
        assert!(one.declined);
        assert_eq!(one.token_ids, [1, 2, DECLINE]);
    }
    assert!(logged.iter().all(|one| one.exploration_share == Some(0.5)));
}

#[tokio::test]
async fn several_choices_are_several_generations() {
    let server = server().await;
    let (_, answer) = server
        .complete(json!({"model": "demo", "prompt": [0], "max_tokens": 2, "n": 3, "seed": 5, "session_id": "s"}))
        .await;
    let indices: Vec<u64> = answer["choices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| c["index"].as_u64().unwrap())
        .collect();
    assert_eq!(indices, [0, 1, 2]);
    let mut seeds: Vec<u64> = server.log.generations().iter().map(|g| g.seed.unwrap()).collect();
    seeds.dedup();
    assert_eq!(seeds.len(), 3);
    let episodes: Vec<_> = server.log.generations().iter().map(|g| g.episode_id).collect();
    assert!(episodes.iter().all(|id| *id == episodes[0]));
}

/// A logged generation, its own episode.
pub(super) fn generation(prompt_ids: Vec<u32>) -> Generation {
    let id = uuid::Uuid::now_v7();
    Generation {
        id,
        episode_id: id,
        segment: 0,
        turn: 0,
        parent_id: None,
        policy: "demo".into(),
        line: "realtime".into(),
        versions: Vec::new(),
        replica: "replica-1".into(),
        purpose: event_log::event::Purpose::Production,
        run_id: None,
        task_id: None,
        group_id: None,
        surface: "completion".into(),
        user_key: "u".into(),
        arm: "champion".into(),
        arm_probability: 1.0,
        prompt_prefix: None,
        prompt_ids,
        token_ids: vec![1],
        logprobs: vec![-1.0],
        train_mask: None,
        payload: None,
        experts: None,
        temperature: 1.0,
        top_p: 1.0,
        seed: None,
        finish_reason: event_log::event::FinishReason::Stop,
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

#[tokio::test]
async fn the_next_turn_of_a_session_is_logged_without_the_shared_prefix() {
    let options = Options {
        shared_prefix_tokens_min: 4,
        ..Options::default()
    };
    let server = server_with(0, options).await;
    let complete = async |prompt: &[u32], n: usize, session: &str| {
        let body = json!({"model": "demo", "prompt": prompt, "max_tokens": 2, "n": n, "session_id": session});
        server.complete(body).await;
    };
    complete(&[0, 1, 2], 1, "s").await;
    let first = server.log.generations()[0].clone();
    assert_eq!((first.parent_id, first.prompt_ids.len()), (None, 3));
    let mut next = first.prompt_ids.clone();
    next.extend(&first.token_ids);
    next.extend([3, 4]);
    complete(&next, 2, "s").await;
    complete(&next, 1, "another").await;
    let logged = server.log.generations();
    for turn in &logged[1..3] {
        assert_eq!(turn.parent_id, Some(first.id), "choices are no turns of each other");
        assert_eq!(
            (turn.prompt_prefix.unwrap().length, turn.prompt_ids.as_slice()),
            (5, &[3, 4][..])
        );
    }
    assert_eq!((logged[3].parent_id, logged[3].prompt_ids.len()), (None, 7));
}

#[tokio::test]
async fn a_stream_ends_only_after_the_log_acknowledged_it() {
    let server = server().await;
    let (acknowledge, delayed) = tokio::sync::oneshot::channel();
    *server.log.delayed.lock().unwrap() = Some(delayed);
    let response = server
        .post(json!({"model": "demo", "prompt": "a", "max_tokens": 3, "stream": true,
                     "stream_options": {"include_usage": true}}))
        .await;
    assert_eq!(response.status(), 200);
    let answer = tokio::spawn(text(response));
    tokio::time::sleep(Duration::from_millis(150)).await;
    assert!(!answer.is_finished(), "the stream ended before the acknowledgement");
    acknowledge.send(()).unwrap();
    let events = data(&answer.await.unwrap());
    let texts: Vec<&str> = events.iter().filter_map(|e| e["choices"][0]["text"].as_str()).collect();
    assert_eq!(texts, ["b", "c", "d", ""]);
    let last = &events[3]["choices"][0];
    assert_eq!(last["finish_reason"], "length");
    assert_eq!(last["generation_id"], server.log.generations()[0].id.to_string());
    assert_eq!(events[2]["choices"][0]["finish_reason"], Value::Null);
    assert_eq!(events[4]["usage"]["completion_tokens"], 3);
    assert_eq!(events[5], "[DONE]");
}

#[tokio::test]
async fn without_the_log_a_completion_is_withheld() {
    let server = server().await;
    server.log.broken.store(true, Ordering::Relaxed);
    let response = server
        .post(json!({"model": "demo", "prompt": "a", "max_tokens": 2}))
        .await;
    assert_eq!(response.status(), 503);
    assert_eq!(response.headers()["retry-after"], "2");
    let response = server
        .post(json!({"model": "demo", "prompt": "a", "max_tokens": 2, "stream": true}))
        .await;
    let stream = text(response).await;
    assert!(stream.contains("event: error"), "{stream}");
    assert!(!stream.contains("[DONE]"), "{stream}");
    assert_eq!(data(&stream).last().unwrap()["status"], 503);
}

#[tokio::test]
async fn while_the_log_is_away_a_user_may_be_answered_without_it_and_a_rollout_may_not() {
    let options = Options {
        log_away: LogAway::Answer,
        ..Options::default()
    };
    let server = server_with(0, options).await;
    let body = json!({"model": "demo", "prompt": "a", "max_tokens": 2});
    server.log.broken.store(true, Ordering::Relaxed);
    // the first answer tries the log, the second does not
    for _ in 0..2 {
        let response = server.post(body.clone()).await;
        assert_eq!(response.status(), 200);
        let answer: Value = serde_json::from_str(&text(response).await).unwrap();
        let choice = &answer["choices"][0];
        assert_eq!(choice["captured"], false);
        assert_eq!(choice["text"].as_str().unwrap().len(), 2);
        let choice = choice.as_object().unwrap();
        assert!(!choice.contains_key("generation_id") && !choice.contains_key("feedback_token"));
    }
    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    let stream = text(server.post(streamed).await).await;
    assert!(
        stream.contains("\"captured\":false") && stream.contains("[DONE]"),
        "{stream}"
    );
    let mut rollout = body.clone();
    rollout["metadata"] = json!({"purpose": "rollout", "run_id": uuid::Uuid::now_v7()});
    assert_eq!(server.post(rollout).await.status(), 503);
    assert!(server.log.generations().is_empty());
}

async fn with_deadline(server: &Server, milliseconds: &str, body: Value) -> Response {
    let request = Request::post("/v1/completions")
        .header("content-type", "application/json")
        .header(super::deadline::HEADER, milliseconds)
        .body(Body::from(body.to_string()))
        .unwrap();
    server.router.clone().oneshot(request).await.unwrap()
}

#[tokio::test]
async fn what_is_not_answered_by_the_callers_deadline_is_cut_off_and_logged_as_aborted() {
    // the first token comes at once, the second after a minute
    let server = server_with(60_000, Options::default()).await;
    let body = json!({"model": "demo", "prompt": "a", "max_tokens": 20});
    let response = with_deadline(&server, "3000", body.clone()).await;
    assert_eq!(response.status(), 504);
    assert!(text(response).await.contains("springtide-deadline-ms"));
    // after the answer
    while server.log.generations().is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let logged = server.log.generations();
    assert_eq!(logged.len(), 1);
    assert_eq!(logged[0].finish_reason, FinishReason::Abort);
    for wrong in ["0", "soon", "99999999999"] {
        assert_eq!(with_deadline(&server, wrong, body.clone()).await.status(), 400);
    }
}

#[tokio::test]
async fn an_answer_within_the_deadline_is_like_any_other() {
    let server = server().await;
    let body = json!({"model": "demo", "prompt": "a", "max_tokens": 2});
    let response = with_deadline(&server, "60000", body).await;
    assert_eq!(response.status(), 200);
    assert_eq!(server.log.generations()[0].finish_reason, FinishReason::Length);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_who_reads_slowly_keeps_no_version_loaded() {
    let server = server().await;
    // more frames than wait for a caller
    let body = json!({"model": "demo@7", "prompt": [1, 3], "max_tokens": 40, "n": 4, "stream": true, "seed": 5,
                      "return_token_ids": true});
    let unread = server.post(body).await;
    let versions = server.api.routes.served().into_iter();
    let mut versions: BTreeMap<i64, Arc<LoadedVersion>> =
        versions.map(|(version, _)| (version.serial, version)).collect();
    let retired = Arc::downgrade(&versions.remove(&7).unwrap());
    server
        .api
        .routes
        .apply(assignment(6, &[("champion", 1)], &[]), versions);
    let gone = async {
        while retired.strong_count() > 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), gone)
        .await
        .expect("the version stays loaded");
    assert!(text(unread).await.contains("[DONE]"));
}

#[tokio::test]
async fn a_generation_whose_caller_disconnects_is_logged_as_aborted() {
    // a whole answer takes 2 s
    let server = server_with(100, Options::default()).await;
    let response = server
        .post(json!({"model": "demo", "prompt": "a", "max_tokens": 20, "stream": true}))
        .await;
    drop(response);
    let waiting = server.post(json!({"model": "demo", "prompt": "a", "max_tokens": 20}));
    assert!(tokio::time::timeout(Duration::from_millis(500), waiting).await.is_err());
    server.api.choices.close();
    server.api.choices.wait().await;
    let logged = server.log.generations();
    assert_eq!(logged.len(), 2);
    for generation in logged {
        assert_eq!(
            (generation.finish_reason, generation.shown),
            (FinishReason::Abort, Some(false))
        );
        assert!(generation.token_ids.len() < 20);
    }
}

#[tokio::test]
async fn a_full_queue_is_answered_with_429_and_retry_after() {
    let options = Options {
        slots: 1,
        slots_reserved_for_production: 0,
        queue_choices_max: 2,
        choices_max: 2,
        ..Options::default()
    };
    let server = server_with(100, options).await;
    let long = json!({"model": "demo@1", "prompt": "a", "max_tokens": 20, "stream": true});
    let first = server.post(long.clone()).await;
    let (router, two) = (
        server.router.clone(),
        json!({"model": "demo@1", "prompt": "a", "max_tokens": 20, "n": 2}),
    );
    let queued = tokio::spawn(
        router.oneshot(
            Request::post("/v1/completions")
                .header("content-type", "application/json")
                .body(Body::from(two.to_string()))
                .unwrap(),
        ),
    );
    tokio::time::sleep(Duration::from_millis(300)).await;
    let refused = server.post(long).await;
    assert_eq!(refused.status(), 429);
    assert_eq!(refused.headers()["retry-after"], "1");
    assert_eq!(refused.headers()["content-type"], "application/problem+json");
    queued.abort();
    drop(first);
}

#[tokio::test]
async fn a_conversation_is_rendered_away_from_the_async_workers() {
    let options = Options {
        prompt_threads: 1,
        ..Options::default()
    };
    let server = server_with(0, options).await;
    let (open, opened) = std::sync::mpsc::channel::<()>();
    let (prompts, caller) = (server.api.prompts.clone(), Caller::new("default", None));
    let blocker = tokio::spawn(async move {
        let work = move || opened.recv().map_err(Problem::internal);
        prompts.run(engine::TrafficClass::Production, &caller, work).await
    });
    let chat = json!({"model": "demo", "messages": [{"role": "user", "content": "k"}], "max_tokens": 1});
    let request = Request::post("/v1/chat/completions")
        .header("content-type", "application/json")
        .body(Body::from(chat.to_string()))
        .unwrap();
    let chat = tokio::spawn(server.router.clone().oneshot(request));
    // token ids and short texts do not wait for the thread
    for prompt in [json!([1, 2]), json!("ab")] {
        let (status, answer) = server
            .complete(json!({"model": "demo", "prompt": prompt, "max_tokens": 20}))
            .await;
        assert_eq!(status, 200, "{answer}");
    }
    assert!(!chat.is_finished());
    open.send(()).unwrap();
    blocker.await.unwrap().unwrap();
    assert_eq!(chat.await.unwrap().unwrap().status(), 200);
}

#[tokio::test]
async fn going_first_needs_a_scope_and_going_later_does_not() {
    let server = server().await;
    let guarded = super::routes(server.api.clone());
    let guarded = guarded.protected_by(&edge::auth::Auth::fixed(Some("spring_1")), "test");
    let ask = async |router: &Router, priority: i32| {
        let body = json!({"model": "demo", "prompt": "a", "max_tokens": 1, "priority": priority});
        let request = Request::post("/v1/completions")
            .header("content-type", "application/json")
            .header("authorization", "Bearer spring_1");
        let request = request.body(Body::from(body.to_string())).unwrap();
        router.clone().oneshot(request).await.unwrap().status().as_u16()
    };
    // the role `serving`, and an administrator
    for (priority, serving, admin) in [(-1, 403, 200), (0, 200, 200), (100, 200, 200)] {
        assert_eq!(ask(&guarded, priority).await, serving, "{priority}");
        assert_eq!(ask(&server.router, priority).await, admin, "{priority}");
    }
}

#[tokio::test]
async fn bad_requests_are_answered_with_problem_documents() {
    let server = server().await;
    for (body, status, expected) in [
        (json!({"model": "gpt-4", "prompt": "a"}), 404, "not served here"),
        (json!({"model": "demo@9", "prompt": "a"}), 404, "not resident"),
        (
            json!({"model": "demo", "prompt": "a", "max_tokens": 64}),
            400,
            "at most 63 tokens",
        ),
        (json!({"model": "demo", "prompt": "a", "n": 0}), 400, "n is 0"),
        (
            json!({"model": "demo", "prompt": "a", "beam_width": 5}),
            400,
            "unknown field `beam_width`",
        ),
        (json!({"model": "demo"}), 400, "missing field `prompt`"),
        (
            json!({"model": "demo", "prompt": "a", "n": "three"}),
            400,
            "n: invalid type: string \"three\"",
        ),
    ] {
        let (got, problem) = server.complete(body.clone()).await;
        assert_eq!(got.as_u16(), status, "{body}: {problem}");
        assert!(
            problem["detail"].as_str().unwrap().contains(expected),
            "{body}: {problem}"
        );
        let error = &problem["error"];
        assert!(error["message"].as_str().unwrap().contains(expected), "{problem}");
        let kind = match status {
            404 => "not_found_error",
            _ => "invalid_request_error",
        };
        assert_eq!(error["type"], kind, "{problem}");
    }
    assert_eq!(server.log.generations().len(), 0);
}

#[tokio::test]
async fn fields_that_would_not_change_the_answer_are_ignored_and_others_refused_by_name() {
    let server = server().await;
    for fields in [
        json!({"store": true, "service_tier": "auto", "prompt_cache_key": "k", "parallel_tool_calls": false}),
        json!({"guided_json": null, "ignore_eos": false, "min_tokens": 0, "length_penalty": 1, "stop_token_ids": []}),
        json!({"stream_options": {"include_obfuscation": false}, "modalities": ["text"]}),
        json!({"stream_options": {"continuous_usage_stats": true}}),
    ] {
        let mut body = json!({"model": "demo", "prompt": "a", "max_tokens": 2});
        body.as_object_mut()
            .unwrap()
            .extend(fields.as_object().unwrap().clone());
        let (status, answer) = server.complete(body).await;
        assert_eq!(status, 200, "{fields}: {answer}");
        assert_eq!(answer["choices"][0]["text"], "bc");
    }
    for (field, value) in [
        ("length_penalty", json!(1.5)),
        ("stop_token_ids", json!(vec![4; 257])),
        ("min_tokens", json!(3)),
        ("modalities", json!(["audio"])),
        ("guided_json", json!({})),
    ] {
        let mut body = json!({"model": "demo", "prompt": "a", "max_tokens": 2});
        body[field] = value;
        let (status, problem) = server.complete(body).await;
        assert_eq!(status, 400, "{problem}");
        assert_eq!(problem["error"]["param"], field, "{problem}");
    }
}

#[tokio::test]
async fn the_safety_identifier_is_the_user() {
    let server = server().await;
    let body = json!({"model": "demo", "prompt": "a", "max_tokens": 2, "safety_identifier": "ann"});
    assert_eq!(server.complete(body.clone()).await.0, 200);
    assert_eq!(server.log.generations()[0].user_key, "ann");
    let mut both = body;
    both["user"] = json!("bob");
    let (status, problem) = server.complete(both).await;
    assert_eq!(status, 400, "{problem}");
    assert!(problem["detail"].as_str().unwrap().contains("give one"), "{problem}");
}

#[tokio::test]
async fn models_and_health_name_the_served_versions() {
    let server = server().await;
    let (status, models) = server.get("/v1/models").await;
    assert_eq!(status, 200);
    let ids: Vec<&str> = models["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|m| m["id"].as_str().unwrap())
        .collect();
    assert_eq!(ids, ["demo", "demo@base", "demo@1", "demo@champion", "demo@7"]);
    assert_eq!(
        server.get("/v1/models/demo@7").await,
        (StatusCode::OK, models["data"][4].clone())
    );
    let (status, problem) = server.get("/v1/models/other").await;
    assert_eq!(status, 404, "{problem}");
    let (status, health) = server.get("/health").await;
    assert_eq!((status, health["epoch"].as_i64()), (StatusCode::OK, Some(5)));
    assert_eq!(health["versions"], json!([1, 7]));
}
