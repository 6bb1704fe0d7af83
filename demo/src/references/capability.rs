//! Skill apart from silence: the last version of the learning arm beside the base, at pauses of users
//! on whom nothing was trained.

use std::fmt;

use artifact::checkpoint::Checkpoint;
use report::{Clusters, Interval, number::interval};
use serde::Serialize;

use super::{Base, Judged, Tried, try_out};
use crate::stats::{FOLLOWING, Judgment};

/// Version minus base is paired by pause. All intervals are clustered by user.
#[derive(Debug, Clone, Serialize)]
pub struct Capability {
    pub version: i64,
    pub pauses: usize,
    /// Of 100 pauses, those at which the greedy text is what was typed, declining not allowed.
    pub base_right_per_100: Option<Interval>,
    pub version_right_per_100: Option<Interval>,
    /// Version minus base.
    pub right_per_100: Option<Interval>,
    /// Reward per pause, version minus base, both sampled as the arms are served.
    pub reward_as_served: Option<Interval>,
    /// The same, both greedy.
    pub reward_greedy: Option<Interval>,
    /// The version greedily behind the bar of the arm that follows, minus the base greedily with its best
    /// threshold, which is chosen on other users.
    pub reward_minus_best: Option<Interval>,
}

impl Base {
    /// Tries a version at the same pauses of other users as the base. `probability_min`: the bar of the arm
    /// that follows.
    pub fn capability(
        &self,
        version: i64,
        checkpoint: &Checkpoint,
        probability_min: Option<f64>,
    ) -> anyhow::Result<Capability> {
        let trials = try_out(checkpoint, &self.pauses, self.temperature, self.seed)?;
        anyhow::ensure!(
            trials.len() == self.tried.trials.len(),
            "version {version} has another context or tokenizer than the base"
        );
        let tried = Tried { trials, tau: self.tau };
        Ok(compare(version, tried, &self.tried, probability_min))
    }
}

/// `base`: the same pauses in the same order.
fn compare(version: i64, tried: Tried, base: &Tried, probability_min: Option<f64>) -> Capability {
    let right = |tried: &Tried| {
        let trials = tried.trials.iter();
        let right = trials.map(|one| (one.user, 100.0 * f64::from(u8::from(is_right(&one.greedy)))));
        right.collect::<Clusters<_>>().interval()
    };
    let differences = tried.minus(base);
    Capability {
        version,
        pauses: tried.trials.len(),
        base_right_per_100: right(base),
        version_right_per_100: right(&tried),
        right_per_100: differences.right_per_100,
        reward_as_served: differences.sampled,
        reward_greedy: differences.greedy,
        reward_minus_best: {
            let served = tried.served_above(probability_min.unwrap_or(0.0));
            served.minus(base).greedy_minus_base_above_threshold
        },
    }
}

fn is_right(suggestion: &Judged) -> bool {
    suggestion.judgment == Judgment::Right
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "version {} at {} pauses of other users: greedy text right at {} of 100, the base's at {}, difference {}; \
             reward minus the base's, as served {}, greedy {}; as {FOLLOWING} is served minus the base greedy with its best \
             threshold {}",
            self.version,
            self.pauses,
            interval(self.version_right_per_100, 1),
            interval(self.base_right_per_100, 1),
            interval(self.right_per_100, 1),
            interval(self.reward_as_served, 3),
            interval(self.reward_greedy, 3),
            interval(self.reward_minus_best, 3),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::super::Trial;
    use super::*;

    fn tried(trials: impl Into<Vec<Trial>>) -> Tried {
        Tried {
            trials: trials.into(),
            tau: 0.25,
        }
    }

    fn trial(user: usize, right: bool, declined: bool) -> Trial {
        let judged = Judged {
            judgment: if right { Judgment::Right } else { Judgment::Wrong },
            declined,
            log_prob: -1.0,
        };
        Trial {
            user,
            answers: true,
            sampled: judged,
            greedy: judged,
        }
    }

    #[test]
    fn silence_changes_the_reward_but_not_the_capability() {
        let base = [trial(1, true, false), trial(1, false, false), trial(2, false, false)];
        let silent = [trial(1, true, false), trial(1, false, true), trial(2, false, true)];
        let capability = compare(9, tried(silent), &tried(base), None);
        assert_eq!(capability.right_per_100.unwrap().mean, 0.0);
        assert_eq!(
            capability.base_right_per_100.unwrap().mean,
            capability.version_right_per_100.unwrap().mean
        );
        // two wrong suggestions fewer at 0.25 each, over three pauses
        let reward = capability.reward_as_served.unwrap().mean;
        assert!((reward - 0.5 / 3.0).abs() < 1e-9, "{reward}");
    }

    #[test]
    fn a_version_that_is_right_more_often_has_more_capability_even_if_it_declines() {
        let base = [trial(1, false, false), trial(2, false, false)];
        let better = [trial(1, true, true), trial(2, false, false)];
        let capability = compare(9, tried(better), &tried(base), None);
        assert_eq!(capability.right_per_100.unwrap().mean, 50.0);
    }

    #[test]
    fn a_bar_hides_improbable_texts_of_the_version_alone() {
        // all texts have the log-probability −1
        let base = [trial(1, false, false), trial(2, false, false)];
        let with = |bar| {
            compare(9, tried(base.clone()), &tried(base.clone()), bar)
                .reward_minus_best
                .unwrap()
                .mean
        };
        assert_eq!(with(None), -0.25, "the base's best threshold shows nothing");
        assert_eq!(with(Some(0.3)), -0.25, "1/e is above the bar");
        assert_eq!(with(Some(0.4)), 0.0);
    }
}
