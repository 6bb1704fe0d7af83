//! When a show rate is too low, and the messages about it. Pure.

use crate::options::SHOW_RATE_WINDOW_MIN;

/// The learning arm must show at least this share of its reference's rate.
const PART_OF_REFERENCE: f64 = 1.0 / 3.0;
/// The alarm ends this far above the bound, so that a rate close to the bound raises one alarm
/// only.
const RECOVERY: f64 = 1.25;

/// Generations, and how many of them showed something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ShowCounts {
    pub generations: i64,
    pub shown: i64,
}

impl ShowCounts {
    pub fn rate(self) -> f64 {
        self.shown as f64 / self.generations.max(1) as f64
    }

    pub fn is_enough(self) -> bool {
        self.generations >= i64::from(SHOW_RATE_WINDOW_MIN)
    }
}

/// What the learning arm is compared with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Reference {
    /// The other arms' recent generations.
    Others(ShowCounts),
    /// The first generations of the version that the run started from.
    First { version: i64, shown: ShowCounts },
}

impl Reference {
    pub fn rate(self) -> f64 {
        match self {
            Reference::Others(shown) | Reference::First { shown, .. } => shown.rate(),
        }
    }

    fn describe(self) -> String {
        let rate = percent(self.rate());
        match self {
            Reference::Others(_) => format!("the other arms show {rate}"),
            Reference::First { version, .. } => format!("version {version}, where the run started, showed {rate}"),
        }
    }
}

/// The learning arm at one poll.
#[derive(Debug, Clone, PartialEq)]
pub struct Observation<'a> {
    pub arm: &'a str,
    pub shown: ShowCounts,
    pub reference: Option<Reference>,
    /// Share of its requests that explore.
    pub explore: f64,
    /// The bound is at least this, whatever the reference shows.
    pub rate_min: f64,
}

impl Observation<'_> {
    /// A show rate below this is too low.
    pub fn bound(&self) -> f64 {
        let relative = self.reference.map_or(0.0, |r| PART_OF_REFERENCE * r.rate());
        self.rate_min.max(relative)
    }

    /// Whether the show rate is too low now. `was_low` is returned if there are too few
    /// generations.
    pub fn is_low(&self, was_low: bool) -> bool {
        if !self.shown.is_enough() {
            return was_low;
        }
        let bound = if was_low { RECOVERY * self.bound() } else { self.bound() };
        self.shown.rate() < bound
    }

    /// The message when the alarm begins.
    pub fn begin_message(&self) -> String {
        let compared = self
            .reference
            .map_or(String::new(), |reference| format!("; {}", reference.describe()));
        let exploration = match self.explore > 0.0 {
            true => format!("the {} that exploration forces it to show", percent(self.explore)),
            false => "no exploration (`explore` is 0)".to_owned(),
        };
        format!(
            "{} declines almost everything: it shows {} of its latest {} generations, and should show {}{compared}. \
             Declined generations get no feedback, so it learns only from the few that it shows, with {exploration}. Go \
             back to an earlier version with `springtide release rollback VERSION --reason '…'`, or raise `explore` with \
             `springtide release arms --explore {}=SHARE --reason '…'`",
            self.arm,
            percent(self.shown.rate()),
            self.shown.generations,
            percent(self.bound()),
            self.arm,
        )
    }

    /// The message when it ends.
    pub fn end_message(&self) -> String {
        format!(
            "{} shows enough again: {} of its latest {} generations",
            self.arm,
            percent(self.shown.rate()),
            self.shown.generations
        )
    }
}

/// With one decimal below 10 %.
fn percent(rate: f64) -> String {
    let percent = 100.0 * rate;
    let decimals = usize::from(percent < 9.95);
    format!("{percent:.decimals$} %")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(shown: i64, generations: i64) -> ShowCounts {
        ShowCounts { generations, shown }
    }

    fn observe(rate: i64, reference: Option<Reference>) -> Observation<'static> {
        Observation {
            arm: "champion",
            shown: shown(rate, 1000),
            reference,
            explore: 0.02,
            rate_min: 0.1,
        }
    }

    #[test]
    fn a_show_rate_is_low_below_its_bound_or_below_a_third_of_the_other_arms() {
        assert!(observe(99, None).is_low(false));
        assert!(!observe(100, None).is_low(false));
        let others = Some(Reference::Others(shown(450, 500)));
        assert!(observe(299, others).is_low(false));
        assert!(!observe(301, others).is_low(false));
        // other arms with a low show rate do not lower the bound
        let poor = Some(Reference::Others(shown(10, 500)));
        assert!(observe(99, poor).is_low(false));
    }

    #[test]
    fn an_alarm_ends_only_well_above_its_bound() {
        assert!(observe(101, None).is_low(true));
        assert!(!observe(126, None).is_low(true));
    }

    #[test]
    fn too_few_generations_change_nothing() {
        let few = Observation {
            shown: shown(0, 99),
            ..observe(0, None)
        };
        assert!(!few.is_low(false) && few.is_low(true));
    }

    #[test]
    fn the_message_says_what_happened_and_what_to_do() {
        let reference = Some(Reference::Others(shown(170, 500)));
        let message = observe(41, reference).begin_message();
        assert!(
            message.starts_with(
                "champion declines almost everything: it shows 4.1 % of its latest 1000 generations, and should show \
                 11 %; the other arms show 34 %. "
            ),
            "{message}"
        );
        assert!(
            message.contains("the 2.0 % that exploration forces it to show"),
            "{message}"
        );
        assert!(
            message.contains("release rollback") && message.contains("--explore champion="),
            "{message}"
        );
        let first = Some(Reference::First {
            version: 1,
            shown: shown(150, 500),
        });
        let unexplored = Observation {
            explore: 0.0,
            ..observe(41, first)
        };
        assert!(
            unexplored
                .begin_message()
                .contains("version 1, where the run started, showed 30 %")
        );
        assert!(unexplored.begin_message().contains("no exploration (`explore` is 0)"));
        assert_eq!(
            observe(250, None).end_message(),
            "champion shows enough again: 25 % of its latest 1000 generations"
        );
    }
}
