//! The commit point of a step, the same for every kind of run.
//!
//! ```text
//! serial from the sequence → private checkpoint uploaded ┐
//! delta encoded → objects uploaded                         ┴→ manifest put if absent (run, step, cohort, fence)
//!   → objects looked for once more, for a collection may have taken one that was there before
//!   → one fenced Postgres transaction: version, head of the line, step, dispositions, baselines       = THE COMMIT
//!   → announcement, repeatable
//! ```
//! A crash before the manifest leaves objects that nothing names. A crash between manifest and commit is healed by the
//! next executor: [`Publisher::adopt`] finds the manifest that carries its own (run, step) and commits exactly that step,
//! or leaves it as an orphan that nobody follows. Computes no loss and holds no tensors.

mod copies;
mod error;
mod external;
mod import;
mod record;
mod shares;

pub use copies::Copies;
pub use error::Error;
pub use external::{External, Outcome, publish_external};
pub use import::{import, import_image};
pub use shares::{Shares, publish_shares, put_share};

use crate::checkpoint::{self, Checkpoint, StepRecord};
use crate::claim::Claim;
use bytes::Bytes;
use ingest::log::Producer;
use policy::image::Image;
use policy::kernel::Threads;
use policy::manifest::{Manifest, Parent, Quantised, RunStep};
use policy::sign::{SigningKey, TrustedKeys};
use policy::store::{self, Pieces, PutOutcome, Store};
use sqlx::PgPool;
use std::sync::Arc;
use std::time::Instant;
use time::OffsetDateTime;
use uuid::Uuid;

/// Serials tried before a store that already holds them is called foreign.
const SERIALS_TRIED_MAX: usize = 8;
/// Manifests looked at when a restart searches for its own.
const PROBED_MAX: i64 = 1_000;

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
    /// A whole image beside the delta every this many steps, and where the deltas since the last one would take more than
    /// half of its bytes.
    pub image_every: i64,
    pub checkpoints_kept: i64,
    /// The quantised copies that manifests name.
    pub copies: Copies,
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
    /// Making the delta and applying it once, and the quantised copies.
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
        let parent_ref = Parent {
            version: draft.parent,
            root: parent.root,
        };
        let images = (draft.parent_image, Arc::clone(&draft.image));
        let objects = self.objects(started, parent_ref, images, image_due);
        let (objects, place) = tokio::try_join!(objects, self.place(checkpoint))?;
        let mut manifest = Manifest {
            policy: self.policy.clone(),
            version: place.serial,
            root: objects.root,
            parent: Some(parent_ref),
            line: draft.line,
            branch: draft.branch,
            image: objects.image.as_ref().map(Pieces::object),
            delta: Some(objects.delta.object()),
            tensor_bytes: draft.image.tensor_bytes(),
            run: Some(RunStep {
                run: claim.run,
                step,
                cohort_digest: draft.record.cohort_digest(),
            }),
            fence: claim.fence,
            created_at: OffsetDateTime::now_utc(),
            quantised: objects.quantised.clone(),
            delta_shards: vec![],
        };
        let checkpoint_key = self.put_manifest(&mut manifest, place, checkpoint).await?;
        self.make_good(&objects).await?;
        let encode = objects.encode_seconds;
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

    /// Delta and, where one is due, image of a version, in the store; and the roots of its quantised copies.
    async fn objects(
        &self,
        started: Instant,
        parent: Parent,
        (parent_image, image): (Arc<Image>, Arc<Image>),
        image_due: bool,
    ) -> Result<Objects, Error> {
        let copies = self
            .copies
            .make(Some((parent.root, Arc::clone(&parent_image))), Arc::clone(&image));
        let encoded = encode(parent_image, Arc::clone(&image), self.store.threads().clone());
        let chain_bytes = self.chain_bytes(parent.version, image_due);
        let ((root, delta), mut copies, chain_bytes) = tokio::try_join!(encoded, copies, chain_bytes)?;
        let quantised = std::mem::take(&mut copies.quantised);
        self.copies.keep(root, copies);
        let bytes = chain_bytes.saturating_add(delta.object().size_bytes);
        let whole = image_due || bytes.saturating_mul(2) > image.tensor_bytes();
        let whole = match whole {
            true => Some(tokio::task::spawn_blocking(move || image.to_pieces().map(Pieces::new)).await??),
            false => None,
        };
        let encode_seconds = started.elapsed().as_secs_f64();
        self.store.put_pieces(&self.policy, &delta).await?;
        if let Some(whole) = &whole {
            self.store.put_pieces(&self.policy, whole).await?;
        }
        Ok(Objects {
            root,
            delta,
            image: whole,
            quantised,
            encode_seconds,
        })
    }

    /// Bytes of the deltas that lead from the nearest image to `serial`: what a joiner reads beside the image. Not asked for
    /// where an image is due anyway.
    async fn chain_bytes(&self, serial: i64, image_due: bool) -> Result<u64, Error> {
        let mut bytes = 0;
        let mut at = Some(serial).filter(|_| !image_due);
        for _ in 0..self.image_every {
            let Some(serial) = at else { break };
            let manifest = match self.store.get_manifest(&self.policy, serial, &self.trusted).await {
                Err(error @ store::Error::Backend { .. }) => return Err(error.into()),
                // no joiner comes this way: an image makes another
                Err(_) => return Ok(u64::MAX),
                Ok(manifest) => manifest,
            };
            if manifest.image.is_some() {
                break;
            }
            bytes += manifest.delta_bytes().unwrap_or(0);
            at = manifest.parent.map(|parent| parent.version);
        }
        Ok(bytes)
    }

    /// Once their manifest is written: see [`Store::make_good`].
    async fn make_good(&self, objects: &Objects) -> Result<(), Error> {
        let parts: Vec<&Pieces> = objects.image.iter().chain([&objects.delta]).collect();
        let missing = self.store.make_good(&self.policy, &parts).await?;
        if missing > 0 {
            tracing::warn!(
                missing,
                "a collection had taken objects of this version: they were put again"
            );
        }
        Ok(())
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
        record::commit(&mut transaction, prepared).await?;
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

/// The objects of a version, with their bytes, until the manifest that names them is written.
struct Objects {
    root: policy::digest::Digest,
    delta: Pieces,
    image: Option<Pieces>,
    quantised: Vec<Quantised>,
    encode_seconds: f64,
}

/// Digests and compresses on a thread for blocking work: it is seconds for large models.
async fn encode(
    parent: Arc<Image>,
    image: Arc<Image>,
    threads: Threads,
) -> Result<(policy::digest::Digest, Pieces), Error> {
    tokio::task::spawn_blocking(move || {
        let delta = policy::delta::encode(&parent, &image, &threads)?;
        Ok((image.root(), Pieces::new(vec![delta.into()])))
    })
    .await?
}
