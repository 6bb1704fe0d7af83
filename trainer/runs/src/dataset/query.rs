//! What a dataset's query may say. The SQL function `dataset_members` reads the same fields.

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

/// Most generations of a dataset, and most trajectories. `dataset_members` knows it too.
pub const GENERATIONS_MAX: i64 = 1_000_000;
/// Values in one list.
const VALUES_MAX: usize = 1_000;
const SALT_BYTES_MAX: usize = 200;
const PURPOSES: [&str; 3] = ["production", "rollout", "evaluation"];

/// Which closed trajectories with a reward a dataset has. A field that is absent excludes nothing. An
/// episode is selected if all of its turns are.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Query {
    /// Tenants that logged them. Only those that consent to the policy are in a dataset anyway.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenants: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub surfaces: Option<Vec<String>>,
    /// Aliases that answered.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arms: Option<Vec<String>>,
    /// `production`, `rollout`, `evaluation`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub purposes: Option<Vec<String>>,
    /// What decided the reward: `accept`, `reject`, …
    #[serde(skip_serializing_if = "Option::is_none")]
    pub signals: Option<Vec<String>>,
    /// Serials of the version that sampled the last token, both included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version_min: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version_max: Option<i64>,
    /// Both included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reward_min: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reward_max: Option<f64>,
    /// When their last generation was sampled: from this millisecond until before that one.
    #[serde(with = "time::serde::rfc3339::option", skip_serializing_if = "Option::is_none")]
    pub sampled_from: Option<OffsetDateTime>,
    #[serde(with = "time::serde::rfc3339::option", skip_serializing_if = "Option::is_none")]
    pub sampled_until: Option<OffsetDateTime>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub split: Option<Split>,
    /// So many trajectories, the oldest ones; default 1,000,000, which is also the most. Whatever it is, a
    /// dataset has at most 1,000,000 generations.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<i64>,
}

/// A share of the users with all that they did, or the other users. The salt chooses them: the same
/// salt and share give the same users in every dataset. An episode of users on both sides is in
/// neither.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Split {
    pub salt: String,
    /// Above 0, below 1.
    pub share: f64,
    /// The users outside the share.
    #[serde(default)]
    pub rest: bool,
}

impl Query {
    /// Refuses values that select nothing or cannot be meant. The text begins with the field.
    pub fn check(&self) -> Result<(), String> {
        let lists = [
            ("tenants", &self.tenants),
            ("surfaces", &self.surfaces),
            ("arms", &self.arms),
            ("purposes", &self.purposes),
            ("signals", &self.signals),
        ];
        for (field, list) in lists {
            if let Some(list) = list
                && !(1..=VALUES_MAX).contains(&list.len())
            {
                return Err(format!(
                    "{field} must have 1 to {VALUES_MAX} values; leave it out for all"
                ));
            }
        }
        let unknown = self
            .purposes
            .iter()
            .flatten()
            .find(|one| !PURPOSES.contains(&one.as_str()));
        if let Some(purpose) = unknown {
            return Err(format!("purposes: `{purpose}` is none of {}", PURPOSES.join(", ")));
        }
        if let (Some(min), Some(max)) = (self.version_min, self.version_max)
            && min > max
        {
            return Err("version_max must not be below version_min".into());
        }
        let (low, high) = (
            self.reward_min.unwrap_or(f64::NEG_INFINITY),
            self.reward_max.unwrap_or(f64::INFINITY),
        );
        if low.is_nan() || high.is_nan() || low > high {
            return Err("reward_max must not be below reward_min".into());
        }
        if let (Some(from), Some(until)) = (self.sampled_from, self.sampled_until)
            && from >= until
        {
            return Err("sampled_until must be after sampled_from".into());
        }
        if let Some(split) = &self.split {
            if split.salt.is_empty() || split.salt.len() > SALT_BYTES_MAX {
                return Err(format!("split.salt must have 1 to {SALT_BYTES_MAX} bytes"));
            }
            if !(split.share > 0.0 && split.share < 1.0) {
                return Err("split.share must be above 0 and below 1".into());
            }
        }
        match self.limit {
            Some(limit) if !(1..=GENERATIONS_MAX).contains(&limit) => {
                Err(format!("limit must be in 1..={GENERATIONS_MAX}"))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn query(json: &str) -> Query {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn a_query_takes_every_field_and_keeps_it() {
        let text = r#"{"tenants":["a"],"surfaces":["completion"],"arms":["champion"],"purposes":["production"],
            "signals":["accept"],"version_min":3,"version_max":9,"reward_min":0.5,"reward_max":1.0,
            "sampled_from":"2026-11-20T00:00:00Z","sampled_until":"2026-11-27T00:00:00Z",
            "split":{"salt":"s","share":0.9,"rest":false},"limit":100}"#;
        let given: serde_json::Value = serde_json::from_str(text).unwrap();
        let read = query(text);
        read.check().unwrap();
        assert_eq!(serde_json::to_value(&read).unwrap(), given);
        assert_eq!(query("{}"), Query::default());
        assert!(serde_json::from_str::<Query>(r#"{"surface": ["completion"]}"#).is_err());
    }

    #[test]
    fn values_that_cannot_be_meant_are_refused_by_field() {
        for (json, field) in [
            (r#"{"surfaces": []}"#, "surfaces"),
            (r#"{"purposes": ["test"]}"#, "purposes"),
            (r#"{"version_min": 4, "version_max": 3}"#, "version_max"),
            (r#"{"reward_min": 1, "reward_max": 0.5}"#, "reward_max"),
            (
                r#"{"sampled_from": "2026-11-20T00:00:00Z", "sampled_until": "2026-11-20T00:00:00Z"}"#,
                "sampled_until",
            ),
            (r#"{"split": {"salt": "", "share": 0.5}}"#, "split.salt"),
            (r#"{"split": {"salt": "s", "share": 1}}"#, "split.share"),
            (r#"{"limit": 0}"#, "limit"),
            (r#"{"limit": 1000001}"#, "limit"),
        ] {
            let why = query(json).check().unwrap_err();
            assert!(why.starts_with(field), "{json}: {why}");
        }
    }
}
