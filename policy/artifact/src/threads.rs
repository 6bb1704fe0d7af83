//! More than one thread for one product: who computes which outputs changes no bit of them.

use rayon::iter::{IndexedParallelIterator, IntoParallelIterator, ParallelIterator};
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::sync::Arc;

/// Multiply-adds that are worth handing to another thread: some tens of microseconds, where waking it takes a few.
const WORK_MIN: usize = 1 << 19;
/// A pass of fewer parts than this stays with its caller: most of its products would be too small to share.
const PASS_PARTS_MIN: usize = 32;
/// Parts for each thread, so that one that is held up leaves its rest to the others.
const PARTS: usize = 3;

/// How many threads share the work of one pass. Clones share them too.
#[derive(Debug, Clone)]
pub struct Threads {
    /// None: the caller's thread alone.
    pool: Option<Arc<ThreadPool>>,
    work_min: usize,
}

/// The threads could not be started.
#[derive(Debug, thiserror::Error)]
#[error("start {count} threads to compute on: {why}; ask for fewer")]
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
    /// The caller's alone.
    pub const ONE: Threads = Threads {
        pool: None,
        work_min: WORK_MIN,
    };

    /// So many, 0 taken for 1; they wait without work until the last clone is dropped.
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

    /// Shares even the smallest work, which is slower: to compare.
    pub fn eager(mut self) -> Self {
        self.work_min = 1;
        self
    }

    pub fn count(&self) -> usize {
        self.pool.as_ref().map_or(1, |pool| pool.current_num_threads())
    }

    /// Into how many parts to cut so many multiply-adds.
    pub fn parts(&self, work: usize) -> usize {
        match self.count() {
            1 => 1,
            count => (work / self.work_min).clamp(1, count * PARTS),
        }
    }

    /// Runs all of a pass where its parts will run: going to the threads once is cheaper than at every product. A pass too
    /// small for that stays with the caller, and on one thread.
    pub fn pass<T: Send>(&self, work: usize, run: impl FnOnce(&Threads) -> T + Send) -> T {
        match &self.pool {
            Some(pool) if work / self.work_min >= PASS_PARTS_MIN => pool.install(|| run(self)),
            _ => run(&Threads::ONE),
        }
    }

    /// Does every job, in any order.
    pub fn each<J: Send>(&self, jobs: Vec<J>, run: impl Fn(J) + Send + Sync) {
        match &self.pool {
            Some(pool) => pool.install(|| jobs.into_par_iter().with_max_len(1).for_each(run)),
            None => jobs.into_iter().for_each(run),
        }
    }

    /// Does every job, in any order; what comes of them is in theirs.
    pub fn map<J: Send, R: Send>(&self, jobs: Vec<J>, run: impl Fn(J) -> R + Send + Sync) -> Vec<R> {
        match &self.pool {
            Some(pool) => pool.install(|| jobs.into_par_iter().with_max_len(1).map(run).collect()),
            None => jobs.into_iter().map(run).collect(),
        }
    }
}
