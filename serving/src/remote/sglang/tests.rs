//! The client with the shapes of SGLang 0.5.23's `managers/io_struct.py`, `managers/tokenizer_manager.py`
//! and `entrypoints/http_server.py`. They were read, not recorded.

use super::*;
use crate::engine::SampleEvent;
use crate::remote::client::{Client, Weights};
use crate::remote::recorded::{self, Exchange, events, request};
use crate::remote::sequence::{self, End};

/// What the client asks for [`request`]`(8)`.
fn asked() -> Value {
    json!({
        "input_ids": [5, 6, 7, 8],
        "sampling_params": {
            "max_new_tokens": 3, "temperature": 0.75, "top_p": 1.0, "top_k": 5, "min_p": 0.0, "repetition_penalty": 1.0,
            "presence_penalty": 0.0, "frequency_penalty": 0.0, "stop_token_ids": [1], "ignore_eos": false,
            "logit_bias": {"9": -100.0},
        },
        "stream": true, "return_logprob": true, "top_logprobs_num": 2, "cache_salt": "tenant-default",
        "return_sampling_mask": true,
    })
}

/// An event of tokens with ids from `first`, of which this event and those before have `total`.
fn event(first: usize, count: usize, total: usize, finish: Option<&str>) -> Value {
    let ids = first..first + count;
    let logprobs: Vec<Value> = ids.clone().map(|id| json!([-(id as f64), id, null])).collect();
    let tops: Vec<Value> = ids
        .clone()
        .map(|id| json!([[-0.25, 3, null], [-(id as f64), id, null]]))
        .collect();
    let masks: Vec<Value> = ids.clone().map(|id| json!([3, id])).collect();
    let kept: Vec<f64> = ids.clone().map(|id| -(id as f64) / 2.0).collect();
    let mut meta = json!({
        "id": "r", "finish_reason": finish.map(|kind| json!({"type": kind, "length": 3})), "prompt_tokens": 4,
        "weight_version": "springtide-7-bb", "num_retractions": 0, "input_token_logprobs": [],
        "output_token_logprobs": logprobs, "output_token_logprobs_length": total, "output_top_logprobs": tops,
        "output_token_sampling_mask": masks, "output_token_sampling_logprobs": kept, "completion_tokens": total,
    });
    if finish.is_some() {
        meta["weight_versions"] = json!([{"version": "springtide-7-bb", "start": 0, "end": total}]);
    }
    json!({"text": "", "output_ids": ids.collect::<Vec<_>>(), "meta_info": meta})
}

async fn answer(said: &[Value], weights: &str) -> (End, Vec<SampleEvent>) {
    let server = recorded::sglang(vec![Exchange::post("/generate", asked(), 200, events(said))]).await;
    let (request, mut receiver) = request(8);
    let end = sequence::run(&server, weights, request, false).await;
    let mut all = Vec::new();
    while let Ok(event) = receiver.try_recv() {
        all.push(event);
    }
    (end, all)
}

fn ids(events: &[SampleEvent]) -> Vec<u32> {
    let id = |event: &SampleEvent| match event {
        SampleEvent::Token(token) => Some(token.id),
        _ => None,
    };
    events.iter().filter_map(id).collect()
}

#[tokio::test]
async fn tokens_are_read_once_from_events_that_have_all_of_them_and_from_events_that_have_the_new_ones() {
    let all = [
        event(10, 1, 1, None),
        event(10, 2, 2, None),
        event(10, 3, 3, Some("length")),
    ];
    let new = [
        event(10, 1, 1, None),
        event(11, 1, 2, None),
        event(12, 1, 3, Some("length")),
    ];
    for said in [all, new] {
        let (end, events) = answer(&said, "springtide-7-bb").await;
        assert!(matches!(end, End::Done), "{end:?}");
        assert_eq!(ids(&events), [10, 11, 12]);
        let Some(SampleEvent::Token(token)) = events.get(1) else {
            panic!("{events:?}");
        };
        // among the tokens that the filters kept
        assert_eq!((token.logprob, token.candidates), (-5.5, Some(2)));
        assert_eq!(token.top, [(3, -0.25), (11, -11.0)]);
    }
}

#[tokio::test]
async fn tokens_of_other_weights_and_tokens_of_unknown_weights_are_no_answer() {
    let said = [event(10, 2, 2, None), event(10, 3, 3, Some("length"))];
    let (end, _) = answer(&said, "springtide-8-cc").await;
    assert!(matches!(end, End::Failed(_)), "{end:?}");
    let mut unnamed = event(10, 3, 3, Some("length"));
    unnamed["meta_info"]["weight_versions"] = Value::Null;
    let (end, events) = answer(&[unnamed], "springtide-7-bb").await;
    // nothing was passed on, so another engine may answer
    assert!(matches!(end, End::Retry(..)), "{end:?}");
    assert!(events.is_empty(), "{events:?}");
}

#[tokio::test]
async fn an_aborted_answer_and_an_error_in_the_middle_are_failures_of_the_engine() {
    let (end, events) = answer(
        &[event(10, 1, 1, None), event(10, 1, 1, Some("abort"))],
        "springtide-7-bb",
    )
    .await;
    assert!(matches!(end, End::Failed(_)), "{end:?}");
    assert!(matches!(events.last(), Some(SampleEvent::Failed(_))), "{events:?}");
    let broken = json!({"error": {"message": "out of memory", "code": 500}});
    let (end, _) = answer(&[event(10, 1, 1, None), broken], "springtide-7-bb").await;
    assert!(matches!(end, End::Failed(_)), "{end:?}");
    let refused = json!({"error": {"message": "too long", "type": "invalid_request_error", "code": 400}});
    let (end, events) = answer(&[refused], "springtide-7-bb").await;
    assert!(matches!(end, End::Done), "{end:?}");
    assert!(matches!(events.last(), Some(SampleEvent::Failed(_))), "{events:?}");
}

fn update(status: u16, answer: &Value) -> Vec<Exchange> {
    let body = json!({"model_path": "/dev/shm/7.folder", "weight_version": "springtide-7-bb", "flush_cache": true});
    let post = |path: &str, body| Exchange::post(path, body, 200, json!({"status": "ok"}).to_string());
    vec![
        post("/pause_generation", json!({"mode": "abort"})),
        Exchange::post("/update_weights_from_disk", body, status, answer.to_string()),
        post("/continue_generation", json!({})),
        Exchange::get(
            "/model_info",
            &json!({"model_path": "/m", "weight_version": "springtide-7-bb"}),
        ),
    ]
}

#[tokio::test]
async fn a_folder_is_loaded_between_pause_and_continue_and_a_failed_one_is_reported() {
    let folder = Weights::Folder(Path::new("/dev/shm/7.folder"));
    let done = json!({"success": true, "message": "Succeeded to update model weights.", "num_paused_requests": 0});
    let server: Client = recorded::sglang(update(200, &done)).await;
    server.update(folder, "", "bb", "springtide-7-bb").await.unwrap();
    assert_eq!(server.weights().await.unwrap().as_deref(), Some("springtide-7-bb"));
    let failed = json!({"success": false, "message": "no such folder", "num_paused_requests": 0});
    let server = recorded::sglang(update(400, &failed)).await;
    let error = server.update(folder, "", "bb", "springtide-7-bb").await.unwrap_err();
    assert!(format!("{error:#}").contains("no such folder"), "{error:#}");
    assert!(!server.takes_patches());
}
