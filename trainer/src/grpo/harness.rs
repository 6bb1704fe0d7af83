//! The trainer's own harness: makes the rollouts of runs whose environment is not outside, some at a
//! time, beside the steps. It takes leases like any other harness, and its requests go through the
//! same base URL.
//!
//! ```text
//! completion   one completion of the task's prompt, which the grader rewards
//! push         a session with an environment over HTTP: see push.rs
//! ```

use super::{push, served};
use crate::offline::Failed;
use crate::trainer::Trainer;
use anyhow::{Context, anyhow};
use event_log::lease::Lease;
use futures::{FutureExt, future};
use reqwest::header::RETRY_AFTER;
use runs::api::grpo::{Config, Environment};
use runs::grader::{self, Grade};
use runs::judge::RunJudges;
use runs::leases::{self, HARNESS_FAILED, Taken};
use serde_json::{Value, json};
use std::convert::Infallible;
use std::time::Duration;
use tokio::sync::{Mutex, Notify};
use tokio::time::timeout;
use uuid::Uuid;

/// Who holds the leases.
pub(super) const HOLDER: &str = "springtide/train";
/// How often free places are filled, besides when rollouts are offered.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Timeout of a completion and its grade: rollouts may wait for a whole day of production.
const COMPLETION_SECONDS: u32 = 86_400;
/// Finds connections whose other end is gone.
const KEEPALIVE: Duration = Duration::from_secs(30);
/// A lease outlives its rollout by this, so that it never expires while the harness lives.
const LEASE_MARGIN_SECONDS: u32 = 60;
/// How long to wait for a serving API that cannot be reached.
const UNREACHED_WAIT: Duration = Duration::from_secs(2);
const RETRY_AFTER_MAX: Duration = Duration::from_secs(10);
/// Code of a rollout whose request for a completion failed.
const REQUEST_FAILED: &str = "request_failed";

/// Why a rollout has no reward. With [`Failed`] as its error, the run ends.
#[derive(Debug)]
pub(super) struct Lost {
    pub code: &'static str,
    pub error: anyhow::Error,
}

impl From<anyhow::Error> for Lost {
    fn from(error: anyhow::Error) -> Self {
        Lost {
            code: HARNESS_FAILED,
            error,
        }
    }
}

/// Makes rollouts for one run.
pub(super) struct Harness<'a> {
    pub trainer: &'a Trainer,
    pub http: reqwest::Client,
    run: Uuid,
    run_priority: i32,
    model: String,
    pub config: &'a Config,
    grading: grader::Context,
    /// Held while a place asks for a rollout.
    taking: Mutex<()>,
    pub bells: Bells,
}

/// What harness and trainer of one process tell each other, so that neither waits until it looks again.
#[derive(Debug, Default)]
pub(super) struct Bells {
    /// Rollouts are offered.
    pub offered: Notify,
    /// A rollout has ended.
    pub ended: Notify,
}

impl<'a> Harness<'a> {
    /// `line` is also the alias under which the fleet serves the run's head.
    /// Fails if a grader names a judge that there is not.
    pub async fn new(
        trainer: &'a Trainer,
        run: Uuid,
        run_priority: i32,
        line: &str,
        config: &'a Config,
    ) -> anyhow::Result<Self> {
        for name in config.grader.judges() {
            if !trainer.judges.has(name) {
                let reason = format!("grader: there is no [[trainer.judge]] {name:?} in the configuration of `train`");
                return Err(Failed(reason).into());
            }
        }
        let (pool, replay) = (trainer.pool.clone(), config.replay);
        let judges = RunJudges::open(trainer.judges.clone(), pool, &trainer.policy, run, replay).await?;
        Ok(Harness {
            trainer,
            http: edge::tls::client()
                .tcp_keepalive(KEEPALIVE)
                .build()
                .context("make an HTTP client")?,
            run,
            run_priority,
            model: format!("{}@{line}", trainer.policy),
            config,
            grading: grader::Context::new(Some(judges), trainer.sandboxes.clone()),
            taking: Mutex::new(()),
            bells: Bells::default(),
        })
    }

    /// Makes rollouts until it is dropped. Never resolves but with an error, and never at all if the
    /// environment is outside.
    pub async fn make_rollouts(&self) -> anyhow::Result<Infallible> {
        let seconds = match &self.config.environment {
            Environment::Pull { .. } => return std::future::pending().await,
            Environment::Completion => COMPLETION_SECONDS,
            Environment::Push { timeout_seconds, .. } => *timeout_seconds,
        };
        // Each place works by itself: none waits for a connection that another one is next in line for.
        let mut places = Vec::new();
        for _ in 0..self.trainer.options.offline.rollouts_max {
            places.push(self.make_one_after_the_other(seconds).boxed());
        }
        let (ended, ..) = future::select_all(places).await;
        ended
    }

