//! `[trainer.realtime.alarms]`.

use anyhow::bail;
use edge::options::above;
use evidence::change::{Design, Error};
use evidence::figure::Figure;

/// Smallest allowed `show_rate_window`. With fewer generations a show rate says little.
pub const SHOW_RATE_WINDOW_MIN: u32 = 100;

edge::options! {
    /// `[trainer.realtime.alarms]`: alarms that do not stop the run.
    #[derive(Copy)]
    pub struct Alarms {
        /// The alarm is on if the learning arm shows a smaller share of its generations; 0 to 1. It
        /// is also on below a third of what the other arms show.
        pub show_rate_min: f64 = 0.1 => 0.0..=1.0,
        /// How many of an arm's latest generations its show rate is computed from; at least 100.
        pub show_rate_window: u32 = 500 => SHOW_RATE_WINDOW_MIN..,
        /// The alarm is on if a larger share of the latest 512 samples was quarantined; 0 to 1.
        pub quarantine_share_max: f64 = 0.05 => 0.0..=1.0,
        /// The alarm is on if the log-probabilities of the latest 512 samples of other engines have
        /// a larger mean k3, nats per token. A token counts with at most 0.2, and a quarantined
        /// sample not at all. That of our own engine has no bound: it is on if any sample differs at
        /// all.
        pub remote_k3_max: f64 = 0.001 => above(0.0),
        /// The alarm is on if a larger share of the latest 512 samples of the learning arm lacked
        /// proof of who sampled them; 0 to 1. 1: never.
        pub unproven_share_max: f64 = 0.05 => 0.0..=1.0,
        /// The alarm is on if a cap dropped a larger share of the latest 512 samples of the learning
        /// arm; 0 to 1. 1: never.
        pub capped_share_max: f64 = 0.5 => 0.0..=1.0,
        /// Changes of a figure of the learning arm's answers up to this are no alarm. Figures are
        /// the shares of shown, accepted, edited, unanswered, unscored and contradictory ones, of
        /// failed tool calls and repetition; length; entropy. Changes of shares count as they are,
        /// of lengths and entropies v as v / (v + mean at first), where 0.05 is about 22%. Above 0,
        /// at most 0.5. 1: never.
        pub change_margin: f64 = 0.05,
        /// Mean number of the arm's trajectories until a false alarm about one figure of one
        /// surface, at least; 100 or more.
        pub answers_per_false_alarm: f64 = 100_000.0,
        /// How many of the arm's trajectories a figure is compared with; 100 or more.
        pub reference_answers: u32 = 1_000,
    }
}

impl Alarms {
    /// How changes of this figure are looked for.
    pub fn design(&self, figure: Figure) -> Design {
        figure.design(self.change_margin, self.answers_per_false_alarm, self.reference_answers)
    }

    /// Refuses values that cannot work. The text names the field as in the file.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        self.check_ranges("trainer.realtime.alarms")?;
        if self.change_margin == 1.0 {
            return Ok(());
        }
        match self.design(Figure::Shown).check() {
            Ok(()) => Ok(()),
            Err(Error::Margin(margin)) => {
                bail!("trainer.realtime.alarms.change_margin is {margin}; it must be above 0 and at most 0.5, or 1")
            }
            Err(Error::FalseAlarms(_)) => bail!("trainer.realtime.alarms.answers_per_false_alarm must be at least 100"),
            Err(Error::Reference(_)) => bail!("trainer.realtime.alarms.reference_answers must be at least 100"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(change: fn(&mut Alarms)) -> String {
        let mut alarms = Alarms::default();
        change(&mut alarms);
        alarms.check().unwrap_err().to_string()
    }

    #[test]
    fn an_alarm_without_enough_generations_is_refused() {
        assert!(error(|alarms| alarms.show_rate_window = 99).contains("show_rate_window"));
        assert!(error(|alarms| alarms.show_rate_min = f64::NAN).contains("show_rate_min"));
    }

    #[test]
    fn an_alarm_about_changes_that_promises_nothing_is_refused() {
        let refused = |change: fn(&mut Alarms), field: &str| {
            let error = error(change);
            let named = format!("trainer.realtime.alarms.{field}");
            assert!(error.starts_with(&named), "{error}");
        };
        refused(|alarms| alarms.change_margin = 0.0, "change_margin");
        refused(|alarms| alarms.change_margin = 0.6, "change_margin");
        refused(
            |alarms| alarms.answers_per_false_alarm = f64::NAN,
            "answers_per_false_alarm",
        );
        refused(|alarms| alarms.reference_answers = 99, "reference_answers");
        let never = Alarms {
            change_margin: 1.0,
            ..Alarms::default()
        };
        never.check().unwrap();
    }
}
