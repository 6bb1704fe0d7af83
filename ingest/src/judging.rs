//! Works through the queue of one judge: takes texts, asks, stores answers, and sends them as
//! feedback events.
//!
//! An answer is stored before it is sent, and its event has an id that is computed from the text's. A
//! process that is killed in between leaves an answer that another process sends, and an event that
//! is sent twice is the same event. Any number of processes may work on a queue.
//!
//! A fault of an answer counts against its text, which is given up after some. A fault of the endpoint
//! does not: then the whole queue waits ([`pace`]). But a timeout just after an answer counts: a text
//! for which the model takes too long, again and again between answers, is given up too.
//!
//! Neither texts nor answers are logged.

mod alarm;
mod pace;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use event_log::Producer;
use event_log::event::{Event, Feedback, Target};
use event_log::judge::{Endpoint, Fault};
use futures::{TryStreamExt, stream};
use sqlx::PgPool;
use tokio::task::{Id, JoinSet};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::judge::Judge;
use crate::rows::judgement::{Answer, Key, Queue, State, Taken};
use alarm::Alarm;
use pace::Pace;

/// How often an empty queue is looked at.
const INTERVAL: Duration = Duration::from_millis(250);
const ERROR_PAUSE: Duration = Duration::from_secs(2);
/// How long a judgement is taken for. A killed process' texts are taken by others after it.
const LEASE: Duration = Duration::from_secs(30);
const RENEW_INTERVAL: Duration = Duration::from_secs(5);
/// The pause after the first answer that is a fault. It doubles with each further one.
const BACKOFF: Duration = Duration::from_millis(500);
const BACKOFF_MAX: Duration = Duration::from_secs(60);
/// The longest pause that an endpoint may ask for.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(600);
/// Until an answer that the log did not take is sent again.
const RESEND_PAUSE: Duration = Duration::from_secs(1);
/// Until a text is looked at again that waits for what it is about, or for the endpoint, at least.
const WAIT_MIN: Duration = Duration::from_secs(2);
const COUNT_INTERVAL: Duration = Duration::from_secs(5);
/// A longer queue is reported as this.
const COUNT_MAX: i64 = 100_000;
/// Copies of an answered text that are settled with it, of which so many at once.
const COPIES_MAX: i64 = 256;
const COPIES_AT_ONCE: usize = 8;

/// Works on the queue of one judge.
pub(crate) struct Judging {
    worker: Arc<Worker>,
    shutdown: CancellationToken,
}

struct Worker {
    queue: Queue,
    producer: Producer,
    judge: Arc<Judge>,
    endpoint: Endpoint,
    alarm: Mutex<Alarm>,
    pace: Mutex<Pace>,
}

impl Judging {
    pub(crate) fn new(
        pool: PgPool,
        producer: Producer,
        judge: Arc<Judge>,
        shutdown: CancellationToken,
    ) -> anyhow::Result<Self> {
        let worker = Arc::new(Worker {
            queue: Queue::new(pool, judge.clone()),
            producer,
            endpoint: judge.endpoint()?,
            alarm: Mutex::new(Alarm::new(&judge)),
            pace: Mutex::new(Pace::new(judge.concurrency())),
            judge,
        });
        Ok(Self { worker, shutdown })
    }

    /// Runs until the shutdown, and then gives back what it had taken.
    pub(crate) async fn run(self) {
        let worker = &self.worker;
        let mut working: JoinSet<()> = JoinSet::new();
        let mut keys: BTreeMap<Id, Key> = BTreeMap::new();
        let mut renewal = tokio::time::interval(RENEW_INTERVAL);
        let mut count = tokio::time::interval(COUNT_INTERVAL);
        let mut looks_at = Instant::now();
        while !self.shutdown.is_cancelled() {
            let now = Instant::now();
            let (room, resumes_at) = {
                let pace = worker.pace();
                (pace.room(working.len()), pace.resumes_at())
            };
            if room > 0 && now >= resumes_at && now >= looks_at {
                let taken = worker.queue.take(room, LEASE).await;
                let taken = taken.unwrap_or_else(|error| {
                    worker.database_failed(&error);
                    looks_at = now + ERROR_PAUSE;
                    Vec::new()
                });
                if taken.is_empty() {
                    looks_at = looks_at.max(now + INTERVAL);
                }
                for taken in taken {
                    let (worker, key) = (worker.clone(), taken.key.clone());
                    let task = working.spawn(async move { worker.work(taken).await });
                    keys.insert(task.id(), key);
                }
            }
            tokio::select! {
                () = self.shutdown.cancelled() => {}
                Some(ended) = working.join_next_with_id() => {
                    // If it panicked, its lease ends by itself.
                    let id = ended.map_or_else(|error| error.id(), |(id, ())| id);
                    keys.remove(&id);
                }
                _ = renewal.tick() => {
                    let keys: Vec<Key> = keys.values().cloned().collect();
                    if let Err(error) = worker.queue.renew(&keys, LEASE).await {
                        worker.database_failed(&error);
                    }
                }
                _ = count.tick() => worker.count().await,
                () = tokio::time::sleep_until(looks_at.max(resumes_at)), if room > 0 => {}
            }
        }
        working.shutdown().await;
        let keys: Vec<Key> = keys.into_values().collect();
        if let Err(error) = worker.queue.release(&keys, Duration::ZERO).await {
            worker.database_failed(&error);
        }
    }
}

impl Worker {
    async fn work(&self, taken: Taken) {
        if let Err(error) = self.settle_with_copies(taken).await {
            // Its lease ends by itself.
            self.database_failed(&error);
        }
    }

