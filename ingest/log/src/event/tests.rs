//! Version 1 of the wire format must always be readable. The fixtures are bytes, so that no change
//! of the code can change them too. Over 500 lines because all cases damage or rewrite the same few
//! events.

use std::collections::BTreeMap;

use proptest::prelude::*;
use prost::Message;
use time::macros::datetime;
use uuid::Uuid;

use super::protobuf::Field;
use super::*;

const GENERATION_V1: &str = include_str!("../../fixtures/generation-v1.hex");
const GENERATION_V1_EXPERTS: &str = include_str!("../../fixtures/generation-v1-experts.hex");
const FEEDBACK_V1: &str = include_str!("../../fixtures/feedback-v1.hex");
const RETRACTION_V1: &str = include_str!("../../fixtures/retraction-v1.hex");
const EPISODE_END_V1: &str = include_str!("../../fixtures/episode-end-v1.hex");

fn id(text: &str) -> Uuid {
    Uuid::parse_str(text).unwrap()
}

fn generation() -> Generation {
    Generation {
        id: id("019aa5e6-2f40-7abc-8def-0123456789ab"),
        episode_id: id("019aa5e6-2f40-7abc-8def-0123456789ab"),
        segment: 1,
        turn: 2,
        parent_id: Some(id("019aa5e6-0000-7000-8000-000000000001")),
        policy: "demo".to_owned(),
        line: "realtime".to_owned(),
        versions: vec![
            VersionSpan {
                version: 7,
                root: [0xa1; 32],
                tokens: 2,
            },
            VersionSpan {
                version: 9,
                root: [0xb2; 32],
                tokens: 1,
            },
        ],
        replica: "replica-1".to_owned(),
        purpose: Purpose::Rollout,
        run_id: Some(id("019aa5e6-0000-7000-8000-000000000002")),
        task_id: Some("task-1".to_owned()),
        group_id: Some("group-1".to_owned()),
        surface: "completion".to_owned(),
        user_key: "user-42".to_owned(),
        arm: "champion".to_owned(),
        arm_probability: 0.6,
        prompt_prefix: Some(Prefix {
            length: 300,
            hash: [0xc3; 32],
        }),
        prompt_ids: vec![1, 300, 70_000],
        token_ids: vec![5, 6, 2],
        logprobs: vec![-0.25, -1.5, -0.0078125],
        train_mask: Some(vec![true, false, true]),
        payload: Some(PayloadRef {
            digest: [0xd4; 32],
            size_bytes: 1_234_567,
            media_type: "application/octet-stream".to_owned(),
        }),
        experts: None,
        temperature: 0.8,
        top_p: 0.95,
        seed: Some(u64::MAX),
        finish_reason: FinishReason::Stop,
        declined: true,
        shown: Some(false),
        consent: false,
        decline_suppressed: false,
        exploration_share: None,
        sampling: None,
        untrainable: None,
        engine: None,
        proof: None,
    }
}

fn generation_event() -> Event {
    Event {
        tenant: "default".to_owned(),
        source: "springtide/serve/replica-1".to_owned(),
        id: "019aa5e6-2f40-7abc-8def-0123456789ab".to_owned(),
        time: datetime!(2025-11-21 13:37:00.123456 UTC),
        teacher: None,
        body: Body::Generation(generation()),
    }
}

fn feedback_event() -> Event {
    let feedback = Feedback {
        id: id("019aa5e6-3f40-7abc-8def-0123456789ab"),
        target: Target::Episode(id("019aa5e6-2f40-7abc-8def-0123456789ab")),
        metric_name: "rating".to_owned(),
        value: Value::Float(4.5),
        tags: BTreeMap::from([
            ("editor".to_owned(), "vim".to_owned()),
            ("app".to_owned(), "x".to_owned()),
        ]),
    };
    feedback.into_event("default", "app", datetime!(2025-11-21 13:37:04 UTC))
}

