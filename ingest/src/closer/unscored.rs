//! How much closes without a usable signal. Feedback that stops arriving looks, to a trainer, like users who fell silent;
//! this says so, as a metric of every surface and as one line in the log when it begins and when it is over.

use std::collections::{BTreeMap, VecDeque};

use crate::reward::Outcome;

/// Trajectories of a surface that the share is taken over, and how many there must be before it says anything.
const WINDOW: usize = 1000;
const WINDOW_MIN: usize = 100;
/// The one name for all surfaces that nobody defined: events choose their surface, metrics must not grow with it.
const UNKNOWN: &str = "unknown";

/// Watches what closes in this process.
pub(crate) struct Unscored {
    share_max: f64,
    surfaces: BTreeMap<String, Window>,
}

#[derive(Default)]
struct Window {
    /// Of each of the last trajectories, whether it is unscored.
    last: VecDeque<bool>,
    unscored: usize,
    alarm: bool,
}

impl Unscored {
    /// `share_max`: beyond it, the alarm is on.
    pub fn new(share_max: f64) -> Self {
        Self {
            share_max,
            surfaces: BTreeMap::new(),
        }
    }

    /// Notes one trajectory. What was never to be scored (no consent, an evaluation) says nothing about signals.
    pub fn note(&mut self, surface: &str, outcome: &Outcome) {
        let (surface, unscored) = match outcome {
            Outcome::Rewarded { .. } => (surface, false),
            Outcome::Censored {
                code: "no_consent" | "evaluation",
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

    /// Sets the metrics, and logs what changed.
    pub fn tell(&mut self) {
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
        self.tell();
        self.surfaces[surface].alarm
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNHEARD: Outcome = Outcome::Censored { code: "no_feedback" };

    fn rewarded() -> Outcome {
        Outcome::Rewarded {
            reward: 1.0,
            signal: "accept",
            feedback_at: None,
        }
    }

    #[test]
    fn the_alarm_goes_on_with_too_many_unscored_and_off_again() {
        let mut unscored = Unscored::new(0.9);
        (0..WINDOW_MIN - 1).for_each(|_| unscored.note("chat", &UNHEARD));
        assert!(!unscored.alarm("chat"), "too few to say anything");
        unscored.note("chat", &UNHEARD);
        assert!(unscored.alarm("chat"));
        (0..WINDOW / 5).for_each(|_| unscored.note("chat", &rewarded()));
        assert!(!unscored.alarm("chat"));
        (0..WINDOW).for_each(|_| unscored.note("chat", &UNHEARD));
        assert!(unscored.alarm("chat"), "old ones are forgotten");
    }

    #[test]
    fn what_was_never_to_be_scored_does_not_count_and_unknown_surfaces_share_a_name() {
        let mut unscored = Unscored::new(0.5);
        let evaluation = Outcome::Censored { code: "evaluation" };
        (0..WINDOW).for_each(|_| unscored.note("chat", &evaluation));
        assert!(unscored.surfaces.is_empty());
        let unknown = Outcome::Censored {
            code: "unknown_surface",
        };
        (0..WINDOW).for_each(|nth| unscored.note(&format!("surface-{nth}"), &unknown));
        assert!(unscored.alarm(UNKNOWN));
        assert_eq!(unscored.surfaces.len(), 1);
    }
}
