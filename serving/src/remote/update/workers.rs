//! What the workers of an engine ask of us during an update, over HTTP on `weights_listen`. Each says which
//! part of which tensor lies where in its memory, and gets what changes there, or it gets all weights; after the
//! update it says what its memory holds, which is compared with the version.
//!
//! | request | |
//! |---|---|
//! | `GET /{token}` | [`Versions`]; from now on the worker is waited for |
//! | `POST /{token}/patch` | its [`LocalPart`]s; the answer is the worker's patch (`artifact::patch`) |
//! | `GET /{token}/weights` | the bytes of all tensors, in the order of their names |
//! | `POST /{token}/held` | its [`HeldPart`]s |
//! | `POST /{token}/end` | `{"failed": REASON}`, or `null`: it is ready, or has said what it holds |
//!
//! Each has `?worker=W&replica=R&of=N`: N workers hold a replica of the model together, and each of them must
//! ask. 0: the worker does not know how many.
//!
//! The token is random and of one [`Exchange`]; nobody else knows it.

use anyhow::{Context, bail, ensure};
use artifact::checkpoint::Checkpoint;
use artifact::digest::Digest;
use artifact::patch::{Contents, HeldPart, LocalPart, wrongly_held};
use axum::Router;
use axum::body::Body;
use axum::extract::{DefaultBodyLimit, Json, Path, Query, Request, State};
use axum::http::header::CONTENT_LENGTH;
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use bytes::Bytes;
use edge::problem::Problem;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::{CancellationToken, DropGuard};
use uuid::Uuid;

/// Of the parts of one worker: some hundred bytes for each tensor.
const BODY_BYTES_MAX: usize = 1 << 30;
/// Of all weights, read ahead.
const PIECE_BYTES: usize = 1 << 20;
const PIECES_MAX: usize = 4;
/// How many parts that differ an error names.
const NAMED_MAX: usize = 3;

/// Version of these requests. A wheel refuses another one.
const FORMAT: &str = "springtide-workers-1";

/// The listener.
pub(super) struct Workers {
    url: String,
    open: Open,
    _stop: DropGuard,
}

type Open = Arc<Mutex<HashMap<Uuid, Arc<Exchange>>>>;

/// One update or proof of an engine.
pub(super) struct Exchange {
    from: Option<Digest>,
    to: Digest,
    /// `None`: nothing is to be changed.
    patch: Option<Contents>,
    checkpoint: Arc<Checkpoint>,
    workers: watch::Sender<BTreeMap<String, Worker>>,
}

#[derive(Default)]
struct Worker {
    replica: String,
    of: usize,
    parts: Vec<LocalPart>,
    /// It has said what it holds.
    is_compared: bool,
    ended: Option<Ended>,
}

enum Ended {
    Ready,
    Failed(String),
    /// Names of the tensors of which it holds other weights.
    Holds(BTreeSet<String>),
}

/// An [`Exchange`] that is open until this is dropped.
pub(super) struct Asked {
    pub url: String,
    token: Uuid,
    exchange: Arc<Exchange>,
    open: Open,
}

/// The answer to `GET /{token}`.
#[derive(Serialize)]
struct Versions {
    format: &'static str,
    from: Option<String>,
    to: String,
    /// Names of the tensors that the patch changes.
    changed: Vec<String>,
    /// Dtype, shape and digest of every tensor.
    tensors: BTreeMap<String, (String, Vec<usize>, Digest)>,
}

/// What all workers together hold.
#[derive(Debug, PartialEq)]
pub(super) struct Proof {
    pub workers: usize,
    /// Weights of the version that were compared, and all it has.
    pub compared: usize,
    pub weights: usize,
    /// Workers and tensors that differ.
    pub wrong: Vec<String>,
}

fn locked(open: &Open) -> MutexGuard<'_, HashMap<Uuid, Arc<Exchange>>> {
    open.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Workers {
    /// Listens until it is dropped.
    pub fn listen(address: SocketAddr) -> anyhow::Result<Self> {
        ensure!(
            !address.ip().is_unspecified(),
            "weights_listen is {address}; give the address at which the workers of the engines reach this machine"
        );
        let listener = std::net::TcpListener::bind(address).with_context(|| format!("listen on {address}"))?;
        listener.set_nonblocking(true)?;
        let url = format!("http://{}", listener.local_addr()?);
        let open = Open::default();
        let stop = CancellationToken::new();
        let listener = edge::server::Listener::from(tokio::net::TcpListener::from_std(listener)?);
        let served = edge::server::run(listener, router(open.clone()), stop.clone());
        tokio::spawn(async move {
            if let Err(error) = served.await {
                tracing::error!(error = format!("{error:#}"), "the workers of engines get no weights");
            }
        });
        Ok(Workers {
            url,
            open,
            _stop: stop.drop_guard(),
        })
    }

    /// Opens an exchange about `checkpoint`, the version with the content hash `to`.
    pub fn ask(&self, patch: Option<Contents>, to: Digest, checkpoint: Arc<Checkpoint>) -> Asked {
        let token = Uuid::new_v4();
        let exchange = Arc::new(Exchange {
            from: patch.as_ref().map(|patch| patch.from),
            to,
            patch,
            checkpoint,
            workers: watch::Sender::default(),
        });
        locked(&self.open).insert(token, exchange.clone());
        Asked {
            url: format!("{}/{token}", self.url),
            token,
            exchange,
            open: self.open.clone(),
        }
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        locked(&self.open).remove(&self.token);
    }
}

