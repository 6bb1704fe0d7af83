//! Watches how many of a judge's answers are faults. A judge that does not answer looks to a trainer
//! like users who say nothing.

use std::collections::{BTreeSet, VecDeque};

use crate::judge::Fault;

/// The share is of this many latest requests. It needs at least `WINDOW_MIN`.
const WINDOW: usize = 100;
const WINDOW_MIN: usize = 10;
/// The alarm is on while more than this share are faults.
const SHARE_MAX: f64 = 0.5;

pub(super) struct Alarm {
    judge: String,
    /// Whether each of the latest requests was a fault.
    last: VecDeque<bool>,
    is_on: bool,
    /// Codes of faults since the last answer, so that each is logged once.
    failing: BTreeSet<&'static str>,
}

impl Alarm {
    pub(super) fn new(judge: &str) -> Self {
        Self {
            judge: judge.to_owned(),
            last: VecDeque::new(),
            is_on: false,
            failing: BTreeSet::new(),
        }
    }

    /// Counts an answer, or the fault that came instead of it.
    pub(super) fn record(&mut self, fault: Option<&Fault>) {
        let judge = self.judge.clone();
        match fault {
            None => self.failing.clear(),
            Some(fault) => {
                if self.failing.insert(fault.code) {
                    tracing::warn!(
                        judge,
                        code = fault.code,
                        reason = fault.reason,
                        "the judge did not answer"
                    );
                }
            }
        }
        self.last.push_back(fault.is_some());
        if self.last.len() > WINDOW {
            self.last.pop_front();
        }
        let faults = self.last.iter().filter(|is_fault| **is_fault).count();
        let share = faults as f64 / self.last.len() as f64;
        let is_on = self.last.len() >= WINDOW_MIN && share > SHARE_MAX;
        metrics::gauge!("springtide_judge_fault_share", "judge" => judge.clone()).set(share);
        metrics::gauge!("springtide_judge_alarm", "judge" => judge.clone()).set(f64::from(u8::from(is_on)));
        match (self.is_on, is_on) {
            (false, true) => tracing::error!(judge, share, "most requests to the judge fail: is its endpoint well?"),
            (true, false) => tracing::info!(judge, share, "the judge answers again"),
            _ => {}
        }
        self.is_on = is_on;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_alarm_is_on_while_most_requests_fail() {
        let fault = Fault {
            code: "timeout",
            reason: String::new(),
            retry_after: None,
        };
        let mut alarm = Alarm::new("mood");
        (0..WINDOW_MIN - 1).for_each(|_| alarm.record(Some(&fault)));
        assert!(!alarm.is_on, "too few requests");
        alarm.record(Some(&fault));
        assert!(alarm.is_on);
        assert_eq!(alarm.failing.len(), 1);
        (0..WINDOW_MIN).for_each(|_| alarm.record(None));
        assert!(!alarm.is_on && alarm.failing.is_empty());
        (0..WINDOW).for_each(|_| alarm.record(Some(&fault)));
        (0..WINDOW / 2 - 1).for_each(|_| alarm.record(None));
        assert!(alarm.is_on, "only the latest count");
        alarm.record(None);
        assert!(!alarm.is_on);
    }
}
