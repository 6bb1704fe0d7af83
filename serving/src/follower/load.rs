//! Loads versions: fetches and verifies them. Then our own engine gets them, beside those that serve,
//! or another engine serves them, or they are kept as folders. Tracks their memory, and keeps their
//! checkpoints as bases for the next delta. Over 500 lines, because the three share one account of
//! memory.

use super::Options;
use super::folders::{self, Folders};
use crate::engine::exact::{ExactBackend, Staging};
use crate::engine::{Handle, LoadedVersion};
use crate::fleet::Swap;
use crate::remote::{Updater, VersionWeights};
use anyhow::Context;
use artifact::adapter;
use artifact::assignment::Target;
use artifact::checkpoint::Checkpoint;
use artifact::digest::Digest;
use artifact::folder::FILES;
use artifact::manifest::Manifest;
use artifact::memory::{self, Spare};
use artifact::need::gb;
use artifact::quant::{self, Spec};
use artifact::reference::Reference;
use artifact::sign::TrustedKeys;
use bytes::Bytes;
use futures::FutureExt as _;
use model::config::declared_context;
use model::lora;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use store::{Materialized, Store};
use text::chat::{self, Templates};
use text::tokenizer::Tokenizer;
use time::OffsetDateTime;

/// How long a required version waits for retiring versions to free memory.
const ROOM_WAIT: Duration = Duration::from_secs(30);
const ROOM_CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// The checkpoint plus the packed weights, which take as many bytes again for bf16 and f32, and
/// twice as many for f16.
pub(crate) const BYTES_PER_CHECKPOINT_BYTE: u64 = 3;

struct Loaded {
    /// Dead once the version has retired.
    version: Weak<LoadedVersion>,
    checkpoint: Arc<Checkpoint>,
    /// For engines elsewhere.
    weights: VersionWeights,
    bytes: u64,
}

/// What a version needs to read and write text.
type TextParts = (Option<Tokenizer>, Result<Arc<Templates>, Arc<chat::Error>>);

/// Where versions are sampled.
pub enum Host {
    /// Our own engine, which holds several versions.
    Own { engine: Handle, staging: Arc<Staging> },
    /// Engines elsewhere, which hold one each.
    Remote { updater: Box<Updater> },
    /// Whoever reads folders.
    Folders(Folders),
}

/// A version to load.
#[derive(Debug, Clone, Copy)]
pub struct Wanted {
    /// Epoch of the assignment that names it.
    pub epoch: i64,
    pub target: Target,
    /// It may wait for memory.
    pub required: bool,
}

/// How long a version took to be served.
#[derive(Debug, Clone, Copy, Default)]
struct Hosted {
    stage: Duration,
    pause: Duration,
}

/// Versions that no engine serves, and why.
pub type Unplaced = BTreeMap<i64, anyhow::Error>;

/// Loads versions and remembers which ones are loaded.
pub struct Loader {
    policy: String,
    replica: String,
    store: Store,
    host: Host,
    quantized: Option<Spec>,
    bytes_max: u64,
    /// KV cache of the version staged last; all versions of a policy have similar caches.
    cache_bytes: u64,
    /// By serial.
    loaded: BTreeMap<i64, Loaded>,
    /// Keeps the memory of retired versions for the next one.
    spare: Spare,
    /// Weights of the version staged last.
    tensor_bytes: u64,
}

impl Loader {
    pub fn new(options: &Options, host: Host) -> Self {
        Loader {
            policy: options.policy.clone(),
            replica: options.replica.clone(),
            store: options.store.clone(),
            host,
            quantized: options.quantized,
            bytes_max: options.resident_bytes_max,
            cache_bytes: 0,
            loaded: BTreeMap::new(),
            spare: Spare::default(),
            tensor_bytes: 0,
        }
    }

