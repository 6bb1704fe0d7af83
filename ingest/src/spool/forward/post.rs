//! One request to the upstream, and what its answer means. Only an answer that names the event counts as taken: a proxy's
//! or a stranger's 200 does not.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context;
use reqwest::StatusCode;
use reqwest::header::{CONTENT_TYPE, RETRY_AFTER};
use serde_json::Value;

use super::super::Options;
use super::super::request::{MEDIA_TYPE, PATH, Request};

/// Of an answer; problem documents are small.
const ANSWER_BYTES_MAX: usize = 64 * 1024;

pub(super) enum Outcome {
    /// Acknowledged by the upstream, which is as good as its word.
    Taken,
    /// It never will be.
    Refused { status: u16, problem: Value },
    /// It may be later.
    Later { retry_after: Option<Duration> },
}

pub(super) struct Upstream {
    http: reqwest::Client,
    url: String,
    api_key: Option<String>,
    /// Whether the last thing said about it is that it takes nothing: once told is enough.
    away: AtomicBool,
}

impl Upstream {
    pub(super) fn new(url: &str, options: &Options) -> anyhow::Result<Self> {
        let http = reqwest::Client::builder()
            .timeout(Duration::from_secs_f64(options.request_timeout_seconds))
            // A redirected POST becomes a GET, and a key goes to whoever asks for it.
            .redirect(reqwest::redirect::Policy::none())
            .build()
            .context("set up the client of the upstream")?;
        Ok(Self {
            http,
            url: url.trim_end_matches('/').to_owned(),
            api_key: options.api_key.clone(),
            away: AtomicBool::new(false),
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
            Err(error) => return self.later(&format!("{:#}", anyhow::Error::new(error.without_url())), None),
        };
        let status = answer.status();
        let retry_after = answer.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok());
        let retry_after = retry_after.and_then(|seconds| seconds.trim().parse().ok());
        let retry_after = retry_after.map(Duration::from_secs);
        let body = match read(answer).await {
            Ok(body) => body,
            Err(error) => return self.later(&format!("{:#}", anyhow::Error::new(error.without_url())), None),
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
                    return self.later(
                        &format!("{status} without the event's id: is the upstream's URL that of an ingest role?"),
                        None,
                    );
                }
                if self.away.swap(false, Ordering::Relaxed) {
                    tracing::info!("the upstream takes events again");
                }
                Outcome::Taken
            }
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => self.later(
                &format!("{status}: is spool.api_key a key of the upstream, with the role serving?"),
                retry_after,
            ),
            StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED => self.later(
                &format!("{status}: is the upstream's URL that of an ingest role?"),
                retry_after,
            ),
            _ => self.later(status.as_str(), retry_after),
        }
    }

    fn later(&self, why: &str, retry_after: Option<Duration>) -> Outcome {
        if !self.away.swap(true, Ordering::Relaxed) {
            tracing::warn!(why, "the upstream takes no events, will be tried again");
        }
        metrics::counter!("springtide_spool_tries_failed_total").increment(1);
        Outcome::Later { retry_after }
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
