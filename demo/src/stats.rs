//! From the outcome of each pause to the statistics of each arm. Pure.
//!
//! Whether a developer answers is drawn with the pause, before anything is shown. Reward, accept
//! rate and accepts per 100 pauses are over the pauses whose developer answers, declined ones
//! included. The other pauses are left out whatever the policy did there. (Leaving out only the
//! unanswered suggestions would count declines 1.25 times, which favors the arm that declines
//! more.) The show rate is over all pauses.

use std::{collections::BTreeMap, time::Duration};

use report::{Clusters, Interval};
use serde::Serialize;
use uuid::Uuid;

/// Alias of the learning arm: it explores, and the run learns from it.
pub const LEARNING: &str = "learner";
/// Alias of the arm that follows the learning arm. It does not explore.
pub const FOLLOWING: &str = "champion";
/// Alias of the frozen arm.
pub const FROZEN: &str = "base";

/// What the developer thinks of the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reaction {
    /// Nothing was shown.
    Declined,
    Right,
    Wrong,
}

/// One pause, as far as statistics need it.
#[derive(Debug, Clone, Copy)]
pub struct Observation {
    pub user: usize,
    /// Whether this developer answers here if something is shown.
    pub answers: bool,
    pub reaction: Reaction,
}

impl Observation {
    /// Reward at the price `tau` of showing.
    pub fn reward(&self, tau: f64) -> f64 {
        match self.reaction {
            Reaction::Declined => 0.0,
            Reaction::Right => 1.0 - tau,
            Reaction::Wrong => -tau,
        }
    }

    /// 1 if the suggestion is accepted, else 0.
    fn accept(&self) -> f64 {
        unit(self.reaction == Reaction::Right)
    }

    fn is_shown(&self) -> bool {
        self.reaction != Reaction::Declined
    }
}

/// One pause that the server answered.
#[derive(Debug, Clone)]
pub struct Outcome {
    pub observation: Observation,
    /// When the pause was, since the start of the run.
    pub at: Duration,
    /// How many pauses the user had before.
    pub nth: u64,
    pub generation_id: Uuid,
    pub arm: String,
    pub version: i64,
    /// Content hash of the version, as the answer named it.
    pub root: String,
    /// From the request to the whole answer.
    pub latency: Duration,
}

/// The outcomes of one arm.
pub fn of_arm<'a>(outcomes: &'a [Outcome], arm: &str) -> impl Iterator<Item = &'a Outcome> + Clone {
    outcomes.iter().filter(move |outcome| outcome.arm == arm)
}

/// What one arm did. Rates are `None` where nothing was counted.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct ArmStats {
    pub users: usize,
    /// Pauses that the server answered.
    pub pauses: u64,
    pub shown: u64,
    pub declined: u64,
    /// Suggestions that were shown to a developer who never answers.
    pub unanswered: u64,
    pub accepted: u64,
    pub rejected: u64,
    /// Pauses whose developer answers. The reward and the accepts are means over these.
    pub n: u64,
    pub reward_mean: Option<f64>,
    pub reward_ci95: Option<[f64; 2]>,
    pub accepts_per_100: Option<f64>,
    pub accepts_per_100_ci95: Option<[f64; 2]>,
    /// Accepted, as a fraction of what was shown to developers who answer.
    pub accept_rate: Option<f64>,
    pub accept_rate_ci95: Option<[f64; 2]>,
    /// Shown, as a fraction of all pauses.
    pub show_rate: Option<f64>,
    pub show_rate_ci95: Option<[f64; 2]>,
}

impl ArmStats {
    pub fn of(observations: impl IntoIterator<Item = Observation>, tau: f64) -> Self {
        let mut stats = Self::default();
        let [mut reward, mut accepts, mut accept_rate, mut show_rate] =
            std::array::from_fn(|_| Clusters::<usize>::default());
        for observation in observations {
            let Observation { user, answers, .. } = observation;
            match observation.reaction {
                Reaction::Declined => stats.declined += 1,
                _ if !answers => stats.unanswered += 1,
                Reaction::Right => stats.accepted += 1,
                Reaction::Wrong => stats.rejected += 1,
            }
            show_rate.add(user, unit(observation.is_shown()));
            if answers {
                reward.add(user, observation.reward(tau));
                accepts.add(user, 100.0 * observation.accept());
            }
            if answers && observation.is_shown() {
                accept_rate.add(user, observation.accept());
            }
        }
        let ci95 = |clusters: &Clusters<usize>| clusters.interval().map(|interval| interval.ci95);
        Self {
            users: show_rate.len(),
            pauses: show_rate.n(),
            shown: show_rate.n() - stats.declined,
            n: reward.n(),
            reward_mean: reward.mean(),
            reward_ci95: ci95(&reward),
            accepts_per_100: accepts.mean(),
            accepts_per_100_ci95: ci95(&accepts),
            accept_rate: accept_rate.mean(),
            accept_rate_ci95: ci95(&accept_rate),
            show_rate: show_rate.mean(),
            show_rate_ci95: ci95(&show_rate),
            ..stats
        }
    }
}

