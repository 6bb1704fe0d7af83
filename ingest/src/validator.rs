//! Checks of an event that depend on the configuration, the clock or retention.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{PoisonError, RwLock};

use event_log::event::{Body, Event, Invalid, Target, time_of};
use time::{Duration, OffsetDateTime};
use uuid::Uuid;

use crate::clock::Clock;
use crate::judge::{Judges, SOURCE_PREFIX};
use crate::reward::Metric;

/// Applied in addition to [`Event::check`], by every entry point and by the sink.
#[derive(Debug)]
pub struct Validator {
    metrics: BTreeMap<String, Metric>,
    /// Metrics that only a judge answers.
    judged: BTreeSet<String>,
    clock_skew_max: Duration,
    /// Observed by the sink. A collector has no database, so it uses its own.
    pub(crate) clock: Clock,
    /// Generations with smaller ids have been deleted by retention. Only rises.
    oldest_kept: RwLock<Uuid>,
    /// Generations with smaller ids are not stored any more, but some may be there. Only rises.
    oldest_accepted: RwLock<Uuid>,
}

impl Validator {
    pub fn new(metrics: Vec<Metric>, clock_skew_max: Duration) -> Self {
        let metrics = metrics
            .into_iter()
            .map(|metric| (metric.name.clone(), metric))
            .collect();
        Self {
            metrics,
            judged: BTreeSet::new(),
            clock_skew_max,
            clock: Clock::default(),
            oldest_kept: RwLock::default(),
            oldest_accepted: RwLock::default(),
        }
    }

    /// Takes feedback of the metrics that these judges answer from judges alone.
    pub fn with_judges(self, judges: &Judges) -> Self {
        let judged = judges.iter().map(|judge| judge.metric().to_owned()).collect();
        Self { judged, ..self }
    }

    /// From now on, refuses generations with ids below `id` and events about them.
    pub(crate) fn reject_before(&self, id: Uuid) {
        raise(&self.oldest_kept, id);
    }

    /// From now on, refuses generations with ids below `id`, but not events about them.
    pub(crate) fn reject_generations_before(&self, id: Uuid) {
        raise(&self.oldest_accepted, id);
    }

    fn check_accepted(&self, id: Uuid) -> Result<(), Invalid> {
        let oldest = *self.oldest_accepted.read().unwrap_or_else(PoisonError::into_inner);
        if id >= oldest {
            return Ok(());
        }
        let from = day_of(oldest);
        Err(Invalid::new(
            "generation_id",
            format!("is from before {from}; generations of that age are refused"),
        ))
    }

    fn check_kept(&self, field: &'static str, id: Uuid) -> Result<(), Invalid> {
        let oldest = *self.oldest_kept.read().unwrap_or_else(PoisonError::into_inner);
        if id >= oldest {
            return Ok(());
        }
        let from = day_of(oldest);
        Err(Invalid::new(
            field,
            format!("is from before {from}; older generations have been deleted"),
        ))
    }

    /// Fails if this host's clock and the database's disagree by so much that one of them would
    /// refuse what the other allows.
    pub(crate) fn check_clock(&self) -> anyhow::Result<()> {
        let ahead = self.clock.ahead();
        anyhow::ensure!(
            ahead.abs() <= self.clock_skew_max,
            "the database's clock is {:.1} s ahead of this host's (behind, if negative), and one of them is wrong: \
             nothing is read until they agree to within ingest.clock_skew_seconds_max",
            ahead.as_seconds_f64()
        );
        Ok(())
    }