    /// Returns the version; loads it if necessary, and then also returns how long that took.
    pub async fn load(
        &mut self,
        keys: &TrustedKeys,
        wanted: Wanted,
    ) -> anyhow::Result<(Arc<LoadedVersion>, Option<Swap>)> {
        let target = wanted.target;
        let loaded = self.loaded.get(&target.version);
        let known = loaded.and_then(|loaded| Some((loaded.version.upgrade()?, loaded.weights.given.clone())));
        if let Some((version, given)) = known {
            check_content_hash(version.root, target)?;
            match &mut self.host {
                // engines elsewhere get it when all versions are here
                Host::Own { .. } | Host::Remote { .. } => {}
                // another version may have been tried since
                Host::Folders(folders) => {
                    let version = folders::Version::new(target.version, &given);
                    if !folders.is_in_force(version.serial, version.root) {
                        folders.put_in_force(&version, None).await?;
                    }
                }
            }
            return Ok((version, None));
        }
        let manifest = self
            .store
            .get_manifest(&self.policy, target.version, keys)
            .await
            .context("read the manifest")?;
        check_content_hash(manifest.root, target)?;
        if let Some(spec) = self.quantized {
            quant::named(&manifest, spec).context("policy.serves")?;
        }
        let mut tensor_bytes = manifest.tensor_bytes;
        if let Some(base) = manifest.adapts {
            let manifest = self.store.get_manifest(&self.policy, base.version, keys).await;
            tensor_bytes += manifest.context("read the manifest of its base")?.tensor_bytes;
        }
        let weights = tensor_bytes.saturating_mul(match &self.host {
            Host::Own { .. } => BYTES_PER_CHECKPOINT_BYTE,
            // nobody computes with them here: `policy.memory_bytes` bounds them
            Host::Folders(_) | Host::Remote { .. } => 0,
        });
        let needed = weights.saturating_add(self.cache_bytes);
        self.make_room(needed, wanted.required).await?;
        // spare buffers may not have the sizes that this version needs, so they must fit in
        // addition to it
        let spare = self.spare.kept_bytes() as u64;
        if tensor_bytes != self.tensor_bytes
            || self.used().saturating_add(needed).saturating_add(spare) > self.bytes_max
        {
            self.keep_spare(0);
        }

        let bases = self.loaded.iter();
        let mut bases: Vec<(i64, Arc<Checkpoint>)> = bases
            .map(|(&serial, loaded)| (serial, loaded.checkpoint.clone()))
            .collect();
        if let Host::Folders(folders) = &self.host {
            let (folders, version, root) = (folders.clone(), target.version, target.root);
            let known: Vec<i64> = bases.iter().map(|(serial, _)| *serial).collect();
            let read = tokio::task::spawn_blocking(move || folders.bases(version, root, &known));
            bases.extend(read.await.context("the reading thread")?);
        }
        let restored = self.restore(target.version, &manifest, keys, &bases).await?;
        drop(bases);
        let mut checkpoint = restored.checkpoint;
        // Only now is the model's shape known. A cache that does not fit must not be allocated.
        self.cache_bytes = match &self.host {
            Host::Own { staging, .. } => ExactBackend::cache_bytes_for(&checkpoint, staging).context("stage")?,
            Host::Remote { .. } | Host::Folders(_) => 0,
        };
        if self.used().saturating_add(weights).saturating_add(self.cache_bytes) > self.bytes_max {
            self.make_room(weights.saturating_add(self.cache_bytes), wanted.required)
                .await?;
        }
        let adapts = manifest.adapts.map(|base| base.version);
        let reference = self.reference(&manifest);
        let mut given = match &self.host {
            Host::Remote { updater } if updater.gives_weights() => self.given(&manifest, &checkpoint).await?,
            Host::Folders(_) if self.quantized.is_some() => self.given(&manifest, &checkpoint).await?,
            _ => checkpoint.clone(),
        };
        let described = (manifest.line, reference, adapts);
        let (version, hosted) = self.host(target, described, &mut checkpoint, &mut given).await?;
        self.loaded.insert(
            target.version,
            Loaded {
                version: Arc::downgrade(&version),
                weights: VersionWeights {
                    checkpoint: checkpoint.clone(),
                    given,
                },
                checkpoint,
                bytes: weights.saturating_add(self.cache_bytes),
            },
        );
        self.tensor_bytes = tensor_bytes;
        self.keep_spare(weights.min(self.bytes_max.saturating_sub(self.used())));
        let swap = Swap {
            id: None,
            replica: self.replica.clone(),
            policy: self.policy.clone(),
            version: target.version,
            epoch: wanted.epoch,
            fetch_ms: ms(restored.fetch),
            verify_ms: ms(restored.verify),
            stage_ms: ms(hosted.stage),
            pause_ms: ms(hosted.pause),
            at: OffsetDateTime::now_utc(),
        };
        tracing::info!(
            version = target.version,
            root = %target.root.short(),
            fetched_bytes = restored.bytes_fetched,
            fetch_ms = swap.fetch_ms,
            verify_ms = swap.verify_ms,
            stage_ms = swap.stage_ms,
            pause_ms = swap.pause_ms,
            "version resident"
        );
        metrics::histogram!("springtide_swap_stage_seconds").record(hosted.stage.as_secs_f64());
        metrics::counter!("springtide_followed_bytes_total").increment(restored.bytes_fetched);
        Ok((version, Some(swap)))
    }

