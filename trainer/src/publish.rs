//! The commit point of a step, the same for every kind of run.
//!
//! ```text
//! serial from the sequence → private checkpoint uploaded ┐
//! delta encoded → objects uploaded                         ┴→ manifest put if absent (run, step, cohort, fence)
//!   → one fenced Postgres transaction: version, head of the line, step, dispositions, baselines       = THE COMMIT
//!   → announcement, repeatable
//! ```
//! A crash before the manifest leaves objects that nothing names. A crash between manifest and commit is healed by the
//! next executor: [`Publisher::adopt`] finds the manifest that carries its own (run, step) and commits exactly that step,
//! or leaves it as an orphan that nobody follows. Computes no loss and holds no tensors.

mod import;
mod record;

pub use import::{import, import_image};

use crate::checkpoint::{self, Checkpoint, StepRecord};
use crate::claim::{self, Claim, Fenced};
use bytes::Bytes;
use ingest::log::Producer;
use policy::image::Image;
use policy::manifest::{Manifest, Parent, RunStep};
use policy::sign::{SigningKey, TrustedKeys};
use policy::store::{self, PutOutcome, Store};
use sqlx::PgPool;
use std::sync::Arc;
use std::time::Instant;
use time::OffsetDateTime;
use uuid::Uuid;

