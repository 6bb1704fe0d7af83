//! What is sent: texts where texts belong, and requests that every role refuses.

use edge::sampler::SamplerKey;
use event_log::ClientOptions;
use event_log::event::{self, Generation, Proof, Sampling, VersionSpan, signed_bytes};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord};
use serde_json::{Value, json};
use time::format_description::well_known::Rfc3339;
use uuid::Uuid;

use super::world::World;
use super::{PROMPT_IDS, SAMPLED_IDS, SOON, text};
use crate::up::Place;
use fixture::settings;

pub fn prompt() -> Value {
    json!({
        "model": "demo", "prompt": format!("// {} \nfn main() {{\n    let x = <|cut|>", text("prompt")),
        "max_tokens": 8, "user": text("user"), "session_id": text("session"), "surface": "completion",
        "stop": [text("stop")], "return_token_ids": true,
    })
}

pub fn feedback(generation: &str, metric: &str, value: impl Into<Value>) -> Value {
    json!({
        "id": Uuid::now_v7(), "generation_id": generation, "metric_name": metric, "value": value.into(),
        "tags": {"note": text("tag"), text("tag-name"): "x"},
    })
}

/// A request with something that is not as it should be: role, method, path, headers, body.
pub type Bad = (&'static str, &'static str, String, Vec<(&'static str, String)>, Vec<u8>);

/// Requests that every role refuses, each with a canary where the fault is.
pub fn bad_requests(world: &World) -> Vec<Bad> {
    let json = || vec![("content-type", "application/json".to_owned())];
    let with = |change: fn(&mut Value)| {
        let mut body = prompt();
        change(&mut body);
        body.to_string().into_bytes()
    };
    let unfinished = || format!("{{\"prompt\": \"{}", text("broken")).into_bytes();
    let long: String = (0..200).map(|index| format!("{} {index} ", text("long"))).collect();
    let completions = format!("{}/v1/completions", world.serve);
    let mut bad: Vec<Bad> = vec![
        ("serve", "POST", completions.clone(), json(), unfinished()),
        (
            "serve",
            "POST",
            completions.clone(),
            vec![("content-type", text("type"))],
            with(|_| ()),
        ),
        (
            "serve",
            "POST",
            completions.clone(),
            json(),
            with(|body| body["model"] = json!(text("model"))),
        ),
        (
            "serve",
            "POST",
            completions.clone(),
            json(),
            with(|body| body[text("field")] = json!(1)),
        ),
        (
            "serve",
            "POST",
            completions.clone(),
            json(),
            with(|body| body["max_tokens"] = json!(text("number"))),
        ),
        (
            "serve",
            "POST",
            completions.clone(),
            json(),
            with(|body| body["metadata"] = json!({text("meta"): "x"})),
        ),
        (
            "serve",
            "POST",
            completions.clone(),
            json(),
            with(|body| body["logit_bias"] = json!({text("bias"): 1})),
        ),
        (
            "serve",
            "POST",
            completions.clone(),
            json(),
            with(|body| body["stop"] = json!([text("stop"), 1])),
        ),
        (
            "serve",
            "POST",
            completions.clone(),
            json(),
            json!({"model": "demo", "prompt": long}).to_string().into(),
        ),
        (
            "serve",
            "POST",
            completions.clone(),
            json(),
            [&b"\xff\xfe"[..], text("utf8").as_bytes()].concat(),
        ),
        (
            "serve",
            "GET",
            format!("{}/v1/models?{}=1", world.serve, text("query")),
            vec![],
            vec![],
        ),
    ];
    let chat = json!({"model": "demo", "messages": [{"role": text("role"), "content": text("message")}]});
    let chat = chat.to_string().into_bytes();
    bad.push((
        "serve",
        "POST",
        format!("{}/v1/chat/completions", world.serve),
        json(),
        chat,
    ));
    let unknown = Uuid::now_v7().to_string();
    for (role, base) in [("ingest", &world.ingest), ("collector", &world.collector)] {
        let at = |path: &str| format!("{base}{path}");
        let mut wrong = feedback(&unknown, "accept", text("not-a-boolean"));
        bad.push((role, "POST", at("/v1/feedback"), json(), wrong.to_string().into()));
        wrong[text("field")] = json!(1);
        bad.push((role, "POST", at("/v1/feedback"), json(), wrong.to_string().into()));
        bad.push((role, "POST", at("/v1/feedback"), json(), unfinished()));
        let unknown_metric = feedback(&unknown, &text("metric"), true);
        bad.push((
            role,
            "POST",
            at("/v1/feedback"),
            json(),
            unknown_metric.to_string().into(),
        ));
        let token = json!({"token": text("token"), "metric_name": "accept", "value": true});
        bad.push((role, "POST", at("/v1/feedback"), json(), token.to_string().into()));
        let batch = json!([{"source": "app", "id": "1", "time": text("time"), "feedback": {"value": text("value")}}]);
        bad.push((role, "POST", at("/v1/events:batch"), json(), batch.to_string().into()));
        let cloud = vec![
            ("ce-specversion", "1.0".to_owned()),
            ("ce-type", text("kind")),
            ("ce-source", "app".to_owned()),
            ("ce-id", "1".to_owned()),
        ];
        bad.push((role, "POST", at("/v1/events"), cloud, text("cloud-event").into_bytes()));
        let mut generation = serde_json::to_value(fixture::ingest::generation()).unwrap();
        generation["user_key"] = json!(text("user"));
        generation["logprobs"] = json!([text("logprob")]);
        bad.push((
            role,
            "POST",
            at("/v1/generations"),
            json(),
            generation.to_string().into(),
        ));
        let wrong_digest = at(&format!("/v1/payloads/{}", "0".repeat(64)));
        bad.push((role, "PUT", wrong_digest, vec![], text("payload").into_bytes()));
        let retraction = json!({"feedback_id": text("feedback-id")});
        bad.push((
            role,
            "POST",
            at("/v1/retractions"),
            json(),
            retraction.to_string().into(),
        ));
        let end = json!({"episode_id": text("episode")});
        bad.push((role, "POST", at("/v1/episode-ends"), json(), end.to_string().into()));
    }
    let task = |id: &str| json!({"id": id, "prompt": text("task"), "answer": text("answer")});
    let runs = format!("{}/v1/runs", world.control);
    let twice = json!({"kind": "grpo", "tasks": [task("a"), task("a")]});
    let nothing = json!({"kind": "grpo", "tasks": [{"prompt": "", "answer": text("answer")}]});
    let lines = json!({"kind": "grpo", "tasks_jsonl": format!("{{\"prompt\": \"{}", text("jsonl"))});
    for body in [twice, nothing, lines] {
        bad.push(("control", "POST", runs.clone(), json(), body.to_string().into()));
    }
    bad.push(("control", "POST", runs.clone(), json(), unfinished()));
    bad.push((
        "control",
        "GET",
        format!("{}/v1/runs?status={}", world.control, text("status")),
        vec![],
        vec![],
    ));
    bad.push((
        "control",
        "GET",
        format!("{}/v1/ledger?{}=1", world.control, text("query")),
        vec![],
        vec![],
    ));
    bad.push((
        "relay",
        "GET",
        format!("{}/v1/store/{}", world.relay, text("path")),
        vec![],
        vec![],
    ));
    for (role, base) in [
        ("serve", &world.serve),
        ("ingest", &world.ingest),
        ("control", &world.control),
        ("relay", &world.relay),
        ("collector", &world.collector),
    ] {
        bad.push((
            role,
            "POST",
            format!("{base}/v1/{}", text("path")),
            json(),
            unfinished(),
        ));
        let headers = vec![
            ("traceparent", text("trace")),
            ("tracestate", text("trace-state")),
            ("baggage", format!("user={}", text("baggage"))),
            ("idempotency-key", text("idempotency")),
            ("x-forwarded-for", text("forwarded")),
            ("user-agent", text("agent")),
        ];
        bad.push((role, "GET", format!("{base}/health"), headers, vec![]));
    }
    bad
}

/// What everybody may ask, and what names the app's rows.
pub fn questions(world: &World, generation: &str, run: &str) -> Vec<String> {
    let control = &world.control;
    let mut urls: Vec<String> = [
        "ledger", "lines", "aliases", "versions", "releases", "replicas", "swaps", "runs",
    ]
    .iter()
    .map(|name| format!("{control}/v1/{name}"))
    .collect();
    urls.push(format!("{control}/v1/generations/{generation}/origin"));
    urls.push(format!("{control}/report"));
    urls.push(format!("{control}/trajectories/{generation}"));
    let pages = [
        "",
        "releases",
        "versions",
        "learning",
        "trajectories",
        "runs",
        "tide",
        "fleet",
        "feedback",
        "ledger",
        "keys",
    ];
    urls.extend(pages.map(|page| format!("{control}/{page}")));
    for part in ["", "/events", "/checkpoints"] {
        urls.push(format!("{control}/v1/runs/{run}{part}"));
    }
    urls.push(format!("{}/v1/models", world.serve));
    for base in [&world.serve, &world.ingest, control, &world.relay, &world.collector] {
        urls.push(format!("{base}/health"));
        urls.push(format!("{base}/openapi.json"));
    }
    urls
}

/// As the replica would sign it, but with log-probabilities that no model gives. Its id is that of
/// the body.
pub fn forged(place: &Place, choice: &Value) -> Value {
    let key = SamplerKey::load(&place.state("serve/sampler.key")).unwrap();
    let digits = choice["root"].as_str().unwrap();
    let root = std::array::from_fn(|index| u8::from_str_radix(&digits[2 * index..2 * index + 2], 16).unwrap());
    let span = VersionSpan {
        version: choice["version"].as_i64().unwrap(),
        root,
        tokens: u32::try_from(SAMPLED_IDS.len()).unwrap(),
    };
    let mut generation = Generation {
        versions: vec![span],
        user_key: text("user-of-forgery"),
        arm: "learner".into(), // the run looks at no other
        prompt_ids: PROMPT_IDS.to_vec(),
        token_ids: SAMPLED_IDS.to_vec(),
        logprobs: vec![-0.001; SAMPLED_IDS.len()],
        train_mask: None,
        seed: None,
        decline_suppressed: false,
        exploration_share: None,
        sampling: Some(Sampling::default()),
        ..fixture::ingest::generation()
    };
    let now = event::now();
    let message = signed_bytes("default", now, &generation.unsigned_digest());
    generation.proof = Some(Proof {
        sampler: key.id().to_owned(),
        signature: key.sign(&message),
    });
    let mut body = serde_json::to_value(&generation).unwrap();
    body["time"] = json!(now.format(&Rfc3339).unwrap());
    body
}

/// Records that the sink cannot store.
pub async fn poison(place: &Place) {
    let options = ClientOptions {
        brokers: format!("127.0.0.1:{}", place.ports[5]),
        topic_prefix: "springtide".to_owned(),
        librdkafka: settings(&place.state("kafka.properties")),
        ..ClientOptions::default()
    };
    let producer: FutureProducer = options.config(&[]).create().unwrap();
    let mut invalid = serde_json::to_value(fixture::ingest::accept(Uuid::now_v7(), true)).unwrap();
    invalid["feedback"]["value"] = json!(text("kafka-value"));
    invalid["feedback"]["tags"] = json!({"note": text("kafka-tag")});
    let (key, topic) = (text("kafka-key"), options.topics().feedback);
    let headers = || {
        let kind = Header {
            key: "content-type",
            value: Some("application/json"),
        };
        OwnedHeaders::new().insert(kind)
    };
    for value in [text("poison"), invalid.to_string()] {
        let record = FutureRecord::to(&topic).key(&key).payload(&value).headers(headers());
        producer.send(record, SOON).await.unwrap();
    }
}