pub fn unit(yes: bool) -> f64 {
    f64::from(u8::from(yes))
}

/// Statistics by arm. The three arms of the demo are always present.
pub type Arms = BTreeMap<String, ArmStats>;

pub fn arms<'a>(outcomes: impl IntoIterator<Item = &'a Outcome>, tau: f64) -> Arms {
    let mut by_arm =
        BTreeMap::<&str, Vec<Observation>>::from([LEARNING, FOLLOWING, FROZEN].map(|arm| (arm, Vec::new())));
    for outcome in outcomes {
        by_arm.entry(&outcome.arm).or_default().push(outcome.observation);
    }
    let stats = by_arm
        .into_iter()
        .map(|(arm, seen)| (arm.to_owned(), ArmStats::of(seen, tau)));
    stats.collect()
}

/// A part of the run, and what the arms did in it. Times are seconds since the first pause.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Period {
    pub from_seconds: f64,
    pub until_seconds: f64,
    pub arms: Arms,
    /// Reward per pause, learning arm minus frozen arm.
    pub difference: Option<Interval>,
    /// Reward per pause, following arm minus frozen arm.
    pub following_difference: Option<Interval>,
}

/// Splits the first `length` of a run into `count` periods of equal length. Later pauses count in
/// the last one.
pub fn periods(outcomes: &[Outcome], length: Duration, count: u32, tau: f64) -> Vec<Period> {
    let count = count.max(1);
    let width = length.as_secs_f64() / f64::from(count);
    let mut parts = vec![Vec::<&Outcome>::new(); count as usize];
    for outcome in outcomes {
        let nth = (outcome.at.as_secs_f64() / width) as usize;
        parts[nth.min(count as usize - 1)].push(outcome);
    }
    let periods = (0..count).zip(parts).map(|(nth, outcomes)| Period {
        from_seconds: width * f64::from(nth),
        until_seconds: width * f64::from(nth + 1),
        arms: arms(outcomes.iter().copied(), tau),
        difference: difference(outcomes.iter().copied(), LEARNING, Measure::Reward, tau),
        following_difference: difference(outcomes, FOLLOWING, Measure::Reward, tau),
    });
    periods.collect()
}

/// What is compared, per pause whose developer answers.
#[derive(Debug, Clone, Copy)]
pub enum Measure {
    Reward,
    /// Accepts per 100 pauses.
    Accepts,
}

impl Measure {
    fn of(self, observation: &Observation, tau: f64) -> f64 {
        match self {
            Measure::Reward => observation.reward(tau),
            Measure::Accepts => 100.0 * observation.accept(),
        }
    }
}

/// This arm minus the frozen arm. `None` with fewer than two users in either.
///
/// A user who met several arms (because the weights or the salt were changed) counts in the first.
pub fn difference<'a>(
    outcomes: impl IntoIterator<Item = &'a Outcome>,
    arm: &str,
    measure: Measure,
    tau: f64,
) -> Option<Interval> {
    let compared = arm;
    let mut arm_of = BTreeMap::<usize, &str>::new();
    let mut by_arm = BTreeMap::<&str, Clusters<usize>>::new();
    for outcome in outcomes.into_iter().filter(|outcome| outcome.observation.answers) {
        let user = outcome.observation.user;
        let arm = *arm_of.entry(user).or_insert(&outcome.arm);
        if outcome.arm == arm {
            let value = measure.of(&outcome.observation, tau);
            by_arm.entry(arm).or_default().add(user, value);
        }
    }
    let estimate = |arm| by_arm.get(arm)?.estimate();
    Some(estimate(compared)?.minus(estimate(FROZEN)?))
}

/// First minus second, over pairs of observations at the same pause. This removes the differences
/// between pauses, so the interval is narrower than that of [`difference`].
pub fn paired_difference(
    pairs: impl IntoIterator<Item = (Observation, Observation)>,
    measure: Measure,
    tau: f64,
) -> Option<Interval> {
    let values = pairs
        .into_iter()
        .map(|(a, b)| (a.user, measure.of(&a, tau) - measure.of(&b, tau)));
    values.collect::<Clusters<_>>().interval()
}

