//! How many of the latest samples were quarantined: excluded one by one because something about them
//! cannot be true or must not count. Their codes begin with `quarantined_`.
//!
//! One such sample is its sender's fault and stops nothing. A rate above a bound raises an alarm.
//! Only a fault of the system pauses a run: on every replica, the logged log-probabilities of most
//! users cannot be those of the version. They are judged by their mean over a sample, so no largest
//! difference of a token pauses anything: our own engine's is an alarm ([`crate::parity`]). Users
//! are counted, not samples, and there have to be several, so that nobody can pause a run by sending
//! many, or while nobody else sends. Samples that were excluded before they were compared say nothing
//! about that, however many they are.
//!
//! Pure. What it has seen is in memory; it is forgotten when a run is opened.

use crate::share_alarm::ShareAlarm;
use runs::sample::Sample;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Codes of quarantined samples begin with this.
pub(crate) const PREFIX: &str = "quarantined_";
/// The logged log-probabilities are not accepted by [`crate::learn::guards::accepts`].
pub(crate) const LOGPROB: &str = "quarantined_logprob";

/// Compared samples that a fault of the system is seen in.
const COMPARED_MAX: usize = 512;
/// Fewer users show no fault of the system.
const USERS_MIN: usize = 8;

#[derive(Debug)]
pub(crate) struct Quarantine {
    /// Of all that was quarantined, by selection too.
    pub alarm: ShareAlarm,
    /// Samples whose log-probabilities were compared, newest last.
    compared: VecDeque<Comparison>,
}

#[derive(Debug)]
struct Comparison {
    replica: String,
    tenant: String,
    user: String,
    gross: bool,
}

/// What the comparison of a sample's log-probabilities showed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Compared {
    Kept,
    Quarantined,
    /// Quarantined, and it cannot be from the version that it names.
    Gross,
}

impl Quarantine {
    pub fn new(alarm: ShareAlarm) -> Self {
        Quarantine {
            alarm,
            compared: VecDeque::new(),
        }
    }

    /// Samples whose log-probabilities were compared.
    pub fn record<'a>(&mut self, samples: impl IntoIterator<Item = &'a Sample>, compared: Compared) {
        for sample in samples {
            self.alarm.record(1, compared != Compared::Kept);
            if self.compared.len() == COMPARED_MAX {
                self.compared.pop_front();
            }
            self.compared.push_back(Comparison {
                replica: sample.replica.clone(),
                tenant: sample.tenant.clone(),
                user: sample.user.clone(),
                gross: compared == Compared::Gross,
            });
        }
    }

    /// Why the run has to pause: of at least `samples_min` compared samples (half of those that are
    /// kept are enough), those of most users of every replica cannot be from their version.
    pub fn systemic(&self, samples_min: usize) -> Option<String> {
        if self.compared.len() < samples_min.min(COMPARED_MAX / 2) {
            return None;
        }
        // replica → user → good and bad samples
        let mut replicas: BTreeMap<&str, BTreeMap<(&str, &str), [usize; 2]>> = BTreeMap::new();
        for one in &self.compared {
            let users = replicas.entry(&one.replica).or_default();
            users.entry((&one.tenant, &one.user)).or_default()[usize::from(one.gross)] += 1;
        }
        let users: BTreeSet<_> = replicas.values().flat_map(BTreeMap::keys).collect();
        if users.len() < USERS_MIN {
            return None;
        }
        let mostly_bad = |users: &BTreeMap<_, [usize; 2]>| {
            let bad = users.values().filter(|[good, bad]| bad > good).count();
            2 * bad > users.len()
        };
        replicas.values().all(mostly_bad).then(|| {
            format!(
                "the logged log-probabilities of most users are far from the recomputed ones on every replica ({}): \
                 samplers and trainer do not hold the same weights",
                replicas.keys().copied().collect::<Vec<_>>().join(", ")
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::share_alarm::QUARANTINED;
    use runs::alarm::Alarm;

    fn empty() -> Quarantine {
        Quarantine::new(ShareAlarm::new(QUARANTINED, Alarm::new("quarantine", false)))
    }

    fn sample(replica: &str, user: usize) -> Sample {
        Sample {
            replica: replica.into(),
            user: format!("user-{user}"),
            ..Sample::example()
        }
    }

    #[test]
    fn every_quarantined_sample_counts_for_the_alarm() {
        let mut quarantine = empty();
        for user in 0..60 {
            let compared = if user < 2 {
                Compared::Quarantined
            } else {
                Compared::Kept
            };
            quarantine.record(&[sample("r", user)], compared);
        }
        assert!(!quarantine.alarm.is_high(0.05));
        quarantine.alarm.record(4, true);
        assert!(quarantine.alarm.is_high(0.05), "6 of 64");
    }

    #[test]
    fn a_fault_of_the_system_shows_with_large_cohorts_and_among_excluded_samples() {
        let mut quarantine = empty();
        for n in 0..600 {
            quarantine.record(&[sample("r", n % 16)], Compared::Gross);
        }
        assert!(quarantine.systemic(2 * 400).is_some(), "a cohort of 400");
        quarantine.alarm.record(10_000, true);
        assert!(quarantine.systemic(2 * 400).is_some(), "somebody floods meanwhile");
        for n in 0..600 {
            quarantine.record(&[sample("r", n % 16)], Compared::Kept);
        }
        assert_eq!(quarantine.systemic(2 * 400), None);
        assert_eq!(empty().systemic(2 * 400), None);
    }

    #[test]
    fn small_differences_of_everybody_pause_nothing() {
        let mut quarantine = empty();
        for n in 0..600 {
            quarantine.record(&[sample("r", n % 16)], Compared::Quarantined);
        }
        assert!(quarantine.alarm.is_high(0.99));
        assert_eq!(quarantine.systemic(64), None);
    }

    #[test]
    fn a_user_with_many_bad_samples_is_no_fault_of_the_system() {
        let mut quarantine = empty();
        for _ in 0..400 {
            quarantine.record(&[sample("r", 99)], Compared::Gross);
        }
        assert_eq!(quarantine.systemic(64), None, "there is nobody else to compare with");
        for user in 0..8 {
            quarantine.record(&[sample("r", user)], Compared::Kept);
        }
        assert!(quarantine.alarm.is_high(0.9));
        assert_eq!(quarantine.systemic(64), None);
    }

    #[test]
    fn one_bad_replica_of_two_is_no_fault_of_the_system_and_two_are() {
        let mut quarantine = empty();
        for user in 0..40 {
            quarantine.record(&[sample("r1", user)], Compared::Gross);
        }
        assert!(quarantine.systemic(64).is_none(), "too few to judge");
        for user in 0..40 {
            quarantine.record(&[sample("r2", user)], Compared::Kept);
        }
        assert_eq!(quarantine.systemic(64), None);
        for user in 0..40 {
            quarantine.record(&[sample("r2", user)], Compared::Gross);
            quarantine.record(&[sample("r2", user)], Compared::Gross);
        }
        let reason = quarantine.systemic(64).unwrap();
        assert!(reason.contains("r1, r2"), "{reason}");
    }
}
