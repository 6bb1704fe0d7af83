//! Configuration of `[serve.tide]`. Every field has a unit and a default.

use anyhow::ensure;
use edge::options::{above, above_to};
use edge::window::Window;
use event_log::judge::Endpoint;

edge::options! {
    /// When and how much rollouts and evaluations may use.
    pub struct Options {
        /// Whether slots are lent by load and forecast. If not, rollouts may always use what production
        /// leaves, apart from `serve.slots_reserved_for_production`.
        pub enabled: bool = true,
        /// Hours in which slots are lent, such as `22:00-06:00 Europe/Berlin`. Default: always.
        pub windows: Vec<Window> = Vec::new(),
        /// Slot-seconds that each engine lends per day (UTC); 0: no limit.
        pub slot_seconds_per_day_max: u64 = 0,
        /// How much of the forecast is kept for production: 0 nothing, 1 the expected peak of these minutes.
        pub forecast_weight: f64 = 0.5 => 0.0..=1.0,
        /// Weight of the newest week in the forecast, above 0 and at most 1. The weeks before share
        /// the rest.
        pub newest_week_weight: f64 = 0.5 => above_to(0.0, 1.0),
        /// Slots that production has left become lendable at this rate, per second. Slots that it takes are
        /// its own at once.
        pub release_slots_per_s: f64 = 1.0 => above(0.0),
        /// For so long after all slots were taken and production waited, nothing is lent, in milliseconds.
        pub cool_down_ms: u64 = 10_000,
        /// Users' mean time to the first token beside rollouts, over a second, that also begins a cool-down,
        /// in milliseconds; 0: none does.
        pub first_token_ms_max: u64 = 0,
        /// An engine without production for so long is lent whole, if another engine serves its version and
        /// the forecast expects nothing, in milliseconds; 0: never. For engines behind this gateway only.
        pub whole_after_ms: u64 = 60_000,
        /// A rollout that could not continue for longer is given up, so that its version can be unloaded, in
        /// milliseconds. Its caller gets 429.
        pub parked_ms_max: u64 = 600_000 => 1..,
        /// URL of the trainer on this replica's machine: slots are lent only while it computes
        /// nothing, and none while it does not answer. Default: none.
        pub beside_trainer: Option<String> = None,
        /// How long the control role keeps the history, in days.
        pub history_days: u32 = 28 => 1..=366,
    }
}

impl Options {
    /// Checks all values. The error names the first invalid one.
    pub fn check(&self) -> anyhow::Result<()> {
        self.check_ranges("serve.tide")?;
        if let Some(url) = &self.beside_trainer {
            // not printed: it may hold a password
            ensure!(
                Endpoint::is_base_url(url),
                "serve.tide.beside_trainer is not a base URL; give the address of the role `train` on this machine, such \
                 as http://127.0.0.1:8003"
            );
        }
        let parameters = !self.windows.is_empty()
            || self.slot_seconds_per_day_max > 0
            || self.first_token_ms_max > 0
            || self.beside_trainer.is_some();
        ensure!(
            self.enabled || !parameters,
            "serve.tide.enabled is false, but windows, slot_seconds_per_day_max, first_token_ms_max or \
             beside_trainer is set: they would limit nothing; enable it or remove them"
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid_and_contradictions_are_refused() {
        Options::default().check().unwrap();
        let beside = Options {
            beside_trainer: Some("http://trainer:8003".into()),
            ..Options::default()
        };
        beside.check().unwrap();
        for (json, field) in [
            (r#"{"forecast_weight": 1.5}"#, "forecast_weight"),
            (r#"{"newest_week_weight": 0.0}"#, "newest_week_weight"),
            (r#"{"release_slots_per_s": 0.0}"#, "release_slots_per_s"),
            (r#"{"parked_ms_max": 0}"#, "parked_ms_max"),
            (r#"{"history_days": 0}"#, "history_days"),
            (r#"{"enabled": false, "slot_seconds_per_day_max": 5}"#, "enabled"),
            (
                r#"{"enabled": false, "beside_trainer": "http://trainer:8003"}"#,
                "enabled",
            ),
            (r#"{"beside_trainer": "trainer:8003"}"#, "beside_trainer"),
            (r#"{"beside_trainer": "http://key@trainer:8003"}"#, "beside_trainer"),
        ] {
            let options: Options = serde_json::from_str(json).unwrap();
            let error = options.check().unwrap_err().to_string();
            assert!(error.contains(field), "{error}");
        }
    }
}
