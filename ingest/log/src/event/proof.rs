//! Proof of who sampled a generation: a signature of the sampler's key over everything that training
//! uses.
//!
//! This module has the bytes that are signed. Samplers sign them, the sink stores the signature with
//! the row, and the trainer verifies it before it trains on the generation.

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use utoipa::ToSchema;

use super::{Generation, protobuf};

/// A sampler's signature of a generation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Proof {
    /// Id of the sampler's key: BLAKE3 of the public key, 64 hexadecimal digits.
    pub sampler: String,
    /// Ed25519, 128 hexadecimal digits.
    #[serde(with = "hex")]
    #[schema(value_type = String)]
    pub signature: [u8; 64],
}

impl Generation {
    /// BLAKE3 of the body without its proof, as Protobuf.
    pub fn unsigned_digest(&self) -> [u8; 32] {
        protobuf::unsigned_digest(self)
    }
}

/// The bytes that a sampler signs. `time`: the event's, to the microsecond. `digest`:
/// [`Generation::unsigned_digest`].
///
/// The tenant and the time are not part of the body, so they are signed beside its digest.
pub fn signed_bytes(tenant: &str, time: OffsetDateTime, digest: &[u8; 32]) -> Vec<u8> {
    let microseconds = i64::try_from(time.unix_timestamp_nanos() / 1_000).unwrap_or(i64::MAX);
    let tenant_bytes = u32::try_from(tenant.len()).unwrap_or(u32::MAX);
    let mut bytes = b"springtide generation proof 1\0".to_vec();
    bytes.extend(tenant_bytes.to_le_bytes());
    bytes.extend(tenant.as_bytes());
    bytes.extend(microseconds.to_le_bytes());
    bytes.extend(digest);
    bytes
}
