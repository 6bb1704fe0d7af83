//! The identity of events and of their targets.

use std::time::Duration;

use ingest::event::{self, EpisodeEnd, Event};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::ingest::{Service, Trajectory, accept, count, dead_letters, generation, send, stored, trajectory};
use crate::support::Stack;

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
    let acceptance = accept(id, true);
    send(&stack, &[ours, of("theirs", acceptance.clone())]).await;
    stored(&stack.pool, 2).await;
    // Two tenants may use the same event id, but not the same generation or feedback id.
    let theirs = shown.into_event("theirs", SOURCE);
    send(&stack, &[theirs, of("ours", acceptance)]).await;
    stored(&stack.pool, 4).await;
    let records = dead_letters(&stack, 2).await;
    for record in records {
        assert_eq!(record.headers["reason"], "conflict");
        assert_eq!(record.headers["detail"], "another event has this id");
    }
    assert_eq!(trajectory(&stack.pool, id).await, Trajectory::censored("no_feedback"));
    let query = "select count(*) from generation where tenant_id = 'ours'";
    assert_eq!(count(&stack.pool, query).await, 1);
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
