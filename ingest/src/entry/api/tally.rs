//! Counts accepted and refused events for `/metrics`. Every event of a batch counts. A request that
//! is refused before its events are read counts once.

use std::collections::BTreeMap;

use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use edge::problem::Problem;

use event_log::event::Event;

/// Counts acknowledged events, duplicates included.
pub(super) fn accepted<'a>(events: impl Iterator<Item = &'a Event>) {
    let mut kinds: BTreeMap<&str, u64> = BTreeMap::new();
    for event in events {
        *kinds.entry(event.kind()).or_default() += 1;
    }
    for (kind, number) in kinds {
        metrics::counter!("springtide_ingest_accepted_total", "kind" => kind).increment(number);
    }
}

/// Counts a refused event of a batch.
pub(super) fn refused(problem: &Problem) {
    count(&problem.type_, problem.status.as_u16());
}

/// Middleware that counts refused requests.
pub(super) async fn count_refusals(request: Request, next: Next) -> Response {
    let response = next.run(request).await;
    if let Some(problem) = response.extensions().get::<Problem>() {
        count(&problem.type_, response.status().as_u16());
    }
    response
}

/// Label values come from a fixed set.
fn count(reason: &str, status: u16) {
    let labels = [("reason", reason.to_owned()), ("status", status.to_string())];
    metrics::counter!("springtide_ingest_refused_total", &labels).increment(1);
}