fn retraction_event() -> Event {
    let retraction = Retraction {
        id: id("019aa5e6-4f40-7abc-8def-0123456789ab"),
        feedback_id: id("019aa5e6-3f40-7abc-8def-0123456789ab"),
        reason: "pressed by mistake".to_owned(),
    };
    retraction.into_event("default", "app", datetime!(2025-11-21 13:37:05 UTC))
}

fn episode_end_event() -> Event {
    let end = EpisodeEnd {
        episode_id: id("019aa5e6-2f40-7abc-8def-0123456789ab"),
    };
    end.into_event("default", "app", datetime!(2025-11-21 13:37:06 UTC))
}

fn bytes(fixture: &str) -> Vec<u8> {
    hex::decode(fixture.split_whitespace().collect::<String>()).unwrap()
}

#[test]
fn version_1_of_a_generation_is_still_read() {
    assert_eq!(Event::decode(&bytes(GENERATION_V1)).unwrap(), generation_event());
}

#[test]
fn version_1_of_feedback_is_still_read() {
    assert_eq!(Event::decode(&bytes(FEEDBACK_V1)).unwrap(), feedback_event());
}

#[test]
fn version_1_of_retractions_and_episode_ends_is_still_read() {
    assert_eq!(Event::decode(&bytes(RETRACTION_V1)).unwrap(), retraction_event());
    assert_eq!(Event::decode(&bytes(EPISODE_END_V1)).unwrap(), episode_end_event());
}

#[test]
fn the_same_event_is_written_as_the_same_bytes() {
    assert_eq!(
        hex::encode(retraction_event().encode()),
        hex::encode(bytes(RETRACTION_V1))
    );
    assert_eq!(
        hex::encode(episode_end_event().encode()),
        hex::encode(bytes(EPISODE_END_V1))
    );
    assert_eq!(
        hex::encode(generation_event().encode()),
        hex::encode(bytes(GENERATION_V1))
    );
    assert_eq!(hex::encode(feedback_event().encode()), hex::encode(bytes(FEEDBACK_V1)));
}

#[test]
fn fields_of_a_later_version_are_ignored_in_the_envelope_and_in_the_body() {
    // Field 1000, length-delimited, "new".
    let unknown = [0xc2, 0x3e, 3, b'n', b'e', b'w'];
    let mut envelope = bytes(FEEDBACK_V1);
    envelope.extend(unknown);
    assert_eq!(Event::decode(&envelope).unwrap(), feedback_event());

    let wire = proto::Event::from(&feedback_event());
    let Some(proto::event::Body::Feedback(feedback)) = &wire.body else {
        panic!("not feedback");
    };
    let mut body = feedback.encode_to_vec();
    body.extend(unknown);
    let mut event = proto::Event {
        body: None,
        ..wire.clone()
    }
    .encode_to_vec();
    event.push(11 << 3 | 2);
    prost::encoding::encode_varint(body.len() as u64, &mut event);
    event.extend(body);
    let read = Event::decode(&event).unwrap();
    assert_eq!(read, feedback_event());
    assert_eq!(read.digest(), feedback_event().digest());
}

#[test]
fn absent_fields_mean_what_the_schema_says() {
    let plain = Generation {
        parent_id: None,
        run_id: None,
        task_id: None,
        group_id: None,
        prompt_prefix: None,
        train_mask: None,
        payload: None,
        seed: None,
        shown: None,
        consent: true,
        declined: false,
        ..generation()
    };
    let wire = plain.write();
    assert_eq!(wire.consent, None);
    assert_eq!(Generation::read(wire, "").unwrap(), plain);
}

#[test]
fn both_forms_and_the_digest_include_exploration() {
    let mut event = generation_event();
    event.body = Body::Generation(Generation {
        declined: false,
        decline_suppressed: true,
        exploration_share: Some(0.02),
        ..generation()
    });
    assert_eq!(Event::decode(&event.encode()).unwrap(), event);
    let json = serde_json::to_value(&event).unwrap();
    assert_eq!(json["generation"]["decline_suppressed"], true);
    assert_eq!(Event::decode_json(json.to_string().as_bytes()).unwrap(), event);
    assert_ne!(event.digest(), generation_event().digest());
}

