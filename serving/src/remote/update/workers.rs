//! What the workers of an engine ask of us during an update, over HTTP on `weights_listen`. Each says which
//! part of which tensor lies where in its memory, and gets what changes there; after the update it says what
//! its memory holds, which is compared with the version.
//!
//! | request | |
//! |---|---|
//! | `GET /{token}?worker=W` | [`Versions`]; from now on the worker is waited for |
//! | `POST /{token}/patch?worker=W` | its [`LocalPart`]s; the answer is the worker's patch (`artifact::patch`) |
//! | `POST /{token}/end?worker=W` | `{"failed": REASON}`, or `null`: it is ready |
//! | `POST /{token}/held?worker=W` | its [`HeldPart`]s |
//!
//! The token is random and of one [`Exchange`]; nobody else knows it.

use anyhow::{Context, bail, ensure};
use artifact::checkpoint::Checkpoint;
use artifact::digest::Digest;
use artifact::patch::{Contents, HeldPart, LocalPart, wrongly_held};
use axum::Router;
use axum::extract::{DefaultBodyLimit, Json, Path, Query, State};
use axum::routing::{get, post};
use edge::problem::Problem;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};
use uuid::Uuid;

/// Of the parts of one worker: some hundred bytes for each tensor.
const BODY_BYTES_MAX: usize = 1 << 30;
/// How many parts that differ an error names.
const NAMED_MAX: usize = 3;

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
    parts: Vec<LocalPart>,
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
    from: Option<String>,
    to: String,
    /// Names of the tensors that the patch changes.
    changed: Vec<String>,
    /// Dtype and shape of every tensor.
    tensors: BTreeMap<String, (String, Vec<usize>)>,
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
        let ended = ended.await.context("the listener has ended")?;
        ensure!(
            !ended.is_empty(),
            "no worker has asked for it: is the engine's wheel of this release?"
        );
        let failed: BTreeSet<&str> = ended
            .values()
            .filter_map(|worker| match &worker.ended {
                Some(Ended::Failed(reason)) => Some(reason.as_str()),
                _ => None,
            })
            .collect();
        match failed.is_empty() {
            true => Ok(()),
            false => bail!("{}", Vec::from_iter(failed).join("; ")),
        }
    }

    /// Waits until all workers are ready to write the patch. Fails if one of them is not, or if a tensor that
    /// changes is in none of them.
    pub async fn staged(&self) -> anyhow::Result<()> {
        self.all_ended().await?;
        let workers = self.exchange.workers.borrow();
        let there: BTreeSet<&str> = workers
            .values()
            .flat_map(|worker| &worker.parts)
            .map(|part| &*part.tensor)
            .collect();
        let changed = self.exchange.patch.iter().flat_map(|patch| patch.tensors.keys());
        let nowhere = changed.filter(|name| !there.contains(name.as_str())).min();
        match nowhere {
            None => Ok(()),
            Some(name) => bail!("no worker's loader copies {name:?}"),
        }
    }

    /// Waits until all workers have said what they hold. Fails if one of them cannot say it.
    pub async fn proof(&self) -> anyhow::Result<Proof> {
        self.all_ended().await?;
        let workers = self.exchange.workers.borrow();
        let parts = workers.values().flat_map(|worker| &worker.parts);
        // the same part of several workers counts once
        let parts: BTreeMap<_, usize> = parts
            .map(|part| {
                let axes: Vec<(usize, usize)> = part.axes.iter().map(|axis| (axis.0, axis.1)).collect();
                ((part.tensor.as_str(), part.first, axes), part.weights())
            })
            .collect();
        let wrong = workers.iter().flat_map(|(name, worker)| match &worker.ended {
            Some(Ended::Holds(wrong)) => wrong
                .iter()
                .map(|tensor| format!("{tensor} of worker {name}"))
                .collect(),
            _ => vec![],
        });
        Ok(Proof {
            workers: workers.len(),
            compared: parts.values().sum(),
            weights: self
                .exchange
                .checkpoint
                .tensors
                .values()
                .map(|tensor| tensor.elements() as usize)
                .sum(),
            wrong: wrong.take(NAMED_MAX).collect(),
        })
    }
}

