//! Which of the selected samples join the cohort: those within the caps, and, once the cohort only
//! waits for a gradient, those that have one. Pure.

use crate::learn::sample::Sample;
use crate::runs::cohort::{Cohort, is_informative};
use crate::select::caps::{Contributor, Recent};
use uuid::Uuid;

/// A selected sample and its advantage.
pub(super) type Candidate = (Sample, f64);

/// What becomes of selected samples.
#[derive(Debug, Default)]
pub(super) struct Admission {
    /// They join, in the order of selection.
    pub joining: Vec<Candidate>,
    /// The cohort does not need them.
    pub without_signal: Vec<Uuid>,
    /// They would exceed a cap, with its code.
    pub capped: Vec<(Candidate, &'static str)>,
}

/// Admits samples to a cohort of `size`.
pub(super) fn admit(candidates: Vec<Candidate>, cohort: &Cohort, size: usize, recent: &mut Recent) -> Admission {
    let mut admission = Admission::default();
    for candidate in candidates {
        let (sample, advantage) = &candidate;
        let members = cohort.len() + admission.joining.len();
        if members >= size && !is_informative(sample, *advantage) {
            admission.without_signal.push(sample.generation);
            continue;
        }
        match recent.admit(Contributor::of(sample)) {
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
            (sample, advantage(n))
        };
        users.iter().enumerate().map(candidate).collect()
    }

    #[test]
    fn a_cohort_that_waits_for_a_gradient_takes_nothing_else() {
        let mut cohort = Cohort::new();
        let declined = candidates(&["a"; 8], |_| 0.0);
        cohort.join(declined.iter().map(|(sample, advantage)| (sample, *advantage)));
        assert_eq!(cohort.room(8), 2);
        let mut recent = Recent::new(Caps::default(), []);
        let next = candidates(&["a", "b", "c"], |n| if n == 1 { 0.75 } else { 0.0 });
        let ids: Vec<Uuid> = next.iter().map(|(sample, _)| sample.generation).collect();
        let admission = admit(next, &cohort, 8, &mut recent);
        assert_eq!(admission.joining.len(), 1);
        assert_eq!(admission.joining[0].1, 0.75);
        assert_eq!(admission.without_signal, [ids[0], ids[2]]);
    }

    #[test]
    fn samples_above_a_cap_get_its_code() {
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
            .map(|(sample, _)| sample.user.as_str())
            .collect();
        // the others have a tenth of the window, and twice what each of them has is two
        assert_eq!(joined, ["a", "a", "b", "c", "d"]);
        let capped: Vec<&str> = admission.capped.iter().map(|(_, code)| *code).collect();
        assert_eq!(capped, ["capped_user"; 2]);
    }
}
