//! Signatures: Ed25519 over a DSSE envelope, and the trusted keys.
//!
//! An envelope binds its payload to a type, so a signed assignment never passes for a manifest.
//! Callers check the payload's content. Envelope:
//! <https://github.com/secure-systems-lab/dsse/blob/v1.0.2/envelope.md>.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use ed25519_dalek::{Signature, Signer, VerifyingKey};
use serde::{Deserialize, Serialize};

use crate::atomic;
use crate::digest::Digest;

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

/// Public keys by id. A document is trusted if a key that is not revoked signed it.
#[derive(Debug, Clone, Default)]
pub struct TrustedKeys {
    keys: BTreeMap<String, VerifyingKey>,
    revoked: BTreeSet<String>,
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
    /// `<name>.pub` if it is missing. Processes that start at the same time get the same key.
    pub fn load_or_create(folder: &Path, name: &str) -> Result<Self, Error> {
        let path = folder.join(format!("{name}.key"));
        if name.is_empty() || Path::new(name).file_name() != Some(name.as_ref()) {
            return Err(key_error(&path, "a key's name must be a plain file name"));
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
        let public_path = folder.join(format!("{name}.pub"));
        if public_path.exists() {
            if read_hex(&public_path)? != key.key.verifying_key().to_bytes() {
                return Err(key_error(
                    &public_path,
                    "it does not belong to the private key beside it",
                ));
            }
        } else {
            let public = hex::encode(key.key.verifying_key().to_bytes());
            atomic::replace(&public_path, &[public.as_bytes()]).map_err(io("write", &public_path))?;
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
        Ok(Self::from_seed(&read_hex(path)?))
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

    /// Trusts this key alone.
    pub fn trusted(&self) -> TrustedKeys {
        let mut keys = TrustedKeys::default();
        keys.insert(self);
        keys
    }
}

impl std::fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SigningKey({})", self.key_id)
    }
}

impl TrustedKeys {
    /// Every `*.pub` in `folder`. A key that is also in a `*.revoked` file is revoked. Returns an
    /// error if there is no key, because nothing could be verified.
    pub fn load(folder: &Path) -> Result<Self, Error> {
        let mut keys = TrustedKeys::default();
        for entry in fs::read_dir(folder).map_err(io("read", folder))? {
            let path = entry.map_err(io("read", folder))?.path();
            let extension = path.extension().and_then(|extension| extension.to_str());
            let Some(kind @ ("pub" | "revoked")) = extension else {
                continue;
            };
            let key = VerifyingKey::from_bytes(&read_hex(&path)?)
                .ok()
                .filter(|key| !key.is_weak())
                .ok_or_else(|| key_error(&path, "it is not a usable Ed25519 public key"))?;
            if kind == "pub" {
                keys.keys.insert(key_id(&key), key);
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
        Ok(Digest::of(&read_hex(path)?).to_string())
    }

    /// Trusts `key` too.
    pub fn insert(&mut self, key: &SigningKey) {
        self.keys.insert(key.key_id.clone(), key.key.verifying_key());
    }

    /// Revokes the key with this id.
    pub fn revoke(&mut self, key_id: &str) {
        self.revoked.insert(key_id.into());
    }

    /// Whether the key with this id is trusted.
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
        let mut revoked = None;
        for signature in &self.signatures {
            let bytes = BASE64.decode(&signature.sig).unwrap_or_default();
            let verified = match (keys.keys.get(&signature.keyid), Signature::from_slice(&bytes)) {
                (Some(key), Ok(signature)) => key.verify_strict(&signed, &signature).is_ok(),
                _ => false,
            };
            if verified && keys.contains(&signature.keyid) {
                return Ok((payload, signature.keyid.clone()));
            }
            if verified {
                revoked.get_or_insert(&signature.keyid);
            }
        }
        Err(revoked.map_or(Error::Untrusted, |key| Error::Revoked(key.clone())))
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

fn read_hex(path: &Path) -> Result<[u8; 32], Error> {
    let text = fs::read_to_string(path).map_err(io("read", path))?;
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
        let old = SigningKey::load_or_create(path, "old").unwrap();
        let new = SigningKey::load_or_create(path, "new").unwrap();
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
        SigningKey::load_or_create(path, "a").unwrap();
        SigningKey::load_or_create(path, "b").unwrap();
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
}
