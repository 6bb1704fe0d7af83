//! Decides which signals the tables would have had if another definition had closed the trajectory.
//!
//! The closure is assumed to follow the end of its horizon by the same delay as the real closure
//! did. With the definition of the real closure, the result is what the closer used.

use time::{Duration, OffsetDateTime};

use super::{Closed, History};
use crate::reward::{Closing, Rule, Signal};

/// An event that may move the end of the horizon.
enum Arrival {
    Feedback(Box<History>),
    EpisodeEnd(OffsetDateTime),
}

/// Returns `closing` with its episode's end if that had arrived, the signals that had arrived, and
/// until when that was.
///
/// `end_stored_at` is when the first end was stored. A later arrival of an earlier end is not
/// visible.
pub(super) fn seen(
    rule: &Rule,
    closing: Closing,
    end_stored_at: Option<OffsetDateTime>,
    histories: Vec<History>,
    closed: &Closed,
) -> (Closing, Vec<Signal>, OffsetDateTime) {
    // A late event arrived after the closure, even if its transaction began before.
    let after_closure = closed.closed_at + Duration::microseconds(1);
    let arrived_at =
        |stored_at: OffsetDateTime, late: bool| if late { stored_at.max(after_closure) } else { stored_at };
    let delay = closed.closed_at - closed.closes_at.unwrap_or(closed.closed_at);
    let mut arrivals: Vec<(OffsetDateTime, Arrival)> = histories
        .into_iter()
        .map(|history| {
            let at = arrived_at(history.feedback.stored_at, history.feedback.late);
            (at, Arrival::Feedback(Box::new(history)))
        })
        .chain(end_stored_at.zip(closing.ended_at.map(Arrival::EpisodeEnd)))
        .collect();
    arrivals.sort_by_key(|(at, _)| *at);

    let mut closing = Closing {
        ended_at: None,
        ..closing
    };
    let mut signals: Vec<Signal> = Vec::new();
    let mut in_time: Vec<Box<History>> = Vec::new();
    let mut closes_at = closing.closes_at(Some(rule), &signals);
    let mut would_close_at = closes_at + delay;
    for (at, arrival) in arrivals {
        if at > would_close_at {
            break;
        }
        match arrival {
            Arrival::EpisodeEnd(ended_at) => closing.ended_at = Some(ended_at),
            Arrival::Feedback(history) => {
                signals.push(history.feedback.clone().into_signal(None));
                in_time.push(history);
            }
        }
        let earlier = closing.closes_at(Some(rule), &signals);
        if earlier < closes_at {
            closes_at = earlier;
            would_close_at = at.max(closes_at + delay);
        }
    }
    let signals = in_time.into_iter().map(|history| {
        history.signal(|retraction| arrived_at(retraction.stored_at, retraction.late) <= would_close_at)
    });
    (closing, signals.collect(), would_close_at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reward::{Definition, Metric, MetricType, Outcome, score};
    use crate::rows::feedback::{FeedbackRow, RetractionRow};
    use event_log::event::Value;
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
            episode_id: None,
            turn_reward: None,
        }
    }

    fn accept(number: u128, value: bool, given: f64, stored: f64) -> History {
        History {
            feedback: FeedbackRow {
                about: Uuid::nil(),
                tenant: "default".to_owned(),
                id: Uuid::from_u128(number),
                metric: "accept".to_owned(),
                value: Value::Bool(value),
                given_at: after(given),
                stored_at: after(stored),
                late: stored > 2.5,
                after_seconds: stored,
            },
            retractions: Vec::new(),
        }
    }

    fn retracted(history: History, given: f64, stored: f64) -> History {
        let retraction = RetractionRow {
            tenant: history.feedback.tenant.clone(),
            feedback_id: history.feedback.id,
            given_at: after(given),
            stored_at: after(stored),
            late: stored > 2.5,
        };
        History {
            retractions: vec![retraction],
            ..history
        }
    }

    fn outcome(definition: Definition, end: Option<(f64, f64)>, histories: Vec<History>) -> String {
        let rule = Rule::new(definition, &[Metric::new("accept", MetricType::Boolean)]).unwrap();
        let closing = Closing {
            starts_at: START,
            ended_at: end.map(|(ended, _)| after(ended)),
            ..Closing::example()
        };
        let (closing, signals, _) = seen(
            &rule,
            closing,
            end.map(|(_, stored)| after(stored)),
            histories,
            &closed(),
        );
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
    fn signals_after_the_closure_do_not_count_but_a_longer_horizon_includes_them() {
        let in_time = || vec![accept(1, true, 1.0, 2.4)];
        let late = || vec![accept(1, true, 1.0, 2.6)];
        assert_eq!(outcome(horizon(2.0), None, in_time()), "accept");
        assert_eq!(outcome(horizon(2.0), None, late()), "no_feedback");
        assert_eq!(outcome(horizon(3.0), None, late()), "accept");
        assert_eq!(outcome(horizon(1.0), None, in_time()), "no_feedback", "closed at 1.5 s");
    }

    #[test]
    fn the_late_mark_overrides_the_start_of_the_transaction() {
        let mut late = accept(1, true, 1.0, 2.4);
        late.feedback.late = true;
        assert_eq!(outcome(horizon(2.0), None, vec![late]), "no_feedback");
    }

    #[test]
    fn a_retraction_counts_if_it_arrived_in_time() {
        let accepted = || accept(1, true, 1.0, 1.1);
        assert_eq!(
            outcome(horizon(2.0), None, vec![retracted(accepted(), 1.5, 2.4)]),
            "retracted"
        );
        assert_eq!(
            outcome(horizon(2.0), None, vec![retracted(accepted(), 1.5, 9.0)]),
            "accept"
        );
    }

    #[test]
    fn an_early_close_ignores_later_arrivals() {
        let graded = || Definition {
            close_on_feedback: true,
            ..horizon(9.0)
        };
        // The second was given before the first, but arrived after the first had closed the
        // trajectory.
        let both = |second_stored| vec![accept(2, true, 0.5, second_stored), accept(1, false, 1.0, 1.1)];
        assert_eq!(outcome(graded(), None, both(1.4)), "accept");
        assert_eq!(outcome(graded(), None, both(1.6)), "reject");
    }

    #[test]
    fn the_end_of_an_episode_counts_if_it_arrived_in_time() {
        let ending = || Definition {
            close_on_episode_end: true,
            ..horizon(2.0)
        };
        let accepted = || vec![accept(1, true, 1.5, 1.6)];
        assert_eq!(outcome(ending(), Some((1.0, 1.2)), accepted()), "no_feedback");
        assert_eq!(outcome(ending(), Some((1.0, 9.0)), accepted()), "accept");
    }
}
