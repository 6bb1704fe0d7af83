//! Who sampled a generation: the last check before it is trained on.
//!
//! The SQL function `provenance_fault` compares the generation with the tables of samplers and
//! assignments (`faults.sql`). Here the signature itself is verified, also if the sink has done so.

use edge::sampler;
use event_log::event::signed_bytes;

use super::row::Row;

/// The codes of generations of which nothing proves who sampled them, or that they could.
const CODES: [&str; 9] = [
    "unproven",
    "bad_signature",
    "unknown_sampler",
    "revoked_sampler",
    "expired_sampler",
    "sampler_of_another_replica",
    "sampler_of_another_policy",
    "sampled_in_the_future",
    "version_not_assigned",
];

/// Whether generations with this code lack proof.
pub fn is_code(code: &str) -> bool {
    CODES.contains(&code)
}

/// Fails with the code of the disposition.
pub(super) fn check(row: &Row) -> Result<(), &'static str> {
    let (Some(signature), Some(digest), Some(public_key)) = (&row.signature, &row.unsigned_digest, &row.public_key)
    else {
        return Err("unproven");
    };
    let Ok(digest) = digest.as_slice().try_into() else {
        return Err("bad_signature");
    };
    let message = signed_bytes(&row.tenant_id, row.finished_at, digest);
    match sampler::verify(public_key, &message, signature) {
        true => Ok(()),
        false => Err("bad_signature"),
    }
}
