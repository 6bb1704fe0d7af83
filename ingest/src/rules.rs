//! The rules of an event that depend on configuration or on the clock, the same at every entrance.

use std::collections::BTreeMap;
use std::sync::{PoisonError, RwLock};

use time::{Duration, OffsetDateTime};
use uuid::Uuid;

use crate::event::{Body, Event, Invalid, Target, time_of};
use crate::reward::Metric;

/// What an event must keep beside [`Event::check`].
#[derive(Debug)]
pub struct Rules {
    metrics: BTreeMap<String, Metric>,
    clock_skew_max: Duration,
    /// Generations below it are gone, and what is about them comes too late. Rises.
    kept_from: RwLock<Uuid>,
}

impl Rules {
    pub fn new(metrics: Vec<Metric>, clock_skew_max: Duration) -> Self {
        let metrics = metrics
            .into_iter()
            .map(|metric| (metric.name.clone(), metric))
            .collect();
        Self {
            metrics,
            clock_skew_max,
            kept_from: RwLock::default(),
        }
    }

    /// From now on generations below `id` are gone.
    pub(crate) fn keep_from(&self, id: Uuid) {
        let mut kept = self.kept_from.write().unwrap_or_else(PoisonError::into_inner);
        *kept = id.max(*kept);
    }

    fn check_kept(&self, field: &'static str, id: Uuid) -> Result<(), Invalid> {
        let kept = *self.kept_from.read().unwrap_or_else(PoisonError::into_inner);
        if id >= kept {
            return Ok(());
        }
        let from = time_of_bound(kept);
        Err(Invalid::new(
            field,
            format!("is from before {from}; older generations are kept no longer"),
        ))
    }

    /// A metric that is declared takes values of one type; any other name takes any value. Nothing happened in
    /// the future: it would stay open until then.
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
            }
            Body::Feedback(feedback) => {
                if let Target::Generation(id) = feedback.target {
                    self.check_kept("generation_id", id)?;
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

/// The day on which a bound begins.
fn time_of_bound(id: Uuid) -> time::Date {
    let milliseconds = i64::try_from(id.as_u128() >> 80).unwrap_or(0);
    let time = OffsetDateTime::from_unix_timestamp(milliseconds / 1_000);
    time.unwrap_or(OffsetDateTime::UNIX_EPOCH).date()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{Feedback, Target, Value};
    use crate::reward::MetricType;
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

    fn rules() -> Rules {
        Rules::new(vec![Metric::new("accept", MetricType::Boolean)], Duration::minutes(5))
    }

    #[test]
    fn a_deciding_metric_takes_its_own_type_and_other_names_take_any() {
        let now = OffsetDateTime::now_utc();
        let check = |metric, value| rules().check(&feedback(metric, value, now), now);
        assert!(check("accept", Value::Bool(true)).is_ok());
        assert!(check("stars", Value::Float(4.0)).is_ok());
        let error = check("accept", Value::Text("yes".to_owned())).unwrap_err();
        assert_eq!(
            error.to_string(),
            "value: metric \"accept\" takes a boolean, not a text"
        );
    }

    #[test]
    fn what_is_about_a_generation_that_is_gone_comes_too_late() {
        let (now, rules) = (OffsetDateTime::now_utc(), rules());
        let event = feedback("accept", Value::Bool(true), now);
        rules.keep_from(Uuid::from_u128(0x019a_a5e6_2f40 << 80));
        rules.keep_from(Uuid::nil());
        assert!(rules.check(&event, now).is_ok());
        rules.keep_from(Uuid::max());
        let error = rules.check(&event, now).unwrap_err().to_string();
        assert!(error.starts_with("generation_id: is from before"), "{error}");
    }

    #[test]
    fn nothing_happened_in_the_future() {
        let now = OffsetDateTime::now_utc();
        let soon = feedback("accept", Value::Bool(true), now + Duration::minutes(4));
        assert!(rules().check(&soon, now).is_ok());
        let far = feedback("accept", Value::Bool(true), now + Duration::minutes(6));
        assert!(rules().check(&far, now).is_err());
    }
}
