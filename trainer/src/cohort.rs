//! The cohort of the next step while it fills: which trajectories joined, and when. The learner has
//! the sums of their gradients. Nothing here is durable; after a restart the cohort fills from the
//! same rows.

use runs::advantage::Credit;
use runs::options::Realtime;
use runs::publish::run_state::Typed;
use runs::sample::{Sample, Trajectory, Turn};
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Instant;
use uuid::Uuid;

/// Where the time of a step went before its publication, seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Timings {
    /// From the previous version to the first trajectory of the cohort: traffic, horizon, closing.
    pub wait: f64,
    /// From then until the cohort was full. Most computing overlaps with it.
    pub collect: f64,
    /// Computing after the cohort was full: the last trajectories and the update.
    pub compute_tail: f64,
    /// Measuring the update for the guards.
    pub guard: f64,
}

#[derive(Debug)]
pub(crate) struct Cohort {
    members: BTreeMap<Trajectory, Member>,
    /// Rewards of trajectories without a gradient that it did not need while it waited for others.
    left_out: Vec<f64>,
    /// Trained ones of its members, and those of them that an older version sampled.
    tokens: usize,
    stale_tokens: usize,
    /// Samples that users typed.
    typed: BTreeMap<Uuid, Typed>,
    started: Instant,
    first_arrived: Option<Instant>,
    last_joined: Option<Instant>,
}

/// A trajectory: a generation, or the turns of an episode that are trained on, all from one call of
/// [`Cohort::join`].
#[derive(Debug, Default)]
struct Member {
    /// In ascending order.
    generations: Vec<Uuid>,
    class: String,
    reward: f64,
    /// In the order of `generations`.
    turns: Vec<Option<Turn>>,
    informative: bool,
}

/// Whether a sample has a gradient. One whose advantage is not a number counts, so that a guard
/// finds it.
pub(crate) fn is_informative(sample: &Sample, advantage: f64) -> bool {
    advantage != 0.0 && sample.trained_tokens() > 0
}

impl Cohort {
    /// An empty cohort. Its waiting time starts now.
    pub fn new() -> Self {
        Cohort {
            members: BTreeMap::new(),
            left_out: vec![],
            tokens: 0,
            stale_tokens: 0,
            typed: BTreeMap::new(),
            started: Instant::now(),
            first_arrived: None,
            last_joined: None,
        }
    }

