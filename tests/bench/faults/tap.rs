//! A proxy in front of one engine. It sees every command and request on its way to the engine, so
//! that a fault can be timed by them, and checks that no request comes before a probe was answered.

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
    /// It gets a patch, or says what it holds, while it answers.
    Stage,
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
            "/update_weights" if ["\"stage\"", "\"prove\""].iter().any(|what| body.contains(what)) => Step::Stage,
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
    /// Requests that came after a change or a restart and before a probe was answered.
    pub unproven_requests: u64,
    /// A probe has been answered since the last change.
    probed: bool,
    /// A change has begun.
    paused: bool,
    /// Commands and restarts.
    changes: u64,
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
        seen.paused = false;
        seen.changes += 1;
        seen.last_change = None;
    }

    /// A probe was answered that began after so many changes. It says nothing of later ones.
    fn probe_answered(&self, changes: u64) {
        let mut seen = self.lock();
        seen.probed |= seen.changes == changes;
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
        let (from_client, to_client) = client.into_split();
        let (from_server, to_server) = server.into_split();
        let probe = Mutex::new(None);
        tokio::select! {
            result = self.answers(from_server, to_client, &probe) => result,
            result = self.requests(from_client, to_server, &probe) => result,
        }
    }

    /// Forwards answers. That of a probe counts before its last byte is passed on.
    async fn answers(
        &self,
        mut from: OwnedReadHalf,
        mut to: OwnedWriteHalf,
        probe: &Mutex<Option<Probe>>,
    ) -> anyhow::Result<()> {
        let mut buffer = Vec::new();
        while from.read_buf(&mut buffer).await? > 0 {
            {
                let mut waiting = probe.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(one) = waiting.as_mut() {
                    one.answer.extend_from_slice(&buffer);
                    if let Some(is_success) = ended(&one.answer) {
                        if is_success {
                            self.probe_answered(one.changes);
                        }
                        *waiting = None;
                    }
                }
            }
            to.write_all(&buffer).await?;
            buffer.clear();
        }
        Ok(())
    }

    async fn requests(
        &self,
        mut from: OwnedReadHalf,
        mut to: OwnedWriteHalf,
        probe: &Mutex<Option<Probe>>,
    ) -> anyhow::Result<()> {
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
            if step == Step::Probe {
                let changes = self.lock().changes;
                let answer = Vec::new();
                *probe.lock().unwrap_or_else(PoisonError::into_inner) = Some(Probe { changes, answer });
            }
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
            Step::Stage => {}
            // what surrounds `Stage`
            Step::Start | Step::Finish if !seen.paused => {}
            Step::Pause | Step::Start | Step::Patch | Step::Folder | Step::Finish | Step::Resume => {
                seen.paused = step != Step::Resume;
                seen.probed = false;
                seen.changes += 1;
                seen.last_change = Some(step);
            }
            Step::Probe => seen.last_change = Some(step),
            Step::Request => {
                seen.unproven_requests += u64::from(!seen.probed);
                seen.last_change = None;
            }
            Step::Other => {}
        }
    }
}

/// A probe that is not answered yet.
struct Probe {
    /// How many changes there were when it began.
    changes: u64,
    /// What came of its answer.
    answer: Vec<u8>,
}

/// Whether an HTTP answer was a success. `None`: it has not ended.
fn ended(answer: &[u8]) -> Option<bool> {
    let head = 4 + answer.windows(4).position(|four| four == b"\r\n\r\n")?;
    let text = String::from_utf8_lossy(&answer[..head]);
    let is_success = text.split(' ').nth(1).is_some_and(|status| status.starts_with('2'));
    let is_whole = match header(&text, "content-length") {
        Some(length) => answer.len() - head >= length.parse().ok()?,
        None => answer[head..].ends_with(b"0\r\n\r\n"), // the last chunk
    };
    is_whole.then_some(is_success)
}

fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    let mut headers = head.lines().filter_map(|line| line.split_once(':'));
    let (_, value) = headers.find(|(other, _)| other.eq_ignore_ascii_case(name))?;
    Some(value.trim())
}

fn content_length(head: &str) -> anyhow::Result<usize> {
    let length = header(head, "content-length").map(str::parse);
    Ok(length.transpose().context("a content length")?.unwrap_or(0))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_has_ended_with_its_length_or_its_last_chunk() {
        for (answer, expected) in [
            ("HTTP/1.1 200 OK\r\nContent-Le", None),
            ("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{", None),
            ("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", Some(true)),
            ("HTTP/1.1 500 Oh\r\ncontent-length: 2\r\n\r\n{}", Some(false)),
            ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n", None),
            (
                "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
                Some(true),
            ),
        ] {
            assert_eq!(ended(answer.as_bytes()), expected, "{answer}");
        }
    }

    #[tokio::test]
    async fn a_request_is_proven_by_a_probe_that_was_answered_and_not_by_one_that_was_sent() {
        let upstream = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = upstream.local_addr().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let front = listener.local_addr().unwrap();
        let (passed, _) = broadcast::channel(16);
        let tap = Tap::start(0, listener, address, passed);
        let send = async |body: &str| {
            let mut client = TcpStream::connect(front).await.unwrap();
            let (mut engine, _) = upstream.accept().await.unwrap();
            let length = body.len();
            let request = format!("POST /inference/v1/generate HTTP/1.1\r\ncontent-length: {length}\r\n\r\n{body}");
            client.write_all(request.as_bytes()).await.unwrap();
            engine.read_exact(&mut vec![0; request.len()]).await.unwrap();
            (client, engine)
        };
        let answer = async |(mut client, mut engine): (TcpStream, TcpStream), status: &str| {
            let answer = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n");
            engine.write_all(answer.as_bytes()).await.unwrap();
            client.read_exact(&mut vec![0; answer.len()]).await.unwrap();
        };
        let unproven = || tap.seen().unproven_requests;
        let probe = send(PROBE).await;
        answer(send("{}").await, "200 OK").await;
        assert_eq!(unproven(), 1, "the probe is not answered yet");
        answer(probe, "500 Oh").await;
        answer(send("{}").await, "200 OK").await;
        assert_eq!(unproven(), 2, "it failed");
        answer(send(PROBE).await, "200 OK").await;
        answer(send("{}").await, "200 OK").await;
        assert_eq!(unproven(), 2);
        let probe = send(PROBE).await;
        tap.forget_probe();
        answer(probe, "200 OK").await;
        answer(send("{}").await, "200 OK").await;
        assert_eq!(unproven(), 3, "the engine was restarted since");
    }
}
