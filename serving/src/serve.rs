//! The role `springtide serve`: starts the engine's thread, the follower, the reporter and the API
//! of one replica, and stops them in order.

use crate::api::{self, Api, Prompts};
use crate::engine::{self, Engine, exact::Staging};
use crate::fleet::{Report, Reporter};
use crate::follower::{self, Follower, Host};
use crate::options::Options;
use crate::remote::{self, Pool, Updater};
use crate::routing::RouteTable;
use crate::tide::{Control, Tide};
use anyhow::Context;
use artifact::threads::Threads;
use axum::Router;
use edge::auth::Auth;
use edge::sampler::SamplerKey;
use edge::server::Listener;
use event_log::payload::Store as Payloads;
use event_log::{ClientOptions, Producer};
use futures::future::BoxFuture;
use model::exact::{Arithmetic, Compute};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use store::Store;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Swaps waiting for the reporter. Further ones are dropped, which only affects statistics.
const SWAPS_WAITING_MAX: usize = 64;
/// Longest wait before the store is polled again after a failure.
const FOLLOW_BACK_OFF_MAX: Duration = Duration::from_secs(2);
/// How long unfinished choices may take to be logged at shutdown.
const LAST_CHOICES_WAIT: Duration = Duration::from_secs(6);

/// Everything that one replica needs.
pub struct Replica {
    pub options: Options,
    pub policy: String,
    pub compute: Compute,
    pub kafka: ClientOptions,
    pub store: Store,
    /// Where the experts of mixture models are logged; `None`: not logged.
    pub payloads: Option<Payloads>,
    pub keys_dir: PathBuf,
    /// Signs every generation.
    pub sampler: SamplerKey,
    pub auth: Auth,
    /// Where it reports to, if anywhere.
    pub control_url: Option<String>,
    /// Further routes, such as metrics.
    pub extra_routes: Router,
}