    /// How many trajectories it has.
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// How many trained tokens they have.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    pub fn stale_tokens(&self) -> usize {
        self.stale_tokens
    }

    /// Those that users typed.
    pub fn typed(&self) -> &BTreeMap<Uuid, Typed> {
        &self.typed
    }

    /// How many trajectories make it full: `cohort_size`, or those that it has if it has enough tokens or
    /// has filled for long enough.
    pub fn size(&self, options: &Realtime) -> usize {
        let tokens = options.cohort_tokens.is_some_and(|enough| self.tokens as u64 >= enough);
        let seconds = options.cohort_seconds;
        let seconds = seconds.is_some_and(|enough| self.started.elapsed().as_secs_f64() >= enough);
        let size = options.cohort_size as usize;
        match (tokens || seconds) && self.len() > 0 {
            true => size.min(self.len()),
            false => size,
        }
    }

    /// How many of them have a gradient.
    pub fn informative(&self) -> usize {
        self.members.values().filter(|member| member.informative).count()
    }

    /// How many more may join a cohort of `size`. 0: it is full.
    ///
    /// A full cohort has at least a quarter of informative members: a step on fewer would follow
    /// one or two samples, or momentum alone, as far as it follows a whole cohort.
    pub fn room(&self, size: usize) -> usize {
        match size.saturating_sub(self.len()) {
            0 => size.div_ceil(4).saturating_sub(self.informative()),
            room => room,
        }
    }

    /// Samples have come that are checked before they join.
    pub fn arrive(&mut self) {
        self.first_arrived.get_or_insert_with(Instant::now);
    }

    /// Adds samples, each with its advantage. The turns of an episode are one member.
    pub fn join<'a>(&mut self, samples: impl IntoIterator<Item = (&'a Sample, f64)>) {
        let now = Instant::now();
        self.first_arrived.get_or_insert(now);
        self.last_joined = Some(now);
        for (sample, advantage) in samples {
            let member = self.members.entry(sample.trajectory()).or_default();
            let position = member.generations.partition_point(|id| *id < sample.generation);
            member.generations.insert(position, sample.generation);
            member.turns.insert(position, sample.turn.clone());
            member.class.clone_from(&sample.class);
            self.tokens += sample.trained_tokens();
            if let Some(key) = sample.typed {
                let tokens = i32::try_from(sample.trained_tokens()).unwrap_or(i32::MAX);
                self.typed.insert(sample.generation, Typed { tokens, key });
            }
            if sample.staleness > 0 && sample.typed.is_none() {
                self.stale_tokens += sample.trained_tokens();
            }
            member.reward = sample.reward;
            member.informative |= is_informative(sample, advantage);
        }
    }

    /// Notes the rewards of trajectories that it does not need.
    pub fn leave_out(&mut self, rewards: Vec<f64>) {
        self.left_out.extend(rewards);
    }

    /// Rewards of its members and of those that were left out: without these, the mean would be of
    /// trajectories that were selected for having a gradient.
    pub fn rewards(&self) -> Vec<f64> {
        let members = self.members.values().map(|member| member.reward);
        members.chain(self.left_out.iter().copied()).collect()
    }

    /// In ascending order.
    pub fn generations(&self) -> Vec<Uuid> {
        let members = self.members.values();
        let mut generations: Vec<Uuid> = members.flat_map(|member| &member.generations).copied().collect();
        generations.sort_unstable();
        generations
    }

    /// The last generation of each trajectory, in ascending order.
    pub fn last_generations(&self) -> Vec<Uuid> {
        self.sorted().into_iter().map(|(last, _)| last).collect()
    }

    /// The names of the baselines that it updates, and the values that it updates them with. Each
    /// trajectory updates a baseline once, with the mean of what its generations are compared with it
    /// for. So a session of many turns moves a baseline no further than a short one.
    pub fn returns(&self, credit: Credit, discount: f64) -> (Vec<String>, Vec<f64>) {
        let mut returns = Vec::new();
        for (_, member) in self.sorted() {
            let mut means: BTreeMap<String, (f64, f64)> = BTreeMap::new();
            for turn in &member.turns {
                let one = credit.of(discount, &member.class, member.reward, turn.as_ref());
                let (mean, count) = means.entry(one.baseline).or_default();
                *count += 1.0;
                *mean += (one.value - *mean) / *count; // exact if all are equal
            }
            returns.extend(means.into_iter().map(|(baseline, (mean, _))| (baseline, mean)));
        }
        returns.into_iter().unzip()
    }

    /// By the last generation.
    fn sorted(&self) -> Vec<(Uuid, &Member)> {
        let members = self.members.values();
        let mut sorted: Vec<_> = members
            .filter_map(|member| Some((*member.generations.last()?, member)))
            .collect();
        sorted.sort_by_key(|(last, _)| *last);
        sorted
    }

    /// Timings of the step, called as soon as it is computed. `guard`: seconds spent on the guards.
    pub fn timings(&self, guard: f64) -> Timings {
        let first = self.first_arrived.unwrap_or(self.started);
        let full = self.last_joined.unwrap_or(first);
        Timings {
            wait: (first - self.started).as_secs_f64(),
            collect: (full - first).as_secs_f64(),
            compute_tail: (full.elapsed().as_secs_f64() - guard).max(0.0),
            guard,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(id: u128, reward: f64) -> Sample {
        Sample {
            generation: Uuid::from_u128(id),
            reward,
            ..Sample::example()
        }
    }

    #[test]
    fn members_are_sorted_by_generation() {
        let mut cohort = Cohort::new();
        cohort.join([(&sample(2, 0.75), 0.75), (&sample(5, -0.25), -0.25)]);
        cohort.join([(&sample(3, 0.0), 0.0)]);
        assert_eq!(cohort.generations(), [2, 3, 5].map(Uuid::from_u128));
        assert_eq!(cohort.last_generations(), cohort.generations());
        assert_eq!(cohort.returns(Credit::ToGo, 0.5).1, [0.75, 0.0, -0.25]);
        assert_eq!(cohort.len(), 3);
        cohort.leave_out(vec![0.0; 5]);
        assert_eq!(cohort.rewards(), [0.75, 0.0, -0.25, 0.0, 0.0, 0.0, 0.0, 0.0]);
        assert_eq!(cohort.len(), 3);
    }

    #[test]
    fn tokens_of_older_versions_are_counted() {
        let mut cohort = Cohort::new();
        let stale = Sample {
            staleness: 2,
            ..sample(6, 0.5)
        };
        cohort.join([(&sample(2, 0.5), 0.5), (&stale, 0.5)]);
        let tokens = stale.trained_tokens();
        assert_eq!((cohort.tokens(), cohort.stale_tokens()), (2 * tokens, tokens));
    }

    #[test]
    fn the_turns_of_an_episode_are_one_member() {
        let turn = |id: u128, index: usize| Sample {
            reward: 0.75,
            generation: Uuid::from_u128(id),
            ..Sample::example_of(9, index, &[None, Some(0.5), None])
        };
        let mut cohort = Cohort::new();
        cohort.join([(&turn(4, 2), 0.0), (&sample(3, -0.25), -0.25), (&turn(2, 1), 0.0)]);
        assert_eq!((cohort.len(), cohort.informative(), cohort.room(4)), (2, 1, 2));
        assert_eq!(cohort.generations(), [2, 3, 4].map(Uuid::from_u128));
        assert_eq!(cohort.last_generations(), [3, 4].map(Uuid::from_u128));
        let of_another_tenant = Sample {
            tenant: "b".into(),
            ..turn(5, 0)
        };
        cohort.join([(&of_another_tenant, 0.5)]);
        assert_eq!((cohort.len(), cohort.informative()), (3, 2));
        let class = |name: &str| name.replace('#', "\u{1f}");
        let names = |credit| cohort.returns(credit, 1.0).0.join(" ");
        let values = |credit| cohort.returns(credit, 1.0).1;
        // the reward of a trajectory counts once
        assert_eq!(values(Credit::Trajectory), [-0.25, 0.75, 0.75]);
        assert_eq!(names(Credit::Trajectory), "completion completion completion");
        assert_eq!(values(Credit::Turn), [-0.25, 0.75, 0.5, 0.75]);
        assert_eq!(
            names(Credit::Turn),
            class("completion completion completion#1 completion")
        );
        assert_eq!(values(Credit::ToGo), [-0.25, 1.25, 0.75, 1.25]);
        assert_eq!(
            names(Credit::ToGo),
            class("completion completion#1 completion#2 completion#0")
        );
    }

    #[test]
    fn a_session_of_many_turns_updates_each_baseline_once() {
        // turns 16 to 49 share a baseline; their rewards are 1 and −1 in turn, so their mean is 0
        let rewards: Vec<Option<f64>> = (0..50).map(|n| Some([1.0, -1.0][n % 2])).collect();
        let turns: Vec<Sample> = (0..50)
            .map(|index| Sample {
                generation: Uuid::from_u128(index as u128),
                reward: 0.5,
                ..Sample::example_of(9, index, &rewards)
            })
            .collect();
        let mut cohort = Cohort::new();
        cohort.join(turns.iter().map(|turn| (turn, 1.0)));
        let (names, values) = cohort.returns(Credit::Turn, 1.0);
        assert_eq!(names.len(), 17);
        let shared: Vec<f64> = names
            .iter()
            .zip(values)
            .filter(|(name, _)| name.ends_with("\u{1f}16"))
            .map(|(_, value)| value)
            .collect();
        assert!(matches!(shared[..], [mean] if mean.abs() < 1e-12), "{shared:?}");
        let (names, values) = cohort.returns(Credit::Trajectory, 1.0);
        assert_eq!((names, values), (vec!["completion".to_owned()], vec![0.5]));
    }

    #[test]
    fn a_cohort_is_full_when_a_quarter_of_its_size_is_informative() {
        let mut cohort = Cohort::new();
        let join = |cohort: &mut Cohort, ids: std::ops::Range<u128>, reward: f64| {
            for id in ids {
                cohort.join([(&sample(id, reward), reward)]);
            }
        };
        join(&mut cohort, 0..7, 0.0);
        assert_eq!(cohort.room(8), 1);
        join(&mut cohort, 7..8, -0.25);
        assert_eq!((cohort.informative(), cohort.room(8)), (1, 1), "one of two");
        let masked = Sample {
            mask: vec![false],
            ..sample(9, 0.75)
        };
        cohort.join([(&masked, 0.75)]);
        assert_eq!(cohort.room(8), 1, "no token of it is trained on");
        join(&mut cohort, 10..11, 0.75);
        assert_eq!((cohort.len(), cohort.room(8)), (10, 0));
        join(&mut cohort, 20..21, f64::NAN);
        assert_eq!(cohort.informative(), 3);
    }

    #[test]
    fn the_compute_tail_excludes_the_guard() {
        let mut cohort = Cohort::new();
        cohort.join([(&sample(1, 0.0), 0.0)]);
        let timings = cohort.timings(1e6);
        assert_eq!((timings.collect, timings.compute_tail, timings.guard), (0.0, 0.0, 1e6));
    }
}
