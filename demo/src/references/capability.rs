//! Skill apart from silence: versions of the learning arm beside the base, at pauses of users on whom
//! nothing was trained.

use std::{fmt, time::Duration};

use artifact::checkpoint::Checkpoint;
use report::{
    Clusters, Interval,
    number::{decimal, interval},
};
use serde::Serialize;

use super::{Base, Judged, Tried, try_out};
use crate::stats::{self, FOLLOWING, FROZEN, LEARNING, Outcome, Reaction};

/// Version minus base is paired by pause. All intervals are clustered by user.
#[derive(Debug, Clone, Serialize)]
pub struct Capability {
    /// When the learning arm served this version, since the start of the run.
    pub at_seconds: f64,
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
        VersionAt { at, version }: VersionAt,
        checkpoint: &Checkpoint,
        probability_min: Option<f64>,
    ) -> anyhow::Result<Capability> {
        let trials = try_out(checkpoint, &self.pauses, self.temperature, self.seed)?;
        anyhow::ensure!(
            trials.len() == self.tried.trials.len(),
            "version {version} has another context or tokenizer than the base"
        );
        let tried = Tried { trials, tau: self.tau };
        Ok(compare(VersionAt { at, version }, tried, &self.tried, probability_min))
    }
}

/// What the learning arm served at a moment of the run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct VersionAt {
    /// Since the start of the run.
    pub at: Duration,
    pub version: i64,
}

/// The newest version that the learning arm has served by the end of each of `parts` equal parts of a
/// run of `length`. A version is there once, the base never.
pub fn served_along(outcomes: &[Outcome], length: Duration, parts: u32) -> Vec<VersionAt> {
    let base = stats::of_arm(outcomes, FROZEN).map(|outcome| outcome.version).max();
    let mut along: Vec<VersionAt> = Vec::new();
    for part in 1..=parts {
        let end = length * part / parts;
        let until = stats::of_arm(outcomes, LEARNING).filter(|outcome| outcome.at <= end);
        let Some(version) = until.map(|outcome| outcome.version).max() else {
            continue;
        };
        if Some(version) != base && along.last().is_none_or(|last| last.version != version) {
            along.push(VersionAt { at: end, version });
        }
    }
    along
}

/// `base`: the same pauses in the same order.
fn compare(
    VersionAt { at, version }: VersionAt,
    tried: Tried,
    base: &Tried,
    probability_min: Option<f64>,
) -> Capability {
    let right = |tried: &Tried| {
        let trials = tried.trials.iter();
        let right = trials.map(|one| (one.user, 100.0 * f64::from(u8::from(is_right(&one.greedy)))));
        right.collect::<Clusters<_>>().interval()
    };
    let differences = tried.minus(base);
    Capability {
        at_seconds: at.as_secs_f64(),
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
    suggestion.reaction == Reaction::Right
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "version {}, served after {} s, at {} pauses of other users: greedy text right at {} of 100, the base's at {}, difference {}; \
             reward minus the base's, as served {}, greedy {}; as {FOLLOWING} is served minus the base greedy with its best \
             threshold {}",
            self.version,
            decimal(Some(self.at_seconds), 0),
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
    use crate::stats::tests::outcome;

    const LAST: VersionAt = VersionAt {
        at: Duration::from_secs(600),
        version: 9,
    };

    #[test]
    fn the_versions_along_a_run_are_those_served_at_the_end_of_each_part() {
        let served = |arm, seconds, version| Outcome {
            at: Duration::from_secs(seconds),
            version,
            ..outcome(1, arm, Reaction::Declined, true)
        };
        let outcomes = [
            served(FROZEN, 5, 1),
            served(LEARNING, 10, 1),
            served(LEARNING, 110, 3),
            served(LEARNING, 150, 4),
            served(LEARNING, 160, 3), // a cluster that was late
            served(FOLLOWING, 170, 5),
            served(LEARNING, 600, 9),
        ];
        let along = |parts| {
            let along = served_along(&outcomes, Duration::from_secs(600), parts).into_iter();
            along
                .map(|served| (served.at.as_secs(), served.version))
                .collect::<Vec<_>>()
        };
        assert_eq!(along(1), [(600, 9)]);
        assert_eq!(along(3), [(200, 4), (600, 9)], "nothing new in the second part");
        assert_eq!(along(6), [(200, 4), (600, 9)], "only the base in the first part");
        assert_eq!(along(0), []);
        assert_eq!(served_along(&outcomes[..2], Duration::from_secs(600), 3), []);
    }

    fn tried(trials: impl Into<Vec<Trial>>) -> Tried {
        Tried {
            trials: trials.into(),
            tau: 0.25,
        }
    }

    fn trial(user: usize, right: bool, declined: bool) -> Trial {
        let judged = Judged {
            reaction: if right { Reaction::Right } else { Reaction::Wrong },
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
        let capability = compare(LAST, tried(silent), &tried(base), None);
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
        let capability = compare(LAST, tried(better), &tried(base), None);
        assert_eq!(capability.right_per_100.unwrap().mean, 50.0);
    }

    #[test]
    fn a_bar_hides_improbable_texts_of_the_version_alone() {
        // all texts have the log-probability −1
        let base = [trial(1, false, false), trial(2, false, false)];
        let with = |bar| {
            compare(LAST, tried(base.clone()), &tried(base.clone()), bar)
                .reward_minus_best
                .unwrap()
                .mean
        };
        assert_eq!(with(None), -0.25, "the base's best threshold shows nothing");
        assert_eq!(with(Some(0.3)), -0.25, "1/e is above the bar");
        assert_eq!(with(Some(0.4)), 0.0);
    }
}
