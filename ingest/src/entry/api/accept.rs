//! The path of every event after its endpoint has read it: check, compare, send.
//!
//! An event is compared with those that this process acknowledged last, in memory. The tables are
//! asked only about events that they may hold all the same: those whose id was not made just now.
//! So the acknowledgement of a new event never waits for the database.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::time::Instant;

use axum::http::StatusCode;
use edge::problem::Problem;
use event_log as log;
use event_log::event::{Event, Invalid};

use super::answer::invalid;
use super::known::Key;
use super::recent::{self, Digest, Name};
use super::{Api, payload, tally};
use crate::entry::{destination, spool};
use crate::judge::SOURCE_PREFIX;

/// Events of a request that wait for acknowledgement at once.
const SENDS_AT_ONCE: usize = 256;

/// A valid event.
#[derive(Debug)]
pub(super) struct Checked {
    pub event: Event,
    /// The value of its record.
    pub value: Vec<u8>,
    name: Name,
    digest: Digest,
    /// The same event was acknowledged or stored before, or comes earlier in the request.
    pub duplicate: bool,
}

/// Which events are looked up in the tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lookup {
    All,
    /// Those that are not known to be new.
    Needed,
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
        let mut checked = self.check(events, Lookup::Needed).await.into_iter();
        let mut results = Vec::with_capacity(checked.len());
        while checked.len() > 0 {
            let part = checked.by_ref().take(SENDS_AT_ONCE).collect();
            results.extend(self.send(part).await);
        }
        if self.stored.is_some() {
            let acknowledged = results.iter().flatten().filter(|checked| !checked.duplicate);
            let acknowledged = acknowledged.map(|checked| (checked.name, checked.digest));
            self.recent.remember(acknowledged);
        }
        tally::accepted(results.iter().flatten().map(|checked| &checked.event));
        let results = results.into_iter();
        results.map(|result| result.map(|checked| checked.event)).collect()
    }

    /// Sends events together, without the duplicates. The results are in the same order.
    async fn send(&self, mut events: Vec<Result<Checked, Problem>>) -> Vec<Result<Checked, Problem>> {
        let now = Instant::now();
        for event in &mut events {
            let is_new = event.as_ref().is_ok_and(|checked| !checked.duplicate);
            if is_new && !self.circuit.try_send(now) {
                *event = Err(log_unavailable());
            }
        }
        let new = events.iter().flatten().filter(|checked| !checked.duplicate);
        let new: Vec<(&Event, &[u8])> = new.map(|checked| (&checked.event, &*checked.value)).collect();
        let mut sent = self.destination.send(&new).await.into_iter();
        let mut result = |checked: Checked| {
            if checked.duplicate {
                return Ok(checked);
            }
            match sent.next() {
                Some(Ok(())) => self.circuit.succeeded(),
                Some(Err(error)) => {
                    // Other errors say nothing about the log.
                    if matches!(error, destination::Error::Log(log::Error::Unavailable(_))) {
                        self.circuit.failed(Instant::now());
                    }
                    return Err(send_problem(error));
                }
                None => return Err(Problem::internal("an event without a result")),
            }
            Ok(checked)
        };
        events.into_iter().map(|event| result(event?)).collect()
    }

    /// Checks events of one tenant and compares them with each other, with those of before in
    /// memory, and with those in the tables.
    pub(super) async fn check(
        &self,
        events: Vec<Result<Event, Problem>>,
        lookup: Lookup,
    ) -> Vec<Result<Checked, Problem>> {
        // An event that only one of both clocks refuses is left to the sink.
        let now = self.validator.clock.latest();
        let checked = events
            .into_iter()
            .map(|event| {
                let event = event?;
                let valid = check_source(&event).and_then(|()| event.check());
                let valid = valid.and_then(|()| self.validator.check(&event, now));
                valid.map_err(|error| invalid(&error))?;
                Ok(event)
            })
            .collect();
        let checked = payload::check_stored(self.payloads.as_ref(), checked).await;
        let encoded = checked.into_iter().map(|event| event.map(|event| self.encode(event)));
        let encoded: Vec<Result<Checked, Problem>> = encoded.collect();
        let known = self.known(&encoded, lookup).await;
        compare(encoded, known)
    }

    fn encode(&self, event: Event) -> Checked {
        let (value, digest) = event.encode_with_digest();
        Checked {
            name: self.recent.name(&event),
            event,
            value,
            digest,
            duplicate: false,
        }
    }

    /// The digests under which these events are known.
    ///
    /// The tables decide where memory knows another digest, because they may hold what another
    /// process has acknowledged.
    async fn known(&self, events: &[Result<Checked, Problem>], lookup: Lookup) -> HashMap<Name, Digest> {
        let mut known = HashMap::new();
        let Some(stored) = &self.stored else {
            return known;
        };
        let events: Vec<&Checked> = events.iter().flatten().collect();
        let remembered = self.recent.digests(events.iter().map(|checked| checked.name));
        let now = self.validator.clock.now();
        let mut asked = Vec::new();
        for (checked, digest) in events.into_iter().zip(remembered) {
            known.extend(digest.map(|digest| (checked.name, digest)));
            let is_clear = match digest {
                Some(digest) => digest == checked.digest,
                None => recent::is_new(&checked.event.id, now),
            };
            if lookup == Lookup::All || !is_clear {
                asked.push(checked);
            }
        }
        let Some(first) = asked.first() else {
            return known;
        };
        let keys: Vec<Key> = asked.iter().map(|checked| key(&checked.event)).collect();
        let found = stored.digests(first.event.tenant.clone(), keys).await;
        if !found.is_empty() {
            let found = asked.iter().filter_map(|checked| {
                let digest = *found.get(&key(&checked.event))?;
                Some((checked.name, digest))
            });
            known.extend(found);
        }
        known
    }
}

