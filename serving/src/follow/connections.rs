//! Connections to the engine behind a follower. Each shows the name of the engine's weights before
//! a request goes over it, and belongs to one process to its end. So an engine that has restarted
//! gets no request before its probe, however soon it is back.

use anyhow::{Context, ensure};
use axum::body::Body;
use axum::http::{Request, header};
use http_body_util::{BodyExt as _, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use std::io::{self, ErrorKind};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};

/// How long a new connection may take to show the name of the weights. A busy engine may answer late.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
/// Connections kept for the next requests.
const IDLE_MAX: usize = 64;
/// How long they are kept. vLLM and SGLang close them after 5 s.
const IDLE_TIME_MAX: Duration = Duration::from_secs(2);
/// Of the answer that names the weights.
const LABEL_BYTES_MAX: usize = 64 << 10;

/// Where the engine listens.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Address {
    Socket(PathBuf),
    /// `HOST:PORT`.
    Tcp(String),
}

pub struct Connections {
    address: Address,
    /// The route that names the engine's weights.
    label_path: &'static str,
    api_key: Option<String>,
    /// As [`CONNECT_TIMEOUT`].
    pub(super) connect_timeout: Duration,
    idle: Mutex<Vec<Connection>>,
}

pub struct Connection {
    sender: SendRequest<Body>,
    /// What the engine called its weights when this connection began.
    weights: String,
    used: Instant,
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the engine holds {0:?}, which was not probed")]
    OtherWeights(String),
    /// Nothing listens there.
    #[error("no engine takes connections at {0}: {1}")]
    Refused(String, io::Error),
    /// It takes connections and does not say what it holds: a busy one does not, for a while.
    #[error("{0:#}")]
    Silent(#[from] anyhow::Error),
}

impl Connections {
    /// `url`: `unix:/PATH` or `http://HOST:PORT`.
    pub fn new(label_path: &'static str, url: &str, api_key: Option<String>) -> anyhow::Result<Self> {
        let address = match (url.strip_prefix("unix:"), url.strip_prefix("http://")) {
            (Some(path), _) => Address::Socket(path.into()),
            (_, Some(host)) => Address::Tcp(host.trim_end_matches('/').to_owned()),
            _ => anyhow::bail!(
                "follow.engine_url is {url:?}; a follower is on the engine's machine: give unix:/PATH or http://127.0.0.1:PORT"
            ),
        };
        Ok(Connections {
            address,
            label_path,
            api_key,
            connect_timeout: CONNECT_TIMEOUT,
            idle: Mutex::default(),
        })
    }

    /// A connection to an engine that has named its weights `weights`. No request goes over it at
    /// present.
    pub async fn get(&self, weights: &str) -> Result<Connection, Error> {
        while let Some(mut idle) = self.pop() {
            if idle.weights == weights && idle.used.elapsed() < IDLE_TIME_MAX && idle.sender.ready().await.is_ok() {
                return Ok(idle);
            }
        }
        let connected = tokio::time::timeout(self.connect_timeout, self.connect()).await;
        let connection = connected.context("the engine does not answer in time")??;
        match connection.weights == weights {
            true => Ok(connection),
            false => Err(Error::OtherWeights(connection.weights)),
        }
    }

    /// Keeps a connection whose answer was read to its end.
    pub fn put_back(&self, mut connection: Connection) {
        connection.used = Instant::now();
        let mut idle = self.lock();
        if idle.len() < IDLE_MAX {
            idle.push(connection);
        }
    }

    fn pop(&self) -> Option<Connection> {
        self.lock().pop()
    }

    /// Sends a request of an allowed path. Headers that matter only between two hops are set here.
    pub async fn send(
        &self,
        connection: &mut Connection,
        mut request: Request<Body>,
    ) -> hyper::Result<hyper::Response<Incoming>> {
        let headers = request.headers_mut();
        headers.insert(header::HOST, header::HeaderValue::from_static("localhost"));
        let authorization = self.api_key.as_ref().map(|key| format!("Bearer {key}"));
        if let Some(Ok(value)) = authorization.map(header::HeaderValue::try_from) {
            headers.insert(header::AUTHORIZATION, value);
        }
        connection.sender.send_request(request).await
    }

    async fn connect(&self) -> Result<Connection, Error> {
        let sender = match &self.address {
            Address::Socket(path) => {
                let stream = UnixStream::connect(path).await;
                start(stream.map_err(|error| not_connected(path.display().to_string(), error))?).await?
            }
            Address::Tcp(host) => {
                let stream = TcpStream::connect(host).await;
                let stream = stream.map_err(|error| not_connected(host.clone(), error))?;
                stream.set_nodelay(true).context("send small requests at once")?;
                start(stream).await?
            }
        };
        let mut connection = Connection {
            sender,
            weights: String::new(),
            used: Instant::now(),
        };
        connection.weights = self.label(&mut connection).await.context("ask for the weights' name")?;
        connection.sender.ready().await.context("reuse the connection")?;
        Ok(connection)
    }

    async fn label(&self, connection: &mut Connection) -> anyhow::Result<String> {
        #[derive(Deserialize)]
        struct Info {
            weight_version: String,
        }
        let request = Request::get(self.label_path).body(Body::empty());
        let answer = self.send(connection, request.context("make a request")?).await?;
        let status = answer.status();
        ensure!(status.is_success(), "{} answered {status}", self.label_path);
        let body = Limited::new(answer.into_body(), LABEL_BYTES_MAX).collect().await;
        let body = body
            .map_err(|error| anyhow::anyhow!("read the answer: {error}"))?
            .to_bytes();
        let info: Info = serde_json::from_slice(&body).context("read the answer")?;
        Ok(info.weight_version)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Connection>> {
        // a list of connections is consistent after every statement
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A full queue of connections is no refusal.
fn not_connected(address: String, error: io::Error) -> Error {
    match error.kind() {
        ErrorKind::ConnectionRefused | ErrorKind::NotFound => Error::Refused(address, error),
        _ => anyhow::Error::new(error)
            .context(format!("connect to {address}"))
            .into(),
    }
}

async fn start<S>(stream: S) -> anyhow::Result<SendRequest<Body>>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let (sender, connection) = handshake(TokioIo::new(stream)).await.context("speak HTTP")?;
    tokio::spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "a connection to the engine failed");
        }
    });
    Ok(sender)
}
