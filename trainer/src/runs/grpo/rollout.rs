//! Rollouts through the public completions API, at low priority and labeled with run, task and
//! group.

use crate::api::Config;
use crate::runs::trainer::Trainer;
use anyhow::{Context, bail};
use futures::{FutureExt, StreamExt};
use reqwest::StatusCode;
use reqwest::header::RETRY_AFTER;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use uuid::Uuid;

/// Higher numbers wait longer; production is 0.
const PRIORITY: i32 = 100;
const SURFACE: &str = "rollout";
/// Timeout of one request, including its time in the queue behind production.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(300);
/// Tries of one request while the fleet is busy.
const TRIES_MAX: u32 = 30;
const RETRY_AFTER_MAX: Duration = Duration::from_secs(10);
/// Choices per request. A larger group takes several requests.
const CHOICES_MAX: u32 = 8;

/// A row of `task`.
#[derive(Debug, Clone)]
pub(super) struct Task {
    pub id: String,
    pub prompt: String,
    pub answer: String,
}

/// One sampled completion of a task.
#[derive(Debug, Clone)]
pub(super) struct Rollout {
    pub generation: Uuid,
    pub text: String,
    pub task: Arc<Task>,
}

/// What became of the requests of a step.
#[derive(Debug, Default)]
pub(super) struct Rolled {
    pub rollouts: Vec<Rollout>,
    /// Rollouts whose requests failed.
    pub failed: usize,
    pub first_error: Option<String>,
    /// Rollouts without a grade, by the code of the cause.
    pub ungraded: BTreeMap<&'static str, usize>,
}

/// Requests completions for one run.
pub(super) struct Client<'a> {
    http: reqwest::Client,
    url: String,
    key: Option<&'a str>,
    model: String,
    user: &'a str,
    run: Uuid,
    config: &'a Config,
    requests_max: usize,
}

#[derive(Deserialize)]
struct Response {
    choices: Vec<Choice>,
}

#[derive(Deserialize)]
struct Choice {
    text: String,
    generation_id: Uuid,
    version: i64,
}

impl<'a> Client<'a> {
    /// `line` is also the alias under which the fleet serves the run's head.
    pub fn new(trainer: &'a Trainer, run: Uuid, line: &'a str, config: &'a Config) -> anyhow::Result<Self> {
        let http = edge::tls::client()
            .timeout(REQUEST_TIMEOUT)
            .build()
            .context("make an HTTP client")?;
        Ok(Client {
            http,
            url: format!("{}/v1/completions", trainer.serve_url),
            key: trainer.options.api_key.as_deref(),
            model: format!("{}@{line}", trainer.policy),
            user: line,
            run,
            config,
            requests_max: trainer.options.offline.requests_max,
        })
    }

    /// The version that serves the run's alias now. Found with a one-token evaluation, which is
    /// never trained on.
    pub async fn served_version(&self) -> anyhow::Result<i64> {
        let body = json!({
            "model": self.model,
            "prompt": " ",
            "max_tokens": 1,
            "temperature": 0,
            "user": self.user,
            "priority": PRIORITY,
            "metadata": {"purpose": "evaluation", "run_id": self.run},
        });
        let response = self.post(&body).await?;
        response
            .choices
            .first()
            .map(|c| c.version)
            .context("the response has no choice")
    }

    /// One group of rollouts per task. Fails if all requests fail.
    pub async fn roll_out(&self, tasks: &[Arc<Task>]) -> anyhow::Result<Rolled> {
        let mut requests = Vec::new();
        for task in tasks {
            let group = Uuid::now_v7();
            let mut left = self.config.group_size;
            while left > 0 {
                let count = left.min(CHOICES_MAX);
                requests.push(async move { (count, self.choices(task, group, count).await) }.boxed());
                left -= count;
            }
        }
        let mut answers = futures::stream::iter(requests).buffer_unordered(self.requests_max);
        let mut rolled = Rolled::default();
        while let Some((count, answer)) = answers.next().await {
            match answer {
                Ok(rollouts) => rolled.rollouts.extend(rollouts),
                Err(error) => {
                    rolled.failed += count as usize;
                    rolled.first_error.get_or_insert_with(|| format!("{error:#}"));
                }
            }
        }
        match rolled.first_error {
            Some(error) if rolled.rollouts.is_empty() => bail!("request rollouts: {error}"),
            _ => Ok(rolled),
        }
    }

    async fn choices(&self, task: &Arc<Task>, group: Uuid, count: u32) -> anyhow::Result<Vec<Rollout>> {
        let body = json!({
            "model": self.model,
            "prompt": task.prompt,
            "n": count,
            "max_tokens": self.config.max_tokens,
            "temperature": self.config.temperature,
            "top_p": 1.0,
            "logprobs": 1,
            "return_token_ids": true,
            "user": self.user,
            "priority": PRIORITY,
            "surface": SURFACE,
            "metadata": {
                "purpose": "rollout",
                "run_id": self.run,
                "task_id": task.id,
                "group_id": group,
            },
        });
        let mut tries = 0;
        let response = loop {
            match self.post(&body).await {
                Ok(response) => break response,
                Err(error) => {
                    tries += 1;
                    let Some(busy) = error.downcast_ref::<Busy>().filter(|_| tries < TRIES_MAX) else {
                        return Err(error.context(format!("task {}", task.id)));
                    };
                    tokio::time::sleep(busy.retry_after).await;
                }
            }
        };
        let rollouts = response.choices.into_iter().map(|choice| Rollout {
            generation: choice.generation_id,
            text: choice.text,
            task: task.clone(),
        });
        Ok(rollouts.collect())
    }

    async fn post(&self, body: &Value) -> anyhow::Result<Response> {
        let mut request = self.http.post(&self.url).json(body);
        if let Some(key) = self.key {
            request = request.bearer_auth(key);
        }
        let response = request.send().await.context("reach the serving API")?;
        let status = response.status();
        if matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
            let seconds = response
                .headers()
                .get(RETRY_AFTER)
                .and_then(|v| v.to_str().ok()?.parse().ok());
            let retry_after = Duration::from_secs(seconds.unwrap_or(1)).min(RETRY_AFTER_MAX);
            return Err(Busy { status, retry_after }.into());
        }
        if !status.is_success() {
            let problem: Value = response.json().await.unwrap_or_default();
            let detail = problem["detail"]
                .as_str()
                .or(problem["title"].as_str())
                .unwrap_or("no detail");
            bail!("the serving API returned {status}: {detail}");
        }
        response.json().await.context("read the completion")
    }
}

/// The fleet has no capacity for rollouts now.
#[derive(Debug, thiserror::Error)]
#[error("the serving API returned {status}")]
struct Busy {
    status: StatusCode,
    retry_after: Duration,
}
