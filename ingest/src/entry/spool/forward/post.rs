//! Sends one request to the upstream and interprets the answer.
//!
//! A proxy or another server may answer instead. So a 200 counts only if it names the event, and a
//! refusal is final only if it is a problem document of Springtide. Anything else is tried again.
//! Then [`Retry::of_event`] says whether the answer may be about this event alone, such as a proxy's
//! 413: no other event may wait for ever until it changes.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context;
use reqwest::StatusCode;
use reqwest::header::{CONTENT_TYPE, HeaderName, RETRY_AFTER, SERVER};
use serde_json::Value;

use super::super::Options;
use super::super::request::{MEDIA_TYPE, PATH, Request};

/// Different reasons of an outage that are logged.
const REASONS_MAX: usize = 16;
/// Bytes that are read of an answer. Problem documents are small.
const ANSWER_BYTES_MAX: usize = 64 * 1024;

pub(super) enum Outcome {
    Accepted,
    /// Permanently.
    Refused {
        status: u16,
        problem: Value,
    },
    Retry(Retry),
}

pub(super) struct Retry {
    /// The upstream's Retry-After.
    pub after: Option<Duration>,
    /// Another event may be accepted all the same.
    pub of_event: bool,
}

pub(super) struct Upstream {
    http: reqwest::Client,
    url: String,
    api_key: Option<String>,
    /// Why requests failed since the last one that was accepted, so that each reason of an outage is
    /// logged once.
    failing: Mutex<BTreeSet<String>>,
}

impl Upstream {
    pub(super) fn new(url: &str, options: &Options) -> anyhow::Result<Self> {
        let timeout = Duration::from_secs_f64(options.request_timeout_seconds);
        let http = edge::tls::client()
            .timeout(timeout)
            // Shorter, because only a request that was connected in time may be too slow for its size.
            .connect_timeout(timeout / 2)
            // A redirect would turn the POST into a GET and may send the key to another host.
            .redirect(reqwest::redirect::Policy::none())
            .build()
            .context("set up the client of the upstream")?;
        Ok(Self {
            http,
            url: url.trim_end_matches('/').to_owned(),
            api_key: options.api_key.clone(),
            failing: Mutex::default(),
        })
    }

    /// The same upstream, with a log of its own about why requests fail.
    pub(super) fn apart(&self) -> Self {
        Self {
            http: self.http.clone(),
            url: self.url.clone(),
            api_key: self.api_key.clone(),
            failing: Mutex::default(),
        }
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
        let after = answer.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok());
        let after = after.and_then(|seconds| seconds.trim().parse().ok());
        let after = after.map(Duration::from_secs);
        let header = |name: HeaderName| answer.headers().get(name).and_then(|value| value.to_str().ok());
        let content_type = header(CONTENT_TYPE).unwrap_or("none").to_owned();
        let server = header(SERVER).unwrap_or("unknown").to_owned();
        let body = match read(answer).await {
            Ok(body) => body,
            Err(error) => return self.failed(error),
        };
        let own = own_problem(status, &content_type, &body);
        let of_event = may_be_of_event(status, own.is_some());
        let retry = |why: &str| self.retry(why, Retry { after, of_event });
        match (status, own) {
            (
                StatusCode::BAD_REQUEST
                | StatusCode::CONFLICT
                | StatusCode::PAYLOAD_TOO_LARGE
                | StatusCode::UNPROCESSABLE_ENTITY,
                Some(problem),
            ) => Outcome::Refused {
                status: status.as_u16(),
                problem,
            },
            (status, _) if status.is_success() => {
                let named = serde_json::from_slice::<Value>(&body).is_ok_and(|answer| answer["id"] == *request.id);
                if !named {
                    return retry(&format!(
                        "{status} without the event's id: is the upstream an ingest role?"
                    ));
                }
                if !std::mem::take(&mut *self.failing.lock().unwrap_or_else(PoisonError::into_inner)).is_empty() {
                    tracing::info!("the upstream accepts events again");
                }
                Outcome::Accepted
            }
            (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN, Some(_)) => {
                let scopes = "is spool.api_key a key of the upstream with the scopes feedback and generations?";
                retry(&format!("{status}: {scopes}"))
            }
            (StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED, _) => {
                retry(&format!("{status}: is the upstream an ingest role?"))
            }
            // Not the body, which may quote the event.
            (status, None) if status.is_client_error() => retry(&format!(
                "{status} that is not from an ingest role (server: {server}, content-type: {content_type}): does a \
                 proxy refuse the request?"
            )),
            _ => retry(status.as_str()),
        }
    }

    fn failed(&self, error: reqwest::Error) -> Outcome {
        let retry = Retry {
            after: None,
            // It may be too large to be sent in time.
            of_event: error.is_timeout() && !error.is_connect(),
        };
        self.retry(&format!("{:#}", anyhow::Error::new(error.without_url())), retry)
    }

    fn retry(&self, why: &str, retry: Retry) -> Outcome {
        if self.is_new_reason(why) {
            tracing::warn!(why, "the upstream does not accept events, trying again");
        }
        metrics::counter!("springtide_spool_tries_failed_total").increment(1);
        Outcome::Retry(retry)
    }

    fn is_new_reason(&self, why: &str) -> bool {
        let mut failing = self.failing.lock().unwrap_or_else(PoisonError::into_inner);
        failing.len() < REASONS_MAX && failing.insert(why.to_owned())
    }
}

/// Whether this answer, which is not final, may be about one event alone: a proxy that limits sizes
/// or looks into bodies, or a fault of the upstream. `own`: it is a problem document of Springtide.
fn may_be_of_event(status: StatusCode, own: bool) -> bool {
    match status {
        StatusCode::REQUEST_TIMEOUT | StatusCode::INTERNAL_SERVER_ERROR => true,
        StatusCode::UNAUTHORIZED
        | StatusCode::NOT_FOUND
        | StatusCode::METHOD_NOT_ALLOWED
        | StatusCode::PROXY_AUTHENTICATION_REQUIRED
        | StatusCode::TOO_MANY_REQUESTS => false,
        status => status.is_client_error() && !own,
    }
}

/// The answer, if it is a problem document of Springtide about this request.
fn own_problem(status: StatusCode, content_type: &str, body: &[u8]) -> Option<Value> {
    let media_type = content_type.split(';').next().unwrap_or_default().trim();
    if !media_type.eq_ignore_ascii_case("application/problem+json") {
        return None;
    }
    let problem: Value = serde_json::from_slice(body).ok()?;
    let is_own = problem["type"]
        .as_str()
        .is_some_and(|slug| slug.starts_with("/problems/"))
        && problem["status"].as_u64() == Some(status.as_u16().into());
    is_own.then_some(problem)
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
