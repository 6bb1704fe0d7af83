//! Where an accepted event is written: to the log or, in a collector, to its spool.
//!
//! The two acknowledgements mean different things, so a collector marks its answers.

use std::cell::Cell;

use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::middleware::Next;
use axum::response::Response;
use event_log::event::{Event, Invalid};
use event_log::{self as log, Producer};

use crate::entry::spool::{self, Spool};

/// On a collector's answers: `spooled` means on its disk but not yet in the log.
const ACKNOWLEDGED: HeaderName = HeaderName::from_static("springtide-acknowledged");

tokio::task_local! {
    /// Whether the current request has spooled an event.
    static SPOOLED: Cell<bool>;
}

/// Why an event was not written.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Invalid(#[from] Invalid),
    #[error(transparent)]
    Log(#[from] log::Error),
    #[error(transparent)]
    Spool(#[from] spool::Error),
}

#[derive(Clone)]
pub(crate) enum Destination {
    Log(Producer),
    Spool(Spool),
    /// Keeps the events of a fuzzed request.
    #[cfg(any(test, feature = "fuzz"))]
    Memory(std::sync::Arc<std::sync::Mutex<Vec<Event>>>),
}

impl Destination {
    /// Returns once the log has acknowledged the events, or the spool has flushed them, with a
    /// result for each. They have been checked, and come with their encodings.
    pub(crate) async fn send(&self, events: &[(&Event, &[u8])]) -> Vec<Result<(), Error>> {
        match self {
            Self::Log(producer) => {
                let sent = producer.send_encoded(events).await.into_iter();
                sent.map(|sent| sent.map_err(Error::from)).collect()
            }
            Self::Spool(spool) => {
                let appends = events.iter().map(|(event, _)| append(spool, event));
                futures::future::join_all(appends).await
            }
            #[cfg(any(test, feature = "fuzz"))]
            Self::Memory(memory) => {
                let keep = |event: &Event| {
                    event.check()?;
                    let mut memory = memory.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                    memory.push(event.clone());
                    Ok(())
                };
                events.iter().map(|(event, _)| keep(event)).collect()
            }
        }
    }
}

async fn append(spool: &Spool, event: &Event) -> Result<(), Error> {
    // An event that cannot be forwarded must not be acknowledged.
    spool::Request::of(event)?;
    spool.append(event).await?;
    // Not set outside of a request.
    let _ = SPOOLED.try_with(|spooled| spooled.set(true));
    Ok(())
}

/// Middleware of a collector: changes 200 to 202 and adds a header if the request has spooled an
/// event.
pub(crate) async fn mark_spooled(request: Request, next: Next) -> Response {
    let answer = SPOOLED.scope(Cell::new(false), async {
        let response = next.run(request).await;
        (response, SPOOLED.with(Cell::get))
    });
    let (mut response, spooled) = answer.await;
    if spooled {
        if response.status() == StatusCode::OK {
            *response.status_mut() = StatusCode::ACCEPTED;
        }
        let headers = response.headers_mut();
        headers.insert(ACKNOWLEDGED, HeaderValue::from_static("spooled"));
    }
    response
}
