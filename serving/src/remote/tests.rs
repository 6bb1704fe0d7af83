//! Pool and updater with engines that fail in ways in which a real one cannot be made to fail: they
//! report success and keep their weights, end an answer in the middle, or restart at once. The
//! engines here sample with our exact model behind vLLM's routes. `make bench NAME=engines` has the real
//! one.

mod adapters;
mod crossing;
mod fake;
mod followed;
mod quotes;
mod schemas;
mod stand;
mod tide;

pub(crate) use fake::{CONTEXT, Fake, Faults, VOCAB, version};
pub(crate) use stand::{gateway_to, last, updater_of};

use stand::{Stand, config, finished, next, openai, vllm};

use super::placement::State;
use super::{EXPECT_WEIGHTS, InFlight, OpenAiServer, Options, Pool, Server, Updater, VersionWeights};
use crate::engine::caller::{Caller, Work};
use crate::engine::load::Load;
use crate::engine::{
    Config, Engine, Finish, LoadedVersion, SampleEvent, SampleRequest, Started, TokensOfVersion, TrafficClass,
    events_max,
};
use crate::routing::tests::no_templates;
use artifact::assignment::Target;
use artifact::checkpoint::Checkpoint;
use artifact::patch::{Contents, HeldPart, LocalPart};
use artifact::tensor::TensorData;
use axum::Router;
use axum::body::Body;
use axum::extract::{Json, State as Extract};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures::FutureExt as _;
use model::exact::{ExactModel, KvCache};
use model::lora::Adapter;
use model::sampling::{self, Params, PreviousTokens, Source};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use text::tokenizer::Tokenizer;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

#[tokio::test(flavor = "multi_thread")]
async fn new_versions_reach_an_engine_as_patches() {
    let mut stand = Stand::new(1).await;
    let first = stand.place(1, &[]).await;
    assert!(finished(&stand.ask(&first, 5).await));
    let second = stand.place(2, &[]).await;
    assert!(finished(&stand.ask(&second, 5).await));
    assert_eq!(stand.fakes[0].updates(), ["all", "patch"]);
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
    assert_eq!(stand.fakes[0].updates(), ["all", "patch", "all"]);
    stand.fakes[0].set(Faults {
        ignores_patches: true,
        ignores_all: true,
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
async fn an_engine_that_lacks_one_weight_of_a_patch_is_found_by_its_bytes_and_loads_all() {
    let mut stand = Stand::with(1, |fakes| Options {
        vllm: fakes.iter().map(vllm).collect(),
        // as of another precision: a probe does not see it
        probe_error_max: 9.0,
        ..Options::default()
    })
    .await;
    stand.place(1, &[]).await;
    while stand.fakes[0].held().proofs == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    stand.fakes[0].set(Faults {
        forgets_a_weight: true,
        ..Faults::default()
    });
    stand.place(2, &[]).await;
    // it answers until its bytes are compared
    while stand.updater.serves(2) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(stand.pool.state(0), State::Unproven);
    stand.mend(&[(2, 1.0)], 2, 1).await;
    assert_eq!(stand.fakes[0].updates(), ["all", "patch", "all"]);
    while stand.fakes[0].held().proofs < 3 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(stand.pool.state(0), State::Serving(2));
}

#[tokio::test(flavor = "multi_thread")]
async fn slots_are_those_that_the_engine_says_unless_they_are_configured() {
    let (fake, other) = (Fake::start().await, "http://127.0.0.1:1".to_owned());
    let with = |vllm: Vec<Server>, slots| Options {
        vllm,
        slots,
        ..Options::default()
    };
    let down = Server {
        url: other,
        ..Server::default()
    };
    let slots = async |options: Options| super::slots(&options).await.unwrap();
    assert_eq!(slots(with(vec![vllm(&fake), down.clone()], None)).await, fake::SLOTS);
    assert_eq!(slots(with(vec![vllm(&fake)], Some(7))).await, 7);
    assert_eq!(slots(with(vec![down], None)).await, 256);
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
    assert_eq!(stand.fakes[0].updates(), ["all"]);
    assert!(finished(&stand.ask(&version, 5).await));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_whose_workers_take_no_patch_loads_all_weights() {
    let mut stand = Stand::new(1).await;
    stand.place(1, &[]).await;
    stand.fakes[0].set(Faults {
        refuses_patches: true,
        ..Faults::default()
    });
    let second = stand.place(2, &[]).await;
    assert_eq!(stand.fakes[0].updates(), ["all", "all"]);
    assert!(finished(&stand.ask(&second, 5).await));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_reads_text_must_be_started_again_for_another_tokenizer() {
    let mut stand = Stand::with(1, |fakes| Options {
        vllm: vec![vllm(&fakes[0])],
        reads_text: true,
        ..Options::default()
    })
    .await;
    let first = stand.place(1, &[]).await;
    let (second, checkpoint) = version(2);
    let mut checkpoint = Checkpoint::clone(&checkpoint);
    checkpoint
        .files
        .insert("tokenizer.json".into(), b"{}".as_slice().into());
    let second = Arc::new(LoadedVersion {
        root: checkpoint.root(),
        ..LoadedVersion::clone(&second)
    });
    let checkpoint = Arc::new(checkpoint);
    let refused = stand.updater.place(&second, &checkpoint, &BTreeSet::new()).await;
    let refused = format!("{:#}", refused.unwrap_err());
    assert!(
        refused.contains("tokenizer.json") && refused.contains("start the engine"),
        "{refused}"
    );
    assert!(finished(&stand.ask(&first, 5).await));
    // it was, and has read the new files
    stand.fakes[0].restart();
    while stand
        .updater
        .place(&second, &checkpoint, &BTreeSet::new())
        .await
        .is_err()
    {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(finished(&stand.ask(&second, 5).await));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_first_token_fails_its_request_and_no_engine_that_answers() {
    let mut stand = Stand::with(2, |fakes| Options {
        vllm: fakes.iter().map(vllm).collect(),
        first_token_ms: 500,
        ..Options::default()
    })
    .await;
    let version = stand.place(1, &[]).await;
    stand.mend(&[(1, 1.0)], 1, 2).await;
    for fake in &stand.fakes {
        fake.set(Faults {
            stalls_after: Some(0),
            ..Faults::default()
        });
    }
    let events = stand.ask(&version, 4).await;
    let Some(SampleEvent::Failed(error)) = events.last() else {
        panic!("{events:?}");
    };
    assert!(error.contains("first_token_ms"), "{error}");
    assert_eq!(stand.pool.placement(|engines| engines.servers(1)), 2);
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