    /// Settles a judgement, and if its text has an answer, its queued copies.
    async fn settle_with_copies(&self, taken: Taken) -> sqlx::Result<()> {
        let (tenant, digest) = (taken.key.tenant.clone(), taken.digest.clone());
        if !self.settle(taken).await? {
            return Ok(());
        }
        loop {
            let copies = self.queue.copies(&tenant, &digest, COPIES_MAX, LEASE).await?;
            if copies.is_empty() {
                return Ok(());
            }
            stream::iter(copies.into_iter().map(Ok))
                .try_for_each_concurrent(COPIES_AT_ONCE, async |copy| self.settle(copy).await.map(|_| ()))
                .await?;
        }
    }

    /// Returns whether the text has an answer.
    async fn settle(&self, taken: Taken) -> sqlx::Result<bool> {
        let (queue, key) = (&self.queue, &taken.key);
        let answer = match &taken.state {
            State::Answered(answer) => Some(answer.clone()),
            State::Early => {
                queue.early(key, WAIT_MIN).await?;
                return Ok(false);
            }
            State::Retracted => {
                self.counted("retracted");
                queue.give_up(key, "retracted", "the text was retracted").await?;
                return Ok(false);
            }
            State::NoConsent => {
                self.counted("no_consent");
                queue
                    .give_up(key, "no_consent", "a generation is without consent")
                    .await?;
                return Ok(false);
            }
            State::OtherTenant => {
                self.counted("other_tenant");
                let reason = "the judge's tenants do not include the text's";
                queue.give_up(key, "other_tenant", reason).await?;
                return Ok(false);
            }
            State::Cached(verdict) => {
                self.counted("cached");
                queue.answer(key, verdict).await?
            }
            State::Open { text } => {
                self.alarm().asks(Instant::now());
                match self.judge.ask(&self.endpoint, text).await {
                    Ok(verdict) => {
                        self.counted("answered");
                        self.pace().answered();
                        self.alarm().record(None, Instant::now());
                        queue.answer(key, &verdict).await?
                    }
                    Err(fault) => {
                        self.fault(&taken, &fault).await?;
                        return Ok(false);
                    }
                }
            }
        };
        // Otherwise another process has answered, and sends it.
        if let Some(answer) = answer {
            let event = self.event(key, taken.target, answer);
            let event = event.into_event(&*key.tenant, self.judge.source(), taken.given_at);
            self.send(key, &event).await?;
        }
        Ok(true)
    }

    async fn fault(&self, taken: &Taken, fault: &Fault) -> sqlx::Result<()> {
        let Taken {
            key, digest, attempts, ..
        } = taken;
        let now = Instant::now();
        self.counted(fault.code);
        self.alarm().record(Some(fault), now);
        if fault.is_of_endpoint {
            let longest = RETRY_AFTER_MAX.min(self.judge.patience().unsigned_abs());
            let is_first = {
                let mut pace = self.pace();
                let is_first = pace.works();
                pace.failed(fault.retry_after.map(|after| after.min(longest)), now);
                is_first
            };
            if !(is_first && fault.may_be_of_text()) {
                return self.queue.unanswered(key, digest, &fault.reason, WAIT_MIN).await;
            }
        } else {
            self.pace().answered();
        }
        let pause = pace::doubled(BACKOFF, *attempts, BACKOFF_MAX);
        let given_up = self.queue.failed(key, digest, fault.code, &fault.reason, pause).await?;
        metrics::counter!("springtide_judge_given_up_total", "judge" => self.judge.name().to_owned())
            .increment(given_up.unsigned_abs());
        Ok(())
    }

    /// The answer as feedback about what the text is about. It is given when the text was.
    fn event(&self, key: &Key, target: Target, answer: Answer) -> Feedback {
        let tags = [
            ("judge", self.judge.name().to_owned()),
            ("judge_version", hex::encode(answer.version)),
            ("judged_feedback_id", key.feedback_id.to_string()),
        ];
        Feedback {
            id: answer.id,
            target,
            metric_name: self.judge.metric().to_owned(),
            value: answer.value,
            tags: tags.map(|(name, value)| (name.to_owned(), value)).into(),
        }
    }

    async fn send(&self, key: &Key, event: &Event) -> sqlx::Result<()> {
        match self.producer.send_event(event).await {
            Ok(()) => self.queue.sent(key).await,
            Err(error) => {
                tracing::warn!(judge = self.judge.name(), %error, "the log did not take an answer, will send it again");
                self.queue.release(std::slice::from_ref(key), RESEND_PAUSE).await
            }
        }
    }

    fn counted(&self, outcome: &'static str) {
        let name = self.judge.name().to_owned();
        metrics::counter!("springtide_judge_answers_total", "judge" => name, "outcome" => outcome).increment(1);
    }

    fn alarm(&self) -> MutexGuard<'_, Alarm> {
        self.alarm.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pace(&self) -> MutexGuard<'_, Pace> {
        self.pace.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn count(&self) {
        self.alarm().look(Instant::now());
        match self.queue.queued(COUNT_MAX).await {
            Ok(queued) => {
                let name = self.judge.name().to_owned();
                metrics::gauge!("springtide_judge_queue", "judge" => name).set(queued as f64);
            }
            Err(error) => self.database_failed(&error),
        }
    }

    fn database_failed(&self, error: &sqlx::Error) {
        tracing::warn!(judge = self.judge.name(), %error, "cannot use the judge's queue, will retry");
    }
}
