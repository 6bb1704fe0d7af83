//! What happens when the group protocol gives or takes partitions: a claim in the database, then reading from the
//! database's offset. Also notes up to which moment the owned partitions are in the tables.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail, ensure};
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::message::BorrowedMessage;
use rdkafka::types::RDKafkaRespErr;
use rdkafka::{ClientContext, Message, Offset, TopicPartitionList};
use sqlx::PgPool;
use time::OffsetDateTime;
use tokio::runtime::Handle;

use super::offset::{self, Claim, Claims, Next, Progress, Slot};
use crate::kafka::ClientOptions;
use crate::{event, kafka};

const WATERMARK_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the group may take to say which partitions are ours, after it took them or after we joined. A client that lost
/// its session to a stalled broker has been seen never to join again; a fresh one joins at once.
const ASSIGNMENT_TIMEOUT: Duration = Duration::from_secs(20);

/// Why reading ended before the stop.
pub(super) enum Failure {
    /// The partitions or a service are lost: start over from the database's offsets.
    Lost(anyhow::Error),
    /// The log is not the one that the tables were filled from.
    Fatal(anyhow::Error),
}

/// Lives in the client and is called by the thread that polls; its lock is never contended.
pub(super) struct Assigner {
    runtime: Handle,
    pool: PgPool,
    kafka: ClientOptions,
    cluster_id: String,
    accept_other_log: bool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Since when the group owes an answer; an answer may be "none".
    waiting_since: Option<Instant>,
    owned: BTreeMap<Slot, Owned>,
    /// Counts rebalances.
    assignment: u64,
    failure: Option<Failure>,
}

struct Owned {
    claim: Claim,
    /// The offset that reading has come to.
    position: i64,
    /// The log's end as seen at a moment: once the tables are there, they hold everything up to that moment.
    mark: Option<Mark>,
}

struct Mark {
    seen_at: OffsetDateTime,
    end: i64,
}

impl Assigner {
    pub(super) fn new(
        runtime: Handle,
        pool: PgPool,
        kafka: ClientOptions,
        cluster_id: String,
        accept_other_log: bool,
    ) -> Self {
        Self {
            runtime,
            pool,
            kafka,
            cluster_id,
            accept_other_log,
            state: Mutex::new(State {
                waiting_since: Some(Instant::now()),
                ..State::default()
            }),
        }
    }

