//! One batch, one transaction: fence, identities, rows, dead letters, offsets.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use futures::future::try_join_all;
use sqlx::PgConnection;
use time::OffsetDateTime;
use tracing::Instrument;

use super::offset::{self, Claims, Next};
use super::record::{Record, transaction_span};
use super::settle::{Touched, settle};
use super::{Sink, references, revoke, rows};
use crate::event::{Body, Event};
use crate::log::{DeadLetter, Reason};
use crate::transaction::begin_repeatable;

#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    /// Someone else has claimed the partition since.
    #[error("{topic}/{partition} was claimed by another sink")]
    Fenced { topic: String, partition: i32 },
    /// The database lost its last transactions with a crash, or with a server that another one took over from.
    #[error(
        "{topic}/{partition} was read up to {follows}, and the tables hold it up to {held}: what lies between is missing"
    )]
    Gap {
        topic: String,
        partition: i32,
        follows: i64,
        held: i64,
    },
    /// The database does not take one of the rows, and never will.
    #[error("the database refused a row")]
    Refused(#[source] sqlx::Error),
    /// The database or the log is away; nothing was written.
    #[error("a service is away")]
    Away(#[source] anyhow::Error),
    /// Asked to stop while waiting; nothing was written.
    #[error("stopped")]
    Stopped,
}

impl From<sqlx::Error> for Error {
    fn from(error: sqlx::Error) -> Self {
        // SQLSTATE classes: 22 data exception, 23 integrity constraint violation.
        let refused = error
            .as_database_error()
            .and_then(|error| error.code())
            .is_some_and(|code| code.starts_with("22") || code.starts_with("23"));
        if refused {
            Self::Refused(error)
        } else {
            Self::Away(error.into())
        }
    }
}

const SETTLE_PAUSE: Duration = Duration::from_millis(100);

/// `(tenant, source, id)`.
type Key<'a> = (&'a str, &'a str, &'a str);

#[derive(Default)]
struct Counts {
    generations: u64,
    feedback: u64,
    retractions: u64,
    episode_ends: u64,
    late: u64,
    duplicates: u64,
}

impl Sink {
    /// Writes what the tables do not hold yet and moves the offsets. Dead letters are acknowledged by the log before the
    /// commit: a crash in between repeats them, and loses none.
    pub(super) async fn transaction(&self, claims: &Claims, records: &[Record]) -> Result<Next, Error> {
        let span = transaction_span(records);
        self.write_together(claims, records).instrument(span).await
    }

    async fn write_together(&self, claims: &Claims, records: &[Record]) -> Result<Next, Error> {
        let started = std::time::Instant::now();
        let mut transaction = begin_repeatable(&self.pool).await?;
        let (next, caught_up_to) = self.hold(&mut transaction, claims, records).await?;
        let unread = |record: &&Record| {
            let slot = (record.from.topic.clone(), record.from.partition);
            next.get(&slot).is_some_and(|next| record.from.offset >= *next)
        };
        let records: Vec<&Record> = records.iter().filter(unread).collect();
        let mut dead = Vec::new();
        let (counts, touched) = self.insert(&mut transaction, &records, caught_up_to, &mut dead).await?;
        let letters = dead.iter().map(|letter| self.producer.send_dead_letter(letter));
        try_join_all(letters).await.map_err(|error| Error::Away(error.into()))?;
        let mut moved = next;
        for record in &records {
            let slot = (record.from.topic.clone(), record.from.partition);
            moved.insert(slot, record.from.offset + 1);
        }
        offset::advance(&mut transaction, &self.cluster_id, &moved).await?;
        transaction.commit().await?;
        self.settle_committed(&touched).await;
        count(&counts, &dead);
        metrics::histogram!("springtide_ingest_batch_seconds").record(started.elapsed().as_secs_f64());
        Ok(moved)
    }

