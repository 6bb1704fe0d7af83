//! Claims partitions that the group protocol assigns, and reads them from the offsets in the
//! database. Also records up to when the tables hold the owned partitions.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail, ensure};
use event_log::kafka;
use event_log::kafka::ClientOptions;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::message::BorrowedMessage;
use rdkafka::types::RDKafkaRespErr;
use rdkafka::{ClientContext, Message, Offset, TopicPartitionList};
use time::OffsetDateTime;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use super::{PROGRESS_INTERVAL, Sink};
use crate::rows::offset::{self, Claim, Claims, Next, Progress, Slot};

/// How long the group may take to assign partitions. A client that lost its session to a stalled
/// broker sometimes never joins again. A new client joins at once.
const ASSIGNMENT_TIMEOUT: Duration = Duration::from_secs(20);

const SEEK_TIMEOUT: Duration = Duration::from_secs(10);

/// Why reading ended before the shutdown.
pub(super) enum Failure {
    /// The partitions or a service are lost. The sink restarts from the offsets in the database.
    Lost(anyhow::Error),
    /// The tables were filled from another log.
    Fatal(anyhow::Error),
}

/// The client calls it on the polling thread, so its lock is uncontended.
pub(super) struct Assigner {
    sink: Arc<Sink>,
    runtime: Handle,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Since when an assignment is awaited. It may be empty.
    waiting_since: Option<Instant>,
    owned: BTreeMap<Slot, Owned>,
    /// The number of rebalances.
    assignment: u64,
    failure: Option<Failure>,
}

struct Owned {
    claim: Claim,
    /// The offset after the last record that was read.
    position: i64,
    /// Once the tables reach its end, they hold all records from before its time.
    mark: Option<Mark>,
    /// The latest mark. Records from its end on were written after its time.
    last_mark: Option<Mark>,
}

/// The end of a partition.
#[derive(Clone, Copy)]
struct Mark {
    /// By the database's clock.
    seen_at: OffsetDateTime,
    end: i64,
}

impl State {
    fn advance(&mut self, next: &Next) {
        for (slot, next_offset) in next {
            if let Some(owned) = self.owned.get_mut(slot) {
                // A round of before the partition went and came back may end late.
                owned.claim.next_offset = owned.claim.next_offset.max(*next_offset);
            }
        }
    }
}

impl Assigner {
    pub(super) fn new(sink: Arc<Sink>, runtime: Handle) -> Self {
        let state = State {
            waiting_since: Some(Instant::now()),
            ..State::default()
        };
        Self {
            sink,
            runtime,
            state: Mutex::new(state),
        }
    }

