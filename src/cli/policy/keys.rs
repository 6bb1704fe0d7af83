//! `keys`, `new-key`, `revoke`, `resign`: whose signatures count, and for what. `train` and `control`
//! make their own keys. A person makes the root key. Changes are rows of the audit.

use std::path::Path;

use anyhow::{Context, ensure};
use artifact::sign::{Revocations, Role, SigningKey, TrustedKeys};
use serde_json::json;
use sqlx::PgPool;
use store::Revocation;
use time::OffsetDateTime;

use super::StoreArgs;
use crate::cli::audit::CommandLine;
use crate::cli::output::{Confirm, Output, table};
use crate::config::Config;
use crate::database;
use crate::signing_keys::{self, KeyChange, names};

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
    recorded: Recorded,
    #[command(flatten)]
    at: StoreArgs,
}

impl NewKey {
    pub async fn run(self, config: &Config) -> anyhow::Result<()> {
        let keys_dir = self.at.keys_dir(config);
        let path = keys_dir.join(format!("{}.key", self.name));
        ensure!(!path.exists(), "{} exists: give another name", path.display());
        // Revocations that count without a root key must count with it.
        let before = match (self.role, keys_dir.is_dir()) {
            (Role::Root, true) if !names(&keys_dir)?.is_empty() => Some(self.at.open(config).await?),
            _ => None,
        };
        let recorder = self.recorded.open(config).await?;
        let key = SigningKey::create(&keys_dir, &self.name, self.role)
            .with_context(|| format!("make the key {}", self.name))?;
        let change = KeyChange {
            verb: "create",
            key: key.key_id(),
            detail: &format!("{}, role {}", self.name, self.role),
            reason: "",
        };
        if let Err(error) = recorder.append(&change).await {
            for extension in ["key", "pub"] {
                let path = keys_dir.join(format!("{}.{extension}", self.name));
                std::fs::remove_file(&path).with_context(|| format!("remove {}", path.display()))?;
            }
            return Err(error.context("no key was made"));
        }
        println!("made {} and {}.pub (id {})", path.display(), self.name, key.key_id());
        if let Some(place) = before {
            let signed = place.store.sign_revocations(&place.policy, &place.keys, &key);
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
    /// Why; kept in the audit and in the store.
    #[arg(long)]
    reason: String,
    /// Name of the key that signs the revocation: a root key, or the key itself [default: root,
    /// otherwise the key itself].
    #[arg(long)]
    by: Option<String>,
    #[command(flatten)]
    confirm: Confirm,
    #[command(flatten)]
    recorded: Recorded,
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
        let change = KeyChange {
            verb: "revoke",
            key: id,
            detail: &format!("by {by} ({}); recorded before the store was changed", signer.key_id()),
            reason: &revocation.reason,
        };
        self.recorded.open(config).await?.append(&change).await?;
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
    recorded: Recorded,
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
        let change = KeyChange {
            verb: "resign",
            key: signer.key_id(),
            detail: &format!(
                "{} signs what is trusted too; recorded before the store was changed",
                self.by
            ),
            reason: "",
        };
        self.recorded.open(config).await?.append(&change).await?;
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

/// Whether a change goes into the audit. Signing keys are files and documents of the store, so a
/// machine without the database can change them too.
#[derive(Debug, Clone, clap::Args)]
struct Recorded {
    /// Change it without a row in the audit, where the database cannot be reached. `control` and
    /// `train` note the change when they start.
    #[arg(long)]
    no_audit: bool,
}

impl Recorded {
    /// Connects before anything is changed.
    async fn open(&self, config: &Config) -> anyhow::Result<Recorder> {
        if self.no_audit {
            return Ok(Recorder(None));
        }
        let connect = async {
            let pool = database::connect_now(config).await?;
            database::check_schema(&pool).await?;
            anyhow::Ok(pool)
        };
        let pool = connect.await.context(
            "this change belongs into the audit, so it needs the database; nothing was changed. Without the database, \
             add --no-audit",
        )?;
        Ok(Recorder(Some(pool)))
    }
}

struct Recorder(Option<PgPool>);

impl Recorder {
    async fn append(&self, change: &KeyChange<'_>) -> anyhow::Result<()> {
        match &self.0 {
            Some(pool) => signing_keys::append(pool, CommandLine::new().actor(), change).await,
            None => Ok(()),
        }
    }
}
