//! The two calls that a product with suggestions makes: ask for a completion, tell what the developer did with it.
//!
//! A completion that fails is reported as failed and never asked for again: the developer has typed on. Feedback is told
//! until it is acknowledged, with the same id and the same body each time, so that a repetition changes nothing.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use reqwest::{Response, StatusCode};
use serde::{Deserialize, Serialize};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};
use uuid::Uuid;

use super::Endpoints;

/// Most characters of the file that are sent. The demo's model reads 256 tokens: 239 of context, the cut, and 16 of its own
/// suggestion. Its tokens hold 2.7 characters of Rust on average, so about four in five such contexts fit; a server that
/// refuses one (at no cost: before any inference) is sent three quarters of it.
pub const CONTEXT_CHARS_MAX: usize = 560;
/// How often a refused prompt is shortened. After that, 56 characters are left: few enough even where each is three tokens.
pub const SHORTENINGS_MAX: u32 = 8;
/// How the server names the kind of problem that less context solves.
const TOO_LONG: &str = "context-too-long";
/// Longest suggestion, in tokens.
const SUGGESTION_TOKENS_MAX: u32 = crate::corpus::pauses::SUGGESTION_TOKENS_MAX as u32;
/// The token between what is typed and what is asked for.
pub const CUT: &str = "<|cut|>";
/// The surface that the demo's product is.
pub const SURFACE: &str = "completion";
/// A developer's patience: later than this a completion has failed.
const COMPLETION_TIMEOUT: Duration = Duration::from_secs(10);
const FEEDBACK_TIMEOUT: Duration = Duration::from_secs(5);
/// After this long, feedback that nobody acknowledged is given up, and counted.
const FEEDBACK_PATIENCE: Duration = Duration::from_secs(90);
const BACKOFF_MIN: Duration = Duration::from_millis(100);
const BACKOFF_MAX: Duration = Duration::from_secs(3);

/// Why a call failed, as the report counts it: `completion: http 503`, `feedback: gave up`, …
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {kind}")]
pub struct Failed {
    pub call: &'static str,
    pub kind: String,
}

/// What the server suggests, or that it declines to.
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

/// Members of an RFC 9457 problem that may be repeated: none of them carries a prompt.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Problem {
    #[serde(rename = "type")]
    type_: String,
    title: String,
    detail: Option<String>,
}

#[derive(Debug, Serialize)]
struct CompletionRequest<'a> {
    model: &'a str,
    prompt: String,
    max_tokens: u32,
    temperature: f32,
    user: &'a str,
    session_id: Uuid,
    surface: &'a str,
}

/// Who asks, and about which file.
#[derive(Debug, Clone)]
pub struct Asker {
    pub user: String,
    pub session_id: Uuid,
}

#[derive(Debug, Serialize)]
struct FeedbackRequest {
    id: Uuid,
    generation_id: Uuid,
    metric_name: &'static str,
    value: bool,
    /// RFC 3339: when the developer answered.
    time: String,
}

/// What it took to have an answer acknowledged.
#[derive(Debug, Default)]
pub struct Told {
    pub retries: u64,
    pub failed: Option<Failed>,
}

#[derive(Debug, Clone)]
pub struct Client {
    http: reqwest::Client,
    endpoints: Endpoints,
    temperature: f32,
}

impl Client {
    pub fn new(mut endpoints: Endpoints, temperature: f32) -> anyhow::Result<Self> {
        for url in [&mut endpoints.serve, &mut endpoints.ingest, &mut endpoints.control] {
            url.truncate(url.trim_end_matches('/').len());
        }
        Ok(Self {
            http: reqwest::Client::builder().build().context("set up the HTTP client")?,
            endpoints,
            temperature,
        })
    }

    fn post(&self, url: String, timeout: Duration) -> reqwest::RequestBuilder {
        let request = self.http.post(url).timeout(timeout);
        match &self.endpoints.api_key {
            Some(key) => request.bearer_auth(key),
            None => request,
        }
    }

