//! What the tables would have had of what was said about a trajectory when another definition would have closed it: as long
//! after the end of its horizon as the trajectory was really closed after its own. With the definition that closed it this is
//! what the closer saw.

use time::{Duration, OffsetDateTime};

use super::{About, Closed};
use crate::reward::{Closing, Rule, Signal};

/// What can move the end of a horizon.
enum Arrival {
    Said(Box<About>),
    End(OffsetDateTime),
}

/// `closing` with its episode's end if that was seen, and the signals that were. `end_stored_at`: when an end was stored first;
/// that an earlier one came later does not show.
pub(super) fn seen(
    rule: &Rule,
    closing: Closing,
    end_stored_at: Option<OffsetDateTime>,
    about: Vec<About>,
    closed: &Closed,
) -> (Closing, Vec<Signal>) {
    // What was late came after the closure, whenever its transaction began.
    let after = closed.closed_at + Duration::microseconds(1);
    let came = |stored_at: OffsetDateTime, late: bool| if late { stored_at.max(after) } else { stored_at };
    let delay = closed.closed_at - closed.closes_at.unwrap_or(closed.closed_at);
    let mut arrivals: Vec<(OffsetDateTime, Arrival)> = about
        .into_iter()
        .map(|about| {
            let at = came(about.said.stored_at, about.said.late);
            (at, Arrival::Said(Box::new(about)))
        })
        .chain(end_stored_at.zip(closing.ended_at.map(Arrival::End)))
        .collect();
    arrivals.sort_by_key(|(at, _)| *at);

    let mut closing = Closing {
        ended_at: None,
        ..closing
    };
    let mut signals: Vec<Signal> = Vec::new();
    let mut had: Vec<Box<About>> = Vec::new();
    let mut closes_at = closing.closes_at(Some(rule), &signals);
    let mut would_close_at = closes_at + delay;
    for (at, arrival) in arrivals {
        if at > would_close_at {
            break;
        }
        match arrival {
            Arrival::End(ended_at) => closing.ended_at = Some(ended_at),
            Arrival::Said(about) => {
                signals.push(about.said.clone().into_signal(None));
                had.push(about);
            }
        }
        let sooner = closing.closes_at(Some(rule), &signals);
        if sooner < closes_at {
            closes_at = sooner;
            would_close_at = at.max(closes_at + delay);
        }
    }
    let in_time = had
        .into_iter()
        .map(|about| about.signal(|taken_back| came(taken_back.stored_at, taken_back.late) <= would_close_at));
    (closing, in_time.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Value;
    use crate::facts::{Said, TakenBack};
    use crate::reward::{Definition, Metric, MetricType, Outcome, score};
    use time::macros::datetime;
    use uuid::Uuid;

    const START: OffsetDateTime = datetime!(2026-11-21 12:00 UTC);

    fn after(seconds: f64) -> OffsetDateTime {
        START + Duration::seconds_f64(seconds)
    }

    /// Closed half a second after a horizon of two.
    fn closed() -> Closed {
        Closed {
            definition: 1,
            reward: None,
            censor_code: Some("no_feedback".to_owned()),
            signal: None,
            feedback_at: None,
            closes_at: Some(after(2.0)),
            closed_at: after(2.5),
        }
    }

    fn accept(number: u128, value: bool, given: f64, stored: f64) -> About {
        About {
            said: Said {
                generation_id: Uuid::nil(),
                id: Uuid::from_u128(number),
                metric: "accept".to_owned(),
                value: Value::Bool(value),
                given_at: after(given),
                stored_at: after(stored),
                late: stored > 2.5,
                after_seconds: stored,
            },
            taken_back: Vec::new(),
        }
    }

    fn taken_back(about: About, given: f64, stored: f64) -> About {
        let taken_back = TakenBack {
            feedback_id: about.said.id,
            given_at: after(given),
            stored_at: after(stored),
            late: stored > 2.5,
        };
        About {
            taken_back: vec![taken_back],
            ..about
        }
    }

    fn outcome(definition: Definition, end: Option<(f64, f64)>, about: Vec<About>) -> String {
        let rule = Rule::new(definition, &[Metric::new("accept", MetricType::Boolean)]).unwrap();
        let closing = Closing {
            starts_at: START,
            ended_at: end.map(|(ended, _)| after(ended)),
            ..Closing::example()
        };
        let (closing, signals) = seen(&rule, closing, end.map(|(_, stored)| after(stored)), about, &closed());
        match score(Some(&rule), &closing, &signals) {
            Outcome::Rewarded { signal, .. } => signal.to_owned(),
            Outcome::Censored { code } => code.to_owned(),
        }
    }

    fn horizon(seconds: f64) -> Definition {
        Definition {
            horizon_seconds: seconds,
            ..Definition::completion()
        }
    }

    #[test]
    fn what_came_after_the_closure_was_not_seen_and_a_longer_horizon_sees_more() {
        let in_time = || vec![accept(1, true, 1.0, 2.4)];
        let late = || vec![accept(1, true, 1.0, 2.6)];
        assert_eq!(outcome(horizon(2.0), None, in_time()), "accept");
        assert_eq!(outcome(horizon(2.0), None, late()), "no_feedback");
        assert_eq!(outcome(horizon(3.0), None, late()), "accept");
        assert_eq!(outcome(horizon(1.0), None, in_time()), "no_feedback", "closed at 1.5 s");
    }

    #[test]
    fn a_late_mark_is_believed_over_the_time_at_which_its_transaction_began() {
        let mut about = accept(1, true, 1.0, 2.4);
        about.said.late = true;
        assert_eq!(outcome(horizon(2.0), None, vec![about]), "no_feedback");
    }

    #[test]
    fn a_retraction_counts_if_it_was_there_too() {
        let about = || accept(1, true, 1.0, 1.1);
        assert_eq!(
            outcome(horizon(2.0), None, vec![taken_back(about(), 1.5, 2.4)]),
            "retracted"
        );
        assert_eq!(
            outcome(horizon(2.0), None, vec![taken_back(about(), 1.5, 9.0)]),
            "accept"
        );
    }

    #[test]
    fn what_closes_early_sees_nothing_that_came_after_it() {
        let graded = || Definition {
            close_on_feedback: true,
            ..horizon(9.0)
        };
        // The second one was given before the first, and came when that one had closed the trajectory.
        let both = |second_stored| vec![accept(2, true, 0.5, second_stored), accept(1, false, 1.0, 1.1)];
        assert_eq!(outcome(graded(), None, both(1.4)), "accept");
        assert_eq!(outcome(graded(), None, both(1.6)), "reject");
    }

    #[test]
    fn the_end_of_an_episode_ends_it_if_it_was_there() {
        let ending = || Definition {
            close_on_episode_end: true,
            ..horizon(2.0)
        };
        let about = || vec![accept(1, true, 1.5, 1.6)];
        assert_eq!(outcome(ending(), Some((1.0, 1.2)), about()), "no_feedback");
        assert_eq!(outcome(ending(), Some((1.0, 9.0)), about()), "accept");
    }
}
