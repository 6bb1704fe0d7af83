//! How many of the latest samples were quarantined: excluded one by one because something about them
//! cannot be true or must not count. Their codes begin with `quarantined_`.
//!
//! One such sample is its sender's fault and stops nothing. A rate above a bound raises an alarm.
//! Only a fault of the system pauses a run: on every replica, the logged log-probabilities of most
//! users differ from the recomputed ones. Users are counted, not samples, and there have to be
//! several, so that nobody can pause a run by sending many, or while nobody else sends.
//!
//! Pure. The window is in memory; it starts empty when a run is opened.

use crate::learn::sample::Sample;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Codes of quarantined samples begin with this.
pub(crate) const PREFIX: &str = "quarantined_";
/// A logged log-probability differs from the recomputed one by more than the guard's bound.
pub(crate) const LOGPROB: &str = "quarantined_logprob";

/// Samples that the rate is computed from.
const WINDOW: usize = 512;
/// Fewer users show no fault of the system.
const USERS_MIN: usize = 8;
/// Fewer samples have no rate.
const SAMPLES_MIN: usize = 32;

#[derive(Debug, Default)]
pub(crate) struct Quarantine {
    /// Newest last.
    window: VecDeque<Seen>,
    /// The alarm has begun and not ended.
    active: bool,
}

#[derive(Debug)]
struct Seen {
    /// `None`: excluded before its log-probabilities were compared.
    compared: Option<Comparison>,
    quarantined: bool,
}

#[derive(Debug)]
struct Comparison {
    replica: String,
    tenant: String,
    user: String,
}

/// The alarm begins or ends.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Change {
    Begins { share: f64 },
    Ends { share: f64 },
}

impl Quarantine {
    /// `active`: the state of the alarm when the run was last executed.
    pub fn new(active: bool) -> Self {
        Quarantine {
            active,
            ..Quarantine::default()
        }
    }

    /// Samples whose log-probabilities were compared.
    pub fn record<'a>(&mut self, samples: impl IntoIterator<Item = &'a Sample>, quarantined: bool) {
        for sample in samples {
            self.push(Seen {
                compared: Some(Comparison {
                    replica: sample.replica.clone(),
                    tenant: sample.tenant.clone(),
                    user: sample.user.clone(),
                }),
                quarantined,
            });
        }
    }

    /// Samples that selection quarantined.
    pub fn record_excluded(&mut self, count: u64) {
        for _ in 0..count.min(WINDOW as u64) {
            self.push(Seen {
                compared: None,
                quarantined: true,
            });
        }
    }

    fn push(&mut self, seen: Seen) {
        if self.window.len() == WINDOW {
            self.window.pop_front();
        }
        self.window.push_back(seen);
    }

    /// Share of the window that was quarantined.
    pub fn share(&self) -> f64 {
        let quarantined = self.window.iter().filter(|seen| seen.quarantined).count();
        quarantined as f64 / self.window.len().max(1) as f64
    }

    /// Whether the alarm begins, at a share above `share_max`, or ends, at half of it.
    pub fn change(&mut self, share_max: f64) -> Option<Change> {
        if self.window.len() < SAMPLES_MIN {
            return None;
        }
        let share = self.share();
        let change = match self.active {
            false if share > share_max => Change::Begins { share },
            true if share <= share_max / 2.0 => Change::Ends { share },
            _ => return None,
        };
        self.active = !self.active;
        Some(change)
    }

    /// Whether the alarm has begun and not ended.
    pub fn is_active(&self) -> bool {
        self.active
    }

    /// Why the run has to pause: of at least `samples_min` compared samples, those of most users of
    /// every replica were quarantined.
    pub fn systemic(&self, samples_min: usize) -> Option<String> {
        let compared = || {
            let seen = self.window.iter();
            seen.filter_map(|seen| Some((seen.compared.as_ref()?, seen.quarantined)))
        };
        if compared().count() < samples_min {
            return None;
        }
        // replica → user → good and bad samples
        let mut replicas: BTreeMap<&str, BTreeMap<(&str, &str), [usize; 2]>> = BTreeMap::new();
        for (one, quarantined) in compared() {
            let users = replicas.entry(&one.replica).or_default();
            users.entry((&one.tenant, &one.user)).or_default()[usize::from(quarantined)] += 1;
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
                "the logged log-probabilities of most users differ from the recomputed ones on every replica ({}): \
                 samplers and trainer do not hold the same weights",
                replicas.keys().copied().collect::<Vec<_>>().join(", ")
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(replica: &str, user: usize) -> Sample {
        Sample {
            replica: replica.into(),
            user: format!("user-{user}"),
            ..Sample::example()
        }
    }

    #[test]
    fn the_alarm_begins_above_its_bound_and_ends_at_half_of_it() {
        let mut quarantine = Quarantine::default();
        quarantine.record(&[sample("r", 0)], true);
        assert_eq!(quarantine.change(0.05), None, "one sample is no rate");
        for user in 0..40 {
            quarantine.record(&[sample("r", user)], false);
        }
        assert_eq!(quarantine.change(0.05), None);
        quarantine.record_excluded(3);
        let share = 4.0 / 44.0;
        assert_eq!(quarantine.change(0.05), Some(Change::Begins { share }));
        assert_eq!(quarantine.change(0.05), None, "it has begun");
        for user in 0..200 {
            quarantine.record(&[sample("r", user)], false);
        }
        assert!(matches!(quarantine.change(0.05), Some(Change::Ends { .. })));
        let mut restarted = Quarantine::new(true);
        for user in 0..40 {
            restarted.record(&[sample("r", user)], false);
        }
        assert!(matches!(restarted.change(0.05), Some(Change::Ends { .. })));
    }

    #[test]
    fn a_user_with_many_bad_samples_is_no_fault_of_the_system() {
        let mut quarantine = Quarantine::default();
        for _ in 0..400 {
            quarantine.record(&[sample("r", 99)], true);
        }
        assert_eq!(quarantine.systemic(64), None, "there is nobody else to compare with");
        for user in 0..8 {
            quarantine.record(&[sample("r", user)], false);
        }
        assert!(quarantine.share() > 0.9);
        assert_eq!(quarantine.systemic(64), None);
    }

    #[test]
    fn one_bad_replica_of_two_is_no_fault_of_the_system_and_two_are() {
        let mut quarantine = Quarantine::default();
        for user in 0..40 {
            quarantine.record(&[sample("r1", user)], true);
        }
        assert!(quarantine.systemic(64).is_none(), "too few to judge");
        for user in 0..40 {
            quarantine.record(&[sample("r2", user)], false);
        }
        assert_eq!(quarantine.systemic(64), None);
        for user in 0..40 {
            quarantine.record(&[sample("r2", user)], true);
            quarantine.record(&[sample("r2", user)], true);
        }
        let reason = quarantine.systemic(64).unwrap();
        assert!(reason.contains("r1, r2"), "{reason}");
    }
}
