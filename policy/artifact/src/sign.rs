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

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use ed25519_dalek::{Signature, Signer, VerifyingKey};
use serde::{Deserialize, Serialize};

use crate::assignment;
use crate::atomic;
use crate::digest::Digest;

/// Kind of the signed timestamp. The name is that of older versions.
pub const TIMESTAMP_KIND: &str = "statement";
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
            assignment::KIND | TIMESTAMP_KIND => Role::Release,
            REVOCATION_KIND => Role::Root,
            _ => Role::Trainer,
        }
    }

    /// The role of a key whose file names none, as older versions wrote it: `trainer.pub` and
    /// `trainer-….pub` are of the trainer, likewise `release`. Nobody becomes root by a name.
    pub fn of_name(name: &str) -> Option<Self> {
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
    /// Empty: it signs nothing but its own revocation.
    roles: BTreeSet<Role>,
}

/// A DSSE envelope in its JSON form.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Envelope {
    /// `application/vnd.springtide.<kind>.v1+json`.
    pub payload_type: String,
    /// Base64 of the payload's exact bytes.
    pub payload: String,
    /// Each is enough on its own.
    pub signatures: Vec<EnvelopeSignature>,
}

/// One signature of an envelope.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EnvelopeSignature {
    /// BLAKE3 of the public key's 32 bytes, hexadecimal.
    pub keyid: String,
    /// Base64 of the 64 bytes of the Ed25519 signature over the pre-authentication encoding.
    pub sig: String,
}

