//! A client of the control API. Problem documents become errors.

use std::time::Duration;

use anyhow::{Context, bail};
use reqwest::{Method, RequestBuilder, Response};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::config::Config;

const TIMEOUT: Duration = Duration::from_secs(30);
/// Of a query that may read every generation, and of a file.
const LONG_TIMEOUT: Duration = Duration::from_secs(3600);

/// Calls `springtide control`.
pub struct ControlClient {
    http: reqwest::Client,
    url: String,
    api_key: Option<String>,
}

impl ControlClient {
    pub fn new(config: &Config) -> anyhow::Result<Self> {
        let http = edge::tls::client()
            .timeout(TIMEOUT)
            .build()
            .context("set up HTTP client")?;
        Ok(Self {
            http,
            url: config.control_url(),
            api_key: config.client.api_key.clone(),
        })
    }

    pub async fn get<T: DeserializeOwned>(&self, path: &str, query: &[(&str, &str)]) -> anyhow::Result<T> {
        self.send(self.request(Method::GET, path).query(query)).await
    }

    pub async fn post<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> anyhow::Result<T> {
        self.send(self.request(Method::POST, path).json(body)).await
    }

    /// [`Self::post`] for what may take long.
    pub async fn post_and_wait<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> anyhow::Result<T> {
        let request = self.request(Method::POST, path).timeout(LONG_TIMEOUT);
        self.send(request.json(body)).await
    }

    /// [`Self::get`] for what may take long.
    pub async fn get_and_wait<T: DeserializeOwned>(&self, path: &str) -> anyhow::Result<T> {
        self.send(self.request(Method::GET, path).timeout(LONG_TIMEOUT)).await
    }

    /// An answer that is no JSON document, to be read in parts.
    pub async fn download(&self, path: &str, query: &[(&str, &str)]) -> anyhow::Result<Response> {
        let request = self.request(Method::GET, path).timeout(LONG_TIMEOUT).query(query);
        let response = request.send().await.with_context(|| self.unreachable())?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let body = response.bytes().await.context("read the response")?;
        bail!("{status}: {}", problem(&body));
    }

    fn unreachable(&self) -> String {
        format!("reach the control role at {}; is it running?", self.url)
    }

    pub async fn put<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> anyhow::Result<T> {
        self.send(self.request(Method::PUT, path).json(body)).await
    }

    fn request(&self, method: Method, path: &str) -> RequestBuilder {
        let request = self.http.request(method, format!("{}{path}", self.url));
        match &self.api_key {
            Some(key) => request.bearer_auth(key),
            None => request,
        }
    }

    async fn send<T: DeserializeOwned>(&self, request: RequestBuilder) -> anyhow::Result<T> {
        let response = request.send().await.with_context(|| self.unreachable())?;
        let status = response.status();
        let body = response.bytes().await.context("read the response")?;
        if status.is_success() {
            return serde_json::from_slice(&body).context("parse the response");
        }
        bail!("{status}: {}", problem(&body));
    }
}

/// The detail or title of an `application/problem+json` body, else the body.
fn problem(body: &[u8]) -> String {
    let text = || String::from_utf8_lossy(body).into_owned();
    let Ok(problem) = serde_json::from_slice::<Value>(body) else {
        return text();
    };
    match (problem["title"].as_str(), problem["detail"].as_str()) {
        (_, Some(detail)) => detail.to_owned(),
        (Some(title), None) => title.to_owned(),
        (None, None) => text(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_the_detail_of_the_problem_document() {
        let body = br#"{"title": "There is no such thing", "detail": "no version 9"}"#;
        assert_eq!(problem(body), "no version 9");
        assert_eq!(problem(br#"{"title": "Too much at once"}"#), "Too much at once");
        assert_eq!(problem(b"<html>"), "<html>");
    }
}
