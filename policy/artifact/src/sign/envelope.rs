//! The signed form of a document: a DSSE envelope.

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use ed25519_dalek::{Signature, Signer, VerifyingKey};
use serde::{Deserialize, Serialize};

use super::{Error, Role, SigningKey, TrustedKeys};

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

impl EnvelopeSignature {
    /// Whether `key` made it over the pre-authentication encoding `signed`.
    fn is_correct(&self, key: &VerifyingKey, signed: &[u8]) -> bool {
        let bytes = BASE64.decode(&self.sig).unwrap_or_default();
        let signature = Signature::from_slice(&bytes);
        signature.is_ok_and(|signature| key.verify_strict(signed, &signature).is_ok())
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
            has: format!("the role `{}`", roles.join("`, `")),
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
            let key = keys.keys.get(&signature.keyid);
            key.is_some_and(|key| signature.is_correct(&key.key, &signed))
        };
        let correct = self.signatures.iter().filter(correct);
        let signers = correct.map(|signature| signature.keyid.as_str()).collect();
        Ok((payload, signers))
    }

    /// Adds a signature. Returns false if the key has signed before. Callers verify the content
    /// first.
    ///
    /// A signature under the key's id that is not correct is replaced: anybody who writes to the
    /// store could have put it there.
    pub fn countersign(&mut self, kind: &str, key: &SigningKey) -> Result<bool, Error> {
        let payload = BASE64
            .decode(&self.payload)
            .map_err(|error| Error::Malformed(error.to_string()))?;
        let signed = pre_authentication_encoding(&payload_type(kind), &payload);
        let public = key.key.verifying_key();
        let own = |signature: &EnvelopeSignature| signature.keyid == key.key_id;
        let correct = |signature: &EnvelopeSignature| own(signature) && signature.is_correct(&public, &signed);
        if self.signatures.iter().any(correct) {
            return Ok(false);
        }
        self.signatures.retain(|signature| !own(signature));
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
pub(super) fn pre_authentication_encoding(payload_type: &str, payload: &[u8]) -> Vec<u8> {
    let mut out = format!("DSSEv1 {} {} {} ", payload_type.len(), payload_type, payload.len()).into_bytes();
    out.extend_from_slice(payload);
    out
}
