//! Writes a batch in one transaction: fence, identities, rows, dead letters, offsets.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::Hash;
use std::time::{Duration, Instant};

use event_log::event::{Body, Event};
use event_log::{DeadLetter, Reason};
use futures::future::try_join_all;
use sqlx::PgConnection;
use time::OffsetDateTime;
use tracing::Instrument;
use uuid::Uuid;

use super::Sink;
use crate::rows::insert::{self, Key, Row};
use crate::rows::join::hold;
use crate::rows::join::settle::{Others, Touched, settle};
use crate::rows::judgement;
use crate::rows::offset::{self, Claims, Next, Slot};
use crate::rows::record::{Record, transaction_span};
use crate::rows::transaction::begin_unflushed;

#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    /// Another sink has claimed the partition since.
    #[error("{topic}/{partition} was claimed by another sink")]
    Fenced { topic: String, partition: i32 },
    /// The database lost its last transactions in a crash or a failover.
    #[error("{topic}/{partition} was read up to {follows}, but the tables only reach {stored}: records are missing")]
    Gap {
        topic: String,
        partition: i32,
        follows: i64,
        stored: i64,
    },
    /// Retrying cannot help.
    #[error("the database refused a row")]
    Permanent(#[source] sqlx::Error),
    /// Nothing was written, and a retry may help.
    #[error("the database or the log is unavailable")]
    Transient(#[source] anyhow::Error),
    /// The sink is stopping. Nothing was written.
    #[error("stopped")]
    Stopped,
}

impl From<sqlx::Error> for Error {
    fn from(error: sqlx::Error) -> Self {
        // SQLSTATE classes: 22 data exception, 23 integrity constraint violation.
        let permanent = error
            .as_database_error()
            .and_then(|error| error.code())
            .is_some_and(|code| code.starts_with("22") || code.starts_with("23"));
        if permanent {
            Self::Permanent(error)
        } else {
            Self::Transient(error.into())
        }
    }
}

const SETTLE_PAUSE: Duration = Duration::from_millis(100);

#[derive(Default)]
struct Counts {
    generations: usize,
    feedback: usize,
    retractions: usize,
    episode_ends: usize,
    late: usize,
    duplicates: usize,
}

impl Sink {
    /// Writes the records that the tables do not have yet, and moves the offsets.
    ///
    /// The log acknowledges dead letters before the commit. So a crash in between repeats them but
    /// loses none.
    pub(super) async fn transaction(&self, claims: &Claims, records: &[Record]) -> Result<Next, Error> {
        let span = transaction_span(records);
        self.write_together(claims, records).instrument(span).await
    }

    async fn write_together(&self, claims: &Claims, records: &[Record]) -> Result<Next, Error> {
        let started = Instant::now();
        let mut transaction = begin_unflushed(&self.pool).await?;
        let (mut next, caught_up_to) = self.lock_offsets(&mut transaction, claims, records).await?;
        let is_new = |record: &&Record| {
            let stored = next.get(&record.slot());
            stored.is_some_and(|stored| record.from.offset >= *stored)
        };
        let records: Vec<&Record> = records.iter().filter(is_new).collect();
        let mut dead = Vec::new();
        let (counts, touched) = self.insert(&mut transaction, &records, caught_up_to, &mut dead).await?;
        let sends = dead.iter().map(|record| self.producer.send_dead_letter(record));
        try_join_all(sends)
            .await
            .map_err(|error| Error::Transient(error.into()))?;
        next.extend(records.iter().map(|record| (record.slot(), record.from.offset + 1)));
        offset::advance(&mut transaction, &self.cluster_id, &next).await?;
        transaction.commit().await?;
        self.settle_committed(&touched).await;
        record_metrics(&counts, &dead);
        metrics::histogram!("springtide_ingest_batch_seconds").record(started.elapsed().as_secs_f64());
        Ok(next)
    }

    /// Locks the offsets of the batch's partitions. Returns them, and up to when the tables are
    /// caught up.
    ///
    /// Fails if another sink has claimed a partition, or if the batch would leave a gap after the
    /// stored records. Until the transaction ends, the closer closes nothing after the returned
    /// time, because it waits for these partitions.
    async fn lock_offsets(
        &self,
        connection: &mut PgConnection,
        claims: &Claims,
        records: &[Record],
    ) -> Result<(Next, Option<OffsetDateTime>), Error> {
        let mut firsts: BTreeMap<Slot, &Record> = BTreeMap::new();
        for record in records {
            firsts.entry(record.slot()).or_insert(record);
        }
        let locked = offset::lock(connection, &self.cluster_id, firsts.keys()).await?;
        let mut next = Next::new();
        for (slot, first) in firsts {
            let fence = claims.get(&slot).map(|claim| claim.fence);
            let claim = locked.get(&slot).map(|locked| locked.claim);
            let Some(claim) = claim.filter(|claim| fence == Some(claim.fence)) else {
                let (topic, partition) = slot;
                return Err(Error::Fenced { topic, partition });
            };
            if claim.next_offset < first.follows {
                return Err(Error::Gap {
                    topic: slot.0,
                    partition: slot.1,
                    follows: first.follows,
                    stored: claim.next_offset,
                });
            }
            next.insert(slot, claim.next_offset);
        }
        let caught_up_to = locked.values().filter_map(|locked| locked.caught_up_to).max();
        Ok((next, caught_up_to))
    }

    /// Inserts the events that are not stored yet. Appends dead letters for the records that cannot
    /// be stored.
    async fn insert(
        &self,
        connection: &mut PgConnection,
        records: &[&Record],
        caught_up_to: Option<OffsetDateTime>,
        dead: &mut Vec<DeadLetter>,
    ) -> Result<(Counts, Touched), Error> {
        let mut decoded = Vec::new();
        for record in records {
            match &record.event {
                Ok(event) => decoded.push((*record, event)),
                Err(unusable) => dead.push(record.dead_letter(unusable.reason, &*unusable.detail)),
            }
        }
        let mut counts = Counts::default();
        let fresh = identify(connection, decoded, &mut counts, dead).await?;
        let (mut generations, mut feedback, mut retractions, mut ends) = (vec![], vec![], vec![], vec![]);
        for (record, event) in fresh {
            match &event.body {
                Body::Generation(body) => generations.push(Row { record, event, body }),
                Body::Feedback(body) => feedback.push(Row { record, event, body }),
                Body::Retraction(body) => retractions.push(Row { record, event, body }),
                Body::EpisodeEnd(body) => ends.push(Row { record, event, body }),
            }
        }
        refuse_repeated(&mut generations, |row| row.body.id, dead);
        refuse_repeated(&mut feedback, |row| row.in_tenant(row.body.id), dead);
        refuse_repeated(&mut retractions, |row| row.in_tenant(row.body.id), dead);

        let checked = self.samplers.check(&mut *connection, &generations).await?;
        let stored = insert::generations(connection, &generations, &checked).await?;
        refuse(&mut generations, |row| !stored.contains(&row.body.id), dead);
        insert::payload_references(connection, &generations).await?;
        let joining = insert::open_generations(connection, &generations, &checked, &self.surfaces).await?;

        let targets = hold::Targets::of(
            &generations,
            &joining,
            &feedback,
            &retractions,
            &ends,
            caught_up_to,
            &self.surfaces,
        );
        let of_turns = hold::announce(connection, &targets).await?;
        hold::hold_episodes(connection, &targets, of_turns).await?;
        insert::open_episodes(connection, &generations, &joining, &self.surfaces).await?;

        let held = hold::hold_targets(connection, &targets).await?;
        let stored = insert::feedback(connection, &feedback, &held).await?;
        refuse(
            &mut feedback,
            |row| !stored.contains_key(&row.in_tenant(row.body.id)),
            dead,
        );
        judgement::queue(connection, &feedback, &self.judges).await?;
        let late = stored.iter().filter(|(_, late)| **late);
        let late: Vec<Uuid> = late.map(|((_, id), _)| *id).collect();

        hold::hold_retracted(connection, &targets).await?;
        let stored = insert::retractions(connection, &retractions).await?;
        refuse(
            &mut retractions,
            |row| !stored.contains_key(&row.in_tenant(row.body.id)),
            dead,
        );

        insert::episode_ends(connection, &ends).await?;
        insert::unlink_erased(connection, &generations, &feedback, &retractions).await?;

        counts.generations = generations.len();
        counts.feedback = feedback.len();
        counts.retractions = retractions.len();
        counts.episode_ends = ends.len();
        counts.late = late.len() + stored.values().filter(|late| **late).count();
        let mut touched = Touched::of(&generations, &feedback, &ends, &self.surfaces);
        touched.late = late;
        touched.retractions = retractions.iter().map(|row| row.body.id).collect();
        settle(connection, &touched, &self.surfaces, Others::Skip).await?;
        Ok((counts, touched))
    }

    /// The second check of [`settle`]. Waits until the database is available.
    async fn settle_committed(&self, touched: &Touched) {
        while !touched.is_empty() && !self.shutdown.is_cancelled() {
            let settled =
                async { settle(&mut *self.pool.acquire().await?, touched, &self.surfaces, Others::Wait).await };
            match settled.await {
                Ok(()) => return,
                Err(error) => tracing::warn!(%error, "cannot settle committed rows, will retry"),
            }
            tokio::time::sleep(SETTLE_PAUSE).await;
        }
    }
}

/// Turns rows into dead letters because another event has their id.
fn refuse<T>(rows: &mut Vec<Row<'_, T>>, mut is_conflict: impl FnMut(&Row<'_, T>) -> bool, dead: &mut Vec<DeadLetter>) {
    let records = rows.extract_if(.., |row| is_conflict(row));
    dead.extend(records.map(|row| row.record.dead_letter(Reason::Conflict, "another event has this id")));
}

