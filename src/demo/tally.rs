//! From what happened at each pause to the figures of the report. Pure.
//!
//! What counts: whether a developer answers is drawn with the pause, before anything is shown. Reward, accept rate and
//! accepts per 100 pauses are taken over the pauses whose developer answers, declined ones included; the others are left
//! out *whatever the policy did there*, and counted. (Leaving out only the unanswered suggestions would count declines
//! 1.25 times and so favour the arm that declines more.) The show rate is over all pauses. `recorded` is the other
//! reading, every reward that training also sees, for comparison with the trajectory table.

use std::{collections::BTreeMap, time::Duration};

use serde::Serialize;
use uuid::Uuid;

use super::interval::{self, Cluster, Interval};

/// The alias that learns, and the one that is frozen.
pub const LEARNING: &str = "champion";
pub const FROZEN: &str = "base";

/// What the developer thought of what was (not) shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    Declined,
    Right,
    Wrong,
}

/// One pause that the server answered.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// When the pause was, since the start of the run.
    pub at: Duration,
    pub user: usize,
    /// Which of the user's pauses.
    pub nth: u64,
    pub generation_id: Uuid,
    pub arm: String,
    pub version: i64,
    pub root: String,
    pub verdict: Verdict,
    /// Whether this developer answers at this pause if something is shown.
    pub answers: bool,
    /// From asking to the whole answer.
    pub latency: Duration,
}

impl Outcome {
    /// What a policy that answers no request would have met at a pause.
    pub fn of_reference(user: usize, answers: bool, verdict: Verdict) -> Self {
        Self {
            at: Duration::ZERO,
            user,
            nth: 0,
            generation_id: Uuid::nil(),
            arm: String::new(),
            version: 0,
            root: String::new(),
            verdict,
            answers,
            latency: Duration::ZERO,
        }
    }

    /// Reward of this pause at the price `tau` of showing.
    pub fn reward(&self, tau: f64) -> f64 {
        match self.verdict {
            Verdict::Declined => 0.0,
            Verdict::Right => 1.0 - tau,
            Verdict::Wrong => -tau,
        }
    }

    /// The reward that the trajectory of this pause should carry; None: censored, for want of an answer.
    pub fn recorded_reward(&self, tau: f64) -> Option<f64> {
        (self.answers || self.verdict == Verdict::Declined).then(|| self.reward(tau))
    }
}

/// What one arm did. Rates are None where nothing was counted.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Figures {
    pub users: usize,
    /// Pauses that were answered by the server.
    pub pauses: u64,
    pub shown: u64,
    pub declined: u64,
    /// Suggestions that were shown to a developer who never answered.
    pub unanswered: u64,
    pub accepted: u64,
    pub rejected: u64,
    /// Pauses whose developer answers: what the means below are over.
    pub n: u64,
    pub reward_mean: Option<f64>,
    pub reward_ci95: Option<[f64; 2]>,
    pub accepts_per_100: Option<f64>,
    /// Accepted, of what was shown to a developer who answers.
    pub accept_rate: Option<f64>,
    /// Shown, of all pauses.
    pub show_rate: Option<f64>,
    pub recorded: Recorded,
}

/// Every reward that training sees: all declines, and the answers that were given.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Recorded {
    pub n: u64,
    pub reward_mean: Option<f64>,
}

/// The figures of one arm's outcomes.
pub fn figures<'a>(outcomes: impl Iterator<Item = &'a Outcome>, tau: f64) -> Figures {
    let mut figures = Figures::default();
    let mut recorded_sum = 0.0;
    let mut users = BTreeMap::<usize, Cluster>::new();
    for outcome in outcomes {
        figures.pauses += 1;
        match outcome.verdict {
            Verdict::Declined => figures.declined += 1,
            _ if !outcome.answers => figures.unanswered += 1,
            Verdict::Right => figures.accepted += 1,
            Verdict::Wrong => figures.rejected += 1,
        }
        if let Some(reward) = outcome.recorded_reward(tau) {
            figures.recorded.n += 1;
            recorded_sum += reward;
        }
        let user = users.entry(outcome.user).or_default();
        if outcome.answers {
            user.n += 1.0;
            user.sum += outcome.reward(tau);
        }
    }
    let clusters = users.into_values().collect::<Vec<_>>();
    let sum = clusters.iter().map(|cluster| cluster.sum).sum::<f64>();
    figures.users = clusters.len();
    figures.shown = figures.pauses - figures.declined;
    figures.n = clusters.iter().map(|cluster| cluster.n).sum::<f64>() as u64;
    figures.reward_mean = share(sum, figures.n);
    figures.reward_ci95 = interval::ratio(&clusters).map(|estimate| estimate.interval().ci95);
    figures.accepts_per_100 = share(100.0 * figures.accepted as f64, figures.n);
    figures.accept_rate = share(figures.accepted as f64, figures.accepted + figures.rejected);
    figures.show_rate = share(figures.shown as f64, figures.pauses);
    figures.recorded.reward_mean = share(recorded_sum, figures.recorded.n);
    figures
}