    /// Locks the offsets of the batch's partitions and checks that they may still be moved, and that the batch goes on where
    /// the tables end: what lay between would never be read again. Until the transaction ends, the closer closes nothing
    /// after the returned moment: it waits for each of these partitions to be caught up.
    async fn hold(
        &self,
        connection: &mut PgConnection,
        claims: &Claims,
        records: &[Record],
    ) -> Result<(Next, Option<OffsetDateTime>), Error> {
        let fenced = |(topic, partition): &offset::Slot| Error::Fenced {
            topic: topic.clone(),
            partition: *partition,
        };
        let mut firsts: BTreeMap<offset::Slot, &Record> = BTreeMap::new();
        for record in records {
            let slot = (record.from.topic.clone(), record.from.partition);
            firsts.entry(slot).or_insert(record);
        }
        let held = offset::lock(connection, &self.cluster_id, firsts.keys()).await?;
        let mut next = Next::new();
        for (slot, first) in firsts {
            let fence = claims.get(&slot).map(|claim| claim.fence);
            let held = held.get(&slot).map(|held| held.claim);
            let held = held.filter(|held| fence == Some(held.fence));
            let held = held.ok_or_else(|| fenced(&slot))?;
            if held.next_offset < first.follows {
                return Err(Error::Gap {
                    topic: slot.0,
                    partition: slot.1,
                    follows: first.follows,
                    held: held.next_offset,
                });
            }
            next.insert(slot, held.next_offset);
        }
        let caught_up_to = held.values().filter_map(|held| held.caught_up_to).max();
        Ok((next, caught_up_to))
    }

    async fn insert(
        &self,
        connection: &mut PgConnection,
        records: &[&Record],
        caught_up_to: Option<OffsetDateTime>,
        dead: &mut Vec<DeadLetter>,
    ) -> Result<(Counts, Touched), Error> {
        let mut counts = Counts::default();
        let mut usable = Vec::new();
        for record in records {
            match &record.event {
                Ok(event) => usable.push((*record, event)),
                Err(unusable) => dead.push(record.dead_letter(unusable.reason, &*unusable.detail)),
            }
        }
        let fresh = identify(connection, usable, &mut counts, dead).await?;
        let mut generations = Vec::new();
        let mut feedback = Vec::new();
        let mut retractions = Vec::new();
        let mut ends = Vec::new();
        let mut ids = HashSet::new();
        for (record, event) in fresh {
            let id = match &event.body {
                Body::Generation(generation) => generation.id,
                Body::Feedback(feedback) => feedback.id,
                Body::Retraction(retraction) => retraction.id,
                // Several may say that an episode ended.
                Body::EpisodeEnd(end) => {
                    ends.push((event, end));
                    continue;
                }
            };
            if !ids.insert((event.kind(), id)) {
                dead.push(record.dead_letter(Reason::Conflict, TAKEN));
                continue;
            }
            match &event.body {
                Body::Generation(body) => generations.push(rows::Row { record, event, body }),
                Body::Feedback(body) => feedback.push(rows::Row { record, event, body }),
                Body::Retraction(body) => retractions.push(rows::Row { record, event, body }),
                Body::EpisodeEnd(_) => {}
            }
        }
        let stored = rows::insert_generations(connection, &generations).await?;
        let rows = generations.iter().map(|row| (row.record, row.body.id));
        dead.extend(taken(rows, &stored));
        generations.retain(|row| stored.contains(&row.body.id));
        references::insert(connection, &generations).await?;
        rows::open(connection, &generations, &self.surfaces).await?;
        rows::hold_open(connection, &feedback, caught_up_to, &self.surfaces).await?;
        let stored = rows::insert_feedback(connection, &feedback).await?;
        let late: Vec<_> = stored.iter().filter(|(_, late)| **late).map(|(id, _)| *id).collect();
        counts.late = late.len() as u64;
        let stored: HashSet<_> = stored.into_keys().collect();
        let rows = feedback.iter().map(|row| (row.record, row.body.id));
        dead.extend(taken(rows, &stored));
        feedback.retain(|row| stored.contains(&row.body.id));
        let stored = revoke::insert_retractions(connection, &retractions).await?;
        counts.late += stored.values().filter(|late| **late).count() as u64;
        counts.retractions = stored.len() as u64;
        let stored: HashSet<_> = stored.into_keys().collect();
        let rows = retractions.iter().map(|row| (row.record, row.body.id));
        dead.extend(taken(rows, &stored));
        revoke::insert_episode_ends(connection, &ends).await?;
        let mut touched = Touched::of(&generations, &feedback, &ends, &self.surfaces);
        touched.feedback = late;
        touched
            .feedback
            .extend(retractions.iter().map(|row| row.body.feedback_id));
        settle(connection, &touched, &self.surfaces).await?;
        counts.generations = generations.len() as u64;
        counts.feedback = feedback.len() as u64;
        counts.episode_ends = ends.len() as u64;
        Ok((counts, touched))
    }

