//! What a run showed, in words. Pure.

use report::{
    Interval,
    number::{decimal, interval, percent, range, signed},
};

use super::{Parameters, RunReport};
use crate::stats::{FOLLOWING, FROZEN, LEARNING};

/// What the intervals allow to say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Conclusion {
    /// Too little happened for an interval.
    Unknown,
    /// More reward and more accepted suggestions.
    Learned,
    /// More reward. Whether more suggestions were accepted is not clear.
    EarnsMore,
    /// More reward, but fewer accepted suggestions.
    DeclinesMore,
    Unclear,
    Worse,
}

/// From learning arm minus frozen arm: reward per pause, and accepts per 100 pauses.
fn conclude(reward: Option<Interval>, accepts: Option<Interval>) -> Conclusion {
    match reward {
        None => Conclusion::Unknown,
        Some(reward) if reward.is_below_zero() => Conclusion::Worse,
        Some(reward) if !reward.is_above_zero() => Conclusion::Unclear,
        Some(_) => match accepts {
            Some(accepts) if accepts.is_below_zero() => Conclusion::DeclinesMore,
            Some(accepts) if accepts.is_above_zero() => Conclusion::Learned,
            _ => Conclusion::EarnsMore,
        },
    }
}

impl RunReport {
    pub fn conclusion(&self) -> Conclusion {
        conclude(self.difference, self.difference_accepts_per_100)
    }

