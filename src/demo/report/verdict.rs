//! What a run showed, in words. Pure: from the two differences between the arms, and nothing else, to a title and a few plain
//! sentences.

use super::Report;
use crate::demo::{
    history::Alarm,
    interval::Interval,
    number::{or_dash, percent, range},
    references::Headroom,
    tally::{FROZEN, Figures, LEARNING},
};

/// What the intervals allow to be said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Too little happened for an interval.
    Unknown,
    Better,
    /// More reward, clearly, and clearly fewer accepted suggestions.
    Quieter,
    Unclear,
    Worse,
}

/// Learning arm minus frozen arm: reward per pause, and accepts per 100 pauses.
pub fn verdict(reward: Option<Interval>, accepts: Option<Interval>) -> Verdict {
    let Some(Interval { ci95: [low, high], .. }) = reward else {
        return Verdict::Unknown;
    };
    if high < 0.0 {
        Verdict::Worse
    } else if low <= 0.0 {
        Verdict::Unclear
    } else if fell(accepts) {
        Verdict::Quieter
    } else {
        Verdict::Better
    }
}

/// The whole interval is below 0.
fn fell(difference: Option<Interval>) -> bool {
    difference.is_some_and(|difference| difference.ci95[1] < 0.0)
}

fn rose(difference: Option<Interval>) -> bool {
    difference.is_some_and(|difference| difference.ci95[0] > 0.0)
}

impl Report {
    pub fn verdict(&self) -> Verdict {
        verdict(self.difference, self.difference_accepts_per_100)
    }

    /// A few words.
    pub fn title(&self) -> &'static str {
        match self.verdict() {
            Verdict::Unknown => "Too little happened to tell",
            Verdict::Better if rose(self.difference_accepts_per_100) => "It learned",
            Verdict::Better => "It earns more; whether it is right more often is not clear",
            Verdict::Quieter => "It learned to be quiet rather than to be right",
            Verdict::Unclear => "No clear difference",
            Verdict::Worse => "It got worse",
        }
    }

    /// One line for a terminal.
    pub fn summary(&self) -> String {
        let [learning, frozen] = self.both();
        let difference = self
            .difference
            .map_or("no difference measured".to_owned(), |difference| {
                format!(
                    "{:+.3} reward per pause over {FROZEN} (95% {})",
                    difference.mean,
                    range(Some(difference.ci95), 3)
                )
            });
        format!(
            "{}: {difference}; accepts per 100 pauses {} against {}; shown {} against {}",
            self.title(),
            or_dash(learning.accepts_per_100, 1),
            or_dash(frozen.accepts_per_100, 1),
            percent(learning.show_rate, 0),
            percent(frozen.show_rate, 0),
        )
    }

    /// The verdict at length, for the top of the page.
    pub fn sentences(&self) -> Vec<String> {
        let [learning, frozen] = self.both();
        let mut sentences = Vec::new();
        match self.difference {
            Some(difference) => sentences.push(format!(
                "Per pause, the learning arm ({LEARNING}) earned {:.3} {} than the frozen one ({FROZEN}); the 95% interval is {}, \
                 over {} pauses of {} users.",
                difference.mean.abs(),
                if difference.mean < 0.0 { "less" } else { "more" },
                range(Some(difference.ci95), 3),
                learning.n + frozen.n,
                learning.users + frozen.users,
            )),
            None => sentences.push("An interval takes at least two users in each arm.".to_owned()),
        }
        sentences.push(format!(
            "Of 100 pauses, {} ended with an accepted suggestion, against {} with {FROZEN}{}. It showed a suggestion at {} of \
             pauses, {FROZEN} at {}; of what was shown and answered, {} was accepted, against {}.",
            or_dash(learning.accepts_per_100, 1),
            or_dash(frozen.accepts_per_100, 1),
            self.difference_accepts_per_100.map_or(String::new(), |d| format!(
                " (difference {:+.1}, 95% {})",
                d.mean,
                range(Some(d.ci95), 1)
            )),
            percent(learning.show_rate, 0),
            percent(frozen.show_rate, 0),
            percent(learning.accept_rate, 0),
            percent(frozen.accept_rate, 0),
        ));
        sentences.extend(self.where_from());
        sentences.extend(self.headroom.as_ref().and_then(placed));
        sentences.extend(self.alarms.iter().map(Alarm::told));
        sentences
    }

    /// Reward is accepts less τ times what was shown, so a difference in reward has exactly these two parts.
    fn where_from(&self) -> Option<String> {
        let (reward, accepts) = (self.difference?, self.difference_accepts_per_100?);
        // Rounded first, so that the parts add up as they are written.
        let [total, from_accepts] = [reward.mean, accepts.mean / 100.0].map(|part| (1e3 * part).round() / 1e3);
        let from_showing = total - from_accepts;
        let parts = format!(
            "Of {total:+.3}, {from_accepts:+.3} comes from accepts and {from_showing:+.3} from showing {}.",
            if from_showing < 0.0 { "more" } else { "less" },
        );
        let meaning = if self.verdict() == Verdict::Quieter {
            "The gain is silence: accepted suggestions fell clearly, and what it earned more, it earned by not showing wrong \
             ones. It learned to be quiet rather than to be right."
        } else if fell(Some(accepts)) && reward.mean > 0.0 {
            "If there is a gain, it is silence: accepted suggestions fell clearly."
        } else if rose(Some(accepts)) {
            "Accepted suggestions rose clearly: it is right more often, not only quiet more often."
        } else if fell(Some(accepts)) {
            "Accepted suggestions fell clearly."
        } else {
            "Whether accepted suggestions rose or fell, this run does not show."
        };
        Some(format!("{parts} {meaning}"))
    }

    /// The learning arm's figures and the frozen one's.
    pub fn both(&self) -> [Figures; 2] {
        [LEARNING, FROZEN].map(|arm| self.arms.get(arm).cloned().unwrap_or_default())
    }
}

