//! Sends one request to the upstream and interprets the answer. A 200 counts only if it names the
//! event: a proxy or another server may return 200 too.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context;
use reqwest::StatusCode;
use reqwest::header::{CONTENT_TYPE, RETRY_AFTER};
use serde_json::Value;

use super::super::Options;
use super::super::request::{MEDIA_TYPE, PATH, Request};

/// Bytes that are read of an answer. Problem documents are small.
const ANSWER_BYTES_MAX: usize = 64 * 1024;

pub(super) enum Outcome {
    Accepted,
    /// Permanently.
    Refused {
        status: u16,
        problem: Value,
    },
    Retry {
        after: Option<Duration>,
    },
}

pub(super) struct Upstream {
    http: reqwest::Client,
    url: String,
    api_key: Option<String>,
    /// Whether the last request failed, so that each outage is logged once.
    failing: AtomicBool,
}

impl Upstream {
    pub(super) fn new(url: &str, options: &Options) -> anyhow::Result<Self> {
        let http = reqwest::Client::builder()
            .timeout(Duration::from_secs_f64(options.request_timeout_seconds))
            // A redirect would turn the POST into a GET and may send the key to another host.
            .redirect(reqwest::redirect::Policy::none())
            .build()
            .context("set up the client of the upstream")?;
        Ok(Self {
            http,
            url: url.trim_end_matches('/').to_owned(),
            api_key: options.api_key.clone(),
            failing: AtomicBool::new(false),
        })
    }

    pub(super) async fn post(&self, request: &Request) -> Outcome {
        let mut post = self
            .http
            .post(format!("{}{PATH}", self.url))
            .header(CONTENT_TYPE, MEDIA_TYPE)
            .json(&request.body);
        if let Some(key) = &self.api_key {
            post = post.bearer_auth(key);
        }
        let answer = match post.send().await {
            Ok(answer) => answer,
            Err(error) => return self.failed(error),
        };
        let status = answer.status();
        let retry_after = answer.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok());
        let retry_after = retry_after.and_then(|seconds| seconds.trim().parse().ok());
        let retry_after = retry_after.map(Duration::from_secs);
        let body = match read(answer).await {
            Ok(body) => body,
            Err(error) => return self.failed(error),
        };
        match status {
            StatusCode::BAD_REQUEST
            | StatusCode::CONFLICT
            | StatusCode::PAYLOAD_TOO_LARGE
            | StatusCode::UNPROCESSABLE_ENTITY => Outcome::Refused {
                status: status.as_u16(),
                problem: serde_json::from_slice(&body)
                    .unwrap_or_else(|_| Value::String(String::from_utf8_lossy(&body).into_owned())),
            },
            status if status.is_success() => {
                let named = serde_json::from_slice::<Value>(&body).is_ok_and(|answer| answer["id"] == *request.id);
                if !named {
                    let why = format!("{status} without the event's id: is the upstream an ingest role?");
                    return self.retry(&why, None);
                }
                if self.failing.swap(false, Ordering::Relaxed) {
                    tracing::info!("the upstream accepts events again");
                }
                Outcome::Accepted
            }
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                let why = format!("{status}: is spool.api_key a key of the upstream with the role serving?");
                self.retry(&why, retry_after)
            }
            StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED => {
                self.retry(&format!("{status}: is the upstream an ingest role?"), retry_after)
            }
            _ => self.retry(status.as_str(), retry_after),
        }
    }

    fn failed(&self, error: reqwest::Error) -> Outcome {
        self.retry(&format!("{:#}", anyhow::Error::new(error.without_url())), None)
    }

    fn retry(&self, why: &str, after: Option<Duration>) -> Outcome {
        if !self.failing.swap(true, Ordering::Relaxed) {
            tracing::warn!(why, "the upstream does not accept events, trying again");
        }
        metrics::counter!("springtide_spool_tries_failed_total").increment(1);
        Outcome::Retry { after }
    }
}

async fn read(mut answer: reqwest::Response) -> reqwest::Result<Vec<u8>> {
    let mut body = Vec::new();
    while body.len() < ANSWER_BYTES_MAX
        && let Some(chunk) = answer.chunk().await?
    {
        body.extend(chunk);
    }
    body.truncate(ANSWER_BYTES_MAX);
    Ok(body)
}
