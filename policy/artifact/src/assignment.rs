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
/// Longest salt, bytes.
pub const SALT_BYTES_MAX: usize = 64;
/// Epochs rise one by one, or by fewer than this. A larger jump is an attempt to block all later
/// epochs.
pub const EPOCH_JUMP_MAX: i64 = 1_000_000;

/// The alias that serves everyone if there is no experiment.
pub const CHAMPION: &str = "champion";
/// The alias that explores and that the realtime run learns from.
pub const LEARNER: &str = "learner";

/// The version that some of `champion`'s users get while it is compared with `champion`.
pub const CANARY: &str = "canary";

/// Most that an arm may explore: exploration stays the exception.
pub const EXPLORE_MAX: f64 = 0.5;

/// Highest bound on an arm's temperature. No request asks for a higher temperature.
pub const TEMPERATURE_BOUND_MAX: f64 = 2.0;

/// The assignment of one epoch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Assignment {
    pub policy: String,
    /// Starts at 1, and rises by one with every change of any alias of the policy.
    pub epoch: i64,
    pub aliases: BTreeMap<String, Target>,
    /// How users are divided. Empty: everyone gets `champion`.
    pub arms: Vec<Arm>,
    /// By cluster: the arms of its replicas, instead of `arms`. Left out of the document if there
    /// are none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub cluster_arms: BTreeMap<String, Vec<Arm>>,
    /// Share of `champion`'s requests that the version of the alias `canary` answers too, unseen. Left
    /// out of the document if 0.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub shadow: f64,
    /// Another salt draws every user's arm anew. Left out of the document if empty.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub salt: String,
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
    /// Users' requests of the arm are sampled at this temperature at most, 0 to
    /// [`TEMPERATURE_BOUND_MAX`]. `None`: at their own. Left out of the document if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub temperature_max: Option<f64>,
    /// Users are shown a text of the arm only if its probability is at least this, 0 to below 1.
    /// Otherwise the policy declines. `None`: whatever its probability. Left out of the document
    /// if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probability_min: Option<f64>,
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
    #[error("the arm `{0}` bounds temperatures by {1}; a bound is from 0 to {TEMPERATURE_BOUND_MAX}")]
    TemperatureMax(String, f64),
    #[error("the arm `{0}` shows texts from the probability {1} on; a probability is from 0 to below 1")]
    ProbabilityMin(String, f64),
    #[error("shadow is {0}; a share is from 0 to 1, and above 0 there must be an alias `{CANARY}`")]
    Shadow(f64),
    #[error("the salt `{0}` is not up to {SALT_BYTES_MAX} of a-z, 0-9 and `-`")]
    Salt(String),
}

impl Assignment {
    /// Returns an error if the assignment contradicts itself. Called before signing and after
    /// reading.
    pub fn check(&self) -> Result<(), Error> {
        if self.epoch < 1 {
            return Err(Error::Epoch(self.epoch));
        }
        check_salt(&self.salt)?;
        let shadows = self.shadow == 0.0 || self.aliases.contains_key(CANARY);
        if !(0.0..=1.0).contains(&self.shadow) || !shadows {
            return Err(Error::Shadow(self.shadow));
        }
        for (alias, target) in &self.aliases {
            if target.version < 1 {
                return Err(Error::Version(alias.clone(), target.version));
            }
        }
        self.check_arms(&self.arms)?;
        self.cluster_arms.values().try_for_each(|arms| self.check_arms(arms))
    }

    fn check_arms(&self, arms: &[Arm]) -> Result<(), Error> {
        let mut seen = BTreeSet::new();
        for arm in arms {
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
            if let Some(max) = arm.temperature_max
                && !(0.0..=TEMPERATURE_BOUND_MAX).contains(&max)
            {
                return Err(Error::TemperatureMax(arm.alias.clone(), max));
            }
            if let Some(min) = arm.probability_min
                && !(0.0..1.0).contains(&min)
            {
                return Err(Error::ProbabilityMin(arm.alias.clone(), min));
            }
        }
        let total = total_weight(arms);
        let usable = total.is_finite() && total > 0.0;
        if !arms.is_empty() && !usable {
            return Err(Error::NoWeight);
        }
        Ok(())
    }

