//! What a run showed, in words. Pure.

use std::cmp::Ordering;

use report::{
    Interval,
    number::{decimal, interval, percent, range, signed},
};

use super::{Parameters, RunReport, Served};
use crate::{
    references::{Capability, Comparison, References},
    stats::{FOLLOWING, FROZEN, LEARNING},
};

/// The heading of a report, and whether it is good news.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Conclusion {
    pub title: &'static str,
    pub tone: Tone,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tone {
    Good,
    Open,
    Bad,
}

/// What the intervals allow to say. `right`: the last version's capability minus the base's. `earned`:
/// the reward of all users outside the frozen arm minus what the base in its best way would have earned
/// them. Neither grows because the policy is silent more often.
fn conclude(right: Option<Interval>, earned: Option<Interval>) -> Conclusion {
    use Ordering::{Equal as Unclear, Greater as Up, Less as Down};
    use Tone::{Bad, Good, Open};
    let (title, tone) = match (right.map(side_of_zero), earned.map(side_of_zero)) {
        (None, _) | (_, None) => ("Too little was measured to tell", Open),
        (Some(Up), Some(Up)) => ("It learned, and users earn more", Good),
        (Some(Up), Some(Unclear)) => ("It learned", Good),
        (Some(Up), Some(Down)) => ("It learned, but users earn less", Open),
        (Some(Unclear), Some(Up)) => ("Users earn more; whether it learned is not clear", Good),
        (Some(Unclear), Some(Unclear)) => ("No clear difference", Open),
        (Some(Unclear), Some(Down)) => ("Users earn less; whether it learned is not clear", Bad),
        (Some(Down), Some(Up)) => ("Users earn more, but it is right less often", Open),
        (Some(Down), Some(Unclear | Down)) => ("It got worse", Bad),
    };
    Conclusion { title, tone }
}

/// Equal: the interval contains 0.
fn side_of_zero(interval: Interval) -> Ordering {
    if interval.is_above_zero() {
        Ordering::Greater
    } else if interval.is_below_zero() {
        Ordering::Less
    } else {
        Ordering::Equal
    }
}

impl RunReport {
    pub fn conclusion(&self) -> Conclusion {
        conclude(
            self.capability().and_then(|capability| capability.right_per_100),
            self.earned().and_then(|best| best.together.reward),
        )
    }

    /// Of the last version.
    fn capability(&self) -> Option<&Capability> {
        self.references.as_ref()?.capability.as_ref()
    }

    /// All users outside the frozen arm against the base in its best way, in the last third.
    fn earned(&self) -> Option<&Comparison> {
        self.references.as_ref()?.best()
    }

    /// One line for the terminal.
    pub fn summary(&self) -> String {
        let [learning, _, frozen] = self.all_arms();
        let difference = |of: Option<Interval>, served: Served| {
            let reward = of.map_or("no difference measured".to_owned(), |difference| {
                let Interval { mean, ci95 } = difference;
                let (mean, ends) = (signed(Some(mean), 3), range(Some(ci95), 3));
                format!("{mean} reward per pause over {FROZEN} (95% {ends})")
            });
            let otherwise = self.served_otherwise(served).map_or("", |_| ", served in another way");
            reward + otherwise
        };
        format!(
            "{}. {}{LEARNING} {}, {FOLLOWING} {}; accepts per 100 pauses {} against {}; shown {} against {}",
            self.conclusion().title,
            self.what_was_learned()
                .into_iter()
                .map(|sentence| sentence + " ")
                .collect::<String>(),
            difference(self.difference, self.parameters.learning),
            difference(self.following_difference, self.parameters.following),
            decimal(learning.accepts_per_100, 1),
            decimal(frozen.accepts_per_100, 1),
            percent(learning.show_rate, 0),
            percent(frozen.show_rate, 0),
        )
    }

    /// The result in sentences, for the top of the page.
    pub fn sentences(&self) -> Vec<String> {
        let [learning, following, frozen] = self.all_arms();
        let mut sentences = self.what_was_learned();
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
        }
        let Parameters {
            learning: exploring,
            following,
            ..
        } = &self.parameters;
        for (arm, served) in [(LEARNING, exploring), (FOLLOWING, following)] {
            if let Some(ways) = self.served_otherwise(*served) {
                sentences.push(format!(
                    "{arm} {ways}. So its difference from {FROZEN} is of version and way of serving together."
                ));
            }
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
        sentences.extend(self.facts.alarms.iter().map(|alarm| format!("{alarm}.")));
        sentences
    }

