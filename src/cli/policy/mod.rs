//! `springtide policy`: the versions in the policy store. It works on the store itself, so no role
//! needs to run; `publish` and `gc` also need the database, and `inspect` says more with it.

mod export;
mod keys;
mod look;
mod publish;
mod pull;
mod quantized;
mod shard;
mod trained;
mod upkeep;

use std::path::PathBuf;

use anyhow::Context;
use artifact::manifest::Manifest;
use artifact::sign::{SigningKey, TrustedKeys};
use store::Store;

use super::App;
use crate::config::Config;
use crate::policy_store;

/// The key that publishers sign with.
const PUBLISHER_KEY: &str = "trainer";

#[derive(Debug, Clone, clap::Subcommand)]
pub enum Command {
    /// List the versions in the store: line, parent, sizes, and the aliases that name them.
    Versions(look::Versions),
    /// Show everything that is known of one version, and, if the database can be reached, what it was
    /// trained on.
    ///
    /// Example: springtide policy inspect champion
    Inspect(look::Inspect),
    /// Rebuild a version and check every signature, size, digest and content hash on the way.
    Verify(look::Verify),
    /// Check the whole store. Fails where something that is needed is broken.
    Fsck(upkeep::Fsck),
    /// Delete objects that no live version needs.
    Gc(upkeep::Gc),
    /// Protect a version's bytes from `gc`.
    ///
    /// Example: springtide policy keep 41 --reason "the paper's model"
    Keep(upkeep::Keep),
    /// Stop protecting a version's bytes from `gc`.
    Unkeep(upkeep::Unkeep),
    /// Make the squashed deltas that are due: one delta in place of several steps.
    Squash(upkeep::Squash),
    /// List the signing keys that are trusted here, and the revoked ones.
    Keys(keys::Keys),
    /// Make a signing key with a role: root, release or trainer.
    ///
    /// Example: springtide policy new-key root --role root
    NewKey(keys::NewKey),
    /// Stop trusting a key. Nothing that only it signed is loaded anywhere from then on.
    Revoke(keys::Revoke),
    /// Sign the trusted documents with another key as well, before the old key is revoked.
    Resign(keys::Resign),
    /// Upload one shard of the delta between two folders. Several machines publish a large version
    /// together this way.
    ///
    /// Example: springtide policy shard ./new --base ./old --shard 1/4 --name step-7
    Shard(shard::Shard),
    /// Publish a Hugging Face folder, written by any trainer, as the next version of a line.
    ///
    /// Example: springtide policy publish ./new --line mine --parent champion
    Publish(publish::Publish),
    /// Write a version to a Hugging Face folder. Needs only the store and public keys; fetches only
    /// what the folder lacks.
    ///
    /// Example: springtide policy pull champion ./model
    Pull(pull::Pull),
    /// Write a version to a new Hugging Face folder, or the adapter that made it to a PEFT folder.
    Export(export::Export),
    /// Merge a PEFT adapter into a model's weights. The result can be policy.base.
    Merge(export::Merge),
}

impl Command {
    pub async fn run(self, app: &App) -> anyhow::Result<()> {
        let config = &app.config;
        match self {
            Self::Versions(args) => args.run(config).await,
            Self::Inspect(args) => args.run(config).await,
            Self::Verify(args) => args.run(config).await,
            Self::Fsck(args) => args.run(config).await,
            Self::Gc(args) => args.run(config).await,
            Self::Keep(args) => args.run(config).await,
            Self::Unkeep(args) => args.run(config).await,
            Self::Squash(args) => args.run(config).await,
            Self::Keys(args) => args.run(config).await,
            Self::NewKey(args) => args.run(config).await,
            Self::Revoke(args) => args.run(config).await,
            Self::Resign(args) => args.run(config).await,
            Self::Shard(args) => args.run(config).await,
            Self::Publish(args) => args.run(config).await,
            Self::Pull(args) => args.run(config).await,
            Self::Export(args) => args.run(config).await,
            Self::Merge(args) => args.run(),
        }
    }
}

/// Which store to use. Lets machines without a springtide.toml work with a store.
#[derive(Debug, Clone, clap::Args)]
struct StoreArgs {
    /// URL of the object store; overrides policy.store.
    #[arg(long, value_name = "URL")]
    store: Option<String>,
    /// Folder of the trusted public keys; overrides policy.keys.
    #[arg(long, value_name = "DIR")]
    keys: Option<PathBuf>,
    /// Name of the policy; overrides policy.name.
    #[arg(long, value_name = "NAME")]
    policy: Option<String>,
}

/// An opened store, and whom it trusts.
struct OpenStore {
    store: Store,
    keys: TrustedKeys,
    keys_dir: PathBuf,
    policy: String,
}

impl StoreArgs {
    fn keys_dir(&self, config: &Config) -> PathBuf {
        self.keys.clone().unwrap_or_else(|| config.keys_dir())
    }

    async fn open(&self, config: &Config) -> anyhow::Result<OpenStore> {
        let store = match &self.store {
            Some(url) => {
                let store = policy_store::open_url(url, config.policy.store_api_key.as_deref())?;
                policy_store::with_threads(store, config)?
            }
            None => policy_store::open(config)?,
        };
        let keys_dir = self.keys_dir(config);
        let policy = self.policy.clone().unwrap_or_else(|| config.policy.name.clone());
        let keys = TrustedKeys::load(&keys_dir)
            .with_context(|| format!("load the trusted keys from {}", keys_dir.display()))?;
        Ok(OpenStore {
            keys: store.trusted(&policy, keys).await.context("look for revoked keys")?,
            store,
            keys_dir,
            policy,
        })
    }
}

impl OpenStore {
    /// The number of a version that is given as a number, or as an alias of the newest assignment.
    async fn serial(&self, version: &str) -> anyhow::Result<i64> {
        if let Ok(serial) = version.parse() {
            return Ok(serial);
        }
        let newest = self.store.latest_assignment(&self.policy, 0, &self.keys).await?;
        let newest = newest.with_context(|| {
            format!("`{version}` is not a number, and the store has no aliases yet; give a version's number")
        })?;
        let target = newest.aliases.get(version).with_context(|| {
            let names: Vec<&str> = newest.aliases.keys().map(String::as_str).collect();
            format!("there is no alias `{version}`; the aliases are {}", names.join(", "))
        })?;
        Ok(target.version)
    }

    async fn manifest(&self, version: i64) -> anyhow::Result<Manifest> {
        let manifest = self.store.get_manifest(&self.policy, version, &self.keys).await;
        manifest.with_context(|| format!("read the manifest of version {version}"))
    }

    /// The key that publishers sign with, made where it does not exist yet.
    fn publisher_key(&self) -> anyhow::Result<SigningKey> {
        SigningKey::load_or_create(&self.keys_dir, PUBLISHER_KEY).context("load the signing key")
    }
}