fn refuse_repeated<T, I: Hash + Eq>(
    rows: &mut Vec<Row<'_, T>>,
    id: impl Fn(&Row<'_, T>) -> I,
    dead: &mut Vec<DeadLetter>,
) {
    let mut ids = HashSet::new();
    refuse(rows, |row| !ids.insert(id(row)), dead);
}

/// Returns the events that are not stored yet.
///
/// Counts repetitions. A different event with a known identity becomes a dead letter.
async fn identify<'a>(
    connection: &mut PgConnection,
    events: Vec<(&'a Record, &'a Event)>,
    counts: &mut Counts,
    dead: &mut Vec<DeadLetter>,
) -> Result<Vec<(&'a Record, &'a Event)>, Error> {
    // In the order of keys, so that two sinks with the same events cannot deadlock.
    let mut digests: BTreeMap<Key<'a>, [u8; 32]> = BTreeMap::new();
    let mut candidates = Vec::new();
    let mut repeated = Vec::new();
    for (record, event) in events {
        let (key, digest) = (key(event), event.digest());
        match digests.entry(key) {
            Entry::Occupied(_) => repeated.push((record, key, digest)),
            Entry::Vacant(entry) => {
                entry.insert(digest);
                candidates.push((record, event, key, digest));
            }
        }
    }
    let stored = insert::keys(connection, &digests).await?;
    let stored: HashMap<Key<'_>, &[u8]> = stored
        .iter()
        .map(|((tenant, source, id, kind), digest)| ((&**tenant, &**source, &**id, &**kind), &**digest))
        .collect();
    let mut fresh = Vec::new();
    for (record, event, key, digest) in candidates {
        if stored.contains_key(&key) {
            repeated.push((record, key, digest));
        } else {
            fresh.push((record, event));
        }
    }
    for (record, key, digest) in repeated {
        // Compared with the stored event, because the first of this batch may itself be in conflict
        // with it.
        let first = stored
            .get(&key)
            .copied()
            .or(digests.get(&key).map(<[u8; 32]>::as_slice));
        if first == Some(&digest) {
            record.span.record("springtide.outcome", "duplicate");
            counts.duplicates += 1;
        } else {
            let detail = "the same tenant, source, id and kind came with another body before";
            dead.push(record.dead_letter(Reason::Conflict, detail));
        }
    }
    Ok(fresh)
}

