use super::*;
use crate::routing::tests::version;
use serde_json::json;
use std::collections::BTreeMap;

fn checked(fields: Value) -> Result<GenerationRequest, Problem> {
    let mut body = json!({"model": "demo", "prompt": "fn main"});
    if let (Value::Object(body), Value::Object(fields)) = (&mut body, fields) {
        body.extend(fields);
    }
    // as `edge::json::Json` reads a body
    let request = serde_path_to_error::deserialize(body).map_err(bad)?;
    GenerationRequest::completion(request, &Options::default(), "default")
}

#[test]
fn absent_fields_have_the_defaults_of_openai() {
    let request = checked(json!({})).unwrap();
    assert_eq!(
        (request.n, request.params.temperature, request.params.top_p),
        (1, 1.0, 1.0)
    );
    assert_eq!(
        (request.surface.as_str(), request.purpose, request.class()),
        ("completion", Purpose::Production, TrafficClass::Production)
    );
    assert!(request.user_key.starts_with("anonymous-") && request.consent && !request.stream);
    assert_eq!(request.episode_id, None);
}

#[test]
fn every_sampling_parameter_is_read() {
    let request = checked(json!({
        "top_k": 40, "min_p": 0.5, "repetition_penalty": 1.25, "presence_penalty": 0.5, "frequency_penalty": -1,
        "logit_bias": {"7": -100, "9": 1.5}
    }));
    let params = request.unwrap().params;
    assert_eq!((params.top_k, params.min_p, params.repetition_penalty), (40, 0.5, 1.25));
    assert_eq!((params.presence_penalty, params.frequency_penalty), (0.5, -1.0));
    assert_eq!(params.logit_bias, BTreeMap::from([(7, -100.0), (9, 1.5)]));
}

#[test]
fn an_error_names_the_bad_field_and_says_what_to_do() {
    for (fields, expected) in [
        (json!({"max_tokens": 0}), "max_tokens is 0; give at least 1"),
        (json!({"n": 17}), "n is 17; give 1 to 16"),
        (json!({"n": -1}), "n is -1"),
        (json!({"temperature": 2.5}), "temperature is 2.5; give 0 to 2"),
        (json!({"top_p": 0.0}), "top_p is 0; give more than 0"),
        (json!({"top_p": 1.5}), "top_p is 1.5; give more than 0"),
        (json!({"seed": -4}), "seed is -4; give 0 or a positive"),
        (json!({"logprobs": 6}), "logprobs is 6; give 0 to 5"),
        (json!({"stop": ["a", 1]}), "stop must be a string or a list"),
        (json!({"stop": vec!["a"; 65]}), "at most 64 strings"),
        (json!({"stop": ""}), "stop has a string of 0 bytes"),
        (json!({"prompt": {"text": 1}}), "prompt must be a string"),
        (json!({"suffix": "!"}), "suffix is not offered"),
        (json!({"n": 4, "best_of": 3}), "best_of is 3; give at least n"),
        (json!({"echo": true, "stream": true}), "echo is not streamed"),
        (
            json!({"frequency_penalty": 2.5}),
            "frequency_penalty is 2.5; give -2 to 2",
        ),
        (json!({"presence_penalty": -3}), "presence_penalty is -3; give -2 to 2"),
        (
            json!({"repetition_penalty": 0}),
            "repetition_penalty is 0; give 0.01 to 10",
        ),
        (json!({"top_k": -2}), "top_k is -2; give 1 or more"),
        (json!({"min_p": 1.5}), "min_p is 1.5; give 0 to 1"),
        (
            json!({"logit_bias": {"seven": 1}}),
            "logit_bias must be an object from token ids",
        ),
        (json!({"logit_bias": {"7": 101}}), "logit_bias is 101; give -100 to 100"),
        (json!({"user": ""}), "user has 0 bytes"),
        (json!({"surface": "x".repeat(300)}), "surface has 300 bytes"),
        (json!({"surface": "rollout"}), "surface \"rollout\" is for rollouts"),
        (
            json!({"surface": "environment"}),
            "surface \"environment\" is for rollouts",
        ),
        (json!({"priority": 5_000_000_000i64}), "priority does not fit"),
        (json!({"metadata": {"purpose": "fun"}}), "metadata.purpose is \"fun\""),
        (json!({"metadata": {"run_id": "7"}}), "metadata.run_id is \"7\""),
        (json!({"metadata": {"purpose": "rollout"}}), "give metadata.run_id"),
        (json!({"metadata": {"task_id": 3}}), "metadata.task_id must be a string"),
        (json!({"n": "three"}), "n: invalid type: string \"three\""),
        (
            json!({"temperature": "hot"}),
            "temperature: invalid type: string \"hot\"",
        ),
        (json!({"logprobs": true}), "logprobs: invalid type: boolean"),
        (
            json!({"stream_options": {"include_usage": 1}}),
            "stream_options.include_usage: invalid type: integer",
        ),
    ] {
        let problem = checked(fields.clone()).unwrap_err();
        let detail = problem.detail.clone().unwrap_or_default();
        assert_eq!(problem.status, 400, "{fields}");
        assert!(detail.contains(expected), "{fields}: {detail}");
    }
}

