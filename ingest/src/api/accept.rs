//! The one path of every event, whichever way it came: check, look up, send.

use std::collections::hash_map::Entry;
use std::time::Instant;

use axum::http::StatusCode;
use edge::problem::Problem;
use futures::StreamExt;
use futures::stream;

use super::dryrun::Outlook;
use super::known::{Digests, Key};
use super::{Api, payload, tally};
use crate::event::{self, Event, Invalid};
use crate::{log, spool};

/// A valid event, and whether the same one is stored, or stands earlier in its request.
#[derive(Debug)]
pub(super) struct Examined {
    pub event: Event,
    /// Its record's value.
    pub value: Vec<u8>,
    pub duplicate: bool,
}

impl Api {
    /// One event of one tenant: accepted, or forecast where it is a dry run.
    pub(super) async fn take_one(&self, event: Event, dryrun: bool) -> Result<(Event, Option<Outlook>), Problem> {
        if dryrun {
            let (event, outlook) = self.forecast_one(event).await?;
            return Ok((event, Some(outlook)));
        }
        let mut results = self.accept(vec![Ok(event)]).await;
        let result = results.pop();
        let event = result.unwrap_or_else(|| Err(Problem::internal("an event without a result")))?;
        Ok((event, None))
    }

    /// Events of one tenant, each acknowledged by the log or with the reason why not, in order. What is a problem already
    /// stays one.
    pub(super) async fn accept(&self, events: Vec<Result<Event, Problem>>) -> Vec<Result<Event, Problem>> {
        let refuse: Option<fn() -> Problem> = if self.circuit.look(Instant::now()).is_err() {
            Some(away)
        } else {
            self.room.is_full().then_some(full)
        };
        if let Some(refuse) = refuse {
            return events
                .into_iter()
                .map(|event| event.and_then(|_| Err(refuse())))
                .collect();
        }
        let examined = self.examine(events).await;
        // Made one after the other and first polled in order, so events of one episode enter the log as they were sent.
        let sends = examined.into_iter().map(|examined| self.send(examined));
        let results: Vec<Result<Event, Problem>> = stream::iter(sends).buffered(self.sends_max).collect().await;
        results.iter().flatten().for_each(tally::accepted);
        results
    }

    async fn send(&self, examined: Result<Examined, Problem>) -> Result<Event, Problem> {
        let Examined {
            event,
            value,
            duplicate,
        } = examined?;
        if duplicate {
            return Ok(event);
        }
        self.circuit.pass(Instant::now()).map_err(|_| away())?;
        match self.entrance.send(&event, &value).await {
            Ok(()) => self.circuit.acknowledged(),
            Err(error) => {
                // The other errors say nothing about the log.
                if matches!(error, log::Error::Unavailable(_)) {
                    self.circuit.failed(Instant::now());
                }
                return Err(unaccepted(error));
            }
        }
        Ok(event)
    }

    /// Checks all events of one tenant, and compares them with each other and with the tables.
    pub(super) async fn examine(&self, events: Vec<Result<Event, Problem>>) -> Vec<Result<Examined, Problem>> {
        let now = event::now();
        let checked = events
            .into_iter()
            .map(|event| {
                let event = event?;
                let valid = event.check().and_then(|()| self.rules.check(&event, now));
                valid.map_err(|error| invalid(&error))?;
                Ok(event)
            })
            .collect();
        let checked = payload::look(self.payloads.as_ref(), checked).await;
        let stored = self.stored(&checked).await;
        compare(checked, stored)
    }

    /// The digests under which the tables hold these events, as far as that can be found out.
    async fn stored(&self, events: &[Result<Event, Problem>]) -> Digests {
        let valid = || events.iter().flatten();
        let Some((known, first)) = self.known.as_ref().zip(valid().next()) else {
            return Digests::new();
        };
        let keys: Vec<Key> = valid().map(|event| (event.source.clone(), event.id.clone())).collect();
        known.digests(first.tenant.clone(), keys).await
    }
}

/// `known`: digests by identity; grows with the events of the request itself.
fn compare(events: Vec<Result<Event, Problem>>, mut known: Digests) -> Vec<Result<Examined, Problem>> {
    let mut compare = |event: Event| {
        let (value, digest) = event.encode_with_digest();
        let duplicate = match known.entry((event.source.clone(), event.id.clone())) {
            Entry::Vacant(entry) => {
                entry.insert(digest);
                false
            }
            Entry::Occupied(entry) if *entry.get() == digest => true,
            Entry::Occupied(_) => {
                return Err(Problem::conflict(format!(
                    "the event {:?} of source {:?} came with another body before",
                    event.id, event.source
                )));
            }
        };
        Ok(Examined {
            event,
            value,
            duplicate,
        })
    };
    events.into_iter().map(|event| compare(event?)).collect()
}

pub(super) fn invalid(error: &Invalid) -> Problem {
    Problem::bad_request(error).with("field", error.field)
}

fn away() -> Problem {
    Problem::unavailable("the log is away; send the same event again", 1)
}

/// The tables may not grow, and nothing in them may go.
fn full() -> Problem {
    metrics::counter!("springtide_ingest_refused_total", "reason" => "disk").increment(1);
    Problem::new(
        StatusCode::INSUFFICIENT_STORAGE,
        "insufficient-storage",
        "There is no room for more events",
    )
    .detail("the tables have reached ingest.disk_bytes_max and nothing in them may go; send the same event again later")
    .retry_after(60)
}

fn unaccepted(error: log::Error) -> Problem {
    match error {
        log::Error::Invalid(error) => invalid(&error),
        log::Error::TooLarge { .. } => Problem::too_large(error),
        log::Error::Full => Problem::too_many(error, 1),
        log::Error::Spool(spool::Error::TooLarge) => Problem::too_large(error),
        log::Error::Spool(cause) => {
            let retry_after_seconds = cause.retry_after_seconds();
            Problem::unavailable(cause, retry_after_seconds)
        }
        log::Error::Unavailable(cause) => {
            tracing::warn!(error = %cause, "event not acknowledged");
            Problem::unavailable("the log did not acknowledge; send the same event again", 1)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{Feedback, Target, Value};
    use uuid::Uuid;

    fn event(id: &str, value: bool) -> Event {
        let feedback = Feedback {
            id: Uuid::from_u128(7),
            target: Target::Generation(Uuid::from_u128(8)),
            metric_name: "accept".to_owned(),
            value: Value::Bool(value),
            tags: Default::default(),
        };
        Event {
            id: id.to_owned(),
            ..feedback.into_event("default", "test", event::now())
        }
    }

    #[test]
    fn the_same_event_twice_in_a_request_is_sent_once_and_another_body_conflicts() {
        let known = Digests::from([(("test".to_owned(), "old".to_owned()), event("old", true).digest())]);
        let events = vec![
            Ok(event("a", true)),
            Ok(event("a", true)),
            Ok(event("a", false)),
            Ok(event("old", true)),
            Ok(event("old", false)),
            Err(Problem::bad_request("was one before")),
        ];
        let results = compare(events, known);
        let summary: Vec<_> = results
            .iter()
            .map(|result| match result {
                Ok(examined) => Ok(examined.duplicate),
                Err(problem) => Err(problem.status.as_u16()),
            })
            .collect();
        assert_eq!(summary, [Ok(false), Ok(true), Err(409), Ok(true), Err(409), Err(400)]);
    }
}