impl SigningKey {
    /// Reads `<name>.key` in `folder`, or creates it from the system's randomness, and creates
    /// `<name>.pub` if it is missing, with the role of its name ([`Role::of_name`]). Processes that
    /// start at the same time get the same key.
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
            if role.is_some() && found != role {
                return Err(key_error(&public_path, "the key has another role, or none"));
            }
        } else {
            let public = hex::encode(key.key.verifying_key().to_bytes());
            let role = role.map(|role| format!(" {role}")).unwrap_or_default();
            let text = format!("{public}{role}\n");
            atomic::replace(&public_path, &[text.as_bytes()]).map_err(io("write", &public_path))?;
        }
        Ok(key)
    }

    fn load(path: &Path) -> Result<Self, Error> {
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            let mode = fs::metadata(path).map_err(io("read", path))?.permissions().mode();
            if mode & 0o077 != 0 {
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
        if keys.keys.is_empty() {
            return Err(key_error(folder, "there is no trusted key (*.pub) in it"));
        }
        Ok(keys)
    }

    /// The id of the public key in a file.
    pub fn id_of(path: &Path) -> Result<String, Error> {
        Ok(Digest::of(&read_public(path)?.0).to_string())
    }

    /// Trusts `key` too, in this role beside those that it has.
    pub fn insert(&mut self, key: &SigningKey, role: Role) {
        self.add(key.key.verifying_key(), Some(role));
    }

    fn add(&mut self, key: VerifyingKey, role: Option<Role>) {
        let entry = self.keys.entry(key_id(&key)).or_insert_with(|| PublicKey {
            key,
            roles: BTreeSet::new(),
        });
        entry.roles.extend(role);
    }

    /// Revokes the key with this id.
    pub fn revoke(&mut self, key_id: &str) {
        self.revoked.insert(key_id.into());
    }

    /// Revokes the keys that `revocations` revoke. A revocation counts if the key itself signed it,
    /// or a root key that is not revoked.
    ///
    /// The order of revocations does not matter: a revocation by a key that is certainly revoked
    /// never counts, and keys that revoke each other are all revoked. Keys without a root key among
    /// them are from before there were roles: any of them may revoke any other.
    pub fn revoke_by(&mut self, revocations: &Revocations) {
        let is_root = |key: &PublicKey| key.roles.contains(&Role::Root);
        let has_root = self.keys.values().any(is_root);
        let may_revoke = |signer: &str| match self.keys.get(signer) {
            Some(key) => !has_root || is_root(key),
            None => false,
        };
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

impl Envelope {
    /// Signs `payload` as a document of `kind`, for example `manifest`.
    pub fn sign(kind: &str, payload: &[u8], key: &SigningKey) -> Self {
        let payload_type = payload_type(kind);
        let signature = key.key.sign(&pre_authentication_encoding(&payload_type, payload));
        Envelope {
            payload_type,
            payload: BASE64.encode(payload),
            signatures: vec![EnvelopeSignature {
                keyid: key.key_id.clone(),
                sig: BASE64.encode(signature.to_bytes()),
            }],
        }
    }

    /// Whether it claims to be a document of `kind`.
    pub fn claims_kind(&self, kind: &str) -> bool {
        self.payload_type == payload_type(kind)
    }

    /// The payload, if a trusted key signed it as a document of `kind`.
    pub fn verify(&self, kind: &str, keys: &TrustedKeys) -> Result<Vec<u8>, Error> {
        Ok(self.verify_signer(kind, keys)?.0)
    }

    /// [`verify`](Self::verify) that also returns the id of the first trusted key that signed.
    pub fn verify_signer(&self, kind: &str, keys: &TrustedKeys) -> Result<(Vec<u8>, String), Error> {
        let (payload, signers) = self.verify_signatures(kind, keys)?;
        if let Some(signer) = signers.iter().find(|signer| keys.may_sign(signer, kind)) {
            return Ok((payload, (*signer).to_owned()));
        }
        if let Some(revoked) = signers.iter().find(|signer| keys.is_revoked(signer)) {
            return Err(Error::Revoked((*revoked).to_owned()));
        }
        let Some(signer) = signers.first() else {
            return Err(Error::Untrusted);
        };
        let roles: Vec<&str> = keys.roles(signer).map(Role::name).collect();
        Err(Error::Role {
            key: (*signer).to_owned(),
            has: match roles.is_empty() {
                true => "no role".into(),
                false => format!("the role `{}`", roles.join("`, `")),
            },
            kind: kind.into(),
            needed: Role::of_kind(kind),
        })
    }

    /// The payload, if the envelope is of `kind`, and the keys of `keys` whose signatures are
    /// correct, whatever their roles and revoked ones too.
    pub fn verify_signatures(&self, kind: &str, keys: &TrustedKeys) -> Result<(Vec<u8>, Vec<&str>), Error> {
        let expected = payload_type(kind);
        if self.payload_type != expected {
            return Err(Error::PayloadType {
                expected,
                found: self.payload_type.clone(),
            });
        }
        let payload = BASE64
            .decode(&self.payload)
            .map_err(|error| Error::Malformed(error.to_string()))?;
        let signed = pre_authentication_encoding(&expected, &payload);
        let correct = |signature: &&EnvelopeSignature| {
            let bytes = BASE64.decode(&signature.sig).unwrap_or_default();
            match (keys.keys.get(&signature.keyid), Signature::from_slice(&bytes)) {
                (Some(key), Ok(signature)) => key.key.verify_strict(&signed, &signature).is_ok(),
                _ => false,
            }
        };
        let correct = self.signatures.iter().filter(correct);
        let signers = correct.map(|signature| signature.keyid.as_str()).collect();
        Ok((payload, signers))
    }

    /// Adds a signature. Returns false if the key has signed before. Callers verify the content
    /// first.
    pub fn countersign(&mut self, kind: &str, key: &SigningKey) -> Result<bool, Error> {
        if self.signatures.iter().any(|signature| signature.keyid == key.key_id) {
            return Ok(false);
        }
        let payload = BASE64
            .decode(&self.payload)
            .map_err(|error| Error::Malformed(error.to_string()))?;
        self.signatures.extend(Envelope::sign(kind, &payload, key).signatures);
        Ok(true)
    }

    /// The JSON form.
    pub fn to_bytes(&self) -> Result<Vec<u8>, Error> {
        serde_json::to_vec(self).map_err(|error| Error::Malformed(error.to_string()))
    }

    /// Reads the JSON form. Verifies nothing.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Error> {
        serde_json::from_slice(bytes).map_err(|error| Error::Malformed(error.to_string()))
    }
}

fn payload_type(kind: &str) -> String {
    format!("application/vnd.springtide.{kind}.v1+json")
}

/// DSSE's PAE: `DSSEv1 <length of type> <type> <length of payload> <payload>`.
fn pre_authentication_encoding(payload_type: &str, payload: &[u8]) -> Vec<u8> {
    let mut out = format!("DSSEv1 {} {} {} ", payload_type.len(), payload_type, payload.len()).into_bytes();
    out.extend_from_slice(payload);
    out
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

/// A public key and its role: the one in the file, or that of the file's name.
fn read_public(path: &Path) -> Result<([u8; 32], Option<Role>), Error> {
    let text = fs::read_to_string(path).map_err(io("read", path))?;
    let mut words = text.split_whitespace();
    let key = read_hex(path, words.next().unwrap_or_default())?;
    let role = match words.next() {
        Some(word) => {
            let unknown = "the word behind the key is not a role (root, release or trainer)";
            Some(word.parse().map_err(|_| key_error(path, unknown))?)
        }
        None => path.file_stem().and_then(|name| name.to_str()).and_then(Role::of_name),
    };
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
mod tests {
    use super::*;

    #[test]
    fn the_pre_authentication_encoding_is_dsse_s() {
        // the example of the DSSE protocol document
        assert_eq!(
            pre_authentication_encoding("http://example.com/HelloWorld", b"hello world"),
            b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
        );
    }

    #[test]
    fn a_key_is_made_once_and_trusted_by_its_public_half() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys");
        let key = SigningKey::load_or_create(&path, "trainer").unwrap();
        let again = SigningKey::load_or_create(&path, "trainer").unwrap();
        assert_eq!(key.key_id(), again.key_id());
        let other = SigningKey::load_or_create(&path, "release").unwrap();
        assert_ne!(key.key_id(), other.key_id());
        let trusted = TrustedKeys::load(&path).unwrap();
        assert_eq!(trusted.len(), 2);
        let envelope = Envelope::sign("manifest", b"{}", &key);
        let envelope = Envelope::from_bytes(&envelope.to_bytes().unwrap()).unwrap();
        assert_eq!(envelope.verify("manifest", &trusted).unwrap(), b"{}");
    }

    #[test]
    fn another_type_another_key_and_any_changed_byte_are_refused() {
        let key = SigningKey::from_seed(&[1; 32]);
        let stranger = SigningKey::from_seed(&[2; 32]);
        let envelope = Envelope::sign("manifest", b"{\"version\":7}", &key);
        assert!(envelope.verify("assignment", &key.trusted()).is_err());
        assert!(matches!(
            envelope.verify("manifest", &stranger.trusted()),
            Err(Error::Untrusted)
        ));
        assert!(envelope.verify("manifest", &TrustedKeys::default()).is_err());
        let mut forged = envelope.clone();
        forged.signatures[0].keyid = stranger.key_id().into();
        assert!(forged.verify("manifest", &stranger.trusted()).is_err());
        let bytes = envelope.to_bytes().unwrap();
        for position in 0..bytes.len() {
            let mut broken = bytes.clone();
            broken[position] ^= 1;
            let verified =
                Envelope::from_bytes(&broken).and_then(|envelope| envelope.verify("manifest", &key.trusted()));
            assert!(verified.is_err(), "{position}");
        }
    }

    #[test]
    fn a_second_signature_by_a_stranger_does_no_harm() {
        let key = SigningKey::from_seed(&[1; 32]);
        let mut envelope = Envelope::sign("manifest", b"{}", &key);
        envelope.signatures.insert(
            0,
            EnvelopeSignature {
                keyid: "unknown".into(),
                sig: "not base64!".into(),
            },
        );
        assert!(envelope.verify("manifest", &key.trusted()).is_ok());
    }

    #[test]
    fn a_revoked_key_counts_for_nothing_and_a_second_signature_takes_its_place() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let old = SigningKey::create(path, "old", Role::Trainer).unwrap();
        let new = SigningKey::create(path, "new", Role::Trainer).unwrap();
        let mut envelope = Envelope::sign("manifest", b"{}", &old);
        assert!(envelope.verify("manifest", &TrustedKeys::load(path).unwrap()).is_ok());
        fs::copy(path.join("old.pub"), path.join("old.revoked")).unwrap();
        let keys = TrustedKeys::load(path).unwrap();
        assert_eq!(
            (keys.len(), keys.contains(old.key_id()), keys.is_revoked(old.key_id())),
            (1, false, true)
        );
        assert!(matches!(envelope.verify("manifest", &keys), Err(Error::Revoked(_))));
        assert!(envelope.countersign("manifest", &new).unwrap());
        assert!(!envelope.countersign("manifest", &new).unwrap());
        let (payload, signer) = envelope.verify_signer("manifest", &keys).unwrap();
        assert_eq!((payload.as_slice(), signer.as_str()), (&b"{}"[..], new.key_id()));
        let mut keys = keys;
        keys.revoke(new.key_id());
        assert!(keys.is_empty() && envelope.verify("manifest", &keys).is_err());
    }

    #[test]
    fn a_readable_key_a_stray_public_key_and_an_empty_folder_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        assert!(TrustedKeys::load(path).is_err());
        assert!(SigningKey::load_or_create(path, "../x").is_err());
        SigningKey::create(path, "a", Role::Trainer).unwrap();
        SigningKey::create(path, "b", Role::Trainer).unwrap();
        fs::copy(path.join("a.pub"), path.join("b.pub")).unwrap();
        let error = SigningKey::load_or_create(path, "b").unwrap_err();
        assert!(error.to_string().contains("belong"), "{error}");
        fs::write(path.join("c.pub"), "00").unwrap();
        assert!(TrustedKeys::load(path).is_err());
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            fs::set_permissions(path.join("a.key"), fs::Permissions::from_mode(0o644)).unwrap();
            let error = SigningKey::load_or_create(path, "a").unwrap_err();
            assert!(error.to_string().contains("0600"), "{error}");
        }
    }

    #[test]
    fn a_key_signs_only_documents_of_its_role() {
        let folder = tempfile::tempdir().unwrap();
        let keys = Role::ALL.map(|role| SigningKey::create(folder.path(), role.name(), role).unwrap());
        let trusted = TrustedKeys::load(folder.path()).unwrap();
        let kinds = [
            ("manifest", Role::Trainer),
            ("sharded-manifest", Role::Trainer),
            ("fold", Role::Trainer),
            ("share", Role::Trainer),
            ("assignment", Role::Release),
            ("statement", Role::Release),
            ("revocation", Role::Root),
        ];
        for (kind, needed) in kinds {
            for (role, key) in Role::ALL.iter().zip(&keys) {
                let verified = Envelope::sign(kind, b"{}", key).verify(kind, &trusted);
                match *role == needed {
                    true => assert_eq!(verified.unwrap(), b"{}", "{role} {kind}"),
                    false => assert!(
                        matches!(verified, Err(Error::Role { .. })),
                        "{role} {kind}: {verified:?}"
                    ),
                }
            }
        }
    }

    #[test]
    fn a_key_file_without_a_role_has_that_of_its_name() {
        let folder = tempfile::tempdir().unwrap();
        for (number, name) in ["trainer", "trainer-old", "release", "root", "cluster1"]
            .iter()
            .enumerate()
        {
            let key = SigningKey::from_seed(&[number as u8 + 1; 32]);
            let public = hex::encode(key.key.verifying_key().to_bytes());
            fs::write(folder.path().join(format!("{name}.pub")), public).unwrap();
        }
        let keys = TrustedKeys::load(folder.path()).unwrap();
        let role = |seed: u8| keys.roles(SigningKey::from_seed(&[seed; 32]).key_id()).next();
        let roles: Vec<Option<Role>> = (1..=5).map(role).collect();
        assert_eq!(
            roles,
            [
                Some(Role::Trainer),
                Some(Role::Trainer),
                Some(Role::Release),
                None,
                None
            ]
        );
        let without = Envelope::sign("manifest", b"{}", &SigningKey::from_seed(&[5; 32]));
        let error = without.verify("manifest", &keys).unwrap_err().to_string();
        assert!(error.contains("no role") && error.contains("`trainer`"), "{error}");
        for wrong in [" trainer release", " king"] {
            let public = fs::read_to_string(folder.path().join("trainer.pub")).unwrap() + wrong;
            fs::write(folder.path().join("trainer.pub"), public).unwrap();
            assert!(TrustedKeys::load(folder.path()).is_err(), "{wrong}");
        }
        assert!(SigningKey::load_or_create(folder.path(), "new").is_err());
    }

    /// The keys that are revoked, of the keys of `folder` with revocations as `key<signer`.
    fn revoked(folder: &[(&str, Role)], given: &str) -> String {
        let mut keys = TrustedKeys::default();
        let mut names = BTreeMap::new();
        for (number, (name, role)) in folder.iter().enumerate() {
            let key = SigningKey::from_seed(&[number as u8 + 1; 32]);
            keys.insert(&key, *role);
            names.insert(*name, key.key_id().to_owned());
        }
        let mut revocations = Revocations::new();
        for one in given.split_whitespace() {
            let (key, signer) = one.split_once('<').unwrap();
            revocations
                .entry(names[key].clone())
                .or_default()
                .insert(names[signer].clone());
        }
        keys.revoke_by(&revocations);
        let revoked = names.into_iter().filter(|(_, id)| keys.is_revoked(id));
        revoked.map(|(name, _)| name).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn only_a_root_key_revokes_others_and_a_revoked_one_no_longer() {
        let folder = [
            ("root", Role::Root),
            ("spare", Role::Root),
            ("release", Role::Release),
            ("trainer", Role::Trainer),
        ];
        for (given, expected) in [
            ("", ""),
            ("trainer<root", "trainer"),
            ("trainer<trainer", "trainer"),
            // a thief of a trainer's or a release key takes nothing but that key away
            ("release<trainer", ""),
            ("trainer<release root<release", ""),
            ("trainer<root release<trainer", "trainer"),
            // a thief of the root key, which then revokes itself or is revoked by the spare
            ("release<root trainer<root", "release trainer"),
            ("release<root trainer<root root<root", "root"),
            ("release<root root<spare", "root"),
            ("release<root release<spare root<spare", "release root"),
            ("release<root spare<root root<root", "root"),
            // nobody can tell which of the two is the thief
            ("spare<root root<spare release<root", "root spare"),
        ] {
            assert_eq!(revoked(&folder, given), expected, "{given}");
        }
    }

    #[test]
    fn without_a_root_key_any_key_revokes_and_the_order_does_not_matter() {
        let folder = [
            ("release", Role::Release),
            ("trainer", Role::Trainer),
            ("trainer-old", Role::Trainer),
        ];
        for (given, expected) in [
            ("trainer-old<trainer", "trainer-old"),
            ("trainer<release", "trainer"),
            // a replica that knows the first revocation and a new one agree
            ("trainer-old<trainer release<trainer-old", "trainer-old"),
            ("trainer<trainer release<trainer", "trainer"),
            ("trainer<release release<trainer", "release trainer"),
        ] {
            assert_eq!(revoked(&folder, given), expected, "{given}");
        }
    }
}