#[test]
fn both_forms_and_what_is_signed_include_that_it_must_not_be_trained_on() {
    let plain = generation();
    let mut event = generation_event();
    let untrainable = Generation {
        untrainable: Some("no_token_ids".to_owned()),
        ..generation()
    };
    assert_ne!(untrainable.unsigned_digest(), plain.unsigned_digest());
    event.body = Body::Generation(untrainable);
    event.check().unwrap();
    assert_eq!(Event::decode(&event.encode()).unwrap(), event);
    let json = serde_json::to_value(&event).unwrap();
    assert_eq!(json["generation"]["untrainable"], "no_token_ids");
    assert_eq!(Event::decode_json(json.to_string().as_bytes()).unwrap(), event);
    // without it, nothing is written
    assert!(plain.write().untrainable.is_empty());
    let json = serde_json::to_value(generation_event()).unwrap();
    assert!(json["generation"].get("untrainable").is_none());
}

#[test]
fn both_forms_and_the_digest_include_the_sampling_parameters() {
    let mut event = generation_event();
    event.body = Body::Generation(Generation {
        sampling: Some(Sampling {
            top_k: 40,
            min_p: 0.125,
            repetition_penalty: 1.25,
            logit_bias: BTreeMap::from([(7, -2.5), (70_000, 1.0)]),
            kept: Some(vec![40, 3, 12]),
            ..Sampling::default()
        }),
        ..generation()
    });
    event.check().unwrap();
    assert_eq!(Event::decode(&event.encode()).unwrap(), event);
    let json = serde_json::to_value(&event).unwrap();
    assert_eq!(json["generation"]["sampling"]["logit_bias"]["70000"], 1.0);
    assert_eq!(Event::decode_json(json.to_string().as_bytes()).unwrap(), event);
    assert_ne!(event.digest(), generation_event().digest());
    assert!(json["generation"]["sampling"].get("constraint").is_none());
    let short = serde_json::json!({"top_k": 5});
    let short: Sampling = serde_json::from_value(short).unwrap();
    assert_eq!((short.top_k, short.repetition_penalty), (5, 1.0));
}

#[test]
fn both_forms_and_what_is_signed_include_the_grammar_that_constrained_the_answer() {
    let constraint = |schema: &str| Constraint {
        format: "json_schema/1 llguidance/1.9.1".to_owned(),
        schema: schema.to_owned(),
    };
    let constrained = |schema: &str| Generation {
        sampling: Some(Sampling {
            constraint: Some(constraint(schema)),
            ..Sampling::default()
        }),
        ..generation()
    };
    // the order of its keys is part of a schema
    let schema = r#"{"type": "object", "properties": {"z": {"const": "\u0000"}, "a": {}}}"#;
    let mut event = generation_event();
    event.body = Body::Generation(constrained(schema));
    event.check().unwrap();
    assert_eq!(Event::decode(&event.encode()).unwrap(), event);
    let json = serde_json::to_value(&event).unwrap();
    assert_eq!(json["generation"]["sampling"]["constraint"]["schema"], schema);
    assert_eq!(Event::decode_json(json.to_string().as_bytes()).unwrap(), event);
    let digests = [schema, "{}"].map(|schema| constrained(schema).unsigned_digest());
    assert_ne!(digests[0], digests[1]);
    // without it, nothing is written
    let unconstrained = Sampling {
        top_k: 5,
        ..Sampling::default()
    };
    assert_eq!(unconstrained.write().encode_to_vec(), [8, 5]);
    // it is a customer's text
    assert!(!format!("{:?}", constraint(schema)).contains("const"));
}

