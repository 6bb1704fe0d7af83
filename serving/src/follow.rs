//! The role `springtide follow`: a follower beside an engine that is not ours. It loads the version
//! of one alias, as every follower does, and
//! - keeps it as a folder, and runs a command if there is one; or
//! - stands in front of the engine and changes its weights: nobody else reaches the engine's control
//!   routes, and no request reaches the engine before its weights are proven.
//!
//! It samples nothing and logs no events: who calls an engine through it logs what was sampled.
//!
//! | module | |
//! |---|---|
//! | `options` | `[follow]` |
//! | `proxy` | what is passed on to the engine, and when |
//! | `connections` | connections to the engine that was probed, and to no other |
//! | `status` | health and status over HTTP |

mod connections;
mod options;
mod proxy;
mod status;

pub use options::{Engine, Options};

use crate::engine;
use crate::fleet::{Report, Reporter};
use crate::follower::{self, Command, Folders, Follower, Host};
use crate::remote::{Pool, Updater};
use crate::routing::RouteTable;
use anyhow::Context;
use axum::Router;
use connections::Connections;
use edge::auth::Auth;
use edge::server::Listener;
use event_log::ClientOptions;
use proxy::Proxy;
use status::Status;
use std::sync::Arc;
use std::time::Duration;
use store::Store;
use tokio::sync::{Semaphore, mpsc};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Swaps waiting for the reporter. Further ones are dropped, which only affects statistics.
const SWAPS_WAITING_MAX: usize = 64;

/// Everything that one follower needs. It needs no database.
pub struct Follow {
    pub options: Options,
    pub policy: String,
    /// Where new assignments are announced; without it, the store is only polled.
    pub kafka: Option<ClientOptions>,
    pub store: Store,
    pub keys_dir: std::path::PathBuf,
    /// Where it reports to.
    pub control_url: String,
    /// Further routes, such as metrics.
    pub extra_routes: Router,
}

impl Follow {
    /// Follows until `shutdown`.
    pub async fn run(self, listener: Listener, shutdown: CancellationToken) -> anyhow::Result<()> {
        let options = self.options;
        options.check()?;
        let engine = options
            .engine
            .context("follow.engine is not set; give --engine vllm, sglang, folder or command")?;
        let url = listener.url().context("read the listening address")?;
        let auth = Auth::fixed(options.caller_key.as_deref());
        // background tasks stop after the last request was answered
        let background = CancellationToken::new();
        let tasks = TaskTracker::new();
        let Started { host, pool, router } = match engine {
            Engine::Vllm => start_proxy(&options, proxy::Kind::Vllm)?,
            Engine::Sglang => start_proxy(&options, proxy::Kind::Sglang)?,
            Engine::Folder | Engine::Command => start_folders(&options, &self.policy)?,
        };
        if let Some(pool) = &pool {
            tasks.spawn(pool.clone().watch(background.clone()));
        }
        let routes = Arc::new(RouteTable::default());
        let (swaps, swapped) = mpsc::channel(SWAPS_WAITING_MAX);
        let follower = Follower::new(
            follower::Options {
                policy: self.policy.clone(),
                replica: options.replica.clone(),
                store: self.store,
                keys_dir: self.keys_dir,
                state_dir: options.state_dir.clone(),
                poll_interval: Duration::from_millis(options.poll_interval_ms),
                back_off_max: Duration::from_millis(options.back_off_ms_max),
                first_timestamp_age_max: Duration::from_secs(options.first_timestamp_seconds_max),
                cluster: options.cluster.clone(),
                alias: Some(options.alias.clone()),
                quantized: options.quantized,
                // it holds the version in force and the next one
                resident_bytes_max: u64::MAX,
            },
            host,
            routes.clone(),
            swaps,
        )
        .context("start the follower")?;
        tasks.spawn(follower.run(self.kafka, background.clone()));
        let status = Status {
            policy: self.policy.clone(),
            alias: options.alias,
            engine,
            routes: routes.clone(),
            pool,
        };
        let reporter = Reporter {
            replica: options.replica,
            template: Report {
                cluster: options.cluster,
                policy: self.policy,
                address: url,
                ..Report::default()
            },
            control_url: self.control_url,
            api_key: options.api_key,
            interval: Duration::from_millis(options.heartbeat_interval_ms),
            routes,
            ready: Arc::new({
                let status = status.clone();
                move || status.ready()
            }),
            swaps: swapped,
            client: Reporter::client().context("start the reporter")?,
        };
        tasks.spawn(reporter.run(background.clone()));
        let router = auth
            .protect(router.merge(status::routes(status.clone())))
            .merge(status::health(status))
            .merge(self.extra_routes);
        let outcome = edge::server::run(listener, router, shutdown).await;
        background.cancel();
        tasks.close();
        tasks.wait().await;
        outcome
    }
}

struct Started {
    host: Host,
    /// Of the one engine, if the follower is in front of it.
    pool: Option<Pool>,
    router: Router,
}

fn start_folders(options: &Options, policy: &str) -> anyhow::Result<Started> {
    let command = options
        .command
        .as_ref()
        .filter(|_| options.engine == Some(Engine::Command));
    let folders = Folders {
        dir: options.dir.clone().context("follow.dir is not set")?,
        policy: policy.into(),
        alias: options.alias.clone(),
        keep: options.keep,
        quantized: options.quantized,
        command: command.map(|line| Command {
            line: line.clone(),
            timeout: Duration::from_secs_f64(options.command_seconds_max),
        }),
    };
    folders.open().context("follow.dir")?;
    Ok(Started {
        host: Host::Folders(folders),
        pool: None,
        router: Router::new(),
    })
}

fn start_proxy(options: &Options, engine: proxy::Kind) -> anyhow::Result<Started> {
    let remote = options.remote()?;
    let url = options.engine_url.as_deref().unwrap_or_default();
    let connections = Connections::new(engine.label_path(), url, options.engine_api_key.clone())?;
    // requests come over the proxy, so nothing waits in the pool's queue
    let config = engine::Config {
        queue_choices_max: 1,
        queue_wait_max: Duration::ZERO,
        prompt_tokens_per_pass_max: 0,
        slots_reserved_for_production: 0,
        parked_max: Duration::from_secs(600),
    };
    let pool = Pool::new(&remote, 1, config).context("follow.engine_url")?;
    let proxy = Proxy {
        pool: pool.clone(),
        connections,
        in_flight: options.in_flight,
        wait_max: Duration::from_millis(options.timeout_ms),
        body_bytes_max: options.body_bytes_max,
        permits: Arc::new(Semaphore::new(
            usize::try_from(options.requests_max).unwrap_or(Semaphore::MAX_PERMITS),
        )),
    };
    let updater = Updater::new(pool.clone(), remote).context("follow")?;
    Ok(Started {
        host: Host::Remote {
            updater: Box::new(updater),
        },
        pool: Some(pool),
        router: proxy::router(engine, &Arc::new(proxy)),
    })
}
