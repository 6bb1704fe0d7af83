//! Requests of every size around the limits of the HTTP API, with a key of another tenant. Each has
//! an answer that is known before.

use event_log::event::{Generation, VersionSpan};
use reqwest::Client;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::attacker::{Did, Place};
use crate::ingest_http::zstd_zeros;
use fixture::ingest::generation;

const EVENTS_MAX: usize = 500;
const NAME_BYTES_MAX: usize = 256;
const TEXT_BYTES_MAX: usize = 64 << 10;
const TAGS_MAX: usize = 32;
const FEEDBACK_BYTES_MAX: usize = 512 << 10;
const REQUEST_BYTES_MAX: usize = 8 << 20;
/// Of the largest event, its record's key and headers included.
const EVENT_BYTES_MAX: usize = 1_000_000;
const BOMB_BYTES: usize = 1 << 30;
const TOKENS: usize = 60_000;

/// A request, and the status that it must get.
struct Probe {
    path: &'static str,
    encoding: Option<&'static str>,
    body: Box<dyn Fn() -> Vec<u8>>,
    status: u16,
}

impl Probe {
    fn new(path: &'static str, status: u16, body: impl Fn() -> Vec<u8> + 'static) -> Self {
        Self {
            path,
            encoding: None,
            body: Box::new(body),
            status,
        }
    }

    /// Feedback with these members.
    fn feedback(status: u16, members: impl Fn() -> Value + 'static) -> Self {
        Self::new("/v1/feedback", status, move || {
            feedback(&members()).to_string().into_bytes()
        })
    }

    async fn send(&self, client: &Client, place: &Place, key: &str) -> (u16, Value) {
        send(client, place, key, self.path, self.encoding, (self.body)()).await
    }
}

/// The status of the answer, or of the only event of a batch.
async fn send(
    client: &Client,
    place: &Place,
    key: &str,
    path: &str,
    encoding: Option<&str>,
    body: Vec<u8>,
) -> (u16, Value) {
    let mut request = client
        .post(format!("http://{}{path}", place.ingest))
        .bearer_auth(key)
        .header("content-type", "application/json");
    if let Some(encoding) = encoding {
        request = request.header("content-encoding", encoding);
    }
    let answer = match request.body(body).send().await {
        Ok(answer) => answer,
        // The server refuses a body without reading it, which may break the connection.
        Err(error) => return (413, json!(error.to_string())),
    };
    let status = answer.status().as_u16();
    let answer: Value = answer.json().await.unwrap();
    match status {
        207 => (answer["results"][0]["status"].as_u64().unwrap() as u16, answer),
        status => (status, answer),
    }
}

fn feedback(members: &Value) -> Value {
    let mut body = json!({"generation_id": Uuid::now_v7(), "metric_name": "comment", "value": "x"});
    body.as_object_mut()
        .unwrap()
        .extend(members.as_object().unwrap().clone());
    body
}

fn item(kind: &str, body: &Value) -> Value {
    json!({"source": "tests/poison", "id": Uuid::now_v7(), "time": "2026-01-01T00:00:00Z", kind: body})
}

fn feedback_item() -> Value {
    let id = Uuid::now_v7();
    let body = json!({"feedback_id": id, "generation_id": id, "metric_name": "accept", "value": true});
    item("feedback", &body)
}

/// `text`, with spaces before its last byte until it has this length.
fn padded(text: &str, length: usize) -> Vec<u8> {
    let (start, end) = text.split_at(text.len() - 1);
    let spaces = " ".repeat(length - text.len());
    format!("{start}{spaces}{end}").into_bytes()
}

/// A batch of one generation, whose event is `bytes` long.
fn long_generation(bytes: usize) -> Vec<u8> {
    let of = |prompt: usize, user: usize| {
        let id = Uuid::now_v7();
        Generation {
            id,
            episode_id: id,
            versions: vec![VersionSpan {
                version: 3,
                root: [3; 32],
                tokens: TOKENS as u32,
            }],
            token_ids: vec![i32::MAX.cast_unsigned(); TOKENS],
            logprobs: vec![-0.5; TOKENS],
            train_mask: None,
            sampling: None,
            prompt_ids: vec![i32::MAX.cast_unsigned(); prompt],
            user_key: "u".repeat(user),
            ..generation()
        }
    };
    let length = |prompt, user| of(prompt, user).into_event("hostile", "tests/poison").encode().len();
    // Five bytes a token, and the rest by the user's key. From 128 bytes on, its length takes two.
    let mut prompt = 1 + (bytes - length(1, 128)) / 5;
    while length(prompt, 128) > bytes {
        prompt -= 1;
    }
    let user = 128 + bytes - length(prompt, 128);
    assert_eq!(length(prompt, user), bytes);
    let body = item("generation", &json!(of(prompt, user)));
    Value::Array(vec![body]).to_string().into_bytes()
}

