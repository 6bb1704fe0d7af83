//! The calls of a product with suggestions: ask for a completion, report the developer's answer, and
//! say that a session is over.
//!
//! A failed completion is counted and not retried, because the developer has typed on. Feedback is
//! retried with the same id and body until it is acknowledged, so a repetition changes nothing.

use std::time::{Duration, Instant};

use anyhow::bail;
use reqwest::{Response, StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};
use uuid::Uuid;

use crate::{Settings, corpus::pauses::SUGGESTION_TOKENS_MAX};

/// Most characters of the file that are sent. The demo's model reads 256 tokens: 239 of context,
/// the cut and 16 of its own suggestion. A token holds 2.7 characters of Rust on average, so about
/// four in five such contexts fit. The server refuses the others before inference.
pub const CONTEXT_CHARS_MAX: usize = 560;
/// How often a prompt that is too long is cut to three quarters. Then 56 characters are left, which
/// fit even at three tokens each.
pub const SHORTENINGS_MAX: u32 = 8;
/// Problem type of a prompt that is too long.
const TOO_LONG: &str = "context-too-long";
/// Surfaces of the demo's product: single suggestions, and sessions.
pub const SURFACE: &str = "completion";
pub const SESSION_SURFACE: &str = "session";
/// A later completion has failed: the developer has typed on.
const COMPLETION_TIMEOUT: Duration = Duration::from_secs(10);
const FEEDBACK_TIMEOUT: Duration = Duration::from_secs(5);
/// Feedback without an acknowledgement for this long is given up and counted.
const FEEDBACK_PATIENCE: Duration = Duration::from_secs(90);
const BACKOFF_MIN: Duration = Duration::from_millis(100);
const BACKOFF_MAX: Duration = Duration::from_secs(3);

/// Why a call failed, as the report counts it: `completion: http 503`, `feedback: gave up`, …
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {kind}")]
pub struct Failure {
    call: &'static str,
    kind: String,
}

impl Failure {
    fn new(call: &'static str, kind: impl Into<String>) -> Self {
        Self {
            call,
            kind: kind.into(),
        }
    }

    fn of_transport(call: &'static str, error: &reqwest::Error) -> Self {
        let kind = if error.is_timeout() {
            "timeout"
        } else if error.is_connect() {
            "no connection"
        } else if error.is_decode() {
            "answer not understood"
        } else {
            "connection lost"
        };
        Self::new(call, kind)
    }

    fn of_status(call: &'static str, status: StatusCode, problem: &Problem) -> Self {
        tracing::debug!(call, %status, title = problem.title, detail = problem.detail, "refused");
        Self::new(call, format!("http {}", status.as_u16()))
    }
}

/// The server's answer at a pause.
#[derive(Debug, Clone, Deserialize)]
pub struct Suggestion {
    pub text: String,
    pub generation_id: Uuid,
    pub version: i64,
    pub root: String,
    pub arm: String,
    pub declined: bool,
}

#[derive(Debug, Deserialize)]
struct Completion {
    choices: Vec<Suggestion>,
}

/// Members of an RFC 9457 problem that may be logged: they never contain a prompt.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Problem {
    #[serde(rename = "type")]
    type_: String,
    title: String,
    detail: Option<String>,
}

#[derive(Debug, Clone)]
pub struct Asker {
    pub user: String,
    pub session_id: Uuid,
    pub surface: &'static str,
}

/// What feedback is about.
#[derive(Debug, Clone, Copy)]
pub enum Target {
    Generation(Uuid),
    Episode(Uuid),
}

/// What happened to one feedback event.
#[derive(Debug, Default)]
pub struct Delivery {
    pub retries: u64,
    pub failure: Option<Failure>,
}

#[derive(Debug, Clone)]
pub struct Client {
    settings: Settings,
    temperature: f32,
}

impl Client {
    pub fn new(settings: Settings, temperature: f32) -> Self {
        Self { settings, temperature }
    }

    fn post(&self, url: String, timeout: Duration) -> reqwest::RequestBuilder {
        let request = self.settings.http.post(url).timeout(timeout);
        match &self.settings.api_key {
            Some(key) => request.bearer_auth(key),
            None => request,
        }
    }

