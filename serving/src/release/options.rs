//! Configuration of the release loop and of the experiment.

use anyhow::{bail, ensure};
use artifact::assignment::EXPLORE_MAX;
use serde::{Deserialize, Serialize};

/// Options of the release loop, which runs in the control role.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// The arms of the experiment, as in `[[release.arm]] alias = "champion" weight = 0.6`. Default:
    /// champion 0.6, base 0.4.
    #[serde(rename = "arm")]
    pub arms: Vec<ArmOptions>,
    /// How often lines and runs are polled, milliseconds. Default: 250.
    pub poll_interval_ms: u64,
}

/// One arm of the experiment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ArmOptions {
    pub alias: String,
    /// Share of the users. All weights sum to 1.
    pub weight: f64,
    /// Share of the arm's requests in which the policy must not decline, so that a policy that
    /// declines often still gets feedback. 0 to 0.5, default 0.
    #[serde(default)]
    pub explore: f64,
}

impl Default for Options {
    fn default() -> Self {
        let arm = |alias: &str, weight, explore| ArmOptions {
            alias: alias.into(),
            weight,
            explore,
        };
        Options {
            arms: vec![arm("champion", 0.6, 0.02), arm("base", 0.4, 0.0)],
            poll_interval_ms: 250,
        }
    }
}

impl Options {
    /// Checks all values. The error names the first invalid one.
    pub fn check(&self) -> anyhow::Result<()> {
        ensure!(
            !self.arms.is_empty(),
            "release.arm is empty; name at least champion with weight 1"
        );
        let total: f64 = self.arms.iter().map(|arm| arm.weight).sum();
        if (total - 1.0).abs() > 1e-6 || self.arms.iter().any(|arm| arm.weight.is_nan() || arm.weight <= 0.0) {
            bail!(
                "release.arm weights are {:?}; each must be above 0, and they must sum to 1",
                self.arms.iter().map(|arm| arm.weight).collect::<Vec<_>>()
            );
        }
        for (i, arm) in self.arms.iter().enumerate() {
            ensure!(
                self.arms[..i].iter().all(|other| other.alias != arm.alias),
                "release.arm names {:?} twice",
                arm.alias
            );
            ensure!(
                (0.0..=EXPLORE_MAX).contains(&arm.explore),
                "release.arm {:?} has explore = {}; give 0 to {EXPLORE_MAX}",
                arm.alias,
                arm.explore
            );
        }
        ensure!(self.poll_interval_ms > 0, "release.poll_interval_ms must be at least 1");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid() {
        Options::default().check().unwrap();
    }

    #[test]
    fn an_error_names_the_invalid_field() {
        let mut options = Options::default();
        options.arms[0].weight = 0.7;
        assert!(options.check().unwrap_err().to_string().contains("release.arm weights"));
        options.arms[0] = options.arms[1].clone();
        options.arms[0].weight = 0.6;
        assert!(options.check().unwrap_err().to_string().contains("twice"));
        let mut options = Options::default();
        options.arms[0].explore = 0.6;
        assert!(options.check().unwrap_err().to_string().contains("explore = 0.6"));
    }
}