    /// Reads a version from the store: only its files if engines elsewhere answer that get no weights from
    /// here.
    async fn restore(
        &mut self,
        serial: i64,
        manifest: &Manifest,
        keys: &TrustedKeys,
        bases: &[(i64, Arc<Checkpoint>)],
    ) -> anyhow::Result<Materialized> {
        match &self.host {
            Host::Remote { updater } if !updater.gives_weights() => {
                if manifest.adapts.is_some() && updater.gives_adapters() {
                    let read = self.store.materialize(&self.policy, serial, keys, bases);
                    return read.await.context("materialize");
                }
            }
            Host::Folders(_) if manifest.adapts.is_some() => anyhow::bail!(
                "version {serial} is an adapter, and a folder has all weights: merge it with `springtide policy export \
                 {serial}`, publish that, and promote it"
            ),
            Host::Own { .. } | Host::Folders(_) | Host::Remote { .. } => {
                let read = self.store.materialize_model(&self.policy, serial, keys, bases);
                return read.await.context("materialize");
            }
        }
        let started = Instant::now();
        let files = self
            .store
            .files(&self.policy, serial, keys, FILES)
            .await
            .context("read its files")?;
        Ok(Materialized {
            bytes_fetched: files.files.values().map(|file| file.len() as u64).sum(),
            checkpoint: Arc::new(files),
            root: manifest.root,
            fetch: started.elapsed(),
            verify: Duration::ZERO,
            path: vec![serial],
        })
    }

    /// What engines elsewhere get of a version: its copy, or all its weights.
    async fn given(&self, manifest: &Manifest, checkpoint: &Arc<Checkpoint>) -> anyhow::Result<Arc<Checkpoint>> {
        let (manifest, checkpoint) = (manifest.clone(), checkpoint.clone());
        let (quantized, threads) = (self.quantized, self.store.threads().clone());
        let given = tokio::task::spawn_blocking(move || {
            let merged = lora::merged(&checkpoint).context("merge the adapter")?;
            let given = match quantized {
                Some(spec) => Arc::new(quant::verified(&merged, &manifest, spec, &threads)?),
                None => merged,
            };
            // engines are told the digests
            given.root_on(&threads);
            Ok(given)
        });
        given.await.context("the thread of what engines get")?
    }

    /// What engines are compared with, if it is of the weights that they have.
    fn reference(&self, manifest: &Manifest) -> Option<Arc<Reference>> {
        let reference = manifest.reference.as_ref()?;
        let (of, serves) = (reference.quantized.as_deref(), self.quantized.map(Spec::name));
        if of == serves {
            return Some(Arc::new(reference.clone()));
        }
        tracing::warn!(
            version = manifest.version,
            of,
            serves,
            "the version's reference log-probabilities are of other weights than policy.serves names"
        );
        None
    }

    /// Notes what an assignment says of engines that cannot be probed.
    pub fn vouch(&self, aliases: &BTreeMap<String, Target>) {
        if let Host::Remote { updater } = &self.host {
            updater.vouch(aliases);
        }
    }

    /// Requests are routed by this assignment, to these versions, from now on.
    pub fn in_force(&self, aliases: &BTreeMap<String, Target>, serials: BTreeSet<i64>) {
        if let Host::Remote { updater } = &self.host {
            updater.in_force(aliases, serials);
        }
    }

    /// Has engines elsewhere serve versions that are loaded. The `required` ones choose in their order and
    /// change all at once, before the others get what is left. `failed` gets the serials that none serves, and why; those that
    /// are there are not tried. Dropping the future leaves changes going on.
    pub async fn place(&mut self, required: &[i64], others: &[i64], swaps: &mut [Swap], failed: &mut Unplaced) {
        let Host::Remote { updater } = &mut self.host else {
            return;
        };
        let mut kept: BTreeSet<i64> = required.iter().copied().collect();
        let rounds = std::iter::once(required.to_vec()).chain(others.iter().map(|&serial| vec![serial]));
        for round in rounds {
            for &serial in &round {
                if failed.contains_key(&serial) {
                    continue;
                }
                let loaded = self.loaded.get(&serial);
                let Some((version, loaded)) = loaded.and_then(|loaded| Some((loaded.version.upgrade()?, loaded)))
                else {
                    continue;
                };
                kept.insert(serial);
                if let Err(error) = updater.begin(&version, &loaded.weights, &kept).await {
                    failed.insert(serial, error);
                }
            }
            while round
                .iter()
                .any(|serial| !failed.contains_key(serial) && updater.gets(*serial))
            {
                let Some((serial, ended)) = updater.next_end().await else {
                    break;
                };
                match ended {
                    Ok(pause) => {
                        if let Some(swap) = swaps.iter_mut().find(|swap| swap.version == serial) {
                            swap.pause_ms = ms(pause);
                        }
                    }
                    Err(error) => drop(failed.insert(serial, error)),
                }
            }
            kept.retain(|serial| required.contains(serial) || !failed.contains_key(serial));
        }
    }