/// `sum / n`; None if there is nothing to divide by.
pub fn share(sum: f64, n: u64) -> Option<f64> {
    (n > 0).then(|| sum / n as f64)
}

/// Figures by arm; the learning and the frozen one are always there.
pub fn arms<'a>(outcomes: impl Iterator<Item = &'a Outcome>, tau: f64) -> BTreeMap<String, Figures> {
    let mut by_arm = BTreeMap::<&str, Vec<&Outcome>>::from([(LEARNING, Vec::new()), (FROZEN, Vec::new())]);
    for outcome in outcomes {
        by_arm.entry(&outcome.arm).or_default().push(outcome);
    }
    by_arm
        .into_iter()
        .map(|(arm, outcomes)| (arm.to_owned(), figures(outcomes.into_iter(), tau)))
        .collect()
}

/// The outcomes of the first, second and last third of a run of this length, by the time of the pause.
pub fn thirds(outcomes: Vec<Outcome>, length: Duration) -> [Vec<Outcome>; 3] {
    let mut thirds = <[Vec<Outcome>; 3]>::default();
    for outcome in outcomes {
        let third = 3.0 * outcome.at.as_secs_f64() / length.as_secs_f64();
        thirds[(third as usize).min(2)].push(outcome);
    }
    thirds
}

/// What is compared between the arms, per pause whose developer answers.
#[derive(Debug, Clone, Copy)]
pub enum Measure {
    Reward,
    /// Accepts per 100 pauses.
    Accepts,
}

/// Learning arm minus frozen arm, with its interval clustered by user. None with fewer than two users in either.
///
/// A user who met both arms (the weights were changed during the run) counts in the arm they met first.
pub fn difference(outcomes: &[Outcome], measure: Measure, tau: f64) -> Option<Interval> {
    let mut users = BTreeMap::<usize, (&str, Cluster)>::new();
    for outcome in outcomes.iter().filter(|outcome| outcome.answers) {
        let (arm, cluster) = users.entry(outcome.user).or_insert((&outcome.arm, Cluster::default()));
        if *arm == outcome.arm {
            cluster.n += 1.0;
            cluster.sum += match measure {
                Measure::Reward => outcome.reward(tau),
                Measure::Accepts => f64::from(u8::from(outcome.verdict == Verdict::Right)) * 100.0,
            };
        }
    }
    let of_arm = |wanted: &str| {
        let clusters = users
            .values()
            .filter(|(arm, _)| *arm == wanted)
            .map(|(_, cluster)| *cluster);
        interval::ratio(&clusters.collect::<Vec<_>>())
    };
    Some(of_arm(LEARNING)?.minus(of_arm(FROZEN)?))
}

/// One version that answered, as its answers said.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct VersionServed {
    pub version: i64,
    pub root: String,
    /// Answers by arm.
    pub answers: BTreeMap<String, u64>,
}

/// Every version that answered, in order. Two roots under one serial give two entries: that must never be.
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

/// The q-quantile of `values` (nearest rank), q in 0..=1.
pub fn quantile(mut values: Vec<f64>, q: f64) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let rank = (q * values.len() as f64).ceil() as usize;
    values.get(rank.saturating_sub(1)).copied()
}

#[cfg(test)]
pub mod tests {
    use super::*;

    pub fn outcome(user: usize, arm: &str, verdict: Verdict, answers: bool) -> Outcome {
        Outcome {
            at: Duration::ZERO,
            user,
            nth: 0,
            generation_id: Uuid::nil(),
            arm: arm.to_owned(),
            version: 1,
            root: "aa".to_owned(),
            verdict,
            answers,
            latency: Duration::from_millis(50),
        }
    }

