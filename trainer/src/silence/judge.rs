//! When an arm counts as silent, and how that is said. Pure.

/// An arm shows too little where it shows less than this part of what its reference shows.
const PART_OF_REFERENCE: f64 = 1.0 / 3.0;
/// A rate that moves around its bound is not a new alarm each time: one ends only this far above.
const RECOVERY: f64 = 1.25;
/// Fewer generations say too little.
pub const GENERATIONS_MIN: i64 = 100;

/// How much of what was generated was shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Shown {
    pub generations: i64,
    pub shown: i64,
}

impl Shown {
    pub fn rate(self) -> f64 {
        self.shown as f64 / self.generations.max(1) as f64
    }

    pub fn is_enough(self) -> bool {
        self.generations >= GENERATIONS_MIN
    }
}

/// What the learning arm's show rate is compared with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Reference {
    /// The other arms, lately.
    Others(Shown),
    /// The version that the run started from, at first.
    First { version: i64, shown: Shown },
}

impl Reference {
    pub fn rate(self) -> f64 {
        match self {
            Reference::Others(shown) | Reference::First { shown, .. } => shown.rate(),
        }
    }

    fn words(self) -> String {
        let rate = percent(self.rate());
        match self {
            Reference::Others(_) => format!("the other arms show {rate}"),
            Reference::First { version, .. } => format!("version {version}, from which it started, showed {rate}"),
        }
    }
}

/// One look at the learning arm.
#[derive(Debug, Clone, PartialEq)]
pub struct Look<'a> {
    pub arm: &'a str,
    pub shown: Shown,
    pub reference: Option<Reference>,
    /// Share of its requests that explore.
    pub explore: f64,
    /// Below this show rate an arm is silent, whatever the others do.
    pub rate_min: f64,
}

impl Look<'_> {
    /// The show rate below which the arm is silent.
    pub fn bound(&self) -> f64 {
        let relative = self.reference.map_or(0.0, |r| PART_OF_REFERENCE * r.rate());
        self.rate_min.max(relative)
    }

    /// Whether the arm is silent now, if it `was` before. Too few generations change nothing.
    pub fn is_silent(&self, was: bool) -> bool {
        if !self.shown.is_enough() {
            return was;
        }
        let bound = if was { RECOVERY * self.bound() } else { self.bound() };
        self.shown.rate() < bound
    }

    /// What people read when the alarm begins.
    pub fn began(&self) -> String {
        let Look { arm, explore, .. } = self;
        let compared = self
            .reference
            .map_or(String::new(), |reference| format!("; {}", reference.words()));
        let exploration = match *explore > 0.0 {
            true => format!(
                "the {} of its requests that exploration makes it show",
                percent(*explore)
            ),
            false => "no exploration (`explore` is 0)".to_owned(),
        };
        format!(
            "{arm} falls silent: it shows {} of its latest {} generations, and should show {}{compared}. What it keeps to \
             itself earns no answers, so it can only learn from the little that it shows and from {exploration}. Give it \
             the version it served before with `springtide release rollback --reason '…'`, or raise `explore` of its \
             [[release.arm]]",
            percent(self.shown.rate()),
            self.shown.generations,
            percent(self.bound()),
        )
    }

    /// What people read when it ends.
    pub fn ended(&self) -> String {
        format!(
            "{} shows again: {} of its latest {} generations",
            self.arm,
            percent(self.shown.rate()),
            self.shown.generations
        )
    }
}

fn percent(rate: f64) -> String {
    let percent = 100.0 * rate;
    // a tenth matters only where there is hardly anything
    if percent < 9.95 {
        format!("{percent:.1} %")
    } else {
        format!("{percent:.0} %")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(shown: i64, generations: i64) -> Shown {
        Shown { generations, shown }
    }

    fn look(rate: i64, reference: Option<Reference>) -> Look<'static> {
        Look {
            arm: "champion",
            shown: shown(rate, 1000),
            reference,
            explore: 0.02,
            rate_min: 0.1,
        }
    }

    #[test]
    fn an_arm_is_silent_below_its_bound_or_below_a_third_of_the_others() {
        assert!(look(99, None).is_silent(false));
        assert!(!look(100, None).is_silent(false));
        let others = Some(Reference::Others(shown(450, 500)));
        assert!(look(299, others).is_silent(false));
        assert!(!look(301, others).is_silent(false));
        // others that show little themselves lower no bound
        let poor = Some(Reference::Others(shown(10, 500)));
        assert!(look(99, poor).is_silent(false));
    }

    #[test]
    fn an_alarm_ends_only_well_above_where_it_began() {
        assert!(look(101, None).is_silent(true));
        assert!(!look(126, None).is_silent(true));
    }

    #[test]
    fn too_few_generations_change_nothing() {
        let few = Look {
            shown: shown(0, 99),
            ..look(0, None)
        };
        assert!(!few.is_silent(false) && few.is_silent(true));
    }

    #[test]
    fn the_message_says_what_it_means_and_what_to_do() {
        let reference = Some(Reference::Others(shown(170, 500)));
        let said = look(41, reference).began();
        assert!(
            said.starts_with(
                "champion falls silent: it shows 4.1 % of its latest 1000 generations, and should show 11 %; \
                 the other arms show 34 %. "
            ),
            "{said}"
        );
        assert!(
            said.contains("the 2.0 % of its requests that exploration makes it show"),
            "{said}"
        );
        assert!(
            said.contains("release rollback") && said.contains("raise `explore`"),
            "{said}"
        );
        let first = Some(Reference::First {
            version: 1,
            shown: shown(150, 500),
        });
        let mute = Look {
            explore: 0.0,
            ..look(41, first)
        };
        assert!(mute.began().contains("version 1, from which it started, showed 30 %"));
        assert!(mute.began().contains("no exploration (`explore` is 0)"));
        assert_eq!(
            look(250, None).ended(),
            "champion shows again: 25 % of its latest 1000 generations"
        );
    }
}
