//! An ingest role as the forwarder sees it, with moods.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// What an upstream is told to do with the next request.
#[derive(Debug, Clone, Copy)]
pub enum Mood {
    Take,
    Answer(u16),
    AskToWait(u16),
    /// Takes it and does not say so in time.
    TakeSilently,
    /// A 200 that says nothing.
    Stranger,
}

#[derive(Clone, Default)]
pub struct Upstream {
    moods: Arc<Mutex<Vec<Mood>>>,
    /// Ids by episode, in the order of their first arrival.
    pub taken: Arc<Mutex<HashMap<String, Vec<String>>>>,
    pub keys: Arc<Mutex<BTreeSet<String>>>,
}

impl Upstream {
    pub async fn start(&self) -> String {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new().fallback(answer).with_state(self.clone());
        tokio::spawn(async move { axum::serve(listener, router).await });
        format!("http://{address}")
    }

    /// The next requests, in this order; then all are taken.
    pub fn feels(&self, moods: &[Mood]) {
        let mut next = moods.to_vec();
        next.reverse();
        *self.moods.lock().unwrap() = next;
    }

    pub fn ids(&self) -> BTreeSet<String> {
        self.taken.lock().unwrap().values().flatten().cloned().collect()
    }
}

async fn answer(State(upstream): State<Upstream>, uri: Uri, headers: HeaderMap, body: String) -> Response {
    assert_eq!(uri.path(), "/v1/events");
    assert_eq!(headers["content-type"], "application/cloudevents+json");
    if let Some(key) = headers.get("authorization") {
        upstream.keys.lock().unwrap().insert(key.to_str().unwrap().to_owned());
    }
    let body: Value = serde_json::from_str(&body).unwrap();
    let mood = upstream.moods.lock().unwrap().pop().unwrap_or(Mood::Take);
    let take = || {
        let mut taken = upstream.taken.lock().unwrap();
        let episode = taken
            .entry(body["data"]["episode_id"].as_str().unwrap().to_owned())
            .or_default();
        let id = body["id"].as_str().unwrap().to_owned();
        if !episode.contains(&id) {
            episode.push(id);
        }
    };
    match mood {
        Mood::Take => {
            take();
            axum::Json(json!({"source": body["source"], "id": body["id"]})).into_response()
        }
        Mood::TakeSilently => {
            take();
            tokio::time::sleep(Duration::from_secs(2)).await;
            StatusCode::OK.into_response()
        }
        Mood::Stranger => "welcome to the hotel".into_response(),
        Mood::Answer(status) => {
            let problem = json!({"type": "/problems/conflict", "detail": "another body before"});
            (StatusCode::from_u16(status).unwrap(), axum::Json(problem)).into_response()
        }
        Mood::AskToWait(status) => (StatusCode::from_u16(status).unwrap(), [("retry-after", "1")]).into_response(),
    }
}
