//! Judges: what users write next is scored by a model behind an endpoint. Slow, down, or lying: nothing
//! is lost, nothing is guessed, and the trajectory says so.

mod docs;
mod endpoint;
mod kills;
mod outage;
mod queue;
mod world;

use std::collections::BTreeMap;
use std::time::Duration;

use event_log::event::{self, Event, Generation, Retraction, Value};
use event_log::judge::ApiKey;
use ingest::judge;
use ingest::reward::Outcome;
use serde_json::json;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::ingest_order::{hold_the_closer, release_the_closer};
use endpoint::{Endpoint, Reply, completion};
use fixture::ingest::{JSON, Service, Trajectory, count, dead_letters, send, trajectory};
use fixture::{Stack, eventually};
use world::{
    SOON, SOURCE, becomes, feedback_id, follow_up, given_up, judge_of, logged, on, rescored, send_queued, unscored,
    with_judges,
};

#[tokio::test(flavor = "multi_thread")]
async fn answers_become_feedback_and_rewards() {
    let stack = Stack::start("judge-answers").await;
    // Of three votes about the second text, one differs.
    let endpoint = Endpoint::start(|text, before| match text {
        "that is wrong" => Reply::answer(true),
        "thanks" => Reply::answer(before == 1),
        _ => Reply::answer(0.25),
    })
    .await;
    let sad = judge::Options {
        votes: 3,
        api_key: Some(ApiKey::new("sk-judge")),
        ..judge_of(&endpoint)
    };
    let moody = judge::Options {
        name: "mood".to_owned(),
        metric: "mood".to_owned(),
        ..judge_of(&endpoint)
    };
    let service = Service::start_with(&stack, with_judges([sad.clone()])).await;
    let (sad_one, glad_one, silent) = (on("chat"), on("chat"), on("chat"));
    let episode = Uuid::now_v7();
    let turns = [0, 1].map(|turn| Generation {
        episode_id: episode,
        turn,
        ..on("session")
    });
    let texts = send_queued(
        &stack,
        &[
            (&sad_one, "that is wrong"),
            (&glad_one, "thanks"),
            (&turns[0], "that is wrong"),
            (&turns[1], "thanks"),
        ],
    )
    .await;
    send(&stack, &[logged(&silent)]).await;
    let rewarded = |reward| Trajectory::rewarded(reward, "expression");
    assert_eq!(trajectory(&stack.pool, sad_one.id).await, rewarded(-1.0));
    assert_eq!(trajectory(&stack.pool, glad_one.id).await, rewarded(0.5));
    // Nobody wrote anything, so there is nothing to wait for.
    assert_eq!(
        trajectory(&stack.pool, silent.id).await,
        Trajectory::censored("no_feedback")
    );
    for turn in &turns {
        assert_eq!(trajectory(&stack.pool, turn.id).await, rewarded(0.0));
    }
    let of_turns: Vec<f64> = sqlx::query_scalar(
        "select turn_reward from trajectory t join generation g on g.id = t.generation_id \
         where g.surface = 'session' order by g.turn",
    )
    .fetch_all(&stack.pool)
    .await
    .unwrap();
    assert_eq!(of_turns, [-1.0, 1.0]);

    // An answer is feedback of the judge, given when the text was.
    let (metric, value, tags, at_once, source): (String, bool, serde_json::Value, bool, String) = sqlx::query_as(
        "select a.metric_name, a.value_bool, a.tags, a.given_at = f.given_at and not a.late, k.source \
         from judgement j join feedback f on f.id = j.feedback_id join feedback a on a.id = j.answer_id \
         join event_key k on k.event_id = a.id::text where j.feedback_id = $1",
    )
    .bind(feedback_id(&texts[1]))
    .fetch_one(&stack.pool)
    .await
    .unwrap();
    assert_eq!((metric.as_str(), value, at_once), ("dissatisfied", false, true));
    assert_eq!(source, "springtide/judge/sadness");
    assert_eq!(tags["judge"], "sadness");
    assert_eq!(tags["judged_feedback_id"], json!(feedback_id(&texts[1])));
    let (version, votes): (String, Vec<f64>) =
        sqlx::query_as("select encode(version, 'hex'), votes from judgement where feedback_id = $1")
            .bind(feedback_id(&texts[1]))
            .fetch_one(&stack.pool)
            .await
            .unwrap();
    assert_eq!((&tags["judge_version"], votes), (&json!(version), vec![0.0, 1.0, 0.0]));
    // The session's texts are those of before.
    assert_eq!(endpoint.questions().len(), 6);
    for question in endpoint.questions() {
        assert_eq!(question.authorization.as_deref(), Some("Bearer sk-judge"));
        assert_eq!(question.body["response_format"]["type"], "json_schema");
        assert_eq!(question.body["model"], "small");
    }
    service.stop().await;

    // Another judge may be added. It reads what is written from then on.
    let service = Service::start_with(&stack, with_judges([sad, moody])).await;
    let so_so = on("moody");
    hold_the_closer(&stack.pool, &stack.kafka.topics().generation).await;
    send(&stack, &[logged(&so_so), follow_up(&so_so, "thanks")]).await;
    becomes(&stack.pool, "select count(*) from judgement", 6).await;
    release_the_closer(&stack.pool).await;
    // The endpoint says a boolean to the second question, too.
    let error = "select count(*) from judgement where judge = 'mood' and reason is not null and answered_at is null";
    becomes(&stack.pool, error, 1).await;
    assert_eq!(
        count(&stack.pool, "select count(*) from trajectory where surface = 'moody'").await,
        0
    );
    service.stop().await;

    // Of older texts it knows nothing, and what would read its answer says so.
    let mut options = with_judges([judge::Options {
        name: "mood".to_owned(),
        metric: "mood".to_owned(),
        ..judge_of(&endpoint)
    }]);
    options.surface[0].reward = Some("mood == null ? 0.25 : mood".to_owned());
    let outcomes = rescored(&stack, &options, "chat", false).await;
    let rewarded_none = |outcome: &Outcome| matches!(outcome, Outcome::Rewarded { reward, .. } if *reward == 0.25);
    assert_eq!(outcomes[&sad_one.id], Outcome::Censored { code: "unscored_judge" });
    assert!(!rewarded_none(&outcomes[&glad_one.id]), "{outcomes:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trajectory_waits_for_its_judge_after_its_horizon() {
    let stack = Stack::start("judge-waits").await;
    let answers = CancellationToken::new();
    let held = answers.clone();
    let endpoint = Endpoint::start(move |_, _| Reply::After(held.clone(), Box::new(Reply::answer(false)))).await;
    let judge = judge::Options {
        timeout_seconds: 600.0,
        ..judge_of(&endpoint)
    };
    let service = Service::start_with(&stack, with_judges([judge])).await;
    let (single, turn) = (on("chat"), on("session"));
    send_queued(&stack, &[(&single, "go on"), (&turn, "and then?")]).await;
    // Both have been looked at after their end, and wait.
    for postponed in [
        "select count(*) from open_generation o join generation g on g.id = o.generation_id \
         where o.episode_id is null and o.closes_at > greatest(g.finished_at, g.stored_at) + interval '2.5 s'",
        "select count(*) from open_episode where closes_at > turn_stored_at + interval '2.5 s'",
    ] {
        becomes(&stack.pool, postponed, 1).await;
    }
    assert_eq!(count(&stack.pool, "select count(*) from trajectory").await, 0);
    answers.cancel();
    for id in [single.id, turn.id] {
        assert_eq!(
            trajectory(&stack.pool, id).await,
            Trajectory::rewarded(0.5, "expression")
        );
    }
    let at_its_end = "select count(*) from trajectory t join generation g on g.id = t.generation_id \
                      where t.closes_at = g.finished_at + interval '2 s'";
    assert_eq!(
        count(&stack.pool, at_its_end).await,
        2,
        "waiting does not move the horizon"
    );
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_answer_is_late_and_a_rescore_uses_it() {
    let stack = Stack::start("judge-slow").await;
    let answers = CancellationToken::new();
    let held = answers.clone();
    let endpoint = Endpoint::start(move |_, _| Reply::After(held.clone(), Box::new(Reply::answer(true)))).await;
    let options = with_judges([judge::Options {
        patience_seconds: 0.5,
        timeout_seconds: 600.0,
        ..judge_of(&endpoint)
    }]);
    let service = Service::start_with(&stack, options.clone()).await;
    let (waiting, other) = (on("chat"), on("completion"));
    let episode = Uuid::now_v7();
    let turns = [0, 1].map(|turn| Generation {
        episode_id: episode,
        turn,
        ..on("session")
    });
    let texts = [
        (&waiting, "that is wrong"),
        (&other, "so what"),
        (&turns[0], "no"),
        (&turns[1], "no"),
    ];
    let sent = send_queued(&stack, &texts).await;
    for id in [waiting.id, turns[0].id, turns[1].id] {
        assert_eq!(trajectory(&stack.pool, id).await, unscored());
    }
    // Its rule reads no judge.
    assert_eq!(
        trajectory(&stack.pool, other.id).await,
        Trajectory::censored("no_feedback")
    );
    let missing = Outcome::Censored { code: "unscored_judge" };
    let scores = async |surface: &str, as_seen| rescored(&stack, &options, surface, as_seen).await;
    assert_eq!(scores("chat", false).await[&waiting.id], missing);
    assert_eq!(scores("session", false).await[&turns[0].id], missing);

    answers.cancel();
    becomes(
        &stack.pool,
        "select count(*) from feedback where metric_name = 'dissatisfied' and late",
        4,
    )
    .await;
    for (surface, id, reward) in [("chat", waiting.id, -1.0), ("session", turns[0].id, -0.5)] {
        let again = &scores(surface, false).await[&id];
        assert!(
            matches!(again, Outcome::Rewarded { reward: is, .. } if *is == reward),
            "{again:?}"
        );
        assert_eq!(scores(surface, true).await[&id], missing);
    }
    assert_eq!(trajectory(&stack.pool, waiting.id).await, unscored());
    // With another horizon the answers would have come in time.
    let mut longer = options.clone();
    for surface in &mut longer.surface {
        surface.horizon_seconds = 600.0;
    }
    for (surface, id, reward) in [("chat", waiting.id, -1.0), ("session", turns[0].id, -0.5)] {
        let again = &rescored(&stack, &longer, surface, true).await[&id];
        assert!(
            matches!(again, Outcome::Rewarded { reward: is, .. } if *is == reward),
            "{again:?}"
        );
    }
    // The text was there when the trajectory closed, and its retraction was not.
    let retraction = Retraction {
        id: Uuid::now_v7(),
        feedback_id: feedback_id(&sent[0]),
        reason: String::new(),
    };
    let retraction = retraction.into_event("default", SOURCE, sent[0].time + Duration::from_millis(10));
    send(&stack, &[retraction]).await;
    becomes(&stack.pool, "select count(*) from retraction", 1).await;
    assert_eq!(scores("chat", true).await[&waiting.id], missing);
    assert_eq!(
        scores("chat", false).await[&waiting.id],
        Outcome::Censored { code: "retracted" }
    );
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_by_the_schema_is_an_error_and_nothing_is_guessed() {
    let right = r#"{"answer": 0.5}"#;
    let mut no_choices = completion(right, "stop");
    no_choices["choices"] = json!([]);
    let mut refusal = completion(right, "stop");
    refusal["choices"][0]["message"]["refusal"] = json!("I would rather not.");
    let lies = [
        ("Half of it is wrong.", Reply::Says("0.5".to_owned()), "not_schema"),
        ("prose", Reply::Says("The mood is 0.5.".to_owned()), "not_schema"),
        ("text", Reply::answer("0.5"), "not_schema"),
        ("boolean", Reply::answer(true), "not_schema"),
        ("more", Reply::Says(format!("{right} Anything else?")), "not_schema"),
        ("range", Reply::answer(1.5), "out_of_range"),
        ("no choices", Reply::Body(no_choices), "malformed"),
        ("no completion", Reply::Body(json!({"answer": 0.5})), "malformed"),
        ("cut off", Reply::Body(completion(right, "length")), "truncated"),
        ("refusal", Reply::Body(refusal), "refused"),
        ("bad request", Reply::Status(400, Some(600)), "http_error"),
        ("too long", Reply::Status(413, Some(600)), "http_error"),
        ("no such schema", Reply::Status(422, None), "http_error"),
    ];
    let stack = Stack::start("judge-lies").await;
    let replies: BTreeMap<&str, Reply> = lies.iter().map(|(text, reply, _)| (*text, reply.clone())).collect();
    let endpoint = Endpoint::start(move |text, _| replies[text].clone()).await;
    let judge = judge::Options {
        metric: "mood".to_owned(),
        attempts_max: 1,
        ..judge_of(&endpoint)
    };
    let service = Service::start_with(&stack, with_judges([judge])).await;
    let generations: Vec<Generation> = lies.iter().map(|_| on("moody")).collect();
    let turns: Vec<(&Generation, &str)> = generations.iter().zip(&lies).map(|(one, lie)| (one, lie.0)).collect();
    let texts = send_queued(&stack, &turns).await;
    for ((generation, text), (name, _, code)) in generations.iter().zip(&texts).zip(&lies) {
        assert_eq!(given_up(&stack.pool, text).await, ((*code).to_owned(), 1), "{name}");
        assert_eq!(trajectory(&stack.pool, generation.id).await, unscored(), "{name}");
        assert_eq!(endpoint.times(name), 1);
    }
    let answers = "select count(*) from feedback where metric_name = 'mood'";
    assert_eq!(count(&stack.pool, answers).await, 0);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_else_may_answer_for_a_judge() {
    let stack = Stack::start("judge-forged").await;
    let endpoint = Endpoint::start(|_, _| Reply::answer(true)).await;
    let service = Service::start_with(&stack, with_judges([judge_of(&endpoint)])).await;
    let judged = on("chat");
    let forged = |source: &str, metric: &str, value: serde_json::Value| json!({"generation_id": judged.id, "metric_name": metric, "value": value, "source": source});
    for (source, metric, value, field) in [
        ("app", "dissatisfied", json!(false), "metric_name"),
        ("springtide/judge/sadness", "dissatisfied", json!(false), "source"),
        ("springtide/judge/anybody", "mood", json!(1.0), "source"),
    ] {
        let (status, problem) = service.post("/v1/feedback", &forged(source, metric, value)).await;
        assert_eq!((status, &problem["field"]), (400, &json!(field)), "{problem}");
    }
    let answer = json!({
        "feedback_id": Uuid::now_v7(), "generation_id": judged.id, "metric_name": "dissatisfied", "value": false,
    });
    let time = "2026-11-21T10:00:00Z";
    let event = json!([{"source": "springtide/judge/sadness", "id": "1", "time": time, "feedback": answer}]);
    let (status, outcomes) = service.post("/v1/events:batch", &event).await;
    assert_eq!(
        (status, &outcomes["results"][0]["status"]),
        (207, &json!(400)),
        "{outcomes}"
    );
    let cloud = [
        JSON,
        ("ce-specversion", "1.0"),
        ("ce-type", "springtide.feedback.v1"),
        ("ce-source", "springtide/judge/sadness"),
        ("ce-id", "2"),
    ];
    let (status, _, problem) = service.post_with("/v1/events", &cloud, answer.to_string()).await;
    assert_eq!((status, &problem["field"]), (400, &json!("source")), "{problem}");
    // Past the API: a producer that writes to the log.
    let mut passed_by = follow_up(&judged, "");
    if let event::Body::Feedback(feedback) = &mut passed_by.body {
        (feedback.metric_name, feedback.value) = ("dissatisfied".to_owned(), Value::Bool(false));
    }
    send(&stack, &[passed_by]).await;
    let letters = dead_letters(&stack, 1).await;
    assert_eq!(letters[0].headers["reason"], "invalid", "{:?}", letters[0].headers);
    assert_eq!(count(&stack.pool, "select count(*) from feedback").await, 0);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn texts_without_consent_of_other_tenants_or_retracted_are_not_asked_about() {
    let stack = Stack::start("judge-consent").await;
    let endpoint = Endpoint::start(|_, _| Reply::answer(true)).await;
    let judge = judge::Options {
        tenants: vec!["default".to_owned()],
        ..judge_of(&endpoint)
    };
    let options = with_judges([judge]);
    let service = Service::start_with(&stack, options.clone()).await;
    let refused = Generation {
        consent: false,
        ..on("chat")
    };
    let taken_back = on("chat");
    let texts = send_queued(&stack, &[(&refused, "without consent"), (&taken_back, "taken back")]).await;
    assert_eq!(given_up(&stack.pool, &texts[0]).await, ("no_consent".to_owned(), 0));
    let no_consent = Trajectory::censored("no_consent");
    assert_eq!(trajectory(&stack.pool, refused.id).await, no_consent);
    assert_eq!(
        trajectory(&stack.pool, taken_back.id).await,
        Trajectory::rewarded(-1.0, "expression")
    );

    let (later, foreign) = (on("chat"), on("chat"));
    hold_the_closer(&stack.pool, &stack.kafka.topics().generation).await;
    let text = follow_up(&later, "taken back");
    let retraction = Retraction {
        id: Uuid::now_v7(),
        feedback_id: feedback_id(&text),
        reason: String::new(),
    };
    let retraction = retraction.into_event("default", SOURCE, text.time + Duration::from_millis(10));
    let of_another = [logged(&foreign), follow_up(&foreign, "of another tenant")].map(|event| Event {
        tenant: "other".to_owned(),
        ..event
    });
    send(&stack, &[logged(&later), text]).await;
    send(&stack, &of_another).await;
    // The answer is there, and goes with its text.
    becomes(
        &stack.pool,
        "select count(*) from feedback where metric_name = 'dissatisfied'",
        2,
    )
    .await;
    send(&stack, &[retraction]).await;
    becomes(&stack.pool, "select count(*) from retraction", 1).await;
    release_the_closer(&stack.pool).await;
    let retracted = Trajectory::censored("retracted");
    assert_eq!(trajectory(&stack.pool, later.id).await, retracted);
    assert_eq!(
        trajectory(&stack.pool, foreign.id).await,
        Trajectory::censored("no_feedback")
    );
    let asked: Vec<String> = endpoint.questions().into_iter().map(|question| question.text).collect();
    assert_eq!(asked, ["taken back"]);
    let censored = |code| Outcome::Censored { code };
    let outcomes = rescored(&stack, &options, "chat", false).await;
    assert_eq!(
        outcomes[&foreign.id],
        censored("no_feedback"),
        "its tenant has no answers"
    );
    // A judge that should have read the text, and has not.
    let outcomes = rescored(&stack, &with_judges([judge_of(&endpoint)]), "chat", false).await;
    assert_eq!(outcomes[&later.id], censored("retracted"));
    assert_eq!(outcomes[&foreign.id], censored("unscored_judge"));
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queued_text_of_a_tenant_that_the_judge_no_longer_reads_is_not_sent() {
    let stack = Stack::start("judge-tenants").await;
    let endpoint = Endpoint::start(|_, _| Reply::Status(503, None)).await;
    let service = Service::start_with(&stack, with_judges([judge_of(&endpoint)])).await;
    let generation = on("chat");
    let texts = send_queued(&stack, &[(&generation, "not for you")]).await;
    eventually("it is asked about", SOON, async || {
        (endpoint.times("not for you") > 0).then_some(())
    })
    .await;
    service.stop().await;
    let asked = endpoint.times("not for you");
    let judge = judge::Options {
        tenants: vec!["another".to_owned()],
        ..judge_of(&endpoint)
    };
    let service = Service::start_with(&stack, with_judges([judge])).await;
    assert_eq!(given_up(&stack.pool, &texts[0]).await, ("other_tenant".to_owned(), 0));
    assert_eq!(endpoint.times("not for you"), asked);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_faulty_vote_is_asked_for_once_more() {
    let stack = Stack::start("judge-votes").await;
    // The second of three votes is faulty once, or twice.
    let endpoint = Endpoint::start(|text, before| match (text, before) {
        (_, 1) | ("twice", 2) => Reply::Says("prose".to_owned()),
        _ => Reply::answer(true),
    })
    .await;
    let judge = judge::Options {
        votes: 3,
        attempts_max: 1,
        ..judge_of(&endpoint)
    };
    let service = Service::start_with(&stack, with_judges([judge])).await;
    let (once, twice) = (on("chat"), on("chat"));
    let texts = send_queued(&stack, &[(&once, "once"), (&twice, "twice")]).await;
    assert_eq!(
        trajectory(&stack.pool, once.id).await,
        Trajectory::rewarded(-1.0, "expression")
    );
    assert_eq!(given_up(&stack.pool, &texts[1]).await, ("not_schema".to_owned(), 1));
    assert_eq!((endpoint.times("once"), endpoint.times("twice")), (4, 3));
    service.stop().await;
}
