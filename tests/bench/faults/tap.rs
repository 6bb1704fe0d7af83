//! A proxy in front of one engine. It sees every command and request on its way to the engine, so
//! that a fault can be timed by them, and checks that no request comes before a probe.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::Context;
use serde::Serialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::broadcast;

/// Far above a request with a prompt of this benchmark.
const HEAD_BYTES_MAX: usize = 64 << 10;
/// The tenant of the gateway's own probes, as the engine is told.
const PROBE: &str = "\"tenant-probe\"";

/// What passes, in the order of a change of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    Pause,
    Start,
    Patch,
    Folder,
    Finish,
    Resume,
    Probe,
    /// A caller's request.
    Request,
    /// Health, names of weights.
    Other,
}

impl Step {
    fn of(path: &str, body: &str) -> Self {
        match path.split('?').next().unwrap_or(path) {
            "/pause" => Step::Pause,
            "/start_weight_update" => Step::Start,
            "/update_weights" if body.contains("\"patch\"") => Step::Patch,
            "/update_weights" => Step::Folder,
            "/finish_weight_update" => Step::Finish,
            "/resume" => Step::Resume,
            "/inference/v1/generate" if body.contains(PROBE) => Step::Probe,
            "/inference/v1/generate" => Step::Request,
            _ => Step::Other,
        }
    }
}

/// What passed so far.
#[derive(Debug, Default, Clone)]
pub struct Seen {
    pub steps: BTreeMap<Step, u64>,
    /// Requests that came after a change or a restart and before a probe.
    pub unproven_requests: u64,
    probed: bool,
    last_change: Option<Step>,
}

#[derive(Debug)]
pub struct Tap {
    engine: usize,
    upstream: SocketAddr,
    seen: Mutex<Seen>,
    passed: broadcast::Sender<(usize, Step)>,
}

impl Tap {
    /// Forwards what comes to the listener to `upstream`. Each step is also sent to `passed`.
    pub fn start(
        engine: usize,
        listener: TcpListener,
        upstream: SocketAddr,
        passed: broadcast::Sender<(usize, Step)>,
    ) -> Arc<Self> {
        let seen = Mutex::new(Seen::default());
        let tap = Arc::new(Tap {
            engine,
            upstream,
            seen,
            passed,
        });
        let accepting = tap.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let tap = accepting.clone();
                tokio::spawn(async move {
                    // a broken connection is what the faults cause
                    let _ = tap.connection(client).await;
                });
            }
        });
        tap
    }

    /// The engine or the gateway was restarted: what was probed before counts no more.
    pub fn forget_probe(&self) {
        let mut seen = self.lock();
        seen.probed = false;
        seen.last_change = None;
    }

    pub fn seen(&self) -> Seen {
        self.lock().clone()
    }

    /// The last command of a change that has not ended.
    pub fn change_in_progress(&self) -> Option<Step> {
        self.lock().last_change
    }

    fn lock(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn connection(&self, client: TcpStream) -> anyhow::Result<()> {
        client.set_nodelay(true)?;
        // an engine that is down refuses the connection; here it is closed at once
        let server = TcpStream::connect(self.upstream).await?;
        server.set_nodelay(true)?;
        let (from_client, mut to_client) = client.into_split();
        let (mut from_server, to_server) = server.into_split();
        tokio::select! {
            _ = tokio::io::copy(&mut from_server, &mut to_client) => Ok(()),
            result = self.requests(from_client, to_server) => result,
        }
    }

    async fn requests(&self, mut from: OwnedReadHalf, mut to: OwnedWriteHalf) -> anyhow::Result<()> {
        let mut buffer = Vec::new();
        loop {
            let head = loop {
                if let Some(end) = buffer.windows(4).position(|four| four == b"\r\n\r\n") {
                    break end + 4;
                }
                anyhow::ensure!(buffer.len() < HEAD_BYTES_MAX, "a request's head is too long");
                if from.read_buf(&mut buffer).await? == 0 {
                    return Ok(());
                }
            };
            let text = String::from_utf8_lossy(&buffer[..head]).into_owned();
            let length = content_length(&text)?;
            while buffer.len() < head + length {
                anyhow::ensure!(from.read_buf(&mut buffer).await? > 0, "a request has no end");
            }
            let path = text.split(' ').nth(1).context("a request line")?;
            let step = Step::of(path, &String::from_utf8_lossy(&buffer[head..head + length]));
            self.record(step);
            to.write_all(&buffer[..head + length]).await?;
            // nobody may be waiting
            let _ = self.passed.send((self.engine, step));
            buffer.drain(..head + length);
        }
    }

    fn record(&self, step: Step) {
        let mut seen = self.lock();
        *seen.steps.entry(step).or_default() += 1;
        match step {
            Step::Pause | Step::Start | Step::Patch | Step::Folder | Step::Finish | Step::Resume => {
                seen.probed = false;
                seen.last_change = Some(step);
            }
            Step::Probe => {
                seen.probed = true;
                seen.last_change = Some(step);
            }
            Step::Request => {
                seen.unproven_requests += u64::from(!seen.probed);
                seen.last_change = None;
            }
            Step::Other => {}
        }
    }
}

fn content_length(head: &str) -> anyhow::Result<usize> {
    let headers = head.lines().filter_map(|line| line.split_once(':'));
    let mut lengths = headers.filter(|(name, _)| name.eq_ignore_ascii_case("content-length"));
    match lengths.next() {
        Some((_, length)) => length.trim().parse().context("a content length"),
        None => Ok(0),
    }
}

/// Where an engine is, and its tap.
pub struct Place {
    pub port: u16,
    pub tap: Arc<Tap>,
    pub address: SocketAddr,
}

impl Place {
    pub async fn new(engine: usize, passed: broadcast::Sender<(usize, Step)>) -> anyhow::Result<Self> {
        let [port] = edge::bind::free_ports()?;
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let tap = Tap::start(engine, listener, SocketAddr::from(([127, 0, 0, 1], port)), passed);
        Ok(Place { port, tap, address })
    }
}
