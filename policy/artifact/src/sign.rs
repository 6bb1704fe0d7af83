//! Signatures: Ed25519 over a DSSE envelope, and the trusted keys with their roles.
//!
//! An envelope binds its payload to a type, so a signed assignment never passes for a manifest.
//! A key has a role, so a stolen trainer key never signs an assignment. Callers check the payload's
//! content. Envelope: <https://github.com/secure-systems-lab/dsse/blob/v1.0.2/envelope.md>.
//!
//! The roles are those of TUF, without thresholds:
//!
//! | role | TUF | signs |
//! |---|---|---|
//! | `root` | root | revocations of any key. Kept offline |
//! | `release` | snapshot, timestamp | assignments and timestamps |
//! | `trainer` | targets | everything else: manifests, squashed deltas, reports of shards |
//!
//! Every key may also revoke itself.

mod envelope;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use ed25519_dalek::VerifyingKey;

use crate::assignment;
use crate::atomic;
use crate::digest::Digest;

pub use envelope::{Envelope, EnvelopeSignature};

/// Kind of the signed timestamp.
pub const TIMESTAMP_KIND: &str = "statement";
/// The receipt of an erased user.
pub const ERASURE_KIND: &str = "erasure";
/// Kind of the revocation of a key.
pub const REVOCATION_KIND: &str = "revocation";

/// Why a key or an envelope was refused.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{action} {path}")]
    Io {
        action: &'static str,
        path: String,
        source: std::io::Error,
    },
    #[error("{path}: {reason}")]
    Key { path: String, reason: &'static str },
    #[error("the system's randomness is not available: {0}")]
    Randomness(String),
    #[error("the envelope is malformed: {0}")]
    Malformed(String),
    #[error("the envelope holds `{found}`, not `{expected}`")]
    PayloadType { expected: String, found: String },
    #[error("no trusted key made any of the envelope's signatures")]
    Untrusted,
    #[error("key {key} signed it and has {has}, but a {kind} needs the role `{needed}`: see `springtide policy keys`")]
    Role {
        key: String,
        has: String,
        kind: String,
        needed: Role,
    },
    #[error("`{0}` is not a role: use root, release or trainer")]
    UnknownRole(String),
    #[error(
        "key {0} signed it and is revoked: publish it again, or let a trusted key sign it (`springtide policy resign`)"
    )]
    Revoked(String),
}

/// A private key. `Debug` shows only the public key's id.
pub struct SigningKey {
    key: ed25519_dalek::SigningKey,
    key_id: String,
}

/// What a key may sign.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    Root,
    Release,
    Trainer,
}

impl Role {
    pub const ALL: [Role; 3] = [Role::Root, Role::Release, Role::Trainer];

    pub fn name(self) -> &'static str {
        match self {
            Role::Root => "root",
            Role::Release => "release",
            Role::Trainer => "trainer",
        }
    }

    /// The role that signs documents of `kind`.
    pub fn of_kind(kind: &str) -> Self {
        match kind {
            assignment::KIND | TIMESTAMP_KIND | ERASURE_KIND => Role::Release,
            REVOCATION_KIND => Role::Root,
            _ => Role::Trainer,
        }
    }

    /// The role that a process gives a key that it makes: `trainer` and `trainer-…` are of the
    /// trainer, likewise `release`. A root key is made by a person alone.
    fn of_name(name: &str) -> Option<Self> {
        [Role::Release, Role::Trainer].into_iter().find(|role| {
            let rest = name.strip_prefix(role.name());
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
        })
    }
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Role {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let role = Role::ALL.into_iter().find(|role| role.name() == text);
        role.ok_or_else(|| Error::UnknownRole(text.into()))
    }
}

/// The signers of each revoked key, both by id. See [`TrustedKeys::revoke_by`].
pub type Revocations = BTreeMap<String, BTreeSet<String>>;