    /// What the heading says, with its figures.
    fn what_was_learned(&self) -> Vec<String> {
        let right = self.capability().and_then(|of| {
            let of_100 = |interval: Option<Interval>| decimal(interval.map(|interval| interval.mean), 1);
            Some(format!(
                "At pauses of users on whom nothing was trained, the last version's greedy text is right at {} of 100, the \
                 base's at {}; difference {}.",
                of_100(of.version_right_per_100),
                of_100(of.base_right_per_100),
                interval(Some(of.right_per_100?), 1),
            ))
        });
        let earned = self.earned().and_then(|best| {
            Some(format!(
                "In the last third, all users outside {FROZEN} together, minus what “{}” would have earned at the same \
                 pauses: {} reward per pause.",
                best.name,
                interval(Some(best.together.reward?), 3),
            ))
        });
        right.into_iter().chain(earned).collect()
    }

    /// How an arm is served in another way than the frozen arm: that part of its difference is no learning.
    fn served_otherwise(&self, served: Served) -> Option<String> {
        let temperature = self.parameters.setup.temperature;
        let colder = served.temperature_max.filter(|bound| *bound < f64::from(temperature));
        let colder = colder.map(|bound| format!("is sampled at a temperature of at most {bound}, not {temperature}"));
        let surer = served
            .probability_min
            .map(|bound| format!("shows no text whose probability is below {bound}"));
        let ways = [colder, surer].into_iter().flatten().collect::<Vec<_>>();
        (!ways.is_empty()).then(|| ways.join(" and "))
    }

