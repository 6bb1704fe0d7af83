//! Renders chat templates and tokenizes long prompts away from the async workers, because either may
//! take a second, during which a worker would serve nobody else.
//!
//! A few threads do it. Jobs wait for them as choices wait for a slot: in a bounded queue that is
//! shared fairly between callers, users before rollouts. So a caller's many long prompts delay
//! another's by no more than what is being worked on.

use crate::engine::TrafficClass;
use crate::engine::caller::{Caller, Tally};
use crate::engine::queue::{Full, Queue};
use edge::Problem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::oneshot;
use tracing::Span;

/// Cheap to clone.
#[derive(Clone)]
pub struct Prompts {
    shared: Arc<Shared>,
}

struct Shared {
    threads: usize,
    state: Mutex<State>,
}

struct State {
    queue: Queue<Job>,
    /// The jobs that are worked on. Each has a thread.
    running: Tally,
    threads: usize,
}

struct Job {
    caller: Caller,
    run: Box<dyn FnOnce(Turn) + Send>,
}

/// How a job's wait ends.
#[derive(Clone, Copy)]
enum Turn {
    Run,
    /// Another caller's job took its place in a full queue.
    Displaced,
}

impl Prompts {
    /// At most `waiting_max` jobs wait for `threads` threads.
    pub fn new(threads: usize, waiting_max: usize) -> Self {
        let state = State {
            queue: Queue::new(waiting_max),
            running: Tally::default(),
            threads: 0,
        };
        let shared = Arc::new(Shared {
            threads,
            state: Mutex::new(state),
        });
        Self { shared }
    }

    /// Does `work` on another thread. Fails with 429 if there is no room for the caller. If the caller
    /// is gone when its turn comes, nothing is done.
    pub async fn run<T: Send + 'static>(
        &self,
        class: TrafficClass,
        caller: &Caller,
        work: impl FnOnce() -> Result<T, Problem> + Send + 'static,
    ) -> Result<T, Problem> {
        let (answer, answered) = oneshot::channel();
        let span = Span::current();
        let run = move |turn: Turn| {
            let result = match turn {
                Turn::Run if answer.is_closed() => return,
                Turn::Run => span.in_scope(work),
                Turn::Displaced => Err(super::displaced()),
            };
            // the caller may have gone
            let _ = answer.send(result);
        };
        let job = Job {
            caller: caller.clone(),
            run: Box::new(run),
        };
        self.submit(class, job)?;
        match answered.await {
            Ok(result) => result,
            Err(_) => Err(Problem::internal("the thread that prepared a prompt panicked")),
        }
    }

    fn submit(&self, class: TrafficClass, job: Job) -> Result<(), Problem> {
        let mut state = self.shared.lock();
        let caller = job.caller.clone();
        let displaced = match state.queue.push(class, 0, &caller, vec![job]) {
            Ok(displaced) => displaced,
            Err(Full) => {
                let waiting = state.queue.len();
                drop(state);
                metrics::counter!("springtide_requests_refused_total").increment(1);
                let detail = format!("{waiting} long prompts wait already; try again later");
                return Err(Problem::too_many(detail, 1));
            }
        };
        if state.threads < self.shared.threads {
            state.threads += 1;
            let shared = self.shared.clone();
            tokio::task::spawn_blocking(move || shared.work());
        }
        drop(state);
        for job in displaced {
            (job.run)(Turn::Displaced);
        }
        Ok(())
    }
}

