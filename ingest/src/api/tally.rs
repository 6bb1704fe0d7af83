//! What was accepted and what was refused, for `/metrics`. Of a batch each event counts; a request that is refused as a
//! whole, before anyone knows its events, counts once.

use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use edge::problem::{Kind, Problem};

use crate::event::Event;

/// Acknowledged, also where the same event was acknowledged before.
pub(super) fn accepted(event: &Event) {
    metrics::counter!("springtide_ingest_accepted_total", "kind" => event.kind()).increment(1);
}

/// One event of a batch.
pub(super) fn refused(problem: &Problem) {
    count(&problem.type_, problem.status.as_u16());
}

/// A layer over the ways in.
pub(super) async fn count_refusals(request: Request, next: Next) -> Response {
    let response = next.run(request).await;
    if let Some(Kind(reason)) = response.extensions().get::<Kind>() {
        count(reason, response.status().as_u16());
    }
    response
}

/// Slugs and statuses are ours, so the number of label values is bounded.
fn count(reason: &str, status: u16) {
    let labels = [("reason", reason.to_owned()), ("status", status.to_string())];
    metrics::counter!("springtide_ingest_refused_total", &labels).increment(1);
}
