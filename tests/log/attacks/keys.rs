//! A flood of requests with random keys, as fast as a number of connections can.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Instant;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufStream};
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::attacker::{Did, Place};
use super::http2::{self, Method};

/// Of the slow attackers' number, this part floods.
const CONNECTIONS_SHARE: usize = 8;
/// Between a process's keys and the database's.
const COMPARISONS_PER_SECOND_MAX: f64 = 10.0;
/// Requests that an HTTP/2 connection has open.
const STREAMS: u32 = 100;

type Answers = Rc<RefCell<BTreeMap<u16, u64>>>;

fn key() -> String {
    format!("spring_{}", Uuid::from_u128(rand::random()).simple())
}

fn count(answers: &Answers, status: u16) {
    *answers.borrow_mut().entry(status).or_default() += 1;
}

/// One request after the other.
async fn http1(address: SocketAddr, path: &str, answers: &Answers) -> std::io::Result<()> {
    let mut stream = BufStream::new(TcpStream::connect(address).await?);
    loop {
        let request = format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {}\r\ncontent-type: application/json\r\n\
             content-length: 2\r\n\r\n{{}}",
            key()
        );
        stream.write_all(request.as_bytes()).await?;
        stream.flush().await?;
        let (mut status, mut length) = (None, 0);
        loop {
            let mut line = String::new();
            if stream.read_line(&mut line).await? == 0 {
                return Ok(());
            }
            let line = line.trim_end().to_ascii_lowercase();
            if let Some(rest) = line.strip_prefix("http/1.1 ") {
                status = rest.split(' ').next().and_then(|status| status.parse().ok());
            } else if let Some(value) = line.strip_prefix("content-length:") {
                length = value.trim().parse().unwrap();
            } else if line.is_empty() {
                break;
            }
        }
        let mut body = vec![0; length];
        stream.read_exact(&mut body).await?;
        count(answers, status.unwrap());
    }
}

async fn http2(address: SocketAddr, path: &str, answers: &Answers) -> std::io::Result<()> {
    let stream = TcpStream::connect(address).await?;
    let request = || http2::fields(Method::Post, path, Some(&key()));
    // The statuses are compressed; that of a refusal is no indexed field.
    http2::flood(BufStream::new(stream), STREAMS, request, |fields| {
        count(answers, if fields.first() == Some(&0x88) { 200 } else { 401 });
    })
    .await
}

pub async fn run(is_http2: bool, place: Place, stop: CancellationToken) -> Did {
    let connections = (place.connections / CONNECTIONS_SHARE).max(1);
    let opened = Rc::new(Cell::new(0_u32));
    let started = Instant::now();
    let answers = Answers::default();
    let tasks = tokio::task::LocalSet::new();
    let listeners = [(place.ingest, "/v1/feedback"), (place.serve, "/v1/completions")];
    for (address, path) in listeners.repeat(connections) {
        let (answers, opened) = (answers.clone(), opened.clone());
        tasks.spawn_local(async move {
            loop {
                opened.set(opened.get() + 1);
                let _ = match is_http2 {
                    false => http1(address, path, &answers).await,
                    true => http2(address, path, &answers).await,
                };
                tokio::task::yield_now().await;
            }
        });
    }
    tasks.run_until(stop.cancelled()).await;
    let answers = answers.borrow();
    assert!(answers.keys().all(|status| [401, 503].contains(status)), "{answers:?}");
    let (requests, seconds) = (answers.values().sum::<u64>() as f64, started.elapsed().as_secs_f64());
    // However many requests it has open, a connection waits for a comparison with each key.
    let most = f64::from(opened.get()) * (seconds * COMPARISONS_PER_SECOND_MAX + 2.0);
    assert!(
        requests <= most,
        "{requests} requests with random keys were answered, at most {most}"
    );
    Did {
        text: format!(
            "{connections} connections to each of two listeners, {} opened in all; requests per second: {:.0}; \
             answers {answers:?}",
            opened.get(),
            requests / seconds,
        ),
        ..Did::default()
    }
}
