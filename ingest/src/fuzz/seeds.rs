//! The inputs that mutation starts from: the wire fixtures, the same events in every other form,
//! and typical requests.

use async_compression::tokio::write::{GzipEncoder, ZstdEncoder};
use event_log::event::proto;
use event_log::event::{Body, Event};
use prost::Message;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;

use crate::entry::spool;
use crate::options::Options;

const FIXTURES: [&str; 4] = [
    include_str!("../../log/fixtures/generation-v1.hex"),
    include_str!("../../log/fixtures/feedback-v1.hex"),
    include_str!("../../log/fixtures/retraction-v1.hex"),
    include_str!("../../log/fixtures/episode-end-v1.hex"),
];

pub(super) fn protobuf() -> Vec<Vec<u8>> {
    let bytes = |fixture: &str| hex::decode(fixture.split_whitespace().collect::<String>()).unwrap();
    FIXTURES.into_iter().map(bytes).collect()
}

fn events() -> impl Iterator<Item = Event> {
    protobuf().into_iter().map(|bytes| Event::decode(&bytes).unwrap())
}

pub(super) fn json() -> Vec<Vec<u8>> {
    let mut texts: Vec<_> = events().map(|event| serde_json::to_vec(&event).unwrap()).collect();
    let handwritten =
        br#"{"tenant":"default","source":"app","id":"1","time":"2026-02-03T04:05:06.789123+05:30","feedback":{
        "feedback_id":"019aa5e6-2f41-7abc-8def-0123456789ab","generation_id":"019aa5e6-2f40-7abc-8def-0123456789ab",
        "episode_id":null,"metric_name":"kept","value":0.30000000000000004,"tags":{"a":"\u00e9\ud83d\ude00"}}}"#;
    texts.push(handwritten.to_vec());
    texts
}

pub(super) fn announcement() -> Vec<Vec<u8>> {
    let announcement = proto::Announcement {
        policy: "demo".to_owned(),
        object_key: "policy/demo/version/0000000017.json".to_owned(),
        version: 17,
        epoch: 0,
    };
    vec![announcement.encode_to_vec()]
}

pub(super) fn dlq_record() -> Vec<Vec<u8>> {
    let head = |content_type: &str| {
        format!(
            "reason: invalid\ndetail: value: is missing\ntopic: springtide.feedback.v1\npartition: 3\noffset: 99\n\
             content-type: {content_type}\ntraceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\n\n"
        )
    };
    let of = |content_type: &str, values: Vec<Vec<u8>>| -> Vec<Vec<u8>> {
        let with_head = |value: Vec<u8>| [head(content_type).as_bytes(), &value].concat();
        values.into_iter().map(with_head).collect()
    };
    let mut records = of("application/protobuf", protobuf());
    records.extend(of("application/json; charset=utf-8", json()));
    records.push(b"springtide-replayed: 0/5\ntopic: t\npartition: 1\noffset: 7\nedited: true\n\n".to_vec());
    records
}

pub(super) fn dlq_position() -> Vec<Vec<u8>> {
    vec![b"0/17".to_vec(), b"2147483647/9223372036854775807".to_vec()]
}

/// The bodies of the fixtures' events, as JSON.
fn bodies() -> Vec<Value> {
    let body = |event: Event| match event.body {
        Body::Generation(generation) => serde_json::to_value(generation).unwrap(),
        Body::Feedback(feedback) => serde_json::to_value(feedback).unwrap(),
        Body::Retraction(retraction) => serde_json::to_value(retraction).unwrap(),
        Body::EpisodeEnd(end) => serde_json::to_value(end).unwrap(),
    };
    events().map(body).collect()
}

fn text(value: &Value) -> Vec<u8> {
    value.to_string().into_bytes()
}

fn feedback_requests() -> Vec<Value> {
    vec![
        json!({"generation_id": "019aa5e6-2f40-7abc-8def-0123456789ab", "metric_name": "accept", "value": true}),
        json!({"id": "019aa5e6-3f40-7abc-8def-0123456789ab", "episode_id": "019aa5e6-2f40-7abc-8def-0123456789ab",
            "metric_name": "stars", "value": 4.1, "tags": {"editor": "vim"}, "time": "2026-01-01T00:00:00.5Z",
            "source": "app", "dryrun": false}),
        json!({"generation_id": "019aa5e6-2f40-7abc-8def-0123456789ab", "metric_name": "comment", "value": "naïve \u{1f600}"}),
    ]
}

pub(super) fn feedback() -> Vec<Vec<u8>> {
    feedback_requests().iter().map(text).collect()
}

pub(super) fn generation() -> Vec<Vec<u8>> {
    let mut generation = bodies()[0].clone();
    let plain = text(&generation);
    generation["time"] = "2026-01-01T00:00:00Z".into();
    generation["source"] = "engine".into();
    vec![plain, text(&generation)]
}

pub(super) fn retraction() -> Vec<Vec<u8>> {
    let body = json!({"id": "019aa5e6-4f40-7abc-8def-0123456789ab", "feedback_id": "019aa5e6-3f40-7abc-8def-0123456789ab",
        "reason": "pressed by mistake", "time": "2026-01-01T00:00:00Z", "source": "app"});
    vec![text(&body), text(&json!({"feedback_id": body["feedback_id"]}))]
}

