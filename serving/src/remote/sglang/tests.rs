//! The client with what `tests/engines/contract.py` recorded from a real server, whose kernels were
//! stubs, and with answers of the same form that it does not give when asked.

use super::*;
use crate::engine::SampleEvent;
use crate::remote::client::Client;
use crate::remote::protocol::Weights;
use crate::remote::recorded::{self, Exchange, events, request};
use crate::remote::sequence::{self, End};
use std::time::Duration;

const RECORDED: &str = include_str!("../../../../tests/engines/sglang-0.5.23.json");

/// A server that answers with the recorded exchanges.
async fn play_back(names: &[&str]) -> Client {
    recorded::sglang(recorded::read(RECORDED, names)).await
}

#[tokio::test]
async fn the_state_of_a_server_is_read() {
    let server = play_back(&["weights", "context"]).await;
    assert_eq!(server.weights_name().await.unwrap().as_deref(), Some("default"));
    assert_eq!(server.context().await.unwrap(), Some(256));
}

/// As it was recorded.
fn weights(from: Option<&'static str>) -> Weights<'static> {
    let url = match from {
        None => "http://127.0.0.1/all",
        Some(_) => "http://127.0.0.1/patch",
    };
    Weights {
        url,
        from,
        to: "bb",
        name: "springtide-7-bb",
        limit: Duration::from_secs(60),
    }
}

#[tokio::test]
async fn all_weights_are_loaded_between_pause_and_continue() {
    let server = play_back(&["pause", "all", "resume", "new weights"]).await;
    server.update(weights(None), InFlight::Drain).await.unwrap();
    assert_eq!(server.weights_name().await.unwrap().as_deref(), Some("springtide-7-bb"));
}

#[tokio::test]
async fn a_patch_is_applied_to_the_version_that_it_starts_from_and_refused_otherwise() {
    let patch = weights(Some("aa"));
    let server = play_back(&["pause", "patch", "resume", "new weights"]).await;
    server.update(patch, InFlight::Drain).await.unwrap();
    assert_eq!(server.weights_name().await.unwrap().as_deref(), Some("springtide-7-bb"));
    let server = play_back(&["pause", "patch before all", "resume"]).await;
    let error = server.update(patch, InFlight::Drain).await.unwrap_err();
    assert!(format!("{error:#}").contains("load all first"), "{error:#}");
}

#[tokio::test]
async fn log_probabilities_are_those_of_the_distribution_that_was_sampled_from() {
    // without filters, and among the tokens that they kept
    for (name, top_k) in [("generate", 0), ("generate with the kept tokens", 5)] {
        let mut exchange = recorded::read(RECORDED, &[name]).remove(0);
        if top_k == 0 {
            // the contract asks with a filter both times
            exchange = exchange.asked("/sampling_params/top_k", (-1).into());
        }
        let server = recorded::sglang(vec![exchange]).await;
        let (mut request, mut receiver) = request(8);
        request.params.top_k = top_k;
        let end = sequence::run(&server, "springtide-7-bb", request, false, None, None).await;
        assert!(matches!(end, End::Done), "{name}: {end:?}");
        let mut tokens = Vec::new();
        while let Ok(SampleEvent::Token(token)) = receiver.try_recv() {
            assert!(token.top.len() == 2 && token.top[0].1 >= token.top[1].1);
            assert_eq!(token.candidates, (top_k > 0).then_some(top_k));
            tokens.push((token.id, token.logprob));
        }
        match top_k {
            0 => assert_eq!((tokens.len(), tokens[0]), (3, (5, -1.090_748_1))),
            _ => assert_eq!((tokens.len(), tokens[0]), (3, (5, -0.365_439_47))),
        }
    }
}

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
    let end = sequence::run(&server, weights, request, false, None, None).await;
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
    assert!(matches!(events.last(), Some(SampleEvent::Refused(_))), "{events:?}");
}

#[tokio::test]
async fn what_a_request_can_cause_is_no_failure_of_the_engine() {
    let mut unfiltered = event(10, 1, 1, None);
    unfiltered["meta_info"]["output_token_sampling_logprobs"] = json!([]);
    let (end, events) = answer(&[unfiltered], "springtide-7-bb").await;
    assert!(matches!(end, End::Done), "{end:?}");
    let Some(SampleEvent::Unusable(reason)) = events.last() else {
        panic!("{events:?}");
    };
    assert!(reason.contains("top_p"), "{reason}");
    // as of a schema that it cannot follow
    let mut refused = event(10, 0, 0, Some("abort"));
    refused["meta_info"]["finish_reason"]["message"] = "Failed to compile the schema".into();
    refused["meta_info"]["finish_reason"]["status_code"] = 400.into();
    let (end, events) = answer(&[refused], "springtide-7-bb").await;
    assert!(matches!(end, End::Done), "{end:?}");
    assert_eq!(events, [SampleEvent::Refused("Failed to compile the schema".into())]);
    let mut long = event(10, 1, 1, None);
    long["text"] = "a".repeat(5 << 20).into();
    let (end, events) = answer(&[long], "springtide-7-bb").await;
    assert!(matches!(end, End::Done), "{end:?}");
    assert!(matches!(events.last(), Some(SampleEvent::Unusable(_))), "{events:?}");
}
