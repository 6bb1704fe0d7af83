//! Samplers: the processes whose generations may be trained on, each with a key of its own.
//!
//! A replica, a gateway, a collector or the harness of an offline run signs the generations that it
//! samples. The trainer accepts a signature only if the table `sampler` has the key, for the name and
//! the policy of the generation, and the key is not revoked or expired. An API key proves nothing
//! about who sampled.

use std::fs;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use anyhow::{Context, ensure};
use ed25519_dalek::{Signature, Signer, SigningKey, VerifyingKey};
use rand::TryRngCore;
use sqlx::{PgConnection, PgPool};
use time::OffsetDateTime;

use crate::audit::Actor;
use crate::audit::rows::{Audited, Fingerprint};

/// A sampler's private key. `Debug` shows only its id.
pub struct SamplerKey {
    key: SigningKey,
    id: String,
}

impl SamplerKey {
    /// Reads the key in `path`, or creates it from the system's randomness with mode 0600. Processes
    /// that start at the same time get the same key.
    pub fn load_or_create(path: &Path) -> anyhow::Result<Self> {
        if !path
            .try_exists()
            .with_context(|| format!("look at {}", path.display()))?
        {
            create(path)?;
        }
        Self::load(path)
    }

    /// Reads the key in `path`.
    pub fn load(path: &Path) -> anyhow::Result<Self> {
        let metadata = fs::metadata(path).with_context(|| {
            let path = path.display();
            format!(
                "look at {path} (a replica makes its key when it starts, `springtide sampler new-key` makes others)"
            )
        })?;
        // Kubernetes gives a secret to a group: then root owns it, and the group may read it.
        let group_may_read = if metadata.uid() == 0 { 0o040 } else { 0 };
        ensure!(
            metadata.permissions().mode() & 0o077 & !group_may_read == 0,
            "{}: others can read this sampler key: set its mode to 0600",
            path.display()
        );
        let text = fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
        let mut seed = [0; 32];
        hex::decode_to_slice(text.trim(), &mut seed)
            .map_err(|_| anyhow::anyhow!("{}: a sampler key has 64 hexadecimal digits", path.display()))?;
        Ok(Self::from_seed(&seed))
    }

    /// The key of a 32-byte seed.
    pub fn from_seed(seed: &[u8; 32]) -> Self {
        let key = SigningKey::from_bytes(seed);
        let id = id_of(&key.verifying_key().to_bytes());
        Self { key, id }
    }

    /// BLAKE3 of the public key, 64 hexadecimal digits. Generations name it.
    pub fn id(&self) -> &str {
        &self.id
    }

    pub fn public_key(&self) -> [u8; 32] {
        self.key.verifying_key().to_bytes()
    }

    /// An Ed25519 signature.
    pub fn sign(&self, message: &[u8]) -> [u8; 64] {
        self.key.sign(message).to_bytes()
    }
}

impl std::fmt::Debug for SamplerKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SamplerKey({})", self.id)
    }
}

/// Writes a new seed beside `path` and links it there, so that no reader sees a part of it.
fn create(path: &Path) -> anyhow::Result<()> {
    let folder = path.parent().context("the path of a sampler key has no folder")?;
    fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    let mut seed = [0_u8; 32];
    rand::rngs::OsRng
        .try_fill_bytes(&mut seed)
        .context("draw random bytes")?;
    let mut name = [0_u8; 8];
    rand::rngs::OsRng
        .try_fill_bytes(&mut name)
        .context("draw random bytes")?;
    let draft = folder.join(format!(".sampler-{}", hex::encode(name)));
    let write = || {
        let mut options = fs::OpenOptions::new();
        let mut file = options.write(true).create_new(true).mode(0o600).open(&draft)?;
        file.write_all(hex::encode(seed).as_bytes())?;
        file.sync_all()?;
        match fs::hard_link(&draft, path) {
            // Another process was faster; its key is used.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
            linked => linked,
        }
    };
    let written = write();
    let _ = fs::remove_file(&draft);
    written.with_context(|| format!("create {}", path.display()))
}

/// The id of a public key: its BLAKE3, 64 hexadecimal digits.
pub fn id_of(public_key: &[u8; 32]) -> String {
    blake3::hash(public_key).to_hex().to_string()
}

/// Reads a public key of 64 hexadecimal digits.
pub fn parse_public_key(text: &str) -> anyhow::Result<[u8; 32]> {
    let mut key = [0; 32];
    hex::decode_to_slice(text.trim(), &mut key)
        .ok()
        .context("a public key has 64 hexadecimal digits")?;
    Ok(key)
}