    /// Waits until every role that the demo needs reports that it is healthy.
    ///
    /// Errors when one of them does not within `patience`.
    pub async fn wait_until_ready(&self, patience: Duration) -> anyhow::Result<()> {
        let deadline = Instant::now() + patience;
        for url in [
            &self.settings.serve_url,
            &self.settings.ingest_url,
            &self.settings.control_url,
        ] {
            let health = format!("{url}/health");
            loop {
                let answer = self.settings.http.get(&health).timeout(FEEDBACK_TIMEOUT).send().await;
                if answer.is_ok_and(|response| response.status().is_success()) {
                    break;
                }
                if Instant::now() >= deadline {
                    bail!(
                        "{health} is not healthy after {} s; is the stack up?",
                        patience.as_secs()
                    );
                }
                tokio::time::sleep(Duration::from_millis(300)).await;
            }
        }
        Ok(())
    }

    /// Asks for the rest of the line after `prompt(chars)`, a prompt with at most so many characters
    /// of the file. It begins with `chars`. Returns the suggestion and how often the prompt had to be
    /// shortened.
    pub async fn complete(
        &self,
        asker: &Asker,
        mut chars: usize,
        prompt: impl Fn(usize) -> String,
    ) -> Result<(Suggestion, u32), Failure> {
        let call = "completion";
        let mut shortenings = 0;
        loop {
            let request = json!({
                "model": self.settings.policy,
                "prompt": prompt(chars),
                "max_tokens": SUGGESTION_TOKENS_MAX,
                "temperature": self.temperature,
                "user": asker.user,
                "session_id": asker.session_id,
                "surface": asker.surface,
            });
            let url = format!("{}/v1/completions", self.settings.serve_url);
            let sent = self.post(url, COMPLETION_TIMEOUT).json(&request).send().await;
            let response = sent.map_err(|error| Failure::of_transport(call, &error))?;
            let status = response.status();
            if status.is_success() {
                let answer = response.json::<Completion>().await;
                let completion = answer.map_err(|error| Failure::of_transport(call, &error))?;
                let suggestion = completion.choices.into_iter().next();
                return suggestion
                    .map(|suggestion| (suggestion, shortenings))
                    .ok_or_else(|| Failure::new(call, "no choice"));
            }
            let problem = response.json::<Problem>().await.unwrap_or_default();
            if !problem.type_.ends_with(TOO_LONG) || shortenings == SHORTENINGS_MAX {
                return Err(Failure::of_status(call, status, &problem));
            }
            chars = chars * 3 / 4;
            shortenings += 1;
        }
    }

    /// Reports the value of a metric, given at `time`.
    pub async fn send_feedback(
        &self,
        target: Target,
        metric: &str,
        value: impl Into<Value>,
        time: OffsetDateTime,
    ) -> Delivery {
        let (field, id) = match target {
            Target::Generation(id) => ("generation_id", id),
            Target::Episode(id) => ("episode_id", id),
        };
        let event = json!({
            "id": Uuid::now_v7(),
            field: id,
            "metric_name": metric,
            "value": value.into(),
        });
        self.deliver("feedback", "feedback", event, time).await
    }

    /// Says that an episode is over.
    pub async fn end_episode(&self, episode_id: Uuid, time: OffsetDateTime) -> Delivery {
        let event = json!({ "episode_id": episode_id });
        self.deliver("end", "episode-ends", event, time).await
    }

    async fn deliver(&self, call: &'static str, path: &str, event: Value, time: OffsetDateTime) -> Delivery {
        let mut retries = 0;
        let failure = self.try_deliver(call, path, event, time, &mut retries).await.err();
        Delivery { retries, failure }
    }

    async fn try_deliver(
        &self,
        call: &'static str,
        path: &str,
        mut event: Value,
        time: OffsetDateTime,
        retries: &mut u64,
    ) -> Result<(), Failure> {
        event["time"] = time.format(&Rfc3339).map_err(|_| Failure::new(call, "no time"))?.into();
        let url = format!("{}/v1/{path}", self.settings.ingest_url);
        let deadline = Instant::now() + FEEDBACK_PATIENCE;
        let mut backoff = BACKOFF_MIN;
        loop {
            match self.post(url.clone(), FEEDBACK_TIMEOUT).json(&event).send().await {
                Ok(response) if response.status().is_success() => return Ok(()),
                Ok(response) if !is_transient(response.status()) => {
                    let status = response.status();
                    let problem = response.json::<Problem>().await.unwrap_or_default();
                    return Err(Failure::of_status(call, status, &problem));
                }
                Ok(response) => backoff = backoff.max(retry_after(&response)),
                Err(_) => {}
            }
            if Instant::now() + backoff >= deadline {
                return Err(Failure::new(call, "gave up"));
            }
            tokio::time::sleep(backoff).await;
            backoff = (backoff * 2).min(BACKOFF_MAX);
            *retries += 1;
        }
    }
}

fn is_transient(status: StatusCode) -> bool {
    status.is_server_error() || matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT)
}

