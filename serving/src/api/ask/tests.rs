use super::*;
use serde_json::json;

fn ask(fields: Value) -> Result<Ask, Problem> {
    let mut body = json!({"model": "demo", "prompt": "fn main"});
    if let (Value::Object(body), Value::Object(fields)) = (&mut body, fields) {
        body.extend(fields);
    }
    Ask::new(
        serde_json::from_value(body).unwrap(),
        &ServeOptions::default(),
        "default",
    )
}

#[test]
fn what_is_left_out_has_its_openai_default() {
    let ask = ask(json!({})).unwrap();
    assert_eq!((ask.n, ask.params.temperature, ask.params.top_p), (1, 1.0, 1.0));
    assert_eq!(
        (ask.surface.as_str(), ask.purpose, ask.class()),
        ("completion", Purpose::Production, Class::Production)
    );
    assert!(ask.user_key.starts_with("anonymous-") && ask.consent && !ask.stream);
    assert_eq!(ask.episode_id, None);
}

#[test]
fn what_shapes_the_distribution_is_understood() {
    let ask = ask(json!({
        "top_k": 40, "min_p": 0.5, "repetition_penalty": 1.25, "presence_penalty": 0.5, "frequency_penalty": -1,
        "logit_bias": {"7": -100, "9": 1.5}
    }));
    let params = ask.unwrap().params;
    assert_eq!((params.top_k, params.min_p, params.repetition_penalty), (40, 0.5, 1.25));
    assert_eq!((params.presence_penalty, params.frequency_penalty), (0.5, -1.0));
    assert_eq!(params.logit_bias, BTreeMap::from([(7, -100.0), (9, 1.5)]));
}

#[test]
fn every_bad_field_is_named_with_what_to_do() {
    for (fields, said) in [
        (json!({"max_tokens": 0}), "max_tokens is 0; give at least 1"),
        (json!({"n": 17}), "n is 17; give 1 to 16"),
        (json!({"n": -1}), "n is -1"),
        (json!({"temperature": 2.5}), "temperature is 2.5; give 0 to 2"),
        (json!({"top_p": 0.0}), "top_p is 0; give more than 0"),
        (json!({"top_p": 1.5}), "top_p is 1.5; give 0 to 1"),
        (json!({"seed": -4}), "seed is -4; give 0 or a positive"),
        (json!({"logprobs": 6}), "logprobs is 6; give 0 to 5"),
        (json!({"stop": ["a", 1]}), "stop must be a string or a list"),
        (json!({"stop": ["a", "b", "c", "d", "e"]}), "at most 4 strings"),
        (json!({"stop": ""}), "a stop string has 0 bytes"),
        (json!({"prompt": ["a", "b"]}), "send one request per prompt"),
        (json!({"prompt": {"text": 1}}), "prompt must be one string"),
        (json!({"echo": true}), "echo is not offered"),
        (json!({"best_of": 3}), "best_of is not offered"),
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
        (json!({"priority": 5_000_000_000i64}), "priority does not fit"),
        (json!({"metadata": {"purpose": "fun"}}), "metadata.purpose is \"fun\""),
        (json!({"metadata": {"run_id": "7"}}), "metadata.run_id is \"7\""),
        (json!({"metadata": {"purpose": "rollout"}}), "give metadata.run_id"),
        (json!({"metadata": {"colour": "red"}}), "metadata.colour is not known"),
        (json!({"metadata": {"task_id": 3}}), "metadata.task_id must be a string"),
    ] {
        let problem = ask(fields.clone()).unwrap_err();
        let detail = problem.detail.clone().unwrap_or_default();
        assert_eq!(problem.status, 400, "{fields}");
        assert!(detail.contains(said), "{fields}: {detail}");
    }
}

#[test]
fn neutral_values_of_what_is_not_offered_are_accepted() {
    ask(json!({"echo": false, "best_of": 2, "n": 2, "frequency_penalty": 0, "logit_bias": {}})).unwrap();
}

#[test]
fn a_rollout_waits_behind_users() {
    let run = Uuid::now_v7();
    let ask = ask(json!({"metadata": {"purpose": "rollout", "run_id": run.to_string(), "group_id": "g"}})).unwrap();
    assert_eq!(
        (ask.class(), ask.run_id, ask.group_id.as_deref()),
        (Class::Background, Some(run), Some("g"))
    );
    assert_eq!(ask.surface, "rollout");
}

#[test]
fn a_session_is_one_episode_and_its_user_where_none_is_named() {
    let first = ask(json!({"session_id": "s1"})).unwrap();
    let again = ask(json!({"session_id": "s1", "user": "u"})).unwrap();
    assert_eq!(first.episode_id, again.episode_id);
    assert_eq!((first.user_key.as_str(), again.user_key.as_str()), ("s1", "u"));
    assert_ne!(episode("default", "s1"), episode("other", "s1"));
    let id = Uuid::now_v7();
    assert_eq!(ask(json!({"session_id": id.to_string()})).unwrap().episode_id, Some(id));
}

#[test]
fn a_prompt_that_leaves_no_room_is_refused_with_the_numbers() {
    let version = crate::routing::tests::version(1); // context 32
    let ask_for = |n: i64| ask(json!({"max_tokens": n})).unwrap();
    assert_eq!(ask_for(2).room(30, &version, 16).unwrap(), 2);
    let problem = ask_for(3).room(30, &version, 16).unwrap_err();
    assert_eq!(problem.status, 400);
    assert!(
        problem.detail.clone().unwrap().contains("at most 2 tokens"),
        "{problem}"
    );
    assert_eq!(ask(json!({})).unwrap().room(30, &version, 16).unwrap(), 2);
    assert!(ask(json!({})).unwrap().room(32, &version, 16).is_err());
}

#[test]
fn ids_outside_the_vocabulary_and_texts_without_a_tokenizer_are_refused() {
    let version = crate::routing::tests::version(1); // vocabulary 50, no tokenizer
    let said = |fields: Value| {
        let problem = ask(fields).unwrap().prompt_ids(&version).unwrap_err();
        problem.detail.unwrap_or_default()
    };
    assert!(said(json!({"prompt": [1, 50]})).contains("token id 50"));
    assert!(said(json!({"prompt": []})).contains("no tokens"));
    assert!(said(json!({"prompt": "text"})).contains("send the prompt as token ids"));
    assert_eq!(
        *ask(json!({"prompt": [1, 49]})).unwrap().prompt_ids(&version).unwrap(),
        [1, 49]
    );
}
