//! `keys`, `new-key`, `revoke`, `resign`: whose signatures count, and for what. `train` and `control`
//! make their own keys. A person makes the root key.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, ensure};
use artifact::sign::{Revocations, Role, SigningKey, TrustedKeys};
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
        let role = |id: &str| place.keys.roles(id).map(Role::name).collect::<Vec<_>>().join(", ");
        let document: Vec<_> = keys
            .iter()
            .map(|(id, name)| json!({"id": id, "name": name, "role": role(id), "trusted": trusted(id)}))
            .collect();
        self.output.print(&document, || {
            let row = |(id, name): (&String, &String)| {
                let state = if trusted(id) { "trusted" } else { "REVOKED" };
                let role = match role(id) {
                    role if role.is_empty() => "none".to_owned(),
                    role => role,
                };
                [id.clone(), role, state.to_owned(), name.clone()]
            };
            let mut text = table(["id", "role", "state", "name"], keys.iter().map(row));
            if !keys
                .keys()
                .any(|id| place.keys.roles(id).any(|role| role == Role::Root))
            {
                text += "\nthere is no root key, so any key can revoke any other: make one with \
                         `springtide policy new-key root --role root`";
            }
            text
        })
    }
}

#[derive(Debug, Clone, clap::Args)]
pub struct NewKey {
    /// Name of the key: of the files NAME.key and NAME.pub.
    name: String,
    /// What it may sign: root (revocations), release (assignments) or trainer (versions).
    #[arg(long, value_name = "ROLE")]
    role: Role,
    #[command(flatten)]
    at: StoreArgs,
}

impl NewKey {
    pub async fn run(self, config: &Config) -> anyhow::Result<()> {
        let keys_dir = self.at.keys_dir(config);
        let path = keys_dir.join(format!("{}.key", self.name));
        ensure!(!path.exists(), "{} exists: give another name", path.display());
        // A store from before there were root keys: its revocations must go on to count.
        let before = match (self.role, keys_dir.is_dir()) {
            (Role::Root, true) if !names(&keys_dir)?.is_empty() => Some(self.at.open(config).await?),
            _ => None,
        };
        let key = SigningKey::create(&keys_dir, &self.name, self.role)
            .with_context(|| format!("make the key {}", self.name))?;
        println!("made {} and {}.pub (id {})", path.display(), self.name, key.key_id());
        if let Some(place) = before {
            let folder = TrustedKeys::load(&keys_dir).context("load the keys")?;
            let signed = place.store.sign_revocations(&place.policy, &place.keys, &folder, &key);
            let count = signed.await.context(
                "sign the revocations that count so far: repeat each with `springtide policy revoke KEY --by NAME`",
            )?;
            if count > 0 {
                println!("it signed the {count} revocations that count so far");
            }
        }
        match self.role {
            Role::Root => println!("copy the .pub to every keys folder, and move the .key to a safe place"),
            _ => println!("copy the .pub to every keys folder"),
        }
        Ok(())
    }
}

#[derive(Debug, Clone, clap::Args)]
pub struct Revoke {
    /// Name or id of the key, as `springtide policy keys` prints them.
    key: String,
    /// Why; kept for audits.
    #[arg(long)]
    reason: String,
    /// Name of the key that signs the revocation: a root key, or the key itself [default: root,
    /// otherwise the key itself].
    #[arg(long)]
    by: Option<String>,
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
        let exists = |name: &&str| place.keys_dir.join(format!("{name}.key")).exists();
        let defaults = ["root", named.map_or("", |(_, name)| name.as_str()), "release"];
        let by = match &self.by {
            Some(by) => by.as_str(),
            None => defaults.into_iter().find(exists).unwrap_or("root"),
        };
        let signer = signer(&place.keys_dir, by)?;
        let folder = TrustedKeys::load(&place.keys_dir).context("load the keys")?;
        let mut after = folder.without_revocations();
        after.revoke_by(&Revocations::from([(id.clone(), [signer.key_id().to_owned()].into())]));
        ensure!(
            after.is_revoked(id),
            "the key {by} cannot revoke {}: only a root key or the key itself can (--by)",
            self.key
        );
        let revocation = Revocation {
            policy: place.policy.clone(),
            key: id.clone(),
            reason: self.reason,
            created_at: OffsetDateTime::now_utc(),
        };
        let mut question = format!("A revocation cannot be undone. Nothing that only key {id} signed will load.");
        if place.keys.roles(id).any(|role| role == Role::Root) {
            question +=
                " Keys that only it revoked will be trusted again; repeat those revocations with another root key.";
        }
        self.confirm.ask(&format!("{question} Revoke it?"))?;
        match place.store.revoke(&revocation, &signer, &folder).await? {
            true => println!("key {id} is revoked; replicas that reach the store learn this within seconds"),
            false => println!("key {id} was already revoked; {by} has signed that too"),
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