    #[test]
    fn the_figures_of_an_arm_match_a_count_by_hand() {
        use Verdict::{Declined, Right, Wrong};
        let outcomes = [
            outcome(1, "base", Right, true),
            outcome(1, "base", Wrong, true),
            outcome(1, "base", Right, false),
            outcome(2, "base", Declined, true),
            outcome(2, "base", Declined, false),
            outcome(2, "base", Right, true),
        ];
        let figures = figures(outcomes.iter(), 0.25);
        assert_eq!(
            (figures.users, figures.pauses, figures.shown, figures.declined),
            (2, 6, 4, 2)
        );
        assert_eq!(
            (figures.unanswered, figures.accepted, figures.rejected, figures.n),
            (1, 2, 1, 4)
        );
        assert_eq!(figures.reward_mean, Some((0.75 - 0.25 + 0.0 + 0.75) / 4.0));
        assert_eq!(figures.accepts_per_100, Some(50.0));
        assert_eq!(figures.accept_rate, Some(2.0 / 3.0));
        assert_eq!(figures.show_rate, Some(4.0 / 6.0));
        assert_eq!(
            figures.recorded,
            Recorded {
                n: 5,
                reward_mean: Some(1.25 / 5.0)
            }
        );
    }

    #[test]
    fn an_arm_that_declines_more_gains_nothing_from_silent_developers() {
        // The same pauses, shown and right or wrong at random, against declining: the silent fifth is left out of both.
        let silent = |n: usize| n.is_multiple_of(5);
        let decliner = (0..100)
            .map(|n| outcome(n, "champion", Verdict::Declined, !silent(n)))
            .collect::<Vec<_>>();
        let shower = (0..100)
            .map(|n| outcome(n, "base", Verdict::Wrong, !silent(n)))
            .collect::<Vec<_>>();
        assert_eq!(figures(decliner.iter(), 0.25).n, figures(shower.iter(), 0.25).n);
    }

    #[test]
    fn both_arms_are_in_the_report_even_when_nothing_happened() {
        let arms = arms([].iter(), 0.25);
        assert_eq!(arms.keys().collect::<Vec<_>>(), ["base", "champion"]);
        assert_eq!(arms["base"].reward_mean, None);
    }

    #[test]
    fn the_difference_is_learning_minus_frozen() {
        let mut outcomes = Vec::new();
        for user in 0..20 {
            let arm = if user < 10 { LEARNING } else { FROZEN };
            for nth in 0..10 {
                let right = nth < if arm == LEARNING { 5 + user % 2 } else { 2 + user % 2 };
                outcomes.push(outcome(
                    user,
                    arm,
                    if right { Verdict::Right } else { Verdict::Wrong },
                    true,
                ));
            }
        }
        let reward = difference(&outcomes, Measure::Reward, 0.25).unwrap();
        assert!((reward.mean - 0.3).abs() < 1e-9, "{reward:?}");
        assert!(reward.ci95[0] > 0.2 && reward.ci95[1] < 0.4, "{reward:?}");
        let accepts = difference(&outcomes, Measure::Accepts, 0.25).unwrap();
        assert!((accepts.mean - 30.0).abs() < 1e-9, "{accepts:?}");
        assert!(
            difference(&outcomes[..100], Measure::Reward, 0.25).is_none(),
            "one arm alone has no difference"
        );
    }

    #[test]
    fn thirds_split_the_run_by_the_time_of_the_pause() {
        let outcomes = [0, 19, 20, 39, 40, 59, 60].map(|second| Outcome {
            at: Duration::from_secs(second),
            ..outcome(1, "base", Verdict::Right, true)
        });
        assert_eq!(
            thirds(outcomes.to_vec(), Duration::from_secs(60)).map(|third| third.len()),
            [2, 2, 3]
        );
    }

    #[test]
    fn versions_are_listed_with_their_answers_by_arm() {
        let mut outcomes = vec![
            outcome(1, "base", Verdict::Right, true),
            outcome(2, "champion", Verdict::Right, true),
        ];
        outcomes.push(Outcome {
            version: 2,
            root: "bb".to_owned(),
            ..outcomes[1].clone()
        });
        let served = versions_served(&outcomes);
        assert_eq!(served.len(), 2);
        assert_eq!(
            served[0].answers,
            BTreeMap::from([("base".to_owned(), 1), ("champion".to_owned(), 1)])
        );
        assert_eq!((served[1].version, served[1].root.as_str()), (2, "bb"));
    }

    #[test]
    fn quantiles_are_by_nearest_rank() {
        assert_eq!(quantile(vec![3.0, 1.0, 2.0, 4.0], 0.5), Some(2.0));
        assert_eq!(quantile(vec![3.0, 1.0], 0.95), Some(3.0));
        assert_eq!(quantile(vec![], 0.5), None);
    }
}