/// Has a field that the first producers did not write.
fn routed_event() -> Event {
    let experts = PayloadRef {
        digest: [0xe5; 32],
        size_bytes: 480_032,
        media_type: EXPERTS.to_owned(),
    };
    let mut event = generation_event();
    event.body = Body::Generation(Generation {
        experts: Some(experts),
        ..generation()
    });
    event
}

#[test]
fn both_forms_and_the_digest_include_experts() {
    assert_eq!(Event::decode(&bytes(GENERATION_V1_EXPERTS)).unwrap(), routed_event());
    assert_eq!(
        hex::encode(routed_event().encode()),
        hex::encode(bytes(GENERATION_V1_EXPERTS))
    );
    assert_ne!(routed_event().digest(), generation_event().digest());
    let json = serde_json::to_value(routed_event()).unwrap();
    assert_eq!(json["generation"]["experts"]["size_bytes"], 480_032);
    assert_eq!(Event::decode_json(json.to_string().as_bytes()).unwrap(), routed_event());
}

#[test]
fn json_of_the_first_and_of_later_producers_is_read() {
    let first = include_str!("../../fixtures/generation-v1.json");
    assert_eq!(Event::decode_json(first.as_bytes()).unwrap(), generation_event());
    let mut later: serde_json::Value = serde_json::from_str(first).unwrap();
    later["partition_hint"] = 7.into();
    later["generation"]["latency"] = serde_json::json!({"first_token_ms": 12});
    assert_eq!(
        Event::decode_json(later.to_string().as_bytes()).unwrap(),
        generation_event()
    );
}

/// A consumer of a version before `experts` existed, with only some fields.
#[test]
fn a_reader_that_does_not_know_a_field_reads_the_others() {
    #[derive(Clone, PartialEq, prost::Message)]
    struct OldGeneration {
        #[prost(bytes = "vec", tag = "1")]
        generation_id: Vec<u8>,
        #[prost(uint32, repeated, tag = "23")]
        token_ids: Vec<u32>,
        #[prost(float, tag = "30")]
        temperature: f32,
    }
    #[derive(Clone, PartialEq, prost::Message)]
    struct OldEvent {
        #[prost(string, tag = "3")]
        id: String,
        #[prost(message, optional, tag = "10")]
        generation: Option<OldGeneration>,
    }
    let old = OldEvent::decode(bytes(GENERATION_V1_EXPERTS).as_slice()).unwrap();
    let read = old.generation.unwrap();
    assert_eq!(read.generation_id, generation().id.as_bytes());
    assert_eq!((read.token_ids, read.temperature), (vec![5, 6, 2], 0.8));
}

#[test]
fn an_unknown_kind_of_event_is_refused() {
    let mut event = proto::Event {
        body: None,
        ..proto::Event::from(&feedback_event())
    }
    .encode_to_vec();
    event.extend([15 << 3 | 2, 0]); // a body with the next free number
    let error = Event::decode(&event).unwrap_err();
    assert_eq!(error.to_string(), "body: is missing or of an unknown kind");
}

#[test]
fn broken_rules_of_a_retraction_name_their_field() {
    let broken = |change: fn(&mut Retraction)| {
        let mut event = retraction_event();
        let Body::Retraction(retraction) = &mut event.body else {
            panic!("not a retraction");
        };
        change(retraction);
        event.check().unwrap_err().field
    };
    assert_eq!(broken(|r| r.id = Uuid::from_u128(1)), "retraction_id");
    assert_eq!(broken(|r| r.feedback_id = Uuid::from_u128(1)), "feedback_id");
    assert_eq!(broken(|r| r.reason = "a\0b".to_owned()), "reason");
}

