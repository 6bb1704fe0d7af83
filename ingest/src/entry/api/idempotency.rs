//! `Idempotency-Key`: the identity of a feedback event whose request has no id.
//!
//! Both ids are computed from the key, so the same key from the same tenant and source is the same
//! event in every process and after any restart:
//! - The event's id is a digest of (tenant, source, key). Another body under the same key is
//!   therefore a conflict.
//! - The feedback's id is a UUIDv7, whose first 48 bits are a time. A repeated request must compute
//!   the same id, so the time comes from the id of the target, not from the clock. The other bits
//!   come from the digest. If the target's id has no time (an episode may have any UUID), the
//!   request's `time` is used. Without either, the request is refused.
//!
//! For keys whose feedback needs a token, an id in the body is such a name, too, and the digest also
//! covers the API key and the token's generation. So they never take an identity that a back end, or
//! another user, may use.

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use edge::problem::Problem;
use time::OffsetDateTime;
use uuid::{Builder, Uuid};

use event_log::event::{Invalid, Target, time_of};

const HEADER: &str = "idempotency-key";
const KEY_BYTES_MAX: usize = 255;

/// The header's value, if present. The endpoints that accept it list it as a parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct IdempotencyKey(pub Option<String>);

impl<S: Send + Sync> FromRequestParts<S> for IdempotencyKey {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        let mut values = parts.headers.get_all(HEADER).iter();
        let key = match (values.next(), values.next()) {
            (None, _) => None,
            (Some(value), None) => Some(check(value.to_str().unwrap_or_default())?),
            (Some(_), Some(_)) => return Err(Problem::bad_request("Idempotency-Key: send it only once")),
        };
        Ok(Self(key))
    }
}

fn check(value: &str) -> Result<String, Problem> {
    // The draft standard quotes the key, most clients do not. Both forms are the same key.
    let bare = value.strip_prefix('"').and_then(|value| value.strip_suffix('"'));
    let key = bare.unwrap_or(value);
    let printable = key.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ');
    if key.is_empty() || key.len() > KEY_BYTES_MAX || !printable {
        return Err(Problem::bad_request(format!(
            "Idempotency-Key: needs 1 to {KEY_BYTES_MAX} printable ASCII characters"
        )));
    }
    Ok(key.to_owned())
}

/// An identity that is computed from the sender's key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Identity {
    digest: [u8; 32],
}

/// A caller whose feedback needs a token.
#[derive(Debug, Clone, Copy)]
pub(super) struct Untrusted {
    /// [`edge::auth::KeyId::lineage`].
    pub lineage: Uuid,
    /// The token's.
    pub generation: Uuid,
}

impl Identity {
    pub(super) fn new(tenant: &str, source: &str, key: &str) -> Self {
        let context = "springtide 2026-11 identity of an event by its sender's name";
        Self::of(context, &[tenant.as_bytes(), source.as_bytes(), key.as_bytes()])
    }

    /// `name` is what the caller calls the event.
    pub(super) fn untrusted(caller: &Untrusted, tenant: &str, source: &str, name: &str) -> Self {
        let context = "springtide 2026-11 identity of feedback with a token by its sender's name";
        let parts = [
            tenant.as_bytes(),
            caller.lineage.as_bytes(),
            caller.generation.as_bytes(),
            source.as_bytes(),
            name.as_bytes(),
        ];
        Self::of(context, &parts)
    }

    fn of(context: &str, parts: &[&[u8]]) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key(context);
        for part in parts {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        Self {
            digest: *hasher.finalize().as_bytes(),
        }
    }

    pub(super) fn event_id(&self) -> String {
        format!("name-{}", hex::encode(self.digest))
    }