/// The server's `Retry-After` in whole seconds, or 0.
fn retry_after(response: &Response) -> Duration {
    let header = response.headers().get(reqwest::header::RETRY_AFTER);
    let seconds = header.and_then(|value| value.to_str().ok()?.parse().ok()).unwrap_or(0);
    Duration::from_secs(seconds).min(BACKOFF_MAX)
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use axum::{Json, Router, http, routing::post};
    use serde_json::Value;

    use super::*;

    /// A server that answers every POST with `answer` and keeps the bodies.
    async fn serve(answer: fn(usize, &Value) -> (u16, Value)) -> (Client, Arc<Mutex<Vec<Value>>>) {
        let bodies = Arc::new(Mutex::new(Vec::new()));
        let received = Arc::clone(&bodies);
        let handler = post(move |Json(body): Json<Value>| async move {
            let mut received = received.lock().unwrap();
            received.push(body);
            let (status, answer) = answer(received.len(), &received[received.len() - 1]);
            (http::StatusCode::from_u16(status).unwrap(), Json(answer))
        });
        let router = Router::new()
            .route("/v1/completions", handler.clone())
            .route("/v1/feedback", handler);
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, router).await });
        let settings = Settings {
            serve_url: url.clone(),
            ingest_url: url.clone(),
            control_url: url,
            ..Settings::for_tests()
        };
        (Client::new(settings, 1.0), bodies)
    }

    fn asker() -> Asker {
        Asker {
            user: "s1-u0001".to_owned(),
            session_id: Uuid::now_v7(),
            surface: SURFACE,
        }
    }

    #[tokio::test]
    async fn feedback_is_repeated_with_the_same_id_and_body_until_it_is_acknowledged() {
        let (client, bodies) = serve(|n, _| (if n < 3 { 503 } else { 200 }, json!({}))).await;
        let delivery = client
            .send_feedback(
                Target::Generation(Uuid::now_v7()),
                "accept",
                true,
                OffsetDateTime::now_utc(),
            )
            .await;
        assert!(delivery.failure.is_none());
        assert_eq!(delivery.retries, 2);
        let bodies = bodies.lock().unwrap();
        assert_eq!(bodies.len(), 3);
        assert!(bodies.iter().all(|body| *body == bodies[0]), "{bodies:?}");
        assert_eq!(
            (&bodies[0]["metric_name"], &bodies[0]["value"]),
            (&json!("accept"), &json!(true))
        );
    }

    #[tokio::test]
    async fn feedback_that_is_refused_for_good_is_counted_and_not_repeated() {
        let (client, bodies) = serve(|_, _| (409, json!({"title": "conflict"}))).await;
        let delivery = client
            .send_feedback(
                Target::Episode(Uuid::now_v7()),
                "accept",
                false,
                OffsetDateTime::now_utc(),
            )
            .await;
        assert_eq!(delivery.failure.unwrap().to_string(), "feedback: http 409");
        assert_eq!(bodies.lock().unwrap().len(), 1);
    }

    #[tokio::test]
    async fn a_prompt_that_is_too_long_is_shortened() {
        let (client, bodies) = serve(|_, body| {
            let choice = json!({
                "text": "x", "generation_id": Uuid::nil(), "version": 3, "root": "aa", "arm": "base", "declined": false,
            });
            let fits = body["prompt"].as_str().is_some_and(|prompt| prompt.len() < 350);
            if fits {
                (200, json!({"choices": [choice]}))
            } else {
                (400, json!({"type": "/problems/context-too-long"}))
            }
        })
        .await;
        let (suggestion, shortenings) = client.complete(&asker(), 560, |chars| "a".repeat(chars)).await.unwrap();
        assert_eq!(
            (suggestion.version, suggestion.arm.as_str(), shortenings),
            (3, "base", 2)
        );
        let bodies = bodies.lock().unwrap();
        assert_eq!(bodies[2]["prompt"], json!("a".repeat(560 * 9 / 16)));
        assert_eq!(
            (&bodies[1]["surface"], &bodies[1]["max_tokens"]),
            (&json!("completion"), &json!(16))
        );
    }

    #[tokio::test]
    async fn a_completion_that_fails_is_named_and_not_asked_for_again() {
        let (client, bodies) = serve(|_, _| (503, json!({"title": "the log is unavailable"}))).await;
        let failure = client.complete(&asker(), 560, |_| String::new()).await.unwrap_err();
        assert_eq!(failure.to_string(), "completion: http 503");
        assert_eq!(bodies.lock().unwrap().len(), 1);
    }
}