impl Asked {
    /// Content hash of the version, in hex.
    pub fn to(&self) -> String {
        self.exchange.to.to_string()
    }

    /// Waits until each worker that has asked is done. Dropping the future loses nothing.
    async fn all_ended(&self) -> anyhow::Result<()> {
        let mut workers = self.exchange.workers.subscribe();
        let ended = workers.wait_for(|workers| workers.values().all(|worker| worker.ended.is_some()));
        ended.await.map(drop).context("the listener has ended")
    }

    /// Fails if a worker has failed, or has not asked.
    fn check_all(&self) -> anyhow::Result<()> {
        let workers = self.exchange.workers.borrow();
        ensure!(
            !workers.is_empty(),
            "no worker has asked: is the engine's wheel of this release, and does it reach weights_listen?"
        );
        for worker in workers.values() {
            let found = workers.values().filter(|other| other.replica == worker.replica).count();
            ensure!(
                worker.of == 0 || found == worker.of,
                "{found} of {} workers have asked: does each of them reach weights_listen?",
                worker.of
            );
        }
        let failed = workers.values().filter_map(|worker| match &worker.ended {
            Some(Ended::Failed(reason)) => Some(reason.as_str()),
            _ => None,
        });
        let failed: BTreeSet<&str> = failed.collect();
        ensure!(failed.is_empty(), "{}", Vec::from_iter(failed).join("; "));
        Ok(())
    }

    /// Waits until all workers are ready to write the patch. Fails if one of them is not, or if a tensor that
    /// changes is in none of a replica.
    pub async fn staged(&self) -> anyhow::Result<()> {
        self.all_ended().await?;
        self.check_all()?;
        let workers = self.exchange.workers.borrow();
        let mut there: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for worker in workers.values() {
            let names = worker.parts.iter().map(|part| part.tensor.as_str());
            there.entry(&worker.replica).or_default().extend(names);
        }
        let changed = || self.exchange.patch.iter().flat_map(|patch| patch.tensors.keys());
        match there
            .values()
            .find_map(|there| changed().find(|name| !there.contains(name.as_str())))
        {
            None => Ok(()),
            Some(name) => bail!("no worker's loader copies {name:?}"),
        }
    }

    /// Waits until all workers have said what they hold, but not longer than `limit`. Fails if one of them has not
    /// said it, unless another one holds other weights.
    pub async fn proof(&self, limit: Duration) -> anyhow::Result<Proof> {
        let in_time = tokio::time::timeout(limit, self.all_ended()).await;
        let proof = self.found();
        if proof.wrong.is_empty() {
            in_time.context("it took too long")??;
            self.check_all()?;
            let is_silent = |worker: &Worker| !matches!(worker.ended, Some(Ended::Holds(_)));
            let silent = self.exchange.workers.borrow().values().any(is_silent);
            ensure!(!silent && proof.compared > 0, "a worker says nothing");
        }
        Ok(proof)
    }

    fn found(&self) -> Proof {
        let workers = self.exchange.workers.borrow();
        let parts = workers.values().flat_map(|worker| &worker.parts);
        // the same part of several workers counts once
        let parts = parts.map(|part| {
            let axes: Vec<(usize, usize)> = part.axes.iter().map(|axis| (axis.0, axis.1)).collect();
            ((part.tensor.as_str(), part.first, axes), part.weights())
        });
        let parts: BTreeMap<_, usize> = parts.collect();
        let wrong = workers.iter().flat_map(|(name, worker)| match &worker.ended {
            Some(Ended::Holds(wrong)) => wrong
                .iter()
                .map(|tensor| format!("{tensor} of worker {name}"))
                .collect(),
            _ => vec![],
        });
        let tensors = self.exchange.checkpoint.tensors.values();
        Proof {
            workers: workers.len(),
            compared: parts.values().fold(0, |sum, weights| sum.saturating_add(*weights)),
            weights: tensors.map(|tensor| tensor.elements() as usize).sum(),
            wrong: wrong.take(NAMED_MAX).collect(),
        }
    }
}

#[derive(Deserialize)]
struct Asking {
    worker: String,
    replica: String,
    of: usize,
}

