//! The queue of a judge: each text once, in several processes, and no tenant keeps another's waiting.

use ingest::event::Event;
use ingest::judge;
use tokio_util::sync::CancellationToken;

use super::endpoint::{Endpoint, Reply};
use super::world::{SOON, becomes, follow_up, judge_of, logged, on, with_judges};
use crate::ingest::{Service, Trajectory, count, send, trajectory};
use crate::ingest_order::{hold_the_closer, release_the_closer};
use crate::support::{Stack, eventually};

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
