//! When an offline run may work: from a time on, in a window of each day, and before runs of lower
//! priority; and when it comes again. Part of a run's configuration (`schedule`).

pub mod cron;
mod recurrence;

use cron::Cron;
use edge::window::Window;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use time::OffsetDateTime;

pub use recurrence::queue_next;

/// The name of its field in a run's configuration.
const FIELD: &str = "schedule";
const PRIORITY_MAX: i32 = 100;

/// When a run may work.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Schedule {
    /// Not before this time. Default: at once.
    #[serde(with = "time::serde::rfc3339::option", skip_serializing_if = "Option::is_none")]
    pub starts_at: Option<OffsetDateTime>,
    /// Only in these hours of each day. Default: always.
    #[serde(deserialize_with = "window", skip_serializing_if = "Option::is_none")]
    pub window: Option<Window>,
    /// When it comes again after it has ended, such as `0 3 * * * Europe/Berlin`. Default: never.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repeats: Option<Cron>,
    /// Runs of a higher priority go first, and take the place of others that train. Their rollouts get
    /// free slots first; runs of one priority share slots equally. −100 to 100, default 0.
    pub priority: i32,
}

impl Schedule {
    /// Refuses values that cannot work. The text begins with the field.
    pub fn check(&self) -> Result<(), String> {
        match (-PRIORITY_MAX..=PRIORITY_MAX).contains(&self.priority) {
            true => Ok(()),
            false => Err(format!("{FIELD}.priority must be in -{PRIORITY_MAX}..={PRIORITY_MAX}")),
        }
    }

    /// Adds it to the configuration of a run.
    pub fn put_into(&self, config: &mut Value) -> serde_json::Result<()> {
        config[FIELD] = serde_json::to_value(self)?;
        Ok(())
    }

    /// Takes it out of the configuration of a run. Without the field: the default.
    pub fn take_from(config: &mut Value) -> serde_json::Result<Schedule> {
        let taken = config.as_object_mut().and_then(|fields| fields.remove(FIELD));
        taken.map_or_else(|| Ok(Schedule::default()), serde_json::from_value)
    }

    /// Whether the run may work at this time, as far as the clock decides.
    pub fn is_open(&self, at: OffsetDateTime) -> bool {
        let started = self.starts_at.is_none_or(|start| start <= at);
        started && self.window.as_ref().is_none_or(|window| window.contains(at))
    }
}

/// Names the field in the error.
fn window<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Window>, D::Error> {
    let window = Option::<Window>::deserialize(deserializer);
    window.map_err(|why| D::Error::custom(format!("{FIELD}.window: {why}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use time::macros::datetime;

    fn window(text: &str) -> Schedule {
        serde_json::from_value(json!({"window": text})).unwrap()
    }

    #[test]
    fn a_run_waits_for_its_start_and_for_its_window() {
        let start = datetime!(2026-12-01 03:00 UTC);
        let waits = Schedule {
            starts_at: Some(start),
            ..Schedule::default()
        };
        assert!(!waits.is_open(start - time::Duration::SECOND));
        assert!(waits.is_open(start));
        let both = Schedule {
            starts_at: Some(start),
            ..window("05:00-06:00 UTC")
        };
        assert!(!both.is_open(start) && both.is_open(datetime!(2026-12-01 05:00 UTC)));
        assert!(Schedule::default().is_open(start));
    }

    #[test]
    fn what_is_no_schedule_is_refused_with_the_reason() {
        let refused = |schedule: Value| {
            let read: Result<Schedule, _> = serde_json::from_value(schedule);
            let read = read.map_err(|error| error.to_string());
            read.and_then(|schedule| schedule.check()).unwrap_err()
        };
        for (schedule, reason) in [
            (json!({"window": "22:00-06:00"}), "Europe/Berlin"),
            (json!({"window": "22:00-06:00 Europe/Berlinn"}), "no time zone"),
            (json!({"window": "25:00-06:00 UTC"}), "no window"),
            (json!({"window": "06:00-06:00 UTC"}), "begins when it ends"),
            (json!({"window": "2:0-6:00 UTC"}), "no window"),
            (json!({"window": "00:00-24:00 UTC"}), "00:00"),
            (json!({"priority": 101}), "schedule.priority"),
            (json!({"priority": i32::MIN}), "schedule.priority"),
            (json!({"starts_at": "tomorrow"}), "parse"),
            (json!({"starts": "2026-12-01T03:00:00Z"}), "starts"),
        ] {
            let error = refused(schedule.clone());
            assert!(error.contains(reason), "{schedule}: {error}");
        }
    }

    #[test]
    fn a_schedule_is_kept_in_the_configuration_and_taken_out_again() {
        let schedule = Schedule {
            starts_at: Some(datetime!(2026-12-01 03:00 UTC)),
            priority: 7,
            ..window("22:00–06:00 Europe/Berlin")
        };
        let mut config = json!({"steps": 3});
        schedule.put_into(&mut config).unwrap();
        let expected = json!({
            "starts_at": "2026-12-01T03:00:00Z", "window": "22:00–06:00 Europe/Berlin", "priority": 7,
        });
        assert_eq!(config["schedule"], expected);
        assert_eq!(Schedule::take_from(&mut config).unwrap(), schedule);
        assert_eq!(config, json!({"steps": 3}));
        assert_eq!(Schedule::take_from(&mut config).unwrap(), Schedule::default());
    }
}
