//! Asks the fleet which version serves the head of a run.

use crate::trainer::Trainer;
use anyhow::{Context, anyhow};
use serde::Deserialize;
use serde_json::{Value, json};
use std::time::Duration;
use uuid::Uuid;

const TIMEOUT: Duration = Duration::from_secs(300);

#[derive(Deserialize)]
struct Response {
    choices: Vec<Choice>,
}

#[derive(Deserialize)]
struct Choice {
    version: i64,
}

/// The version that serves the run's line now. Found with an evaluation of one token, which is never
/// trained on.
pub(super) async fn version(trainer: &Trainer, run: Uuid, line: &str) -> anyhow::Result<i64> {
    let http = edge::tls::client()
        .timeout(TIMEOUT)
        .build()
        .context("make an HTTP client")?;
    let body = json!({
        "model": format!("{}@{line}", trainer.policy),
        "prompt": " ",
        "max_tokens": 1,
        "temperature": 0,
        "user": line,
        "metadata": {"purpose": "evaluation", "run_id": run},
    });
    let mut request = http.post(format!("{}/v1/completions", trainer.serve_url)).json(&body);
    if let Some(key) = &trainer.options.api_key {
        request = request.bearer_auth(key);
    }
    let response = request.send().await.context("reach the serving API")?;
    let status = response.status();
    if !status.is_success() {
        return Err(refusal(response).await);
    }
    let response: Response = response.json().await.context("read the completion")?;
    let choice = response.choices.first();
    choice
        .map(|choice| choice.version)
        .context("the response has no choice")
}

/// What the serving API says is wrong with a request.
pub(super) async fn refusal(response: reqwest::Response) -> anyhow::Error {
    let status = response.status();
    let problem: Value = response.json().await.unwrap_or_default();
    let detail = problem["detail"].as_str().or(problem["title"].as_str());
    anyhow!("the serving API returned {status}: {}", detail.unwrap_or("no detail"))
}

/// Whether the answer did not come in time.
pub(super) fn is_timeout(error: &anyhow::Error) -> bool {
    let timed_out = |error: &reqwest::Error| error.is_timeout();
    error.chain().any(|cause| cause.downcast_ref().is_some_and(timed_out))
}