#[test]
fn json_uses_the_names_of_the_schema() {
    let json = serde_json::to_value(generation_event()).unwrap();
    assert_eq!(
        json["generation"]["generation_id"],
        "019aa5e6-2f40-7abc-8def-0123456789ab"
    );
    assert_eq!(json["generation"]["purpose"], "rollout");
    assert_eq!(json["generation"]["versions"][0]["root"], "a1".repeat(32));
    assert_eq!(json["time"], "2025-11-21T13:37:00.123456Z");
    let json = serde_json::to_value(feedback_event()).unwrap();
    assert_eq!(json["feedback"]["episode_id"], "019aa5e6-2f40-7abc-8def-0123456789ab");
    assert_eq!(json["feedback"]["value"], 4.5);
    let json = serde_json::to_value(retraction_event()).unwrap();
    assert_eq!(
        json["retraction"]["feedback_id"],
        "019aa5e6-3f40-7abc-8def-0123456789ab"
    );
    let json = serde_json::to_value(episode_end_event()).unwrap();
    assert_eq!(
        json["episode_end"]["episode_id"],
        "019aa5e6-2f40-7abc-8def-0123456789ab"
    );
}

#[test]
fn json_and_protobuf_give_the_same_event_and_digest() {
    for event in [
        generation_event(),
        feedback_event(),
        retraction_event(),
        episode_end_event(),
    ] {
        let json = serde_json::to_vec(&event).unwrap();
        let read = Event::decode_json(&json).unwrap();
        assert_eq!(read, event);
        assert_eq!(read.digest(), Event::decode(&event.encode()).unwrap().digest());
        assert_eq!(event.encode_with_digest(), (event.encode(), event.digest()));
    }
}

#[test]
fn the_digest_covers_the_body_and_not_the_time() {
    let mut later = feedback_event();
    later.time += time::Duration::seconds(1);
    assert_eq!(later.digest(), feedback_event().digest());
    let Body::Feedback(feedback) = &mut later.body else {
        panic!("not feedback");
    };
    feedback.value = Value::Float(4.0);
    assert_ne!(later.digest(), feedback_event().digest());
}

