//! Why something was not published, in words for whoever asked for it.

use policy::digest::Digest;
use policy::store;
use uuid::Uuid;

use super::SERIALS_TRIED_MAX;
use crate::checkpoint;
use crate::claim::{self, Fenced};

/// Why a step was not published.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Fenced(#[from] Fenced),
    #[error("line `{line}` is no longer at version {parent} of branch {branch}")]
    LineMoved { line: String, parent: i64, branch: i32 },
    #[error("a generation of the cohort has its disposition already")]
    AlreadyDecided,
    #[error(
        "the store holds manifests of other steps under the next {SERIALS_TRIED_MAX} serials of this database: do they belong together?"
    )]
    ForeignStore,
    #[error("version {0} is not in the database")]
    NoSuchVersion(i64),
    #[error(
        "line `{line}` stands at version {head}, not at {parent}: publish what was made from version {head}, or begin a line of another name"
    )]
    NotHead { line: String, head: i64, parent: i64 },
    #[error(
        "run {run} writes line `{line}`: pause it (`springtide run pause {run}`), or publish on a line of another name"
    )]
    LineTaken { line: String, run: Uuid },
    #[error("`{0}` is not a line's name: 1 to 32 of a-z, 0-9 and `-`, beginning with a letter, and not with `run-`")]
    LineName(String),
    #[error("the weights do not have the form of version {parent}: {}", .differences.join("; "))]
    Form { parent: i64, differences: Vec<String> },
    #[error(
        "share {shard} of {of} of `{name}` is not in the store: make it (`springtide policy share … --name {name} --shard {shard}/{of}`), and publish again"
    )]
    NoShare { name: String, shard: usize, of: usize },
    #[error("share {shard} of {of} of `{name}`: {reason}")]
    Share {
        name: String,
        shard: usize,
        of: usize,
        reason: String,
    },
    #[error(
        "the shares were made from bytes with root {found}; version {parent} has root {root}: their base must be that version, as `springtide policy pull {parent}` writes it"
    )]
    OtherBase { parent: i64, root: Digest, found: Digest },
    #[error("these are the bytes of version {0}: there is nothing to publish")]
    Unchanged(i64),
    #[error("database: {0}")]
    Database(#[from] sqlx::Error),
    #[error("policy store: {0}")]
    Store(#[from] store::Error),
    #[error("write the image: {0}")]
    Image(#[from] policy::image::Error),
    #[error("make the delta: {0}")]
    Delta(#[from] policy::delta::Error),
    #[error("make a quantised copy: {0}")]
    Quantise(#[from] policy::quant::Error),
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::Error),
    #[error("a worker thread did not finish: {0}")]
    Worker(#[from] tokio::task::JoinError),
}

impl Error {
    /// A checkpoint is gone or damaged: asking again will not help.
    pub fn is_lost(&self) -> bool {
        matches!(
            self,
            Error::Checkpoint(_) | Error::Store(store::Error::NotFound(_) | store::Error::Corrupt { .. })
        )
    }
}

impl From<claim::Error> for Error {
    fn from(error: claim::Error) -> Self {
        match error {
            claim::Error::Fenced(fenced) => Error::Fenced(fenced),
            claim::Error::Database(error) => Error::Database(error),
        }
    }
}
