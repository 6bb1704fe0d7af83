//! The thread that a learner lives on, so that libtorch never runs on a worker of the async
//! runtime.
//!
//! Jobs are closures. They run one at a time, in order. Each counts as a computation of the process
//! from before it is sent until it has ended. Dropping the handle ends the thread after its current
//! job.

use super::Learner;
use crate::computing::Computing;
use anyhow::{Context, anyhow};
use std::panic::AssertUnwindSafe;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use tokio::sync::oneshot;

/// Jobs that may wait while one runs.
const JOBS_WAITING_MAX: usize = 1;

type Job = Box<dyn FnOnce(&mut Option<Learner>) + Send>;

/// Sends work to one learner.
#[derive(Debug, Clone)]
pub struct Handle {
    jobs: SyncSender<Job>,
    computing: Computing,
}

impl Handle {
    /// Starts the thread without a learner.
    pub fn spawn(name: &str, computing: Computing) -> anyhow::Result<Self> {
        let (jobs, queue) = sync_channel::<Job>(JOBS_WAITING_MAX);
        std::thread::Builder::new()
            .name(name.to_string())
            .spawn(move || serve(&queue))
            .context("start the learner's thread")?;
        Ok(Handle { jobs, computing })
    }

    /// Replaces the learner by the one that `make` builds.
    pub async fn load(&self, make: impl FnOnce() -> anyhow::Result<Learner> + Send + 'static) -> anyhow::Result<()> {
        self.run(move |slot| {
            *slot = None; // free the old weights before the new ones are built
            *slot = Some(make()?);
            Ok(())
        })
        .await
    }

    /// Runs `work` on the loaded learner.
    pub async fn with<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Learner) -> anyhow::Result<T> + Send + 'static,
    ) -> anyhow::Result<T> {
        self.run(move |slot| work(slot.as_mut().context("no version is loaded")?))
            .await
    }

    async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Option<Learner>) -> anyhow::Result<T> + Send + 'static,
    ) -> anyhow::Result<T> {
        let (answer, answered) = oneshot::channel();
        let computation = self.computing.begin();
        let job: Job = Box::new(move |slot| {
            let _computation = computation;
            let result = std::panic::catch_unwind(AssertUnwindSafe(|| work(slot))).unwrap_or_else(|_| {
                *slot = None; // it may be half changed
                Err(anyhow!("the learner panicked; its weights are dropped"))
            });
            let _ = answer.send(result);
        });
        let jobs = self.jobs.clone();
        // the queue is short: waiting for room must not block the runtime
        tokio::task::spawn_blocking(move || jobs.send(job))
            .await?
            .map_err(|_| anyhow!("the learner's thread has ended"))?;
        answered.await.context("the learner's thread dropped a job")?
    }
}

fn serve(queue: &Receiver<Job>) {
    let mut learner = None;
    while let Ok(job) = queue.recv() {
        job(&mut learner);
    }
}