    /// Waits until every role that the demo needs says that it is well.
    ///
    /// Errors when one of them does not within `patience`.
    pub async fn wait_until_ready(&self, patience: Duration) -> anyhow::Result<()> {
        let deadline = Instant::now() + patience;
        for url in [&self.endpoints.serve, &self.endpoints.ingest, &self.endpoints.control] {
            loop {
                let answer = self
                    .http
                    .get(format!("{url}/health"))
                    .timeout(FEEDBACK_TIMEOUT)
                    .send()
                    .await;
                if answer.is_ok_and(|response| response.status().is_success()) {
                    break;
                }
                if Instant::now() >= deadline {
                    bail!(
                        "{url}/health is not well after {} s; is the stack up?",
                        patience.as_secs()
                    );
                }
                tokio::time::sleep(Duration::from_millis(300)).await;
            }
        }
        Ok(())
    }

    /// Asks for the rest of the line after `context(chars)`, with a context that the server takes. Returns the suggestion
    /// and how often the context had to be shortened.
    pub async fn complete(
        &self,
        asker: &Asker,
        context: impl Fn(usize) -> String,
    ) -> Result<(Suggestion, u32), Failed> {
        let mut chars = CONTEXT_CHARS_MAX;
        let mut shortenings = 0;
        loop {
            let request = CompletionRequest {
                model: &self.endpoints.policy,
                prompt: context(chars) + CUT,
                max_tokens: SUGGESTION_TOKENS_MAX,
                temperature: self.temperature,
                user: &asker.user,
                session_id: asker.session_id,
                surface: SURFACE,
            };
            let url = format!("{}/v1/completions", self.endpoints.serve);
            let sent = self.post(url, COMPLETION_TIMEOUT).json(&request).send().await;
            let response = sent.map_err(|error| failed("completion", kind_of(&error)))?;
            let status = response.status();
            if status.is_success() {
                let answer = response.json::<Completion>().await;
                let completion = answer.map_err(|error| failed("completion", kind_of(&error)))?;
                let suggestion = completion.choices.into_iter().next();
                return suggestion
                    .map(|s| (s, shortenings))
                    .ok_or_else(|| failed("completion", "no choice"));
            }
            let problem = response.json::<Problem>().await.unwrap_or_default();
            if problem.type_.ends_with(TOO_LONG) && shortenings < SHORTENINGS_MAX {
                chars = chars * 3 / 4;
                shortenings += 1;
                continue;
            }
            return Err(refused("completion", status, &problem));
        }
    }

    /// Tells that the developer accepted or rejected a suggestion, at `time`.
    pub async fn tell(&self, generation_id: Uuid, accept: bool, time: OffsetDateTime) -> Told {
        let mut told = Told::default();
        let time = match time.format(&Rfc3339) {
            Ok(time) => time,
            Err(_) => {
                return Told {
                    failed: Some(failed("feedback", "no time")),
                    ..told
                };
            }
        };
        let request = FeedbackRequest {
            id: Uuid::now_v7(),
            generation_id,
            metric_name: "accept",
            value: accept,
            time,
        };
        let deadline = Instant::now() + FEEDBACK_PATIENCE;
        let mut backoff = BACKOFF_MIN;
        loop {
            let url = format!("{}/v1/feedback", self.endpoints.ingest);
            match self.post(url, FEEDBACK_TIMEOUT).json(&request).send().await {
                Ok(response) if response.status().is_success() => return told,
                Ok(response) if !is_transient(response.status()) => {
                    let status = response.status();
                    let problem = response.json::<Problem>().await.unwrap_or_default();
                    told.failed = Some(refused("feedback", status, &problem));
                    return told;
                }
                Ok(response) => backoff = backoff.max(retry_after(&response)),
                Err(_) => {}
            }
            if Instant::now() + backoff >= deadline {
                told.failed = Some(failed("feedback", "gave up"));
                return told;
            }
            tokio::time::sleep(backoff).await;
            backoff = (backoff * 2).min(BACKOFF_MAX);
            told.retries += 1;
        }
    }
}

fn failed(call: &'static str, kind: impl Into<String>) -> Failed {
    Failed {
        call,
        kind: kind.into(),
    }
}