    /// Whether a version is sampled anywhere. Of our own engine's versions all are.
    pub fn serves(&self, serial: i64) -> bool {
        match &self.host {
            Host::Remote { updater } => updater.serves(serial),
            Host::Own { .. } | Host::Folders(_) => true,
        }
    }

    /// Engines elsewhere may restart, and some may be spare: begins to give them the versions that they should
    /// hold, without waiting. `shares`: versions in force and the shares of users they have. Fails with what
    /// went wrong since the last call.
    pub async fn mend(&mut self, shares: &[(i64, f64)]) -> anyhow::Result<()> {
        let Host::Remote { updater } = &mut self.host else {
            return Ok(());
        };
        let mut result = Ok(());
        while let Some(Some((_, ended))) = updater.next_end().now_or_never() {
            if let Err(error) = ended {
                result = Err(error);
            }
        }
        let in_force = shares.iter().filter_map(|(serial, _)| {
            let loaded = self.loaded.get(serial)?;
            Some((loaded.version.upgrade()?, loaded.weights.clone()))
        });
        let in_force: Vec<_> = in_force.collect();
        updater.adapt(&in_force).await;
        let in_force: Vec<_> = in_force.into_iter().map(|(version, _)| version).collect();
        updater.recognize(&in_force).await;
        while let Some((engine, serial)) = updater.next_change(shares) {
            let loaded = self.loaded.get(&serial);
            let Some((version, loaded)) = loaded.and_then(|loaded| Some((loaded.version.upgrade()?, loaded))) else {
                break;
            };
            updater.start(engine, &version, &loaded.weights.given).await?;
        }
        result
    }

    /// Has the version sampled: stages it beside the others in our own engine, or writes its folder. Engines
    /// elsewhere get it later ([`Loader::place`]).
    async fn host(
        &mut self,
        target: Target,
        described: Described,
        checkpoint: &mut Arc<Checkpoint>,
        given: &mut Arc<Checkpoint>,
    ) -> anyhow::Result<(Arc<LoadedVersion>, Hosted)> {
        let started = Instant::now();
        let text = self.text_of(checkpoint).await?;
        let shape = match &mut self.host {
            Host::Own { engine, staging } => {
                let (checkpoint, staging) = (checkpoint.clone(), staging.clone());
                let staged = tokio::task::spawn_blocking(move || ExactBackend::stage(&checkpoint, &staging));
                let backend = staged.await.context("the staging thread")?.context("stage")?;
                let stage = started.elapsed();
                let shape = Shape {
                    context: backend.context(),
                    vocab: backend.vocab(),
                    experts: backend.experts(),
                };
                let version = Arc::new(loaded_version(target, described, shape, text));
                let installation = engine.install(version.clone(), Box::new(backend)).await;
                let installation = installation.context("install")?;
                // freeing gigabytes blocks, so it happens on a blocking thread
                tokio::spawn(async move {
                    if let Ok(backend) = installation.retired.await {
                        let _ = tokio::task::spawn_blocking(move || drop(backend)).await;
                        metrics::gauge!("springtide_spare_bytes").set(memory::kept_bytes() as f64);
                    }
                });
                let pause = installation.pause;
                return Ok((version, Hosted { stage, pause }));
            }
            Host::Remote { updater } => {
                let Declared {
                    vocab,
                    context,
                    experts,
                } = declared(checkpoint)?;
                Shape {
                    context: updater.context().await?.min(context),
                    vocab,
                    experts,
                }
            }
            Host::Folders(folders) => {
                let version = folders::Version::new(target.version, given);
                let before = self.loaded.iter().next_back();
                let before = before.map(|(&serial, loaded)| folders::Version::new(serial, &loaded.weights.given));
                // what was restored can go, unless the next delta starts from it: else that starts from the folder
                *given = folders.put_in_force(&version, before.as_ref()).await?;
                if self.quantized.is_none() {
                    *checkpoint = given.clone();
                }
                // whoever reads the folder computes with it
                Shape {
                    context: 0,
                    vocab: 0,
                    experts: None,
                }
            }
        };
        let hosted = Hosted {
            stage: started.elapsed(),
            pause: Duration::ZERO,
        };
        Ok((Arc::new(loaded_version(target, described, shape, text)), hosted))
    }

