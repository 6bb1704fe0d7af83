//! The commit of a step, the same for every kind of run. Computes no loss and holds no tensors.
//!
//! ```text
//! serial from the sequence → run state uploaded ┐
//! delta encoded → objects uploaded              ┴→ manifest put if absent (run, step, cohort, fence)
//!   → objects checked once more: garbage collection may have deleted one that already existed
//!   → THE COMMIT, one fenced transaction: version, head of the line, step, dispositions, baselines
//!   → announcement, repeatable
//! ```
//! After a crash before the manifest, objects are left that nothing names. After a crash between
//! manifest and commit, the next executor finds the manifest with its own (run, step) and commits
//! exactly that step ([`Publisher::adopt`]), or leaves it as an orphan that nobody follows.

mod error;
mod external;
mod import;
mod quantized;
pub(crate) mod record;
pub mod referenced;
pub mod run_state;
mod shards;
pub mod squash;

pub use error::Error;
pub use external::{External, Outcome, publish_external};
pub use import::{import, import_checkpoint};
pub use quantized::QuantizedCopies;
pub use shards::{ShardedVersion, publish_shards, put_shard};

use crate::runs::claim::Claim;
use artifact::checkpoint::Checkpoint;
use artifact::digest::Digest;
use artifact::manifest::{Manifest, Parent, Quantized, RunStep};
use artifact::sign::{SigningKey, TrustedKeys};
use artifact::threads::Threads;
use bytes::Bytes;
use ingest::log::Producer;
use run_state::{RunState, StepRecord};
use sqlx::PgPool;
use std::sync::Arc;
use std::time::Instant;
use store::{Pieces, PutOutcome, Store};
use time::OffsetDateTime;
use uuid::Uuid;

/// Serials tried before we conclude that the store belongs to another database.
const SERIALS_TRIED_MAX: usize = 8;
/// Serials looked at when a restart searches for its own manifest.
const PROBED_MAX: i64 = 1_000;

/// Publishes versions of one policy.
#[derive(Clone)]
pub struct Publisher {
    pub pool: PgPool,
    pub store: Store,
    pub key: Arc<SigningKey>,
    pub trusted: Arc<TrustedKeys>,
    /// `None`: nothing is announced, followers find versions by polling.
    pub announce: Option<Producer>,
    pub policy: String,
    /// A full checkpoint is written beside the delta every this many steps, and whenever the deltas
    /// since the last one exceed half of its bytes.
    pub checkpoint_every: i64,
    pub run_states_kept: i64,
    /// The quantized copies that manifests name.
    pub quantized: QuantizedCopies,
}

/// A step that has been computed and passed its guards.
#[derive(Debug, Clone)]
pub struct Draft {
    pub line: String,
    /// Branch of the line when the step began.
    pub branch: i32,
    /// Head of the line when the step began.
    pub parent: i64,
    pub parent_checkpoint: Arc<Checkpoint>,
    pub checkpoint: Arc<Checkpoint>,
    pub record: StepRecord,
    /// [`RunState`] after the step, as bytes.
    pub run_state: Bytes,
}

/// A step whose manifest is in the store and that only lacks its commit.
#[derive(Debug, Clone)]
pub struct Prepared {
    pub manifest: Manifest,
    pub record: StepRecord,
    pub run_state_key: String,
    pub timings: Timings,
}

/// A committed step.
#[derive(Debug, Clone, Copy)]
pub struct Published {
    pub version: i64,
    pub timings: Timings,
}

/// Where the time of a publication went, seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Timings {
    /// Encoding the delta, applying it once, and quantizing copies.
    pub encode: f64,
    /// Uploads that did not overlap with encoding.
    pub upload: f64,
    /// The transaction.
    pub commit: f64,
}

/// A run, its step, and its run state as bytes.
type StepState<'a> = (Uuid, i64, &'a Bytes);

/// A serial, and the key of the run state that was uploaded under it.
struct Reserved {
    serial: i64,
    run_state_key: String,
}