#[test]
fn each_broken_rule_names_its_field() {
    let broken = |change: fn(&mut Generation)| {
        let mut generation = generation();
        change(&mut generation);
        let mut event = generation_event();
        event.body = Body::Generation(generation);
        event.check().unwrap_err().field
    };
    assert_eq!(broken(|g| g.id = Uuid::from_u128(1)), "generation_id");
    assert_eq!(broken(|g| g.policy.clear()), "policy");
    assert_eq!(broken(|g| g.user_key = "a\0b".to_owned()), "user_key");
    assert_eq!(broken(|g| g.versions[0].tokens = 3), "versions");
    assert_eq!(broken(|g| g.versions.clear()), "versions");
    assert_eq!(broken(|g| g.token_ids.clear()), "token_ids");
    let nothing_sampled = |g: &mut Generation| {
        (g.token_ids, g.logprobs, g.train_mask) = (vec![], vec![], None);
        g.versions.truncate(1);
        g.versions[0].tokens = 0;
    };
    let mut failed = generation();
    nothing_sampled(&mut failed);
    (failed.finish_reason, failed.untrainable) = (FinishReason::Abort, Some("engine_failed".to_owned()));
    failed.sampling = None;
    let mut event = generation_event();
    event.body = Body::Generation(failed);
    event.check().unwrap();
    assert_eq!(broken(|g| g.token_ids[0] = u32::MAX), "token_ids");
    assert_eq!(broken(|g| g.logprobs[1] = 0.5), "logprobs");
    assert_eq!(broken(|g| g.logprobs[1] = f32::NAN), "logprobs");
    assert_eq!(broken(|g| g.train_mask = Some(vec![true])), "train_mask");
    assert_eq!(broken(|g| g.arm_probability = 0.0), "arm_probability");
    assert_eq!(broken(|g| g.top_p = f32::NAN), "top_p");
    assert_eq!(broken(|g| g.parent_id = None), "prompt_prefix");
    assert_eq!(broken(|g| g.parent_id = Some(g.id)), "parent_generation_id");
    let by_reference = |size_bytes, media_type: &str| PayloadRef {
        digest: [1; 32],
        size_bytes,
        media_type: media_type.to_owned(),
    };
    let damaged = |change: &dyn Fn(&mut Generation)| {
        let mut event = generation_event();
        let Body::Generation(generation) = &mut event.body else {
            panic!("not a generation");
        };
        change(generation);
        event.check().unwrap_err().field
    };
    for (size_bytes, media_type) in [(0, "x"), (PAYLOAD_BYTES_MAX + 1, "x"), (8, ""), (6, TOKEN_IDS)] {
        assert_eq!(
            damaged(&|g| g.payload = Some(by_reference(size_bytes, media_type))),
            "payload"
        );
    }
    assert_eq!(damaged(&|g| g.experts = Some(by_reference(0, EXPERTS))), "experts");
    assert_eq!(broken(|g| g.untrainable = Some("No ids".to_owned())), "untrainable");
    assert_eq!(broken(|g| g.untrainable = Some("a".repeat(65))), "untrainable");
    assert_eq!(broken(|g| g.exploration_share = Some(0.0)), "exploration_share");
    assert_eq!(broken(|g| g.engine = Some(String::new())), "engine");
    assert_eq!(broken(|g| g.exploration_share = Some(1.0)), "exploration_share");
    let shaped = |sampling: Sampling| damaged(&|g| g.sampling = Some(sampling.clone()));
    let some = Sampling::default;
    assert_eq!(shaped(Sampling { min_p: 1.5, ..some() }), "sampling.min_p");
    assert_eq!(
        shaped(Sampling {
            repetition_penalty: 0.0,
            ..some()
        }),
        "sampling.repetition_penalty"
    );
    let bias = BTreeMap::from([(3, f32::NAN)]);
    assert_eq!(
        shaped(Sampling {
            logit_bias: bias,
            ..some()
        }),
        "sampling.logit_bias"
    );
    assert_eq!(
        shaped(Sampling {
            kept: Some(vec![1]),
            ..some()
        }),
        "sampling.kept"
    );
    assert_eq!(
        shaped(Sampling {
            kept: Some(vec![1, 0, 1]),
            ..some()
        }),
        "sampling.kept"
    );
    for (format, schema, field) in [
        ("", "{}".to_owned(), "sampling.constraint.format"),
        ("f", String::new(), "sampling.constraint.schema"),
        ("f", "\0".to_owned(), "sampling.constraint.schema"),
        ("f", "x".repeat(CONSTRAINT_BYTES_MAX + 1), "sampling.constraint.schema"),
    ] {
        let constraint = Constraint {
            format: format.to_owned(),
            schema,
        };
        assert_eq!(
            shaped(Sampling {
                constraint: Some(constraint),
                ..some()
            }),
            field
        );
    }
    let without_share = |g: &mut Generation| (g.declined, g.decline_suppressed) = (false, true);
    assert_eq!(broken(without_share), "decline_suppressed");
    let declined = |g: &mut Generation| (g.decline_suppressed, g.exploration_share) = (true, Some(0.02));
    assert_eq!(broken(declined), "decline_suppressed");
}

#[test]
fn only_a_uuidv7_has_a_time() {
    let time = time_of(id("019aa5e6-2f40-7abc-8def-0123456789ab")).unwrap();
    assert_eq!(time.unix_timestamp_nanos(), 0x019a_a5e6_2f40 * 1_000_000);
    assert_eq!(time_of(id("c0a80101-0000-4000-8000-000000000000")), None);
}

