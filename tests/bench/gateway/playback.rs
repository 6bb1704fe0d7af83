//! An engine that plays recorded tokens at a set pace, so that the gateway can be measured with more
//! streams than a real engine carries on this machine. A real vLLM server stands behind it: it takes
//! the weights, answers the probes, and gives the first answers, which are recorded.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::stream;
use tokio::net::TcpListener;
use tokio::time::Instant;

/// The server-sent events of one answer.
type Recording = Arc<Vec<Bytes>>;

pub struct Playback {
    upstream: String,
    client: reqwest::Client,
    pace: Duration,
    recordings_max: usize,
    recordings: Mutex<Vec<Recording>>,
    next: AtomicUsize,
}

impl Playback {
    /// `pace`: between two tokens, and before the first one.
    pub async fn start(upstream: String, pace: Duration, recordings_max: usize) -> anyhow::Result<SocketAddr> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let playback = Arc::new(Playback {
            upstream,
            client: reqwest::Client::new(),
            pace,
            recordings_max,
            recordings: Mutex::default(),
            next: AtomicUsize::new(0),
        });
        let router = Router::new().fallback(answer).with_state(playback);
        tokio::spawn(async move { axum::serve(listener, router).await });
        Ok(address)
    }

    fn recording(&self) -> Option<Recording> {
        let recordings = self.recordings.lock().unwrap_or_else(PoisonError::into_inner);
        let next = self.next.fetch_add(1, Ordering::Relaxed);
        (recordings.len() >= self.recordings_max).then(|| recordings[next % recordings.len()].clone())
    }

    fn record(&self, answer: &Bytes) {
        let events = answer.split_inclusive(|&byte| byte == b'\n');
        let events: Vec<Bytes> = events
            .filter(|line| line.starts_with(b"data:"))
            .map(|line| answer.slice_ref(line))
            .collect();
        self.recordings
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(Arc::new(events));
    }

    fn play(&self, recording: Recording) -> Response {
        let (began, pace) = (Instant::now(), self.pace);
        let events = stream::unfold(0, move |number| {
            let recording = recording.clone();
            async move {
                let line = recording.get(number)?;
                // the last line says that there are no more tokens
                let due = (number + 1).min(recording.len() - 1);
                tokio::time::sleep_until(began + pace * u32::try_from(due).ok()?).await;
                let event = Bytes::from([line, b"\n".as_slice()].concat());
                Some((Ok::<_, Infallible>(event), number + 1))
            }
        });
        ([("content-type", "text/event-stream")], Body::from_stream(events)).into_response()
    }

    async fn forward(&self, method: Method, uri: &Uri, body: Bytes) -> reqwest::Result<(StatusCode, Bytes)> {
        let url = format!("{}{uri}", self.upstream);
        let request = self
            .client
            .request(method, url)
            .header("content-type", "application/json");
        let response = request.body(body).send().await?;
        Ok((response.status(), response.bytes().await?))
    }
}

async fn answer(State(playback): State<Arc<Playback>>, method: Method, uri: Uri, body: Bytes) -> Response {
    let probe = body.windows(14).any(|part| part == b"\"tenant-probe\"");
    let of_caller = uri.path() == "/inference/v1/generate" && !probe;
    if of_caller && let Some(recording) = playback.recording() {
        return playback.play(recording);
    }
    match playback.forward(method, &uri, body).await {
        Ok((status, answer)) => {
            if of_caller && status == StatusCode::OK {
                playback.record(&answer);
            }
            (status, answer).into_response()
        }
        Err(error) => (StatusCode::BAD_GATEWAY, error.to_string()).into_response(),
    }
}