fn is_transient(status: StatusCode) -> bool {
    status.is_server_error() || matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT)
}

/// The server's wish in whole seconds, if it has one.
fn retry_after(response: &Response) -> Duration {
    let header = response.headers().get(reqwest::header::RETRY_AFTER);
    let seconds = header.and_then(|value| value.to_str().ok()?.parse().ok()).unwrap_or(0);
    Duration::from_secs(seconds).min(BACKOFF_MAX)
}

fn kind_of(error: &reqwest::Error) -> &'static str {
    if error.is_timeout() {
        "timeout"
    } else if error.is_connect() {
        "no connection"
    } else if error.is_decode() {
        "answer not understood"
    } else {
        "connection lost"
    }
}

fn refused(call: &'static str, status: StatusCode, problem: &Problem) -> Failed {
    tracing::debug!(call, %status, title = problem.title, detail = problem.detail, "refused");
    failed(call, format!("http {}", status.as_u16()))
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use axum::{Json, Router, http, routing::post};
    use serde_json::{Value, json};

    use super::*;

    /// A server that answers every POST with `answer` and keeps the bodies.
    async fn serve(answer: fn(usize, &Value) -> (u16, Value)) -> (Client, Arc<Mutex<Vec<Value>>>) {
        let bodies = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&bodies);
        let handler = post(move |Json(body): Json<Value>| async move {
            let mut kept = kept.lock().unwrap();
            kept.push(body);
            let (status, answer) = answer(kept.len(), &kept[kept.len() - 1]);
            (http::StatusCode::from_u16(status).unwrap(), Json(answer))
        });
        let router = Router::new()
            .route("/v1/completions", handler.clone())
            .route("/v1/feedback", handler);
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, router).await });
        let endpoints = Endpoints {
            serve: url.clone(),
            ingest: url.clone(),
            control: url,
            api_key: None,
            policy: "demo".to_owned(),
            base: std::path::PathBuf::new(),
            store: String::new(),
            keys: std::path::PathBuf::new(),
            surface: ingest::reward::Definition::completion(),
            state_dir: std::path::PathBuf::new(),
        };
        (Client::new(endpoints, 1.0).unwrap(), bodies)
    }

    fn asker() -> Asker {
        Asker {
            user: "s1-u0001".to_owned(),
            session_id: Uuid::now_v7(),
        }
    }

    #[tokio::test]
    async fn feedback_is_repeated_with_the_same_id_and_body_until_it_is_acknowledged() {
        let (client, bodies) = serve(|n, _| (if n < 3 { 503 } else { 200 }, json!({}))).await;
        let told = client.tell(Uuid::now_v7(), true, OffsetDateTime::now_utc()).await;
        assert!(told.failed.is_none());
        assert_eq!(told.retries, 2);
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
        let told = client.tell(Uuid::now_v7(), false, OffsetDateTime::now_utc()).await;
        assert_eq!(told.failed.unwrap().to_string(), "feedback: http 409");
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
        let (suggestion, shortenings) = client.complete(&asker(), |chars| "a".repeat(chars)).await.unwrap();
        assert_eq!(
            (suggestion.version, suggestion.arm.as_str(), shortenings),
            (3, "base", 2)
        );
        let bodies = bodies.lock().unwrap();
        assert_eq!(bodies[2]["prompt"], json!("a".repeat(CONTEXT_CHARS_MAX * 9 / 16) + CUT));
        assert_eq!(
            (&bodies[1]["surface"], &bodies[1]["max_tokens"]),
            (&json!("completion"), &json!(16))
        );
    }

    #[tokio::test]
    async fn a_completion_that_fails_is_named_and_not_asked_for_again() {
        let (client, bodies) = serve(|_, _| (503, json!({"title": "the log is away"}))).await;
        let failed = client.complete(&asker(), |_| String::new()).await.unwrap_err();
        assert_eq!(failed.to_string(), "completion: http 503");
        assert_eq!(bodies.lock().unwrap().len(), 1);
    }
}
