//! What streaming callers notice while versions change: for each arm one caller streams long
//! answers, one after another, and notes how long it waited. Its requests do not consent to
//! training.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use artifact::checkpoint::Checkpoint;
use reqwest::Response;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use text::tokenizer::Tokenizer;
use tokio::{sync::Mutex, task::JoinSet};

use crate::{
    Settings,
    corpus::tokenizer::CUT,
    stats::{FOLLOWING, FROZEN, LEARNING, quantile},
};

/// A few seconds of text on slow machines. With its prompt it fits the demo model's context.
const TOKENS: usize = 160;
/// Between two answers of one caller.
const PAUSE: Duration = Duration::from_millis(500);
const TIMEOUT: Duration = Duration::from_secs(60);
/// Makes a token practically impossible.
const NEVER: i32 = -100;

/// What the callers of all arms noticed.
#[derive(Debug, Clone, Serialize)]
pub struct StreamWatch {
    pub arms: Vec<ArmWatch>,
}

#[derive(Debug, Clone, Serialize)]
pub struct ArmWatch {
    pub arm: String,
    pub answers: usize,
    pub failed: usize,
    pub tokens: usize,
    /// Answers of another version than the one before: an update lay between or within them.
    pub updates: usize,
    /// Until the first token, ms; of all answers, and of the first answer after each update.
    pub first_token_ms: Waits,
    pub first_token_after_update_ms: Waits,
    /// The longest wait between two tokens of each answer, ms.
    pub longest_gap_ms: Waits,
}

#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Waits {
    pub p50: Option<f64>,
    pub p99: Option<f64>,
    pub max: Option<f64>,
}

impl Waits {
    fn of(values: &[f64]) -> Self {
        let at = |q| quantile(values.to_vec(), q);
        Self {
            p50: at(0.5),
            p99: at(0.99),
            max: at(1.0),
        }
    }
}

/// One streamed answer.
#[derive(Debug, Clone, Copy)]
struct Streamed {
    version: i64,
    tokens: usize,
    first_token_ms: f64,
    longest_gap_ms: f64,
}

