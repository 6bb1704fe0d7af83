//! The rules of an event that depend on configuration or on the clock, the same at every entrance.

use std::collections::BTreeMap;

use time::{Duration, OffsetDateTime};

use crate::event::{Body, Event, Invalid, time_of};
use crate::reward::Metric;

/// What an event must keep beside [`Event::check`].
#[derive(Debug, Clone)]
pub struct Rules {
    metrics: BTreeMap<String, Metric>,
    clock_skew_max: Duration,
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
        }
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
            }
            Body::Feedback(feedback) => {
                if let Some(metric) = self.metrics.get(&feedback.metric_name) {
                    let checked = metric.check(feedback.target, &feedback.value);
                    checked.map_err(|(field, rule)| Invalid::new(field, rule))?;
                }
            }
            Body::Retraction(_) | Body::EpisodeEnd(_) => {}
        }
        Ok(())
    }
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
    fn nothing_happened_in_the_future() {
        let now = OffsetDateTime::now_utc();
        let soon = feedback("accept", Value::Bool(true), now + Duration::minutes(4));
        assert!(rules().check(&soon, now).is_ok());
        let far = feedback("accept", Value::Bool(true), now + Duration::minutes(6));
        assert!(rules().check(&far, now).is_err());
    }
}
