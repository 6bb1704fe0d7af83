//! Works through the queue of one judge: takes texts, asks, stores answers, and sends them as
//! feedback events.
//!
//! An answer is stored before it is sent, and its event has an id that is computed from the text's. A
//! process that is killed in between leaves an answer that another process sends, and an event that
//! is sent twice is the same event. Any number of processes may work on a queue.
//!
//! Neither texts nor answers are logged.

mod alarm;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rand::Rng;
use sqlx::PgPool;
use tokio::task::{Id, JoinSet};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::event::{Event, Feedback, Target};
use crate::judge::{self, Fault, Judge};
use crate::log::Producer;
use crate::rows::judgement::{self, Answer, Key, State, Taken};
use alarm::Alarm;

/// How often an empty queue is looked at.
const INTERVAL: Duration = Duration::from_millis(250);
const ERROR_PAUSE: Duration = Duration::from_secs(2);
/// How long a judgement is taken for. A killed process' texts are taken by others after it.
const LEASE: Duration = Duration::from_secs(30);
const RENEW_INTERVAL: Duration = Duration::from_secs(5);
/// The pause after the first failure. It doubles with each further one.
const BACKOFF: Duration = Duration::from_millis(500);
const BACKOFF_MAX: Duration = Duration::from_secs(60);
/// The longest pause that an endpoint may ask for.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(600);
/// Until an answer that the log did not take is sent again.
const RESEND_PAUSE: Duration = Duration::from_secs(1);
/// While a text waits for what it is about, at least.
const EARLY_PAUSE: Duration = Duration::from_secs(2);
const COUNT_INTERVAL: Duration = Duration::from_secs(5);
/// A longer queue is reported as this.
const COUNT_MAX: i64 = 100_000;

/// Works on the queue of one judge.
pub(crate) struct Judging {
    worker: Arc<Worker>,
    shutdown: CancellationToken,
}

struct Worker {
    pool: PgPool,
    producer: Producer,
    judge: Arc<Judge>,
    http: reqwest::Client,
    alarm: Mutex<Alarm>,
}

impl Judging {
    pub(crate) fn new(
        pool: PgPool,
        producer: Producer,
        judge: Arc<Judge>,
        shutdown: CancellationToken,
    ) -> anyhow::Result<Self> {
        let http = judge::client(&judge)?;
        let alarm = Mutex::new(Alarm::new(judge.name()));
        let worker = Arc::new(Worker {
            pool,
            producer,
            judge,
            http,
            alarm,
        });
        Ok(Self { worker, shutdown })
    }

    /// Runs until the shutdown, and then gives back what it had taken.
    pub(crate) async fn run(self) {
        let worker = &self.worker;
        let mut working: JoinSet<Option<Duration>> = JoinSet::new();
        let mut keys: BTreeMap<Id, Key> = BTreeMap::new();
        let mut resumes_at = Instant::now();
        let mut renewal = tokio::time::interval(RENEW_INTERVAL);
        let mut count = tokio::time::interval(COUNT_INTERVAL);
        let mut looks_at = Instant::now();
        while !self.shutdown.is_cancelled() {
            let room = worker.judge.concurrency() - working.len().min(worker.judge.concurrency());
            let now = Instant::now();
            if room > 0 && now >= resumes_at && now >= looks_at {
                let taken = judgement::take(&worker.pool, &worker.judge, room, LEASE).await;
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
                    let (id, pause) = match ended {
                        Ok((id, pause)) => (id, pause),
                        // It panicked. Its lease ends by itself.
                        Err(error) => (error.id(), None),
                    };
                    keys.remove(&id);
                    if let Some(pause) = pause {
                        resumes_at = resumes_at.max(Instant::now() + pause);
                    }
                }
                _ = renewal.tick() => {
                    let keys: Vec<Key> = keys.values().cloned().collect();
                    if let Err(error) = judgement::renew(&worker.pool, &worker.judge, &keys, LEASE).await {
                        worker.database_failed(&error);
                    }
                }
                _ = count.tick() => worker.count().await,
                () = tokio::time::sleep_until(looks_at.max(resumes_at)), if room > 0 => {}
            }
        }
        working.shutdown().await;
        let keys: Vec<Key> = keys.into_values().collect();
        if let Err(error) = judgement::release(&worker.pool, &worker.judge, &keys, Duration::ZERO).await {
            worker.database_failed(&error);
        }
    }
}

