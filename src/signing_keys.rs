//! Signing keys in the audit. They are files, and revocations are documents of the store, so their
//! rows cannot be part of the change itself.
//!
//! A command writes its row before it changes the store, and after it has made a key. `control` and
//! `train` add a row for every key and every revocation that the audit does not have when they start.
//! So a key that somebody copied into the folder is in the audit before it is used here.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Context;
use artifact::sign::{Role, SigningKey, TrustedKeys};
use edge::audit::rows::Trail;
use edge::audit::{self, Actor, Change};
use sqlx::PgPool;

use crate::config::Config;
use crate::policy_store;

/// The kind of these rows: their actions are `signing_key.…`, their subjects the ids of keys.
const KIND: &str = "signing_key";

/// A change of a key, for the audit.
pub struct KeyChange<'a> {
    /// `create`, `revoke`, `resign`, …
    pub verb: &'a str,
    /// Its id.
    pub key: &'a str,
    pub detail: &'a str,
    pub reason: &'a str,
}

/// Appends a change of a key.
pub async fn append(pool: &PgPool, actor: Actor<'_>, change: &KeyChange<'_>) -> anyhow::Result<()> {
    let mut transaction = edge::database::begin(pool).await.context("begin")?;
    let row = Change {
        tenant: "default",
        action: &format!("{KIND}.{}", change.verb),
        subject: change.key,
        detail: change.detail,
        reason: change.reason,
    };
    audit::append(&mut transaction, actor, row)
        .await
        .context("append to the audit")?;
    transaction.commit().await.context("commit")
}

/// For a role that starts: makes its own key if there is none, and adds rows for the keys and
/// revocations that the audit does not have.
pub async fn prepare(config: &Config, pool: &PgPool, role: &str, own_key: &str) -> anyhow::Result<()> {
    let folder = config.keys_dir();
    SigningKey::load_or_create(&folder, own_key).with_context(|| format!("load the key {own_key}"))?;
    let keys = match TrustedKeys::load(&folder) {
        Ok(keys) => keys,
        // What needs the keys says so itself.
        Err(error) => {
            tracing::warn!(%error, "signing keys are not compared with the audit");
            return Ok(());
        }
    };
    // Without the store the role starts too. A revocation in it is noted at the next start.
    let keys = match policy_store::open(config)?
        .trusted(&config.policy.name, keys.clone())
        .await
    {
        Ok(keys) => keys,
        Err(error) => {
            tracing::warn!(%error, "cannot look for revoked keys");
            keys
        }
    };
    let name = audit::role_name(role);
    let actor = Actor { key: None, name: &name };
    note(pool, &keys, &names(&folder)?, actor).await
}

/// Adds a row for each of the keys that the audit does not have as what it is: trusted or revoked.
async fn note(
    pool: &PgPool,
    keys: &TrustedKeys,
    names: &BTreeMap<String, String>,
    actor: Actor<'_>,
) -> anyhow::Result<()> {
    let mut transaction = edge::database::begin(pool).await.context("begin")?;
    audit::lock(&mut transaction).await.context("lock the audit")?;
    let trail = Trail::read(&mut transaction, KIND).await.context("read the audit")?;
    let mut rows = Vec::new();
    for (id, name) in names {
        let roles: Vec<&str> = keys.roles(id).map(Role::name).collect();
        let about = match roles.is_empty() {
            true => format!("{name}, no role"),
            false => format!("{name}, role {}", roles.join(", ")),
        };
        let newest = trail.newest_action(id);
        let was_revoked = matches!(newest, Some("signing_key.revoke" | "signing_key.found_revoked"));
        let action = match (newest, keys.is_revoked(id)) {
            (Some(_), now) if now == was_revoked => continue,
            (None, false) => "signing_key.found",
            (_, true) => "signing_key.found_revoked",
            // A revocation that failed, or one by a root key that is revoked itself.
            (Some(_), false) => "signing_key.found_trusted",
        };
        rows.push((id, action, about));
    }
    let changes: Vec<Change<'_>> = rows
        .iter()
        .map(|(id, action, about)| Change {
            tenant: "default",
            action,
            subject: id,
            detail: about,
            reason: "",
        })
        .collect();
    audit::append_all(&mut transaction, actor, &changes)
        .await
        .context("append to the audit")?;
    transaction.commit().await.context("commit")
}

/// Names of a folder's public keys by their ids.
pub fn names(folder: &Path) -> anyhow::Result<BTreeMap<String, String>> {
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