    /// `time` is the request's.
    pub(super) fn feedback_id(&self, target: Target, time: Option<OffsetDateTime>) -> Result<Uuid, Invalid> {
        let (Target::Generation(id) | Target::Episode(id)) = target;
        let time = time_of(id).or(time).ok_or_else(|| {
            let rule = "is not a UUIDv7, so the request needs an id, or a time with the Idempotency-Key";
            Invalid::new("episode_id", rule)
        })?;
        let milliseconds = u64::try_from(time.unix_timestamp_nanos() / 1_000_000)
            .map_err(|_| Invalid::new("time", "lies before 1970"))?;
        let mut bits = [0; 10];
        bits.copy_from_slice(&self.digest[..10]);
        Ok(Builder::from_unix_timestamp_millis(milliseconds, &bits).into_uuid())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use time::macros::datetime;

    fn identity() -> Identity {
        Identity::new("default", "app", "key-1")
    }

    const GENERATION: &str = "019aa5e6-2f40-7abc-8def-0123456789ab";

    fn generation() -> Target {
        Target::Generation(GENERATION.parse().unwrap())
    }

    #[test]
    fn a_repetition_gets_the_same_ids_whatever_its_time() {
        let first = identity().feedback_id(generation(), None).unwrap();
        let later = identity()
            .feedback_id(generation(), Some(datetime!(2027-01-01 00:00 UTC)))
            .unwrap();
        assert_eq!(first, later);
        assert_eq!(first.get_version_num(), 7);
        assert_eq!(time_of(first), time_of(GENERATION.parse().unwrap()));
        assert_eq!(identity().event_id(), identity().event_id());
        // These ids must never change, because events with them were acknowledged.
        assert_eq!(first.to_string(), "019aa5e6-2f40-7483-8507-d25f6eb84b30");
        assert_eq!(
            identity().event_id(),
            "name-44838507d25f6eb84b30584959b4707900de6e4bc4266201850bf67df725425a"
        );
    }

    #[test]
    fn tenant_source_and_key_each_change_the_event_id() {
        let ids: std::collections::BTreeSet<_> = [
            ("default", "app", "key-1"),
            ("other", "app", "key-1"),
            ("default", "other", "key-1"),
            ("default", "app", "key-2"),
            ("default", "appkey-1", ""),
            ("defaulta", "pp", "key-1"),
        ]
        .map(|(tenant, source, key)| Identity::new(tenant, source, key).event_id())
        .into();
        assert_eq!(ids.len(), 6);
    }

    #[test]
    fn an_untrusted_callers_ids_are_its_own() {
        let caller = |lineage, generation| Untrusted {
            lineage: Uuid::from_u128(lineage),
            generation: Uuid::from_u128(generation),
        };
        let identities = [
            identity(),
            Identity::untrusted(&caller(1, 1), "default", "app", "key-1"),
            Identity::untrusted(&caller(1, 2), "default", "app", "key-1"),
            Identity::untrusted(&caller(2, 1), "default", "app", "key-1"),
            Identity::untrusted(&caller(1, 1), "other", "app", "key-1"),
            Identity::untrusted(&caller(1, 1), "default", "app", "key-2"),
        ];
        let ids = identities.each_ref().map(Identity::event_id);
        let feedback_ids = identities
            .each_ref()
            .map(|identity| identity.feedback_id(generation(), None).unwrap());
        assert_eq!(std::collections::BTreeSet::from(ids).len(), 6);
        assert_eq!(std::collections::BTreeSet::from(feedback_ids).len(), 6);
    }

    #[test]
    fn another_target_changes_the_feedback_id_under_the_same_key() {
        let other = Target::Generation("019aa5e6-2f41-7abc-8def-0123456789ab".parse().unwrap());
        let [first, second] = [generation(), other].map(|target| identity().feedback_id(target, None).unwrap());
        assert_ne!(first, second);
    }

    #[test]
    fn an_episode_id_without_a_time_needs_the_requests_time() {
        let episode = Target::Episode(Uuid::from_u128(7));
        let error = identity().feedback_id(episode, None).unwrap_err();
        assert_eq!(error.field, "episode_id");
        let time = datetime!(2026-11-21 10:00 UTC);
        let id = identity().feedback_id(episode, Some(time)).unwrap();
        assert_eq!(time_of(id), Some(time));
    }

    #[test]
    fn a_key_is_short_printable_and_unquoted() {
        assert_eq!(check("a b-1").unwrap(), "a b-1");
        assert_eq!(check("\"a b-1\"").unwrap(), "a b-1");
        assert_eq!(check(&"k".repeat(KEY_BYTES_MAX)).unwrap().len(), KEY_BYTES_MAX);
        for key in ["", "\"\"", "tab\there", "ümlaut", &"k".repeat(KEY_BYTES_MAX + 1)] {
            assert!(check(key).is_err(), "{key:?}");
        }
    }
}
