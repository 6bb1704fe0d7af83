//! Asks a judge over HTTP.

use std::time::Duration;

use anyhow::Context;
use reqwest::StatusCode;
use reqwest::header::RETRY_AFTER;

use super::ApiKey;
use super::protocol::Fault;

/// Bytes of an answer. A model that thinks aloud writes a lot, but not that much.
const ANSWER_BYTES_MAX: usize = 1024 * 1024;
/// Characters of a reason.
const REASON_MAX: usize = 200;

/// An endpoint with OpenAI's chat completions, and its client. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Endpoint {
    http: reqwest::Client,
    url: String,
    api_key: Option<ApiKey>,
}

impl Endpoint {
    /// `url`: before `/chat/completions`. `judge` is for messages. Warns if texts would travel
    /// unencrypted. `timeout` is that of one request.
    pub fn new(judge: &str, url: &str, api_key: Option<ApiKey>, timeout: Duration) -> anyhow::Result<Self> {
        if leaves_the_machine_unencrypted(url) {
            tracing::warn!(
                judge,
                "this judge is on another machine and its url is http: texts and the key travel unencrypted"
            );
        }
        let http = edge::tls::client_of_others()
            .timeout(timeout)
            // A redirect may send the text and the key to another host.
            .redirect(reqwest::redirect::Policy::none())
            .build()
            .with_context(|| format!("set up the client of the judge {judge:?}"))?;
        Ok(Self {
            http,
            url: format!("{}/chat/completions", url.trim_end_matches('/')),
            api_key,
        })
    }

    /// Whether a text is a base URL without a key in it.
    pub fn is_base_url(url: &str) -> bool {
        let Ok(url) = reqwest::Url::parse(url) else {
            return false;
        };
        let is_http = matches!(url.scheme(), "http" | "https");
        let is_base = url.has_host() && url.query().is_none() && url.fragment().is_none();
        // A user name may be a key, and this URL is printed.
        is_http && is_base && url.username().is_empty() && url.password().is_none()
    }

    /// Sends a request, and returns the body of the answer.
    pub async fn complete(&self, request: &serde_json::Value) -> Result<Vec<u8>, Fault> {
        let mut post = self.http.post(&self.url).json(request);
        if let Some(key) = &self.api_key {
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
        read(answer).await
    }
}

fn leaves_the_machine_unencrypted(url: &str) -> bool {
    let Ok(url) = reqwest::Url::parse(url) else {
        return false;
    };
    let host = url.host_str().unwrap_or_default().trim_matches(['[', ']']);
    let is_loopback = match host.parse::<std::net::IpAddr>() {
        Ok(address) => address.is_loopback(),
        Err(_) => host == "localhost",
    };
    url.scheme() == "http" && !is_loopback
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
