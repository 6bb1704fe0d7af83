//! From sessions to the figures of each arm. Pure.
//!
//! Success is counted over all sessions, because the demo knows the user's text. The reward is what
//! the trainer would see, so it is over the sessions whose users give a verdict. Both are clustered
//! by user.

use std::{collections::BTreeMap, time::Duration};

use report::{Clusters, Interval, number::percent};
use serde::Serialize;
use uuid::Uuid;

use super::task::{Answer, TURNS_MAX};
use crate::{
    client::Suggestion,
    progress::Progress,
    stats::{FOLLOWING, FROZEN, LEARNING, Reaction, unit},
    terminal::{clock, problems},
};

/// One session that is over.
#[derive(Debug, Clone)]
pub struct Session {
    pub user: usize,
    /// When it began, since the start of the run.
    pub at: Duration,
    pub answer: Answer,
    /// That answered the first turn.
    pub arm: String,
    pub turns: usize,
    pub declined: usize,
    /// The user's text was reached, in the last turn.
    pub solved: bool,
    /// The generation of each turn, and how long it took.
    pub answers: Vec<(Uuid, Duration)>,
    /// Arms of later turns differ: weights or salt were changed meanwhile.
    pub changed_arm: bool,
}

impl Session {
    pub fn begin(user: usize, at: Duration, answer: Answer, arm: &str) -> Self {
        Self {
            user,
            at,
            answer,
            arm: arm.to_owned(),
            turns: 0,
            declined: 0,
            solved: false,
            answers: Vec::new(),
            changed_arm: false,
        }
    }

    pub fn add(&mut self, suggestion: &Suggestion, reaction: Reaction, latency: Duration) {
        self.turns += 1;
        self.declined += usize::from(reaction == Reaction::Declined);
        self.solved = reaction == Reaction::Right;
        self.answers.push((suggestion.generation_id, latency));
        self.changed_arm |= self.arm != suggestion.arm;
    }
}

/// What a verdict is worth.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Rewards {
    pub accept: f64,
    pub reject: f64,
}

#[derive(Debug, Clone, Copy)]
enum Measure {
    Success,
    Reward(Rewards),
}

impl Measure {
    /// `None`: the session does not count.
    fn of(self, session: &Session) -> Option<f64> {
        match self {
            Measure::Success => Some(unit(session.solved)),
            Measure::Reward(rewards) => (session.answer == Answer::Verdict).then_some(match session.solved {
                true => rewards.accept,
                false => rewards.reject,
            }),
        }
    }
}

fn clusters<'a>(sessions: impl Iterator<Item = &'a Session>, measure: Measure) -> Clusters<usize> {
    sessions
        .filter_map(|session| Some((session.user, measure.of(session)?)))
        .collect()
}

/// What one arm did. `None` where nothing was counted.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct ArmStats {
    pub users: usize,
    pub sessions: usize,
    pub verdicts: u64,
    /// Fraction of the sessions in which the user's text was reached.
    pub success: Option<f64>,
    pub success_ci95: Option<[f64; 2]>,
    pub reward: Option<f64>,
    pub reward_ci95: Option<[f64; 2]>,
    /// Fraction of the sessions that were solved in the first, second, … turn.
    pub success_by_turn: [f64; TURNS_MAX],
    pub turns_per_session: Option<f64>,
    pub turns_per_success: Option<f64>,
    /// Fraction of the turns in which nothing was shown.
    pub declined: Option<f64>,
    /// Fraction of what was shown that was the user's text.
    pub right_of_shown: Option<f64>,
}

impl ArmStats {
    fn of(sessions: &[&Session], rewards: Rewards) -> Self {
        let all = || sessions.iter().copied();
        let (success, reward) = (
            clusters(all(), Measure::Success),
            clusters(all(), Measure::Reward(rewards)),
        );
        let solved = || all().filter(|session| session.solved);
        let turns: usize = all().map(|session| session.turns).sum();
        let declined: usize = all().map(|session| session.declined).sum();
        let turns_of_solved: usize = solved().map(|session| session.turns).sum();
        let share = |n: usize, of: usize| (of > 0).then(|| n as f64 / of as f64);
        let in_turn = |turn| solved().filter(|session| session.turns == turn + 1).count();
        let ci95 = |clusters: &Clusters<usize>| clusters.interval().map(|interval| interval.ci95);
        Self {
            users: success.len(),
            sessions: sessions.len(),
            verdicts: reward.n(),
            success: success.mean(),
            success_ci95: ci95(&success),
            reward: reward.mean(),
            reward_ci95: ci95(&reward),
            success_by_turn: std::array::from_fn(|turn| share(in_turn(turn), sessions.len()).unwrap_or_default()),
            turns_per_session: share(turns, sessions.len()),
            turns_per_success: share(turns_of_solved, solved().count()),
            declined: share(declined, turns),
            right_of_shown: share(solved().count(), turns - declined),
        }
    }
}

/// An arm minus the frozen arm. `None` with fewer than two users in either.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Difference {
    pub success: Option<Interval>,
    pub reward: Option<Interval>,
}

/// What the arms did in a part of the run, or in all of it.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Part {
    /// The three arms of the demo are always present.
    pub arms: BTreeMap<String, ArmStats>,
    /// Minus the frozen arm.
    pub learner: Difference,
    pub champion: Difference,
}