#[test]
fn rollouts_and_evaluations_come_after_those_of_runs_with_a_priority() {
    let priority = |fields| checked(fields).unwrap().priority;
    let run = Uuid::from_u128(1);
    assert_eq!(priority(json!({})), 0);
    for purpose in ["rollout", "evaluation"] {
        let metadata = json!({"purpose": purpose, "run_id": run});
        assert_eq!(
            priority(json!({"metadata": metadata})),
            100,
            "as of a run of priority 0"
        );
        assert_eq!(priority(json!({"metadata": metadata, "priority": 7})), 7);
    }
}

#[test]
fn neutral_values_of_unsupported_fields_are_accepted() {
    checked(json!({"echo": false, "best_of": 2, "n": 2, "frequency_penalty": 0, "logit_bias": {}})).unwrap();
}

#[test]
fn other_keys_of_metadata_are_the_callers_own() {
    let request = checked(json!({"metadata": {"colour": "red", "depth": 3, "task_id": "t"}})).unwrap();
    assert_eq!(request.task_id.as_deref(), Some("t"));
}

#[test]
fn a_rollout_is_background_traffic() {
    let run = Uuid::now_v7();
    let request =
        checked(json!({"metadata": {"purpose": "rollout", "run_id": run.to_string(), "group_id": "g"}})).unwrap();
    assert_eq!(
        (request.class(), request.run_id, request.group_id.as_deref()),
        (TrafficClass::Background, Some(run), Some("g"))
    );
    assert_eq!(request.surface, "rollout");
}

#[test]
fn a_session_is_one_episode_and_the_default_user_key() {
    let first = checked(json!({"session_id": "s1"})).unwrap();
    let again = checked(json!({"session_id": "s1", "user": "u"})).unwrap();
    assert_eq!(first.episode_id, again.episode_id);
    assert_eq!((first.user_key.as_str(), again.user_key.as_str()), ("s1", "u"));
    assert_ne!(episode("default", "s1"), episode("other", "s1"));
    let id = Uuid::now_v7();
    assert_eq!(
        checked(json!({"session_id": id.to_string()})).unwrap().episode_id,
        Some(id)
    );
}

#[test]
fn a_prompt_without_room_for_max_tokens_is_refused_with_the_limits() {
    let version = crate::routing::tests::version(1); // context 32
    let request_for = |n: i64| checked(json!({"max_tokens": n})).unwrap();
    assert_eq!(request_for(2).tokens_to_sample(30, &version, 16).unwrap(), 2);
    let problem = request_for(3).tokens_to_sample(30, &version, 16).unwrap_err();
    assert_eq!(problem.status, 400);
    assert!(
        problem.detail.clone().unwrap().contains("at most 2 tokens"),
        "{problem}"
    );
    assert_eq!(
        checked(json!({})).unwrap().tokens_to_sample(30, &version, 16).unwrap(),
        2
    );
    assert!(checked(json!({})).unwrap().tokens_to_sample(32, &version, 16).is_err());
}

#[test]
fn ids_outside_the_vocabulary_and_text_without_a_tokenizer_are_refused() {
    let version = crate::routing::tests::version(1); // vocabulary 50, no tokenizer
    let error = |fields: Value| {
        let problem = checked(fields).unwrap().prompt_ids(&version).unwrap_err();
        problem.detail.unwrap_or_default()
    };
    assert!(error(json!({"prompt": [1, 50]})).contains("token id 50"));
    assert!(error(json!({"prompt": []})).contains("no tokens"));
    assert!(error(json!({"prompt": [[1, 50]]})).contains("token id 50"));
    assert!(error(json!({"prompt": "text"})).contains("send the prompt as token ids"));
    assert_eq!(
        *checked(json!({"prompt": [1, 49]}))
            .unwrap()
            .prompt_ids(&version)
            .unwrap(),
        [1, 49]
    );
}

