//! The serving role: engine thread, follower, reporter and API of one replica, started together and stopped in order.

use crate::api::{self, Api};
use crate::engine::{self, resident::Resident};
use crate::follow::{self, Follower, Reporter, Stage, Staged, Told};
use crate::options::ServeOptions;
use crate::routing::Routing;
use anyhow::Context;
use axum::Router;
use edge::auth::Auth;
use ingest::kafka::ClientOptions;
use ingest::log::Producer;
use ingest::payload::Store as Payloads;
use policy::kernel::Threads;
use policy::model::{Arithmetic, Compute};
use policy::store::Store;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Swaps on their way to the reporter; more are dropped, which only the statistics notice.
const SWAPS_WAITING_MAX: usize = 64;
/// How long choices without a caller may take to be logged at the end.
const LAST_CHOICES: Duration = Duration::from_secs(6);

/// Serves until `shutdown`, or until the engine dies, which is an error: the process must start anew.
///
/// `payloads`: where a mixture's experts go, if they are logged. `extra` holds routes of the caller (metrics); `control_url` is where the replica reports to, if anywhere.
#[expect(clippy::too_many_arguments, reason = "one call, from the role that wires everything")]
pub async fn run(
    options: ServeOptions,
    policy_name: String,
    compute: Compute,
    kafka: ClientOptions,
    store: Store,
    payloads: Option<Payloads>,
    keys_dir: PathBuf,
    auth: Auth,
    control_url: impl Into<Option<String>>,
    listener: TcpListener,
    extra: Router,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    options.check().map_err(anyhow::Error::msg)?;
    let address = listener.local_addr().context("read the listening address")?;
    edge::bind::check(address, auth.required())?;
    let log = Producer::new(&kafka).context("start the log's producer")?;
    let routing = Arc::new(Routing::default());
    let engine = engine::spawn(engine::Config {
        queue_choices_max: options.queue_choices_max,
        prefills_per_step_max: options.prefills_per_step_max,
        slots_reserved_for_production: options.slots_reserved_for_production,
    })
    .context("start the engine's thread")?;
    let arithmetic = Arithmetic::new(compute, options.threads.into()).context("serve.threads")?;
    let (swaps, swapped) = mpsc::channel(SWAPS_WAITING_MAX);
    let packing = store.threads().clone();
    let follower = Follower::new(
        follow::Options {
            policy: policy_name.clone(),
            replica: options.replica.clone(),
            store,
            keys_dir,
            state_dir: options.state_dir.clone(),
            poll_interval: Duration::from_millis(options.poll_interval_ms),
            resident_bytes_max: options.resident_bytes_max,
        },
        engine.handle.clone(),
        stage(arithmetic, packing, options.slots, options.context_tokens_max),
        routing.clone(),
        swaps,
    )
    .context("start the follower")?;

    // the background stops after the last request has been answered
    let background = CancellationToken::new();
    let tasks = TaskTracker::new();
    tasks.spawn(follower.run(kafka, background.clone()));
    if let Some(control_url) = control_url.into() {
        let told = Told {
            replica: options.replica.clone(),
            cluster: options.cluster.clone(),
            policy: policy_name.clone(),
            address: options.address.clone().unwrap_or_else(|| format!("http://{address}")),
        };
        let interval = Duration::from_millis(options.heartbeat_interval_ms);
        let reporter = Reporter::new(
            told,
            &control_url,
            options.api_key.clone(),
            interval,
            routing.clone(),
            swapped,
        )
        .context("start the reporter")?;
        tasks.spawn(reporter.run(background.clone()));
    }

    let choices = TaskTracker::new();
    let api = Arc::new(Api {
        policy: policy_name,
        options,
        engine: engine.handle.clone(),
        routing,
        log: Arc::new(log.clone()),
        payloads,
        sessions: api::Sessions::default(),
        choices: choices.clone(),
    });
    let router = auth
        .protect(api::router(api.clone()))
        .merge(api::health(api))
        .merge(extra);
    let serving = CancellationToken::new();
    let served = edge::server::run(listener, router, serving.clone());
    tokio::pin!(served);
    let outcome = tokio::select! {
        result = &mut served => result,
        () = shutdown.cancelled() => {
            serving.cancel();
            (&mut served).await
        }
        _ = engine.ended => {
            serving.cancel();
            Err(anyhow::anyhow!("the engine's thread has ended"))
        }
    };
    choices.close();
    if tokio::time::timeout(LAST_CHOICES, choices.wait()).await.is_err() {
        tracing::warn!(open = choices.len(), "choices still open at the end");
    }
    background.cancel();
    tasks.close();
    tasks.wait().await;
    engine.handle.stop();
    tokio::task::spawn_blocking(move || log.flush())
        .await
        .context("flush the log")?;
    outcome
}

/// How this replica builds a version beside the serving ones.
fn stage(arithmetic: Arithmetic, packing: Threads, slots: usize, context: usize) -> Stage {
    Arc::new(move |image| {
        let resident = Resident::stage(image, &arithmetic, &packing, slots, context)?;
        Ok(Staged {
            context: resident.context(),
            vocab: resident.vocab(),
            experts: resident.experts(),
            cache_bytes: resident.cache_bytes(),
            model: Box::new(resident),
        })
    })
}
