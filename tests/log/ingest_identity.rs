//! The identity of events and of their targets.

use std::time::Duration;

use edge::auth::{AuthOptions, Role};
use event_log::event::{self, EpisodeEnd, Event};
use serde_json::{Value, json};
use time::OffsetDateTime;
use uuid::Uuid;

use fixture::ingest::{
    JSON, Service, Trajectory, accept, count, dead_letters, generation, no_dead_letters, options, send, stored,
    trajectory,
};
use fixture::{Stack, create_key};

const SOURCE: &str = "tests/identity";

fn of(tenant: &str, event: Event) -> Event {
    Event {
        tenant: tenant.to_owned(),
        ..event
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tenants_share_no_events_and_are_never_joined() {
    let stack = Stack::start("tenants").await;
    let service = Service::start(&stack).await;
    let shown = generation();
    let id = shown.id;
    let ours = shown.clone().into_event("ours", SOURCE);
    send(&stack, &[ours, of("theirs", accept(id, true))]).await;
    stored(&stack.pool, 2).await;
    // Two tenants may use the same event id, but not the same generation id.
    let theirs = shown.into_event("theirs", SOURCE);
    send(&stack, &[theirs]).await;
    stored(&stack.pool, 3).await;
    let record = dead_letters(&stack, 1).await.remove(0);
    assert_eq!(record.headers["reason"], "conflict");
    assert_eq!(record.headers["detail"], "another event has this id");
    assert_eq!(trajectory(&stack.pool, id).await, Trajectory::censored("no_feedback"));
    let query = "select count(*) from generation where tenant_id = 'ours'";
    assert_eq!(count(&stack.pool, query).await, 1);
    service.stop().await;
}

/// The id of feedback with an `Idempotency-Key` is computed from tenant, source, key and target. Who
/// guesses them must gain nothing.
#[tokio::test(flavor = "multi_thread")]
async fn nobody_takes_or_retracts_the_feedback_of_another_tenant_by_its_id() {
    let stack = Stack::start("claims").await;
    let required = AuthOptions {
        required: true,
        ..AuthOptions::default()
    };
    let service = Service::start_behind(&stack, options(), required).await;
    let key = async |tenant: &str| create_key(&stack.pool, tenant, Role::Serving, tenant).await;
    let (ours, theirs) = (key("ours").await, key("theirs").await);
    let post = async |key: &str, path: &str, headers: &[(&str, &str)], body: Value| {
        let bearer = format!("Bearer {key}");
        let mut headers = headers.to_vec();
        headers.extend([("authorization", bearer.as_str()), JSON]);
        let (status, _, answer) = service.post_with(path, &headers, body.to_string()).await;
        assert_eq!(status, 200, "{path}: {answer}");
        answer
    };
    let shown = generation();
    let id = shown.id;
    let order = [("idempotency-key", "order-4711")];
    let feedback = |id: Option<Uuid>, about: Uuid| {
        let mut body = json!({"generation_id": about, "metric_name": "accept", "value": true});
        if let Some(id) = id {
            body["id"] = json!(id);
        }
        body
    };
    // A dry run says which id the feedback will get; the attacker computes it.
    let mut preview = feedback(None, id);
    preview["dryrun"] = json!(true);
    let preview = post(&ours, "/v1/feedback", &order, preview).await;
    let claimed: Uuid = serde_json::from_value(preview["feedback_id"].clone()).unwrap();
    post(&theirs, "/v1/feedback", &[], feedback(Some(claimed), Uuid::now_v7())).await;
    stored(&stack.pool, 1).await;
    let answer = post(&ours, "/v1/feedback", &order, feedback(None, id)).await;
    assert_eq!(answer["feedback_id"], json!(claimed));
    post(&theirs, "/v1/retractions", &[], json!({"feedback_id": claimed})).await;
    stored(&stack.pool, 3).await;
    // Its horizon begins now.
    send(&stack, &[shown.into_event("ours", SOURCE)]).await;
    stored(&stack.pool, 4).await;
    assert_eq!(trajectory(&stack.pool, id).await, Trajectory::rewarded(0.75, "accept"));
    let both = "select count(*) from feedback where id = (select feedback_id from retraction)";
    assert_eq!(count(&stack.pool, both).await, 2);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_ends_an_episode_once_and_the_earliest_of_several_sources_counts() {
    let stack = Stack::start("ends").await;
    let service = Service::start(&stack).await;
    let episode_id = Uuid::now_v7();
    let first = event::now() - Duration::from_secs(60);
    let end = |source: &str, at: OffsetDateTime| EpisodeEnd { episode_id }.into_event("default", source, at);
    let ended_at = async || -> OffsetDateTime {
        let query = sqlx::query_scalar("select ended_at from episode_end");
        query.fetch_one(&stack.pool).await.unwrap()
    };
    // The same event again, with another time.
    let seconds = Duration::from_secs;
    send(
        &stack,
        &[
            end("app", first),
            end("app", first - seconds(5)),
            end("app", first + seconds(5)),
        ],
    )
    .await;
    stored(&stack.pool, 3).await;
    assert_eq!(ended_at().await, first);
    send(
        &stack,
        &[end("gateway", first - seconds(1)), end("other", first + seconds(1))],
    )
    .await;
    stored(&stack.pool, 5).await;
    assert_eq!(ended_at().await, first - seconds(1));
    // With another id it is another event.
    let own = Event {
        id: "the end".to_owned(),
        ..end("app", first - seconds(9))
    };
    send(&stack, &[own]).await;
    stored(&stack.pool, 6).await;
    assert_eq!(ended_at().await, first - seconds(9));
    service.stop().await;
}

/// A completion is an episode of its own, so it and the end of its episode have one id.
#[tokio::test(flavor = "multi_thread")]
async fn a_generation_and_the_end_of_its_episode_are_two_events_in_either_order() {
    let stack = Stack::start("same-id").await;
    let service = Service::start(&stack).await;
    let pair = || {
        let mut shown = generation();
        shown.episode_id = shown.id;
        let end = EpisodeEnd { episode_id: shown.id };
        let end = end.into_event("default", SOURCE, event::now());
        let shown = shown.into_event("default", SOURCE);
        assert_eq!(shown.id, end.id);
        (shown, end)
    };
    let (shown, end) = pair();
    send(&stack, &[shown, end]).await;
    let (shown, end) = pair();
    send(&stack, &[end, shown]).await;
    stored(&stack.pool, 4).await;
    let post = async |event: &Event| {
        let mut item = serde_json::to_value(event).unwrap();
        item.as_object_mut().unwrap().remove("tenant");
        let (status, answer) = service.post("/v1/events:batch", &json!([item])).await;
        assert_eq!(status, 200, "{answer}");
    };
    for end_first in [false, true] {
        let (shown, end) = pair();
        let (first, second) = if end_first { (&end, &shown) } else { (&shown, &end) };
        post(first).await;
        post(second).await;
        post(first).await;
    }
    stored(&stack.pool, 8).await;
    assert_eq!(count(&stack.pool, "select count(*) from generation").await, 4);
    assert_eq!(count(&stack.pool, "select count(*) from episode_end").await, 4);
    no_dead_letters(&stack).await;
    service.stop().await;
}
