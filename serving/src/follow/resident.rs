//! Versions on their way into the engine and out of it: fetch and verify, stage beside what serves, install; how much
//! memory they take, and the images kept as bases for the next delta.

use super::Options;
use crate::engine::model::Model;
use crate::engine::templates::Rendering;
use crate::engine::{Handle, Version};
use crate::fleet::Swap;
use anyhow::Context;
use policy::assignment::Target;
use policy::image::Image;
use policy::memory::{self, Spare};
use policy::sign::TrustedKeys;
use policy::store::Store;
use policy::tokenizer::Tokenizer;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use time::OffsetDateTime;

/// How long a required version waits for memory that leaving versions still hold.
const ROOM_WAIT: Duration = Duration::from_secs(30);
const ROOM_LOOK: Duration = Duration::from_millis(50);
/// The image, and beside it the packed weights: as many bytes again for bf16 and f32, twice as many for f16.
const BYTES_PER_IMAGE_BYTE: u64 = 3;

/// Turns an image into something that answers. Called off the engine's thread; blocks.
pub type Stage = Arc<dyn Fn(&Image) -> anyhow::Result<Staged> + Send + Sync>;

/// A network beside the serving ones, warmed up.
pub struct Staged {
    pub model: Box<dyn Model>,
    /// Longest prompt and completion together, in tokens.
    pub context: usize,
    pub vocab: u32,
    /// Experts that a layer of a mixture has.
    pub experts: Option<u16>,
    /// Bytes of its cache.
    pub cache_bytes: u64,
}

/// Where the time went when a version became resident.
#[derive(Debug, Clone, Copy)]
pub struct Brought {
    fetch: Duration,
    verify: Duration,
    stage: Duration,
    pause: Duration,
}

struct Held {
    /// Dead once the version has left the engine.
    version: Weak<Version>,
    image: Arc<Image>,
    bytes: u64,
}

/// The versions that this replica holds.
pub struct Residents {
    engine: Handle,
    stage: Stage,
    bytes_max: u64,
    /// Of the version staged last; all versions of a policy have about the same.
    cache_bytes: u64,
    held: BTreeMap<i64, Held>,
    /// Where the memory of a version that left waits for the next one.
    spare: Spare,
    /// Of the weights of the version staged last.
    tensor_bytes: u64,
}

impl Residents {
    pub fn new(engine: Handle, stage: Stage, bytes_max: u64) -> Self {
        Residents {
            engine,
            stage,
            bytes_max,
            cache_bytes: 0,
            held: BTreeMap::new(),
            spare: Spare::default(),
            tensor_bytes: 0,
        }
    }

    /// The version, resident; with timings when it was not before. A required one may wait for memory.
    pub async fn bring(
        &mut self,
        store: &Store,
        policy: &str,
        keys: &TrustedKeys,
        target: Target,
        required: bool,
    ) -> anyhow::Result<(Arc<Version>, Option<Brought>)> {
        if let Some(version) = self.held.get(&target.version).and_then(|held| held.version.upgrade()) {
            check_root(version.root, target)?;
            return Ok((version, None));
        }
        let manifest = store
            .get_manifest(policy, target.version, keys)
            .await
            .context("read the manifest")?;
        check_root(manifest.root, target)?;
        let weights = manifest.tensor_bytes.saturating_mul(BYTES_PER_IMAGE_BYTE);
        let needed = weights.saturating_add(self.cache_bytes);
        self.make_room(needed, required).await?;
        // what is kept may turn out to have other sizes than what is needed: it has to fit beside all of it
        let kept = self.spare.kept_bytes() as u64;
        if manifest.tensor_bytes != self.tensor_bytes
            || self.used().saturating_add(needed).saturating_add(kept) > self.bytes_max
        {
            self.keep(0);
        }

        let bases: Vec<(i64, Arc<Image>)> = self
            .held
            .iter()
            .map(|(&serial, held)| (serial, held.image.clone()))
            .collect();
        let materialised = store
            .materialise(policy, target.version, keys, &bases)
            .await
            .context("materialise")?;
        drop(bases);
        let image = materialised.image;
        let began = Instant::now();
        let (staged, tokenizer, templates) = self.build(image.clone()).await.context("stage")?;
        let stage = began.elapsed();
        self.cache_bytes = staged.cache_bytes;
        let version = Arc::new(Version {
            serial: target.version,
            root: target.root,
            line: manifest.line,
            context: staged.context,
            vocab: staged.vocab,
            experts: staged.experts,
            stop_ids: tokenizer.as_ref().map(stop_ids).unwrap_or_default(),
            decline_id: tokenizer.as_ref().and_then(Tokenizer::decline_id),
            tokenizer,
            templates,
        });
        let installed = self
            .engine
            .install(version.clone(), staged.model)
            .await
            .context("install")?;
        // the memory of a version that left is given back on a thread that may block
        let left = installed.left;
        tokio::spawn(async move {
            if let Ok(model) = left.await {
                let _ = tokio::task::spawn_blocking(move || drop(model)).await;
                metrics::gauge!("springtide_spare_bytes").set(memory::kept_bytes() as f64);
            }
        });
        self.held.insert(
            target.version,
            Held {
                version: Arc::downgrade(&version),
                image,
                bytes: weights + self.cache_bytes,
            },
        );
        self.tensor_bytes = manifest.tensor_bytes;
        self.keep(weights.min(self.bytes_max.saturating_sub(self.used())));
        let brought = Brought {
            fetch: materialised.fetch,
            verify: materialised.verify,
            stage,
            pause: installed.pause,
        };
        tracing::info!(
            version = target.version,
            root = %target.root.short(),
            fetched_bytes = materialised.bytes_fetched,
            fetch_ms = ms(brought.fetch),
            verify_ms = ms(brought.verify),
            stage_ms = ms(brought.stage),
            pause_ms = ms(brought.pause),
            "version resident"
        );
        metrics::histogram!("springtide_swap_stage_seconds").record(stage.as_secs_f64());
        metrics::counter!("springtide_followed_bytes_total").increment(materialised.bytes_fetched);
        Ok((version, Some(brought)))
    }

