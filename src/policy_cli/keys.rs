//! `keys`, `revoke`, `resign`: whose signatures count. Keys are made by the roles that sign; here trust is taken away, and
//! carried over to the next key.

use anyhow::{Context, ensure};
use policy::sign::{SigningKey, TrustedKeys};
use policy::store::Revocation;
use std::collections::BTreeMap;
use std::path::Path;
use time::OffsetDateTime;

use super::At;
use crate::config::Config;

#[derive(Debug, Clone, clap::Args)]
pub struct Keys {
    #[command(flatten)]
    at: At,
}

impl Keys {
    pub async fn run(self, config: &Config) -> anyhow::Result<()> {
        let place = self.at.open(config).await?;
        for (id, name) in names(&place.keys_dir)? {
            let state = if place.keys.contains(&id) { "trusted" } else { "REVOKED" };
            println!("{id}  {state:<8} {name}");
        }
        Ok(())
    }
}

#[derive(Debug, Clone, clap::Args)]
pub struct Revoke {
    /// Name or id of the key, as `springtide policy keys` prints them.
    key: String,
    /// Why, for whoever finds it.
    #[arg(long)]
    reason: String,
    /// Name of the key that signs the revocation.
    #[arg(long, default_value = "release")]
    by: String,
    #[command(flatten)]
    at: At,
}

impl Revoke {
    pub async fn run(self, config: &Config) -> anyhow::Result<()> {
        let place = self.at.open(config).await?;
        let names = names(&place.keys_dir)?;
        let named = names
            .iter()
            .find(|(_, name)| **name == self.key)
            .map(|(id, _)| id.clone());
        let id = named.unwrap_or(self.key);
        let signer = signer(&place.keys_dir, &self.by)?;
        let revocation = Revocation {
            policy: place.policy.clone(),
            key: id.clone(),
            reason: self.reason,
            created_at: OffsetDateTime::now_utc(),
        };
        match place.store.revoke(&revocation, &signer).await? {
            true => println!("key {id} is revoked; replicas that can read the store know within seconds"),
            false => println!("key {id} was revoked before"),
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
    at: At,
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
            "{count} documents are signed by {} ({}) as well",
            self.by,
            signer.key_id()
        );
        Ok(())
    }
}

/// A key that is there; none is made.
fn signer(folder: &Path, name: &str) -> anyhow::Result<SigningKey> {
    let path = folder.join(format!("{name}.key"));
    ensure!(
        path.exists(),
        "there is no private key {}: name one with --by",
        path.display()
    );
    SigningKey::load_or_create(folder, name).with_context(|| format!("load the key {name}"))
}

/// Public keys of a folder by their ids.
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
