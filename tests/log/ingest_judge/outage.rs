//! An endpoint that does not answer: no text is to blame, so none is given up, and the whole queue waits.

use std::time::Duration;

use ingest::judge;
use tokio_util::sync::CancellationToken;

use super::endpoint::{Endpoint, Question, Reply};
use super::world::{SOON, becomes, feedback_id, given_up, judge_at, judge_of, on, send_queued, unscored, with_judges};
use fixture::ingest::{Service, Trajectory, trajectory};
use fixture::{Stack, eventually};

/// What an endpoint says that restarts, limits, is moved or has another key.
const FAULTS: [Reply; 6] = [
    Reply::Status(500, None),
    Reply::Status(429, Some(3)),
    Reply::Status(401, Some(600)),
    Reply::Status(403, None),
    Reply::Status(307, None),
    Reply::Status(503, None),
];

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_uses_up_no_attempts() {
    let stack = Stack::start("judge-down").await;
    let endpoint = Endpoint::start(|text, before| match text {
        "good" => FAULTS.get(before).cloned().unwrap_or(Reply::answer(false)),
        _ => Reply::Says("prose".to_owned()),
    })
    .await;
    let judge = judge::Options {
        attempts_max: 2,
        ..judge_of(&endpoint)
    };
    let service = Service::start_with(&stack, with_judges([judge])).await;
    let (good, bad) = (on("chat"), on("chat"));
    let texts = send_queued(&stack, &[(&good, "good"), (&bad, "bad")]).await;
    assert_eq!(
        trajectory(&stack.pool, good.id).await,
        Trajectory::rewarded(0.5, "expression")
    );
    assert_eq!(endpoint.times("good"), FAULTS.len() + 1);
    let attempts = "select count(*) from judgement where attempts = 0 and answered_at is not null";
    becomes(&stack.pool, attempts, 1).await;
    // Faults of answers do.
    assert_eq!(given_up(&stack.pool, &texts[1]).await, ("not_schema".to_owned(), 2));
    assert_eq!(trajectory(&stack.pool, bad.id).await, unscored());
    assert_eq!(endpoint.times("bad"), 2);
    let reason: Option<String> = sqlx::query_scalar("select reason from judgement where feedback_id = $1")
        .bind(feedback_id(&texts[0]))
        .fetch_one(&stack.pool)
        .await
        .unwrap();
    assert_eq!(reason, None, "an answer has no fault");
    service.stop().await;

    let [nobody] = edge::bind::free_ports().unwrap();
    let refused = judge::Options {
        name: "mood".to_owned(),
        metric: "mood".to_owned(),
        attempts_max: 1,
        patience_seconds: 0.5,
        ..judge_at(format!("http://127.0.0.1:{nobody}/v1"))
    };
    let service = Service::start_with(&stack, with_judges([refused])).await;
    let nobody_there = on("moody");
    send_queued(&stack, &[(&nobody_there, "hello?")]).await;
    assert_eq!(trajectory(&stack.pool, nobody_there.id).await, unscored());
    let still_queued = "select count(*) from judgement where judge = 'mood' and reason is not null \
                        and next_at is not null and error is null and attempts = 0";
    becomes(&stack.pool, still_queued, 1).await;
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_that_the_endpoint_asks_for_is_for_all_texts() {
    let stack = Stack::start("judge-pause").await;
    let together = CancellationToken::new();
    let held = together.clone();
    // The first four are asked together; the pause that they are given is for all texts.
    let endpoint = Endpoint::start(move |text, before| match text.strip_prefix("first ") {
        Some(_) if before == 0 => Reply::After(held.clone(), Box::new(Reply::Status(429, Some(3)))),
        _ => Reply::answer(false),
    })
    .await;
    let service = Service::start_with(&stack, with_judges([judge_of(&endpoint)])).await;
    let generations: Vec<_> = (0..8).map(|_| on("chat")).collect();
    let words: Vec<String> = (0..8)
        .map(|nth| format!("{} {nth}", if nth < 4 { "first" } else { "then" }))
        .collect();
    let turns: Vec<_> = generations.iter().zip(words.iter().map(String::as_str)).collect();
    send_queued(&stack, &turns[..4]).await;
    eventually("four are asked about", SOON, async || {
        (endpoint.questions().len() == 4).then_some(())
    })
    .await;
    send_queued(&stack, &turns[4..]).await;
    let limited = std::time::Instant::now();
    together.cancel();
    for generation in &generations {
        assert_eq!(
            trajectory(&stack.pool, generation.id).await,
            Trajectory::rewarded(0.5, "expression")
        );
    }
    let later: Vec<Question> = endpoint.questions().split_off(4);
    for question in &later {
        assert!(
            question.at - limited >= Duration::from_secs(3),
            "{}: Retry-After is for all texts",
            question.text
        );
    }
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_text_for_which_the_model_takes_too_long_is_given_up_while_others_are_answered() {
    let stack = Stack::start("judge-poison").await;
    let never = CancellationToken::new();
    let endpoint = Endpoint::start(move |text, _| match text {
        "poison" => Reply::After(never.clone(), Box::new(Reply::answer(false))),
        _ => Reply::answer(false),
    })
    .await;
    let judge = judge::Options {
        timeout_seconds: 0.5,
        attempts_max: 2,
        ..judge_of(&endpoint)
    };
    let service = Service::start_with(&stack, with_judges([judge])).await;
    let (first, poison) = (on("chat"), on("chat"));
    let texts = send_queued(&stack, &[(&first, "fine"), (&poison, "poison")]).await;
    let is_given_up = async || -> bool {
        let row = sqlx::query_scalar("select error is not null from judgement where feedback_id = $1");
        row.bind(feedback_id(&texts[1])).fetch_one(&stack.pool).await.unwrap()
    };
    let mut sent = 0;
    while !is_given_up().await {
        assert!(sent < 200, "it is asked about again and again");
        let text = format!("fine {sent}");
        send_queued(&stack, &[(&on("chat"), &text)]).await;
        eventually("it is answered", SOON, async || {
            (endpoint.times(&text) > 0).then_some(())
        })
        .await;
        sent += 1;
    }
    assert_eq!(given_up(&stack.pool, &texts[1]).await, ("timeout".to_owned(), 2));
    service.stop().await;
}