impl Publisher {
    /// Publishes a step: prepare, commit, announce, delete an old run state. The step's metrics get
    /// the timings.
    pub async fn publish(&self, claim: &Claim, draft: Draft) -> Result<Published, Error> {
        let mut prepared = self.prepare(claim, draft).await?;
        let mut timings = prepared.timings;
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

    /// Everything before the commit: serial, objects, run state, manifest.
    pub async fn prepare(&self, claim: &Claim, draft: Draft) -> Result<Prepared, Error> {
        let started = Instant::now();
        let parent_row = record::version(&self.pool, &self.policy, draft.parent).await?;
        let step = draft.record.step;
        let checkpoint_due =
            step % self.checkpoint_every == 0 || parent_row.line != draft.line || parent_row.branch != draft.branch;
        let parent = Parent {
            version: draft.parent,
            root: parent_row.root,
        };
        let checkpoints = (draft.parent_checkpoint, Arc::clone(&draft.checkpoint));
        let objects = self.objects(started, parent, checkpoints, checkpoint_due);
        // the run state is most of the bytes: it is uploaded while the delta is encoded
        let run_state = Some((claim.run, step, &draft.run_state));
        let (objects, reserved) = tokio::try_join!(objects, self.reserve(run_state))?;
        let mut manifest = Manifest {
            run: Some(RunStep {
                run: claim.run,
                step,
                cohort_digest: draft.record.cohort_digest(),
            }),
            fence: claim.fence,
            ..self.manifest_of(
                &objects,
                parent,
                draft.line,
                draft.branch,
                draft.checkpoint.tensor_bytes(),
            )
        };
        let run_state_key = self.put_manifest(&mut manifest, reserved, run_state).await?;
        self.restore_missing(&objects).await?;
        Ok(Prepared {
            manifest,
            record: draft.record,
            run_state_key,
            timings: objects.timings(started),
        })
    }

    /// A manifest without serial, objects and run.
    fn manifest(&self, root: Digest, parent: Option<Parent>, line: String, branch: i32, tensor_bytes: u64) -> Manifest {
        Manifest {
            policy: self.policy.clone(),
            version: 0,
            root,
            parent,
            line,
            branch,
            checkpoint: None,
            delta: None,
            tensor_bytes,
            run: None,
            fence: 0,
            created_at: OffsetDateTime::now_utc(),
            quantized: vec![],
            delta_shards: vec![],
        }
    }

    /// A manifest that names `objects`.
    fn manifest_of(&self, objects: &Objects, parent: Parent, line: String, branch: i32, tensor_bytes: u64) -> Manifest {
        Manifest {
            checkpoint: objects.checkpoint.as_ref().map(Pieces::object),
            delta: Some(objects.delta.object()),
            quantized: objects.quantized.clone(),
            ..self.manifest(objects.root, Some(parent), line, branch, tensor_bytes)
        }
    }

    /// Uploads the delta of a version and, if one is due, its full checkpoint. Also computes the
    /// roots of its quantized copies.
    async fn objects(
        &self,
        started: Instant,
        parent: Parent,
        (parent_checkpoint, checkpoint): (Arc<Checkpoint>, Arc<Checkpoint>),
        checkpoint_due: bool,
    ) -> Result<Objects, Error> {
        let quantized = self.quantized.for_manifest(Arc::clone(&checkpoint));
        let encoded = encode(parent_checkpoint, Arc::clone(&checkpoint), self.store.threads().clone());
        let chain_bytes = self.chain_bytes(parent.version, checkpoint_due);
        let ((root, delta), quantized, chain_bytes) = tokio::try_join!(encoded, quantized, chain_bytes)?;
        let bytes = chain_bytes.saturating_add(delta.object().size_bytes);
        let full = match checkpoint_due || bytes.saturating_mul(2) > checkpoint.tensor_bytes() {
            true => Some(tokio::task::spawn_blocking(move || checkpoint.to_pieces().map(Pieces::new)).await??),
            false => None,
        };
        let encode_seconds = started.elapsed().as_secs_f64();
        self.store.put_pieces(&self.policy, &delta).await?;
        if let Some(full) = &full {
            self.store.put_pieces(&self.policy, full).await?;
        }
        Ok(Objects {
            root,
            delta,
            checkpoint: full,
            quantized,
            encode_seconds,
        })
    }

    /// Bytes of the deltas from the nearest full checkpoint to `serial`: what a new replica
    /// downloads besides the checkpoint. 0 if a checkpoint is due anyway.
    async fn chain_bytes(&self, serial: i64, checkpoint_due: bool) -> Result<u64, Error> {
        let mut bytes = 0;
        let mut next = Some(serial).filter(|_| !checkpoint_due);
        for _ in 0..self.checkpoint_every {
            let Some(serial) = next else { break };
            let manifest = match self.store.get_manifest(&self.policy, serial, &self.trusted).await {
                Err(error @ store::Error::Backend { .. }) => return Err(error.into()),
                // the chain is broken: a new checkpoint repairs it
                Err(_) => return Ok(u64::MAX),
                Ok(manifest) => manifest,
            };
            if manifest.checkpoint.is_some() {
                break;
            }
            bytes += manifest.delta_bytes().unwrap_or(0);
            next = manifest.parent.map(|parent| parent.version);
        }
        Ok(bytes)
    }

    /// After the manifest is written: see [`Store::reupload_missing`].
    async fn restore_missing(&self, objects: &Objects) -> Result<(), Error> {
        let parts: Vec<&Pieces> = objects.checkpoint.iter().chain([&objects.delta]).collect();
        let missing = self.store.reupload_missing(&self.policy, &parts).await?;
        if missing > 0 {
            tracing::warn!(
                missing,
                "garbage collection had deleted objects of this version: they were uploaded again"
            );
        }
        Ok(())
    }

    /// The next serial, with the run state of its step uploaded.
    async fn reserve(&self, run_state: Option<StepState<'_>>) -> Result<Reserved, Error> {
        let serial = record::next_serial(&self.pool).await?;
        let mut run_state_key = String::new();
        if let Some((run, step, bytes)) = run_state {
            run_state_key = run_state::key(run, step, serial);
            self.store.put_private(&run_state_key, bytes).await?;
        }
        Ok(Reserved { serial, run_state_key })
    }

    /// Puts the manifest under the reserved serial, or under the next one if the store has that
    /// serial already (as after a database restore). Returns the key of the run state.
    async fn put_manifest(
        &self,
        manifest: &mut Manifest,
        mut reserved: Reserved,
        run_state: Option<StepState<'_>>,
    ) -> Result<String, Error> {
        for _ in 0..SERIALS_TRIED_MAX {
            manifest.version = reserved.serial;
            match self.store.put_manifest(manifest, &self.key).await? {
                PutOutcome::Created => return Ok(reserved.run_state_key),
                PutOutcome::Exists(_) | PutOutcome::Taken if run_state.is_some() => {
                    self.store.delete_private(&reserved.run_state_key).await?;
                }
                PutOutcome::Exists(_) | PutOutcome::Taken => {}
            }
            reserved = self.reserve(run_state).await?;
        }
        Err(Error::ForeignStore)
    }

    /// The commit, in one transaction. Refused if the executor has been replaced, if the line has
    /// moved, or if a generation already has a disposition.
    pub async fn commit(&self, claim: &Claim, prepared: &Prepared) -> Result<(), Error> {
        let mut transaction = self.pool.begin().await?;
        claim.lock(&mut transaction).await?;
        record::commit(&mut transaction, prepared).await?;
        transaction.commit().await?;
        Ok(())
    }

    /// What may be repeated or lost: the announcement, and deleting a run state that is no longer
    /// needed.
    pub async fn after_commit(&self, prepared: &Prepared) {
        self.announce(prepared.manifest.version).await;
        let expired_step = prepared.record.step - self.run_states_kept;
        let deleted = match record::run_state_key(&self.pool, prepared.record.run, expired_step).await {
            Ok(Some(key)) => self.store.delete_private(&key).await.map_err(Error::from),
            Ok(None) => Ok(()),
            Err(error) => Err(error.into()),
        };
        if let Err(error) = deleted {
            tracing::warn!(%error, step = expired_step, "could not delete an old run state");
        }
    }

    /// Tells followers that a version exists. They also poll, so a failure is only logged.
    pub async fn announce(&self, version: i64) {
        let Some(producer) = &self.announce else { return };
        let announcement = ingest::log::Announcement {
            policy: self.policy.clone(),
            object_key: record::manifest_key(&self.policy, version),
            version,
            epoch: 0,
        };
        if let Err(error) = producer.send_announcement(&announcement).await {
            tracing::warn!(%error, version, "could not announce a version; followers will find it by polling");
        }
    }

    /// After a restart: commits the step that an earlier executor of this run prepared, if its
    /// manifest exists and the line has not moved since. Returns the serial of the adopted version.
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
        for serial in record::serials_without_version(&self.pool, &self.policy, oldest, newest).await? {
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
            let run_state_key = run_state::key(claim.run, step, serial);
            let record = match self.read_run_state(&run_state_key).await {
                Ok(run_state) => run_state.record,
                Err(error) if error.is_lost() => {
                    tracing::warn!(%error, serial, "a prepared step has no readable run state: left as an orphan");
                    continue;
                }
                Err(error) => return Err(error),
            };
            let prepared = Prepared {
                manifest,
                record,
                run_state_key,
                timings: Timings::default(),
            };
            match self.commit(claim, &prepared).await {
                Ok(()) => {
                    self.after_commit(&prepared).await;
                    return Ok(Some(serial));
                }
                Err(Error::AlreadyDecided) => {
                    tracing::warn!(
                        serial,
                        "the cohort of a prepared step has other dispositions: left as an orphan"
                    );
                }
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// The manifest of a serial that the database does not have, if there is a valid one.
    async fn probe(&self, serial: i64) -> Result<Option<Manifest>, Error> {
        match self.store.get_manifest(&self.policy, serial, &self.trusted).await {
            Ok(manifest) => Ok(Some(manifest)),
            Err(store::Error::NotFound(_)) => Ok(None),
            Err(
                error @ (store::Error::Corrupt { .. } | store::Error::Signature { .. } | store::Error::Document { .. }),
            ) => {
                tracing::warn!(%error, serial, "a manifest without a row is not valid: left as an orphan");
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }

    pub async fn read_run_state(&self, key: &str) -> Result<RunState, Error> {
        let bytes = self.store.get_private(key).await?;
        Ok(tokio::task::spawn_blocking(move || RunState::from_bytes(&bytes)).await??)
    }
}

/// The objects of a version, with their bytes until the manifest is written.
struct Objects {
    root: Digest,
    delta: Pieces,
    checkpoint: Option<Pieces>,
    quantized: Vec<Quantized>,
    encode_seconds: f64,
}

impl Objects {
    /// Timings of a publication without its commit.
    fn timings(&self, started: Instant) -> Timings {
        Timings {
            encode: self.encode_seconds,
            upload: started.elapsed().as_secs_f64() - self.encode_seconds,
            commit: 0.0,
        }
    }
}

/// Hashing and compressing takes seconds for large models, so it runs on a blocking thread.
async fn encode(
    parent: Arc<Checkpoint>,
    checkpoint: Arc<Checkpoint>,
    threads: Threads,
) -> Result<(Digest, Pieces), Error> {
    tokio::task::spawn_blocking(move || {
        let delta = artifact::delta::encode(&parent, &checkpoint, &threads)?;
        Ok((checkpoint.root(), Pieces::new(vec![delta.into()])))
    })
    .await?
}
