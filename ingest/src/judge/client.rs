//! Asks a judge over HTTP.

use std::time::{Duration, Instant};

use anyhow::Context;
use reqwest::StatusCode;
use reqwest::header::RETRY_AFTER;

use super::protocol::{Fault, Verdict};
use super::{Judge, Options};

/// Bytes of an answer. A model that thinks aloud writes a lot, but not that much.
const ANSWER_BYTES_MAX: usize = 1024 * 1024;
/// Characters of a reason.
const REASON_MAX: usize = 200;

/// The client of a judge. Warns if texts would travel unencrypted.
pub(crate) fn client(judge: &Judge) -> anyhow::Result<reqwest::Client> {
    if leaves_the_machine_unencrypted(&judge.options) {
        tracing::warn!(
            judge = judge.name(),
            "this judge is on another machine and its url is http: texts of users and the key travel unencrypted"
        );
    }
    let timeout = judge.options.timeout();
    edge::tls::client_of_others()
        .timeout(timeout)
        // A redirect may send the text and the key to another host.
        .redirect(reqwest::redirect::Policy::none())
        .build()
        .with_context(|| format!("set up the client of the judge {:?}", judge.name()))
}

fn leaves_the_machine_unencrypted(options: &Options) -> bool {
    let Ok(url) = reqwest::Url::parse(&options.url) else {
        return false;
    };
    let host = url.host_str().unwrap_or_default().trim_matches(['[', ']']);
    let is_loopback = match host.parse::<std::net::IpAddr>() {
        Ok(address) => address.is_loopback(),
        Err(_) => host == "localhost",
    };
    url.scheme() == "http" && !is_loopback
}

impl Judge {
    /// Asks about a text as often as there are votes, one after the other. Asks for a faulty vote once
    /// more, so that many votes do not fail for one. With two faults, all votes fail.
    pub(crate) async fn ask(&self, http: &reqwest::Client, text: &str) -> Result<Verdict, Fault> {
        let request = self.request(text);
        let mut votes = Vec::new();
        for _ in 0..self.options.votes {
            let mut started = Instant::now();
            let mut vote = self.vote(http, &request).await;
            if self.options.votes > 1 && vote.as_ref().is_err_and(|fault| !fault.is_of_endpoint) {
                started = Instant::now();
                vote = self.vote(http, &request).await;
            }
            votes.push(vote?);
            let name = self.name().to_owned();
            metrics::histogram!("springtide_judge_seconds", "judge" => name).record(started.elapsed().as_secs_f64());
        }
        let verdict = Verdict::of(self.question, votes).ok_or_else(|| Fault::new("malformed", "there are no votes"))?;
        let name = self.name().to_owned();
        metrics::histogram!("springtide_judge_disagreement", "judge" => name)
            .record(verdict.disagreement(self.question));
        Ok(verdict)
    }

    async fn vote(&self, http: &reqwest::Client, request: &serde_json::Value) -> Result<f64, Fault> {
        let url = format!("{}/chat/completions", self.options.url.trim_end_matches('/'));
        let mut post = http.post(url).json(request);
        if let Some(key) = &self.options.api_key {
            post = post.bearer_auth(&key.0);
        }
        let answer = post.send().await.map_err(broken)?;
        let status = answer.status();
        if !status.is_success() {
            let code = match status {
                StatusCode::TOO_MANY_REQUESTS => "rate_limited",
                status if status.is_server_error() => "unavailable",
                _ => "http_error",
            };
            let waits = matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE);
            let retry_after = answer.headers().get(RETRY_AFTER).filter(|_| waits);
            let retry_after = retry_after.and_then(|value| value.to_str().ok()?.trim().parse().ok());
            return Err(Fault {
                retry_after: retry_after.map(Duration::from_secs),
                // All else, such as a wrong key, is the same for every text.
                is_of_endpoint: !matches!(
                    status,
                    StatusCode::BAD_REQUEST | StatusCode::PAYLOAD_TOO_LARGE | StatusCode::UNPROCESSABLE_ENTITY
                ),
                // Not the body, which may quote the text.
                ..Fault::new(code, format!("HTTP {}", status.as_u16()))
            });
        }
        self.read(&read(answer).await?)
    }
}

async fn read(mut answer: reqwest::Response) -> Result<Vec<u8>, Fault> {
    let mut body = Vec::new();
    while let Some(chunk) = answer.chunk().await.map_err(broken)? {
        if body.len() + chunk.len() > ANSWER_BYTES_MAX {
            let reason = format!("the answer has more than {ANSWER_BYTES_MAX} bytes");
            return Err(Fault::new("malformed", reason));
        }
        body.extend(chunk);
    }
    Ok(body)
}

/// Errors of the connection say nothing about what it carried.
fn broken(error: reqwest::Error) -> Fault {
    let code = if error.is_timeout() { "timeout" } else { "unavailable" };
    let reason = format!("{:#}", anyhow::Error::new(error.without_url()));
    Fault {
        is_of_endpoint: true,
        ..Fault::new(code, reason.chars().take(REASON_MAX).collect::<String>())
    }
}
