//! Feedback tokens: proof that the sender of feedback is who was answered.
//!
//! Each choice of a completion carries one. The product passes it on to the user, and feedback from a
//! key that is not trusted (scope `feedback` alone) must bring it. A token names one generation and
//! its episode, expires, and is signed by the sampler, so anybody with the sampler's public key can
//! check it without asking.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use edge::sampler::{self, SamplerKey};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::event::{Invalid, Target};

const VERSION: u8 = 1;
/// Version, expiry, generation, episode, id of the sampler's key.
const SIGNED_BYTES: usize = 1 + 4 + 16 + 16 + 32;
const SIGNATURE_BYTES: usize = 64;

/// A token that was read. [`FeedbackToken::verify`] says whether it is true.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FeedbackToken {
    pub generation: Uuid,
    pub episode: Uuid,
    /// Whole seconds.
    pub expires_at: OffsetDateTime,
    /// Id of the sampler's key, 64 hexadecimal digits.
    pub sampler: String,
    signed: [u8; SIGNED_BYTES],
    signature: [u8; SIGNATURE_BYTES],
}

/// Makes the token of a generation: 178 characters that need no escaping in URLs and JSON.
pub fn issue(key: &SamplerKey, tenant: &str, generation: Uuid, episode: Uuid, expires_at: OffsetDateTime) -> String {
    let seconds = u32::try_from(expires_at.unix_timestamp()).unwrap_or(u32::MAX);
    let mut bytes = Vec::with_capacity(SIGNED_BYTES + SIGNATURE_BYTES);
    bytes.push(VERSION);
    bytes.extend(seconds.to_le_bytes());
    bytes.extend(generation.as_bytes());
    bytes.extend(episode.as_bytes());
    bytes.extend(blake3::hash(&key.public_key()).as_bytes());
    let signature = key.sign(&message(tenant, &bytes));
    bytes.extend(signature);
    URL_SAFE_NO_PAD.encode(bytes)
}

impl FeedbackToken {
    /// Reads a token. Verifies nothing.
    pub fn read(text: &str) -> Result<Self, Invalid> {
        let refuse = || {
            Invalid::new(
                "token",
                "is not a feedback token; send the one of the completion unchanged",
            )
        };
        let bytes = URL_SAFE_NO_PAD.decode(text).map_err(|_| refuse())?;
        let (signed, signature) = bytes.split_at_checked(SIGNED_BYTES).ok_or_else(refuse)?;
        let signed: [u8; SIGNED_BYTES] = signed.try_into().map_err(|_| refuse())?;
        let signature = signature.try_into().map_err(|_| refuse())?;
        let [VERSION, seconds @ ..] = &signed else {
            return Err(refuse());
        };
        let (seconds, rest) = seconds.split_at(4);
        let (generation, rest) = rest.split_at(16);
        let (episode, sampler) = rest.split_at(16);
        let seconds = u32::from_le_bytes(seconds.try_into().map_err(|_| refuse())?);
        Ok(Self {
            generation: Uuid::from_slice(generation).map_err(|_| refuse())?,
            episode: Uuid::from_slice(episode).map_err(|_| refuse())?,
            expires_at: OffsetDateTime::from_unix_timestamp(seconds.into()).map_err(|_| refuse())?,
            sampler: hex::encode(sampler),
            signed,
            signature,
        })
    }

    /// Whether the sampler with this public key issued it for the tenant, and it has not expired.
    pub fn verify(&self, tenant: &str, public_key: &[u8], now: OffsetDateTime) -> Result<(), Invalid> {
        if now >= self.expires_at {
            return Err(Invalid::new("token", "has expired"));
        }
        let id = blake3::hash(public_key).to_hex();
        let genuine =
            id.as_str() == self.sampler && sampler::verify(public_key, &message(tenant, &self.signed), &self.signature);
        match genuine {
            true => Ok(()),
            false => Err(Invalid::new("token", "was not issued by this sampler for this tenant")),
        }
    }

    /// Whether feedback about `target` may use it.
    pub fn covers(&self, target: Target) -> bool {
        match target {
            Target::Generation(id) => id == self.generation,
            Target::Episode(id) => id == self.episode,
        }
    }
}

fn message(tenant: &str, signed: &[u8]) -> Vec<u8> {
    let mut bytes = b"springtide feedback token 1\0".to_vec();
    bytes.extend(u32::try_from(tenant.len()).unwrap_or(u32::MAX).to_le_bytes());
    bytes.extend(tenant.as_bytes());
    bytes.extend(signed);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use time::Duration;

    #[test]
    fn a_token_is_true_for_its_tenant_target_and_time_alone() {
        let key = SamplerKey::from_seed(&[3; 32]);
        let (generation, episode) = (Uuid::now_v7(), Uuid::now_v7());
        let now = OffsetDateTime::now_utc();
        let text = issue(&key, "acme", generation, episode, now + Duration::days(1));
        assert_eq!(text.len(), 178);
        let token = FeedbackToken::read(&text).unwrap();
        assert_eq!((token.generation, token.episode), (generation, episode));
        assert_eq!(token.sampler, key.id());
        token.verify("acme", &key.public_key(), now).unwrap();
        assert!(token.verify("other", &key.public_key(), now).is_err());
        assert!(
            token
                .verify("acme", &key.public_key(), now + Duration::days(2))
                .is_err()
        );
        let other = SamplerKey::from_seed(&[4; 32]);
        assert!(token.verify("acme", &other.public_key(), now).is_err());
        assert!(token.covers(Target::Generation(generation)) && token.covers(Target::Episode(episode)));
        assert!(!token.covers(Target::Generation(episode)) && !token.covers(Target::Episode(generation)));
    }

    #[test]
    fn every_changed_byte_is_refused() {
        let key = SamplerKey::from_seed(&[3; 32]);
        let now = OffsetDateTime::now_utc();
        let text = issue(&key, "acme", Uuid::now_v7(), Uuid::now_v7(), now + Duration::days(1));
        let bytes = URL_SAFE_NO_PAD.decode(&text).unwrap();
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 1;
            let read = FeedbackToken::read(&URL_SAFE_NO_PAD.encode(changed));
            let verified = read.and_then(|token| token.verify("acme", &key.public_key(), now));
            assert!(verified.is_err(), "byte {at}");
        }
        for text in ["", "AQ", "not base64!", &text[..170]] {
            assert!(FeedbackToken::read(text).is_err(), "{text}");
        }
    }
}
