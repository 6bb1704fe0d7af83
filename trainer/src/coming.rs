//! The cohort that the next step will train on, while it fills: who has joined, and when. What their gradients add up to is
//! the learner's. Nothing of it is durable: whoever opens the run again fills a cohort from the same rows.

use crate::sample::Sample;
use serde::Serialize;
use std::time::Instant;
use uuid::Uuid;

/// Where the time of a step went before it could be published, seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Timings {
    /// From the version before to the first trajectory that joined: traffic, horizon, closing.
    pub wait: f64,
    /// From then until the cohort was full, with most of its computing beside it.
    pub collect: f64,
    /// What was then left to compute: the last trajectories, the update.
    pub compute_tail: f64,
    /// Measuring the update.
    pub guard: f64,
}

/// Who has joined.
#[derive(Debug)]
pub(crate) struct Coming {
    members: Vec<Member>,
    began: Instant,
    first: Option<Instant>,
    last: Option<Instant>,
}

#[derive(Debug)]
struct Member {
    generation: Uuid,
    class: String,
    reward: f64,
}

impl Coming {
    /// Nobody yet.
    pub fn new() -> Self {
        Coming {
            members: Vec::new(),
            began: Instant::now(),
            first: None,
            last: None,
        }
    }

    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Notes who joins now. Members are kept in the order of their generations, whenever they joined.
    pub fn join(&mut self, samples: &[Sample]) {
        let now = Instant::now();
        self.first.get_or_insert(now);
        self.last = Some(now);
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

    /// Now that the step is computed; `guard` of it was spent on measuring the update.
    pub fn timings(&self, guard: f64) -> Timings {
        let first = self.first.unwrap_or(self.began);
        let full = self.last.unwrap_or(first);
        Timings {
            wait: (first - self.began).as_secs_f64(),
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
            class: "completion".into(),
            group: None,
            version: 1,
            prompt: vec![1],
            tokens: vec![2],
            logprobs: vec![-1.0],
            mask: vec![true],
            temperature: 1.0,
            drawing: None,
            experts: None,
            reward,
            suppressed: false,
            weight: 1.0,
        }
    }

    #[test]
    fn members_stand_in_the_order_of_their_generations() {
        let mut coming = Coming::new();
        coming.join(&[sample(2, 0.75), sample(5, -0.25)]);
        coming.join(&[sample(3, 0.0)]);
        assert_eq!(coming.generations(), [2, 3, 5].map(Uuid::from_u128));
        assert_eq!(coming.classes_and_rewards().1, [0.75, 0.0, -0.25]);
        assert_eq!(coming.len(), 3);
    }

    #[test]
    fn the_guard_is_no_part_of_the_tail() {
        let mut coming = Coming::new();
        coming.join(&[sample(1, 0.0)]);
        let timings = coming.timings(1e6);
        assert_eq!((timings.collect, timings.compute_tail, timings.guard), (0.0, 0.0, 1e6));
    }
}