/// Serials tried before a store that already holds them is called foreign.
const SERIALS_TRIED_MAX: usize = 8;
/// Manifests looked at when a restart searches for its own.
const PROBED_MAX: i64 = 1_000;

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
    #[error("database: {0}")]
    Database(#[from] sqlx::Error),
    #[error("policy store: {0}")]
    Store(#[from] policy::store::Error),
    #[error("write the image: {0}")]
    Image(#[from] policy::image::Error),
    #[error("make the delta: {0}")]
    Delta(#[from] policy::delta::Error),
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

/// Where versions of one policy go.
#[derive(Clone)]
pub struct Publisher {
    pub pool: PgPool,
    pub store: Store,
    pub key: Arc<SigningKey>,
    pub trusted: Arc<TrustedKeys>,
    /// `None`: nothing is announced, followers find versions by polling.
    pub announce: Option<Producer>,
    pub policy: String,
    /// A whole image beside the delta every this many steps.
    pub image_every: i64,
    pub checkpoints_kept: i64,
}

/// A step that has been computed and passed its guards.
#[derive(Debug, Clone)]
pub struct Draft {
    pub line: String,
    /// Of the line, when the step began.
    pub branch: i32,
    /// Head of the line when the step began.
    pub parent: i64,
    pub parent_image: Arc<Image>,
    pub image: Arc<Image>,
    pub record: StepRecord,
    /// [`Checkpoint`] after the step, as bytes.
    pub checkpoint: Bytes,
}

/// A step whose manifest is in the store, and whose commit is all that is missing.
#[derive(Debug, Clone)]
pub struct Prepared {
    pub manifest: Manifest,
    pub record: StepRecord,
    pub checkpoint_key: String,
}

/// A step that is committed.
#[derive(Debug, Clone, Copy)]
pub struct Published {
    pub version: i64,
    pub timings: Timings,
}

/// Where the time of a publication went, seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Timings {
    /// Making the delta, and applying it once.
    pub encode: f64,
    /// Until objects, checkpoint and manifest were in the store, as far as it was not beside the encoding.
    pub upload: f64,
    /// The transaction.
    pub commit: f64,
}

/// A serial of its own, and the checkpoint that lies under it already.
struct Place {
    serial: i64,
    checkpoint_key: String,
}

impl Publisher {
    /// Publishes a step: prepare, commit, announce, tidy up. The step's metrics say where the time until its commit went.
    pub async fn publish(&self, claim: &Claim, draft: Draft) -> Result<Published, Error> {
        let (mut prepared, mut timings) = self.prepare_timed(claim, draft).await?;
        let measured = &mut prepared.record.metrics["timings"];
        measured["encode"] = timings.encode.into();
        measured["upload"] = timings.upload.into();
        let started = Instant::now();
        self.commit(claim, &prepared).await?;
        timings.commit = started.elapsed().as_secs_f64();
        self.after_commit(&prepared).await;
        Ok(Published {
            version: prepared.manifest.version,
            timings,
        })
    }

    /// Everything before the commit: serial, objects, checkpoint, manifest.
    pub async fn prepare(&self, claim: &Claim, draft: Draft) -> Result<Prepared, Error> {
        Ok(self.prepare_timed(claim, draft).await?.0)
    }

    async fn prepare_timed(&self, claim: &Claim, draft: Draft) -> Result<(Prepared, Timings), Error> {
        let started = Instant::now();
        let parent = record::version(&self.pool, &self.policy, draft.parent).await?;
        let step = draft.record.step;
        let image_due = step % self.image_every == 0 || parent.line != draft.line || parent.branch != draft.branch;
        // the checkpoint is most of the bytes: it goes to the store while the delta is made
        let checkpoint = Some((claim.run, step, &draft.checkpoint));
        let objects = async {
            let bytes = encode(draft.parent_image, Arc::clone(&draft.image), image_due).await?;
            let encode = started.elapsed().as_secs_f64();
            let delta = self.store.put_object(&self.policy, &bytes.delta).await?;
            let image = match &bytes.image {
                Some(bytes) => Some(self.store.put_object(&self.policy, bytes).await?),
                None => None,
            };
            Ok((bytes.root, delta, image, encode))
        };
        let ((root, delta, image, encode), place) = tokio::try_join!(objects, self.place(checkpoint))?;
        let mut manifest = Manifest {
            policy: self.policy.clone(),
            version: place.serial,
            root,
            parent: Some(Parent {
                version: draft.parent,
                root: parent.root,
            }),
            line: draft.line,
            branch: draft.branch,
            image,
            delta: Some(delta),
            tensor_bytes: draft.image.tensor_bytes(),
            run: Some(RunStep {
                run: claim.run,
                step,
                cohort_digest: draft.record.cohort_digest(),
            }),
            fence: claim.fence,
            created_at: OffsetDateTime::now_utc(),
        };
        let checkpoint_key = self.put_manifest(&mut manifest, place, checkpoint).await?;
        let prepared = Prepared {
            manifest,
            record: draft.record,
            checkpoint_key,
        };
        let timings = Timings {
            encode,
            upload: started.elapsed().as_secs_f64() - encode,
            commit: 0.0,
        };
        Ok((prepared, timings))
    }

    /// The next serial, with the checkpoint of its step in the store.
    async fn place(&self, checkpoint: Option<(Uuid, i64, &Bytes)>) -> Result<Place, Error> {
        let serial = record::next_serial(&self.pool).await?;
        let mut checkpoint_key = String::new();
        if let Some((run, step, bytes)) = checkpoint {
            checkpoint_key = checkpoint::key(run, step, serial);
            self.store.put_private(&checkpoint_key, bytes).await?;
        }
        Ok(Place { serial, checkpoint_key })
    }

    /// Puts the manifest under the serial of `place`; one that the store knows already (a database restored from a backup)
    /// is skipped for the next. Returns the key of the checkpoint.
    async fn put_manifest(
        &self,
        manifest: &mut Manifest,
        mut place: Place,
        checkpoint: Option<(Uuid, i64, &Bytes)>,
    ) -> Result<String, Error> {
        for _ in 0..SERIALS_TRIED_MAX {
            manifest.version = place.serial;
            match self.store.put_manifest(manifest, &self.key).await? {
                PutOutcome::Created => return Ok(place.checkpoint_key),
                PutOutcome::Exists(_) if checkpoint.is_some() => {
                    self.store.delete_private(&place.checkpoint_key).await?;
                }
                PutOutcome::Exists(_) => {}
            }
            place = self.place(checkpoint).await?;
        }
        Err(Error::ForeignStore)
    }

    /// The commit: one transaction, refused to a replaced executor, on a line that moved, and for a generation that has
    /// its disposition already. Nothing is half done.
    pub async fn commit(&self, claim: &Claim, prepared: &Prepared) -> Result<(), Error> {
        let mut transaction = self.pool.begin().await?;
        claim.hold(&mut transaction).await?;
        record::commit(&mut transaction, &self.policy, prepared).await?;
        transaction.commit().await?;
        Ok(())
    }

    /// What may be repeated or lost: the announcement, and the removal of checkpoints that are no longer needed.
    pub async fn after_commit(&self, prepared: &Prepared) {
        self.announce(prepared.manifest.version).await;
        let old = prepared.record.step - self.checkpoints_kept;
        let outdated = match record::checkpoint_key(&self.pool, prepared.record.run, old).await {
            Ok(Some(key)) => self.store.delete_private(&key).await.map_err(Error::from),
            Ok(None) => Ok(()),
            Err(error) => Err(error.into()),
        };
        if let Err(error) = outdated {
            tracing::warn!(%error, step = old, "could not remove an outdated checkpoint");
        }
    }

    /// Tells followers that a version exists. A hint: they also poll, so a failure is only logged.
    pub async fn announce(&self, version: i64) {
        let Some(producer) = &self.announce else { return };
        let announcement = ingest::proto::Announcement {
            policy: self.policy.clone(),
            object_key: record::manifest_key(&self.policy, version),
            version,
            epoch: 0,
        };
        if let Err(error) = producer.send_announcement(&announcement).await {
            tracing::warn!(%error, version, "could not announce a version; followers will find it by polling");
        }
    }

    /// After a restart: commits the step that an earlier executor of this run prepared and did not commit, if its
    /// manifest is there and the line has not moved since. Returns the adopted serial.
    pub async fn adopt(
        &self,
        claim: &Claim,
        step: i64,
        line: &str,
        branch: i32,
        head: i64,
    ) -> Result<Option<i64>, Error> {
        let newest = record::newest_serial(&self.pool).await?;
        let oldest = (head + 1).max(newest - PROBED_MAX + 1);
        for serial in record::without_version(&self.pool, &self.policy, oldest, newest).await? {
            let Some(manifest) = self.probe(serial).await? else {
                continue;
            };
            let own = manifest
                .run
                .as_ref()
                .is_some_and(|r| r.run == claim.run && r.step == step);
            let follows = manifest.line == line
                && manifest.branch == branch
                && manifest.parent.as_ref().is_some_and(|p| p.version == head);
            if !own || !follows {
                continue;
            }
            let checkpoint_key = checkpoint::key(claim.run, step, serial);
            let record = match self.read_checkpoint(&checkpoint_key).await {
                Ok(checkpoint) => checkpoint.record,
                Err(error) if error.is_lost() => {
                    tracing::warn!(%error, serial, "a prepared step has no readable checkpoint: left as an orphan");
                    continue;
                }
                Err(error) => return Err(error),
            };
            let prepared = Prepared {
                manifest,
                record,
                checkpoint_key,
            };
            match self.commit(claim, &prepared).await {
                Ok(()) => {
                    self.after_commit(&prepared).await;
                    return Ok(Some(serial));
                }
                Err(Error::AlreadyDecided) => {
                    tracing::warn!(
                        serial,
                        "a prepared step's cohort is decided otherwise: left as an orphan"
                    );
                }
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// The manifest of a serial that the database does not know, if there is one that can be believed.
    async fn probe(&self, serial: i64) -> Result<Option<Manifest>, Error> {
        match self.store.get_manifest(&self.policy, serial, &self.trusted).await {
            Ok(manifest) => Ok(Some(manifest)),
            Err(store::Error::NotFound(_)) => Ok(None),
            Err(
                error @ (store::Error::Corrupt { .. } | store::Error::Signature { .. } | store::Error::Document { .. }),
            ) => {
                tracing::warn!(%error, serial, "a manifest without a row cannot be believed: left as an orphan");
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Reads a checkpoint of a run.
    pub async fn read_checkpoint(&self, key: &str) -> Result<Checkpoint, Error> {
        let bytes = self.store.get_private(key).await?;
        Ok(tokio::task::spawn_blocking(move || Checkpoint::from_bytes(&bytes)).await??)
    }
}

struct Encoded {
    root: policy::digest::Digest,
    delta: Bytes,
    image: Option<Bytes>,
}

/// Digests and compresses on a thread for blocking work: it is seconds for large models.
async fn encode(parent: Arc<Image>, image: Arc<Image>, whole: bool) -> Result<Encoded, Error> {
    tokio::task::spawn_blocking(move || {
        Ok(Encoded {
            root: image.root(),
            delta: Bytes::from(policy::delta::encode(&parent, &image)?),
            image: whole.then(|| image.to_bytes()).transpose()?,
        })
    })
    .await?
}