proptest! {
    #[test]
    fn any_bytes_are_decoded_or_refused_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let _ = Event::decode(&bytes);
        let _ = Event::decode_json(&bytes);
    }

    #[test]
    fn a_damaged_event_never_panics(at in 0_usize..300, with in any::<u8>()) {
        let mut bytes = bytes(GENERATION_V1);
        let at = at % bytes.len();
        bytes[at] = with;
        let _ = Event::decode(&bytes);
    }

    #[test]
    fn both_forms_preserve_tokens_and_logprobs_bit_by_bit(
        sampled in proptest::collection::vec((0_u32..=i32::MAX as u32, -100.0_f32..=0.0), 1..50),
    ) {
        let (token_ids, logprobs): (Vec<u32>, Vec<f32>) = sampled.into_iter().unzip();
        let tokens = u32::try_from(token_ids.len()).unwrap();
        let mut event = generation_event();
        event.body = Body::Generation(Generation {
            versions: vec![VersionSpan { version: 1, root: [1; 32], tokens }],
            token_ids,
            logprobs,
            train_mask: None,
            ..generation()
        });
        prop_assert_eq!(&Event::decode(&event.encode()).unwrap(), &event);
        let json = serde_json::to_vec(&event).unwrap();
        prop_assert_eq!(&Event::decode_json(&json).unwrap(), &event);
    }
}

#[test]
fn a_proof_survives_both_forms_and_is_not_part_of_what_it_signs() {
    let unsigned = generation();
    let mut event = generation_event();
    let proof = Proof {
        sampler: "5a".repeat(32),
        signature: [0xc3; 64],
    };
    event.body = Body::Generation(Generation {
        proof: Some(proof),
        ..generation()
    });
    event.check().unwrap();
    assert_eq!(Event::decode(&event.encode()).unwrap(), event);
    let json = serde_json::to_value(&event).unwrap();
    assert_eq!(json["generation"]["proof"]["signature"], "c3".repeat(64));
    assert_eq!(Event::decode_json(json.to_string().as_bytes()).unwrap(), event);
    let Body::Generation(signed) = &event.body else {
        panic!("{event:?}")
    };
    assert_eq!(signed.unsigned_digest(), unsigned.unsigned_digest());
    assert_eq!(unsigned.unsigned_digest(), generation_event().digest());
    assert_ne!(event.digest(), generation_event().digest());
    // samplers in other languages build the same bytes: docs/FORMAT.md
    let bytes = signed_bytes("default", event.time, &[0xab; 32]);
    let expected = [
        b"springtide generation proof 1\0".as_slice(),
        &7_u32.to_le_bytes(),
        b"default",
        &1_763_732_220_123_456_i64.to_le_bytes(),
        &[0xab; 32],
    ];
    assert_eq!(bytes, expected.concat());
}

#[test]
fn the_engine_is_signed_and_an_event_without_one_has_the_bytes_that_it_always_had() {
    let mut event = generation_event();
    let before = event.digest();
    let json = serde_json::to_value(&event).unwrap();
    assert_eq!(json["generation"].get("engine"), None);
    let Body::Generation(generation) = &mut event.body else {
        panic!("not a generation")
    };
    assert_eq!(generation.unsigned_digest(), before);
    generation.engine = Some("vllm".into());
    assert_ne!(generation.unsigned_digest(), before);
    event.check().unwrap();
    assert_eq!(Event::decode(&event.encode()).unwrap(), event);
    let json = serde_json::to_value(&event).unwrap();
    assert_eq!(Event::decode_json(json.to_string().as_bytes()).unwrap(), event);
}

#[test]
fn a_malformed_proof_is_refused() {
    let refused = |proof: serde_json::Value| {
        let mut json = serde_json::to_value(generation_event()).unwrap();
        json["generation"]["proof"] = proof;
        Event::decode_json(json.to_string().as_bytes()).is_err()
    };
    let signature = "00".repeat(64);
    assert!(!refused(
        serde_json::json!({"sampler": "5a".repeat(32), "signature": signature})
    ));
    assert!(refused(
        serde_json::json!({"sampler": "replica-1", "signature": signature})
    ));
    assert!(refused(
        serde_json::json!({"sampler": "5a".repeat(32), "signature": "00"})
    ));
    assert!(refused(serde_json::json!({"sampler": "5a".repeat(32)})));
}
