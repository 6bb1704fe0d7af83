//! The names of entries in a store.

use artifact::digest::Digest;
use object_store::path::Path;

use super::Error;

/// Serials and epochs have ten digits, so that names sort as numbers do.
pub(super) const NUMBERS: std::ops::RangeInclusive<i64> = 1..=9_999_999_999;

/// Refuses what is no name of a policy.
pub fn check_policy(name: &str) -> Result<(), Error> {
    match name == policy_named_after(name) && !name.is_empty() {
        true => Ok(()),
        false => Err(Error::Policy(name.into())),
    }
}

/// The name of a policy for a model of any name: in lower case, with `-` for what is not allowed. Empty
/// if nothing is left.
pub fn policy_named_after(model: &str) -> String {
    let allowed = |c: char| matches!(c, 'a'..='z' | '0'..='9' | '.' | '_' | '-');
    let lower = model.trim_start_matches('.').chars().map(|c| c.to_ascii_lowercase());
    lower.map(|c| if allowed(c) { c } else { '-' }).take(64).collect()
}

/// An entry or folder of a policy.
pub(super) fn policy_key(policy: &str, rest: &str) -> Result<Path, Error> {
    check_policy(policy)?;
    Ok(Path::from(format!("policy/{policy}/{rest}")))
}

pub(super) fn object_key(policy: &str, digest: &Digest) -> Result<Path, Error> {
    policy_key(policy, &format!("object/{digest}"))
}

pub(super) fn parts_key(policy: &str, digest: &Digest) -> Result<Path, Error> {
    policy_key(policy, &format!("parts/{digest}"))
}

pub(super) fn trash_key(policy: &str, digest: &Digest) -> Result<Path, Error> {
    policy_key(policy, &format!("trash/{digest}"))
}

pub(super) fn manifest_key(policy: &str, serial: i64) -> Result<Path, Error> {
    policy_key(policy, &format!("version/{}.json", padded(serial)?))
}

pub(super) fn assignment_key(policy: &str, epoch: i64) -> Result<Path, Error> {
    policy_key(policy, &format!("assignment/{}.json", padded(epoch)?))
}

pub(super) fn squashed_delta_key(policy: &str, from: i64, to: i64) -> Result<Path, Error> {
    policy_key(policy, &format!("fold/{}-{}.json", padded(to)?, padded(from)?))
}

pub(super) fn pin_key(policy: &str, serial: i64) -> Result<Path, Error> {
    policy_key(policy, &format!("pin/{}.json", padded(serial)?))
}

pub(super) fn revocation_key(policy: &str, key_id: &str) -> Result<Path, Error> {
    // Digests have one spelling, so a key has one revocation.
    key_id.parse::<Digest>().map_err(|error| Error::Key {
        key: format!("policy/{policy}/revocation/{key_id}.json"),
        reason: error.to_string(),
    })?;
    policy_key(policy, &format!("revocation/{key_id}.json"))
}

pub(super) fn timestamp_key(policy: &str) -> Result<Path, Error> {
    policy_key(policy, "statement.json")
}

pub(super) fn private_key(key: &str) -> Result<Path, Error> {
    let refuse = |reason: String| Error::Key {
        key: key.into(),
        reason,
    };
    if key.is_empty() || key.starts_with('/') || key.ends_with('/') {
        return Err(refuse("it is empty, or starts or ends with a slash".into()));
    }
    // `parse` refuses empty parts, `.` and `..`.
    Path::parse(format!("private/{key}")).map_err(|error| refuse(error.to_string()))
}

fn padded(number: i64) -> Result<String, Error> {
    if NUMBERS.contains(&number) {
        return Ok(format!("{number:010}"));
    }
    Err(Error::Key {
        key: number.to_string(),
        reason: "numbers run from 1 to 9999999999".into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_models_have_names_that_a_policy_can_have() {
        for (model, name) in [
            ("Qwen2.5-1.5B-Instruct", "qwen2.5-1.5b-instruct"),
            (".my model (é)", "my-model----"),
            ("demo_1", "demo_1"),
        ] {
            assert_eq!(policy_named_after(model), name);
            check_policy(name).unwrap();
        }
        assert_eq!(policy_named_after(&"x".repeat(80)).len(), 64);
        assert_eq!(policy_named_after("..."), "");
        for name in ["", "Demo", ".x", "a/b", "a b", &"x".repeat(65)] {
            assert!(check_policy(name).is_err(), "{name}");
        }
    }
}
