//! An alarm on the share of the latest samples that something is wrong with. Pure; the window starts
//! empty when a run is opened.

use std::collections::VecDeque;

/// Samples that the share is computed from.
pub(crate) const WINDOW: usize = 512;
/// Fewer samples have no share.
const SAMPLES_MIN: usize = 32;

/// Begins above a share and ends at half of it.
#[derive(Debug, Default)]
pub(crate) struct ShareAlarm {
    /// Newest last: whether the sample is bad.
    window: VecDeque<bool>,
    /// It has begun and not ended.
    active: bool,
}

/// The alarm begins or ends.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Change {
    Begins { share: f64 },
    Ends { share: f64 },
}

impl ShareAlarm {
    /// `active`: the state of the alarm when the run was last executed.
    pub fn new(active: bool) -> Self {
        ShareAlarm {
            window: VecDeque::new(),
            active,
        }
    }

    /// Counts samples.
    pub fn record(&mut self, count: u64, bad: bool) {
        for _ in 0..count.min(WINDOW as u64) {
            if self.window.len() == WINDOW {
                self.window.pop_front();
            }
            self.window.push_back(bad);
        }
    }

    /// Share of the window that is bad.
    pub fn share(&self) -> f64 {
        let bad = self.window.iter().filter(|bad| **bad).count();
        bad as f64 / self.window.len().max(1) as f64
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_begins_above_its_bound_and_ends_at_half_of_it() {
        let mut alarm = ShareAlarm::default();
        alarm.record(1, true);
        assert_eq!(alarm.change(0.05), None, "one sample is no share");
        alarm.record(40, false);
        assert_eq!(alarm.change(0.05), None);
        alarm.record(3, true);
        let share = 4.0 / 44.0;
        assert_eq!(alarm.change(0.05), Some(Change::Begins { share }));
        assert_eq!(alarm.change(0.05), None, "it has begun");
        alarm.record(200, false);
        assert!(matches!(alarm.change(0.05), Some(Change::Ends { .. })));
        let mut restarted = ShareAlarm::new(true);
        restarted.record(40, false);
        assert!(matches!(restarted.change(0.05), Some(Change::Ends { .. })));
    }

    #[test]
    fn it_counts_the_latest_samples() {
        let mut alarm = ShareAlarm::default();
        alarm.record(u64::MAX, true);
        alarm.record(384, false);
        assert_eq!((alarm.window.len(), alarm.share()), (WINDOW, 0.25));
    }
}
