//! The commit of a step, the same for every kind of run. Computes no loss and holds no tensors.
//!
//! ```text
//! serial from the sequence → run state uploaded ┐
//! delta encoded → objects uploaded              ┴→ intent, fenced: digests of manifest and run state
//!   → manifest put if absent (run, step, cohort, fence)
//!   → objects checked once more: garbage collection may have deleted one that already existed
//!   → THE COMMIT, one fenced transaction: version, head of the line, step, dispositions, baselines
//!   → announcement, repeatable
//! ```
//! After a crash before the manifest, objects are left that nothing names. After a crash between
//! manifest and commit, the next executor finds the manifest of its intent and commits exactly that
//! step (`intent`), or leaves it as an orphan that nobody follows.
//!
//! The store is not trusted, nor is a manifest because this trainer's key signed it: the key may be
//! stolen. What a run continues from is known by its digest in the database.

mod error;
mod external;
mod import;
mod intent;
mod quantized;
pub(crate) mod record;
pub mod referenced;
pub mod run_state;
mod shards;
pub mod squash;

pub use error::Error;
pub use external::{External, Outcome, Weights, publish_external};
pub use import::{import, import_checkpoint};
pub use quantized::QuantizedCopies;
pub use record::{begin_line, line, rebase_line, refuse_withdrawn};
pub use shards::{ShardedVersion, publish_shards, put_shard};

use crate::claim::Claim;
use artifact::checkpoint::Checkpoint;
use artifact::digest::Digest;
use artifact::manifest::{self, Manifest, Parent, Quantized, RunStep};
use artifact::reference::Reference;
use artifact::sign::{SigningKey, TrustedKeys};
use artifact::threads::Threads;
use event_log::Producer;
use model::config::ModelConfig;
use model::exact::{Arithmetic, ExactModel};
use run_state::{Encoded, StepRecord};
use sqlx::PgPool;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;
use store::{Pieces, PutOutcome, Store};
use time::OffsetDateTime;

/// Larger versions are not computed with to check or describe them: packed, they take about as much again.
pub const EXACT_BYTES_MAX: u64 = 4 << 30;
/// Serials tried before we conclude that the store belongs to another database.
const SERIALS_TRIED_MAX: usize = 8;

/// Publishes versions of one policy.
#[derive(Clone)]
pub struct Publisher {
    pub pool: PgPool,
    pub store: Store,
    pub key: Arc<SigningKey>,
    /// Folder of the trusted public keys. It is read for each use, as revocations are.
    pub keys_dir: PathBuf,
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
    /// [`RunState`] after the step.
    pub run_state: Encoded,
    /// Of a trainer whose model ours does not compute.
    pub reference: Option<Reference>,
    /// The base of `checkpoint`, if that is an adapter.
    pub adapts: Option<Parent>,
}