impl Part {
    /// Users whose sessions are of several arms are left out: the difference takes arms as independent.
    pub fn of<'a>(sessions: impl Iterator<Item = &'a Session>, rewards: Rewards) -> Self {
        let sessions: Vec<&Session> = sessions.collect();
        let mut arm_of = BTreeMap::<usize, Option<&str>>::new();
        for session in &sessions {
            let arm = arm_of.entry(session.user).or_insert(Some(&session.arm));
            *arm = arm.filter(|arm| *arm == session.arm && !session.changed_arm);
        }
        let mut by_arm = BTreeMap::<&str, Vec<&Session>>::from([LEARNING, FOLLOWING, FROZEN].map(|arm| (arm, vec![])));
        for session in sessions.into_iter().filter(|session| arm_of[&session.user].is_some()) {
            by_arm.entry(&session.arm).or_default().push(session);
        }
        let minus_frozen = |arm: &str, measure| {
            let estimate = |arm: &str| clusters(by_arm.get(arm)?.iter().copied(), measure).estimate();
            Some(estimate(arm)?.minus(estimate(FROZEN)?))
        };
        let difference = |arm| Difference {
            success: minus_frozen(arm, Measure::Success),
            reward: minus_frozen(arm, Measure::Reward(rewards)),
        };
        Self {
            learner: difference(LEARNING),
            champion: difference(FOLLOWING),
            arms: by_arm
                .iter()
                .map(|(arm, sessions)| ((*arm).to_owned(), ArmStats::of(sessions, rewards)))
                .collect(),
        }
    }

    /// The first and the second half of a run of this length, by the begin of each session.
    pub fn halves(sessions: &[Session], length: Duration, rewards: Rewards) -> [Self; 2] {
        [true, false].map(|first| {
            let half = sessions.iter().filter(|session| (session.at < length / 2) == first);
            Self::of(half, rewards)
        })
    }
}

/// The run so far in one line.
pub fn line(elapsed: Duration, progress: &Progress<Session>) -> String {
    let mut parts = vec![format!("{} {} sessions", clock(elapsed), progress.outcomes.len())];
    for arm in [LEARNING, FOLLOWING, FROZEN] {
        let of_arm = progress.outcomes.iter().filter(|session| session.arm == arm);
        parts.push(format!(
            "{arm} {}",
            percent(clusters(of_arm, Measure::Success).mean(), 0)
        ));
    }
    parts.extend(problems(progress));
    parts.join(" | ")
}

#[cfg(test)]
pub mod tests {
    use super::*;

    const REWARDS: Rewards = Rewards {
        accept: 1.0,
        reject: -0.5,
    };

    pub fn session(user: usize, arm: &str, turns: usize, solved: bool) -> Session {
        Session {
            turns,
            solved,
            ..Session::begin(user, Duration::ZERO, Answer::Verdict, arm)
        }
    }

    #[test]
    fn the_figures_of_an_arm_match_a_count_by_hand() {
        let silent = Session {
            answer: Answer::Nothing,
            ..session(2, "base", 2, true)
        };
        let declining = Session {
            declined: 3,
            ..session(2, "base", 4, false)
        };
        let sessions = [
            session(1, "base", 1, true),
            session(1, "base", 4, false),
            silent,
            declining,
        ];
        let stats = ArmStats::of(&sessions.iter().collect::<Vec<_>>(), REWARDS);
        assert_eq!((stats.users, stats.sessions, stats.verdicts), (2, 4, 3));
        assert_eq!((stats.success, stats.reward), (Some(0.5), Some(0.0)));
        assert_eq!(stats.success_by_turn, [0.25, 0.25, 0.0, 0.0]);
        assert_eq!(
            (stats.turns_per_session, stats.turns_per_success),
            (Some(11.0 / 4.0), Some(1.5))
        );
        assert_eq!(
            (stats.declined, stats.right_of_shown),
            (Some(3.0 / 11.0), Some(2.0 / 8.0))
        );
        assert!(stats.success_ci95.is_some() && stats.reward_ci95.is_some());
    }

    #[test]
    fn differences_are_against_the_frozen_arm_and_need_two_users_in_each() {
        let mut sessions = Vec::new();
        for user in 0..30 {
            let arm = [LEARNING, FROZEN, FOLLOWING][user / 10];
            let solved = if arm == LEARNING { 5 + user % 2 } else { 2 + user % 2 };
            sessions.extend((0..10).map(|nth| session(user, arm, 2, nth < solved)));
        }
        let part = Part::of(sessions.iter(), REWARDS);
        let learner = part.learner.success.unwrap();
        assert!(
            (learner.mean - 0.3).abs() < 1e-9 && learner.is_above_zero(),
            "{learner:?}"
        );
        assert!((part.learner.reward.unwrap().mean - 0.45).abs() < 1e-9);
        assert!(part.champion.success.unwrap().mean.abs() < 1e-9);
        sessions.push(session(0, FROZEN, 2, true));
        let without_one = Part::of(sessions.iter(), REWARDS);
        let users = |arm: &str| without_one.arms[arm].users;
        assert_eq!(
            (users(LEARNING), users(FROZEN)),
            (9, 10),
            "a user of two arms is in none"
        );
        let alone = Part::of(sessions[..100].iter(), REWARDS);
        assert_eq!(alone.learner, Difference::default());
        assert_eq!(alone.arms.keys().collect::<Vec<_>>(), ["base", "champion", "learner"]);
    }

    #[test]
    fn sessions_are_in_one_half_each_and_those_that_changed_arm_in_none() {
        let at = |second, changed_arm| Session {
            at: Duration::from_secs(second),
            changed_arm,
            ..session(usize::from(changed_arm), LEARNING, 1, true)
        };
        let sessions = [at(0, false), at(9, false), at(10, false), at(25, false), at(3, true)];
        let halves = Part::halves(&sessions, Duration::from_secs(20), REWARDS);
        assert_eq!(halves.map(|half| half.arms[LEARNING].sessions), [2, 2]);
    }
}
