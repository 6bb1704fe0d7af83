//! From what happened at each pause to the figures of the report. Pure.
//!
//! What counts: whether a developer answers is drawn with the pause, before anything is shown. Reward, accept rate and
//! accepts per 100 pauses are taken over the pauses whose developer answers, declined ones included; the others are left
//! out *whatever the policy did there*, and counted. (Leaving out only the unanswered suggestions would count declines
//! 1.25 times and so favour the arm that declines more.) The show rate is over all pauses. `recorded` is the other
//! reading, every reward that training also sees, for comparison with the trajectory table. (Half of this file is tests with
//! figures counted by hand, which are read beside what they count.)

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

impl Verdict {
    /// What it is worth at the price `tau` of showing.
    pub fn reward(self, tau: f64) -> f64 {
        match self {
            Verdict::Declined => 0.0,
            Verdict::Right => 1.0 - tau,
            Verdict::Wrong => -tau,
        }
    }
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
    /// What the developer really thinks of it.
    pub verdict: Verdict,
    /// What they say of it, if they answer: the same, but for a control.
    pub told: Verdict,
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
            told: verdict,
            answers,
            latency: Duration::ZERO,
        }
    }

    /// Reward of this pause at the price `tau` of showing.
    pub fn reward(&self, tau: f64) -> f64 {
        self.verdict.reward(tau)
    }

    /// The reward that the trajectory of this pause should carry; None: censored, for want of an answer.
    pub fn recorded_reward(&self, tau: f64) -> Option<f64> {
        (self.answers || self.verdict == Verdict::Declined).then(|| self.told.reward(tau))
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
    pub accepts_per_100_ci95: Option<[f64; 2]>,
    /// Accepted, of what was shown to a developer who answers.
    pub accept_rate: Option<f64>,
    pub accept_rate_ci95: Option<[f64; 2]>,
    /// Shown, of all pauses.
    pub show_rate: Option<f64>,
    pub show_rate_ci95: Option<[f64; 2]>,
    pub recorded: Recorded,
}

/// Every reward that training sees: all declines, and the answers that were given.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Recorded {
    pub n: u64,
    pub reward_mean: Option<f64>,
}

/// What one user contributes to each mean.
#[derive(Default)]
struct User {
    reward: Cluster,
    accepts: Cluster,
    accepts_of_shown: Cluster,
    shown: Cluster,
}

impl User {
    fn add(&mut self, outcome: &Outcome, tau: f64) {
        let shown = outcome.verdict != Verdict::Declined;
        let accepted = unit(outcome.verdict == Verdict::Right);
        self.shown.add(unit(shown));
        if outcome.answers {
            self.reward.add(outcome.reward(tau));
            self.accepts.add(100.0 * accepted);
        }
        if outcome.answers && shown {
            self.accepts_of_shown.add(accepted);
        }
    }
}

fn unit(yes: bool) -> f64 {
    f64::from(u8::from(yes))
}

/// The figures of one arm's outcomes.
pub fn figures<'a>(outcomes: impl Iterator<Item = &'a Outcome>, tau: f64) -> Figures {
    let mut figures = Figures::default();
    let mut recorded_sum = 0.0;
    let mut users = BTreeMap::<usize, User>::new();
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
        users.entry(outcome.user).or_default().add(outcome, tau);
    }
    let ci95 = |of: fn(&User) -> Cluster| {
        let clusters = users.values().map(of).collect::<Vec<_>>();
        interval::ratio(&clusters).map(|estimate| estimate.interval().ci95)
    };
    figures.reward_ci95 = ci95(|user| user.reward);
    figures.accepts_per_100_ci95 = ci95(|user| user.accepts);
    figures.accept_rate_ci95 = ci95(|user| user.accepts_of_shown);
    figures.show_rate_ci95 = ci95(|user| user.shown);
    figures.users = users.len();
    figures.shown = figures.pauses - figures.declined;
    figures.n = users.values().map(|user| user.reward.n).sum::<f64>() as u64;
    figures.reward_mean = share(users.values().map(|user| user.reward.sum).sum(), figures.n);
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