/// Where the learning arm ended on the scale: which references it beats on the last third of its own pauses, which beat it.
/// The oracle beats everybody, so it is not named.
fn placed(headroom: &Headroom) -> Option<String> {
    let mut groups = [
        ("clearly more than", Vec::new()),
        ("clearly less than", Vec::new()),
        ("not clearly more or less than", Vec::new()),
    ];
    for shadow in headroom
        .shadows
        .iter()
        .filter(|shadow| !shadow.name.starts_with("oracle"))
    {
        let [low, high] = shadow.thirds.last()?.reward?.ci95;
        let group = if low > 0.0 {
            0
        } else if high < 0.0 {
            1
        } else {
            2
        };
        groups[group].1.push(format!("“{}”", shadow.name));
    }
    let groups = groups.iter().filter(|(_, names)| !names.is_empty());
    let groups = groups.map(|(how, names)| format!("{how} {}", names.join(" and ")));
    let groups = groups.collect::<Vec<_>>().join(", ");
    (!groups.is_empty()).then(|| format!("In the last third, on the very same pauses, it earned {groups}."))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::report::tests::report;

    fn interval(low: f64, high: f64) -> Option<Interval> {
        Some(Interval {
            mean: (low + high) / 2.0,
            ci95: [low, high],
        })
    }

    #[test]
    fn the_verdict_follows_the_intervals() {
        let some_accepts = interval(-1.0, 1.0);
        assert_eq!(verdict(None, None), Verdict::Unknown);
        assert_eq!(verdict(interval(0.01, 0.05), some_accepts), Verdict::Better);
        assert_eq!(verdict(interval(0.01, 0.05), None), Verdict::Better);
        assert_eq!(verdict(interval(-0.01, 0.05), some_accepts), Verdict::Unclear);
        assert_eq!(verdict(interval(0.0, 0.05), some_accepts), Verdict::Unclear);
        assert_eq!(verdict(interval(-0.05, -0.01), some_accepts), Verdict::Worse);
        assert_eq!(verdict(interval(0.01, 0.05), interval(-6.0, -2.0)), Verdict::Quieter);
        assert_eq!(verdict(interval(-0.01, 0.05), interval(-6.0, -2.0)), Verdict::Unclear);
    }

    #[test]
    fn a_gain_by_silence_is_called_so() {
        let mut report = report();
        report.difference = interval(0.01, 0.05);
        report.difference_accepts_per_100 = interval(-6.0, -2.0);
        let words = report.sentences().join(" ");
        assert_eq!(report.title(), "It learned to be quiet rather than to be right");
        assert!(words.contains("earned 0.030 more"), "{words}");
        assert!(
            words.contains("Of +0.030, -0.040 comes from accepts and +0.070 from showing less."),
            "{words}"
        );
        assert!(words.contains("The gain is silence"), "{words}");
    }

    #[test]
    fn a_gain_that_is_not_clear_but_silent_is_called_so_too() {
        let mut report = report();
        report.difference = interval(-0.01, 0.03);
        report.difference_accepts_per_100 = interval(-6.0, -2.0);
        assert_eq!(report.title(), "No clear difference");
        assert!(
            report
                .sentences()
                .join(" ")
                .contains("If there is a gain, it is silence")
        );
    }

    #[test]
    fn what_the_run_warned_of_is_told() {
        let mut report = report();
        let message = "`champion` shows 3.1% of its generations".to_owned();
        report.alarms.push(Alarm {
            at_seconds: 125.9,
            message,
        });
        let told = "alarm after 02:05: `champion` shows 3.1% of its generations";
        assert_eq!(report.sentences().last().unwrap(), told);
        assert!(report.table().contains(told));
    }

    #[test]
    fn more_accepts_are_no_silence() {
        let mut report = report();
        report.difference = interval(0.01, 0.05);
        report.difference_accepts_per_100 = interval(1.0, 3.0);
        let words = report.sentences().join(" ");
        assert_eq!(report.title(), "It learned");
        assert!(words.contains("rose clearly") && !words.contains("silence"), "{words}");
        assert!(
            report
                .summary()
                .starts_with("It learned: +0.030 reward per pause over base")
        );
    }

    #[test]
    fn the_place_on_the_scale_is_that_of_the_last_third() {
        use crate::demo::references::{Comparison, Shadow};
        let shadow = |name: &str, last: Option<Interval>| {
            let comparison = |reward| Comparison {
                reference: Figures::default(),
                reward,
                accepts_per_100: None,
            };
            Shadow {
                name: name.to_owned(),
                whole: comparison(None),
                thirds: vec![comparison(interval(-0.5, -0.4)), comparison(last)],
            }
        };
        let mut headroom = Headroom {
            shadows: vec![
                shadow("base, T = 1", interval(0.01, 0.02)),
                shadow("base, greedy", interval(0.02, 0.03)),
                shadow("base, best threshold", interval(-0.02, -0.01)),
                shadow("another", interval(-0.01, 0.01)),
                shadow("oracle", interval(-0.2, -0.1)),
            ],
            ..Headroom::default()
        };
        assert_eq!(
            placed(&headroom).unwrap(),
            "In the last third, on the very same pauses, it earned clearly more than “base, T = 1” and “base, greedy”, \
             clearly less than “base, best threshold”, not clearly more or less than “another”."
        );
        headroom.shadows.clear();
        assert_eq!(placed(&headroom), None);
    }

    #[test]
    fn a_loss_is_a_loss() {
        let mut report = report();
        report.difference = interval(-0.05, -0.01);
        report.difference_accepts_per_100 = interval(-3.0, -1.0);
        let words = report.sentences().join(" ");
        assert_eq!(report.title(), "It got worse");
        assert!(words.contains("earned 0.030 less") && words.contains("Accepted suggestions fell clearly."));
        assert!(!words.contains("silence"), "{words}");
    }
}