pub(super) fn episode_end() -> Vec<Vec<u8>> {
    let body = json!({"episode_id": "019aa5e6-2f40-7abc-8def-0123456789ab"});
    vec![text(&body)]
}

fn items() -> Vec<Value> {
    let item = |event: Event| {
        let mut item = serde_json::to_value(event).unwrap();
        item.as_object_mut().unwrap().remove("tenant");
        item
    };
    events().map(item).collect()
}

pub(super) fn batch() -> Vec<Vec<u8>> {
    let items = items();
    let mut batches: Vec<_> = items.iter().map(|item| text(&json!([item]))).collect();
    batches.push(text(&json!([items[1], items[2], items[1]])));
    batches
}

pub(super) fn cloudevent() -> Vec<Vec<u8>> {
    let request = |event: Event| text(&spool::Request::of(&event).unwrap().body);
    events().map(request).collect()
}

pub(super) fn cloudevent_batch() -> Vec<Vec<u8>> {
    let each = cloudevent().into_iter().map(|event| [&b"["[..], &event, b"]"].concat());
    let mut batches: Vec<_> = each.collect();
    batches.push([&b"["[..], &cloudevent()[1..].join(&b","[..]), b"]"].concat());
    batches
}

pub(super) fn request() -> Vec<Vec<u8>> {
    let json = "content-type: application/json\n";
    let mut requests = vec![
        "GET /health HTTP/1.1\nhost: x\n\n".to_owned(),
        format!(
            "POST /v1/feedback?dryrun=false\n{json}idempotency-key: \"click-1\"\n\n{}",
            feedback_requests()[0]
        ),
    ];
    let kinds = ["generation", "feedback", "retraction", "episode_end"];
    requests.extend(kinds.iter().zip(bodies()).map(|(kind, body)| {
        format!(
            "POST /v1/events\n{json}ce-specversion: 1.0\nce-type: springtide.{kind}.v1\nce-source: \"/app%20%E2%82%AC\"\n\
             ce-id: 1\nce-time: 2026-01-01T00:00:00+01:00\n\n{body}"
        )
    }));
    requests.into_iter().map(String::into_bytes).collect()
}

pub(super) fn compressed() -> Vec<Vec<u8>> {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let text = &batch()[1];
    let large = vec![b' '; 1 << 20];
    runtime.block_on(async {
        let mut seeds = vec![[&[0xF2][..], text].concat()];
        for text in [&text[..], &large] {
            let mut gzip = GzipEncoder::new(Vec::new());
            gzip.write_all(text).await.unwrap();
            gzip.shutdown().await.unwrap();
            seeds.push([&[0xF0][..], &gzip.into_inner()].concat());
            let mut zstd = ZstdEncoder::new(Vec::new());
            zstd.write_all(text).await.unwrap();
            zstd.shutdown().await.unwrap();
            seeds.push([&[0x75][..], &zstd.into_inner()].concat());
        }
        seeds
    })
}

pub(super) fn expression() -> Vec<Vec<u8>> {
    [
        "accept == null ? null : (accept ? 0.75 : -0.25)",
        "declined ? 0.0 : kept == null ? null : kept - 0.1 * double(all.retry.size())",
        "all.retry.filter(n, n > 2.0).size()",
        "shown != true && finish_reason in ['stop', 'length'] ? -1 : tokens / 2 % 7",
        "comment == null ? null : comment.contains('good') ? 1u : 0u",
        "turn.count.kept == 0 || !ended ? null : turn.mean.kept - 0.1 * double(turns)",
        "turn['last']['accept'] == true ? seconds : turn.all.retry.size() + segments",
        "has(all.kept) && all.kept.exists(x, x > 0.5) ? 1.0 : null",
    ]
    .map(|text| text.as_bytes().to_vec())
    .to_vec()
}

pub(super) fn options() -> Vec<Vec<u8>> {
    let plain = serde_json::to_value(Options::default()).unwrap();
    let scored = json!({
        "metric": [{"name": "kept", "type": "float", "level": "generation", "optimize": "max"}],
        "surface": [{"name": "chat", "horizon_seconds": 90.0, "reward": "kept == null ? null : kept", "close_on_feedback": true}],
    });
    vec![text(&plain), text(&scored)]
}

pub(super) fn segment() -> Vec<Vec<u8>> {
    let records = b"\x01\x03\x05hello\x00\x06spring";
    let damaged = [&records[..], &b"\x02\x20\x00\x03\x00\x03\x00\x00\x10\x00"[..]].concat();
    vec![records.to_vec(), damaged, spool::fuzz::segment_with(b"one")]
}

pub(super) fn folder() -> Vec<Vec<u8>> {
    let file = |name: &str, content: &[u8]| {
        let length = u8::try_from(name.len()).unwrap();
        let content_length = u16::try_from(content.len()).unwrap().to_le_bytes();
        [&[length][..], name.as_bytes(), &content_length, content].concat()
    };
    let segment = &spool::fuzz::segment_with(b"one")[1..];
    let first = file("00000000000000000007.spool", segment);
    let torn = file("00000000000000000008.spool", &segment[..20]);
    let damaged = file("00000000000000000006-40.damaged", b"xyz");
    vec![
        [&first[..], &torn, &damaged, &file("refused.jsonl", b"{}\n")].concat(),
        file("00000000000000000007.spool", &segment[..segment.len() - 1]),
    ]
}