#[test]
fn a_callers_seed_holds_only_where_nothing_is_trained_on() {
    let first = |fields: Value| {
        let request = checked(fields).unwrap();
        request.first_seed(&request.params)
    };
    let is_trainable = |request: &GenerationRequest| request.is_trainable(&request.params);
    let seeds: std::collections::BTreeSet<u64> = (0..64).map(|_| first(json!({"seed": 42}))).collect();
    assert_eq!(seeds.len(), 64, "production draws are independent");
    assert!(seeds.iter().all(|seed| *seed < 1 << 63));
    for metadata in [json!({"consent": false}), json!({"purpose": "evaluation"})] {
        assert_eq!(first(json!({"seed": 42, "metadata": metadata})), 42);
    }
    for steered in [
        json!({"logit_bias": {"7": 5}}),
        json!({"repetition_penalty": 1.25}),
        json!({"presence_penalty": -0.5}),
        json!({"frequency_penalty": 0.5}),
        json!({"temperature": 0.01}),
        json!({"temperature": 0.49}),
        json!({"temperature": 1.51}),
    ] {
        let mut fields = steered.clone();
        fields["seed"] = 42.into();
        assert_eq!(first(fields), 42, "{steered}");
        assert!(!is_trainable(&checked(steered).unwrap()));
    }
    for plain in [
        json!({}),
        json!({"temperature": 0.5, "top_p": 0.9}),
        json!({"temperature": 1.5, "top_k": 40, "min_p": 0.1}),
    ] {
        assert!(is_trainable(&checked(plain.clone()).unwrap()), "{plain}");
    }
    let format = json!({"type": "json_object"});
    let body = json!({"model": "demo", "messages": [], "response_format": format, "seed": 42});
    let chat = serde_json::from_value(body).unwrap();
    let constrained = GenerationRequest::chat(chat, &Options::default(), "default").unwrap();
    let seed = constrained.first_seed(&constrained.params);
    assert_eq!((is_trainable(&constrained), seed), (false, 42));
    let run = uuid::Uuid::now_v7().to_string();
    let rollout = json!({"seed": 42, "metadata": {"purpose": "rollout", "run_id": run}});
    assert_eq!(first(rollout), 42);
}

fn bounded(max: Option<f64>) -> Route {
    Route {
        version: version(7),
        arm: "champion".into(),
        probability: 0.6,
        explore: 0.0,
        temperature_max: max,
        probability_min: None,
    }
}

#[test]
fn an_arm_bounds_the_temperature_of_users_requests_and_nothing_else() {
    let temperature = |fields: Value, max| checked(fields).unwrap().params_on(&bounded(max)).temperature;
    assert_eq!(temperature(json!({}), None), 1.0);
    assert_eq!(temperature(json!({}), Some(0.3)), 0.3);
    assert_eq!(temperature(json!({"temperature": 0.2}), Some(0.3)), 0.2);
    assert_eq!(temperature(json!({"temperature": 2}), Some(2.0)), 2.0);
    assert_eq!(temperature(json!({}), Some(0.0)), 0.0, "greedy");
    assert_eq!(
        temperature(json!({"metadata": {"consent": false}}), Some(0.3)),
        0.3,
        "a user, too"
    );
    let run = Uuid::from_u128(1);
    for purpose in ["rollout", "evaluation"] {
        let metadata = json!({"purpose": purpose, "run_id": run});
        assert_eq!(temperature(json!({"metadata": metadata}), Some(0.3)), 1.0, "{purpose}");
    }
    let filtered = checked(json!({"top_p": 0.9, "top_k": 40})).unwrap();
    let expected = Params {
        temperature: 0.5,
        ..filtered.params.clone()
    };
    assert_eq!(filtered.params_on(&bounded(Some(0.5))), expected);
}

#[test]
fn whether_a_callers_seed_holds_follows_from_the_temperature_that_is_sampled_at() {
    let request = |fields: Value| checked(fields).unwrap();
    let hot = request(json!({"temperature": 2, "seed": 42}));
    assert_eq!(hot.first_seed(&hot.params_on(&bounded(None))), 42);
    let cooled = hot.params_on(&bounded(Some(1.0)));
    assert!(hot.is_trainable(&cooled));
    let seeds: std::collections::BTreeSet<u64> = (0..8).map(|_| hot.first_seed(&cooled)).collect();
    assert_eq!(seeds.len(), 8, "the server draws it");
    let cold = request(json!({"seed": 42}));
    let params = cold.params_on(&bounded(Some(0.3)));
    assert_eq!((cold.is_trainable(&params), cold.first_seed(&params)), (false, 42));
}