impl Shared {
    /// Does what waits, then gives the thread back.
    fn work(&self) {
        let mut state = self.lock();
        loop {
            let State { queue, running, .. } = &mut *state;
            let Some(Job { caller, run }) = queue.take(running, |_| true) else {
                state.threads -= 1;
                return;
            };
            running.add(&caller);
            drop(state);
            // a panic is logged by its hook, and reaches the job's caller as an error
            let _ = catch_unwind(AssertUnwindSafe(|| run(Turn::Run)));
            state = self.lock();
            state.running.remove(&caller);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // no job runs while the lock is held, so a panic leaves the state consistent
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use TrafficClass::{Background, Production};
    use std::sync::mpsc;
    use uuid::Uuid;

    fn caller(key: u128) -> Caller {
        Caller::new("default", Some(Uuid::from_u128(key)))
    }

    /// A job that blocks its thread until the test lets it go, and says when it has begun.
    struct Gate {
        open: mpsc::Sender<()>,
        begun: oneshot::Receiver<()>,
        done: tokio::task::JoinHandle<Result<(), Problem>>,
    }

    fn gate(prompts: &Prompts, caller: Caller) -> Gate {
        let (open, opened) = mpsc::channel::<()>();
        let (begins, begun) = oneshot::channel();
        let prompts = prompts.clone();
        let done = tokio::spawn(async move {
            let work = move || {
                let _ = begins.send(());
                opened.recv().map_err(Problem::internal)
            };
            prompts.run(Production, &caller, work).await
        });
        Gate { open, begun, done }
    }

    /// With one async worker: a job on it would never end, because only the worker lets it go.
    #[tokio::test]
    async fn a_job_does_not_hold_the_async_worker() {
        let prompts = Prompts::new(1, 8);
        let gate = gate(&prompts, caller(1));
        gate.begun.await.unwrap();
        gate.open.send(()).unwrap();
        gate.done.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn another_callers_job_comes_next_however_many_wait_before_it() {
        let prompts = Prompts::new(1, 64);
        let first = gate(&prompts, caller(1));
        first.begun.await.unwrap();
        let order = Arc::new(Mutex::new(Vec::new()));
        let job = |class, key: u128| {
            let (prompts, order) = (prompts.clone(), order.clone());
            async move {
                let note = move || {
                    order.lock().unwrap().push(key);
                    Ok(())
                };
                prompts.run(class, &caller(key), note).await
            }
        };
        // joined futures are polled in order, so they queue in order
        let rollouts = futures::future::join_all((0..3).map(|_| job(Background, 3)));
        let flood = futures::future::join_all((0..50).map(|_| job(Production, 1)));
        let honest = job(Production, 2);
        let let_go = async { first.open.send(()).unwrap() };
        let (rollouts, flood, honest, ()) = tokio::join!(rollouts, flood, honest, let_go);
        assert!(flood.iter().chain(&rollouts).all(Result::is_ok) && honest.is_ok());
        let order = order.lock().unwrap();
        assert_eq!(order.len(), 54);
        assert_eq!(order[0], 2, "{order:?}");
        assert_eq!(order[51..], [3, 3, 3], "rollouts last");
    }

    #[tokio::test]
    async fn a_full_queue_refuses_the_flood_and_makes_room_for_another() {
        let prompts = Prompts::new(1, 4);
        let first = gate(&prompts, caller(1));
        first.begun.await.unwrap();
        let job = |key: u128| {
            let prompts = prompts.clone();
            async move { prompts.run(Production, &caller(key), || Ok(())).await }
        };
        let flood = futures::future::join_all((0..5).map(|_| job(1)));
        let honest = job(2);
        let let_go = async { first.open.send(()).unwrap() };
        let (flood, honest, ()) = tokio::join!(flood, honest, let_go);
        honest.unwrap();
        let statuses: Vec<u16> = flood
            .iter()
            .map(|one| one.as_ref().err().map_or(200, |problem| problem.status.as_u16()))
            .collect();
        assert_eq!(statuses, [200, 200, 200, 429, 429], "one displaced, one refused");
    }

    #[tokio::test]
    async fn after_a_panic_the_other_jobs_are_done() {
        let prompts = Prompts::new(1, 8);
        let (caller, panics) = (caller(1), || -> Result<(), Problem> { panic!("on purpose") });
        let panicked = prompts.run(Production, &caller, panics).await.unwrap_err();
        assert_eq!(panicked.status.as_u16(), 500);
        prompts.run(Production, &caller, || Ok(())).await.unwrap();
    }

    #[tokio::test]
    async fn nothing_is_done_for_a_caller_that_is_gone() {
        let prompts = Prompts::new(1, 8);
        let first = gate(&prompts, caller(1));
        first.begun.await.unwrap();
        let (caller, work) = (caller(1), || -> Result<(), Problem> { panic!("its caller is gone") });
        let waiting = prompts.run(Production, &caller, work);
        let gone = tokio::time::timeout(std::time::Duration::ZERO, waiting).await;
        assert!(gone.is_err());
        first.open.send(()).unwrap();
        prompts.run(Production, &caller, || Ok(())).await.unwrap();
    }
}