    /// What a reader should know before believing more than the result says.
    pub fn not_reached(&self) -> Vec<String> {
        let comparisons = self.references.iter().flat_map(References::of_the_base);
        let mut points: Vec<String> = comparisons
            .filter_map(|comparison| {
                let reward = comparison.together.reward?;
                let result = match side_of_zero(reward) {
                    Ordering::Greater => return None,
                    Ordering::Less => "still earned more on the same pauses",
                    Ordering::Equal => "is not clearly beaten on the same pauses",
                };
                let (name, difference) = (&comparison.name, interval(Some(reward), 3));
                Some(format!(
                    "“{name}” {result}. Last third, all users outside {FROZEN} minus this: {difference}."
                ))
            })
            .collect();
        let (shed, failed, due) = (self.facts.counts.shed, self.facts.counts.failed, self.facts.counts.due);
        let generations = self.staleness.generations;
        let facts = [
            (
                self.references.is_none(),
                "Reference policies were not measured in this run.".to_owned(),
            ),
            (
                self.parameters.setup.control,
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
            (self.facts.interrupted, "The run was ended early by hand.".to_owned()),
            (
                !self.facts.settled,
                "Some generations had no final disposition when the figures were taken.".to_owned(),
            ),
            (!self.facts.ledger.balanced, "The ledger does not add up.".to_owned()),
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
        let meaning = match side_of_zero(accepts) {
            Ordering::Greater => "Accepted suggestions clearly rose.",
            Ordering::Less if from_showing > 0.0 && reward.mean > 0.0 => {
                "Accepted suggestions clearly fell. The gain comes from showing fewer wrong suggestions."
            }
            Ordering::Less => "Accepted suggestions clearly fell.",
            Ordering::Equal => "This run does not show whether accepted suggestions rose or fell.",
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
    fn the_heading_is_of_what_the_text_can_do_and_of_what_users_earn() {
        let (up, down, unclear) = (interval(0.01, 0.05), interval(-0.05, -0.01), interval(-0.01, 0.05));
        let title = |right, earned| conclude(right, earned).title;
        assert_eq!(title(up, up), "It learned, and users earn more");
        assert_eq!(title(up, interval(0.0, 0.05)), "It learned");
        assert_eq!(title(up, down), "It learned, but users earn less");
        assert_eq!(title(unclear, up), "Users earn more; whether it learned is not clear");
        assert_eq!(title(unclear, unclear), "No clear difference");
        assert_eq!(title(unclear, down), "Users earn less; whether it learned is not clear");
        assert_eq!(title(down, up), "Users earn more, but it is right less often");
        assert_eq!(title(down, unclear), "It got worse");
        assert_eq!(title(down, down), "It got worse");
        for (right, earned) in [(None, up), (up, None), (None, None)] {
            assert_eq!(title(right, earned), "Too little was measured to tell");
        }
        assert_eq!(conclude(unclear, down).tone, Tone::Bad);
        assert_eq!(conclude(up, up).tone, Tone::Good);
    }

    #[test]
    fn an_arm_that_only_shows_less_did_not_learn() {
        let mut silent = report(interval(0.01, 0.05), interval(1.0, 3.0));
        let references = silent.references.as_mut().unwrap();
        references.capability.as_mut().unwrap().right_per_100 = interval(-0.9, 0.6);
        for comparison in &mut references.comparisons {
            comparison.together.reward = interval(-0.02, 0.01);
        }
        assert_eq!(silent.conclusion().title, "No clear difference");
        let words = silent.sentences();
        assert!(words[0].contains("difference −0.2 (95% −0.9 … +0.6)"), "{words:?}");
        assert!(
            words[1].contains("reward per pause") && words[1].contains("−0.005"),
            "{words:?}"
        );
    }

    #[test]
    fn a_gain_from_showing_less_is_called_that() {
        let words = report(interval(0.01, 0.05), interval(-6.0, -2.0)).sentences().join(" ");
        assert!(words.contains("earned 0.030 more"), "{words}");
        assert!(
            words.contains("Of +0.030, −0.040 comes from accepts and +0.070 from showing less."),
            "{words}"
        );
        assert!(words.contains("The gain comes from showing fewer wrong"), "{words}");
        let words = report(interval(-0.05, -0.01), interval(-3.0, -1.0))
            .sentences()
            .join(" ");
        assert!(
            words.contains("earned 0.030 less") && words.contains("Accepted suggestions clearly fell."),
            "{words}"
        );
        assert!(!words.contains("The gain"), "{words}");
    }

    #[test]
    fn an_arm_that_is_served_in_another_way_is_named() {
        let mut report = report(interval(0.01, 0.05), interval(1.0, 3.0));
        assert!(
            !report.summary().contains("served in another way"),
            "{}",
            report.summary()
        );
        report.parameters.learning.probability_min = Some(0.01);
        report.parameters.setup.temperature = 1.0;
        report.parameters.following.temperature_max = Some(0.0);
        let summary = report.summary();
        assert_eq!(summary.matches("served in another way").count(), 2, "{summary}");
        let words = report.sentences().join(" ");
        assert!(
            words.contains("learner shows no text whose probability is below 0.01."),
            "{words}"
        );
        assert!(
            words.contains("champion is sampled at a temperature of at most 0, not 1."),
            "{words}"
        );
    }

    #[test]
    fn the_alarms_of_the_run_are_in_the_sentences_and_the_table() {
        let mut report = sample::report();
        let message = "`learner` shows 3.1% of its generations".to_owned();
        report.facts.alarms.push(Alarm {
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
                thirds: vec![paired(interval(-0.5, -0.4))],
                together: paired(last),
            }
        };
        let comparisons = [
            ("base, greedy", interval(0.02, 0.03)),
            ("base, best threshold", interval(-0.02, -0.01)),
            ("another", interval(-0.01, 0.01)),
            ("oracle: greedy, only where right", interval(-0.2, -0.1)),
        ];
        let mut report = sample::report();
        report.references = Some(References {
            comparisons: comparisons.map(comparison).into(),
            ..References::default()
        });
        let points = report.not_reached();
        assert_eq!(
            points[0],
            "“base, best threshold” still earned more on the same pauses. Last third, all users outside base \
             minus this: −0.015 (95% −0.020 … −0.010)."
        );
        assert!(points[1].starts_with("“another” is not clearly beaten"), "{points:?}");
        assert!(
            !points
                .iter()
                .any(|point| point.contains("oracle") || point.contains("base, greedy")),
            "{points:?}"
        );
        report.facts.ledger.balanced = false;
        assert!(report.not_reached().contains(&"The ledger does not add up.".to_owned()));
    }
}
