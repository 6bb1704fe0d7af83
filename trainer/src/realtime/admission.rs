//! Which of the selected trajectories join the cohort: those within the caps, and, once the cohort
//! only waits for a gradient, those that have one. Pure.
//!
//! Of an episode that is above a cap, as many turns join as fit, drawn by a hash of their ids, so that
//! no place in the session is favored. Their returns are those of the whole session.

use crate::cohort::{Cohort, is_informative};
use runs::sample::Sample;
use runs::select::caps::{self, Contributor, Member, Recent};
use std::collections::BTreeSet;
use uuid::Uuid;

/// A selected trajectory: its generations, each with its advantage.
pub(super) type Candidate = Vec<(Sample, f64)>;

/// A trajectory, or what joins of it, and what that counts for in the window of the caps.
#[derive(Debug)]
pub(super) struct Joining {
    pub turns: Candidate,
    pub member: Member,
}

/// What becomes of selected trajectories.
#[derive(Debug, Default)]
pub(super) struct Admission {
    /// They join, in the order of selection.
    pub joining: Vec<Joining>,
    /// The generations of those that the cohort does not need.
    pub without_signal: Vec<Uuid>,
    /// The rewards of these trajectories.
    pub rewards_without_signal: Vec<f64>,
    /// They, or these turns of them, would exceed a cap, with its code.
    pub capped: Vec<(Candidate, &'static str)>,
}

/// Admits trajectories to a cohort of `size`.
pub(super) fn admit(candidates: Vec<Candidate>, cohort: &Cohort, size: usize, recent: &mut Recent) -> Admission {
    let mut admission = Admission::default();
    for candidate in candidates {
        let members = cohort.len() + admission.joining.len();
        let waits = members >= size;
        if waits && !informs(&candidate) {
            admission.leave_out(&candidate);
            continue;
        }
        let (Joining { turns, member }, above) = split(candidate, recent);
        admission.capped.extend(above);
        if waits && !informs(&turns) {
            admission.leave_out(&turns);
        } else if !turns.is_empty() {
            recent.add(member.clone());
            admission.joining.push(Joining { turns, member });
        }
    }
    admission
}

fn informs(candidate: &Candidate) -> bool {
    let mut turns = candidate.iter();
    turns.any(|(sample, advantage)| is_informative(sample, *advantage))
}

impl Admission {
    fn leave_out(&mut self, candidate: &Candidate) {
        self.without_signal
            .extend(candidate.iter().map(|(sample, _)| sample.generation));
        self.rewards_without_signal
            .extend(candidate.first().map(|(sample, _)| sample.reward));
    }
}

/// What fits of a candidate, and the rest with the code of the cap.
fn split(candidate: Candidate, recent: &Recent) -> (Joining, Option<(Candidate, &'static str)>) {
    let turns: Vec<&Sample> = candidate.iter().map(|(sample, _)| sample).collect();
    let from = Contributor::of(&turns);
    let mut drawn: Vec<usize> = (0..turns.len()).collect();
    drawn.sort_by_cached_key(|&at| *blake3::hash(turns[at].generation.as_bytes()).as_bytes());
    let tokens: Vec<usize> = drawn.iter().map(|&at| caps::tokens(turns[at])).collect();
    let (count, code) = recent.fitting(&from, &tokens);
    let member = Member {
        from,
        generations: count,
        tokens: tokens[..count].iter().sum(),
    };
    let Some(code) = code else {
        let turns = candidate;
        return (Joining { turns, member }, None);
    };
    let fits: BTreeSet<usize> = drawn.into_iter().take(count).collect();
    let numbered = candidate.into_iter().enumerate();
    let (fitting, above): (Vec<_>, Vec<_>) = numbered.partition(|(at, _)| fits.contains(at));
    let unnumbered = |turns: Vec<(usize, (Sample, f64))>| turns.into_iter().map(|(_, turn)| turn).collect();
    let turns = unnumbered(fitting);
    (Joining { turns, member }, Some((unnumbered(above), code)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use runs::select::caps::Caps;

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
        assert_eq!(admission.joining[0].turns[0].1, 0.75);
        assert_eq!(
            admission.joining[1].turns.len(),
            2,
            "all turns, also the one without a gradient"
        );
        assert_eq!(admission.without_signal, [ids[0], ids[2], ids[5], ids[6]]);
        assert_eq!(admission.rewards_without_signal.len(), 3, "one for each trajectory");
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
            .map(|joining| joining.turns[0].0.user.as_str())
            .collect();
        // the others have a tenth of the window, and twice what each of them has is two
        assert_eq!(joined, ["a", "a", "b", "c", "d"]);
        let capped: Vec<&str> = admission.capped.iter().map(|(_, code)| *code).collect();
        assert_eq!(capped, ["capped_user"; 2]);
    }

    #[test]
    fn an_episode_counts_as_one_trajectory_and_for_all_of_its_tokens() {
        let caps = Caps {
            window: 40,
            ..Caps::default()
        };
        let mut recent = Recent::new(caps, []);
        let turns = [0.5; 50];
        let others: Vec<Candidate> = (10..14).map(|id| episode(&format!("u-{id}"), id, &turns)).collect();
        admit(others, &Cohort::new(), 32, &mut recent);
        // a typical user has 50 tokens, so everybody may have 100
        let next: Vec<Candidate> = (1..=3).map(|id| episode("a", id, &turns)).collect();
        let admission = admit(next, &Cohort::new(), 32, &mut recent);
        assert_eq!((admission.joining.len(), recent.users()), (2, 5));
        assert_eq!(admission.capped.len(), 1);
        assert_eq!(
            (admission.capped[0].0.len(), admission.capped[0].1),
            (50, "capped_user")
        );
    }

    #[test]
    fn as_many_turns_of_a_long_session_join_as_fit_from_all_over_it() {
        let caps = Caps {
            window: 40,
            ..Caps::default()
        };
        let mut recent = Recent::new(caps, []);
        let others: Vec<Candidate> = (10..20).map(|id| episode(&format!("u-{id}"), id, &[0.5; 10])).collect();
        admit(others, &Cohort::new(), 32, &mut recent);
        let long = episode("long", 1, &[0.5; 1000]);
        let admission = admit(vec![long], &Cohort::new(), 32, &mut recent);
        let indices = |turns: &Candidate| -> Vec<usize> {
            let indices = turns.iter().map(|(sample, _)| sample.turn.as_ref().unwrap().index);
            indices.collect()
        };
        let joined = indices(&admission.joining[0].turns);
        assert_eq!(joined.len(), 20, "twice what a typical user has");
        assert!(joined.is_sorted(), "in the order of the session");
        assert!(joined[9] > 20 && joined[10] < 980, "{joined:?}");
        let (rest, code) = &admission.capped[0];
        assert_eq!((rest.len(), *code), (980, "capped_user"));
        let mut all = [joined, indices(rest)].concat();
        all.sort_unstable();
        assert!(all.into_iter().eq(0..1000));
        // its own place is used up, and that of nobody else
        let next = vec![episode("long", 2, &[0.5; 2]), episode("u-30", 30, &[0.5; 10])];
        let admission = admit(next, &Cohort::new(), 32, &mut recent);
        assert_eq!((admission.joining.len(), admission.capped.len()), (1, 1));
    }
}