    async fn make_one_after_the_other(&self, seconds: u32) -> anyhow::Result<Infallible> {
        loop {
            // one place at a time asks for a rollout
            let taking = self.taking.lock().await;
            let pool = &self.trainer.pool;
            let taken = leases::take(pool, self.run, HOLDER, seconds + LEASE_MARGIN_SECONDS).await?;
            let Some(taken) = taken else {
                let _ = timeout(LOOK_EVERY, self.bells.offered.notified()).await;
                continue;
            };
            drop(taking);
            self.work(taken, Duration::from_secs(seconds.into())).await?;
        }
    }

    /// Makes one rollout, and stores how it ended.
    async fn work(&self, taken: Taken, limit: Duration) -> anyhow::Result<()> {
        let pool = &self.trainer.pool;
        let id = taken.id;
        let rollout = async {
            match &self.config.environment {
                Environment::Push { url, turns_max, .. } => {
                    push::rollout(self, &taken, url, *turns_max).await.map(Grade::from)
                }
                Environment::Completion | Environment::Pull { .. } => self.completion(&taken).await,
            }
        };
        let ended = timeout(limit, rollout).await.unwrap_or_else(|_| {
            tracing::info!(rollout = %id, seconds = limit.as_secs(), "a rollout took too long");
            Ok(self.config.failure_reward.into())
        });
        match ended {
            Ok(grade) => {
                leases::reward(pool, id, &grade).await?;
            }
            Err(Lost { code, error }) => {
                let reason = format!("task {}: {error:#}", taken.task_id).replace('\0', "");
                leases::fail(pool, id, code, &reason).await?;
                if error.is::<Failed>() {
                    return Err(error);
                }
            }
        }
        self.bells.ended.notify_one();
        Ok(())
    }

    async fn completion(&self, taken: &Taken) -> Result<Grade, Lost> {
        let failed = |error| Lost {
            code: REQUEST_FAILED,
            error,
        };
        let body = json!({
            "model": self.model,
            "prompt": taken.prompt,
            "max_tokens": self.config.max_tokens,
            "top_p": 1.0,
        });
        let answer = self.ask(taken, "completions", &body).await.map_err(failed)?;
        let text = answer["choices"][0]["text"].as_str();
        let text = text.ok_or_else(|| failed(anyhow!("the answer of the serving API has no text")))?;
        let sample = grader::Sample {
            rollout: taken.id,
            id: &taken.task_id,
            prompt: &taken.prompt,
            answer: &taken.answer,
            text,
        };
        let grade = self.config.grader.grade(&self.grading, &sample).await;
        if let Err(error) = &grade
            && error.cause.costs()
        {
            tracing::warn!(rollout = %taken.id, "{error}");
            return Ok(self.config.failure_reward.into());
        }
        grade.map_err(|error| Lost {
            code: error.cause.code(),
            error: match error.cause.ends_the_run() {
                true => Failed(error.reason).into(),
                false => error.into(),
            },
        })
    }

    /// One request of a rollout. Waits while the fleet is busy.
    pub async fn ask(&self, taken: &Taken, what: &str, body: &Value) -> anyhow::Result<Value> {
        let lease = Lease {
            id: taken.id,
            run_id: self.run,
            task_id: taken.task_id.clone(),
            group_id: taken.group_id.to_string(),
            model: self.model.clone(),
            temperature: self.config.temperature,
            run_priority: self.run_priority,
        };
        let url = format!("{}/{what}", lease.base_url(&self.trainer.serve_url)?);
        loop {
            let mut request = self.http.post(&url).json(body);
            if let Some(key) = &self.trainer.options.api_key {
                request = request.bearer_auth(key);
            }
            let response = match request.send().await {
                Ok(response) => response,
                // it restarts
                Err(error) if error.is_connect() => {
                    tracing::warn!(
                        error = format!("{error:#}"),
                        "cannot reach the serving API; trying again"
                    );
                    tokio::time::sleep(UNREACHED_WAIT).await;
                    continue;
                }
                Err(error) => return Err(error).context("reach the serving API"),
            };
            let status = response.status();
            if matches!(status.as_u16(), 429 | 502 | 503 | 504) {
                let seconds = response
                    .headers()
                    .get(RETRY_AFTER)
                    .and_then(|v| v.to_str().ok()?.parse().ok());
                tokio::time::sleep(Duration::from_secs(seconds.unwrap_or(1)).min(RETRY_AFTER_MAX)).await;
                continue;
            }
            if status.is_success() {
                let answer: Value = response.json().await.context("read the answer of the serving API")?;
                let received = answer["choices"][0]["generation_id"].as_str();
                let received = received.and_then(|id| id.parse().ok());
                let received: Uuid = received.context("the answer of the serving API has no generation_id")?;
                leases::note_received(&self.trainer.pool, taken.id, received).await?;
                return Ok(answer);
            }
            return Err(served::refusal(response).await);
        }
    }
}