/// Judges write to the log themselves.
fn check_source(event: &Event) -> Result<(), Invalid> {
    match event.source.starts_with(SOURCE_PREFIX) {
        true => Err(Invalid::new("source", "is that of a judge; give your own")),
        false => Ok(()),
    }
}

fn key(event: &Event) -> Key {
    (event.source.clone(), event.id.clone(), event.body.kind().to_owned())
}

/// `known` starts with the digests of earlier events and grows with the events of the request.
fn compare(events: Vec<Result<Checked, Problem>>, mut known: HashMap<Name, Digest>) -> Vec<Result<Checked, Problem>> {
    let mut compare = |mut checked: Checked| {
        match known.entry(checked.name) {
            Entry::Vacant(entry) => {
                entry.insert(checked.digest);
            }
            Entry::Occupied(entry) if *entry.get() == checked.digest => checked.duplicate = true,
            Entry::Occupied(_) => {
                return Err(Problem::conflict(format!(
                    "the {} {:?} of source {:?} was sent with another body before",
                    checked.event.body.kind(),
                    checked.event.id,
                    checked.event.source
                )));
            }
        }
        Ok(checked)
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
    use event_log::event::{self, Feedback, Target, Value};
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

    fn checked(id: &str, value: bool) -> Checked {
        let event = event(id, value);
        let (value, digest) = event.encode_with_digest();
        let mut name = [0; 16];
        name[..id.len()].copy_from_slice(id.as_bytes());
        Checked {
            event,
            value,
            name: Name(name),
            digest,
            duplicate: false,
        }
    }

    #[test]
    fn a_repeated_event_is_sent_once_and_another_body_conflicts() {
        let old = checked("old", true);
        let events = vec![
            Ok(checked("a", true)),
            Ok(checked("a", true)),
            Ok(checked("a", false)),
            Ok(checked("old", true)),
            Ok(checked("old", false)),
            Err(Problem::bad_request("refused earlier")),
        ];
        let results = compare(events, HashMap::from([(old.name, old.digest)]));
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