/// A stretch of the run, and what both arms did in it.
#[derive(Debug, Clone)]
pub struct Stretch {
    pub from: Duration,
    pub until: Duration,
    pub arms: BTreeMap<String, Figures>,
    pub difference: Option<Interval>,
}

/// The first `length` of a run in `count` stretches of equal length, by the time of the pause. A pause at the very end, or
/// later, counts in the last one.
pub fn timeline(outcomes: &[Outcome], length: Duration, count: u32, tau: f64) -> Vec<Stretch> {
    let width = length / count.max(1);
    let mut stretches = vec![Vec::<&Outcome>::new(); count as usize];
    for outcome in outcomes {
        let nth = (outcome.at.as_secs_f64() / width.as_secs_f64()) as usize;
        if let Some(stretch) = stretches.get_mut(nth.min(count.saturating_sub(1) as usize)) {
            stretch.push(outcome);
        }
    }
    let stretches = (0..count).zip(stretches);
    stretches
        .map(|(nth, outcomes)| Stretch {
            from: width * nth,
            until: width * (nth + 1),
            arms: arms(outcomes.iter().copied(), tau),
            difference: difference(outcomes, Measure::Reward, tau),
        })
        .collect()
}

/// Consecutive versions, and what they did together.
#[derive(Debug, Clone, Serialize)]
pub struct Versions {
    pub first: i64,
    pub last: i64,
    pub figures: Figures,
}