    /// Fails if the group takes too long to assign partitions.
    pub(super) fn check_membership(&self) -> Result<(), Failure> {
        match self.state().waiting_since {
            Some(since) if since.elapsed() > ASSIGNMENT_TIMEOUT => Err(Failure::Lost(anyhow!(
                "the consumer group has not assigned partitions for {ASSIGNMENT_TIMEOUT:?}"
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

    /// Moves the position behind a record. Returns the position before, and a time of the database
    /// before the record was written, if known. `None` if the partition is not owned.
    pub(super) fn note_read(&self, message: &BorrowedMessage<'_>) -> Option<(i64, Option<OffsetDateTime>)> {
        let slot = (message.topic().to_owned(), message.partition());
        let mut state = self.state();
        let owned = state.owned.get_mut(&slot)?;
        let follows = std::mem::replace(&mut owned.position, message.offset() + 1);
        let before = owned.last_mark.filter(|mark| message.offset() >= mark.end);
        Some((follows, before.map(|mark| mark.seen_at)))
    }

    /// The offset after the last record that was read, of each owned partition.
    pub(super) fn positions(&self) -> Next {
        let state = self.state();
        let positions = state.owned.iter();
        positions.map(|(slot, owned)| (slot.clone(), owned.position)).collect()
    }

    /// Moves the position, and the consumer, to `next`. Blocks.
    pub(super) fn skip_to(&self, consumer: &BaseConsumer<Self>, slot: &Slot, next: i64) -> anyhow::Result<()> {
        let sought = consumer.seek(&slot.0, slot.1, Offset::Offset(next), SEEK_TIMEOUT);
        sought.with_context(|| format!("skip to {next} in {}/{}", slot.0, slot.1))?;
        if let Some(owned) = self.state().owned.get_mut(slot) {
            owned.position = next;
        }
        Ok(())
    }

    pub(super) fn advance(&self, next: &Next) {
        self.state().advance(next);
    }

    /// Claims partitions and starts to read them where the tables end.
    fn take_over(&self, consumer: &BaseConsumer<Self>, partitions: &TopicPartitionList) -> Result<(), Failure> {
        let slots: Vec<Slot> = partitions
            .elements()
            .iter()
            .map(|element| (element.topic().to_owned(), element.partition()))
            .collect();
        // Another log may have the same topics and also contain these offsets.
        same_cluster(&self.sink.kafka, &self.sink.cluster_id)?;
        let lost = |error: anyhow::Error| Failure::Lost(error.context("claim partitions"));
        let mut ranges = BTreeMap::new();
        for slot in &slots {
            let range = kafka::range(consumer.client(), &slot.0, slot.1).map_err(lost)?;
            ranges.insert(slot.clone(), range);
        }
        let first = ranges.iter().map(|(slot, range)| (slot.clone(), range.0));
        let claims = self.runtime.block_on(async {
            offset::register(&self.sink.pool, &self.sink.cluster_id, &first.collect()).await?;
            offset::claim(&self.sink.pool, &self.sink.cluster_id, &slots).await
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
                last_mark: None,
            };
            owned.insert(slot, read);
        }
        consumer.assign(&assignment).map_err(|error| lost(error.into()))?;
        tracing::info!(partitions = owned.len(), "partitions claimed");
        self.state().owned = owned;
        Ok(())
    }

    /// The offset to start from: the one in the database, if the log contains it.
    fn start(&self, slot: &Slot, claim: Claim, low: i64, high: i64) -> Result<i64, Failure> {
        let Err(error) = in_log(slot, claim.next_offset, low, high) else {
            return Ok(claim.next_offset);
        };
        if !self.sink.accept_other_log {
            return Err(Failure::Fatal(error.context(
                "ingest.accept_other_log = true continues with the records that this log still has",
            )));
        }
        tracing::error!(error = %format!("{error:#}"), from = low, "continuing as configured");
        let (pool, cluster_id) = (&self.sink.pool, &self.sink.cluster_id);
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
        let assigned = event == RDKafkaRespErr::RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS;
        {
            let mut state = self.state();
            state.assignment += 1;
            state.owned.clear();
            state.waiting_since = (!assigned).then(Instant::now);
        }
        let result = if assigned {
            self.take_over(consumer, partitions)
        } else {
            Ok(())
        };
        let taken_over = assigned && result.is_ok();
        if !taken_over && let Err(error) = consumer.unassign() {
            tracing::warn!(%error, "cannot release partitions");
        }
        if let Err(failure) = result {
            self.state().failure = Some(failure);
        }
    }
}

/// Fails if the brokers belong to another cluster than the log that is being read.
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
            "{topic}/{partition} ends at {high}, but the tables reach {next_offset}: \
             they were filled from another log"
        );
    }
    ensure!(
        next_offset >= low,
        "{topic}/{partition} begins at {low}, but the tables only reach {next_offset}: \
         {} records were removed before they were read",
        low - next_offset
    );
    Ok(())
}

/// Looks up the partitions of the event topics, and their ends.
pub(super) struct Observer {
    client: BaseConsumer,
    topics: [String; 2],
    /// The partitions that have a row in `consumer_offset`.
    registered: BTreeSet<Slot>,
}

impl Observer {
    pub(super) fn new(kafka: &ClientOptions) -> anyhow::Result<Self> {
        let topics = kafka.topics();
        Ok(Self {
            client: kafka::observer(kafka)?,
            topics: [topics.generation, topics.feedback],
            registered: BTreeSet::new(),
        })
    }

    /// Marks the ends of owned partitions until `stop`. Blocks.
    pub(super) fn run(mut self, context: &Assigner, stop: &CancellationToken) {
        while !stop.is_cancelled() {
            if let Err(error) = self.mark(context) {
                tracing::warn!(error = format!("{error:#}"), "cannot look up the ends of the log");
            }
            // A timer needs the runtime from the moment it is made.
            let pause = async { stop.run_until_cancelled(tokio::time::sleep(PROGRESS_INTERVAL)).await };
            context.runtime.block_on(pause);
        }
    }

    /// Marks the end of the log in owned partitions without a mark.
    ///
    /// First takes the time, then looks for new partitions, then looks up the ends. So all records
    /// that the log had acknowledged by that time are before these ends, or in a partition that is
    /// registered and holds up closing until a sink has read it.
    fn mark(&mut self, context: &Assigner) -> anyhow::Result<()> {
        let (assignment, unmarked): (u64, Vec<Slot>) = {
            let state = context.state();
            let unmarked = state.owned.iter().filter(|(_, owned)| owned.mark.is_none());
            (state.assignment, unmarked.map(|(slot, _)| slot.clone()).collect())
        };
        if unmarked.is_empty() {
            return Ok(());
        }
        let seen_at = context.sink.read_clock(&context.runtime);
        let seen_at = seen_at.context("read the database's clock")?;
        self.register_added(context)?;
        let ends = kafka::ends(&self.client, &unmarked)?;
        let mut state = context.state();
        // The partitions may have been given to others meanwhile.
        if state.assignment != assignment {
            return Ok(());
        }
        for (slot, end) in ends {
            if let Some(owned) = state.owned.get_mut(&slot) {
                owned.mark = Some(Mark { seen_at, end });
                owned.last_mark = owned.mark;
            }
        }
        Ok(())
    }

    /// Registers partitions that were added. Nothing closes until a sink has read them.
    fn register_added(&mut self, context: &Assigner) -> anyhow::Result<()> {
        let mut added = BTreeMap::new();
        for topic in &self.topics {
            for partition in kafka::partition_ids(self.client.client(), topic)? {
                let slot = (topic.clone(), partition);
                if !self.registered.contains(&slot) {
                    let (first, _) = kafka::range(self.client.client(), topic, partition)?;
                    added.insert(slot, first);
                }
            }
        }
        if !added.is_empty() {
            let (pool, cluster_id) = (&context.sink.pool, &context.sink.cluster_id);
            let registered = context.runtime.block_on(offset::register(pool, cluster_id, &added));
            registered.context("register partitions")?;
            self.registered.extend(added.into_keys());
        }
        Ok(())
    }
}

/// Stores the progress of the partitions that have reached their mark.
pub(super) fn store_progress(consumer: &BaseConsumer<Assigner>) -> Result<(), Failure> {
    let context = consumer.context();
    context.sink.validator.check_clock().map_err(Failure::Lost)?;
    if context.state().owned.values().all(|owned| owned.mark.is_none()) {
        return Ok(());
    }
    let positions = client_positions(consumer);
    let progress = take_reached_marks(&mut context.state(), &positions);
    if progress.is_empty() {
        return Ok(());
    }
    let noted = offset::store_progress(&context.sink.pool, &context.sink.cluster_id, &progress);
    match context.runtime.block_on(noted) {
        Ok(noted) if noted < progress.len() as u64 => {
            return Err(Failure::Lost(anyhow!(
                "of {} partitions, {} were claimed by another sink or have lost rows",
                progress.len(),
                progress.len() as u64 - noted
            )));
        }
        Ok(_) => {
            let reached = progress.into_iter().map(|progress| (progress.slot, progress.reached));
            context.advance(&reached.collect());
        }
        // The next mark includes this progress.
        Err(error) => tracing::warn!(%error, "progress not stored"),
    }
    match context.take_failure() {
        Some(failure) => Err(failure),
        None => Ok(()),
    }
}

/// The next offset that the client delivers, for partitions of which it has seen a record or a
/// marker. It passes the markers of transactions without delivering them.
fn client_positions(consumer: &BaseConsumer<Assigner>) -> Next {
    let positions = match consumer.position() {
        Ok(positions) => positions,
        Err(error) => {
            tracing::warn!(%error, "cannot look up the positions of the consumer");
            return Next::new();
        }
    };
    let elements = positions.elements().into_iter();
    let positions = elements.filter_map(|element| match element.offset() {
        Offset::Offset(position) => Some(((element.topic().to_owned(), element.partition()), position)),
        _ => None,
    });
    positions.collect()
}

fn take_reached_marks(state: &mut State, positions: &Next) -> Vec<Progress> {
    let mut progress = Vec::new();
    for (slot, owned) in &mut state.owned {
        let Some(mark) = &owned.mark else { continue };
        let stored = owned.claim.next_offset;
        // If the tables hold all records that were delivered, the client has only skipped markers
        // since.
        let skipped_to = positions.get(slot).filter(|_| owned.position <= stored);
        let reached = skipped_to.map_or(stored, |position| stored.max(*position));
        if reached >= mark.end {
            progress.push(Progress {
                slot: slot.clone(),
                claim: owned.claim,
                reached,
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
            last_mark: mark,
        };
        State {
            owned: BTreeMap::from([(("t".to_owned(), 0), owned)]),
            ..State::default()
        }
    }

    #[test]
    fn a_mark_counts_once_the_tables_reach_it() {
        let mut behind = owned(9, 10);
        assert!(take_reached_marks(&mut behind, &Next::new()).is_empty());
        assert!(behind.owned.values().all(|owned| owned.mark.is_some()));
        let mut there = owned(10, 10);
        let progress = take_reached_marks(&mut there, &Next::new());
        assert_eq!(progress[0].claim.fence, 3);
        assert_eq!(progress[0].caught_up_to, OffsetDateTime::UNIX_EPOCH);
        assert!(there.owned.values().all(|owned| owned.mark.is_none()));
    }

    #[test]
    fn a_marker_of_a_transaction_at_the_end_counts_as_read_once_the_records_before_it_are_stored() {
        let positions = Next::from([(("t".to_owned(), 0), 10)]);
        let mut stored = owned(9, 10);
        let progress = take_reached_marks(&mut stored, &positions);
        assert_eq!((progress[0].claim.next_offset, progress[0].reached), (9, 10));
        // A record before the marker was delivered and is being written.
        let mut in_flight = owned(8, 10);
        in_flight.owned.values_mut().for_each(|owned| owned.position = 9);
        assert!(take_reached_marks(&mut in_flight, &positions).is_empty());
    }

    #[test]
    fn a_round_that_ends_late_does_not_move_a_partition_back() {
        let mut state = owned(9, 10);
        let slot = ("t".to_owned(), 0);
        state.advance(&Next::from([(slot.clone(), 7)]));
        assert_eq!(state.owned[&slot].claim.next_offset, 9);
        state.advance(&Next::from([(slot.clone(), 10)]));
        assert_eq!(state.owned[&slot].claim.next_offset, 10);
    }

    #[test]
    fn a_log_that_does_not_reach_the_tables_is_refused() {
        let slot = ("t".to_owned(), 0);
        assert!(in_log(&slot, 5, 0, 5).is_ok());
        assert!(in_log(&slot, 5, 5, 9).is_ok());
        let shorter = in_log(&slot, 5, 0, 4).unwrap_err().to_string();
        assert!(shorter.contains("another log"), "{shorter}");
        let gap = in_log(&slot, 5, 7, 9).unwrap_err().to_string();
        assert!(gap.contains("2 records were removed"), "{gap}");
    }
}