    /// Reuses the parts of a loaded version with identical files. All versions of a line usually
    /// have the same files. Whoever reads folders tokenizes by itself.
    async fn text_of(&self, checkpoint: &Arc<Checkpoint>) -> anyhow::Result<TextParts> {
        let same = self
            .loaded
            .values()
            .filter(|one| text_files(&one.checkpoint).eq(text_files(checkpoint)));
        if let Some(version) = same.filter_map(|loaded| loaded.version.upgrade()).next() {
            return Ok((version.tokenizer.clone(), version.templates.clone()));
        }
        let (checkpoint, tokenizes) = (checkpoint.clone(), !matches!(self.host, Host::Folders(_)));
        let read = tokio::task::spawn_blocking(move || read_text(&checkpoint, tokenizes));
        read.await.context("the reading thread")?
    }

    /// Keeps at most `bytes` of the memory of retired versions.
    fn keep_spare(&mut self, bytes: u64) {
        let released = self.spare.resize(bytes);
        tokio::task::spawn_blocking(move || drop(released));
        metrics::gauge!("springtide_spare_bytes").set(memory::kept_bytes() as f64);
    }

    fn used(&self) -> u64 {
        self.loaded.values().map(|loaded| loaded.bytes).sum()
    }

    /// Forgets retired versions. A required version waits until enough others have retired.
    async fn make_room(&mut self, bytes: u64, required: bool) -> anyhow::Result<()> {
        let started = Instant::now();
        loop {
            self.loaded.retain(|_, loaded| loaded.version.strong_count() > 0);
            let used = self.used();
            metrics::gauge!("springtide_resident_bytes").set(used as f64);
            // what nobody must have leaves room for the next version, or a rollback would never find any
            let reserved = if required || self.loaded.is_empty() { 0 } else { bytes };
            if used.saturating_add(bytes).saturating_add(reserved) <= self.bytes_max {
                return Ok(());
            }
            // nothing that retires makes room for more than there is
            anyhow::ensure!(
                required && bytes <= self.bytes_max && started.elapsed() < ROOM_WAIT,
                "the version needs {} of memory, and {} of {} are in use; raise serve.resident_bytes_max",
                gb(bytes),
                gb(used),
                gb(self.bytes_max)
            );
            tokio::time::sleep(ROOM_CHECK_INTERVAL).await;
        }
    }
}

/// The files of which text is read.
fn text_files(checkpoint: &Checkpoint) -> impl Iterator<Item = (&String, &Bytes)> {
    let files = checkpoint.files.iter();
    files.filter(|(name, _)| *name != adapter::CONFIG)
}

/// What a gateway needs of a `config.json`. The engine knows the architecture, so any will do.
struct Declared {
    vocab: u32,
    context: usize,
    /// Experts per layer.
    experts: Option<u16>,
}

/// The names that models have for their number of experts.
const EXPERTS: [&str; 3] = ["num_experts", "num_local_experts", "n_routed_experts"];

fn declared(checkpoint: &Checkpoint) -> anyhow::Result<Declared> {
    let config = checkpoint.files.get("config.json").context("config.json is missing")?;
    let config: Value = serde_json::from_slice(config).context("read config.json")?;
    let vocab = config["vocab_size"].as_u64().and_then(|size| u32::try_from(size).ok());
    let context = declared_context(&config).and_then(|context| usize::try_from(context).ok());
    let vocab = vocab.context("config.json has no vocab_size, or it is no number")?;
    let experts = EXPERTS.into_iter().find_map(|name| config[name].as_u64());
    Ok(Declared {
        vocab,
        context: context.unwrap_or(usize::MAX),
        experts: experts.and_then(|count| u16::try_from(count).ok()),
    })
}

/// What a model computes with.
#[derive(Clone, Copy)]
struct Shape {
    context: usize,
    vocab: u32,
    experts: Option<u16>,
}

/// Of the manifest: the line, what engines are compared with, and the version that it adapts.
type Described = (String, Option<Arc<Reference>>, Option<i64>);

