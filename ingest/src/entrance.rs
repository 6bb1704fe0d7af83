//! Where an accepted event goes: into the log, or, in a collector, into its spool. What an acknowledgement is worth depends
//! on it, so a collector's answers say so.

use std::cell::Cell;

use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::middleware::Next;
use axum::response::Response;

use crate::event::Event;
use crate::log::{self, Producer};
use crate::spool::{self, Spool};

/// On a collector's answers to accepted events: `spooled`, on its disk and not yet in the log.
const ACKNOWLEDGED: HeaderName = HeaderName::from_static("springtide-acknowledged");

tokio::task_local! {
    /// Whether the request that is being answered put anything into the spool.
    static SPOOLED: Cell<bool>;
}

#[derive(Clone)]
pub(crate) enum Entrance {
    Log(Producer),
    Spool(Spool),
    /// What a fuzzed request brought in.
    #[cfg(any(test, feature = "fuzz"))]
    Kept(std::sync::Arc<std::sync::Mutex<Vec<Event>>>),
}

impl Entrance {
    /// Resolves when the event is as safe as this entrance makes it: acknowledged by the log, or flushed to the spool. It has
    /// been checked, and `value` is its encoding.
    pub(crate) async fn send(&self, event: &Event, value: &[u8]) -> Result<(), log::Error> {
        match self {
            Self::Log(producer) => producer.send_encoded(event, value).await,
            Self::Spool(spool) => {
                // What could not be forwarded must not be acknowledged.
                spool::Request::of(event)?;
                spool.append(event).await?;
                // Outside of a request nobody needs to know.
                let _ = SPOOLED.try_with(|spooled| spooled.set(true));
                Ok(())
            }
            #[cfg(any(test, feature = "fuzz"))]
            Self::Kept(kept) => {
                event.check()?;
                let mut kept = kept.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                kept.push(event.clone());
                Ok(())
            }
        }
    }
}

/// A layer over a collector's routes: what was spooled is answered with 202 instead of 200, and with a header.
pub(crate) async fn say_spooled(request: Request, next: Next) -> Response {
    let answered = SPOOLED.scope(Cell::new(false), async {
        let response = next.run(request).await;
        (response, SPOOLED.with(Cell::get))
    });
    let (mut response, spooled) = answered.await;
    if spooled {
        if response.status() == StatusCode::OK {
            *response.status_mut() = StatusCode::ACCEPTED;
        }
        response
            .headers_mut()
            .insert(ACKNOWLEDGED, HeaderValue::from_static("spooled"));
    }
    response
}
