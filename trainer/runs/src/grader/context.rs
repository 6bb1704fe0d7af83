//! What graders work with, besides the sample.

use super::error::{Cause, Error};
use super::python::Sandboxes;
use crate::judge::RunJudges;
use std::sync::Arc;
use tokio::sync::Semaphore;

/// What the graders of one run share.
#[derive(Debug)]
pub struct Context {
    /// Comparisons of long texts at once: one, because the engine needs the other cores.
    comparisons: Arc<Semaphore>,
    judges: Option<RunJudges>,
    pub(super) sandboxes: Arc<Sandboxes>,
}

impl Context {
    /// `judges`: `None` if no grader asks one.
    pub fn new(judges: Option<RunJudges>, sandboxes: Arc<Sandboxes>) -> Self {
        Context {
            comparisons: Arc::new(Semaphore::new(1)),
            judges,
            sandboxes,
        }
    }

    pub(super) fn judges(&self) -> Result<&RunJudges, Error> {
        let none = || Error::new(Cause::Failed, "there are no judges here");
        self.judges.as_ref().ok_or_else(none)
    }

    /// Runs what keeps a core busy on a thread that may block.
    pub(super) async fn compute<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Error> {
        let failed = |_| Error::new(Cause::Failed, "the grading thread ended");
        // The thread keeps the permit: if the caller goes away, the work still goes on.
        let permit = self.comparisons.clone().acquire_owned().await;
        let permit = permit.map_err(|_| Error::new(Cause::Failed, "grading has ended"))?;
        let compute = move || {
            let result = work();
            drop(permit);
            result
        };
        tokio::task::spawn_blocking(compute).await.map_err(failed)
    }
}