    pub fn title(&self) -> &'static str {
        match self.conclusion() {
            Conclusion::Unknown => "Too little happened to tell",
            Conclusion::Learned => "It learned",
            Conclusion::EarnsMore => "It earns more; whether it is right more often is not clear",
            Conclusion::DeclinesMore => "It learned to decline rather than to be right",
            Conclusion::Unclear => "No clear difference",
            Conclusion::Worse => "It got worse",
        }
    }

    /// One line for the terminal.
    pub fn summary(&self) -> String {
        let [learning, _, frozen] = self.all_arms();
        let difference = |of: Option<Interval>| {
            of.map_or("no difference measured".to_owned(), |difference| {
                let Interval { mean, ci95 } = difference;
                let (mean, ends) = (signed(Some(mean), 3), range(Some(ci95), 3));
                format!("{mean} reward per pause over {FROZEN} (95% {ends})")
            })
        };
        format!(
            "{}: {LEARNING} {}, {FOLLOWING} {}; accepts per 100 pauses {} against {}; shown {} against {}",
            self.title(),
            difference(self.difference),
            difference(self.following_difference)
                + if self.served_otherwise().is_some() {
                    ", served in another way"
                } else {
                    ""
                },
            decimal(learning.accepts_per_100, 1),
            decimal(frozen.accepts_per_100, 1),
            percent(learning.show_rate, 0),
            percent(frozen.show_rate, 0),
        )
    }

    /// The result in sentences, for the top of the page.
    pub fn sentences(&self) -> Vec<String> {
        let [learning, following, frozen] = self.all_arms();
        let mut sentences = Vec::new();
        match self.difference {
            Some(difference) => sentences.push(format!(
                "Per pause, the learning arm ({LEARNING}) earned {:.3} {} than the frozen arm ({FROZEN}). The 95% interval \
                 of the difference is {}, over {} pauses of {} users.",
                difference.mean.abs(),
                if difference.mean < 0.0 { "less" } else { "more" },
                range(Some(difference.ci95), 3),
                learning.n + frozen.n,
                learning.users + frozen.users,
            )),
            None => sentences.push("An interval needs at least two users in each arm.".to_owned()),
        }
        if let Some(difference) = self.following_difference {
            sentences.push(format!(
                "The arm that follows it without exploring ({FOLLOWING}) earned {:.3} {} than the frozen arm. The 95% \
                 interval is {}, over {} pauses of {} users.",
                difference.mean.abs(),
                if difference.mean < 0.0 { "less" } else { "more" },
                range(Some(difference.ci95), 3),
                following.n + frozen.n,
                following.users + frozen.users,
            ));
            sentences.extend(self.served_otherwise());
        }
        let difference = self
            .difference_accepts_per_100
            .map(|accepts| interval(Some(accepts), 1));
        sentences.push(format!(
            "Of 100 pauses, {} ended with an accepted suggestion, against {} in the frozen arm{}. The learning arm showed \
             a suggestion at {} of pauses, the frozen arm at {}. Of what was shown and answered, {} was accepted, against {}.",
            decimal(learning.accepts_per_100, 1),
            decimal(frozen.accepts_per_100, 1),
            difference.map_or(String::new(), |difference| format!("; difference {difference}")),
            percent(learning.show_rate, 0),
            percent(frozen.show_rate, 0),
            percent(learning.accept_rate, 0),
            percent(frozen.accept_rate, 0),
        ));
        sentences.extend(self.parts_of_the_difference());
        sentences.extend(self.alarms.iter().map(|alarm| format!("{alarm}.")));
        sentences
    }

    /// The arm that follows is served in another way than the frozen arm: a part of its difference is no
    /// learning.
    fn served_otherwise(&self) -> Option<String> {
        let Parameters {
            following, temperature, ..
        } = &self.parameters;
        let colder = following
            .temperature_max
            .filter(|bound| *bound < f64::from(*temperature));
        let colder = colder.map(|bound| format!("is sampled at a temperature of at most {bound}, not {temperature}"));
        let surer = following
            .probability_min
            .map(|bound| format!("shows no text whose probability is below {bound}"));
        let ways = [colder, surer].into_iter().flatten().collect::<Vec<_>>();
        (!ways.is_empty()).then(|| {
            format!(
                "{FOLLOWING} {}. So its difference from {FROZEN} is of version and way of serving together.",
                ways.join(" and ")
            )
        })
    }

    /// What a reader should know before believing more than the result says.
    pub fn not_reached(&self) -> Vec<String> {
        let comparisons = self.references.iter().flat_map(|references| &references.comparisons);
        // The oracle knows what will be typed, so no policy beats it.
        let references = comparisons.filter(|comparison| !comparison.name.starts_with("oracle"));
        let mut points: Vec<String> = references
            .filter_map(|comparison| {
                let reward = comparison.thirds.last()?.reward?;
                let result = match reward {
                    _ if reward.is_above_zero() => return None,
                    _ if reward.is_below_zero() => "still earned more on the same pauses",
                    _ => "is not clearly beaten on the same pauses",
                };
                let (name, difference) = (&comparison.name, interval(Some(reward), 3));
                Some(format!(
                    "“{name}” {result}. Last third, learning arm minus this: {difference}."
                ))
            })
            .collect();
        let (shed, failed, due) = (self.counts.shed, self.counts.failed, self.counts.due);
        let generations = self.staleness.generations;
        let facts = [
            (
                self.references.is_none(),
                "Reference policies were not measured in this run.".to_owned(),
            ),
            (
                self.parameters.control,
                "This is a control: the answers were permuted, so there was nothing to learn.".to_owned(),
            ),
            (
                self.staleness.dropped > 0,
                format!(
                    "{} of the learning arm's {generations} generations were dropped as stale and taught nothing.",
                    percent(self.staleness.share, 0)
                ),
            ),
            (
                shed + failed > 0,
                format!("Of {due} pauses, {shed} were shed and {failed} failed."),
            ),
            (self.interrupted, "The run was ended early by hand.".to_owned()),
            (
                !self.settled,
                "Some generations had no final disposition when the figures were taken.".to_owned(),
            ),
            (!self.ledger.balanced, "The ledger does not add up.".to_owned()),
            (
                !self.content_hashes_agree,
                "Some answers named a content hash that the trainer did not commit for that version.".to_owned(),
            ),
        ];
        points.extend(facts.into_iter().filter(|(holds, _)| *holds).map(|(_, text)| text));
        points.push("The developers are simulated, and this is one run with one seed.".to_owned());
        points
    }

    /// Reward is accepts minus τ times what was shown, so a difference of rewards has exactly two
    /// parts.
    fn parts_of_the_difference(&self) -> Option<String> {
        let (reward, accepts) = (self.difference?, self.difference_accepts_per_100?);
        // Rounded first, so that the parts add up as they are written.
        let [total, from_accepts] = [reward.mean, accepts.mean / 100.0].map(|part| (1e3 * part).round() / 1e3);
        let from_showing = total - from_accepts;
        let parts = format!(
            "Of {}, {} comes from accepts and {} from showing {}.",
            signed(Some(total), 3),
            signed(Some(from_accepts), 3),
            signed(Some(from_showing), 3),
            if from_showing < 0.0 { "more" } else { "less" },
        );
        let meaning = if self.conclusion() == Conclusion::DeclinesMore {
            "Accepted suggestions clearly fell. It earned more only because it showed fewer wrong suggestions."
        } else if accepts.is_below_zero() && reward.mean > 0.0 {
            "Accepted suggestions clearly fell. If there is a gain, it comes from showing less."
        } else if accepts.is_above_zero() {
            "Accepted suggestions clearly rose: it is right more often, and does not only decline more often."
        } else if accepts.is_below_zero() {
            "Accepted suggestions clearly fell."
        } else {
            "This run does not show whether accepted suggestions rose or fell."
        };
        Some(format!("{parts} {meaning}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        queries::Alarm,
        references::{Comparison, Paired, References},
        results::sample,
        stats::ArmStats,
    };

    fn interval(low: f64, high: f64) -> Option<Interval> {
        Some(Interval {
            mean: (low + high) / 2.0,
            ci95: [low, high],
        })
    }

    fn report(reward: Option<Interval>, accepts: Option<Interval>) -> RunReport {
        RunReport {
            difference: reward,
            difference_accepts_per_100: accepts,
            ..sample::report()
        }
    }

    #[test]
    fn the_conclusion_follows_the_intervals() {
        let (gain, loss, none) = (interval(0.01, 0.05), interval(-0.05, -0.01), interval(-0.01, 0.05));
        assert_eq!(conclude(None, None), Conclusion::Unknown);
        assert_eq!(conclude(gain, gain), Conclusion::Learned);
        assert_eq!(conclude(gain, none), Conclusion::EarnsMore);
        assert_eq!(conclude(gain, None), Conclusion::EarnsMore);
        assert_eq!(conclude(gain, loss), Conclusion::DeclinesMore);
        assert_eq!(conclude(none, loss), Conclusion::Unclear);
        assert_eq!(conclude(interval(0.0, 0.05), gain), Conclusion::Unclear);
        assert_eq!(conclude(loss, gain), Conclusion::Worse);
    }

    #[test]
    fn a_gain_from_showing_less_is_called_that() {
        let declines_more = report(interval(0.01, 0.05), interval(-6.0, -2.0));
        let words = declines_more.sentences().join(" ");
        assert_eq!(declines_more.title(), "It learned to decline rather than to be right");
        assert!(words.contains("earned 0.030 more"), "{words}");
        assert!(
            words.contains("Of +0.030, −0.040 comes from accepts and +0.070 from showing less."),
            "{words}"
        );
        assert!(
            words.contains("only because it showed fewer wrong suggestions"),
            "{words}"
        );

        let unclear = report(interval(-0.01, 0.03), interval(-6.0, -2.0));
        assert_eq!(unclear.title(), "No clear difference");
        assert!(
            unclear
                .sentences()
                .join(" ")
                .contains("If there is a gain, it comes from showing less.")
        );
    }

    #[test]
    fn more_accepts_are_called_learning() {
        let learned = report(interval(0.01, 0.05), interval(1.0, 3.0));
        assert!(learned.sentences().join(" ").contains("clearly rose"));
        let summary = learned.summary();
        assert!(
            summary
                .starts_with("It learned: learner +0.030 reward per pause over base (95% +0.010 … +0.050), champion +"),
            "{summary}"
        );
    }

    #[test]
    fn a_loss_is_called_a_loss() {
        let worse = report(interval(-0.05, -0.01), interval(-3.0, -1.0));
        let words = worse.sentences().join(" ");
        assert_eq!(worse.title(), "It got worse");
        assert!(
            words.contains("earned 0.030 less") && words.contains("Accepted suggestions clearly fell."),
            "{words}"
        );
        assert!(!words.contains("a gain"), "{words}");
    }

    #[test]
    fn the_alarms_of_the_run_are_in_the_sentences_and_the_table() {
        let mut report = sample::report();
        let message = "`learner` shows 3.1% of its generations".to_owned();
        report.alarms.push(Alarm {
            at_seconds: 125.9,
            message,
        });
        let alarm = "alarm after 02:05: `learner` shows 3.1% of its generations";
        assert!(report.sentences().iter().any(|sentence| sentence.starts_with(alarm)));
        assert!(report.table().contains(alarm));
    }

    #[test]
    fn references_that_were_not_beaten_in_the_last_third_are_named() {
        let comparison = |(name, last): (&str, Option<Interval>)| {
            let paired = |reward| Paired {
                reference: ArmStats::default(),
                reward,
                accepts_per_100: None,
            };
            Comparison {
                name: name.to_owned(),
                whole: paired(None),
                thirds: vec![paired(interval(-0.5, -0.4)), paired(last)],
                together: paired(last),
            }
        };
        let comparisons = [
            ("base, greedy", interval(0.02, 0.03)),
            ("base, best threshold", interval(-0.02, -0.01)),
            ("another", interval(-0.01, 0.01)),
            ("oracle", interval(-0.2, -0.1)),
        ];
        let mut report = sample::report();
        report.references = Some(References {
            comparisons: comparisons.map(comparison).into(),
            ..References::default()
        });
        let points = report.not_reached();
        assert_eq!(
            points[0],
            "“base, best threshold” still earned more on the same pauses. Last third, learning arm minus this: \
             −0.015 (95% −0.020 … −0.010)."
        );
        assert!(points[1].starts_with("“another” is not clearly beaten"), "{points:?}");
        assert!(
            !points
                .iter()
                .any(|point| point.contains("oracle") || point.contains("base, greedy")),
            "{points:?}"
        );
        report.ledger.balanced = false;
        assert!(report.not_reached().contains(&"The ledger does not add up.".to_owned()));
    }
}