/// Public keys by id. A document is trusted if a key of its role that is not revoked signed it.
#[derive(Debug, Clone, Default)]
pub struct TrustedKeys {
    keys: BTreeMap<String, PublicKey>,
    revoked: BTreeSet<String>,
}

#[derive(Debug, Clone)]
struct PublicKey {
    key: VerifyingKey,
    roles: BTreeSet<Role>,
}

impl SigningKey {
    /// Reads `<name>.key` in `folder`, or creates it from the system's randomness, and creates
    /// `<name>.pub` if it is missing. The role follows from the name: `trainer` or `trainer-…`, and
    /// `release` likewise. Processes that start at the same time get the same key.
    pub fn load_or_create(folder: &Path, name: &str) -> Result<Self, Error> {
        Self::load_or_create_as(folder, name, Role::of_name(name))
    }

    /// [`load_or_create`](Self::load_or_create) with a role. A key that exists must have it.
    pub fn create(folder: &Path, name: &str, role: Role) -> Result<Self, Error> {
        Self::load_or_create_as(folder, name, Some(role))
    }

    fn load_or_create_as(folder: &Path, name: &str, role: Option<Role>) -> Result<Self, Error> {
        let path = key_path(folder, name, "key")?;
        if role.is_none() && !path.exists() {
            let reason = "a new key needs a role: name it after its role, or use `springtide policy new-key`";
            return Err(key_error(&path, reason));
        }
        fs::create_dir_all(folder).map_err(io("create", folder))?;
        if !path.exists() {
            let mut seed = [0; 32];
            getrandom::fill(&mut seed).map_err(|error| Error::Randomness(error.to_string()))?;
            match atomic::create_private(&path, hex::encode(seed).as_bytes()) {
                Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                    return Err(io("create", &path)(error));
                }
                _ => {} // created here or by another process just before: read the file
            }
        }
        let key = Self::load(&path)?;
        let public_path = key_path(folder, name, "pub")?;
        if public_path.exists() {
            let (bytes, found) = read_public(&public_path)?;
            if bytes != key.key.verifying_key().to_bytes() {
                return Err(key_error(
                    &public_path,
                    "it does not belong to the private key beside it",
                ));
            }
            if role.is_some_and(|role| role != found) {
                return Err(key_error(&public_path, "the key has another role"));
            }
        } else {
            let role =
                role.ok_or_else(|| key_error(&public_path, "it is missing, and nothing else names the key's role"))?;
            let public = hex::encode(key.key.verifying_key().to_bytes());
            let text = format!("{public} {role}\n");
            atomic::replace(&public_path, &[text.as_bytes()]).map_err(io("write", &public_path))?;
        }
        Ok(key)
    }

    fn load(path: &Path) -> Result<Self, Error> {
        #[cfg(unix)]
        {
            use std::os::unix::fs::{MetadataExt, PermissionsExt};
            let metadata = fs::metadata(path).map_err(io("read", path))?;
            // Kubernetes gives a secret to a group: then root owns it, and the group may read it.
            let group_may_read = if metadata.uid() == 0 { 0o040 } else { 0 };
            if metadata.permissions().mode() & 0o077 & !group_may_read != 0 {
                return Err(key_error(path, "others can read it: set its mode to 0600"));
            }
        }
        let text = fs::read_to_string(path).map_err(io("read", path))?;
        Ok(Self::from_seed(&read_hex(path, &text)?))
    }

    /// The key of a 32-byte seed.
    pub fn from_seed(seed: &[u8; 32]) -> Self {
        let key = ed25519_dalek::SigningKey::from_bytes(seed);
        let key_id = key_id(&key.verifying_key());
        SigningKey { key, key_id }
    }

    /// BLAKE3 of the public key's 32 bytes, hexadecimal.
    pub fn key_id(&self) -> &str {
        &self.key_id
    }

    /// Trusts this key alone, for everything.
    pub fn trusted(&self) -> TrustedKeys {
        let mut keys = TrustedKeys::default();
        Role::ALL.into_iter().for_each(|role| keys.insert(self, role));
        keys
    }
}

