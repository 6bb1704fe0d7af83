//! Records on their way into the tables: shared out among the writers, one transaction each, all of them ended before the
//! next round begins.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use futures::future::join_all;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use super::consumer::Failure;
use super::offset::{Claims, Next};
use super::record::Record;
use super::{Sink, write};

const RETRY_PAUSE_MAX: Duration = Duration::from_secs(5);

/// What is being written, if anything. Whoever drops it waits for its end.
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

    /// Waits for the end; how far the partitions have come since the last call. Blocks.
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
        // Its reader starts over from the database's offsets, whatever came of this.
        let _ = self.end();
    }
}

async fn write_all(sink: Arc<Sink>, claims: Claims, records: Vec<Record>) -> Result<Next, Failure> {
    let shares = share_out(records, sink.writers).into_iter();
    let writes = shares.map(|records| {
        let (sink, claims) = (sink.clone(), claims.clone());
        tokio::spawn(async move { sink.store(&claims, records).await })
    });
    let mut advanced = Next::new();
    for written in join_all(writes).await {
        advanced.extend(written.context("a writer panicked").map_err(Failure::Lost)??);
    }
    Ok(advanced)
}

/// By the partition's number alone: an event about an episode and its generations have the same key and so the same number
/// in both topics, and seldom meet in two transactions at once.
fn share_out(records: Vec<Record>, writers: usize) -> Vec<Vec<Record>> {
    let mut shares: Vec<Vec<Record>> = (0..writers).map(|_| Vec::new()).collect();
    for record in records {
        let partition = usize::try_from(record.from.partition).unwrap_or(0);
        shares[partition % writers].push(record);
    }
    shares.retain(|share| !share.is_empty());
    shares
}

impl Sink {
    /// Writes a batch, waiting out a database that is away. A batch with a row that the database refuses is written one
    /// by one, so that one such record never holds up a partition.
    async fn store(&self, claims: &Claims, records: Vec<Record>) -> Result<Next, Failure> {
        match self.write(claims, &records).await {
            Err(write::Error::Refused(error)) => {
                tracing::warn!(%error, records = records.len(), "a row was refused, writing one by one");
            }
            other => return into_failure(other),
        }
        let mut advanced = Next::new();
        for mut record in records {
            let result = match self.write(claims, std::slice::from_ref(&record)).await {
                Err(write::Error::Refused(error)) => {
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
                Err(write::Error::Away(error)) => error,
                other => return other,
            };
            tracing::warn!(error = %format!("{error:#}"), "batch not written, will be tried again");
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
        // Nothing was written, and the stop is noticed by the loop.
        Err(write::Error::Stopped) => Ok(Next::new()),
        Err(error) => Err(Failure::Lost(error.into())),
    }
}
