//! Threads that share work. Which thread does which part never changes a result.

use rayon::iter::{IndexedParallelIterator, IntoParallelIterator, ParallelIterator};
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::sync::Arc;

/// Least multiply-adds worth handing to another thread: tens of microseconds; waking it takes a
/// few.
const WORK_MIN: usize = 1 << 19;
/// A pass with fewer parts stays on the caller's thread: most products would be too small to share.
const PASS_PARTS_MIN: usize = 32;
/// Parts per thread, so that others can take over from a thread that is delayed.
const PARTS: usize = 3;

/// A number of threads to share work. Clones use the same threads.
#[derive(Debug, Clone)]
pub struct Threads {
    /// None: only the caller's thread.
    pool: Option<Arc<ThreadPool>>,
    work_min: usize,
}

/// The threads could not be started.
#[derive(Debug, thiserror::Error)]
#[error("start {count} compute threads: {why}; use fewer")]
pub struct NotStarted {
    count: usize,
    why: String,
}

impl Default for Threads {
    fn default() -> Self {
        Threads::ONE
    }
}

impl Threads {
    /// Only the caller's thread.
    pub const ONE: Threads = Threads {
        pool: None,
        work_min: WORK_MIN,
    };

    /// Starts `count` threads. 0 and 1 use only the caller's thread. They end with the last clone.
    pub fn new(count: usize) -> Result<Self, NotStarted> {
        if count <= 1 {
            return Ok(Threads::ONE);
        }
        let pool = ThreadPoolBuilder::new()
            .num_threads(count)
            .thread_name(|n| format!("compute-{n}"))
            .build()
            .map_err(|error| NotStarted {
                count,
                why: error.to_string(),
            })?;
        Ok(Threads {
            pool: Some(Arc::new(pool)),
            work_min: WORK_MIN,
        })
    }

    /// Shares even the smallest work. Slower; for comparisons in tests.
    pub fn eager(mut self) -> Self {
        self.work_min = 1;
        self
    }

    /// Number of threads.
    pub fn count(&self) -> usize {
        self.pool.as_ref().map_or(1, |pool| pool.current_num_threads())
    }

    /// Into how many parts to divide `work` multiply-adds.
    pub fn parts(&self, work: usize) -> usize {
        match self.count() {
            1 => 1,
            count => (work / self.work_min).clamp(1, count * PARTS),
        }
    }

    /// Runs a whole pass on the pool: entering it once is cheaper than at every product. A small
    /// pass runs on the caller's thread alone. `work` is in multiply-adds.
    pub fn pass<T: Send>(&self, work: usize, run: impl FnOnce(&Threads) -> T + Send) -> T {
        match &self.pool {
            Some(pool) if work / self.work_min >= PASS_PARTS_MIN => pool.install(|| run(self)),
            _ => run(&Threads::ONE),
        }
    }

    /// Runs every job, in any order.
    pub fn each<J: Send>(&self, jobs: Vec<J>, run: impl Fn(J) + Send + Sync) {
        match &self.pool {
            Some(pool) => pool.install(|| jobs.into_par_iter().with_max_len(1).for_each(run)),
            None => jobs.into_iter().for_each(run),
        }
    }

    /// Runs every job, in any order. Results are in the order of the jobs.
    pub fn map<J: Send, R: Send>(&self, jobs: Vec<J>, run: impl Fn(J) -> R + Send + Sync) -> Vec<R> {
        match &self.pool {
            Some(pool) => pool.install(|| jobs.into_par_iter().with_max_len(1).map(run).collect()),
            None => jobs.into_iter().map(run).collect(),
        }
    }
}
