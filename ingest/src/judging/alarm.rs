//! Watches whether a judge answers. One that does not looks to a trainer like users who say nothing.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use tokio::time::Instant;

use event_log::judge::Fault;

use crate::judge::Judge;

/// The share of faults is of this many latest requests.
const WINDOW: usize = 100;
/// The alarm is on once trajectories have lost their patience, but not sooner.
const SILENCE_MIN: Duration = Duration::from_secs(60);
/// So long after the last request, nobody wants an answer.
const QUIET: Duration = Duration::from_secs(600);

pub(super) struct Alarm {
    judge: String,
    /// Whether each of the latest requests was a fault.
    last: VecDeque<bool>,
    is_on: bool,
    /// Codes of faults since the last answer, so that each is logged once.
    failing: BTreeSet<&'static str>,
    silence_max: Duration,
    /// The first request since the last answer, and the latest.
    unanswered: Option<(Instant, Instant)>,
}

impl Alarm {
    pub(super) fn new(judge: &Judge) -> Self {
        Self {
            judge: judge.name().to_owned(),
            last: VecDeque::new(),
            is_on: false,
            failing: BTreeSet::new(),
            silence_max: judge.patience().unsigned_abs().max(SILENCE_MIN),
            unanswered: None,
        }
    }

    /// A request begins.
    pub(super) fn asks(&mut self, now: Instant) {
        let since = self.unanswered.map_or(now, |(since, _)| since);
        self.unanswered = Some((since, now));
    }

    /// Counts an answer, or the fault that came instead of it.
    pub(super) fn record(&mut self, fault: Option<&Fault>, now: Instant) {
        match fault {
            None => {
                self.failing.clear();
                self.unanswered = None;
            }
            Some(fault) => {
                self.asks(now);
                if self.failing.insert(fault.code) {
                    tracing::warn!(
                        judge = self.judge,
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
        metrics::gauge!("springtide_judge_fault_share", "judge" => self.judge.clone()).set(share);
        self.look(now);
    }

    /// Sets the alarm. By time, because a judge that hangs gets few requests.
    pub(super) fn look(&mut self, now: Instant) {
        let is_silent = |(since, latest): (Instant, Instant)| {
            now.duration_since(since) >= self.silence_max && now.duration_since(latest) < self.silence_max + QUIET
        };
        let is_on = self.unanswered.is_some_and(is_silent);
        metrics::gauge!("springtide_judge_alarm", "judge" => self.judge.clone()).set(f64::from(u8::from(is_on)));
        match (self.is_on, is_on) {
            (false, true) => tracing::error!(
                judge = self.judge,
                seconds = self.silence_max.as_secs(),
                "no request to the judge was answered for so long: is its endpoint well?"
            ),
            (true, false) => tracing::info!(judge = self.judge, "the judge answers again, or nobody asks it"),
            _ => {}
        }
        self.is_on = is_on;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn alarm() -> Alarm {
        Alarm {
            judge: "mood".to_owned(),
            last: VecDeque::new(),
            is_on: false,
            failing: BTreeSet::new(),
            silence_max: SILENCE_MIN,
            unanswered: None,
        }
    }

    #[test]
    fn the_alarm_is_on_while_no_request_is_answered_however_few_there_are() {
        let fault = Fault::new("timeout", "");
        let (mut alarm, start) = (alarm(), Instant::now());
        (0..WINDOW).for_each(|_| alarm.record(None, start));
        let after = |seconds| start + Duration::from_secs(seconds);
        // One that hangs.
        alarm.asks(after(10));
        alarm.look(after(69));
        assert!(!alarm.is_on, "not yet");
        alarm.look(after(70));
        assert!(alarm.is_on);
        alarm.record(Some(&fault), after(80));
        assert!(alarm.is_on);
        assert_eq!(alarm.failing.len(), 1);
        alarm.record(None, after(90));
        assert!(!alarm.is_on && alarm.failing.is_empty());
        alarm.look(after(1_000));
        assert!(!alarm.is_on, "nobody asks");
    }

    #[test]
    fn many_faults_between_answers_are_no_alarm_and_an_alarm_ends_without_requests() {
        let fault = Fault::new("unavailable", "");
        let (mut alarm, start) = (alarm(), Instant::now());
        for second in 0..200 {
            let now = start + Duration::from_secs(second);
            let fault = (second % 10 > 0).then_some(&fault);
            alarm.record(fault, now);
            assert!(!alarm.is_on);
        }
        let latest = start + Duration::from_secs(300);
        alarm.record(Some(&fault), latest);
        assert!(alarm.is_on);
        alarm.look(latest + SILENCE_MIN + QUIET);
        assert!(!alarm.is_on, "the text was given up, and there is no other");
    }
}