    /// Waits out a database that is away: what is committed is not written again.
    async fn settle_committed(&self, touched: &Touched) {
        while !touched.is_empty() && !self.shutdown.is_cancelled() {
            let settled = async { settle(&mut *self.pool.acquire().await?, touched, &self.surfaces).await };
            match settled.await {
                Ok(()) => return,
                Err(error) => tracing::warn!(%error, "committed rows not settled, will be tried again"),
            }
            tokio::time::sleep(SETTLE_PAUSE).await;
        }
    }
}

const TAKEN: &str = "another event has this id";

/// Letters for rows that were not stored because their id is another event's.
fn taken<'a>(rows: impl Iterator<Item = (&'a Record, uuid::Uuid)>, stored: &HashSet<uuid::Uuid>) -> Vec<DeadLetter> {
    rows.filter(|(_, id)| !stored.contains(id))
        .map(|(record, _)| record.dead_letter(Reason::Conflict, TAKEN))
        .collect()
}

/// Keeps the events that nobody has seen. The same event again is counted, another one under its name is a dead letter.
async fn identify<'a>(
    connection: &mut PgConnection,
    usable: Vec<(&'a Record, &'a Event)>,
    counts: &mut Counts,
    dead: &mut Vec<DeadLetter>,
) -> Result<Vec<(&'a Record, &'a Event)>, Error> {
    // In key order, so that two sinks with the same events wait for each other instead of deadlocking.
    let mut known: BTreeMap<Key<'a>, [u8; 32]> = BTreeMap::new();
    let mut candidates = Vec::new();
    let mut repeated = Vec::new();
    for (record, event) in usable {
        let key = key(event);
        let digest = event.digest();
        match known.entry(key) {
            Entry::Occupied(_) => repeated.push((record, key, digest)),
            Entry::Vacant(name) => {
                name.insert(digest);
                candidates.push((record, event, digest));
            }
        }
    }
    let older = rows::insert_keys(connection, &known).await?;
    let older: HashMap<Key<'_>, &[u8]> = older
        .iter()
        .map(|(key, digest)| ((&*key.0, &*key.1, &*key.2), digest.as_slice()))
        .collect();
    let mut fresh = Vec::new();
    for (record, event, digest) in candidates {
        match older.get(&key(event)) {
            None => fresh.push((record, event)),
            Some(_) => repeated.push((record, key(event), digest)),
        }
    }
    for (record, key, digest) in repeated {
        // Held against what is stored: the first of this batch may itself be another event under a name that is taken.
        let first = older.get(&key).copied().or(known.get(&key).map(<[u8; 32]>::as_slice));
        if first == Some(&digest) {
            record.span.record("springtide.outcome", "duplicate");
            counts.duplicates += 1;
        } else {
            let detail = "the same tenant, source and id came with another body before";
            dead.push(record.dead_letter(Reason::Conflict, detail));
        }
    }
    Ok(fresh)
}

fn key(event: &Event) -> Key<'_> {
    (&event.tenant, &event.source, &event.id)
}

fn count(counts: &Counts, dead: &[DeadLetter]) {
    for (kind, number) in [
        ("generation", counts.generations),
        ("feedback", counts.feedback),
        ("retraction", counts.retractions),
        ("episode_end", counts.episode_ends),
        ("duplicate", counts.duplicates),
        ("late", counts.late),
        ("dead", dead.len() as u64),
    ] {
        metrics::counter!("springtide_ingest_records_total", "outcome" => kind).increment(number);
    }
    // The detail may quote what was sent, so it is only in the dead letter itself.
    for letter in dead {
        let from = letter.from.as_ref();
        tracing::warn!(
            reason = letter.reason.as_str(),
            topic = from.map(|from| from.topic.as_str()),
            partition = from.map(|from| from.partition),
            offset = from.map(|from| from.offset),
            "dead letter"
        );
    }
}
