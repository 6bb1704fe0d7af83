//! Which of the selected samples join the cohort: those within the caps, and, once the cohort only
//! waits for a gradient, those that have one. The others get a code. Pure.

use crate::learn::sample::Sample;
use crate::runs::cohort::{Cohort, is_informative};
use crate::select::caps::{Contributor, Recent};
use std::collections::BTreeMap;
use uuid::Uuid;

/// What becomes of selected samples.
#[derive(Debug, Default)]
pub(super) struct Admission {
    /// They join, in the order of selection, with their advantages.
    pub samples: Vec<Sample>,
    pub advantages: Vec<f64>,
    /// Code → generations.
    pub dropped: BTreeMap<&'static str, Vec<Uuid>>,
}

/// Admits samples to a cohort of `size`.
pub(super) fn admit(
    samples: Vec<Sample>,
    advantages: Vec<f64>,
    cohort: &Cohort,
    size: usize,
    recent: &mut Recent,
) -> Admission {
    let mut admission = Admission::default();
    for (sample, advantage) in samples.into_iter().zip(advantages) {
        let members = cohort.len() + admission.samples.len();
        let contributor = Contributor {
            tenant: sample.tenant.clone(),
            user: sample.user.clone(),
            surface: sample.class.clone(),
        };
        let refused = match members >= size && !is_informative(&sample, advantage) {
            true => Some("no_signal"),
            false => recent.admit(contributor).err(),
        };
        match refused {
            Some(code) => admission.dropped.entry(code).or_default().push(sample.generation),
            None => {
                admission.samples.push(sample);
                admission.advantages.push(advantage);
            }
        }
    }
    admission
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::select::caps::Caps;

    fn samples(users: &[&str]) -> Vec<Sample> {
        let sample = |user: &&str| Sample {
            user: (*user).into(),
            generation: Uuid::now_v7(),
            ..Sample::example()
        };
        users.iter().map(sample).collect()
    }

    #[test]
    fn a_cohort_that_waits_for_a_gradient_takes_nothing_else() {
        let mut cohort = Cohort::new();
        let declined = samples(&["a"; 8]);
        cohort.join(declined.iter().map(|sample| (sample, 0.0)));
        assert_eq!(cohort.room(8), 2);
        let mut recent = Recent::new(Caps::default(), []);
        let next = samples(&["a", "b", "c"]);
        let ids: Vec<Uuid> = next.iter().map(|sample| sample.generation).collect();
        let admission = admit(next, vec![0.0, 0.75, 0.0], &cohort, 8, &mut recent);
        assert_eq!(admission.advantages, [0.75]);
        assert_eq!(admission.dropped["no_signal"], [ids[0], ids[2]]);
    }

    #[test]
    fn samples_above_a_cap_get_its_code() {
        let users = ["a", "a", "b", "c", "d", "a", "a"];
        let mut recent = Recent::new(Caps::default(), []);
        let admission = admit(samples(&users), vec![0.5; 7], &Cohort::new(), 32, &mut recent);
        let joined: Vec<&str> = admission.samples.iter().map(|sample| sample.user.as_str()).collect();
        // with four users each has half: a's third is half of six, the fourth is more
        assert_eq!(joined, ["a", "a", "b", "c", "d", "a"]);
        assert_eq!(admission.dropped["capped_user"].len(), 1);
    }
}