    /// The alias of a user's arm, and the arm's probability.
    ///
    /// Sticky: it depends only on the policy, the salt, the user's key and the arms. A new epoch with
    /// the same arms and salt leaves every user in place. The user's point is the first 8 bytes
    /// (little-endian) of a BLAKE3 divided by 2^64: without a salt of
    /// `"springtide arm 1\0" policy "\0" user_key`, with one of
    /// `"springtide arm 2\0" salt "\0" policy "\0" user_key`. Arms take consecutive shares of
    /// [0, 1) in their order.
    pub fn arm_for(&self, user_key: &str) -> (&str, f64) {
        let total = total_weight(&self.arms);
        let point = user_point(&self.salt, &self.policy, user_key) * total;
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

    /// As it is for replicas of this cluster: with the arms that they divide users by.
    pub fn in_cluster(mut self, cluster: &str) -> Self {
        if let Some(arms) = self.cluster_arms.remove(cluster) {
            self.arms = arms;
        }
        self.cluster_arms.clear();
        self
    }

    /// Fraction of an alias's requests that explore. 0 if the alias has no arm.
    pub fn explore_of(&self, alias: &str) -> f64 {
        let arm = self.arms.iter().find(|arm| arm.alias == alias);
        arm.map_or(0.0, |arm| arm.explore)
    }

    /// Highest temperature of users' requests of an alias. `None`: the alias has no arm, or its arm
    /// has no bound.
    pub fn temperature_max_of(&self, alias: &str) -> Option<f64> {
        let arm = self.arms.iter().find(|arm| arm.alias == alias);
        arm.and_then(|arm| arm.temperature_max)
    }

    /// Lowest probability of a text that users of an alias are shown. `None`: the alias has no arm, or
    /// its arm has no bar.
    pub fn probability_min_of(&self, alias: &str) -> Option<f64> {
        let arm = self.arms.iter().find(|arm| arm.alias == alias);
        arm.and_then(|arm| arm.probability_min)
    }
}

fn total_weight(arms: &[Arm]) -> f64 {
    arms.iter().map(|arm| arm.weight).sum()
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for a reference")]
fn is_zero(share: &f64) -> bool {
    *share == 0.0
}

/// Returns an error unless it is empty or can be a salt.
pub fn check_salt(salt: &str) -> Result<(), Error> {
    let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    match salt.len() <= SALT_BYTES_MAX && salt.bytes().all(allowed) {
        true => Ok(()),
        false => Err(Error::Salt(salt.into())),
    }
}

/// The user's point in [0, 1).
fn user_point(salt: &str, policy: &str, user_key: &str) -> f64 {
    let mut hasher = blake3::Hasher::new();
    if salt.is_empty() {
        hasher.update(b"springtide arm 1\0");
    } else {
        hasher.update(b"springtide arm 2\0");
        hasher.update(salt.as_bytes());
        hasher.update(b"\0");
    }
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
            temperature_max: None,
            probability_min: None,
        };
        Assignment {
            policy: "demo".into(),
            epoch: 3,
            aliases: [("champion".into(), target(8)), ("base".into(), target(1))].into(),
            arms: vec![arm("champion", 0.6), arm("base", 0.4)],
            cluster_arms: BTreeMap::new(),
            shadow: 0.0,
            salt: String::new(),
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
    fn a_cluster_with_arms_of_its_own_divides_users_by_them_alone() {
        let mut assignment = sample();
        let plain = serde_json::to_string(&assignment).unwrap();
        assert!(!plain.contains("cluster_arms"), "{plain}");
        let champion = Arm {
            alias: "champion".into(),
            weight: 1.0,
            explore: 0.0,
            temperature_max: None,
            probability_min: None,
        };
        assignment.cluster_arms = [("eu".to_owned(), vec![champion.clone()])].into();
        assignment.check().unwrap();
        let read: Assignment = serde_json::from_str(&serde_json::to_string(&assignment).unwrap()).unwrap();
        assert_eq!(read, assignment);
        assert_eq!(read.clone().in_cluster("eu").arms, [champion]);
        assert_eq!(read.in_cluster("us"), sample());
        assignment.cluster_arms.insert(
            "us".into(),
            vec![Arm {
                alias: "nobody".into(),
                weight: 1.0,
                explore: 0.0,
                temperature_max: None,
                probability_min: None,
            }],
        );
        assert_eq!(assignment.check(), Err(Error::UnknownAlias("nobody".into())));
    }

    #[test]
    fn a_shadow_is_a_share_of_requests_and_needs_a_version_to_answer_them() {
        let mut assignment = sample();
        assert!(!serde_json::to_string(&assignment).unwrap().contains("shadow"));
        assignment.shadow = 0.1;
        assert_eq!(assignment.check(), Err(Error::Shadow(0.1)));
        let target = assignment.aliases["base"];
        assignment.aliases.insert(CANARY.into(), target);
        assignment.check().unwrap();
        let read: Assignment = serde_json::from_str(&serde_json::to_string(&assignment).unwrap()).unwrap();
        assert_eq!(read, assignment);
        assignment.shadow = f64::NAN;
        assert!(assignment.check().is_err());
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

    /// How often each pair of arms meets under two salts, over 10⁵ users.
    #[test]
    fn another_salt_draws_every_user_anew_whatever_arm_it_had() {
        let before = sample();
        let salted = |salt: &str| Assignment {
            salt: salt.into(),
            ..sample()
        };
        let (one, two) = (salted("one"), salted("two"));
        for (first, second) in [(&before, &one), (&one, &two)] {
            let mut met = [[0.0_f64; 2]; 2];
            for user in (0..100_000).map(|i| format!("user-{i}")) {
                let arm = |assignment: &Assignment| usize::from(assignment.arm_for(&user).0 == "base");
                met[arm(first)][arm(second)] += 1.0;
                assert_eq!(first.arm_for(&user), first.clone().arm_for(&user));
            }
            let share = [0.6, 0.4];
            let chi_square: f64 = (0..4)
                .map(|i| {
                    let expected = 100_000.0 * share[i / 2] * share[i % 2];
                    (met[i / 2][i % 2] - expected).powi(2) / expected
                })
                .sum();
            // independent draws exceed this once in 10,000 (3 degrees of freedom); the users are fixed
            assert!(chi_square < 21.1, "{chi_square} {met:?}");
        }
    }

    /// Other programs compute these too: docs/FORMAT.md has them.
    #[test]
    fn the_point_of_a_user_is_the_documented_one() {
        assert_eq!(user_point("", "demo", "ada"), 0.115_970_222_959_893_79);
        assert_eq!(user_point("2026-spring", "demo", "ada"), 0.471_113_261_231_304_8);
    }

    /// An assignment without the fields that are left out.
    const UNSALTED: &str = r#"{"policy":"demo","epoch":3,"aliases":{"base":{"version":1,"root":"48fc721fbbc172e0925fa27af1671de225ba927134802998b10a1568a188652b"},"champion":{"version":8,"root":"48fc721fbbc172e0925fa27af1671de225ba927134802998b10a1568a188652b"}},"arms":[{"alias":"champion","weight":0.6,"explore":0.02},{"alias":"base","weight":0.4}],"created_at":"2026-11-21T06:00:00Z"}"#;

    #[test]
    fn an_empty_salt_is_left_out_of_the_document() {
        let read: Assignment = serde_json::from_str(UNSALTED).unwrap();
        assert_eq!(read.salt, "");
        assert_eq!(serde_json::to_string(&read).unwrap(), UNSALTED);
        let salted = Assignment {
            salt: "2026-spring".into(),
            ..read
        };
        let text = serde_json::to_string(&salted).unwrap();
        let expected = UNSALTED.replace(r#","created_at""#, r#","salt":"2026-spring","created_at""#);
        assert_eq!(text, expected);
        assert_eq!(serde_json::from_str::<Assignment>(&text).unwrap(), salted);
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
        for salt in ["Spring", "a b", "nul\0", &"s".repeat(65)] {
            assert_eq!(with(&|a| a.salt = salt.into()), Error::Salt(salt.into()));
        }
        for share in [-0.1, 0.6, f64::NAN] {
            assert!(matches!(with(&|a| a.arms[0].explore = share), Error::Explore(..)));
        }
        for max in [-0.1, 2.1, f64::NAN] {
            assert!(matches!(
                with(&|a| a.arms[0].temperature_max = Some(max)),
                Error::TemperatureMax(..)
            ));
        }
        for min in [-0.1, 1.0, f64::NAN] {
            assert!(matches!(
                with(&|a| a.arms[0].probability_min = Some(min)),
                Error::ProbabilityMin(..)
            ));
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

    #[test]
    fn an_absent_bound_on_the_temperature_is_left_out_of_the_document() {
        let read: Assignment = serde_json::from_str(UNSALTED).unwrap();
        assert_eq!(read.arms[0].temperature_max, None);
        assert_eq!(serde_json::to_string(&read).unwrap(), UNSALTED);
        let mut bounded = read;
        bounded.arms[0].temperature_max = Some(0.3);
        bounded.arms[1].temperature_max = Some(0.0);
        bounded.check().unwrap();
        let text = serde_json::to_string(&bounded).unwrap();
        assert!(text.contains(r#""explore":0.02,"temperature_max":0.3}"#), "{text}");
        assert_eq!(serde_json::from_str::<Assignment>(&text).unwrap(), bounded);
        let of = |alias: &str| bounded.temperature_max_of(alias);
        assert_eq!((of("champion"), of("base"), of("nobody")), (Some(0.3), Some(0.0), None));
    }

    #[test]
    fn an_absent_bar_is_left_out_of_the_document() {
        let read: Assignment = serde_json::from_str(UNSALTED).unwrap();
        assert_eq!(read.arms[0].probability_min, None);
        assert_eq!(serde_json::to_string(&read).unwrap(), UNSALTED);
        let mut barred = read;
        barred.arms[0].probability_min = Some(0.25);
        barred.arms[1].probability_min = Some(0.0);
        barred.check().unwrap();
        let text = serde_json::to_string(&barred).unwrap();
        assert!(text.contains(r#""explore":0.02,"probability_min":0.25}"#), "{text}");
        assert_eq!(serde_json::from_str::<Assignment>(&text).unwrap(), barred);
        let of = |alias: &str| barred.probability_min_of(alias);
        assert_eq!(
            (of("champion"), of("base"), of("nobody")),
            (Some(0.25), Some(0.0), None)
        );
    }
}