/// The running callers. They stop when this is dropped or finished.
pub struct Watching {
    callers: JoinSet<()>,
    seen: Vec<(&'static str, Arc<Mutex<Seen>>)>,
}

#[derive(Debug, Default)]
struct Seen {
    answers: Vec<Streamed>,
    failed: usize,
}

/// Starts a caller for each arm.
pub fn start(settings: &Settings, base: &Checkpoint) -> anyhow::Result<Watching> {
    let tokenizer = Tokenizer::from_checkpoint(base).context("read the tokenizer")?;
    let never = tokenizer.stop_ids().iter().copied().chain(tokenizer.decline_id());
    let bias: Map<String, Value> = never.map(|id| (id.to_string(), NEVER.into())).collect();
    let mut callers = JoinSet::new();
    let seen = [LEARNING, FOLLOWING, FROZEN].map(|arm| {
        let seen = Arc::new(Mutex::new(Seen::default()));
        let (settings, bias, noted) = (settings.clone(), bias.clone(), seen.clone());
        callers.spawn(async move {
            loop {
                match stream(&settings, arm, &bias).await {
                    Ok(answer) => noted.lock().await.answers.push(answer),
                    Err(error) => {
                        tracing::debug!(arm, error = format!("{error:#}"), "a stream failed");
                        noted.lock().await.failed += 1;
                    }
                }
                tokio::time::sleep(PAUSE).await;
            }
        });
        (arm, seen)
    });
    Ok(Watching {
        callers,
        seen: seen.into(),
    })
}

impl Watching {
    /// Stops the callers and sums up.
    pub async fn finish(mut self) -> StreamWatch {
        self.callers.shutdown().await;
        let mut arms = Vec::new();
        for (arm, seen) in self.seen {
            arms.push(summary(arm, &*seen.lock().await));
        }
        StreamWatch { arms }
    }
}

fn summary(arm: &str, Seen { answers, failed }: &Seen) -> ArmWatch {
    let pairs = answers.iter().zip(answers.iter().skip(1));
    let after_update: Vec<f64> = pairs
        .filter(|(before, after)| before.version != after.version)
        .map(|(_, after)| after.first_token_ms)
        .collect();
    let waits = |of: fn(&Streamed) -> f64| Waits::of(&answers.iter().map(of).collect::<Vec<_>>());
    ArmWatch {
        arm: arm.to_owned(),
        answers: answers.len(),
        failed: *failed,
        tokens: answers.iter().map(|answer| answer.tokens).sum(),
        updates: after_update.len(),
        first_token_ms: waits(|answer| answer.first_token_ms),
        first_token_after_update_ms: Waits::of(&after_update),
        longest_gap_ms: waits(|answer| answer.longest_gap_ms),
    }
}

/// Streams one answer and notes when its tokens came.
async fn stream(settings: &Settings, arm: &str, bias: &Map<String, Value>) -> anyhow::Result<Streamed> {
    let body = json!({
        "model": format!("{}@{arm}", settings.policy),
        "prompt": format!("fn main() {{\n    let {CUT}"),
        "max_tokens": TOKENS,
        "stream": true,
        "return_token_ids": true,
        "logit_bias": bias,
        "user": format!("stream-watch-{arm}"),
        "metadata": {"consent": false},
    });
    let url = format!("{}/v1/completions", settings.serve_url);
    let mut request = settings.http.post(url).timeout(TIMEOUT).json(&body);
    if let Some(key) = &settings.api_key {
        request = request.bearer_auth(key);
    }
    let started = Instant::now();
    let response = request.send().await.context("ask for a stream")?;
    ensure!(response.status().is_success(), "the answer is {}", response.status());
    read(response, started).await
}

async fn read(mut response: Response, started: Instant) -> anyhow::Result<Streamed> {
    #[derive(Deserialize)]
    struct Event {
        choices: Vec<Choice>,
    }
    #[derive(Deserialize)]
    struct Choice {
        #[serde(default)]
        token_ids: Vec<u32>,
        version: Option<i64>,
    }
    let (mut buffer, mut arrived, mut tokens) = (Vec::new(), Vec::new(), 0);
    loop {
        let chunk = response.chunk().await.context("read the stream")?;
        let chunk = chunk.context("the stream ended too early")?;
        let now = started.elapsed();
        buffer.extend_from_slice(&chunk);
        while let Some(end) = buffer.iter().position(|&byte| byte == b'\n') {
            let line: Vec<u8> = buffer.drain(..=end).collect();
            let Some(data) = line.strip_prefix(b"data:") else {
                continue;
            };
            let event: Event = serde_json::from_slice(data.trim_ascii()).context("read an event of the stream")?;
            for choice in event.choices {
                if !choice.token_ids.is_empty() {
                    arrived.push(now);
                    tokens += choice.token_ids.len();
                }
                if let Some(version) = choice.version {
                    return summed(version, tokens, &arrived);
                }
            }
        }
    }
}

/// `arrived`: when tokens came, since the request was sent.
fn summed(version: i64, tokens: usize, arrived: &[Duration]) -> anyhow::Result<Streamed> {
    let first = arrived.first().context("the answer has no tokens")?;
    let gaps = arrived.windows(2).map(|pair| pair[1] - pair[0]);
    Ok(Streamed {
        version,
        tokens,
        first_token_ms: 1e3 * first.as_secs_f64(),
        longest_gap_ms: 1e3 * gaps.max().unwrap_or_default().as_secs_f64(),
    })
}

impl StreamWatch {
    /// For the terminal. Ends with a newline.
    pub fn table(&self) -> String {
        let mut text = format!(
            "{:<22} {:>8} {:>7} {:>8} {:>26} {:>26} {:>26}\n",
            "streaming callers, ms",
            "answers",
            "failed",
            "updates",
            "first token p50, p99, max",
            "after an update",
            "longest gap"
        );
        let waits = |of: &Waits| {
            let [p50, p99, max] = [of.p50, of.p99, of.max].map(|ms| report::number::decimal(ms, 0));
            format!("{p50}, {p99}, {max}")
        };
        for arm in &self.arms {
            text += &format!(
                "{:<22} {:>8} {:>7} {:>8} {:>26} {:>26} {:>26}\n",
                arm.arm,
                arm.answers,
                arm.failed,
                arm.updates,
                waits(&arm.first_token_ms),
                waits(&arm.first_token_after_update_ms),
                waits(&arm.longest_gap_ms)
            );
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_update_is_an_answer_of_another_version_than_the_one_before() {
        let answer = |version, first_token_ms, longest_gap_ms| Streamed {
            version,
            tokens: 160,
            first_token_ms,
            longest_gap_ms,
        };
        let seen = Seen {
            answers: vec![
                answer(1, 20.0, 5.0),
                answer(1, 22.0, 6.0),
                answer(2, 500.0, 7.0),
                answer(2, 21.0, 90.0),
            ],
            failed: 1,
        };
        let watch = summary(LEARNING, &seen);
        assert_eq!(
            (watch.answers, watch.failed, watch.updates, watch.tokens),
            (4, 1, 1, 640)
        );
        assert_eq!(watch.first_token_after_update_ms.max, Some(500.0));
        assert_eq!(
            (watch.longest_gap_ms.p50, watch.longest_gap_ms.max),
            (Some(6.0), Some(90.0))
        );
    }

    #[test]
    fn the_first_token_and_the_longest_gap_follow_from_the_times_of_tokens() {
        let at = [30, 32, 90, 91].map(Duration::from_millis);
        let streamed = summed(3, 4, &at).unwrap();
        assert!((streamed.first_token_ms - 30.0).abs() < 1e-9 && (streamed.longest_gap_ms - 58.0).abs() < 1e-9);
        assert!(summed(3, 0, &[]).is_err());
    }
}
