//! What the serving role and the release loop can be told. Pure data: every field has a unit and a default, and
//! contradictions are refused by `check` before anything starts.

use policy::assignment::EXPLORE_MAX;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Options of `springtide serve`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ServeOptions {
    /// This engine's name, unique in the fleet; part of the source of every event it logs.
    pub replica: String,
    /// The location that this replica shares with others.
    pub cluster: String,
    /// Where others reach it; default: the address it listens on.
    pub address: Option<String>,
    /// Folder of the follower's own memory (the highest assignment epoch it has verified).
    pub state_dir: PathBuf,
    /// Threads that a pass of the model is shared among; the values are the same.
    pub threads: u16,
    /// Sequences that one resident version decodes together.
    pub slots: usize,
    /// Of `slots`, how many rollouts and evaluations never take.
    pub slots_reserved_for_production: usize,
    /// Longest prompt and completion together, in tokens; the model's own limit applies as well.
    pub context_tokens_max: usize,
    /// Choices that may wait for a slot; beyond it a request gets 429.
    pub queue_choices_max: usize,
    /// A session's turn is logged as what it adds to the one before if both share at least so many leading tokens: fewer cost a
    /// reader more than they save.
    pub shared_prefix_tokens_min: usize,
    /// Prompts that are read in between two decode steps.
    pub prefills_per_step_max: usize,
    /// `max_tokens` of a request that does not say, in tokens.
    pub max_tokens_default: usize,
    /// Largest `n` of one request.
    pub choices_max: usize,
    /// Whether the experts that a mixture sampled with are logged, by reference, for a trainer to replay.
    pub log_experts: bool,
    /// Memory for the weights and caches of all resident versions, and for what is kept of one that left, in bytes.
    pub resident_bytes_max: u64,
    /// Time between two looks at the store, in milliseconds; announcements come sooner.
    pub poll_interval_ms: u64,
    /// Time between two reports to the control role, in milliseconds.
    pub heartbeat_interval_ms: u64,
    /// API key for the control role, where it asks for one. Never printed.
    #[serde(skip_serializing)]
    pub api_key: Option<String>,
}

impl Default for ServeOptions {
    fn default() -> Self {
        ServeOptions {
            replica: "replica-1".into(),
            cluster: "local".into(),
            address: None,
            state_dir: PathBuf::from(".springtide/serve"),
            threads: 1,
            slots: 16,
            slots_reserved_for_production: 4,
            context_tokens_max: 4096,
            queue_choices_max: 256,
            shared_prefix_tokens_min: 1024,
            prefills_per_step_max: 4,
            max_tokens_default: 16,
            choices_max: 16,
            log_experts: true,
            resident_bytes_max: 4 << 30,
            poll_interval_ms: 250,
            heartbeat_interval_ms: 1000,
            api_key: None,
        }
    }
}

impl ServeOptions {
    /// The first contradiction, in words for whoever wrote the file.
    pub fn check(&self) -> Result<(), String> {
        if self.replica.is_empty() || self.replica.contains(['/', ' ']) {
            return Err(format!(
                "serve.replica is {:?}; give a name without blanks or slashes",
                self.replica
            ));
        }
        if self.slots == 0 || self.slots_reserved_for_production >= self.slots {
            return Err(format!(
                "serve.slots_reserved_for_production is {} of {} slots; rollouts need at least one",
                self.slots_reserved_for_production, self.slots
            ));
        }
        for (field, value) in [
            ("threads", usize::from(self.threads)),
            ("context_tokens_max", self.context_tokens_max),
            ("queue_choices_max", self.queue_choices_max),
            ("prefills_per_step_max", self.prefills_per_step_max),
            ("max_tokens_default", self.max_tokens_default),
            ("choices_max", self.choices_max),
        ] {
            if value == 0 {
                return Err(format!("serve.{field} is 0; it must be at least 1"));
            }
        }
        if self.choices_max > self.queue_choices_max {
            return Err(format!(
                "serve.choices_max {} does not fit serve.queue_choices_max {}",
                self.choices_max, self.queue_choices_max
            ));
        }
        if self.poll_interval_ms == 0 || self.heartbeat_interval_ms == 0 {
            return Err("serve.poll_interval_ms and serve.heartbeat_interval_ms must be at least 1".into());
        }
        Ok(())
    }
}

/// Options of the release loop, which runs in the control role.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ReleaseOptions {
    /// The experiment: which share of the users each alias answers. `[[release.arm]] alias = "champion" weight = 0.6`
    #[serde(rename = "arm")]
    pub arms: Vec<ArmOptions>,
    /// Time between two looks at lines and runs, in milliseconds.
    pub poll_interval_ms: u64,
}

/// One arm of the experiment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ArmOptions {
    pub alias: String,
    /// Share of the users; all weights together are 1.
    pub weight: f64,
    /// Share of the arm's requests in which the policy may not decline, so that it goes on earning answers; 0 to 0.5.
    #[serde(default)]
    pub explore: f64,
}

impl Default for ReleaseOptions {
    fn default() -> Self {
        let arm = |alias: &str, weight, explore| ArmOptions {
            alias: alias.into(),
            weight,
            explore,
        };
        ReleaseOptions {
            arms: vec![arm("champion", 0.6, 0.02), arm("base", 0.4, 0.0)],
            poll_interval_ms: 250,
        }
    }
}

impl ReleaseOptions {
    /// The first contradiction, in words for whoever wrote the file.
    pub fn check(&self) -> Result<(), String> {
        if self.arms.is_empty() {
            return Err("release.arm is empty; name at least champion with weight 1".into());
        }
        let total: f64 = self.arms.iter().map(|arm| arm.weight).sum();
        if (total - 1.0).abs() > 1e-6 || self.arms.iter().any(|arm| arm.weight.is_nan() || arm.weight <= 0.0) {
            return Err(format!(
                "release.arm weights are {:?}; each must be above 0 and all together 1",
                self.arms.iter().map(|arm| arm.weight).collect::<Vec<_>>()
            ));
        }
        for (i, arm) in self.arms.iter().enumerate() {
            if self.arms[..i].iter().any(|other| other.alias == arm.alias) {
                return Err(format!("release.arm names {:?} twice", arm.alias));
            }
            if !(0.0..=EXPLORE_MAX).contains(&arm.explore) {
                return Err(format!(
                    "release.arm {:?} has explore = {}; give 0 to {EXPLORE_MAX}",
                    arm.alias, arm.explore
                ));
            }
        }
        if self.poll_interval_ms == 0 {
            return Err("release.poll_interval_ms must be at least 1".into());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_contradict_nothing() {
        ServeOptions::default().check().unwrap();
        ReleaseOptions::default().check().unwrap();
    }

    #[test]
    fn contradictions_are_refused_by_the_name_of_the_field() {
        let options = ServeOptions {
            slots: 4,
            ..ServeOptions::default()
        };
        assert!(options.check().unwrap_err().contains("slots_reserved_for_production"));
        let options = ServeOptions {
            queue_choices_max: 0,
            ..ServeOptions::default()
        };
        assert!(options.check().unwrap_err().contains("queue_choices_max"));
        let mut options = ReleaseOptions::default();
        options.arms[0].weight = 0.7;
        assert!(options.check().unwrap_err().contains("release.arm weights"));
        options.arms[0] = options.arms[1].clone();
        options.arms[0].weight = 0.6;
        assert!(options.check().unwrap_err().contains("twice"));
        let mut options = ReleaseOptions::default();
        options.arms[0].explore = 0.6;
        assert!(options.check().unwrap_err().contains("explore = 0.6"));
    }
}