    /// Fails once the group has been silent for too long.
    pub(super) fn check_membership(&self) -> Result<(), Failure> {
        match self.state().waiting_since {
            Some(since) if since.elapsed() > ASSIGNMENT_TIMEOUT => Err(Failure::Lost(anyhow!(
                "the consumer group has assigned nothing for {ASSIGNMENT_TIMEOUT:?}"
            ))),
            _ => Ok(()),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn assignment(&self) -> u64 {
        self.state().assignment
    }

    pub(super) fn take_failure(&self) -> Option<Failure> {
        self.state().failure.take()
    }

    pub(super) fn claims(&self) -> Claims {
        let state = self.state();
        let claims = state.owned.iter();
        claims.map(|(slot, owned)| (slot.clone(), owned.claim)).collect()
    }

    /// A record was read: the offset that reading had come to before it. `None`: its partition is not ours.
    pub(super) fn note_read(&self, message: &BorrowedMessage<'_>) -> Option<i64> {
        let slot = (message.topic().to_owned(), message.partition());
        let mut state = self.state();
        let owned = state.owned.get_mut(&slot)?;
        Some(std::mem::replace(&mut owned.position, message.offset() + 1))
    }

    pub(super) fn advance(&self, next: &Next) {
        let mut state = self.state();
        for (slot, next_offset) in next {
            if let Some(owned) = state.owned.get_mut(slot) {
                owned.claim.next_offset = *next_offset;
            }
        }
    }

    /// Claims partitions and starts reading them where the tables end.
    fn take_over(&self, consumer: &BaseConsumer<Self>, partitions: &TopicPartitionList) -> Result<(), Failure> {
        let slots: Vec<Slot> = partitions
            .elements()
            .iter()
            .map(|element| (element.topic().to_owned(), element.partition()))
            .collect();
        // A log of the same name may reach from before the tables' offset to after it, and be another.
        same_cluster(&self.kafka, &self.cluster_id)?;
        let lost = |error: anyhow::Error| Failure::Lost(error.context("claim partitions"));
        let mut ranges = BTreeMap::new();
        for slot in &slots {
            let range = consumer
                .fetch_watermarks(&slot.0, slot.1, WATERMARK_TIMEOUT)
                .with_context(|| format!("look up the ends of {}/{}", slot.0, slot.1))
                .map_err(lost)?;
            ranges.insert(slot.clone(), range);
        }
        let first = ranges.iter().map(|(slot, range)| (slot.clone(), range.0));
        let claims = self.runtime.block_on(async {
            offset::register(&self.pool, &self.cluster_id, &first.collect()).await?;
            offset::claim(&self.pool, &self.cluster_id, &slots).await
        });
        let claims = claims.map_err(|error| lost(error.into()))?;
        let mut assignment = TopicPartitionList::new();
        let mut owned = BTreeMap::new();
        for (slot, claim) in claims {
            let Some((low, high)) = ranges.get(&slot).copied() else {
                continue;
            };
            let next_offset = self.start(&slot, claim, low, high)?;
            assignment
                .add_partition_offset(&slot.0, slot.1, Offset::Offset(next_offset))
                .map_err(|error| lost(error.into()))?;
            let read = Owned {
                claim: Claim { next_offset, ..claim },
                position: next_offset,
                mark: None,
            };
            owned.insert(slot, read);
        }
        consumer.assign(&assignment).map_err(|error| lost(error.into()))?;
        tracing::info!(partitions = owned.len(), "partitions claimed");
        self.state().owned = owned;
        Ok(())
    }

    /// The offset to read from: the tables', if the log reaches from before it to after it.
    fn start(&self, slot: &Slot, claim: Claim, low: i64, high: i64) -> Result<i64, Failure> {
        let Err(error) = in_log(slot, claim.next_offset, low, high) else {
            return Ok(claim.next_offset);
        };
        if !self.accept_other_log {
            return Err(Failure::Fatal(error.context(
                "ingest.accept_other_log = true goes on with what this log still holds",
            )));
        }
        tracing::error!(error = %format!("{error:#}"), from = low, "going on as configured");
        let (pool, cluster_id) = (&self.pool, &self.cluster_id);
        self.runtime
            .block_on(offset::jump(pool, cluster_id, slot, claim.fence, low))
            .context("move offset")
            .map_err(Failure::Lost)?;
        Ok(low)
    }
}

impl ClientContext for Assigner {}

impl ConsumerContext for Assigner {
    fn rebalance(&self, consumer: &BaseConsumer<Self>, event: RDKafkaRespErr, partitions: &mut TopicPartitionList) {
        let given = event == RDKafkaRespErr::RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS;
        {
            let mut state = self.state();
            state.assignment += 1;
            state.owned.clear();
            state.waiting_since = (!given).then(Instant::now);
        }
        let result = if given {
            self.take_over(consumer, partitions)
        } else {
            Ok(())
        };
        let taken = given && result.is_ok();
        if !taken && let Err(error) = consumer.unassign() {
            tracing::warn!(%error, "partitions could not be given back");
        }
        if let Err(failure) = result {
            self.state().failure = Some(failure);
        }
    }
}

/// Whether the brokers are still those of the log that is being read.
pub(super) fn same_cluster(client: &ClientOptions, cluster_id: &str) -> Result<(), Failure> {
    let found = kafka::cluster_id(client).map_err(Failure::Lost)?;
    if found == cluster_id {
        return Ok(());
    }
    Err(Failure::Fatal(kafka::another_log(client, cluster_id, &found)))
}

fn in_log((topic, partition): &Slot, next_offset: i64, low: i64, high: i64) -> anyhow::Result<()> {
    if next_offset > high {
        bail!(
            "{topic}/{partition} ends at {high} and the tables hold it up to {next_offset}: \
             it is not the log that they were filled from"
        );
    }
    ensure!(
        next_offset >= low,
        "{topic}/{partition} begins at {low} and the tables hold it up to {next_offset}: \
         {} records were removed before they were read",
        low - next_offset
    );
    Ok(())
}

/// Notes how far each owned partition is, and marks the log's end where no mark is waiting.
///
/// A mark's moment is taken before the end is asked for. What the log had acknowledged by then lies below that end; so
/// once the tables reach it, they hold everything that the log took before that moment, however far behind they were.
pub(super) fn observe_progress(consumer: &BaseConsumer<Assigner>) -> Result<(), Failure> {
    let context = consumer.context();
    let unmarked: Vec<Slot> = {
        let state = context.state();
        let unmarked = state.owned.iter().filter(|(_, owned)| owned.mark.is_none());
        unmarked.map(|(slot, _)| slot.clone()).collect()
    };
    let seen_at = event::now();
    match kafka::ends(consumer, &unmarked) {
        Ok(ends) => {
            let mut state = context.state();
            for (slot, end) in ends {
                if let Some(owned) = state.owned.get_mut(&slot) {
                    owned.mark = Some(Mark { seen_at, end });
                }
            }
        }
        Err(error) => tracing::warn!(error = format!("{error:#}"), "the log's ends are unknown"),
    }
    let progress = reached(&mut context.state());
    if progress.is_empty() {
        return Ok(());
    }
    let noted = offset::note_progress(&context.pool, &context.cluster_id, &progress);
    match context.runtime.block_on(noted) {
        Ok(noted) if noted < progress.len() as u64 => {
            return Err(Failure::Lost(anyhow!(
                "of {} partitions, {} were claimed by another sink, or the tables hold less of them than they did",
                progress.len(),
                progress.len() as u64 - noted
            )));
        }
        Ok(_) => {}
        // The next mark says the same and more.
        Err(error) => tracing::warn!(%error, "progress not noted"),
    }
    match context.take_failure() {
        Some(failure) => Err(failure),
        None => Ok(()),
    }
}

fn reached(state: &mut State) -> Vec<Progress> {
    let mut progress = Vec::new();
    for (slot, owned) in &mut state.owned {
        let Some(mark) = &owned.mark else { continue };
        if owned.claim.next_offset >= mark.end {
            progress.push(Progress {
                slot: slot.clone(),
                claim: owned.claim,
                caught_up_to: mark.seen_at,
            });
            owned.mark = None;
        }
    }
    progress
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owned(next_offset: i64, end: i64) -> State {
        let mark = Some(Mark {
            seen_at: OffsetDateTime::UNIX_EPOCH,
            end,
        });
        let claim = Claim { next_offset, fence: 3 };
        let owned = Owned {
            claim,
            position: next_offset,
            mark,
        };
        State {
            owned: BTreeMap::from([(("t".to_owned(), 0), owned)]),
            ..State::default()
        }
    }

    #[test]
    fn a_mark_counts_once_the_tables_reach_it() {
        let mut behind = owned(9, 10);
        assert!(reached(&mut behind).is_empty());
        assert!(behind.owned.values().all(|owned| owned.mark.is_some()));
        let mut there = owned(10, 10);
        let progress = reached(&mut there);
        assert_eq!(progress[0].claim.fence, 3);
        assert_eq!(progress[0].caught_up_to, OffsetDateTime::UNIX_EPOCH);
        assert!(there.owned.values().all(|owned| owned.mark.is_none()));
    }

    #[test]
    fn a_log_that_does_not_reach_the_tables_is_refused() {
        let slot = ("t".to_owned(), 0);
        assert!(in_log(&slot, 5, 0, 5).is_ok());
        assert!(in_log(&slot, 5, 5, 9).is_ok());
        let shorter = in_log(&slot, 5, 0, 4).unwrap_err().to_string();
        assert!(shorter.contains("not the log"), "{shorter}");
        let gap = in_log(&slot, 5, 7, 9).unwrap_err().to_string();
        assert!(gap.contains("2 records were removed"), "{gap}");
    }
}