/// A step whose manifest is in the store and that only lacks its commit.
#[derive(Debug, Clone)]
pub struct Prepared {
    pub manifest: Manifest,
    pub record: StepRecord,
    pub run_state_key: String,
    pub run_state_digest: Digest,
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

/// A step of a claimed run, and the run state after it.
type StepState<'a> = (&'a Claim, i64, &'a Encoded);

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
        let (parent_checkpoint, checkpoint) = (draft.parent_checkpoint, draft.checkpoint);
        let content = Content {
            adapts: draft.adapts,
            parent: self
                .base_of_delta(draft.parent, draft.adapts, parent_checkpoint)
                .await?,
            checkpoint,
            given: draft.reference,
        };
        let step = draft.record.step;
        let checkpoint_due =
            step % self.checkpoint_every == 0 || parent_row.line != draft.line || parent_row.branch != draft.branch;
        let parent = Parent {
            version: draft.parent,
            root: parent_row.root,
        };
        let objects = self.objects(started, parent, content, checkpoint_due);
        // the run state is most of the bytes: it is uploaded while the delta is encoded
        let run_state = Some((claim, step, &draft.run_state));
        let (objects, reserved) = tokio::try_join!(objects, self.reserve(run_state))?;
        let mut manifest = Manifest {
            run: Some(RunStep {
                run: claim.run,
                step,
                cohort_digest: draft.record.cohort_digest(),
            }),
            fence: claim.fence,
            ..self.manifest_of(&objects, parent, draft.line, draft.branch)
        };
        let run_state_key = self.put_manifest(&mut manifest, reserved, run_state).await?;
        self.restore_missing(&objects).await?;
        Ok(Prepared {
            manifest,
            record: draft.record,
            run_state_key,
            run_state_digest: draft.run_state.digest,
            timings: objects.timings(started),
        })
    }

    /// The keys of the folder, without those that are revoked by now.
    pub async fn trusted(&self) -> Result<TrustedKeys, Error> {
        let keys = TrustedKeys::load(&self.keys_dir)?;
        Ok(self.store.trusted(&self.policy, keys).await?)
    }

    /// [`trusted`](Self::trusted), or an error if this publisher's key may not sign versions any
    /// longer.
    pub async fn signing_keys(&self) -> Result<TrustedKeys, Error> {
        let (trusted, key) = (self.trusted().await?, self.key.key_id());
        match trusted.may_sign(key, manifest::KIND) {
            true => Ok(trusted),
            false => Err(Error::KeyRefused { key: key.into() }),
        }
    }

    /// Restores a version that the database has: of an adapter, its base with the factors. Other bytes are refused, whoever signed them.
    pub async fn load(&self, version: i64) -> Result<Arc<Checkpoint>, Error> {
        let root = record::version(&self.pool, &self.policy, version).await?.root;
        let trusted = self.trusted().await?;
        let restored = self
            .store
            .materialize_model(&self.policy, version, &trusted, &[])
            .await?;
        match restored.root {
            found if found == root => Ok(restored.checkpoint),
            found => Err(Error::OtherRoot { version, root, found }),
        }
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
            reference: None,
            adapts: None,
        }
    }

    /// A manifest that names `objects`.
    fn manifest_of(&self, objects: &Objects, parent: Parent, line: String, branch: i32) -> Manifest {
        Manifest {
            checkpoint: objects.checkpoint.as_ref().map(Pieces::object),
            delta: objects.delta.as_ref().map(Pieces::object),
            quantized: objects.quantized.clone(),
            reference: objects.reference.clone(),
            adapts: objects.adapts,
            ..self.manifest(objects.root, Some(parent), line, branch, objects.tensor_bytes)
        }
    }

    /// What the delta of a version starts from: `None` if its parent is of another kind, one an adapter and the other
    /// not, or adapters of two bases.
    async fn base_of_delta(
        &self,
        parent: i64,
        adapts: Option<Parent>,
        checkpoint: Arc<Checkpoint>,
    ) -> Result<Option<Arc<Checkpoint>>, Error> {
        Ok((self.adapted(parent).await? == adapts).then_some(checkpoint))
    }

    /// What a version adapts.
    pub async fn adapted(&self, version: i64) -> Result<Option<Parent>, Error> {
        let trusted = self.trusted().await?;
        Ok(self.store.get_manifest(&self.policy, version, &trusted).await?.adapts)
    }

    /// Uploads the delta of a version and, if one is due, its full checkpoint. Also computes the
    /// roots of its quantized copies.
    async fn objects(
        &self,
        started: Instant,
        parent: Parent,
        content: Content,
        checkpoint_due: bool,
    ) -> Result<Objects, Error> {
        let Content {
            parent: base,
            checkpoint: model,
            adapts,
            given,
        } = content;
        // of an adapter, only the factors are stored
        let stored = |model: Arc<Checkpoint>| match adapts {
            Some(_) => Arc::new(model.adapter()),
            None => model,
        };
        let (checkpoint, base) = (stored(Arc::clone(&model)), base.map(stored));
        let checkpoint_due = checkpoint_due || base.is_none();
        let quantized = async {
            match adapts {
                Some(_) => Ok(vec![]),
                None => self.quantized.for_manifest(Arc::clone(&model)).await,
            }
        };
        let encoded = encode(base, Arc::clone(&checkpoint), self.store.threads().clone());
        let chain_bytes = self.chain_bytes(parent.version, checkpoint_due);
        let reference = self.reference(Arc::clone(&model), given);
        let ((root, delta), quantized, chain_bytes, reference) =
            tokio::try_join!(encoded, quantized, chain_bytes, reference)?;
        let bytes = chain_bytes.saturating_add(delta.as_ref().map_or(0, |delta| delta.object().size_bytes));
        let tensor_bytes = checkpoint.tensor_bytes();
        let full = match checkpoint_due || bytes.saturating_mul(2) > checkpoint.tensor_bytes() {
            true => Some(tokio::task::spawn_blocking(move || checkpoint.to_pieces().map(Pieces::new)).await??),
            false => None,
        };
        let encode_seconds = started.elapsed().as_secs_f64();
        for object in delta.iter().chain(&full) {
            self.store.put_pieces(&self.policy, object).await?;
        }
        Ok(Objects {
            root,
            adapts,
            tensor_bytes,
            delta,
            checkpoint: full,
            quantized,
            reference,
            encode_seconds,
        })
    }

    /// Bytes of the deltas from the nearest full checkpoint to `serial`: what a new replica
    /// downloads besides the checkpoint. 0 if a checkpoint is due anyway.
    async fn chain_bytes(&self, serial: i64, checkpoint_due: bool) -> Result<u64, Error> {
        if checkpoint_due {
            return Ok(0);
        }
        let trusted = self.trusted().await?;
        let mut bytes = 0;
        let mut next = Some(serial);
        for _ in 0..self.checkpoint_every {
            let Some(serial) = next else { break };
            let manifest = match self.store.get_manifest(&self.policy, serial, &trusted).await {
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
        let parts: Vec<&Pieces> = objects.checkpoint.iter().chain(&objects.delta).collect();
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
        if let Some((claim, step, run_state)) = run_state {
            run_state_key = run_state::key(claim.run, step, serial);
            self.store.put_private(&run_state_key, &run_state.bytes).await?;
        }
        Ok(Reserved { serial, run_state_key })
    }

    /// Puts the manifest under the reserved serial, or under the next one if the store has that
    /// serial already (as after a database restore). Returns the key of the run state. Refuses if
    /// the key has been revoked.
    async fn put_manifest(
        &self,
        manifest: &mut Manifest,
        mut reserved: Reserved,
        run_state: Option<StepState<'_>>,
    ) -> Result<String, Error> {
        self.signing_keys().await?;
        for _ in 0..SERIALS_TRIED_MAX {
            manifest.version = reserved.serial;
            if let Some((claim, _, run_state)) = run_state {
                self.note_intent(claim, manifest, run_state.digest).await?;
            }
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
        let mut transaction = claim.begin(&self.pool).await?;
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
        let announcement = event_log::Announcement {
            policy: self.policy.clone(),
            object_key: record::manifest_key(&self.policy, version),
            version,
            epoch: 0,
        };
        if let Err(error) = producer.send_announcement(&announcement).await {
            tracing::warn!(%error, version, "could not announce a version; followers will find it by polling");
        }
    }
}

/// What a version is to have.
struct Content {
    /// What its delta starts from.
    parent: Option<Arc<Checkpoint>>,
    checkpoint: Arc<Checkpoint>,
    adapts: Option<Parent>,
    /// Of a publisher whose model ours does not compute.
    given: Option<Reference>,
}

/// The objects of a version, with their bytes until the manifest is written.
struct Objects {
    root: Digest,
    adapts: Option<Parent>,
    /// Of its own tensors.
    tensor_bytes: u64,
    delta: Option<Pieces>,
    checkpoint: Option<Pieces>,
    quantized: Vec<Quantized>,
    reference: Option<Reference>,
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

impl Publisher {
    /// What engines that serve the version are compared with: what our exact model says with the values that are served,
    /// or else what its publisher has `given`. None if our model does not know the architecture, or would not fit.
    async fn reference(
        &self,
        checkpoint: Arc<Checkpoint>,
        given: Option<Reference>,
    ) -> Result<Option<Reference>, Error> {
        let json = checkpoint.files.get("config.json");
        let is_known = json.is_some_and(|json| ModelConfig::from_json(json).is_ok());
        if !is_known || checkpoint.tensor_bytes() > EXACT_BYTES_MAX {
            return Ok(given);
        }
        let arithmetic = Arithmetic {
            threads: self.store.threads().clone(),
            quantized: self.quantized.served,
            ..Arithmetic::default()
        };
        tokio::task::spawn_blocking(move || match ExactModel::with_arithmetic(&checkpoint, &arithmetic) {
            Ok(model) => Ok(model::reference::of(&model)?),
            // such as tensors of another shape: loading it says so, where somebody can do something about it
            Err(error) => {
                tracing::warn!(%error, "a version without reference log-probabilities");
                Ok(given)
            }
        })
        .await?
    }
}

/// Hashing and compressing takes seconds for large models, so it runs on a blocking thread.
async fn encode(
    parent: Option<Arc<Checkpoint>>,
    checkpoint: Arc<Checkpoint>,
    threads: Threads,
) -> Result<(Digest, Option<Pieces>), Error> {
    tokio::task::spawn_blocking(move || {
        let encode = |parent: Arc<Checkpoint>| artifact::delta::encode(&parent, &checkpoint, &threads);
        let delta = parent.map(encode).transpose()?;
        Ok((
            checkpoint.root_on(&threads),
            delta.map(|delta| Pieces::new(vec![delta.into()])),
        ))
    })
    .await?
}