fn key(event: &Event) -> Key<'_> {
    (&event.tenant, &event.source, &event.id, event.body.kind())
}

fn record_metrics(counts: &Counts, dead: &[DeadLetter]) {
    for (kind, number) in [
        ("generation", counts.generations),
        ("feedback", counts.feedback),
        ("retraction", counts.retractions),
        ("episode_end", counts.episode_ends),
        ("duplicate", counts.duplicates),
        ("late", counts.late),
        ("dead", dead.len()),
    ] {
        metrics::counter!("springtide_ingest_records_total", "outcome" => kind).increment(number as u64);
    }
    // Without the detail, which may quote user text.
    for ((reason, topic, partition), (offset, records)) in together(dead) {
        tracing::warn!(reason, topic, partition, offset, records, "dead letter");
    }
}

/// The first offset and the number of the dead letters of each reason and partition: a line for each
/// record would let a sender of broken ones fill the disk of the process's log.
fn together(dead: &[DeadLetter]) -> BTreeMap<(&'static str, &str, i32), (i64, usize)> {
    let mut together = BTreeMap::new();
    for record in dead {
        let Some(from) = &record.from else { continue };
        let key = (record.reason.as_str(), from.topic.as_str(), from.partition);
        let (_, records) = together.entry(key).or_insert((from.offset, 0));
        *records += 1;
    }
    together
}

#[cfg(test)]
mod tests {
    use super::*;
    use event_log::Position;

    #[test]
    fn a_thousand_dead_letters_of_a_partition_are_one_line_of_the_log() {
        let letter = |reason, offset| DeadLetter {
            reason,
            detail: String::new(),
            from: Some(Position {
                topic: "t".to_owned(),
                partition: 3,
                offset,
            }),
            content_type: String::new(),
            trace: Vec::new(),
            key: Vec::new(),
            value: Vec::new(),
        };
        let mut dead: Vec<DeadLetter> = (10..1010).map(|offset| letter(Reason::Conflict, offset)).collect();
        dead.push(letter(Reason::Invalid, 5));
        let lines: Vec<_> = together(&dead).into_iter().collect();
        assert_eq!(
            lines,
            [(("conflict", "t", 3), (10, 1000)), (("invalid", "t", 3), (5, 1))]
        );
    }
}