/// One version that answered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct VersionServed {
    pub version: i64,
    /// Its content hash.
    pub root: String,
    /// Answers by arm.
    pub answers: BTreeMap<String, u64>,
}

/// Every version that answered, in order. Two content hashes under one number would be a fault;
/// they give two entries.
pub fn versions_served(outcomes: &[Outcome]) -> Vec<VersionServed> {
    let mut served = BTreeMap::<(i64, &str), BTreeMap<String, u64>>::new();
    for outcome in outcomes {
        let answers = served.entry((outcome.version, &outcome.root)).or_default();
        *answers.entry(outcome.arm.clone()).or_default() += 1;
    }
    let entry = |((version, root), answers): ((i64, &str), _)| VersionServed {
        version,
        root: root.to_owned(),
        answers,
    };
    served.into_iter().map(entry).collect()
}

/// The q-quantile of `values` by nearest rank, q in 0..=1.
pub fn quantile(mut values: Vec<f64>, q: f64) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let rank = (q * values.len() as f64).ceil() as usize;
    values.get(rank.saturating_sub(1)).copied()
}

#[cfg(test)]
pub mod tests {
    use report::Estimate;

    use super::Reaction::{Declined, Right, Wrong};
    use super::*;

    pub fn outcome(user: usize, arm: &str, reaction: Reaction, answers: bool) -> Outcome {
        Outcome {
            observation: Observation {
                user,
                answers,
                reaction,
            },
            at: Duration::ZERO,
            nth: 0,
            generation_id: Uuid::nil(),
            arm: arm.to_owned(),
            version: 1,
            root: "aa".to_owned(),
            latency: Duration::from_millis(50),
        }
    }

    fn stats(outcomes: &[Outcome]) -> ArmStats {
        ArmStats::of(outcomes.iter().map(|outcome| outcome.observation), 0.25)
    }

    #[test]
    fn the_statistics_of_an_arm_match_a_count_by_hand() {
        let stats = stats(&[
            outcome(1, "base", Right, true),
            outcome(1, "base", Wrong, true),
            outcome(1, "base", Right, false),
            outcome(2, "base", Declined, true),
            outcome(2, "base", Declined, false),
            outcome(2, "base", Right, true),
        ]);
        assert_eq!((stats.users, stats.pauses, stats.shown, stats.declined), (2, 6, 4, 2));
        assert_eq!(
            (stats.unanswered, stats.accepted, stats.rejected, stats.n),
            (1, 2, 1, 4)
        );
        assert_eq!(stats.reward_mean, Some((0.75 - 0.25 + 0.0 + 0.75) / 4.0));
        assert_eq!(stats.accepts_per_100, Some(50.0));
        assert_eq!(stats.accept_rate, Some(2.0 / 3.0));
        assert_eq!(stats.show_rate, Some(4.0 / 6.0));
    }

    #[test]
    fn an_arm_that_declines_more_gains_nothing_from_silent_developers() {
        let of = |reaction| {
            (0..100)
                .map(|n| outcome(n, "base", reaction, n % 5 != 0))
                .collect::<Vec<_>>()
        };
        assert_eq!(stats(&of(Declined)).n, stats(&of(Wrong)).n);
    }

    #[test]
    fn all_arms_are_in_the_report_even_when_nothing_happened() {
        let arms = arms([], 0.25);
        assert_eq!(arms.keys().collect::<Vec<_>>(), ["base", "champion", "learner"]);
        assert_eq!(arms["base"].reward_mean, None);
    }

    #[test]
    fn the_difference_is_this_arm_minus_frozen() {
        let mut outcomes = Vec::new();
        for user in 0..30 {
            let arm = [LEARNING, FROZEN, FOLLOWING][user / 10];
            for nth in 0..10 {
                let right = nth < if arm == LEARNING { 5 + user % 2 } else { 2 + user % 2 };
                outcomes.push(outcome(user, arm, if right { Right } else { Wrong }, true));
            }
        }
        let following = difference(&outcomes, FOLLOWING, Measure::Reward, 0.25).unwrap();
        assert!(following.mean.abs() < 1e-9, "{following:?}");
        let reward = difference(&outcomes, LEARNING, Measure::Reward, 0.25).unwrap();
        assert!((reward.mean - 0.3).abs() < 1e-9, "{reward:?}");
        assert!(reward.ci95[0] > 0.2 && reward.ci95[1] < 0.4, "{reward:?}");
        let accepts = difference(&outcomes, LEARNING, Measure::Accepts, 0.25).unwrap();
        assert!((accepts.mean - 30.0).abs() < 1e-9, "{accepts:?}");
        let one_arm = difference(&outcomes[..100], LEARNING, Measure::Reward, 0.25);
        assert!(one_arm.is_none(), "one arm alone has no difference");
    }

