//! `keys`, `revoke`, `resign`: whose signatures count. The roles make their keys themselves.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, ensure};
use artifact::sign::{SigningKey, TrustedKeys};
use serde_json::json;
use store::Revocation;
use time::OffsetDateTime;

use super::StoreArgs;
use crate::cli::output::{Confirm, Output, table};
use crate::config::Config;

#[derive(Debug, Clone, clap::Args)]
pub struct Keys {
    #[command(flatten)]
    at: StoreArgs,
    #[command(flatten)]
    output: Output,
}

impl Keys {
    pub async fn run(self, config: &Config) -> anyhow::Result<()> {
        let place = self.at.open(config).await?;
        let keys = names(&place.keys_dir)?;
        let trusted = |id: &str| place.keys.contains(id);
        let document: Vec<_> = keys
            .iter()
            .map(|(id, name)| json!({"id": id, "name": name, "trusted": trusted(id)}))
            .collect();
        self.output.print(&document, || {
            let row = |(id, name): (&String, &String)| {
                let state = if trusted(id) { "trusted" } else { "REVOKED" };
                [id.clone(), state.to_owned(), name.clone()]
            };
            table(["id", "state", "name"], keys.iter().map(row))
        })
    }
}

#[derive(Debug, Clone, clap::Args)]
pub struct Revoke {
    /// Name or id of the key, as `springtide policy keys` prints them.
    key: String,
    /// Why; kept for audits.
    #[arg(long)]
    reason: String,
    /// Name of the key that signs the revocation.
    #[arg(long, default_value = "release")]
    by: String,
    #[command(flatten)]
    confirm: Confirm,
    #[command(flatten)]
    at: StoreArgs,
}

impl Revoke {
    pub async fn run(self, config: &Config) -> anyhow::Result<()> {
        let place = self.at.open(config).await?;
        let names = names(&place.keys_dir)?;
        let named = names.iter().find(|(_, name)| **name == self.key);
        let id = named.map_or(&self.key, |(id, _)| id);
        let signer = signer(&place.keys_dir, &self.by)?;
        let revocation = Revocation {
            policy: place.policy.clone(),
            key: id.clone(),
            reason: self.reason,
            created_at: OffsetDateTime::now_utc(),
        };
        self.confirm.ask(&format!(
            "A revocation cannot be undone. Nothing that only key {id} signed will load. Revoke it?"
        ))?;
        match place.store.revoke(&revocation, &signer).await? {
            true => println!("key {id} is revoked; replicas that reach the store learn this within seconds"),
            false => println!("key {id} was already revoked"),
        }
        Ok(())
    }
}

#[derive(Debug, Clone, clap::Args)]
pub struct Resign {
    /// Name of the key to sign with.
    #[arg(long)]
    by: String,
    #[command(flatten)]
    at: StoreArgs,
}

impl Resign {
    pub async fn run(self, config: &Config) -> anyhow::Result<()> {
        let place = self.at.open(config).await?;
        let signer = signer(&place.keys_dir, &self.by)?;
        ensure!(
            place.keys.contains(signer.key_id()),
            "key {} is revoked: sign with another",
            self.by
        );
        let count = place.store.resign(&place.policy, &place.keys, &signer).await?;
        println!(
            "{count} documents are now also signed by {} ({})",
            self.by,
            signer.key_id()
        );
        Ok(())
    }
}

/// An existing key. Does not make one.
fn signer(folder: &Path, name: &str) -> anyhow::Result<SigningKey> {
    let path = folder.join(format!("{name}.key"));
    ensure!(
        path.exists(),
        "there is no private key {}: name an existing one with --by",
        path.display()
    );
    SigningKey::load_or_create(folder, name).with_context(|| format!("load the key {name}"))
}

/// Names of a folder's public keys by their ids.
fn names(folder: &Path) -> anyhow::Result<BTreeMap<String, String>> {
    let mut names = BTreeMap::new();
    for entry in std::fs::read_dir(folder).with_context(|| format!("read {}", folder.display()))? {
        let path = entry.context("read the keys")?.path();
        let is_public = path.extension().is_some_and(|extension| extension == "pub");
        let Some(name) = path.file_stem().and_then(|name| name.to_str()).filter(|_| is_public) else {
            continue;
        };
        let id = TrustedKeys::id_of(&path).with_context(|| format!("read {}", path.display()))?;
        names.insert(id, name.to_owned());
    }
    Ok(names)
}