impl std::fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SigningKey({})", self.key_id)
    }
}

impl TrustedKeys {
    /// Every `*.pub` in `folder`, with its role. A key that is also in a `*.revoked` file is
    /// revoked. Returns an error if there is no key, because nothing could be verified.
    pub fn load(folder: &Path) -> Result<Self, Error> {
        Self::load_all(folder)?.ok_or_else(|| key_error(folder, "there is no trusted key (*.pub) in it"))
    }

    /// [`load`](Self::load), but `None` if there is no key yet: the role that makes the first one may start later.
    pub fn load_if_any(folder: &Path) -> Result<Option<Self>, Error> {
        if folder.is_dir() {
            Self::load_all(folder)
        } else {
            Ok(None)
        }
    }

    fn load_all(folder: &Path) -> Result<Option<Self>, Error> {
        let mut keys = TrustedKeys::default();
        for entry in fs::read_dir(folder).map_err(io("read", folder))? {
            let path = entry.map_err(io("read", folder))?.path();
            let extension = path.extension().and_then(|extension| extension.to_str());
            let Some(kind @ ("pub" | "revoked")) = extension else {
                continue;
            };
            let (bytes, role) = read_public(&path)?;
            let key = VerifyingKey::from_bytes(&bytes)
                .ok()
                .filter(|key| !key.is_weak())
                .ok_or_else(|| key_error(&path, "it is not a usable Ed25519 public key"))?;
            if kind == "pub" {
                keys.add(key, role);
            } else {
                keys.revoked.insert(key_id(&key));
            }
        }
        Ok((!keys.keys.is_empty()).then_some(keys))
    }

    /// The id of the public key in a file.
    pub fn id_of(path: &Path) -> Result<String, Error> {
        Ok(Digest::of(&read_public(path)?.0).to_string())
    }

    /// Trusts `key` too, in this role beside those that it has.
    pub fn insert(&mut self, key: &SigningKey, role: Role) {
        self.add(key.key.verifying_key(), role);
    }

    fn add(&mut self, key: VerifyingKey, role: Role) {
        let entry = self.keys.entry(key_id(&key)).or_insert_with(|| PublicKey {
            key,
            roles: BTreeSet::new(),
        });
        entry.roles.insert(role);
    }

    /// Revokes the key with this id.
    pub fn revoke(&mut self, key_id: &str) {
        self.revoked.insert(key_id.into());
    }

    /// Revokes the keys that `revocations` revoke. A revocation counts if the key itself signed it,
    /// or a root key that is not revoked.
    ///
    /// The order of revocations does not matter: a revocation by a key that is certainly revoked
    /// never counts, and keys that revoke each other are all revoked. If there is no root key among
    /// the keys, any of them may revoke any other.
    pub fn revoke_by(&mut self, revocations: &Revocations) {
        let has_root = self.has_root();
        let may_revoke = |signer: &str| self.may_revoke_if(has_root, signer);
        let mut revoked = self.revoked.clone();
        revoked.extend(
            revocations
                .iter()
                .filter(|(key, signers)| signers.contains(*key))
                .map(|(key, _)| key.clone()),
        );
        // Whether a key that is not known to be revoked revokes `key`.
        let disputed = |key: &str, revoked: &BTreeSet<String>| {
            let mut signers = revocations.get(key).into_iter().flatten();
            signers.any(|by| may_revoke(by) && !revoked.contains(by))
        };
        loop {
            let certain = |(key, signers): &(&String, &BTreeSet<String>)| {
                !revoked.contains(*key)
                    && signers
                        .iter()
                        .any(|by| may_revoke(by) && !revoked.contains(by) && !disputed(by, &revoked))
            };
            let more: Vec<String> = revocations.iter().filter(certain).map(|(key, _)| key.clone()).collect();
            if more.is_empty() {
                break;
            }
            revoked.extend(more);
        }
        let each_other = revocations
            .keys()
            .filter(|key| may_revoke(key) && disputed(key, &revoked));
        let each_other: Vec<String> = each_other.cloned().collect();
        revoked.extend(each_other);
        self.revoked = revoked;
    }