    #[test]
    fn a_paired_difference_is_of_the_same_pauses() {
        let of = |user, reaction| Observation {
            user,
            answers: true,
            reaction,
        };
        let pairs = [
            (of(1, Right), of(1, Wrong)),
            (of(1, Right), of(1, Right)),
            (of(2, Declined), of(2, Wrong)),
        ];
        // Differences of reward: 0.75 − (−0.25), 0, 0 − (−0.25).
        let reward = paired_difference(pairs, Measure::Reward, 0.25).unwrap().mean;
        assert!((reward - 1.25 / 3.0).abs() < 1e-9, "{reward}");
        let accepts = paired_difference(pairs, Measure::Accepts, 0.25).unwrap().mean;
        assert!((accepts - 100.0 / 3.0).abs() < 1e-9, "{accepts}");
    }

    #[test]
    fn every_rate_has_an_interval_by_user() {
        let of = |user, reactions: [Reaction; 4]| reactions.map(|reaction| outcome(user, "base", reaction, true));
        let outcomes = [
            of(1, [Right, Right, Wrong, Declined]),
            of(2, [Right, Wrong, Wrong, Wrong]),
            of(3, [Right, Right, Declined, Declined]),
        ];
        let stats = stats(outcomes.as_flattened());
        // By hand, with t of 2 degrees of freedom.
        let assert_interval = |[low, high]: [f64; 2], mean: f64, variance: f64| {
            let expected = Estimate {
                mean,
                variance,
                freedom: 2.0,
            }
            .interval()
            .ci95;
            assert!(
                (low - expected[0]).abs() < 1e-9 && (high - expected[1]).abs() < 1e-9,
                "{low} {high} {expected:?}"
            );
        };
        // Accepts: R = 5/12; residuals 1/3, −2/3, 1/3; variance 3/2 · (2/3) / 144.
        assert_interval(stats.accepts_per_100_ci95.unwrap(), 500.0 / 12.0, 1e4 / 144.0);
        // Of shown: R = 5/9; residuals 2 − 15/9, 1 − 20/9, 2 − 10/9; their squares add up to
        // 194/81.
        assert_interval(stats.accept_rate_ci95.unwrap(), 5.0 / 9.0, 1.5 * 194.0 / 81.0 / 81.0);
        // Shown: R = 9/12; residuals 0, 1, −1.
        assert_interval(stats.show_rate_ci95.unwrap(), 0.75, 1.5 * 2.0 / 144.0);
    }

    #[test]
    fn periods_have_equal_length_and_lose_no_pause() {
        let outcomes = [0.0, 9.9, 10.0, 25.0, 39.9, 40.0, 41.0].map(|second| Outcome {
            at: Duration::from_secs_f64(second),
            ..outcome(1, LEARNING, Right, true)
        });
        let periods = periods(&outcomes, Duration::from_secs(40), 4, 0.25);
        let pauses = periods.iter().map(|period| period.arms[LEARNING].pauses);
        assert_eq!(pauses.collect::<Vec<_>>(), [2, 1, 1, 3]);
        assert_eq!((periods[1].from_seconds, periods[1].until_seconds), (10.0, 20.0));
        assert_eq!(
            periods[1].arms[FROZEN].reward_mean, None,
            "an arm without pauses has no mean"
        );
    }

    #[test]
    fn versions_are_listed_with_their_answers_by_arm() {
        let mut outcomes = vec![outcome(1, "base", Right, true), outcome(2, "champion", Right, true)];
        outcomes.push(Outcome {
            version: 2,
            root: "bb".to_owned(),
            ..outcomes[1].clone()
        });
        let served = versions_served(&outcomes);
        assert_eq!(served.len(), 2);
        let answers = [("base".to_owned(), 1), ("champion".to_owned(), 1)];
        assert_eq!(served[0].answers, BTreeMap::from(answers));
        assert_eq!((served[1].version, served[1].root.as_str()), (2, "bb"));
    }

    #[test]
    fn quantiles_are_by_nearest_rank() {
        assert_eq!(quantile(vec![3.0, 1.0, 2.0, 4.0], 0.5), Some(2.0));
        assert_eq!(quantile(vec![3.0, 1.0], 0.95), Some(3.0));
        assert_eq!(quantile(vec![], 0.5), None);
    }
}