    /// Declared metrics accept values of one type, other names accept any value. Times must not lie
    /// in the future, because the trajectory would stay open until then.
    pub fn check(&self, event: &Event, now: OffsetDateTime) -> Result<(), Invalid> {
        let latest = now + self.clock_skew_max;
        if event.time > latest {
            return Err(Invalid::new("time", "lies in the future"));
        }
        match &event.body {
            Body::Generation(generation) => {
                let future = time_of(generation.id).is_some_and(|time| time > latest);
                if future {
                    return Err(Invalid::new("generation_id", "lies in the future"));
                }
                self.check_kept("generation_id", generation.id)?;
                self.check_accepted(generation.id)?;
            }
            Body::Feedback(feedback) => {
                if let Target::Generation(id) = feedback.target {
                    self.check_kept("generation_id", id)?;
                }
                if self.judged.contains(&feedback.metric_name) && !event.source.starts_with(SOURCE_PREFIX) {
                    let rule = "is answered by a judge ([[ingest.judge]]), and nobody else may give it";
                    return Err(Invalid::new("metric_name", rule));
                }
                if let Some(metric) = self.metrics.get(&feedback.metric_name) {
                    let checked = metric.check(feedback.target, &feedback.value);
                    checked.map_err(|(field, rule)| Invalid::new(field, rule))?;
                }
            }
            Body::Retraction(retraction) => self.check_kept("feedback_id", retraction.feedback_id)?,
            Body::EpisodeEnd(_) => {}
        }
        Ok(())
    }
}

fn raise(oldest: &RwLock<Uuid>, id: Uuid) {
    let mut oldest = oldest.write().unwrap_or_else(PoisonError::into_inner);
    *oldest = id.max(*oldest);
}

/// The date in a UUIDv7.
fn day_of(id: Uuid) -> time::Date {
    let milliseconds = i64::try_from(id.as_u128() >> 80).unwrap_or(0);
    let time = OffsetDateTime::from_unix_timestamp(milliseconds / 1_000);
    time.unwrap_or(OffsetDateTime::UNIX_EPOCH).date()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reward::MetricType;
    use event_log::event::{Feedback, Target, Value};
    use uuid::Uuid;

    fn feedback(metric: &str, value: Value, time: OffsetDateTime) -> Event {
        let feedback = Feedback {
            id: Uuid::now_v7(),
            target: Target::Generation(Uuid::now_v7()),
            metric_name: metric.to_owned(),
            value,
            tags: BTreeMap::new(),
        };
        feedback.into_event("default", "test", time)
    }

    fn validator() -> Validator {
        Validator::new(vec![Metric::new("accept", MetricType::Boolean)], Duration::minutes(5))
    }

    #[test]
    fn a_declared_metric_takes_its_type_and_other_names_take_any() {
        let now = OffsetDateTime::now_utc();
        let check = |metric, value| validator().check(&feedback(metric, value, now), now);
        assert!(check("accept", Value::Bool(true)).is_ok());
        assert!(check("stars", Value::Float(4.0)).is_ok());
        let error = check("accept", Value::Text("yes".to_owned())).unwrap_err();
        assert_eq!(
            error.to_string(),
            "value: metric \"accept\" takes a boolean, not a text"
        );
    }

    #[test]
    fn feedback_about_a_deleted_generation_is_refused() {
        let (now, validator) = (OffsetDateTime::now_utc(), validator());
        let event = feedback("accept", Value::Bool(true), now);
        validator.reject_before(Uuid::from_u128(0x019a_a5e6_2f40 << 80));
        validator.reject_before(Uuid::nil());
        assert!(validator.check(&event, now).is_ok());
        validator.reject_before(Uuid::max());
        let error = validator.check(&event, now).unwrap_err().to_string();
        assert!(error.starts_with("generation_id: is from before"), "{error}");
    }

    #[test]
    fn a_week_that_takes_no_generations_still_takes_feedback() {
        let (now, validator) = (OffsetDateTime::now_utc(), validator());
        validator.reject_generations_before(Uuid::max());
        let event = feedback("accept", Value::Bool(true), now);
        assert!(validator.check(&event, now).is_ok());
        let error = validator.check_accepted(Uuid::now_v7()).unwrap_err().to_string();
        assert!(error.contains("of that age are refused"), "{error}");
    }

    #[test]
    fn an_event_from_the_future_is_refused() {
        let now = OffsetDateTime::now_utc();
        let soon = feedback("accept", Value::Bool(true), now + Duration::minutes(4));
        assert!(validator().check(&soon, now).is_ok());
        let far = feedback("accept", Value::Bool(true), now + Duration::minutes(6));
        assert!(validator().check(&far, now).is_err());
    }
}