/// One arm's versions in groups with at least `n_min` answering developers each: what is left at the end joins the last.
pub fn by_version(outcomes: &[Outcome], arm: &str, n_min: usize, tau: f64) -> Vec<Versions> {
    let mut by_version = BTreeMap::<i64, Vec<&Outcome>>::new();
    for outcome in outcomes.iter().filter(|outcome| outcome.arm == arm) {
        by_version.entry(outcome.version).or_default().push(outcome);
    }
    let answering = |outcomes: &[&Outcome]| outcomes.iter().filter(|outcome| outcome.answers).count();
    let mut groups = Vec::<Vec<&Outcome>>::new();
    for outcomes in by_version.into_values() {
        match groups.last_mut() {
            Some(group) if answering(group) < n_min => group.extend(outcomes),
            _ => groups.push(outcomes),
        }
    }
    if groups.len() > 1
        && let Some(rest) = groups.pop_if(|group| answering(group) < n_min)
        && let Some(last) = groups.last_mut()
    {
        last.extend(rest);
    }
    let versions = |group: Vec<&Outcome>| {
        let (first, last) = (group.first()?.version, group.last()?.version);
        let figures = figures(group.into_iter(), tau);
        Some(Versions { first, last, figures })
    };
    groups.into_iter().filter_map(versions).collect()
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
pub fn difference<'a>(outcomes: impl IntoIterator<Item = &'a Outcome>, measure: Measure, tau: f64) -> Option<Interval> {
    let mut users = BTreeMap::<usize, (&str, Cluster)>::new();
    for outcome in outcomes.into_iter().filter(|outcome| outcome.answers) {
        let (arm, cluster) = users.entry(outcome.user).or_insert((&outcome.arm, Cluster::default()));
        if *arm == outcome.arm {
            cluster.add(match measure {
                Measure::Reward => outcome.reward(tau),
                Measure::Accepts => 100.0 * unit(outcome.verdict == Verdict::Right),
            });
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
            told: verdict,
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
    fn every_rate_has_an_interval_by_user() {
        use Verdict::{Declined, Right, Wrong};
        let of = |user, verdicts: [Verdict; 4]| verdicts.map(|verdict| outcome(user, "base", verdict, true));
        let outcomes = [
            of(1, [Right, Right, Wrong, Declined]),
            of(2, [Right, Wrong, Wrong, Wrong]),
            of(3, [Right, Right, Declined, Declined]),
        ];
        let figures = figures(outcomes.as_flattened().iter(), 0.25);
        // By hand, with t of 2 degrees of freedom. Accepts: R = 5/12; residuals 1/3, −2/3, 1/3; variance 3/2 · (2/3) / 144.
        let half = |variance: f64| {
            let [low, high] = interval::Estimate {
                mean: 0.0,
                variance,
                freedom: 2.0,
            }
            .interval()
            .ci95;
            (high - low) / 2.0
        };
        let [low, high] = figures.accepts_per_100_ci95.unwrap();
        assert!((low + high - 2.0 * 500.0 / 12.0).abs() < 1e-9);
        assert!((high - low - 2.0 * 100.0 * half(1.0 / 144.0)).abs() < 1e-9);
        // Of shown: R = 5/9; residuals 2 − 15/9, 1 − 20/9, 2 − 10/9 = 1/3, −11/9, 8/9; squares 9/81 + 121/81 + 64/81.
        let [low, high] = figures.accept_rate_ci95.unwrap();
        assert!((low + high - 2.0 * 5.0 / 9.0).abs() < 1e-9);
        assert!((high - low - 2.0 * half(1.5 * 194.0 / 81.0 / 81.0)).abs() < 1e-9);
        // Shown: R = 9/12; residuals 0, 1, −1.
        let [low, high] = figures.show_rate_ci95.unwrap();
        assert!((low + high - 1.5).abs() < 1e-9);
        assert!((high - low - 2.0 * half(1.5 * 2.0 / 144.0)).abs() < 1e-9);
    }

    #[test]
    fn the_timeline_has_stretches_of_equal_length_and_loses_no_pause() {
        let outcomes = [0.0, 9.9, 10.0, 25.0, 39.9, 40.0, 41.0].map(|second| Outcome {
            at: Duration::from_secs_f64(second),
            ..outcome(1, LEARNING, Verdict::Right, true)
        });
        let timeline = timeline(&outcomes, Duration::from_secs(40), 4, 0.25);
        assert_eq!(
            timeline
                .iter()
                .map(|stretch| stretch.arms[LEARNING].pauses)
                .collect::<Vec<_>>(),
            [2, 1, 1, 3]
        );
        assert_eq!(
            (timeline[1].from, timeline[1].until),
            (Duration::from_secs(10), Duration::from_secs(20))
        );
        assert_eq!(
            timeline[1].arms[FROZEN].reward_mean, None,
            "an arm that did nothing is there, without figures"
        );
    }

    #[test]
    fn versions_are_grouped_until_each_group_has_enough_answers() {
        let of = |version, n: usize| {
            let outcomes = (0..n).map(move |nth| Outcome {
                version,
                ..outcome(nth, LEARNING, Verdict::Right, true)
            });
            outcomes.collect::<Vec<_>>()
        };
        let groups = |sizes: &[usize]| {
            let outcomes = (1..)
                .zip(sizes)
                .flat_map(|(version, n)| of(version, *n))
                .collect::<Vec<_>>();
            by_version(&outcomes, LEARNING, 10, 0.25)
                .iter()
                .map(|group| (group.first, group.last, group.figures.pauses))
                .collect::<Vec<_>>()
        };
        assert_eq!(groups(&[12, 4, 3, 5, 10]), [(1, 1, 12), (2, 4, 12), (5, 5, 10)]);
        assert_eq!(
            groups(&[12, 4, 3]),
            [(1, 3, 19)],
            "too few at the end join the group before"
        );
        assert_eq!(groups(&[3]), [(1, 1, 3)], "a single group may be small");
        assert_eq!(groups(&[]), []);
        let silent = [
            outcome(1, LEARNING, Verdict::Right, false),
            outcome(2, FROZEN, Verdict::Right, true),
        ];
        assert_eq!(by_version(&silent, LEARNING, 10, 0.25)[0].figures.pauses, 1);
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