impl Replica {
    /// Serves until `shutdown`. Fails if the engine dies; the process must then restart.
    pub async fn run(self, listener: Listener, shutdown: CancellationToken) -> anyhow::Result<()> {
        let mut options = self.options;
        options.check()?;
        if options.remote.is_used() {
            options.slots = remote::slots(&options.remote).await.context("serve.remote")?;
            options.slots_reserved_for_production = options.slots_reserved_for_production.min(options.slots - 1);
        }
        let address = listener.local_addr().context("read the listening address")?;
        let url = listener.url().context("read the listening address")?;
        edge::bind::check(address, self.auth.required())?;
        let log = Producer::new(&self.kafka).context("start the log's producer")?;
        let routes = Arc::new(RouteTable::default());
        let config = engine::Config {
            queue_choices_max: options.queue_choices_max,
            queue_wait_max: Duration::from_millis(options.queue_wait_ms_max),
            prompt_tokens_per_pass_max: options.prompt_tokens_per_pass_max,
            slots_reserved_for_production: options.slots_reserved_for_production,
            parked_max: Duration::from_millis(options.tide.parked_ms_max),
        };
        // background tasks stop after the last request was answered
        let background = CancellationToken::new();
        let tasks = TaskTracker::new();
        let Started {
            engine,
            host,
            mut ended,
        } = match options.remote.is_used() {
            false => {
                let mut arithmetic = Arithmetic::new(self.compute, options.threads.into()).context("serve.threads")?;
                arithmetic.quantized = options.remote.quantized;
                start_own(&options, config, arithmetic, self.store.threads().clone())?
            }
            true => {
                let pool = Pool::new(&options.remote, options.slots, config).context("serve.remote")?;
                tasks.spawn(pool.clone().watch(background.clone()));
                start_remote(&options, pool)?
            }
        };
        let (swaps, swapped) = mpsc::channel(SWAPS_WAITING_MAX);
        let follower = Follower::new(
            follower::Options {
                policy: self.policy.clone(),
                replica: options.replica.clone(),
                store: self.store,
                keys_dir: self.keys_dir,
                state_dir: options.state_dir.clone(),
                poll_interval: Duration::from_millis(options.poll_interval_ms),
                back_off_max: FOLLOW_BACK_OFF_MAX,
                first_timestamp_age_max: Duration::from_secs(options.first_timestamp_seconds_max),
                cluster: options.cluster.clone(),
                alias: None,
                quantized: options.remote.quantized,
                resident_bytes_max: options.resident_bytes_max,
            },
            host,
            routes.clone(),
            swaps,
        )
        .context("start the follower")?;

        tasks.spawn(follower.run(Some(self.kafka), background.clone()));
        let client = Reporter::client().context("start the reporter")?;
        let control = self.control_url.clone().map(|url| Control {
            url,
            api_key: options.api_key.clone(),
            client: client.clone(),
        });
        let tide = Tide {
            options: options.tide.clone(),
            policy: self.policy.clone(),
            replica: options.replica.clone(),
            slots: options.slots,
            floor: options.slots_reserved_for_production,
            engine: engine.clone(),
            client: client.clone(),
            control,
        };
        tasks.spawn(tide.run(background.clone()));
        if let Some(control_url) = self.control_url {
            let reporter = Reporter {
                replica: options.replica.clone(),
                template: Report {
                    cluster: options.cluster.clone(),
                    policy: self.policy.clone(),
                    address: options.address.clone().unwrap_or_else(|| url.clone()),
                    ..Report::default()
                },
                control_url,
                api_key: options.api_key.clone(),
                interval: Duration::from_millis(options.heartbeat_interval_ms),
                routes: routes.clone(),
                ready: Arc::new({
                    let routes = routes.clone();
                    move || routes.ready()
                }),
                swaps: swapped,
                client,
            };
            tasks.spawn(reporter.run(background.clone()));
        }

        let in_flight_bytes_max = options.in_flight_bytes_max;
        let (choices, shadow) = (TaskTracker::new(), api::Shadow::default());
        let prompts = Prompts::new(options.prompt_threads, options.queue_choices_max);
        let api = Arc::new(Api {
            policy: self.policy,
            options,
            engine: engine.clone(),
            prompts,
            routes,
            log: Arc::new(log.clone()),
            log_state: api::LogState::default(),
            lost: api::Lost::default(),
            payloads: self.payloads,
            sessions: api::Sessions::default(),
            sampler: self.sampler,
            shadow: shadow.clone(),
            choices: choices.clone(),
        });
        let router = api::routes(api)
            .protected_within(&self.auth, "Springtide serve", in_flight_bytes_max)
            .layer(axum::middleware::from_fn(api::shape_errors))
            .merge(self.extra_routes);
        let serving = CancellationToken::new();
        let served = edge::server::run(listener, router, serving.clone());
        tokio::pin!(served);
        let outcome = tokio::select! {
            result = &mut served => result,
            () = shutdown.cancelled() => {
                serving.cancel();
                (&mut served).await
            }
            () = &mut ended => {
                serving.cancel();
                Err(anyhow::anyhow!("the engine's thread has ended"))
            }
        };
        shadow.end();
        choices.close();
        if tokio::time::timeout(LAST_CHOICES_WAIT, choices.wait()).await.is_err() {
            tracing::warn!(
                unfinished = choices.len(),
                "some choices are not logged yet at shutdown"
            );
        }
        background.cancel();
        tasks.close();
        tasks.wait().await;
        engine.stop();
        tokio::task::spawn_blocking(move || log.flush())
            .await
            .context("flush the log")?;
        outcome
    }
}

/// What samples tokens in this replica.
struct Started {
    engine: Arc<dyn Engine>,
    host: Host,
    /// Resolves if the engine ends by itself.
    ended: BoxFuture<'static, ()>,
}

fn start_own(
    options: &Options,
    config: engine::Config,
    arithmetic: Arithmetic,
    packing: Threads,
) -> anyhow::Result<Started> {
    let own = engine::spawn(config).context("start the engine's thread")?;
    let staging = Staging {
        arithmetic,
        packing,
        slots: options.slots,
        context: options.context_tokens_max,
    };
    let host = Host::Own {
        engine: own.handle.clone(),
        staging: Arc::new(staging),
    };
    Ok(Started {
        engine: Arc::new(own.handle),
        host,
        ended: Box::pin(async move { drop(own.ended.await) }),
    })
}

fn start_remote(options: &Options, pool: Pool) -> anyhow::Result<Started> {
    let remote = remote::Options {
        adapters_dir: options.state_dir.join("adapters"),
        ..options.remote.clone()
    };
    let updater = Updater::new(pool.clone(), remote).context("serve.remote")?;
    let host = Host::Remote {
        updater: Box::new(updater),
    };
    Ok(Started {
        engine: Arc::new(pool),
        host,
        ended: Box::pin(std::future::pending()),
    })
}
