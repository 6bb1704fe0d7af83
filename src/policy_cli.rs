//! `springtide policy …`: what is in the policy store, whether it is whole, and how versions get in and out of it. Works on the
//! store itself, so no role needs to run; only `publish` and `gc` ask the database too.

mod adapter;
mod keep;
mod keys;
mod look;
mod pull;
mod quantised;
mod share;
mod size;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use policy::sign::TrustedKeys;
use policy::store::Store;

use crate::config::Config;
use crate::roles;

/// Versions: look, check, keep, publish, pull.
#[derive(Debug, Clone, clap::Subcommand)]
pub enum Command {
    /// Every version that the store knows: line, parent, sizes, and who names it.
    Versions(look::Versions),
    /// Everything that is known of one version.
    Inspect(look::Inspect),
    /// Put a version together and check every signature, size, digest and root on the way.
    Verify(look::Verify),
    /// Is the whole store in order? Fails where something that is needed is broken.
    Fsck(keep::Fsck),
    /// Delete what nothing needs.
    Gc(keep::Gc),
    /// Keep a version whatever happens.
    Pin(keep::Pin),
    /// Keep a version no longer.
    Unpin(keep::Unpin),
    /// Make the deltas over several steps that are due along a line.
    Fold(keep::Fold),
    /// Which keys are trusted here, and which are revoked.
    Keys(keys::Keys),
    /// Trust a key no longer: whatever it signed loads nowhere from now on.
    Revoke(keys::Revoke),
    /// Sign with another key what is believed now, before the old key goes.
    Resign(keys::Resign),
    /// Upload a share of the delta between two folders: one of several machines that publish a version together.
    Share(share::Share),
    /// Publish a Hugging Face folder that any trainer wrote as the next version of a line.
    Publish(pull::Publish),
    /// Bring a version into a Hugging Face folder: from the store and public keys alone, and from what is there already.
    Pull(pull::Pull),
    /// Write a version as a new Hugging Face folder, or the adapter that made it as a PEFT folder.
    Export(adapter::Export),
    /// Merge a PEFT adapter into a model's weights. What is written can be `policy.base`.
    Merge(adapter::Merge),
}

/// Which store, for machines that have no springtide.toml.
#[derive(Debug, Clone, clap::Args)]
pub struct At {
    /// Object store, over policy.store.
    #[arg(long, value_name = "URL")]
    store: Option<String>,
    /// Folder of the public keys that are trusted, over policy.keys.
    #[arg(long, value_name = "DIR")]
    keys: Option<PathBuf>,
    /// Name of the policy, over policy.name.
    #[arg(long, value_name = "NAME")]
    policy: Option<String>,
}

/// An opened store.
struct Place {
    store: Store,
    keys: TrustedKeys,
    keys_dir: PathBuf,
    policy: String,
}

impl At {
    async fn open(&self, config: &Config) -> anyhow::Result<Place> {
        let store = match &self.store {
            Some(url) => roles::open_store(url, config.policy.store_api_key.as_deref())
                .and_then(|store| roles::on_threads(store, config)),
            None => roles::store(config),
        };
        let store = store?;
        let keys_dir = self.keys.clone().unwrap_or_else(|| config.keys_dir());
        let policy = self.policy.clone().unwrap_or_else(|| config.policy.name.clone());
        let keys = TrustedKeys::load(&keys_dir)
            .with_context(|| format!("load the trusted keys from {}", keys_dir.display()))?;
        Ok(Place {
            keys: store.trusted(&policy, keys).await.context("look for revoked keys")?,
            store,
            keys_dir,
            policy,
        })
    }
}

impl Place {
    /// The serial of a version that is given as a number, or as an alias of the newest assignment.
    async fn serial(&self, version: &str) -> anyhow::Result<i64> {
        if let Ok(serial) = version.parse() {
            return Ok(serial);
        }
        let newest = self.store.latest_assignment(&self.policy, 0, &self.keys).await?;
        let newest = newest.with_context(|| format!("`{version}` is no number, and the store has no aliases yet"))?;
        let target = newest.aliases.get(version);
        Ok(target
            .with_context(|| {
                let names: Vec<&str> = newest.aliases.keys().map(String::as_str).collect();
                format!("no alias `{version}`; there are: {}", names.join(", "))
            })?
            .version)
    }
}

pub async fn run(command: Command, config: &Config) -> anyhow::Result<ExitCode> {
    match command {
        Command::Versions(args) => args.run(config).await?,
        Command::Inspect(args) => args.run(config).await?,
        Command::Verify(args) => args.run(config).await?,
        Command::Fsck(args) => return args.run(config).await,
        Command::Gc(args) => args.run(config).await?,
        Command::Pin(args) => args.run(config).await?,
        Command::Unpin(args) => args.run(config).await?,
        Command::Fold(args) => args.run(config).await?,
        Command::Keys(args) => args.run(config).await?,
        Command::Revoke(args) => args.run(config).await?,
        Command::Resign(args) => args.run(config).await?,
        Command::Share(args) => args.run(config).await?,
        Command::Publish(args) => args.run(config).await?,
        Command::Pull(args) => args.run(config).await?,
        Command::Export(args) => args.run(config).await?,
        Command::Merge(args) => args.run()?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints a value as JSON for programs.
fn print_json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    println!("{}", serde_json::to_string_pretty(value).context("print JSON")?);
    Ok(())
}
