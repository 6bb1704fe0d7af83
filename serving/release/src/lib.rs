//! Releases: which version each alias names, and how users are divided. `decide` holds the rules.
//! The leader's loop applies the automatic moves, and people request moves and arms through the HTTP
//! API.
//!
//! Every change is written as rows (assignment, release, transition) in one transaction under a new
//! epoch, then as one signed document in the policy store, then announced. Releases never change
//! weights, lines or runs.

pub mod audited;
mod canary;
pub mod decide;
mod experiment;
mod http;
mod judgment;
mod leader;
mod options;
mod publish;
mod tables;
mod webhook;

/// What the HTTP API answers, for its clients.
pub mod answers {
    pub use crate::canary::State as CanaryState;
    pub use crate::canary::http::{Canaries, CanaryView, FullCanary, TransitionView};
    pub use crate::experiment::{ArmView, ExperimentView};
    pub use crate::http::{AliasView, Aliases, Moved, ReleaseView, Released, Releases};
    pub use crate::judgment::{Judgment, Judgments};
}

pub use artifact::assignment::{CANARY, CHAMPION, LEARNER};
pub use canary::Evaluator;
pub use http::routes;
pub use leader::{Round, run};
pub use options::{AfterHarm, ArmOptions, ChampionBy, Learning, LearningAlias, Options};

use anyhow::Context;
use artifact::sign::{Envelope, SigningKey, TrustedKeys};
use decide::Rules;
use event_log::Producer;
use sqlx::PgPool;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicI64;
use std::sync::{Arc, OnceLock};
use store::Store;

/// The frozen arm: the first version of the realtime line.
pub const BASE: &str = "base";
/// The result of the latest successful offline run.
pub const CANDIDATE: &str = "candidate";
/// The line that production feedback trains.
pub const REALTIME: &str = "realtime";

/// Changes and publishes assignments; shared by the loop and the HTTP API.
#[derive(Clone)]
pub struct ReleaseService(Arc<Inner>);

struct Inner {
    options: Options,
    learning: Learning,
    policy: String,
    pool: PgPool,
    store: Store,
    key: SigningKey,
    keys_dir: PathBuf,
    /// `None`: followers find new assignments only by polling the store.
    log: Option<Producer>,
    /// The newest epoch whose document is in the store, as far as known.
    published: AtomicI64,
    /// Unset: no gate can ask for an evaluation.
    evaluator: OnceLock<Arc<dyn Evaluator>>,
    /// Heads that no bad version is below.
    clear: judgment::Clear,
    /// Looks at canaries without their evidence.
    unread: canary::Unread,
}

impl ReleaseService {
    /// Loads the key `release` from `keys_dir`, or creates it.
    pub fn new(
        options: Options,
        learning: Learning,
        policy: impl Into<String>,
        pool: PgPool,
        store: Store,
        keys_dir: &Path,
        log: Option<Producer>,
    ) -> anyhow::Result<Self> {
        let key = SigningKey::load_or_create(keys_dir, "release").context("load the release key")?;
        Ok(ReleaseService(Arc::new(Inner {
            options,
            learning,
            policy: policy.into(),
            pool,
            store,
            key,
            keys_dir: keys_dir.to_path_buf(),
            log,
            published: AtomicI64::new(0),
            evaluator: OnceLock::new(),
            clear: judgment::Clear::default(),
            unread: canary::Unread::default(),
        })))
    }

    /// Gates of canaries ask this for evaluations from now on.
    pub fn evaluate_with(&self, evaluator: Arc<dyn Evaluator>) {
        // the first one stays
        let _ = self.0.evaluator.set(evaluator);
    }

    /// Signs a document with the release key.
    pub fn sign(&self, kind: &str, payload: &[u8]) -> anyhow::Result<Vec<u8>> {
        let envelope = Envelope::sign(kind, payload, &self.0.key).to_bytes();
        envelope.context("write the envelope")
    }

    /// The payload of a document that a trusted key of its kind's role has signed.
    pub async fn verified(&self, kind: &str, envelope: &[u8]) -> anyhow::Result<Vec<u8>> {
        let keys = self.trusted().await?;
        let envelope = Envelope::from_bytes(envelope).context("read the envelope")?;
        envelope.verify(kind, &keys).context("verify the signature")
    }

    fn rules(&self) -> Rules {
        Rules {
            learning: self.0.learning.alias,
            champion_every: self.0.options.champion_every,
            champion: self.0.options.champion,
            after_harm: self.0.options.after_harm,
        }
    }

    /// Reads the trusted keys anew, because they may change at any time.
    async fn trusted(&self) -> anyhow::Result<TrustedKeys> {
        let keys = TrustedKeys::load(&self.0.keys_dir).context("load the trusted keys")?;
        let trusted = self.0.store.trusted(&self.0.policy, keys).await;
        trusted.context("look for revoked keys")
    }
}