fn probes() -> Vec<Probe> {
    let mut probes = Vec::new();
    for (more, accepted) in [(-1_isize, true), (0, true), (1, false)] {
        let of = move |limit: usize| limit.strict_add_signed(more);
        let status = |otherwise: u16| if accepted { 200 } else { otherwise };
        let events = of(EVENTS_MAX);
        probes.push(Probe::new("/v1/events:batch", status(413), move || {
            let items: Vec<Value> = (0..events).map(|_| feedback_item()).collect();
            Value::Array(items).to_string().into_bytes()
        }));
        let request = of(REQUEST_BYTES_MAX);
        probes.push(Probe::new("/v1/events:batch", status(413), move || {
            padded(&Value::Array(vec![feedback_item()]).to_string(), request)
        }));
        let body = of(FEEDBACK_BYTES_MAX);
        probes.push(Probe::new("/v1/feedback", status(413), move || {
            padded(&feedback(&json!({})).to_string(), body)
        }));
        let text = of(TEXT_BYTES_MAX);
        probes.push(Probe::feedback(status(400), move || json!({"value": "x".repeat(text)})));
        let name = of(NAME_BYTES_MAX);
        probes.push(Probe::feedback(
            status(400),
            move || json!({"source": "s".repeat(name)}),
        ));
        probes.push(Probe::feedback(
            status(400),
            move || json!({"tags": {"t".repeat(name): "x"}}),
        ));
        probes.push(Probe::feedback(
            status(400),
            move || json!({"tags": {"t": "x".repeat(name)}}),
        ));
        let tags = of(TAGS_MAX);
        probes.push(Probe::feedback(status(400), move || {
            let tags = (0..tags).map(|tag| (format!("tag-{tag}"), json!("x")));
            json!({"tags": tags.collect::<serde_json::Map<_, _>>()})
        }));
    }
    let garbage = [vec![0xff; 1000], vec![b'['; 100_000], b"{".to_vec(), Vec::new()];
    for body in garbage {
        probes.push(Probe::new("/v1/events:batch", 400, move || body.clone()));
    }
    let bomb = zstd_zeros(BOMB_BYTES);
    probes.push(Probe {
        encoding: Some("zstd"),
        ..Probe::new("/v1/events:batch", 413, move || bomb.clone())
    });
    probes
}

pub async fn run(place: Place, stop: CancellationToken) -> Did {
    let client = Client::new();
    let mut probes = probes();
    // The longest event depends on its headers. Found by halving, to the byte.
    let (mut fits, mut too_long) = (EVENT_BYTES_MAX - 1000, EVENT_BYTES_MAX);
    while too_long - fits > 1 {
        let middle = usize::midpoint(fits, too_long);
        let (status, answer) = send(
            &client,
            &place,
            &place.keys[0],
            "/v1/events:batch",
            None,
            long_generation(middle),
        )
        .await;
        match status {
            200 => fits = middle,
            413 => too_long = middle,
            status => panic!("{status} {answer}"),
        }
    }
    for (bytes, status) in [(fits - 1, 200), (fits, 200), (too_long, 413)] {
        probes.push(Probe::new("/v1/events:batch", status, move || long_generation(bytes)));
    }
    let mut sent = 0;
    // All of them at least once.
    for probe in probes.iter().cycle() {
        if stop.is_cancelled() && sent >= probes.len() {
            break;
        }
        let key = &place.keys[sent % place.keys.len()];
        let (status, answer) = probe.send(&client, &place, key).await;
        assert_eq!(status, probe.status, "probe {}: {answer}", sent % probes.len());
        sent += 1;
    }
    Did {
        text: format!(
            "{sent} requests of {} kinds, one after the other; the longest event has {fits} bytes",
            probes.len()
        ),
        ..Did::default()
    }
}
