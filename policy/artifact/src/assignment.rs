//! Which users get which version: a policy's aliases and the arms of its experiment, in one signed
//! document per epoch.
//!
//! A rollback is a new epoch that names an older version. So followers can refuse lower epochs and
//! still accept rollbacks. Why an alias moved is the release process's business.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

use crate::digest::Digest;

/// The kind in the envelope's payload type.
pub const KIND: &str = "assignment";
/// Epochs rise one by one, or by fewer than this. A larger jump is an attempt to block all later
/// epochs.
pub const EPOCH_JUMP_MAX: i64 = 1_000_000;

/// The alias that serves everyone if there is no experiment.
pub const CHAMPION: &str = "champion";

/// Most that an arm may explore: exploration stays the exception.
pub const EXPLORE_MAX: f64 = 0.5;

/// The assignment of one epoch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Assignment {
    pub policy: String,
    /// Starts at 1, and rises by one with every change of any alias of the policy.
    pub epoch: i64,
    pub aliases: BTreeMap<String, Target>,
    /// How users are divided. Empty: everyone gets `champion`.
    pub arms: Vec<Arm>,
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
}

/// The version that an alias names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Target {
    pub version: i64,
    pub root: Digest,
}

/// One arm of an experiment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Arm {
    pub alias: String,
    /// Relative share of users. Weights need not sum to 1.
    pub weight: f64,
    /// Fraction of the arm's requests that must not decline, 0 to [`EXPLORE_MAX`]. Left out of the
    /// document if 0.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub explore: f64,
}

/// Why an assignment contradicts itself.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    #[error("epoch {0} is not positive")]
    Epoch(i64),
    #[error("alias `{0}` names version {1}, which is not positive")]
    Version(String, i64),
    #[error("the arm `{0}` names no alias")]
    UnknownAlias(String),
    #[error("the arm `{0}` is there twice")]
    ArmTwice(String),
    #[error("the arm `{0}` has weight {1}; a weight is finite and not negative")]
    Weight(String, f64),
    #[error("the arms' weights do not sum to a positive finite number")]
    NoWeight,
    #[error("the arm `{0}` explores {1} of its requests; a share is from 0 to {EXPLORE_MAX}")]
    Explore(String, f64),
}

impl Assignment {
    /// Returns an error if the assignment contradicts itself. Called before signing and after
    /// reading.
    pub fn check(&self) -> Result<(), Error> {
        if self.epoch < 1 {
            return Err(Error::Epoch(self.epoch));
        }
        for (alias, target) in &self.aliases {
            if target.version < 1 {
                return Err(Error::Version(alias.clone(), target.version));
            }
        }
        let mut seen = BTreeSet::new();
        for arm in &self.arms {
            if !self.aliases.contains_key(&arm.alias) {
                return Err(Error::UnknownAlias(arm.alias.clone()));
            }
            if !seen.insert(&arm.alias) {
                return Err(Error::ArmTwice(arm.alias.clone()));
            }
            if !arm.weight.is_finite() || arm.weight < 0.0 {
                return Err(Error::Weight(arm.alias.clone(), arm.weight));
            }
            if !(0.0..=EXPLORE_MAX).contains(&arm.explore) {
                return Err(Error::Explore(arm.alias.clone(), arm.explore));
            }
        }
        let total = self.total_weight();
        let usable = total.is_finite() && total > 0.0;
        if !self.arms.is_empty() && !usable {
            return Err(Error::NoWeight);
        }
        Ok(())
    }

    /// The alias of a user's arm, and the arm's probability.
    ///
    /// Sticky: it depends only on the policy, the user's key and the arms. A new epoch with the
    /// same arms leaves every user in place. The user's point is the first 8 bytes (little-endian)
    /// of BLAKE3(`"springtide arm 1\0" policy "\0" user_key`) divided by 2^64. Arms take
    /// consecutive shares of [0, 1) in their order.
    pub fn arm_for(&self, user_key: &str) -> (&str, f64) {
        let total = self.total_weight();
        let point = user_point(&self.policy, user_key) * total;
        let mut end = 0.0;
        let mut chosen = None;
        for arm in self.arms.iter().filter(|arm| arm.weight > 0.0) {
            end += arm.weight;
            chosen = Some(arm);
            if point < end {
                break;
            }
        }
        // rounding can leave the point past the last end: then it is the last arm with a weight
        match chosen {
            Some(arm) => (&arm.alias, arm.weight / total),
            None => (CHAMPION, 1.0),
        }
    }

    /// Fraction of an alias's requests that explore. 0 if the alias has no arm.
    pub fn explore_of(&self, alias: &str) -> f64 {
        let arm = self.arms.iter().find(|arm| arm.alias == alias);
        arm.map_or(0.0, |arm| arm.explore)
    }

