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

    /// Adds samples. Members are sorted by generation, whenever they joined.
    pub fn join(&mut self, samples: &[Sample]) {
        let now = Instant::now();
        self.first_joined.get_or_insert(now);
        self.last_joined = Some(now);
        self.members.extend(samples.iter().map(|sample| Member {
            generation: sample.generation,
            class: sample.class.clone(),
            reward: sample.reward,
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
        cohort.join(&[sample(2, 0.75), sample(5, -0.25)]);
        cohort.join(&[sample(3, 0.0)]);
        assert_eq!(cohort.generations(), [2, 3, 5].map(Uuid::from_u128));
        assert_eq!(cohort.classes_and_rewards().1, [0.75, 0.0, -0.25]);
        assert_eq!(cohort.len(), 3);
    }

    #[test]
    fn the_compute_tail_excludes_the_guard() {
        let mut cohort = Cohort::new();
        cohort.join(&[sample(1, 0.0)]);
        let timings = cohort.timings(1e6);
        assert_eq!((timings.collect, timings.compute_tail, timings.guard), (0.0, 0.0, 1e6));
    }
}