fn router(open: Open) -> Router {
    Router::new()
        .route("/{token}", get(versions))
        .route("/{token}/patch", post(patch))
        .route("/{token}/weights", get(weights))
        .route("/{token}/held", post(held))
        .route("/{token}/end", post(end))
        .route_layer(middleware::from_fn_with_state(open.clone(), only_open))
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .with_state(open)
}

/// Before a body is read.
async fn only_open(
    State(open): State<Open>,
    Path(token): Path<Uuid>,
    request: Request,
    next: Next,
) -> Result<Response, Problem> {
    exchange(&open, token)?;
    Ok(next.run(request).await)
}

fn exchange(open: &Open, token: Uuid) -> Result<Arc<Exchange>, Problem> {
    let found = locked(open).get(&token).cloned();
    found.ok_or_else(|| Problem::not_found("this update has ended"))
}

impl Exchange {
    fn change(&self, asking: Asking, change: impl FnOnce(&mut Worker)) {
        self.workers.send_modify(|workers| {
            let worker = workers.entry(asking.worker).or_default();
            (worker.replica, worker.of) = (asking.replica, asking.of);
            change(worker);
        });
    }
}

async fn versions(
    State(open): State<Open>,
    Path(token): Path<Uuid>,
    Query(asking): Query<Asking>,
) -> Result<Json<Versions>, Problem> {
    let exchange = exchange(&open, token)?;
    exchange.change(asking, |worker| worker.ended = None);
    let tensors = exchange.checkpoint.tensors.iter();
    let tensors = tensors.map(|(name, tensor)| {
        let form = (tensor.dtype.to_string(), tensor.shape.clone(), tensor.bytes.digest());
        (name.clone(), form)
    });
    let changed = exchange.patch.iter().flat_map(|patch| patch.tensors.keys().cloned());
    Ok(Json(Versions {
        format: FORMAT,
        from: exchange.from.map(|from| from.to_string()),
        to: exchange.to.to_string(),
        changed: changed.collect(),
        tensors: tensors.collect(),
    }))
}

async fn patch(
    State(open): State<Open>,
    Path(token): Path<Uuid>,
    Query(asking): Query<Asking>,
    Json(parts): Json<Vec<LocalPart>>,
) -> Result<Vec<u8>, Problem> {
    let exchange = exchange(&open, token)?;
    let computed = tokio::task::spawn_blocking(move || {
        let whole = exchange
            .patch
            .as_ref()
            .ok_or_else(|| Problem::not_found("there is no patch"))?;
        let own = whole.of_worker(&parts).map_err(Problem::bad_request)?;
        exchange.change(asking, |worker| worker.parts = parts);
        Ok(own.file)
    });
    let failed = |_| Problem::unavailable("the patch was not made", 1);
    computed.await.map_err(failed)?
}

/// A thread reads them, because they may lie on a disk.
async fn weights(State(open): State<Open>, Path(token): Path<Uuid>) -> Result<Response, Problem> {
    let checkpoint = exchange(&open, token)?.checkpoint.clone();
    let length = checkpoint.tensor_bytes();
    let (sender, mut pieces) = mpsc::channel::<Result<Bytes, Infallible>>(PIECES_MAX);
    tokio::task::spawn_blocking(move || {
        let tensors = checkpoint.tensors.values();
        let mut pieces = tensors.flat_map(|tensor| tensor.bytes.chunks(PIECE_BYTES));
        // an error: nobody reads any more
        pieces.try_for_each(|piece| sender.blocking_send(Ok(Bytes::copy_from_slice(piece))))
    });
    let pieces = futures::stream::poll_fn(move |context| pieces.poll_recv(context));
    Ok(([(CONTENT_LENGTH, length)], Body::from_stream(pieces)).into_response())
}

/// It is compared after the answer: hashing a large model takes longer than a worker waits.
async fn held(
    State(open): State<Open>,
    Path(token): Path<Uuid>,
    Query(asking): Query<Asking>,
    Json(parts): Json<Vec<HeldPart>>,
) -> Result<(), Problem> {
    let exchange = exchange(&open, token)?;
    let worker = asking.worker.clone();
    exchange.change(asking, |worker| worker.is_compared = true);
    tokio::task::spawn_blocking(move || {
        let wrong = wrongly_held(&parts, &exchange.checkpoint);
        exchange.workers.send_modify(|workers| {
            let worker = workers.entry(worker).or_default();
            worker.parts = parts.into_iter().map(|held| held.part).collect();
            worker.ended = Some(Ended::Holds(wrong));
        });
    });
    Ok(())
}

#[derive(Deserialize)]
struct End {
    failed: Option<String>,
}

async fn end(
    State(open): State<Open>,
    Path(token): Path<Uuid>,
    Query(asking): Query<Asking>,
    Json(End { failed }): Json<End>,
) -> Result<(), Problem> {
    exchange(&open, token)?.change(asking, |worker| {
        // the comparison ends it
        if !worker.is_compared {
            worker.ended = Some(failed.map_or(Ended::Ready, Ended::Failed));
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests;