impl Worker {
    /// Returns how long the endpoint wants not to be asked.
    async fn work(&self, taken: Taken) -> Option<Duration> {
        let mut pause = None;
        if let Err(error) = self.settle(taken, &mut pause).await {
            // Its lease ends by itself.
            self.database_failed(&error);
        }
        pause
    }

    async fn settle(&self, taken: Taken, pause: &mut Option<Duration>) -> sqlx::Result<()> {
        let Taken {
            key,
            attempts,
            target,
            given_at,
            state,
        } = taken;
        let (pool, judge) = (&self.pool, &*self.judge);
        let answer = match state {
            State::Answered(answer) => Some(answer),
            State::Early => return judgement::early(pool, judge, &key, EARLY_PAUSE).await,
            State::Retracted => {
                self.counted("retracted");
                return judgement::failed(pool, judge, &key, "retracted", "the text was retracted", None).await;
            }
            State::NoConsent => {
                self.counted("no_consent");
                return judgement::failed(pool, judge, &key, "no_consent", "a generation is without consent", None)
                    .await;
            }
            State::Cached(verdict) => {
                self.counted("cached");
                judgement::answer(pool, judge, &key, &verdict).await?
            }
            State::Open { text } => match judge.ask(&self.http, &text).await {
                Ok(verdict) => {
                    self.counted("answered");
                    self.report(None);
                    judgement::answer(pool, judge, &key, &verdict).await?
                }
                Err(fault) => {
                    *pause = fault.retry_after.map(|after| after.min(RETRY_AFTER_MAX));
                    return self.fault(&key, attempts, &fault).await;
                }
            },
        };
        // Otherwise another process has answered, and sends it.
        let Some(answer) = answer else { return Ok(()) };
        let event = self
            .event(&key, target, answer)
            .into_event(&*key.tenant, judge.source(), given_at);
        self.send(&key, &event).await
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
            Ok(()) => judgement::sent(&self.pool, &self.judge, key).await,
            Err(error) => {
                tracing::warn!(judge = self.judge.name(), %error, "the log did not take an answer, will send it again");
                judgement::release(&self.pool, &self.judge, std::slice::from_ref(key), RESEND_PAUSE).await
            }
        }
    }

    async fn fault(&self, key: &Key, attempts: i32, fault: &Fault) -> sqlx::Result<()> {
        self.counted(fault.code);
        self.report(Some(fault));
        let retries = attempts + 1 < self.judge.attempts_max();
        let pause = retries.then(|| backoff(attempts).max(fault.retry_after.unwrap_or_default().min(RETRY_AFTER_MAX)));
        if pause.is_none() {
            metrics::counter!("springtide_judge_given_up_total", "judge" => self.judge.name().to_owned()).increment(1);
        }
        judgement::failed(&self.pool, &self.judge, key, fault.code, &fault.reason, pause).await
    }

    fn counted(&self, outcome: &'static str) {
        let name = self.judge.name().to_owned();
        metrics::counter!("springtide_judge_answers_total", "judge" => name, "outcome" => outcome).increment(1);
    }

    fn report(&self, fault: Option<&Fault>) {
        self.alarm.lock().unwrap_or_else(PoisonError::into_inner).record(fault);
    }

    async fn count(&self) {
        match judgement::queued(&self.pool, &self.judge, COUNT_MAX).await {
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

/// With jitter, so that texts that failed together are not asked about together.
fn backoff(attempts: i32) -> Duration {
    let doubled = BACKOFF * 2u32.saturating_pow(attempts.clamp(0, 16).unsigned_abs());
    doubled.min(BACKOFF_MAX).mul_f64(rand::rng().random_range(0.75..1.25))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_a_limit() {
        for (attempts, seconds) in [(0, 0.5), (1, 1.0), (3, 4.0), (7, 60.0), (i32::MAX, 60.0)] {
            let pause = backoff(attempts).as_secs_f64();
            assert!(
                (seconds * 0.75..=seconds * 1.25).contains(&pause),
                "{attempts}: {pause}"
            );
        }
    }
}