    async fn build(&self, image: Arc<Image>) -> anyhow::Result<(Staged, Option<Tokenizer>, Rendering)> {
        let stage = self.stage.clone();
        let known = self.text_of(&image);
        tokio::task::spawn_blocking(move || {
            let (tokenizer, templates) = match known {
                Some(known) => known,
                None => (
                    match image.files.contains_key("tokenizer.json") {
                        true => Some(Tokenizer::from_image(&image).context("read the tokenizer")?),
                        false => None,
                    },
                    Rendering::from_image(&image),
                ),
            };
            Ok((stage(&image)?, tokenizer, templates))
        })
        .await
        .context("the staging thread")?
    }

    /// Those of a version with the very same files, as all of a line have.
    fn text_of(&self, image: &Image) -> Option<(Option<Tokenizer>, Rendering)> {
        let alike = self.held.values().filter(|held| held.image.files == image.files);
        alike
            .filter_map(|held| held.version.upgrade())
            .map(|version| (version.tokenizer.clone(), version.templates.clone()))
            .next()
    }

    /// Keeps at most so much of the memory of versions that leave. What is given back is, on a thread that may block.
    fn keep(&mut self, bytes: u64) {
        let released = self.spare.resize(bytes);
        tokio::task::spawn_blocking(move || drop(released));
        metrics::gauge!("springtide_spare_bytes").set(memory::kept_bytes() as f64);
    }

    fn used(&self) -> u64 {
        self.held.values().map(|held| held.bytes).sum()
    }

    /// Forgets versions that have left; waits for more to leave where that is needed.
    async fn make_room(&mut self, bytes: u64, required: bool) -> anyhow::Result<()> {
        let began = Instant::now();
        loop {
            self.held.retain(|_, held| held.version.strong_count() > 0);
            let used = self.used();
            metrics::gauge!("springtide_resident_bytes").set(used as f64);
            if used.saturating_add(bytes) <= self.bytes_max {
                return Ok(());
            }
            anyhow::ensure!(
                required && began.elapsed() < ROOM_WAIT,
                "it needs {bytes} bytes beside {used} of {} that are in use; raise serve.resident_bytes_max",
                self.bytes_max
            );
            tokio::time::sleep(ROOM_LOOK).await;
        }
    }
}

impl Brought {
    /// What the fleet is told once users are routed to the version.
    pub(super) fn swap(self, options: &Options, version: i64, epoch: i64) -> Swap {
        Swap {
            replica: options.replica.clone(),
            policy: options.policy.clone(),
            version,
            epoch,
            fetch_ms: ms(self.fetch),
            verify_ms: ms(self.verify),
            stage_ms: ms(self.stage),
            pause_ms: ms(self.pause),
            at: OffsetDateTime::now_utc(),
        }
    }
}

/// The decline token ends a sequence whether or not the model's configuration lists it.
fn stop_ids(tokenizer: &Tokenizer) -> Vec<u32> {
    let mut ids = tokenizer.stop_ids().to_vec();
    ids.extend(tokenizer.decline_id().filter(|id| !tokenizer.stop_ids().contains(id)));
    ids
}

fn check_root(root: policy::digest::Digest, target: Target) -> anyhow::Result<()> {
    anyhow::ensure!(
        root == target.root,
        "version {} has root {root}, the assignment names {}",
        target.version,
        target.root
    );
    Ok(())
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