/// Whether the key made the signature of the message. False for anything malformed.
pub fn verify(public_key: &[u8], message: &[u8], signature: &[u8]) -> bool {
    let Ok(key) = <&[u8; 32]>::try_from(public_key) else {
        return false;
    };
    let (Ok(key), Ok(signature)) = (VerifyingKey::from_bytes(key), Signature::from_slice(signature)) else {
        return false;
    };
    key.verify_strict(message, &signature).is_ok()
}

/// A row of the table `sampler`.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Sampler {
    pub id: String,
    /// What the generation's `replica` must be.
    pub name: String,
    /// The only policy it samples. `None`: every policy.
    pub policy: Option<String>,
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
    #[serde(with = "time::serde::rfc3339::option")]
    pub expires_at: Option<OffsetDateTime>,
    #[serde(with = "time::serde::rfc3339::option")]
    pub revoked_at: Option<OffsetDateTime>,
}

/// Registers a public key, or changes when a registered one expires. Returns its id. Repeating it
/// changes nothing. The audit names `actor`.
///
/// Fails for a key that is registered with another name or policy, or is revoked, and without
/// `expires_at` for one that expires.
pub async fn register(
    pool: &PgPool,
    public_key: &[u8; 32],
    name: &str,
    policy: Option<&str>,
    expires_at: Option<OffsetDateTime>,
    actor: Actor<'_>,
) -> anyhow::Result<String> {
    let usable = VerifyingKey::from_bytes(public_key).is_ok_and(|key| !key.is_weak());
    ensure!(usable, "it is not a usable Ed25519 public key");
    ensure!(
        !name.is_empty() && name.len() <= 256,
        "a sampler's name has 1 to 256 bytes"
    );
    let id = id_of(public_key);
    // As precise as it is stored.
    let expires_at = expires_at.and_then(|at| at.replace_microsecond(at.microsecond()).ok());
    let mut transaction = crate::database::begin(pool).await.context("begin")?;
    let inserted = sqlx::query!(
        "insert into sampler (id, public_key, name, policy, expires_at) values ($1, $2, $3, $4, $5)
         on conflict (id) do nothing",
        id,
        public_key.as_slice(),
        name,
        policy,
        expires_at
    )
    .execute(&mut *transaction)
    .await
    .context("store the sampler")?;
    let known = sqlx::query_as!(
        Sampler,
        "select id, name, policy, created_at, expires_at, revoked_at from sampler where id = $1 for update",
        id
    )
    .fetch_one(&mut *transaction)
    .await
    .context("look up the sampler")?;
    ensure!(known.revoked_at.is_none(), "sampler {id} is revoked: make another key");
    ensure!(
        known.name == name && known.policy.as_deref() == policy,
        "sampler {id} is registered as {} for {}: make another key",
        known.name,
        known.policy.as_deref().unwrap_or("every policy")
    );
    if inserted.rows_affected() > 0 {
        let until = expires_at.map_or("until it is revoked".to_owned(), |at| format!("until {at}"));
        let detail = format!("{name} for {}, {until}", policy.unwrap_or("every policy"));
        record(&mut transaction, actor, "sampler.add", &id, &detail, "").await?;
    } else if known.expires_at != expires_at {
        let at = expires_at.with_context(|| {
            let until = known.expires_at.map(|at| at.to_string()).unwrap_or_default();
            format!("sampler {id} is registered until {until}: say with --expires how long it is valid from now on")
        })?;
        sqlx::query!("update sampler set expires_at = $2 where id = $1", id, at)
            .execute(&mut *transaction)
            .await
            .context("store when the sampler expires")?;
        record(
            &mut transaction,
            actor,
            "sampler.renew",
            &id,
            &format!("until {at}"),
            "",
        )
        .await?;
    }
    transaction.commit().await.context("commit")?;
    Ok(id)
}

/// The sampler with this id.
pub async fn find(pool: &PgPool, id: &str) -> anyhow::Result<Option<Sampler>> {
    sqlx::query_as!(
        Sampler,
        "select id, name, policy, created_at, expires_at, revoked_at from sampler where id = $1",
        id
    )
    .fetch_optional(pool)
    .await
    .context("look up the sampler")
}

/// The public key of a sampler, unless it is unknown, revoked or expired.
pub async fn valid_key(pool: &PgPool, id: &str) -> anyhow::Result<Option<Vec<u8>>> {
    sqlx::query_scalar!(
        "select public_key from sampler
         where id = $1 and revoked_at is null and (expires_at is null or expires_at > clock_timestamp())",
        id
    )
    .fetch_optional(pool)
    .await
    .context("look up the sampler")
}

/// All samplers, oldest first.
pub async fn list(pool: &PgPool) -> anyhow::Result<Vec<Sampler>> {
    sqlx::query_as!(
        Sampler,
        "select id, name, policy, created_at, expires_at, revoked_at from sampler order by created_at, id"
    )
    .fetch_all(pool)
    .await
    .context("list samplers")
}

