//! A rollout with an environment that the trainer calls over HTTP.
//!
//! ```text
//! POST {url}/reset {"rollout", "task": {"id", "prompt", "answer"}}   {"messages": […], "tools": […]}
//!   the policy answers the conversation                              a message of the assistant
//! POST {url}/step  {"rollout", "message": {…}}                       {"messages": […], "done": true}
//! POST {url}/score {"rollout"}                                       {"reward": 0.5}
//! ```
//! Messages and tools are those of OpenAI's chat completions. `rollout` is the same UUID in all calls
//! of one rollout. A call that fails, or an answer of another shape, ends the rollout without a
//! reward.

use super::harness::{Harness, Lost};
use anyhow::{Context, bail, ensure};
use runs::leases::Taken;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

/// Largest answer of an environment, bytes.
const ANSWER_BYTES_MAX: usize = 8 << 20;

#[derive(Debug, Deserialize)]
struct Reset {
    messages: Vec<Value>,
    #[serde(default)]
    tools: Vec<Value>,
}

#[derive(Debug, Deserialize)]
struct Step {
    #[serde(default)]
    messages: Vec<Value>,
    done: bool,
}

#[derive(Debug, Deserialize)]
struct Score {
    reward: f64,
}

/// Makes the rollout. Returns its reward.
pub(super) async fn rollout(harness: &Harness<'_>, taken: &Taken, url: &str, turns_max: u32) -> Result<f64, Lost> {
    Ok(session(harness, taken, url.trim_end_matches('/'), turns_max).await?)
}

async fn session(harness: &Harness<'_>, taken: &Taken, url: &str, turns_max: u32) -> anyhow::Result<f64> {
    let rollout = taken.id;
    let task = json!({"id": taken.task_id, "prompt": taken.prompt, "answer": taken.answer});
    let reset: Reset = call(harness, url, "reset", &json!({"rollout": rollout, "task": task})).await?;
    let mut messages = reset.messages;
    ensure!(!messages.is_empty(), "the answer to reset has no messages");
    for _ in 0..turns_max {
        let mut body = json!({
            "model": "policy",
            "messages": messages,
            "max_completion_tokens": harness.config.max_tokens,
        });
        if !reset.tools.is_empty() {
            body["tools"] = json!(reset.tools);
        }
        let mut answer = harness.ask(taken, "chat/completions", &body).await?;
        let message = answer["choices"][0]["message"].take();
        ensure!(message.is_object(), "the answer of the serving API has no message");
        let step: Step = call(harness, url, "step", &json!({"rollout": rollout, "message": message})).await?;
        messages.push(message);
        messages.extend(step.messages);
        if step.done {
            break;
        }
    }
    let score: Score = call(harness, url, "score", &json!({"rollout": rollout})).await?;
    ensure!(score.reward.is_finite(), "the reward is not a finite number");
    Ok(score.reward)
}

/// One call of the environment.
async fn call<T: DeserializeOwned>(harness: &Harness<'_>, url: &str, what: &str, body: &Value) -> anyhow::Result<T> {
    let response = harness.http.post(format!("{url}/{what}")).json(body).send().await;
    let mut response = response.with_context(|| format!("reach the environment for {what}"))?;
    let status = response.status();
    ensure!(status.is_success(), "the environment answered {what} with {status}");
    let mut answer = Vec::new();
    while let Some(bytes) = response
        .chunk()
        .await
        .with_context(|| format!("read the answer to {what}"))?
    {
        if answer.len() + bytes.len() > ANSWER_BYTES_MAX {
            bail!("the environment's answer to {what} is larger than {ANSWER_BYTES_MAX} bytes");
        }
        answer.extend_from_slice(&bytes);
    }
    serde_json::from_slice(&answer).with_context(|| format!("read the environment's answer to {what}"))
}
