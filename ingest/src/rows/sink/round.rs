//! A round of records: shared among the writers, one transaction each. All end before the next
//! round.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use futures::future::join_all;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use super::consumer::Failure;
use super::{Sink, write};
use crate::rows::offset::{Claims, Next};
use crate::rows::record::Record;

const RETRY_PAUSE_MAX: Duration = Duration::from_secs(5);

/// A round that is being written, if any. Dropping it waits for its end.
pub(super) struct Round {
    runtime: Handle,
    writing: Option<JoinHandle<Result<Next, Failure>>>,
}

impl Round {
    pub(super) fn none(runtime: &Handle) -> Self {
        Self {
            runtime: runtime.clone(),
            writing: None,
        }
    }

    pub(super) fn begin(sink: &Arc<Sink>, runtime: &Handle, claims: &Claims, records: Vec<Record>) -> Self {
        let writing = runtime.spawn(write_all(sink.clone(), claims.clone(), records));
        Self {
            runtime: runtime.clone(),
            writing: Some(writing),
        }
    }

    pub(super) fn is_running(&self) -> bool {
        self.writing.as_ref().is_some_and(|writing| !writing.is_finished())
    }

    /// Waits for the end. Returns the new offsets of the partitions. Blocks.
    pub(super) fn end(&mut self) -> Result<Next, Failure> {
        let Some(writing) = self.writing.take() else {
            return Ok(Next::new());
        };
        let ended = self.runtime.block_on(writing);
        ended.context("a round panicked").map_err(Failure::Lost)?
    }
}

impl Drop for Round {
    fn drop(&mut self) {
        // The sink restarts from the offsets in the database, so the result does not matter.
        let _ = self.end();
    }
}

async fn write_all(sink: Arc<Sink>, claims: Claims, records: Vec<Record>) -> Result<Next, Failure> {
    // A transaction takes a while however few its records are, so a small round is not divided.
    let share = sink.batch_records_max.div_ceil(sink.writers);
    let writers = records.len().div_ceil(share).clamp(1, sink.writers);
    let batches = divide(records, writers).into_iter();
    let writes = batches.map(|records| {
        let (sink, claims) = (sink.clone(), claims.clone());
        tokio::spawn(async move { sink.store(&claims, records).await })
    });
    let mut advanced = Next::new();
    for written in join_all(writes).await {
        advanced.extend(written.context("a writer panicked").map_err(Failure::Lost)??);
    }
    Ok(advanced)
}

/// What storing a record takes besides its value, in bytes of a value.
const RECORD_BYTES: usize = 1024;

/// Which writer takes which partitions of a round, so that each has about as many bytes.
///
/// By the number of the partition in either topic. Events of an episode have the same key, so they
/// have the same number in both topics and rarely meet in two concurrent transactions.
fn split(sizes: &BTreeMap<i32, usize>, writers: usize) -> BTreeMap<i32, usize> {
    let mut largest_first: Vec<(usize, i32)> = sizes.iter().map(|(partition, size)| (*size, *partition)).collect();
    largest_first.sort_unstable_by(|a, b| b.cmp(a));
    let mut taken = vec![0; writers];
    let mut shares = BTreeMap::new();
    for (size, partition) in largest_first {
        let least = (0..writers).min_by_key(|writer| taken[*writer]).unwrap_or(0);
        taken[least] += size;
        shares.insert(partition, least);
    }
    shares
}

fn divide(records: Vec<Record>, writers: usize) -> Vec<Vec<Record>> {
    let mut sizes: BTreeMap<i32, usize> = BTreeMap::new();
    for record in &records {
        *sizes.entry(record.from.partition).or_default() += RECORD_BYTES + record.value_bytes();
    }
    let shares = split(&sizes, writers);
    let mut batches: Vec<Vec<Record>> = (0..writers).map(|_| Vec::new()).collect();
    for record in records {
        let writer = shares.get(&record.from.partition).copied().unwrap_or(0);
        batches[writer].push(record);
    }
    batches.retain(|batch| !batch.is_empty());
    batches
}

impl Sink {
    /// Writes a batch, and retries while a service is unavailable. If the database refuses a row,
    /// the records are written one by one, so that such a record cannot block its partition.
    async fn store(&self, claims: &Claims, records: Vec<Record>) -> Result<Next, Failure> {
        match self.write(claims, &records).await {
            Err(write::Error::Permanent(error)) => {
                tracing::warn!(%error, records = records.len(), "the database refused a row, writing records one by one");
            }
            other => return into_failure(other),
        }
        let mut advanced = Next::new();
        for mut record in records {
            let result = match self.write(claims, std::slice::from_ref(&record)).await {
                Err(write::Error::Permanent(error)) => {
                    record.refuse(&error);
                    self.write(claims, std::slice::from_ref(&record)).await
                }
                other => other,
            };
            advanced.extend(into_failure(result)?);
        }
        Ok(advanced)
    }

    async fn write(&self, claims: &Claims, records: &[Record]) -> Result<Next, write::Error> {
        let mut pause = Duration::from_millis(100);
        loop {
            let error = match self.transaction(claims, records).await {
                Err(write::Error::Transient(error)) => error,
                other => return other,
            };
            tracing::warn!(error = %format!("{error:#}"), "batch not written, will retry");
            tokio::select! {
                () = self.shutdown.cancelled() => return Err(write::Error::Stopped),
                () = tokio::time::sleep(pause) => pause = (pause * 2).min(RETRY_PAUSE_MAX),
            }
        }
    }
}

fn into_failure(result: Result<Next, write::Error>) -> Result<Next, Failure> {
    match result {
        Ok(next) => Ok(next),
        // Nothing was written. The loop of the sink notices the shutdown.
        Err(write::Error::Stopped) => Ok(Next::new()),
        Err(error) => Err(Failure::Lost(error.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What each of two writers takes.
    fn shares(sizes: &[(i32, usize)]) -> [usize; 2] {
        let sizes = BTreeMap::from_iter(sizes.iter().copied());
        let shares = split(&sizes, 2);
        assert_eq!(shares.len(), sizes.len());
        let mut taken = [0; 2];
        for (partition, writer) in shares {
            taken[writer] += sizes[&partition];
        }
        taken
    }

    #[test]
    fn writers_share_a_round_evenly_whichever_partitions_it_has() {
        assert_eq!(shares(&[(0, 10), (1, 10), (2, 10), (3, 10)]), [20, 20]);
        // The partitions of a backlog often have the same parity.
        assert_eq!(shares(&[(1, 10), (3, 10)]), [10, 10]);
        assert_eq!(shares(&[(0, 30), (1, 10), (2, 10), (3, 10)]), [30, 30]);
        assert_eq!(shares(&[(5, 10)]), [10, 0]);
    }
}
