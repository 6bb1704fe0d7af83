//! Configuration of `[serve.tide]`. Every field has a unit and a default.

use anyhow::ensure;
use edge::window::Window;
use event_log::judge::Endpoint;
use serde::{Deserialize, Serialize};

/// When and how much rollouts and evaluations may use.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// Whether slots are lent by load and forecast. If not, rollouts may always use what production
    /// leaves, apart from `serve.slots_reserved_for_production`.
    pub enabled: bool,
    /// Hours in which slots are lent, such as `22:00-06:00 Europe/Berlin`. Default: always.
    pub windows: Vec<Window>,
    /// Slot-seconds that each engine lends per day (UTC); 0: no limit.
    pub slot_seconds_per_day_max: u64,
    /// How much of the forecast is kept for production: 0 nothing, 1 the expected peak of these minutes.
    pub forecast_weight: f64,
    /// Weight of the newest week in the forecast, above 0 and at most 1.
    pub newest_week_weight: f64,
    /// Slots that production has left become lendable at this rate, per second. Slots that it takes are
    /// its own at once.
    pub release_slots_per_s: f64,
    /// For so long after all slots were taken and production waited, nothing is lent, in milliseconds.
    pub cool_down_ms: u64,
    /// Users' mean time to the first token beside rollouts, over a second, that also begins a cool-down,
    /// in milliseconds; 0: none does.
    pub first_token_ms_max: u64,
    /// An engine without production for so long is lent whole, if another engine serves its version and
    /// the forecast expects nothing, in milliseconds; 0: never. For engines behind this gateway only.
    pub whole_after_ms: u64,
    /// A rollout that could not continue for longer is given up, so that its version can be unloaded, in
    /// milliseconds. Its caller gets 429.
    pub parked_ms_max: u64,
    /// URL of the trainer on this replica's machine: slots are lent only while it computes nothing.
    /// Default: none.
    pub beside_trainer: Option<String>,
    /// How long the control role keeps the history, in days.
    pub history_days: u32,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            enabled: true,
            windows: Vec::new(),
            slot_seconds_per_day_max: 0,
            forecast_weight: 0.5,
            newest_week_weight: 0.5,
            release_slots_per_s: 1.0,
            cool_down_ms: 10_000,
            first_token_ms_max: 0,
            whole_after_ms: 60_000,
            parked_ms_max: 600_000,
            beside_trainer: None,
            history_days: 28,
        }
    }
}

impl Options {
    /// Checks all values. The error names the first invalid one.
    pub fn check(&self) -> anyhow::Result<()> {
        ensure!(
            (0.0..=1.0).contains(&self.forecast_weight),
            "serve.tide.forecast_weight is {}; give 0 to 1",
            self.forecast_weight
        );
        ensure!(
            self.newest_week_weight > 0.0 && self.newest_week_weight <= 1.0,
            "serve.tide.newest_week_weight is {}; give more than 0 and at most 1",
            self.newest_week_weight
        );
        ensure!(
            self.release_slots_per_s > 0.0 && self.release_slots_per_s.is_finite(),
            "serve.tide.release_slots_per_s is {}; above 0, or slots that production left are never lent again",
            self.release_slots_per_s
        );
        ensure!(
            self.parked_ms_max > 0,
            "serve.tide.parked_ms_max is 0; a rollout would lose its tokens whenever it loses its slot"
        );
        ensure!(
            (1..=366).contains(&self.history_days),
            "serve.tide.history_days is {}; give 1 to 366",
            self.history_days
        );
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
