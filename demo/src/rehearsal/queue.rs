//! Trajectories that wait to be trained on. As in the trainer, a cohort is full when a quarter of it has a
//! gradient, and what has none and comes after its places are taken is dropped.

use std::collections::VecDeque;

use super::Trajectory;

pub struct Waiting {
    /// When its answer is in, simulated seconds.
    pub ready: f64,
    /// How many steps its version had behind it.
    pub version: u64,
    pub trajectory: Trajectory,
}

/// In the order in which they were sampled.
#[derive(Default)]
pub struct Queue(VecDeque<Waiting>);

impl Queue {
    pub fn push(&mut self, one: Waiting) {
        self.0.push_back(one);
    }

    /// Drops those that are more than so many steps behind the head. Returns how many.
    pub fn drop_stale(&mut self, head: u64, staleness_max: u64) -> usize {
        let before = self.0.len();
        self.0.retain(|one| head - one.version <= staleness_max);
        before - self.0.len()
    }

    /// Takes the oldest ones that make a step. None that came after one without its answer yet. `None`: not
    /// enough.
    pub fn cohort(
        &mut self,
        now: f64,
        head: u64,
        size: usize,
        has_gradient: impl Fn(f64) -> bool,
    ) -> Option<Vec<Trajectory>> {
        let (mut informative, mut joining) = (0, Vec::new());
        let mut ready = self.0.iter().take_while(|one| one.ready <= now).enumerate();
        let last = ready.find_map(|(index, one)| {
            let counts = has_gradient(one.trajectory.reward) || one.trajectory.typed.is_some();
            informative += usize::from(counts);
            if counts || joining.len() < size {
                joining.push(index);
            }
            (joining.len() >= size && 4 * informative >= size).then_some(index)
        })?;
        let taken = self.0.drain(..=last).enumerate();
        let cohort = taken.filter(|(index, _)| joining.binary_search(index).is_ok());
        let cohort = cohort.map(|(_, one)| Trajectory {
            staleness: head - one.version,
            ..one.trajectory
        });
        Some(cohort.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waiting(ready: f64, version: u64, reward: f64) -> Waiting {
        let trajectory = Trajectory {
            user: 1,
            prompt: vec![1],
            tokens: vec![2],
            log_probs: vec![-1.0],
            temperature: 1.0,
            declined: reward == 0.0,
            kept: None,
            typed: None,
            suppressed: false,
            reward,
            staleness: 0,
        };
        Waiting {
            ready,
            version,
            trajectory,
        }
    }

    #[test]
    fn a_cohort_is_full_answered_and_a_quarter_of_it_has_a_gradient() {
        let mut queue = Queue::default();
        for one in [
            (1.0, 0.0),
            (2.0, 0.0),
            (3.0, 0.0),
            (4.0, 0.0),
            (5.0, 0.75),
            (6.0, -0.25),
        ] {
            queue.push(waiting(one.0, 0, one.1));
        }
        let informative = |reward| reward != 0.0;
        assert!(queue.cohort(4.0, 1, 3, informative).is_none(), "four declines");
        let cohort = queue.cohort(5.0, 1, 3, informative).unwrap();
        let rewards: Vec<f64> = cohort.iter().map(|one| one.reward).collect();
        assert_eq!(rewards, [0.0, 0.0, 0.0, 0.75], "the fourth decline is dropped");
        assert_eq!(cohort[0].staleness, 1);
        assert!(queue.cohort(5.9, 1, 1, informative).is_none(), "not answered yet");
        assert_eq!(queue.cohort(6.0, 1, 1, informative).unwrap().len(), 1);
    }

    #[test]
    fn what_is_too_old_is_dropped() {
        let mut queue = Queue::default();
        for version in [3, 4, 5] {
            queue.push(waiting(0.0, version, 0.75));
        }
        assert_eq!(queue.drop_stale(5, 1), 1);
        let staleness = queue
            .cohort(0.0, 5, 2, |_| true)
            .unwrap()
            .into_iter()
            .map(|one| one.staleness);
        assert_eq!(staleness.collect::<Vec<_>>(), [1, 0]);
    }
}