/// Waits for revocations that are under way. Later ones wait until this transaction ends, so what it
/// reads about revocations stays true until it commits.
pub async fn hold_revocations(connection: &mut PgConnection) -> sqlx::Result<()> {
    sqlx::query!("select from pg_advisory_xact_lock_shared(hashtextextended('springtide/sampler/revoke', 0))")
        .execute(connection)
        .await?;
    Ok(())
}

/// Revokes a sampler: nothing that it signed is trained on from now on. Returns whether it was not
/// revoked before. The audit names `actor` and `reason`.
pub async fn revoke(pool: &PgPool, id: &str, actor: Actor<'_>, reason: &str) -> anyhow::Result<bool> {
    ensure!(
        find(pool, id).await?.is_some(),
        "there is no sampler {id}; `springtide sampler list` shows all"
    );
    let mut transaction = crate::database::begin(pool).await.context("begin")?;
    sqlx::query!("select from pg_advisory_xact_lock(hashtextextended('springtide/sampler/revoke', 0))")
        .execute(&mut *transaction)
        .await
        .context("wait for steps that are being committed")?;
    let revoked = sqlx::query!(
        "update sampler set revoked_at = clock_timestamp() where id = $1 and revoked_at is null",
        id
    )
    .execute(&mut *transaction)
    .await
    .context("revoke the sampler")?;
    let is_new = revoked.rows_affected() > 0;
    if is_new {
        record(&mut transaction, actor, "sampler.revoke", id, "", reason).await?;
    }
    transaction.commit().await.context("commit")?;
    Ok(is_new)
}

/// Appends to the audit what made the sampler's row what it is now.
async fn record(
    connection: &mut PgConnection,
    actor: Actor<'_>,
    action: &str,
    id: &str,
    about: &str,
    reason: &str,
) -> anyhow::Result<()> {
    let rows = audited_rows(connection, Some(id)).await.context("read the sampler")?;
    let row = rows.first().context("the sampler is gone")?;
    row.append(connection, actor, action, about, reason)
        .await
        .context("append to the audit")
}

/// All samplers, to be compared with the audit's actions `sampler.…`.
pub async fn audited(connection: &mut PgConnection) -> sqlx::Result<Vec<Audited>> {
    audited_rows(connection, None).await
}

async fn audited_rows(connection: &mut PgConnection, id: Option<&str>) -> sqlx::Result<Vec<Audited>> {
    let rows = sqlx::query!(
        "select id, public_key, name, policy, expires_at, revoked_at from sampler where $1::text is null or id = $1",
        id
    )
    .fetch_all(connection)
    .await?;
    let audited = rows.into_iter().map(|row| Audited {
        fingerprint: Fingerprint::of("sampler")
            .text(&*row.id)
            .bytes(&row.public_key[..])
            .text(&*row.name)
            .text(row.policy.as_deref())
            .time(row.expires_at)
            .time(row.revoked_at)
            .finish(),
        // Samplers belong to no tenant; their rows are in that of the stack itself.
        tenant: "default".to_owned(),
        subject: row.id,
    });
    Ok(audited.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_signs_for_itself_alone() {
        let (key, other) = (SamplerKey::from_seed(&[1; 32]), SamplerKey::from_seed(&[2; 32]));
        let signature = key.sign(b"message");
        assert!(verify(&key.public_key(), b"message", &signature));
        assert!(!verify(&key.public_key(), b"another", &signature));
        assert!(!verify(&other.public_key(), b"message", &signature));
        assert!(!verify(&key.public_key(), b"message", &signature[..63]));
        assert!(!verify(&key.public_key()[..31], b"message", &signature));
        assert_eq!(key.id(), id_of(&key.public_key()));
        assert!(!format!("{key:?}").contains(&hex::encode([1; 32])));
    }

    #[test]
    fn a_key_is_made_once_with_mode_0600_and_refused_if_others_can_read_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("serve/sampler.key");
        let made = SamplerKey::load_or_create(&path).unwrap();
        let again = SamplerKey::load_or_create(&path).unwrap();
        assert_eq!(made.id(), again.id());
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        // Only root gives a file to a group.
        let is_roots = fs::metadata(&path).unwrap().uid() == 0;
        assert_eq!(SamplerKey::load_or_create(&path).is_ok(), is_roots);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        let error = SamplerKey::load_or_create(&path).unwrap_err().to_string();
        assert!(error.contains("0600"), "{error}");
        fs::write(&path, "not a key").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        assert!(SamplerKey::load_or_create(&path).is_err());
        let missing = dir.path().join("no.key");
        let error = SamplerKey::load(&missing).unwrap_err().to_string();
        assert!(error.contains("sampler new-key") && !missing.exists(), "{error}");
    }
}