fn loaded_version(
    target: Target,
    (line, reference, adapts): Described,
    shape: Shape,
    (tokenizer, templates): TextParts,
) -> LoadedVersion {
    LoadedVersion {
        serial: target.version,
        root: target.root,
        line,
        adapts,
        context: shape.context,
        vocab: shape.vocab,
        experts: shape.experts,
        stop_ids: tokenizer.as_ref().map(Tokenizer::ending_ids).unwrap_or_default(),
        decline_id: tokenizer.as_ref().and_then(Tokenizer::decline_id),
        tokenizer,
        reference,
        templates,
    }
}

fn read_text(checkpoint: &Checkpoint, tokenizes: bool) -> anyhow::Result<TextParts> {
    let tokenizer = match tokenizes && checkpoint.files.contains_key("tokenizer.json") {
        true => Some(Tokenizer::from_checkpoint(checkpoint).context("read the tokenizer")?),
        false => None,
    };
    let templates = Templates::from_checkpoint(checkpoint);
    if let (Err(error), true) = (&templates, tokenizes) {
        tracing::warn!(%error, "chat templates not read: chat requests are refused");
    }
    Ok((tokenizer, templates.map(Arc::new).map_err(Arc::new)))
}

fn check_content_hash(hash: Digest, target: Target) -> anyhow::Result<()> {
    anyhow::ensure!(
        hash == target.root,
        "version {} has the content hash {hash}, but the assignment names {}",
        target.version,
        target.root
    );
    Ok(())
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::engine;
    use artifact::manifest::Quantized;
    use artifact::sign::SigningKey;
    use artifact::threads::Threads;
    use model::exact::{Arithmetic, ExactModel};
    use std::path::Path;

    fn golden() -> Checkpoint {
        let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../policy/model/tests/golden/qwen3");
        Checkpoint::read_dir(Path::new(golden)).unwrap()
    }

    /// Publishes `checkpoint` as this version of a store in `folder`.
    pub(in crate::follower) async fn publish(
        folder: &Path,
        version: i64,
        checkpoint: &Checkpoint,
    ) -> (Store, TrustedKeys, Target) {
        publish_sized(folder, version, checkpoint, checkpoint.tensor_bytes()).await
    }

    /// The same with a manifest that says how many bytes its tensors take.
    async fn publish_sized(
        folder: &Path,
        version: i64,
        checkpoint: &Checkpoint,
        tensor_bytes: u64,
    ) -> (Store, TrustedKeys, Target) {
        let key = SigningKey::from_seed(&[1; 32]);
        let store = Store::open(&format!("file://{}", folder.display())).unwrap();
        let object = store.put_object("demo", &checkpoint.to_bytes().unwrap()).await.unwrap();
        let root = checkpoint.root();
        let manifest = Manifest {
            policy: "demo".into(),
            version,
            root,
            parent: None,
            line: "realtime".into(),
            branch: 0,
            checkpoint: Some(object),
            delta: None,
            tensor_bytes,
            run: None,
            fence: 0,
            created_at: OffsetDateTime::now_utc(),
            quantized: quant::quantize(checkpoint, Spec::Fp8, &Threads::ONE)
                .map(|copy| Quantized {
                    spec: Spec::Fp8.into(),
                    root: copy.root(),
                })
                .into_iter()
                .collect(),
            delta_shards: vec![],
            reference: ExactModel::from_checkpoint(checkpoint)
                .ok()
                .and_then(|model| model::reference::of(&model).unwrap()),
            adapts: None,
        };
        store.put_manifest(&manifest, &key).await.unwrap();
        (store, key.trusted(), Target { version, root })
    }

    pub(in crate::follower) fn options(folder: &Path, store: Store, resident_bytes_max: u64) -> Options {
        Options {
            policy: "demo".into(),
            replica: "test".into(),
            store,
            keys_dir: folder.into(),
            state_dir: folder.into(),
            poll_interval: Duration::ZERO,
            back_off_max: Duration::ZERO,
            first_timestamp_age_max: Duration::ZERO,
            cluster: "local".into(),
            alias: None,
            quantized: None,
            resident_bytes_max,
        }
    }

    /// A loader with this much memory beside the weights, and the only version of its store.
    async fn loader(folder: &Path, cache_bytes_max: u64) -> (Loader, TrustedKeys, Target) {
        let checkpoint = golden();
        let (store, keys, target) = publish(folder, 1, &checkpoint).await;
        let engine = engine::spawn(engine::Config {
            queue_choices_max: 1,
            queue_wait_max: Duration::from_secs(60),
            prompt_tokens_per_pass_max: 16,
            slots_reserved_for_production: 0,
            parked_max: Duration::from_secs(600),
        });
        let staging = Staging {
            arithmetic: Arithmetic::default(),
            packing: store.threads().clone(),
            slots: 2,
            context: 64,
        };
        let host = Host::Own {
            engine: engine.unwrap().handle,
            staging: Arc::new(staging),
        };
        let bytes_max = checkpoint.tensor_bytes() * BYTES_PER_CHECKPOINT_BYTE + cache_bytes_max;
        (Loader::new(&options(folder, store, bytes_max), host), keys, target)
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn the_cache_of_a_replicas_first_version_must_fit_too() {
        // Two slots of 64 positions; 3 layers of 2 heads, with keys and values padded to 32.
        let cache_bytes = 2 * 64 * 3 * 2 * (16 + 32) * 4;
        let folder = tempfile::tempdir().unwrap();
        let (mut loader, keys, target) = loader(folder.path(), cache_bytes - 1).await;
        let wanted = Wanted {
            epoch: 1,
            target,
            required: false,
        };
        let refused = loader.load(&keys, wanted).await.unwrap_err();
        assert!(
            format!("{refused:#}").contains("raise serve.resident_bytes_max"),
            "{refused:#}"
        );
        loader.bytes_max += 1;
        loader.load(&keys, wanted).await.unwrap();
        assert_eq!(loader.used(), loader.bytes_max);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_version_that_nobody_must_have_leaves_room_for_the_next_release() {
        let folder = tempfile::tempdir().unwrap();
        let cache_bytes = 2 * 64 * 3 * 2 * (16 + 32) * 4;
        let (mut loader, keys, first) = loader(folder.path(), cache_bytes).await;
        let wanted = |target, required| Wanted {
            epoch: 1,
            target,
            required,
        };
        let (_first, _) = loader.load(&keys, wanted(first, true)).await.unwrap();
        // room for three
        loader.bytes_max *= 3;
        let (_, second) = crate::remote::tests::version(2);
        let (_, _, second) = publish(folder.path(), 2, &second).await;
        let (_second, _) = loader.load(&keys, wanted(second, false)).await.unwrap();
        let (_, third) = crate::remote::tests::version(3);
        let (_, _, third) = publish(folder.path(), 3, &third).await;
        assert!(loader.load(&keys, wanted(third, false)).await.is_err());
        loader.load(&keys, wanted(third, true)).await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_gateway_reads_no_weights_and_refuses_a_version_without_reference_unless_somebody_vouches() {
        use crate::remote::tests::{CONTEXT, Fake, VOCAB, gateway_to};
        let folder = tempfile::tempdir().unwrap();
        // 70 billion parameters, and no weight of them
        let mut checkpoint = golden();
        let mut config: Value = serde_json::from_slice(&checkpoint.files["config.json"]).unwrap();
        for (field, value) in [
            ("hidden_size", 8192),
            ("intermediate_size", 28672),
            ("num_hidden_layers", 80),
        ] {
            config[field] = value.into();
        }
        checkpoint.files.insert("config.json".into(), config.to_string().into());
        checkpoint.tensors.clear();
        let (store, keys, target) = publish_sized(folder.path(), 1, &checkpoint, 141_000_000_000).await;
        let engine = Fake::start().await;
        engine.held().name = format!("springtide-1-{}", target.root.short());
        let wanted = Wanted {
            epoch: 1,
            target,
            required: true,
        };
        // no byte for versions: none is held
        let loader = |unproved_error_max| {
            let (watch, updater) = gateway_to(&engine, unproved_error_max);
            let host = Host::Remote {
                updater: Box::new(updater),
            };
            (watch, Loader::new(&options(folder.path(), store.clone(), 0), host))
        };
        let required = [1];
        let (_watch, mut refusing) = loader(None);
        let (_version, _) = refusing.load(&keys, wanted).await.unwrap();
        let refused = loop {
            let mut unplaced = Unplaced::new();
            refusing.place(&required, &[], &mut [], &mut unplaced).await;
            let refused = format!("{:#}", unplaced[&1]);
            // its watch has to see the engine first
            if !refused.contains("none of the 1 engines") {
                break refused;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        };
        assert!(
            refused.contains("no reference log-probabilities") && refused.contains("unproved_error_max"),
            "{refused}"
        );
        let (_watch, mut loader) = loader(Some(0.05));
        let (version, _) = loader.load(&keys, wanted).await.unwrap();
        while !loader.serves(1) {
            loader.place(&required, &[], &mut [], &mut Unplaced::new()).await;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert_eq!((version.vocab, version.context), (VOCAB, CONTEXT));
        assert_eq!((loader.used(), engine.updates().len()), (0, 0));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_fleet_that_serves_a_copy_has_its_folder_and_is_compared_with_no_other_weights() {
        let folder = tempfile::tempdir().unwrap();
        let (store, keys, first) = publish(folder.path(), 1, &golden()).await;
        let (_, second) = crate::remote::tests::version(2);
        let (_, _, target) = publish(folder.path(), 2, &second).await;
        let folders = Folders {
            dir: folder.path().join("weights"),
            policy: "demo".into(),
            alias: "champion".into(),
            keep: 2,
            quantized: Some(Spec::Fp8),
            command: None,
        };
        folders.open().unwrap();
        let options = Options {
            quantized: Some(Spec::Fp8),
            ..options(folder.path(), store, u64::MAX)
        };
        let mut loader = Loader::new(&options, Host::Folders(folders.clone()));
        for (target, version) in [(first, &golden()), (target, &*second)] {
            let wanted = Wanted {
                epoch: 1,
                target,
                required: true,
            };
            let (loaded, swap) = loader.load(&keys, wanted).await.unwrap();
            let copy = quant::quantize(version, Spec::Fp8, &Threads::ONE).unwrap();
            assert_eq!(Checkpoint::read_dir(&folders.dir.join("current")).unwrap(), copy);
            assert!(swap.is_some() && folders.is_in_force(target.version, copy.root()));
            assert_eq!((loaded.root, loaded.reference.as_ref()), (target.root, None));
            // and again nothing is done
            assert!(loader.load(&keys, wanted).await.unwrap().1.is_none());
        }
        // its reference is compared with if it is of the copy
        let manifest = loader.store.get_manifest("demo", target.version, &keys).await;
        let mut manifest = manifest.unwrap();
        assert!(manifest.reference.is_some() && loader.reference(&manifest).is_none());
        manifest.reference.as_mut().unwrap().quantized = Some(Spec::Fp8.into());
        assert_eq!(loader.reference(&manifest).as_deref(), manifest.reference.as_ref());
        // one that names no such copy is refused
        loader.quantized = Some(Spec::Int4);
        let (_, third) = crate::remote::tests::version(3);
        let (_, _, target) = publish(folder.path(), 3, &third).await;
        let wanted = Wanted {
            epoch: 1,
            target,
            required: true,
        };
        let refused = format!("{:#}", loader.load(&keys, wanted).await.unwrap_err());
        assert!(refused.contains("names no copy made by int4-sym-g32.1"), "{refused}");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_rollback_after_a_failed_command_gives_the_engine_the_old_version_again() {
        let folder = tempfile::tempdir().unwrap();
        let (store, keys, old) = publish(folder.path(), 7, &golden()).await;
        let mut other = golden();
        other.files.insert("config.json".into(), b"{}".as_slice().into());
        let (_, _, new) = publish(folder.path(), 8, &other).await;
        // the engine holds a version at once, and the command for version 8 fails afterwards
        let line = r#"echo "$SPRINGTIDE_VERSION $SPRINGTIDE_PATCH" >> "$SPRINGTIDE_FOLDER/../../engine"
                      test "$SPRINGTIDE_VERSION" != 8"#;
        let folders = Folders {
            dir: folder.path().join("weights"),
            policy: "demo".into(),
            alias: "champion".into(),
            keep: 2,
            quantized: None,
            command: Some(super::super::Command {
                line: line.into(),
                timeout: Duration::from_secs(60),
            }),
        };
        folders.open().unwrap();
        let options = options(folder.path(), store, u64::MAX);
        let mut loader = Loader::new(&options, Host::Folders(folders.clone()));
        let wanted = |target| Wanted {
            epoch: 1,
            target,
            required: true,
        };
        let engine = || std::fs::read_to_string(folder.path().join("engine")).unwrap();
        // whoever holds this is the routes
        let (_served, swap) = loader.load(&keys, wanted(old)).await.unwrap();
        assert!(swap.is_some());
        assert!(loader.load(&keys, wanted(new)).await.is_err());
        assert!(!folders.is_in_force(7, old.root));
        loader.load(&keys, wanted(old)).await.unwrap();
        let ran: Vec<String> = engine().lines().map(|line| line[..1].into()).collect();
        assert_eq!(ran, ["7", "8", "7"]);
        // what the engine held was not known, so there was no patch
        assert_eq!(engine().lines().last(), Some("7 "));
        assert!(folders.is_in_force(7, old.root));
        // and an unchanged version costs nothing
        loader.load(&keys, wanted(old)).await.unwrap();
        assert_eq!(engine().lines().count(), 3);
    }
}
