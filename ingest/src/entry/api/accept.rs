//! The path of every event after its endpoint has read it: check, look up, send.

use std::collections::hash_map::Entry;
use std::time::Instant;

use axum::http::StatusCode;
use edge::problem::Problem;
use futures::StreamExt;
use futures::stream;

use super::answer::invalid;
use super::known::{Digests, Key};
use super::{Api, payload, tally};
use crate::entry::{destination, spool};
use crate::event::Event;
use crate::log;

/// A valid event.
#[derive(Debug)]
pub(super) struct Checked {
    pub event: Event,
    /// The value of its record.
    pub value: Vec<u8>,
    /// The same event is stored, or comes earlier in the request.
    pub duplicate: bool,
}

impl Api {
    /// Accepts events of one tenant. The results are in the same order. Problems in `events` are
    /// returned unchanged.
    pub(super) async fn accept(&self, events: Vec<Result<Event, Problem>>) -> Vec<Result<Event, Problem>> {
        let refuse: Option<fn() -> Problem> = if !self.circuit.allows(Instant::now()) {
            Some(log_unavailable)
        } else {
            let tenant = events.iter().flatten().next().map(|event| event.tenant.as_str());
            tenant
                .filter(|tenant| self.room.is_full_for(tenant))
                .map(|_| disk_full as fn() -> Problem)
        };
        if let Some(refuse) = refuse {
            let refused = events.into_iter().map(|event| event.and_then(|_| Err(refuse())));
            return refused.collect();
        }
        let checked = self.check(events).await;
        // `buffered` polls new sends in order, so the events of an episode enter the log in the
        // order of the request.
        let sends = checked.into_iter().map(|checked| self.send(checked));
        let results: Vec<Result<Event, Problem>> = stream::iter(sends).buffered(self.sends_max).collect().await;
        results.iter().flatten().for_each(tally::accepted);
        results
    }

    async fn send(&self, checked: Result<Checked, Problem>) -> Result<Event, Problem> {
        let checked = checked?;
        let event = checked.event;
        if checked.duplicate {
            return Ok(event);
        }
        if !self.circuit.try_send(Instant::now()) {
            return Err(log_unavailable());
        }
        match self.destination.send(&event, &checked.value).await {
            Ok(()) => self.circuit.succeeded(),
            Err(error) => {
                // Other errors say nothing about the log.
                if matches!(error, destination::Error::Log(log::Error::Unavailable(_))) {
                    self.circuit.failed(Instant::now());
                }
                return Err(send_problem(error));
            }
        }
        Ok(event)
    }

    /// Checks events of one tenant and compares them with each other and with the tables.
    pub(super) async fn check(&self, events: Vec<Result<Event, Problem>>) -> Vec<Result<Checked, Problem>> {
        // An event that only one of both clocks refuses is left to the sink.
        let now = self.validator.clock.latest();
        let checked = events
            .into_iter()
            .map(|event| {
                let event = event?;
                let valid = event.check().and_then(|()| self.validator.check(&event, now));
                valid.map_err(|error| invalid(&error))?;
                Ok(event)
            })
            .collect();
        let checked = payload::check_stored(self.payloads.as_ref(), checked).await;
        let stored = self.stored_digests(&checked).await;
        compare(checked, stored)
    }

    /// The digests of those events that the tables hold, as far as known.
    async fn stored_digests(&self, events: &[Result<Event, Problem>]) -> Digests {
        let valid = || events.iter().flatten();
        let Some((stored, first)) = self.stored.as_ref().zip(valid().next()) else {
            return Digests::new();
        };
        let keys: Vec<Key> = valid().map(|event| (event.source.clone(), event.id.clone())).collect();
        stored.digests(first.tenant.clone(), keys).await
    }
}

/// `digests` starts with those of stored events and grows with the events of the request.
fn compare(events: Vec<Result<Event, Problem>>, mut digests: Digests) -> Vec<Result<Checked, Problem>> {
    let mut compare = |event: Event| {
        let (value, digest) = event.encode_with_digest();
        let duplicate = match digests.entry((event.source.clone(), event.id.clone())) {
            Entry::Vacant(entry) => {
                entry.insert(digest);
                false
            }
            Entry::Occupied(entry) if *entry.get() == digest => true,
            Entry::Occupied(_) => {
                return Err(Problem::conflict(format!(
                    "the event {:?} of source {:?} was sent with another body before",
                    event.id, event.source
                )));
            }
        };
        Ok(Checked {
            event,
            value,
            duplicate,
        })
    };
    events.into_iter().map(|event| compare(event?)).collect()
}

fn log_unavailable() -> Problem {
    Problem::unavailable("the log is unavailable; send the same event again", 1)
}

fn disk_full() -> Problem {
    metrics::counter!("springtide_ingest_refused_total", "reason" => "disk").increment(1);
    Problem::new(
        StatusCode::INSUFFICIENT_STORAGE,
        "insufficient-storage",
        "No room for more events",
    )
    .detail(
        "the tables have reached ingest.disk_bytes_max and no data may be deleted yet; send the same event again later",
    )
    .retry_after(60)
}

fn send_problem(error: destination::Error) -> Problem {
    use destination::Error;
    match error {
        Error::Invalid(error) | Error::Log(log::Error::Invalid(error)) => invalid(&error),
        Error::Log(error @ log::Error::TooLarge { .. }) => Problem::too_large(error),
        Error::Log(error @ log::Error::Refused(_)) => Problem::bad_request(error),
        Error::Log(error @ log::Error::Full) => Problem::too_many(error, 1),
        Error::Log(log::Error::Unavailable(cause)) => {
            tracing::warn!(error = %cause, "event not acknowledged");
            Problem::unavailable("the log did not acknowledge the event; send it again", 1)
        }
        Error::Spool(error @ spool::Error::TooLarge) => Problem::too_large(error),
        Error::Spool(error) => Problem::unavailable(error, error.retry_after_seconds()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{self, Feedback, Target, Value};
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
    fn a_repeated_event_is_sent_once_and_another_body_conflicts() {
        let stored = Digests::from([(("test".to_owned(), "old".to_owned()), event("old", true).digest())]);
        let events = vec![
            Ok(event("a", true)),
            Ok(event("a", true)),
            Ok(event("a", false)),
            Ok(event("old", true)),
            Ok(event("old", false)),
            Err(Problem::bad_request("refused earlier")),
        ];
        let results = compare(events, stored);
        let summary: Vec<_> = results
            .iter()
            .map(|result| match result {
                Ok(checked) => Ok(checked.duplicate),
                Err(problem) => Err(problem.status.as_u16()),
            })
            .collect();
        assert_eq!(summary, [Ok(false), Ok(true), Err(409), Ok(true), Err(409), Err(400)]);
    }
}
