//! Watches the share of trajectories that close without a usable signal.
//!
//! To a trainer, lost feedback looks like users who give none. So each surface has a metric, and
//! the log has one line when the share becomes too high and one when it is normal again.

use std::collections::{BTreeMap, VecDeque};

use crate::reward::Outcome;
use crate::reward::episode::{LATE_TURN, NOT_SHOWN};

/// The share is of this many latest trajectories of a surface. It needs at least `WINDOW_MIN`.
const WINDOW: usize = 1000;
const WINDOW_MIN: usize = 100;
/// The metric label for all undefined surfaces. Events choose their surface, so its names are
/// unbounded.
const UNKNOWN: &str = "unknown";

/// Watches the closer of this process.
pub(crate) struct Unscored {
    share_max: f64,
    surfaces: BTreeMap<String, Window>,
}

#[derive(Default)]
struct Window {
    /// Whether each of the latest trajectories is unscored.
    last: VecDeque<bool>,
    unscored: usize,
    alarm: bool,
}

impl Unscored {
    /// The alarm is on above `share_max`.
    pub fn new(share_max: f64) -> Self {
        Self {
            share_max,
            surfaces: BTreeMap::new(),
        }
    }

    /// Counts a trajectory, unless it is never scored (no consent, an evaluation, an episode that
    /// nobody saw, a turn that came too late).
    pub fn record(&mut self, surface: &str, outcome: &Outcome) {
        let (surface, unscored) = match outcome {
            Outcome::Rewarded { .. } => (surface, false),
            Outcome::Censored {
                code: "no_consent" | "evaluation" | NOT_SHOWN | LATE_TURN,
            } => return,
            Outcome::Censored {
                code: "unknown_surface",
            } => (UNKNOWN, true),
            Outcome::Censored { .. } => (surface, true),
        };
        let window = self.surfaces.entry(surface.to_owned()).or_default();
        window.last.push_back(unscored);
        window.unscored += usize::from(unscored);
        if window.last.len() > WINDOW && window.last.pop_front() == Some(true) {
            window.unscored -= 1;
        }
    }

    /// Sets the metrics and logs changes of the alarm.
    pub fn report(&mut self) {
        for (surface, window) in &mut self.surfaces {
            let share = window.unscored as f64 / window.last.len().max(1) as f64;
            let alarm = window.last.len() >= WINDOW_MIN && share > self.share_max;
            metrics::gauge!("springtide_ingest_unscored_share", "surface" => surface.clone()).set(share);
            metrics::gauge!("springtide_ingest_unscored_alarm", "surface" => surface.clone())
                .set(f64::from(u8::from(alarm)));
            match (window.alarm, alarm) {
                (false, true) => tracing::warn!(
                    surface,
                    share,
                    share_max = self.share_max,
                    "most trajectories close without a usable signal: does feedback arrive within the horizon?"
                ),
                (true, false) => tracing::info!(surface, share, "trajectories have signals again"),
                _ => {}
            }
            window.alarm = alarm;
        }
    }

    #[cfg(test)]
    fn alarm(&mut self, surface: &str) -> bool {
        self.report();
        self.surfaces[surface].alarm
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNSCORED: Outcome = Outcome::Censored { code: "no_feedback" };

    fn rewarded() -> Outcome {
        Outcome::Rewarded {
            reward: 1.0,
            signal: "accept",
            feedback_at: None,
        }
    }

    #[test]
    fn the_alarm_is_on_while_too_many_trajectories_are_unscored() {
        let mut unscored = Unscored::new(0.9);
        (0..WINDOW_MIN - 1).for_each(|_| unscored.record("chat", &UNSCORED));
        assert!(!unscored.alarm("chat"), "too few trajectories");
        unscored.record("chat", &UNSCORED);
        assert!(unscored.alarm("chat"));
        (0..WINDOW / 5).for_each(|_| unscored.record("chat", &rewarded()));
        assert!(!unscored.alarm("chat"));
        (0..WINDOW).for_each(|_| unscored.record("chat", &UNSCORED));
        assert!(unscored.alarm("chat"), "only the latest count");
    }

    #[test]
    fn trajectories_that_are_never_scored_do_not_count_and_unknown_surfaces_share_a_label() {
        let mut unscored = Unscored::new(0.5);
        let evaluation = Outcome::Censored { code: "evaluation" };
        (0..WINDOW).for_each(|_| unscored.record("chat", &evaluation));
        assert!(unscored.surfaces.is_empty());
        let unknown = Outcome::Censored {
            code: "unknown_surface",
        };
        (0..WINDOW).for_each(|nth| unscored.record(&format!("surface-{nth}"), &unknown));
        assert!(unscored.alarm(UNKNOWN));
        assert_eq!(unscored.surfaces.len(), 1);
    }
}
