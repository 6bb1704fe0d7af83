//! Which of the selected trajectories join the cohort: those within the caps, and, once the cohort
//! only waits for a gradient, those that have one. Pure.

use crate::learn::sample::Sample;
use crate::runs::cohort::{Cohort, is_informative};
use crate::select::caps::{Contributor, Recent};
use uuid::Uuid;

/// A selected trajectory: its generations, each with its advantage.
pub(super) type Candidate = Vec<(Sample, f64)>;

/// Who it counts for.
pub(super) fn contributor(candidate: &Candidate) -> Contributor {
    let turns: Vec<&Sample> = candidate.iter().map(|(sample, _)| sample).collect();
    Contributor::of(&turns)
}

/// What becomes of selected trajectories.
#[derive(Debug, Default)]
pub(super) struct Admission {
    /// They join, in the order of selection.
    pub joining: Vec<Candidate>,
    /// The generations of those that the cohort does not need.
    pub without_signal: Vec<Uuid>,
    /// They would exceed a cap, with its code.
    pub capped: Vec<(Candidate, &'static str)>,
}

/// Admits trajectories to a cohort of `size`.
pub(super) fn admit(candidates: Vec<Candidate>, cohort: &Cohort, size: usize, recent: &mut Recent) -> Admission {
    let mut admission = Admission::default();
    for candidate in candidates {
        let members = cohort.len() + admission.joining.len();
        let informs = |(sample, advantage): &(Sample, f64)| is_informative(sample, *advantage);
        if members >= size && !candidate.iter().any(informs) {
            let generations = candidate.iter().map(|(sample, _)| sample.generation);
            admission.without_signal.extend(generations);
            continue;
        }
        match recent.admit(contributor(&candidate)) {
            Ok(()) => admission.joining.push(candidate),
            Err(code) => admission.capped.push((candidate, code)),
        }
    }
    admission
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::select::caps::Caps;

    fn candidates(users: &[&str], advantage: impl Fn(usize) -> f64) -> Vec<Candidate> {
        let candidate = |(n, user): (usize, &&str)| {
            let sample = Sample {
                user: (*user).into(),
                generation: Uuid::now_v7(),
                ..Sample::example()
            };
            vec![(sample, advantage(n))]
        };
        users.iter().enumerate().map(candidate).collect()
    }

    /// An episode whose turns have these advantages.
    fn episode(user: &str, id: u128, advantages: &[f64]) -> Candidate {
        let rewards = vec![None; advantages.len()];
        let turn = |(index, advantage): (usize, &f64)| {
            let sample = Sample {
                user: user.into(),
                generation: Uuid::now_v7(),
                ..Sample::example_of(id, index, &rewards)
            };
            (sample, *advantage)
        };
        advantages.iter().enumerate().map(turn).collect()
    }

    #[test]
    fn a_cohort_that_waits_for_a_gradient_takes_nothing_else() {
        let mut cohort = Cohort::new();
        let declined = candidates(&["a"; 8], |_| 0.0);
        cohort.join(
            declined
                .iter()
                .flatten()
                .map(|(sample, advantage)| (sample, *advantage)),
        );
        assert_eq!(cohort.room(8), 2);
        let mut recent = Recent::new(Caps::default(), []);
        let mut next = candidates(&["a", "b", "c"], |n| if n == 1 { 0.75 } else { 0.0 });
        next.push(episode("d", 1, &[0.0, 0.5]));
        next.push(episode("e", 2, &[0.0, 0.0]));
        let ids: Vec<Uuid> = next.iter().flatten().map(|(sample, _)| sample.generation).collect();
        let admission = admit(next, &cohort, 8, &mut recent);
        assert_eq!(admission.joining.len(), 2);
        assert_eq!(admission.joining[0][0].1, 0.75);
        assert_eq!(
            admission.joining[1].len(),
            2,
            "all turns, also the one without a gradient"
        );
        assert_eq!(admission.without_signal, [ids[0], ids[2], ids[5], ids[6]]);
    }

    #[test]
    fn trajectories_above_a_cap_get_its_code() {
        let users = ["a", "a", "b", "c", "d", "a", "a"];
        let caps = Caps {
            window: 20,
            ..Caps::default()
        };
        let mut recent = Recent::new(caps, []);
        let admission = admit(candidates(&users, |_| 0.5), &Cohort::new(), 32, &mut recent);
        let joined: Vec<&str> = admission
            .joining
            .iter()
            .map(|candidate| candidate[0].0.user.as_str())
            .collect();
        // the others have a tenth of the window, and twice what each of them has is two
        assert_eq!(joined, ["a", "a", "b", "c", "d"]);
        let capped: Vec<&str> = admission.capped.iter().map(|(_, code)| *code).collect();
        assert_eq!(capped, ["capped_user"; 2]);
    }

    #[test]
    fn an_episode_counts_once_for_its_user() {
        let caps = Caps {
            window: 20,
            ..Caps::default()
        };
        let mut recent = Recent::new(caps, []);
        let mut next: Vec<Candidate> = (1..=2).map(|id| episode("a", id, &[0.5; 50])).collect();
        next.extend(candidates(&["b", "c", "d"], |_| 0.5));
        next.push(episode("a", 3, &[0.5; 50]));
        let admission = admit(next, &Cohort::new(), 32, &mut recent);
        assert_eq!((admission.joining.len(), recent.users()), (5, 4));
        assert_eq!(admission.capped.len(), 1);
        assert_eq!(
            (admission.capped[0].0.len(), admission.capped[0].1),
            (50, "capped_user")
        );
    }
}
