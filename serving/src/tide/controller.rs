//! How many slots of one engine rollouts may use until the next look. Pure: no I/O, and the clock is
//! a parameter.
//!
//! ```text
//! demand   = production in slots + production that waits
//! held     = max(demand, held before − release · seconds)      attack at once, release slowly
//! kept     = max(demand + floor, held, forecast weight · forecast)
//! lent     = slots − kept, or 0 in a cool-down, outside the windows, when the budget is used up, and
//!            while a trainer on the same machine computes or does not say
//! ```
//!
//! An engine that is lent whole keeps no floor: production goes elsewhere meanwhile.

use super::history::History;
use super::options::Options;
use serde::{Deserialize, Serialize};
use std::time::Duration;
use time::{Date, OffsetDateTime};

/// A forecast below so many slots expects nothing.
const NOTHING: f64 = 0.5;

/// What one engine did since the last look.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Sample {
    pub production: usize,
    pub production_waiting: usize,
    pub background: usize,
    /// Slot-seconds that production and rollouts have used since the last look.
    pub production_slot_seconds: f64,
    pub lent_slot_seconds: f64,
    /// Users' mean time to the first token beside rollouts since the last look; `None`: no such request.
    pub first_token: Option<Duration>,
    /// Whether another engine that is not lent whole serves the same version.
    pub has_substitute: bool,
    pub trainer: Trainer,
}

/// What the trainer on the replica's machine does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Trainer {
    /// There is none.
    #[default]
    Absent,
    Waits,
    Computes,
    /// It does not say, so it may compute.
    Silent,
}

/// What rollouts may use.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Decision {
    pub slots: usize,
    pub whole: bool,
    pub why: Why,
    /// Slots that production was expected to need.
    pub expected: Option<f64>,
}

/// What decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    /// Production needs the others now.
    Demand,
    /// The floor.
    Floor,
    /// Production left slots a moment ago.
    Release,
    Forecast,
    /// Production had to wait a moment ago, or was too slow.
    CoolDown,
    OutsideWindow,
    BudgetUsedUp,
    /// The engine is lent whole.
    Whole,
    /// The trainer on this machine computes.
    TrainerComputes,
    /// The trainer on this machine does not say whether it computes.
    TrainerSilent,
}

/// Decides for one engine.
#[derive(Debug, Clone)]
pub struct Controller {
    slots: usize,
    floor: usize,
    options: Options,
    history: History,
    held: f64,
    looked: Option<OffsetDateTime>,
    cool_until: Option<OffsetDateTime>,
    /// Since when production has used nothing.
    unused_since: Option<OffsetDateTime>,
    /// The day, and the slot-seconds that were lent on it.
    budget: Option<(Date, f64)>,
}

impl Controller {
    /// `floor`: slots that are never lent, unless the whole engine is.
    pub fn new(slots: usize, floor: usize, options: Options) -> Self {
        Controller {
            history: History::new(options.newest_week_weight),
            slots,
            floor,
            options,
            held: 0.0,
            looked: None,
            cool_until: None,
            unused_since: None,
            budget: None,
        }
    }

    /// What an earlier process saw: production's peak and the lent slot-seconds of a minute. In order of
    /// time, before the first look.
    pub fn remember(&mut self, minute: OffsetDateTime, peak: f64, lent_slot_seconds: f64) {
        self.history.note(minute, peak);
        self.spend(minute, lent_slot_seconds);
    }

    pub fn look(&mut self, now: OffsetDateTime, sample: Sample) -> Decision {
        let demand = sample.production + sample.production_waiting;
        let seconds = self
            .looked
            .map_or(0.0, |before| (now - before).as_seconds_f64().max(0.0));
        self.looked = Some(now);
        self.history.note(now, demand as f64);
        self.spend(now, sample.lent_slot_seconds);
        self.held = (self.held - self.options.release_slots_per_s * seconds).max(demand as f64);
        self.note_spike(now, demand, sample);
        self.unused_since = match demand {
            0 => self.unused_since.or(Some(now)),
            _ => None,
        };
        let expected = self.history.expected(now);
        let decision = |slots, whole, why| Decision {
            slots,
            whole,
            why,
            expected,
        };
        if let Some(why) = self.closed(now, sample.trainer) {
            return decision(0, false, why);
        }
        if self.may_lend_whole(now, expected) && sample.has_substitute {
            return decision(self.slots, true, Why::Whole);
        }
        let forecast = expected.unwrap_or(0.0) * self.options.forecast_weight;
        let kept = [
            (Why::Demand, demand),
            (Why::Floor, demand + self.floor),
            (Why::Release, ceil(self.held)),
            (Why::Forecast, ceil(forecast)),
        ];
        // of equal ones, the first
        let (why, most) = kept
            .into_iter()
            .rev()
            .max_by_key(|(_, slots)| *slots)
            .unwrap_or((Why::Demand, demand));
        decision(self.slots.saturating_sub(most), false, why)
    }

    fn closed(&self, now: OffsetDateTime, trainer: Trainer) -> Option<Why> {
        match trainer {
            Trainer::Computes => return Some(Why::TrainerComputes),
            Trainer::Silent => return Some(Why::TrainerSilent),
            Trainer::Absent | Trainer::Waits => {}
        }
        let windows = &self.options.windows;
        if !windows.is_empty() && !windows.iter().any(|window| window.contains(now)) {
            return Some(Why::OutsideWindow);
        }
        let most = self.options.slot_seconds_per_day_max;
        if most > 0 && self.budget.is_some_and(|(_, spent)| spent >= most as f64) {
            return Some(Why::BudgetUsedUp);
        }
        self.cool_until.filter(|until| now < *until).map(|_| Why::CoolDown)
    }

    fn may_lend_whole(&self, now: OffsetDateTime, expected: Option<f64>) -> bool {
        let after = Duration::from_millis(self.options.whole_after_ms);
        let unused = self.unused_since.is_some_and(|since| now - since >= after);
        !after.is_zero() && unused && expected.is_none_or(|slots| slots < NOTHING)
    }

    fn note_spike(&mut self, now: OffsetDateTime, demand: usize, sample: Sample) {
        let limit = Duration::from_millis(self.options.first_token_ms_max);
        let slow = !limit.is_zero() && sample.first_token.is_some_and(|waited| waited > limit);
        if (sample.production_waiting > 0 && demand >= self.slots) || slow {
            self.cool_until = Some(now + Duration::from_millis(self.options.cool_down_ms));
        }
    }

    fn spend(&mut self, at: OffsetDateTime, slot_seconds: f64) {
        let today = at.to_offset(time::UtcOffset::UTC).date();
        match &mut self.budget {
            Some((day, spent)) if *day == today => *spent += slot_seconds,
            _ => self.budget = Some((today, slot_seconds)),
        }
    }
}

/// Slots, rounded up. Negative values are 0.
fn ceil(slots: f64) -> usize {
    slots.ceil() as usize
}

#[cfg(test)]
mod tests;
