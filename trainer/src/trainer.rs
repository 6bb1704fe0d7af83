//! What all runs of a trainer's process share.

use crate::computing::Computing;
use crate::working::Working;
use anyhow::Context;
use artifact::quant::Spec;
use artifact::sign::SigningKey;
use event_log::payload::Store as Payloads;
use event_log::{ClientOptions, Producer};
use model::exact::{Arithmetic, Compute};
use runs::grader::Sandboxes;
use runs::judge::Judges;
use runs::options::Options;
use runs::publish::{Publisher, QuantizedCopies};
use sqlx::PgPool;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use store::Store;
use tokio_util::sync::CancellationToken;

/// Name of the key that signs manifests.
const KEY_NAME: &str = "trainer";

/// What the trainer works with.
pub struct Environment {
    /// Name of the policy.
    pub policy: String,
    /// Precision of the forward pass; must be the sampler's.
    pub compute: Compute,
    /// The quantized copies of every version.
    pub quantized: Vec<Spec>,
    /// The one of them that the fleet serves.
    pub serves: Option<Spec>,
    /// Folder of the base policy, imported if the realtime line has no head.
    pub base_dir: Option<PathBuf>,
    pub kafka: ClientOptions,
    pub pool: PgPool,
    pub store: Store,
    /// The store of contexts that are too long for a record.
    pub payloads: Payloads,
    /// Signing keys and trusted keys.
    pub keys_dir: PathBuf,
    /// Base URL of the serving API, for rollouts: `http://127.0.0.1:8000`.
    pub serve_url: String,
    /// Base URL of the control role, for trainers that this process launches.
    pub control_url: String,
    /// For what they print.
    pub state_dir: PathBuf,
    /// Says whether the trainer computes.
    pub computing: Computing,
}

/// What all runs of this process share.
pub(crate) struct Trainer {
    pub options: Options,
    pub policy: String,
    /// Shared by all learners, with its threads.
    pub arithmetic: Arithmetic,
    pub pool: PgPool,
    pub payloads: Payloads,
    pub publisher: Publisher,
    pub producer: Producer,
    pub serve_url: String,
    /// For trainers that this process launches.
    pub control_url: String,
    pub state_dir: PathBuf,
    pub computing: Computing,
    /// Offline runs that are worked on.
    pub working: Working,
    /// Exports, which take no place of others.
    pub exporting: Working,
    pub judges: Arc<Judges>,
    /// Of all runs: in these, `python` graders run.
    pub sandboxes: Arc<Sandboxes>,
}

impl Trainer {
    /// Loads the keys and connects to the log. `options` have passed [`Options::check`].
    pub async fn new(options: Options, environment: Environment) -> anyhow::Result<Self> {
        let key = SigningKey::load_or_create(&environment.keys_dir, KEY_NAME).context("load the signing key")?;
        let producer = Producer::new(&environment.kafka).context("connect to the log")?;
        let publisher = Publisher {
            pool: environment.pool.clone(),
            store: environment.store,
            key: Arc::new(key),
            keys_dir: environment.keys_dir,
            announce: Some(producer.clone()),
            policy: environment.policy.clone(),
            checkpoint_every: options.checkpoint_every,
            run_states_kept: options.run_states_kept,
            quantized: QuantizedCopies::new(&environment.quantized, environment.serves),
        };
        publisher.signing_keys().await.context("check the signing key")?;
        let judges = Judges::new(&options.judge)?;
        let threads = options.threads.into();
        Ok(Trainer {
            sandboxes: Arc::new(Sandboxes::new(options.offline.sandbox.clone())),
            arithmetic: Arithmetic {
                quantized: environment.serves,
                ..Arithmetic::new(environment.compute, threads).context("trainer.threads")?
            },
            options,
            policy: environment.policy,
            pool: environment.pool,
            payloads: environment.payloads,
            publisher,
            producer,
            judges: Arc::new(judges),
            serve_url: environment.serve_url.trim_end_matches('/').to_string(),
            control_url: environment.control_url.trim_end_matches('/').to_string(),
            state_dir: environment.state_dir,
            computing: environment.computing,
            working: Working::default(),
            exporting: Working::default(),
        })
    }
}

/// Sleeps. False: shut down.
pub(crate) async fn pause(shutdown: &CancellationToken, span: Duration) -> bool {
    tokio::select! {
        () = tokio::time::sleep(span) => !shutdown.is_cancelled(),
        () = shutdown.cancelled() => false,
    }
}