#[derive(Deserialize)]
struct Asking {
    worker: String,
}

fn router(open: Open) -> Router {
    Router::new()
        .route("/{token}", get(versions))
        .route("/{token}/patch", post(patch))
        .route("/{token}/end", post(end))
        .route("/{token}/held", post(held))
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .with_state(open)
}

fn exchange(open: &Open, token: Uuid) -> Result<Arc<Exchange>, Problem> {
    let found = locked(open).get(&token).cloned();
    found.ok_or_else(|| Problem::not_found("this update has ended"))
}

async fn versions(
    State(open): State<Open>,
    Path(token): Path<Uuid>,
    Query(Asking { worker }): Query<Asking>,
) -> Result<Json<Versions>, Problem> {
    let exchange = exchange(&open, token)?;
    exchange
        .workers
        .send_modify(|workers| drop(workers.insert(worker, Worker::default())));
    let tensors = exchange.checkpoint.tensors.iter();
    Ok(Json(Versions {
        from: exchange.from.map(|from| from.to_string()),
        to: exchange.to.to_string(),
        changed: exchange
            .patch
            .iter()
            .flat_map(|patch| patch.tensors.keys().cloned())
            .collect(),
        tensors: tensors
            .map(|(name, tensor)| (name.clone(), (tensor.dtype.to_string(), tensor.shape.clone())))
            .collect(),
    }))
}

async fn patch(
    State(open): State<Open>,
    Path(token): Path<Uuid>,
    Query(Asking { worker }): Query<Asking>,
    Json(parts): Json<Vec<LocalPart>>,
) -> Result<Vec<u8>, Problem> {
    let exchange = exchange(&open, token)?;
    let (parts, own) = computed(move || {
        let whole = exchange
            .patch
            .as_ref()
            .ok_or_else(|| Problem::not_found("there is no patch"))?;
        let own = whole.of_worker(&parts).map_err(Problem::bad_request)?;
        Ok((parts, (exchange.clone(), own.file)))
    })
    .await?;
    let (exchange, file) = own;
    exchange
        .workers
        .send_modify(|workers| workers.entry(worker).or_default().parts = parts);
    Ok(file)
}

#[derive(Deserialize)]
struct End {
    failed: Option<String>,
}

async fn end(
    State(open): State<Open>,
    Path(token): Path<Uuid>,
    Query(Asking { worker }): Query<Asking>,
    Json(End { failed }): Json<End>,
) -> Result<(), Problem> {
    let ended = failed.map_or(Ended::Ready, Ended::Failed);
    let workers = &exchange(&open, token)?.workers;
    workers.send_modify(|workers| workers.entry(worker).or_default().ended = Some(ended));
    Ok(())
}

async fn held(
    State(open): State<Open>,
    Path(token): Path<Uuid>,
    Query(Asking { worker }): Query<Asking>,
    Json(parts): Json<Vec<HeldPart>>,
) -> Result<(), Problem> {
    let exchange = exchange(&open, token)?;
    let (exchange, ended, parts) = computed(move || {
        let ended = Ended::Holds(wrongly_held(&parts, &exchange.checkpoint));
        Ok((exchange, ended, parts.into_iter().map(|held| held.part).collect()))
    })
    .await?;
    let worker_ended = Worker {
        parts,
        ended: Some(ended),
    };
    exchange
        .workers
        .send_modify(|workers| drop(workers.insert(worker, worker_ended)));
    Ok(())
}

async fn computed<T: Send + 'static>(work: impl FnOnce() -> Result<T, Problem> + Send + 'static) -> Result<T, Problem> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|_| Problem::unavailable("it failed; try again", 1))?
}
