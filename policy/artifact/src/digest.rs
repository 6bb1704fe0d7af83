//! BLAKE3 digests, which name objects, tensors and versions by their bytes.
//!
//! This module has the 32-byte value and its hexadecimal form. What is hashed is documented where
//! it happens: `content_index` for a version's content hash, `manifest` for objects.

use std::fmt;
use std::ops::Deref;
use std::str::FromStr;
use std::sync::OnceLock;

use bytes::Bytes;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A BLAKE3 hash, 32 bytes. Written as 64 lowercase hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest(pub [u8; 32]);

/// The text is not 64 lowercase hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a digest is 64 lowercase hexadecimal digits")]
pub struct ParseError;

impl Digest {
    /// BLAKE3 of `bytes`, unkeyed.
    pub fn of(bytes: &[u8]) -> Self {
        Digest(*blake3::hash(bytes).as_bytes())
    }

    /// The 32 bytes.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The digest in a database column or a fixed field. None if it is not 32 bytes long.
    pub fn from_slice(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Digest)
    }

    /// The first 12 hexadecimal digits, to show to people. Never compare these.
    pub fn short(&self) -> String {
        hex::encode(&self.0[..6])
    }
}

/// Immutable bytes that remember their digest once it is computed. Clones share bytes and digest.
#[derive(Clone, Default)]
pub struct Hashed {
    bytes: Bytes,
    digest: OnceLock<Digest>,
}

impl Hashed {
    /// Bytes whose digest the caller has just computed.
    pub(crate) fn known(bytes: Bytes, digest: Digest) -> Self {
        Hashed {
            bytes,
            digest: OnceLock::from(digest),
        }
    }

    /// The digest. Hashes the bytes on the first call.
    pub fn digest(&self) -> Digest {
        *self.digest.get_or_init(|| Digest::of(&self.bytes))
    }

    /// The digest, if it is known already.
    pub(crate) fn digest_if_known(&self) -> Option<Digest> {
        self.digest.get().copied()
    }

    /// Remembers a digest that the caller computed from the bytes.
    pub(crate) fn note(&self, digest: Digest) {
        self.digest.get_or_init(|| digest);
    }
}

impl Deref for Hashed {
    type Target = Bytes;

    fn deref(&self) -> &Bytes {
        &self.bytes
    }
}

impl<T: Into<Bytes>> From<T> for Hashed {
    fn from(bytes: T) -> Self {
        Hashed {
            bytes: bytes.into(),
            digest: OnceLock::new(),
        }
    }
}

impl PartialEq for Hashed {
    fn eq(&self, other: &Self) -> bool {
        self.bytes == other.bytes
    }
}

impl fmt::Debug for Hashed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.bytes.fmt(f)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

impl FromStr for Digest {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        // one spelling only: two names for one object would defeat put-if-absent
        if text.bytes().any(|b| b.is_ascii_uppercase()) {
            return Err(ParseError);
        }
        let mut bytes = [0; 32];
        hex::decode_to_slice(text, &mut bytes).map_err(|_| ParseError)?;
        Ok(Digest(bytes))
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_blake3() {
        // the published test vector of the empty input
        assert_eq!(
            Digest::of(b"").to_string(),
            "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
        );
    }

    #[test]
    fn what_is_written_is_read_back() {
        let digest = Digest::of(b"springtide");
        assert_eq!(digest.to_string().parse(), Ok(digest));
        let json = serde_json::to_string(&digest).unwrap();
        assert_eq!(serde_json::from_str::<Digest>(&json).unwrap(), digest);
        assert_eq!(Digest::from_slice(&digest.0), Some(digest));
    }

    #[test]
    fn any_other_spelling_is_refused() {
        let good = Digest::of(b"x").to_string();
        for bad in [
            good.to_uppercase(),
            good[1..].to_string(),
            format!("{good}0"),
            format!("g{}", &good[1..]),
            String::new(),
        ] {
            assert_eq!(bad.parse::<Digest>(), Err(ParseError), "{bad}");
        }
        assert_eq!(Digest::from_slice(&[0; 31]), None);
    }
}
