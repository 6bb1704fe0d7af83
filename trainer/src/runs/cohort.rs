//! The cohort of the next step while it fills: which generations joined, and when. The learner has
//! the sums of their gradients. Nothing here is durable; after a restart the cohort fills from the
//! same rows.

use crate::learn::sample::Sample;
use serde::Serialize;
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
    members: Vec<Member>,
    started: Instant,
    first_joined: Option<Instant>,
    last_joined: Option<Instant>,
}

#[derive(Debug)]
struct Member {
    generation: Uuid,
    class: String,
    reward: f64,
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
            members: Vec::new(),
            started: Instant::now(),
            first_joined: None,
            last_joined: None,
        }
    }

    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// How many members have a gradient.
    pub fn informative(&self) -> usize {
        self.members.iter().filter(|member| member.informative).count()
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

    /// Adds samples, each with its advantage. Members are sorted by generation, whenever they
    /// joined.
    pub fn join<'a>(&mut self, samples: impl IntoIterator<Item = (&'a Sample, f64)>) {
        let now = Instant::now();
        self.first_joined.get_or_insert(now);
        self.last_joined = Some(now);
        self.members
            .extend(samples.into_iter().map(|(sample, advantage)| Member {
                generation: sample.generation,
                class: sample.class.clone(),
                reward: sample.reward,
                informative: is_informative(sample, advantage),
            }));
        self.members.sort_by_key(|member| member.generation);
    }

    /// In ascending order.
    pub fn generations(&self) -> Vec<Uuid> {
        self.members.iter().map(|member| member.generation).collect()
    }

    /// In the order of [`generations`](Self::generations).
    pub fn classes_and_rewards(&self) -> (Vec<&str>, Vec<f64>) {
        self.members.iter().map(|m| (m.class.as_str(), m.reward)).unzip()
    }

    /// Timings of the step, called as soon as it is computed. `guard`: seconds spent on the guards.
    pub fn timings(&self, guard: f64) -> Timings {
        let first = self.first_joined.unwrap_or(self.started);
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
        assert_eq!(cohort.classes_and_rewards().1, [0.75, 0.0, -0.25]);
        assert_eq!(cohort.len(), 3);
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
