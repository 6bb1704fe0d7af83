//! Requests that are answered a second time, unseen, and requests that nobody waits for.

use super::*;

impl Server {
    /// All of champion's requests are answered by version 1, too.
    fn shadow_all(&self) {
        let loaded = self.api.routes.served().into_iter();
        let versions = loaded.map(|(version, _)| (version.serial, version)).collect();
        let mut shadowed = assignment(6, &[("champion", 7), ("canary", 1)], &[("champion", 1.0)]);
        shadowed.shadow = 1.0;
        self.api.routes.apply(shadowed, versions);
    }

    /// Waits until every choice is logged or has nothing to log.
    async fn settle(&self) {
        self.api.choices.close();
        self.api.choices.wait().await;
    }
}

#[tokio::test]
async fn a_request_of_champion_is_answered_a_second_time_and_nobody_sees_it() {
    let server = server().await;
    server.shadow_all();
    let body = json!({"model": "demo", "prompt": "a", "max_tokens": 3, "n": 2, "user": "ada"});
    let (status, answer) = server.complete(body.clone()).await;
    assert_eq!(status, 200, "{answer}");
    assert!(
        answer["choices"]
            .as_array()
            .unwrap()
            .iter()
            .all(|choice| choice["version"] == 7),
        "{answer}"
    );
    server.settle().await;
    let (unseen, seen): (Vec<Generation>, Vec<Generation>) = server
        .log
        .generations()
        .into_iter()
        .partition(|generation| generation.arm == "shadow");
    assert_eq!((seen.len(), unseen.len()), (2, 2), "each choice");
    let ids: Vec<String> = seen.iter().map(|generation| generation.id.to_string()).collect();
    for generation in unseen {
        assert!(
            ids.contains(generation.group_id.as_ref().unwrap()),
            "the answer that it repeats"
        );
        assert_eq!(
            (generation.purpose, generation.versions[0].version),
            (Purpose::Evaluation, 1)
        );
        assert_eq!(
            (generation.token_ids.as_slice(), &*generation.user_key),
            (&[1, 2, 3][..], "ada")
        );
        assert!(!generation.consent && generation.arm_probability == 1.0);
    }
}

#[tokio::test]
async fn unseen_answers_that_a_shutdown_ends_are_not_failures() {
    // production leaves no slot
    let options = Options {
        slots: 2,
        slots_reserved_for_production: 2,
        ..Options::default()
    };
    let server = server_with(0, options).await;
    server.shadow_all();
    let body = json!({"model": "demo", "prompt": "a", "max_tokens": 1});
    assert_eq!(server.complete(body).await.0, 200);
    assert_eq!(server.api.choices.len(), 1, "it waits");
    server.api.shadow.end();
    server.settle().await;
    let arms: Vec<String> = server
        .log
        .generations()
        .into_iter()
        .map(|generation| generation.arm)
        .collect();
    assert_eq!(arms, ["champion"]);
}

#[tokio::test]
async fn what_names_a_version_or_may_not_be_trained_on_is_answered_once() {
    let server = server().await;
    server.shadow_all();
    let body =
        |model: &str, metadata: Value| json!({"model": model, "prompt": "a", "max_tokens": 2, "metadata": metadata});
    server.complete(body("demo@champion", json!({}))).await;
    server.complete(body("demo", json!({"consent": false}))).await;
    server.complete(body("demo", json!({"purpose": "evaluation"}))).await;
    server.api.shadow.end();
    server.complete(body("demo", json!({}))).await;
    server.settle().await;
    assert!(
        server
            .log
            .generations()
            .iter()
            .all(|generation| generation.arm == "champion")
    );
}

#[tokio::test]
async fn a_user_who_leaves_before_the_first_token_is_logged_without_tokens() {
    let options = Options {
        slots: 1,
        slots_reserved_for_production: 0,
        ..Options::default()
    };
    let server = server_with(100, options).await;
    let body = json!({"model": "demo@1", "prompt": "a", "max_tokens": 20, "stream": true});
    let first = server.post(body.clone()).await;
    let left = tokio::time::timeout(Duration::from_millis(300), server.post(body.clone())).await;
    assert!(left.is_err(), "it waits for the slot");
    assert_eq!(with_deadline(&server, "300", body.clone()).await.status(), 504);
    // a rollout that nobody waits for is no evidence
    let mut evaluation = body;
    evaluation["metadata"] = json!({"purpose": "evaluation"});
    let left = tokio::time::timeout(Duration::from_millis(300), server.post(evaluation)).await;
    assert!(left.is_err(), "it waits, too");
    drop(first);
    server.settle().await;
    let logged = server.log.generations();
    let without_tokens: Vec<&Generation> = logged
        .iter()
        .filter(|generation| generation.token_ids.is_empty())
        .collect();
    assert_eq!((logged.len(), without_tokens.len()), (3, 2), "{logged:?}");
    for generation in without_tokens {
        assert_eq!(generation.untrainable.as_deref(), Some("no_first_token"));
        assert_eq!(
            (generation.finish_reason, generation.versions[0].version),
            (FinishReason::Abort, 1)
        );
    }
}

#[tokio::test]
async fn what_a_rollout_did_not_wait_for_is_not_trained_on_and_what_a_user_left_is() {
    // a whole answer takes 2 s
    let server = server_with(100, Options::default()).await;
    let production = json!({"model": "demo", "prompt": "a", "max_tokens": 20, "stream": true});
    let mut rollout = production.clone();
    rollout["metadata"] = json!({"purpose": "rollout", "run_id": uuid::Uuid::now_v7()});
    for body in [&production, &rollout] {
        drop(server.post(body.clone()).await);
    }
    drop(with_deadline(&server, "400", rollout.clone()).await);
    let mut whole = rollout;
    (whole["max_tokens"], whole["stream"]) = (json!(1), json!(false));
    assert_eq!(server.complete(whole).await.0, 200);
    server.settle().await;
    let mut ends: Vec<_> = server.log.generations();
    ends.sort_by_key(|generation| {
        (
            generation.purpose == Purpose::Rollout,
            generation.finish_reason.as_str(),
        )
    });
    let ends: Vec<_> = ends
        .iter()
        .map(|generation| (generation.finish_reason.as_str(), generation.untrainable.as_deref()))
        .collect();
    assert_eq!(
        ends,
        [
            ("abort", None),
            ("abort", Some("caller_gone")),
            ("abort", Some("caller_gone")),
            ("length", None)
        ]
    );
}
