//! Bodies: a request's must arrive in time, and a response's tells whether the client takes it.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::extract::Request;
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use hyper::body::{Bytes, Frame, SizeHint};
use tokio::time::{Instant, Sleep};

use super::connection::{InFlight, Receiving};
use crate::problem::Problem;

/// Gives the request's body `limit` to arrive; then the handler cannot read on, and the client gets
/// 408. Does not limit the handler or the response.
pub async fn in_time(request: Request, next: Next, limit: Duration) -> Response {
    if request.body().is_end_stream() {
        return next.run(request).await;
    }
    let late = Arc::new(AtomicBool::new(false));
    let timed = request.map(|body| {
        Body::new(Timed {
            body,
            deadline: Instant::now() + limit,
            timer: None,
            late: late.clone(),
        })
    });
    let response = next.run(timed).await;
    if !late.load(Ordering::Relaxed) || response.status().is_success() {
        return response;
    }
    let title = "The request's body arrived too slowly";
    // Hyper closes the connection after it, because the rest of the body is unread.
    Problem::new(StatusCode::REQUEST_TIMEOUT, "too-slow", title)
        .detail(format_args!("the body must arrive within {limit:?}"))
        .into_response()
}

/// A request's body, which tells whether the handler waits for the client.
pub(super) struct Received<B> {
    body: B,
    receiving: Receiving,
}

impl<B> Received<B> {
    pub(super) fn new(body: B, in_flight: &InFlight) -> Self {
        let receiving = in_flight.receiving();
        Self { body, receiving }
    }
}

impl<B: HttpBody + Unpin> HttpBody for Received<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(cx);
        self.receiving.client_sends(frame.is_pending());
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A request's body with a deadline.
struct Timed {
    body: Body,
    deadline: Instant,
    /// Set when the body was first awaited: most arrive with the header.
    timer: Option<Pin<Box<Sleep>>>,
    late: Arc<AtomicBool>,
}

impl HttpBody for Timed {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(cx) {
            return Poll::Ready(frame);
        }
        let deadline = self.deadline;
        let timer = self
            .timer
            .get_or_insert_with(|| Box::pin(tokio::time::sleep_until(deadline)));
        if timer.as_mut().poll(cx).is_pending() {
            return Poll::Pending;
        }
        self.late.store(true, Ordering::Relaxed);
        let error = std::io::Error::new(std::io::ErrorKind::TimedOut, "the body arrived too slowly");
        Poll::Ready(Some(Err(axum::Error::new(error))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A response's body.
pub(super) struct Sent {
    body: Body,
    in_flight: InFlight,
}

impl Sent {
    pub(super) fn new(body: Body, in_flight: InFlight) -> Self {
        in_flight.client_takes(true); // it must take the header before more is asked for
        Self { body, in_flight }
    }
}

impl HttpBody for Sent {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(cx);
        self.in_flight.client_takes(frame.is_ready());
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