    /// Whether a revocation of another key counts if the key with this id signed it, unless that
    /// key is revoked itself.
    pub fn may_revoke(&self, key_id: &str) -> bool {
        self.may_revoke_if(self.has_root(), key_id)
    }

    fn may_revoke_if(&self, has_root: bool, key_id: &str) -> bool {
        let key = self.keys.get(key_id);
        key.is_some_and(|key| !has_root || key.roles.contains(&Role::Root))
    }

    fn has_root(&self) -> bool {
        self.keys.values().any(|key| key.roles.contains(&Role::Root))
    }

    /// The same keys as if none were revoked.
    pub fn without_revocations(&self) -> Self {
        TrustedKeys {
            keys: self.keys.clone(),
            revoked: BTreeSet::new(),
        }
    }

    /// Whether the key with this id may sign documents of `kind`.
    pub fn may_sign(&self, key_id: &str, kind: &str) -> bool {
        self.contains(key_id) && self.roles(key_id).any(|role| role == Role::of_kind(kind))
    }

    /// The roles of a key.
    pub fn roles(&self, key_id: &str) -> impl Iterator<Item = Role> {
        self.keys
            .get(key_id)
            .into_iter()
            .flat_map(|key| key.roles.iter().copied())
    }

    /// Whether the key with this id is trusted, in any role.
    pub fn contains(&self, key_id: &str) -> bool {
        self.keys.contains_key(key_id) && !self.revoked.contains(key_id)
    }

    /// Whether the key with this id is revoked.
    pub fn is_revoked(&self, key_id: &str) -> bool {
        self.revoked.contains(key_id)
    }

    /// Whether the folder has the key with this id, revoked or not.
    pub fn knows(&self, key_id: &str) -> bool {
        self.keys.contains_key(key_id)
    }

    /// Ids of all keys, including revoked ones.
    pub fn ids(&self) -> impl Iterator<Item = &str> {
        self.keys.keys().map(String::as_str)
    }

    /// Number of trusted keys.
    pub fn len(&self) -> usize {
        self.ids().filter(|id| self.contains(id)).count()
    }

    /// Whether no key is trusted.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

fn key_id(key: &VerifyingKey) -> String {
    Digest::of(key.as_bytes()).to_string()
}

fn key_path(folder: &Path, name: &str, extension: &str) -> Result<PathBuf, Error> {
    let path = folder.join(format!("{name}.{extension}"));
    if name.is_empty() || Path::new(name).file_name() != Some(name.as_ref()) {
        return Err(key_error(&path, "a key's name must be a plain file name"));
    }
    Ok(path)
}

/// A public key and its role.
fn read_public(path: &Path) -> Result<([u8; 32], Role), Error> {
    let text = fs::read_to_string(path).map_err(io("read", path))?;
    let mut words = text.split_whitespace();
    let key = read_hex(path, words.next().unwrap_or_default())?;
    let role = words.next().and_then(|word| word.parse().ok());
    let role = role.ok_or_else(|| key_error(path, "no role (root, release or trainer) stands behind the key"))?;
    if words.next().is_some() {
        return Err(key_error(path, "it has more than a key and its role"));
    }
    Ok((key, role))
}

fn read_hex(path: &Path, text: &str) -> Result<[u8; 32], Error> {
    let mut bytes = [0; 32];
    hex::decode_to_slice(text.trim(), &mut bytes).map_err(|_| key_error(path, "it is not 64 hexadecimal digits"))?;
    Ok(bytes)
}

fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.display().to_string();
    move |source| Error::Io { action, path, source }
}

fn key_error(path: &Path, reason: &'static str) -> Error {
    Error::Key {
        path: path.display().to_string(),
        reason,
    }
}

#[cfg(test)]
mod tests;
