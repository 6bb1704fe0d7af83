//! Why something was not published, in words for the person who asked.

use artifact::digest::Digest;
use uuid::Uuid;

use super::{SERIALS_TRIED_MAX, run_state};
use crate::claim::{self, Fenced};

/// Why a step was not published.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the claim is lost")]
    Fenced(#[from] Fenced),
    #[error("line `{line}` is no longer at version {parent} of branch {branch}")]
    LineMoved { line: String, parent: i64, branch: i32 },
    #[error("a generation of the cohort already has a disposition")]
    AlreadyDecided,
    #[error(
        "a sampler of the cohort, or a key that taught it, has been revoked: what it signed or sent is not trained on"
    )]
    Revoked,
    #[error("a tenant of the cohort has withdrawn its consent, or a generation of the cohort is gone")]
    ConsentWithdrawn,
    #[error("the lease of the cohort is another one now, or the cohort was dropped")]
    LeaseLost,
    #[error(
        "the store already has other manifests under the next {SERIALS_TRIED_MAX} serials of this database: check that the store and the database belong together"
    )]
    ForeignStore,
    #[error("version {0} is not in the database")]
    NoSuchVersion(i64),
    #[error(
        "version {version} has the content hash {found} in the store, but {root} in the database: somebody else wrote its manifest. Put the right one back, or continue from another version (`springtide release rollback`)"
    )]
    OtherRoot { version: i64, root: Digest, found: Digest },
    #[error(
        "the key {key} may not sign versions: it is revoked, or has another role. Move its .key and .pub away and restart; a new key is made (docs/security.md, Signing keys)"
    )]
    KeyRefused { key: String },
    #[error("load the trusted keys: {0}")]
    Keys(#[from] artifact::sign::Error),
    #[error(
        "line `{line}` is at version {head}, not at {parent}: publish weights made from version {head}, or use a new line"
    )]
    NotHead { line: String, head: i64, parent: i64 },
    #[error("run {run} writes line `{line}`: pause it (`springtide run pause {run}`), or publish on another line")]
    LineTaken { line: String, run: Uuid },
    #[error(
        "`{0}` is not a valid line name: use 1 to 32 of a-z, 0-9 and `-`, starting with a letter and not with `run-`"
    )]
    LineName(String),
    #[error("the weights do not have the form of version {parent}: {}", .differences.join("; "))]
    Form { parent: i64, differences: Vec<String> },
    #[error(
        "shard {shard} of {of} of `{name}` is not in the store: upload it (`springtide policy shard … --name {name} --shard {shard}/{of}`), then publish again"
    )]
    NoShard { name: String, shard: usize, of: usize },
    #[error("shard {shard} of {of} of `{name}`: {reason}")]
    Shard {
        name: String,
        shard: usize,
        of: usize,
        reason: String,
    },
    #[error(
        "the shards were made from bytes with root {found}; version {parent} has root {root}: their base must be that version, as written by `springtide policy pull {parent}`"
    )]
    OtherBase { parent: i64, root: Digest, found: Digest },
    #[error("the bytes equal those of version {0}: nothing to publish")]
    Unchanged(i64),
    #[error("database: {0}")]
    Database(#[from] sqlx::Error),
    #[error("policy store: {0}")]
    Store(#[from] store::Error),
    #[error("write the checkpoint: {0}")]
    Checkpoint(#[from] artifact::checkpoint::Error),
    #[error("encode the delta: {0}")]
    Delta(#[from] artifact::delta::Error),
    #[error("compute the reference log-probabilities: {0}")]
    Reference(#[from] model::exact::Error),
    #[error("the adapter: {0}")]
    Adapter(#[from] model::lora::Error),
    #[error("make a quantized copy: {0}")]
    Quantize(#[from] artifact::quant::Error),
    #[error(transparent)]
    RunState(#[from] run_state::Error),
    #[error("a worker thread did not finish: {0}")]
    Worker(#[from] tokio::task::JoinError),
}

impl Error {
    /// A run state is missing or damaged, and a retry will not help.
    pub fn is_lost(&self) -> bool {
        matches!(
            self,
            Error::RunState(_) | Error::Store(store::Error::NotFound(_) | store::Error::Corrupt { .. })
        )
    }
}

impl From<claim::Error> for Error {
    fn from(error: claim::Error) -> Self {
        match error {
            claim::Error::Fenced(fenced) => Error::Fenced(fenced),
            claim::Error::Database(error) => Error::Database(error),
            claim::Error::CohortDropped => Error::LeaseLost,
        }
    }
}