    fn total_weight(&self) -> f64 {
        self.arms.iter().map(|arm| arm.weight).sum()
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for a reference")]
fn is_zero(share: &f64) -> bool {
    *share == 0.0
}

/// The user's point in [0, 1).
fn user_point(policy: &str, user_key: &str) -> f64 {
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"springtide arm 1\0");
    hasher.update(policy.as_bytes());
    hasher.update(b"\0");
    hasher.update(user_key.as_bytes());
    let mut first = [0; 8];
    first.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
    // 53 bits: as many as a double holds exactly
    (u64::from_le_bytes(first) >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn sample() -> Assignment {
        let target = |version| Target {
            version,
            root: Digest::of(&[version as u8]),
        };
        let arm = |alias: &str, weight| Arm {
            alias: alias.into(),
            weight,
            explore: 0.0,
        };
        Assignment {
            policy: "demo".into(),
            epoch: 3,
            aliases: [("champion".into(), target(8)), ("base".into(), target(1))].into(),
            arms: vec![arm("champion", 0.6), arm("base", 0.4)],
            created_at: time::macros::datetime!(2026-11-21 06:00 UTC),
        }
    }

    #[test]
    fn users_fall_into_arms_by_weight_and_stay_there() {
        let assignment = sample();
        let mut later = sample();
        later.epoch = 4;
        let users: Vec<String> = (0..20_000).map(|i| format!("user-{i}")).collect();
        let mut champions = 0;
        for user in &users {
            let (alias, probability) = assignment.arm_for(user);
            assert_eq!(later.arm_for(user).0, alias);
            let expected = if alias == "champion" { 0.6 } else { 0.4 };
            assert!((probability - expected).abs() < 1e-12);
            champions += usize::from(alias == "champion");
        }
        // 0.6 ± 5 standard deviations
        assert!((0.5826..0.6174).contains(&(champions as f64 / 20_000.0)), "{champions}");
    }

    #[test]
    fn a_smaller_share_moves_only_users_out_of_the_shrinking_arm() {
        let before = sample();
        let mut after = sample();
        after.arms[0].weight = 0.5;
        after.arms[1].weight = 0.5;
        for user in (0..2_000).map(|i| format!("user-{i}")) {
            if before.arm_for(&user).0 == "base" {
                assert_eq!(after.arm_for(&user).0, "base");
            }
        }
    }

    #[test]
    fn without_arms_everyone_is_served_by_the_champion() {
        let mut assignment = sample();
        assignment.arms.clear();
        assert_eq!(assignment.check(), Ok(()));
        assert_eq!(assignment.arm_for("anyone"), ("champion", 1.0));
    }

    #[test]
    fn an_arm_of_weight_zero_gets_nobody() {
        let mut assignment = sample();
        assignment.arms[0].weight = 0.0;
        for user in (0..1_000).map(|i| format!("user-{i}")) {
            assert_eq!(assignment.arm_for(&user), ("base", 1.0));
        }
    }

    #[test]
    fn contradictions_are_refused() {
        assert_eq!(sample().check(), Ok(()));
        let with = |change: &dyn Fn(&mut Assignment)| {
            let mut assignment = sample();
            change(&mut assignment);
            assignment.check().unwrap_err()
        };
        assert_eq!(with(&|a| a.epoch = 0), Error::Epoch(0));
        assert!(matches!(
            with(&|a| a.aliases.retain(|alias, _| alias != "base")),
            Error::UnknownAlias(_)
        ));
        assert!(matches!(
            with(&|a| a.arms[1].alias = "champion".into()),
            Error::ArmTwice(_)
        ));
        assert!(matches!(with(&|a| a.arms[0].weight = -1.0), Error::Weight(..)));
        assert!(matches!(with(&|a| a.arms[0].weight = f64::NAN), Error::Weight(..)));
        for share in [-0.1, 0.6, f64::NAN] {
            assert!(matches!(with(&|a| a.arms[0].explore = share), Error::Explore(..)));
        }
        assert_eq!(
            with(&|a| a.arms.iter_mut().for_each(|arm| arm.weight = 0.0)),
            Error::NoWeight
        );
        assert!(matches!(
            with(&|a| a.aliases.values_mut().for_each(|t| t.version = 0)),
            Error::Version(..)
        ));
    }

    #[test]
    fn the_json_form_is_read_back() {
        let json = serde_json::to_string(&sample()).unwrap();
        assert!(!json.contains("explore"), "{json}");
        assert_eq!(serde_json::from_str::<Assignment>(&json).unwrap(), sample());
        let mut exploring = sample();
        exploring.arms[0].explore = 0.02;
        let json = serde_json::to_string(&exploring).unwrap();
        assert_eq!(serde_json::from_str::<Assignment>(&json).unwrap(), exploring);
        assert_eq!(
            (exploring.explore_of("champion"), exploring.explore_of("base")),
            (0.02, 0.0)
        );
    }
}
