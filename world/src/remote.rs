//! Worlds of somebody else: a provider that speaks the API of `springtide world` over HTTP. Whoever has
//! more worlds than this machine serves the four routes of [`crate::service`].

use std::time::Duration;

use async_trait::async_trait;
use reqwest::{RequestBuilder, Response, StatusCode};
use serde::Deserialize;
use uuid::Uuid;

use crate::provider::{Error, Provider, World};
use crate::service::body::{Create, Created, Ran, Run};
use crate::{Command, Output};

/// For requests that run nothing. Beside its wall limit, for one that runs a command.
const TIME_MAX: Duration = Duration::from_secs(60);

/// A provider behind a URL.
#[derive(Debug, Clone)]
pub struct Remote {
    client: reqwest::Client,
    /// Without a slash at its end.
    url: String,
    key: Option<String>,
    image: Option<String>,
    ttl_seconds: u64,
}

#[derive(Debug)]
struct RemoteWorld {
    remote: Remote,
    id: Uuid,
}

impl Remote {
    /// `url` is the base, before `/v1`. A world that is not destroyed ends after `ttl_seconds`.
    pub fn new(
        client: reqwest::Client,
        url: &str,
        key: Option<String>,
        image: Option<String>,
        ttl_seconds: u64,
    ) -> Self {
        Self {
            client,
            url: url.trim_end_matches('/').to_owned(),
            key,
            image,
            ttl_seconds,
        }
    }

    async fn send(&self, request: RequestBuilder, time_max: Duration) -> Result<Response, Error> {
        let request = match &self.key {
            Some(key) => request.bearer_auth(key),
            None => request,
        };
        let sent = request.timeout(time_max).send().await;
        let response =
            sent.map_err(|error| Error::Lost(format!("{} does not answer: {}", self.url, error.without_url())))?;
        if response.status().is_success() {
            return Ok(response);
        }
        let status = response.status();
        let detail = detail(response).await;
        Err(match status {
            StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS => Error::Full(detail),
            StatusCode::GONE | StatusCode::NOT_FOUND => Error::Lost(detail),
            StatusCode::BAD_REQUEST
            | StatusCode::CONFLICT
            | StatusCode::PAYLOAD_TOO_LARGE
            | StatusCode::UNPROCESSABLE_ENTITY => Error::Refused(detail),
            status => Error::Unusable(format!("{} answers {status}: {detail}", self.url)),
        })
    }
}

/// What a problem document says.
async fn detail(response: Response) -> String {
    #[derive(Deserialize)]
    struct Document {
        detail: Option<String>,
        title: Option<String>,
    }
    let document = response.json::<Document>().await.ok();
    let said = document.and_then(|document| document.detail.or(document.title));
    said.unwrap_or_else(|| "no reason".to_owned())
}

fn unreadable(error: reqwest::Error) -> Error {
    Error::Lost(format!(
        "the answer of its provider is unreadable: {}",
        error.without_url()
    ))
}

#[async_trait]
impl Provider for Remote {
    async fn create(&self) -> Result<Box<dyn World>, Error> {
        let body = Create {
            image: self.image.clone(),
            ttl_seconds: Some(self.ttl_seconds),
        };
        let request = self.client.post(format!("{}/v1/worlds", self.url)).json(&body);
        let created: Created = self.send(request, TIME_MAX).await?.json().await.map_err(unreadable)?;
        Ok(Box::new(RemoteWorld {
            remote: self.clone(),
            id: created.id,
        }))
    }
}

#[async_trait]
impl World for RemoteWorld {
    async fn run(&mut self, command: &Command) -> Result<Output, Error> {
        let url = format!("{}/v1/worlds/{}/run", self.remote.url, self.id);
        let request = self.remote.client.post(url).json(&Run::from(command));
        let response = self
            .remote
            .send(request, command.limits.wall.saturating_add(TIME_MAX))
            .await?;
        let ran: Ran = response.json().await.map_err(unreadable)?;
        Ok(ran.into())
    }

    async fn destroy(self: Box<Self>) -> Result<(), Error> {
        let request = self
            .remote
            .client
            .delete(format!("{}/v1/worlds/{}", self.remote.url, self.id));
        self.remote.send(request, TIME_MAX).await.map(drop)
    }
}
