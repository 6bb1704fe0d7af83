//! The queue of a judge: each text once, in several processes, and no tenant keeps another's waiting.

use event_log::event::Event;
use ingest::judge;
use tokio_util::sync::CancellationToken;

use super::endpoint::{Endpoint, Reply};
use super::world::{SOON, becomes, feedback_id, follow_up, judge_of, logged, on, send_queued, unscored, with_judges};
use crate::ingest_order::{hold_the_closer, release_the_closer};
use fixture::ingest::{Service, Trajectory, count, send, trajectory};
use fixture::{Stack, eventually};

#[tokio::test(flavor = "multi_thread")]
async fn several_processes_ask_about_each_text_of_a_tenant_once() {
    let stack = Stack::start("judge-cache").await;
    let endpoint = Endpoint::start(|text, _| Reply::answer(text.starts_with("bad"))).await;
    let judge = judge_of(&endpoint);
    let services = [
        Service::start_with(&stack, with_judges([judge.clone()])).await,
        Service::start_with(&stack, with_judges([judge])).await,
    ];
    // Each text three times, and once of another tenant.
    let texts: Vec<String> = (0..20)
        .flat_map(|nth| [format!("bad {nth}"), format!("good {nth}")])
        .collect();
    hold_the_closer(&stack.pool, &stack.kafka.topics().generation).await;
    let (mut events, mut written) = (Vec::new(), Vec::new());
    for tenant in ["default", "default", "other", "default"] {
        for text in &texts {
            let generation = on("chat");
            let text_event = follow_up(&generation, text);
            events.extend([logged(&generation), text_event].map(|event| Event {
                tenant: tenant.to_owned(),
                ..event
            }));
            written.push((generation.id, text));
        }
    }
    send(&stack, &events).await;
    becomes(&stack.pool, "select count(*) from judgement", 160).await;
    release_the_closer(&stack.pool).await;
    for (generation, text) in written {
        let reward = if text.starts_with("bad") { -1.0 } else { 0.5 };
        assert_eq!(
            trajectory(&stack.pool, generation).await,
            Trajectory::rewarded(reward, "expression")
        );
    }
    for text in &texts {
        assert_eq!(endpoint.times(text), 2, "{text}: once for each tenant");
    }
    let answers = "select count(*) from feedback where metric_name = 'dissatisfied'";
    assert_eq!(count(&stack.pool, answers).await, 160);
    for service in services {
        service.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_with_many_texts_does_not_keep_another_waiting() {
    let stack = Stack::start("judge-turns").await;
    let first = CancellationToken::new();
    let held = first.clone();
    let endpoint = Endpoint::start(move |text, _| match text {
        "first" => Reply::After(held.clone(), Box::new(Reply::answer(false))),
        _ => Reply::answer(false),
    })
    .await;
    let judge = judge::Options {
        concurrency: 1,
        timeout_seconds: 600.0,
        ..judge_of(&endpoint)
    };
    let service = Service::start_with(&stack, with_judges([judge])).await;
    let written = |tenant: &str, text: &str| {
        let generation = on("chat");
        let text = follow_up(&generation, text);
        [logged(&generation), text].map(|event| Event {
            tenant: tenant.to_owned(),
            ..event
        })
    };
    send(&stack, &written("busy", "first")).await;
    eventually("the judge is asked", SOON, async || {
        (endpoint.questions().len() == 1).then_some(())
    })
    .await;
    for nth in 0..30 {
        send(&stack, &written("busy", &format!("text {nth}"))).await;
    }
    send(&stack, &written("quiet", "another's")).await;
    becomes(&stack.pool, "select count(*) from judgement", 32).await;
    // What the text is about may be stored after it, and is looked for every few seconds.
    let stored = "select count(*) from judgement j join feedback f on f.id = j.feedback_id \
                  join generation g on g.id = f.generation_id where j.next_at <= now()";
    becomes(&stack.pool, stored, 31).await;
    first.cancel();
    becomes(
        &stack.pool,
        "select count(*) from judgement where answered_at is null",
        0,
    )
    .await;
    let place = endpoint
        .questions()
        .iter()
        .position(|question| question.text == "another's")
        .unwrap();
    // With each answer, both tenants have the same chance. In the order of arrival it would be the last.
    assert!(place < 26, "it was asked about after {place} others");
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_newest_text_is_asked_about_first_and_copies_of_one_keep_no_other_waiting() {
    let stack = Stack::start("judge-newest").await;
    let [first, hot] = [(); 2].map(|()| CancellationToken::new());
    let held = [first.clone(), hot.clone()];
    let endpoint = Endpoint::start(move |text, _| match text {
        "first" => Reply::After(held[0].clone(), Box::new(Reply::answer(false))),
        "hot" => Reply::After(held[1].clone(), Box::new(Reply::answer(true))),
        _ => Reply::answer(false),
    })
    .await;
    let judge = judge::Options {
        concurrency: 2,
        timeout_seconds: 600.0,
        ..judge_of(&endpoint)
    };
    let service = Service::start_with(&stack, with_judges([judge])).await;
    let write = async |text: &str| {
        let generation = on("chat");
        send(&stack, &[logged(&generation)]).await;
        eventually("the generation is stored", SOON, async || {
            let stored = sqlx::query("select from generation where id = $1").bind(generation.id);
            stored.fetch_optional(&stack.pool).await.unwrap()
        })
        .await;
        let event = follow_up(&generation, text);
        send(&stack, std::slice::from_ref(&event)).await;
        let id = feedback_id(&event);
        eventually("the text is queued", SOON, async || {
            let queued = sqlx::query("select from judgement where feedback_id = $1").bind(id);
            queued.fetch_optional(&stack.pool).await.unwrap()
        })
        .await;
    };
    let asked = async |count: usize| {
        eventually("the judge is asked", SOON, async || {
            (endpoint.questions().len() == count).then_some(())
        })
        .await;
    };
    // Both slots are taken.
    write("first").await;
    asked(1).await;
    write("hot").await;
    asked(2).await;
    for text in ["oldest", "old"] {
        write(text).await;
    }
    for _ in 0..20 {
        write("hot").await;
    }
    write("new").await;
    // One slot. The copies are newer than all but one, and due.
    first.cancel();
    asked(5).await;
    let texts: Vec<String> = endpoint.questions().into_iter().map(|question| question.text).collect();
    assert_eq!(texts, ["first", "hot", "new", "old", "oldest"]);
    // The answer is that of the copies.
    hot.cancel();
    let answered = "select count(*) from judgement where value_bool and next_at is null";
    becomes(&stack.pool, answered, 21).await;
    assert_eq!(endpoint.times("hot"), 1);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_text_that_is_given_up_is_given_up_with_its_copies() {
    let stack = Stack::start("judge-poison").await;
    let endpoint = Endpoint::start(|_, _| Reply::answer("neither")).await;
    let judge = judge::Options {
        attempts_max: 2,
        ..judge_of(&endpoint)
    };
    let service = Service::start_with(&stack, with_judges([judge])).await;
    let generations: Vec<_> = (0..20).map(|_| on("chat")).collect();
    let turns: Vec<_> = generations.iter().map(|generation| (generation, "poison")).collect();
    send_queued(&stack, &turns).await;
    becomes(
        &stack.pool,
        "select count(*) from judgement where error = 'not_schema'",
        20,
    )
    .await;
    for generation in &generations {
        assert_eq!(trajectory(&stack.pool, generation.id).await, unscored());
    }
    // Those that were queued between two requests about it have an attempt more.
    assert!(endpoint.times("poison") <= 6, "{}", endpoint.times("poison"));
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_gives_back_nothing_that_another_took_over() {
    let stack = Stack::start("judge-leases").await;
    let answers = CancellationToken::new();
    let held = answers.clone();
    let endpoint = Endpoint::start(move |_, _| Reply::After(held.clone(), Box::new(Reply::Status(500, None)))).await;
    let judge = judge::Options {
        timeout_seconds: 600.0,
        ..judge_of(&endpoint)
    };
    let service = Service::start_with(&stack, with_judges([judge])).await;
    let generation = on("chat");
    send_queued(&stack, &[(&generation, "whose?")]).await;
    eventually("the judge is asked", SOON, async || {
        (endpoint.questions().len() == 1).then_some(())
    })
    .await;
    // As if this process had stalled for longer than its lease.
    let take_over = "update judgement set taken_by = gen_random_uuid(), taken_until = now() + interval '1 hour', \
                     next_at = now() + interval '1 hour'";
    sqlx::query(take_over).execute(&stack.pool).await.unwrap();
    answers.cancel();
    service.stop().await;
    let kept = "select count(*) from judgement where taken_until > now() + interval '50 minutes' and reason is null";
    assert_eq!(count(&stack.pool, kept).await, 1);
}
