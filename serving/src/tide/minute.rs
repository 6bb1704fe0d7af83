//! What one engine did in one minute, and what it was used for on one day: as they are sent to the
//! control role and stored. A later report of the same minute or day replaces the earlier one.

use super::controller::{Decision, Sample, Why};
use crate::engine::caller::Work;
use crate::engine::load::{Felt, Load, Totals, Used};
use serde::{Deserialize, Serialize};
use time::{Date, Duration, OffsetDateTime};
use uuid::Uuid;

/// Longest report, in minutes and in uses.
pub const MINUTES_MAX: usize = 512;
pub const USES_MAX: usize = 16_384;

/// `POST /v1/tide/{id}`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    pub policy: String,
    /// The process that counted. Counts of several processes of a replica are added.
    pub process: Uuid,
    /// How long minutes are kept, in days.
    pub history_days: u32,
    pub minutes: Vec<Minute>,
    pub uses: Vec<Use>,
}

/// What one engine did in one minute, or in the part of it that has passed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Minute {
    /// The number of the engine behind a gateway; 0: the replica's own.
    pub engine: i16,
    #[serde(with = "time::serde::rfc3339")]
    pub minute: OffsetDateTime,
    pub slots: i32,
    /// Seconds that were looked at.
    pub seconds: f64,
    /// Slot-seconds that production used, and the most slots that it needed at once.
    pub production_slot_seconds: f64,
    pub production_peak: i32,
    /// Slots that it was expected to need at most; null: no day is known.
    pub expected: Option<f64>,
    /// Slot-seconds that rollouts could use, and that they used.
    pub lendable_slot_seconds: f64,
    pub lent_slot_seconds: f64,
    /// The last decision. A limit of null: no limit.
    pub slot_limit: Option<i32>,
    pub whole: bool,
    pub why: Option<Why>,
    pub taken_back: i64,
    /// Longest time until slots were free, since the process began, in milliseconds.
    pub taking_back_ms_max: f64,
    pub alone: FeltMs,
    pub beside: FeltMs,
}

/// What users felt: counts, and sums in milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct FeltMs {
    pub first_tokens: i64,
    pub first_token_ms: f64,
    pub tokens: i64,
    pub token_ms: f64,
}

/// What an engine was used for on one day (UTC).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Use {
    pub engine: i16,
    #[serde(with = "super::day")]
    pub day: Date,
    /// `production`, `rollout` or `evaluation`.
    pub work: String,
    pub run: Option<Uuid>,
    pub sampled: i64,
    pub read: i64,
    pub read_again: i64,
    pub thrown_away: i64,
    pub slot_seconds: f64,
    pub engine_seconds: f64,
}

impl Minute {
    pub fn new(engine: usize, slots: usize, at: OffsetDateTime) -> Self {
        Minute {
            engine: i16::try_from(engine).unwrap_or(i16::MAX),
            minute: start(at),
            slots: count(slots),
            seconds: 0.0,
            production_slot_seconds: 0.0,
            production_peak: 0,
            expected: None,
            lendable_slot_seconds: 0.0,
            lent_slot_seconds: 0.0,
            slot_limit: None,
            whole: false,
            why: None,
            taken_back: 0,
            taking_back_ms_max: 0.0,
            alone: FeltMs::default(),
            beside: FeltMs::default(),
        }
    }

    /// Adds one look. `since` and `lent`: the totals at the look before, and the slots that could be used
    /// from then on. `decision`: of this look, if slots are lent by load and forecast.
    pub fn add(
        &mut self,
        took: Duration,
        sample: &Sample,
        load: &Load,
        since: &Totals,
        lent: usize,
        decision: Option<&Decision>,
    ) {
        let (seconds, totals) = (took.as_seconds_f64().max(0.0), &load.totals);
        let demand = sample.production + sample.production_waiting;
        let free = usize::try_from(self.slots)
            .unwrap_or(0)
            .saturating_sub(sample.production);
        self.seconds += seconds;
        self.production_slot_seconds += sample.production_slot_seconds;
        self.production_peak = self.production_peak.max(count(demand));
        self.lendable_slot_seconds += lent.min(free) as f64 * seconds;
        self.lent_slot_seconds += sample.lent_slot_seconds;
        self.expected = decision.and_then(|decision| decision.expected);
        self.slot_limit = decision.map(|decision| count(decision.slots));
        self.whole = decision.is_some_and(|decision| decision.whole);
        self.why = decision.map(|decision| decision.why);
        self.taken_back += signed(totals.taken_back - since.taken_back);
        self.taking_back_ms_max = totals.taking_back_seconds_max * 1e3;
        self.alone.add(&totals.alone, &since.alone);
        self.beside.add(&totals.beside, &since.beside);
    }
}

impl FeltMs {
    fn add(&mut self, now: &Felt, before: &Felt) {
        self.first_tokens += signed(now.first_tokens - before.first_tokens);
        self.first_token_ms += (now.first_token_seconds - before.first_token_seconds) * 1e3;
        self.tokens += signed(now.tokens - before.tokens);
        self.token_ms += (now.token_seconds - before.token_seconds) * 1e3;
    }
}

impl Use {
    /// What was used since `before`.
    pub fn between(engine: usize, day: Date, work: Work, now: &Used, before: &Used) -> Self {
        let kind = match work {
            Work::Production => "production",
            Work::Rollout(_) => "rollout",
            Work::Evaluation(_) => "evaluation",
        };
        // tokens that are thrown away were counted as sampled, perhaps the day before
        let sampled = signed(now.sampled) - signed(before.sampled);
        Use {
            engine: i16::try_from(engine).unwrap_or(i16::MAX),
            day,
            work: kind.into(),
            run: work.run(),
            sampled: sampled.max(0),
            read: signed(now.read - before.read),
            read_again: signed(now.read_again - before.read_again),
            thrown_away: signed(now.thrown_away - before.thrown_away),
            slot_seconds: now.slot_seconds - before.slot_seconds,
            engine_seconds: now.engine_seconds - before.engine_seconds,
        }
    }
}

/// The minute of a time.
pub fn start(at: OffsetDateTime) -> OffsetDateTime {
    let past = at.unix_timestamp().rem_euclid(60);
    at - Duration::seconds(past) - Duration::nanoseconds(i64::from(at.nanosecond()))
}

fn count(slots: usize) -> i32 {
    i32::try_from(slots).unwrap_or(i32::MAX)
}

fn signed(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use time::macros::datetime;

    #[test]
    fn a_minute_adds_its_looks_and_keeps_the_last_decision() {
        let at = datetime!(2026-11-02 09:00:42.5 UTC);
        let mut minute = Minute::new(0, 8, at);
        assert_eq!(minute.minute, datetime!(2026-11-02 09:00 UTC));
        let mut load = Load::default();
        let mut before = Totals::default();
        // the first look decides what may be used until the second
        for (production, lent, slots, why) in [(2, 5, 4, Why::Demand), (5, 4, 1, Why::Floor)] {
            let sample = Sample {
                production,
                production_slot_seconds: production as f64,
                lent_slot_seconds: 1.0,
                ..Sample::default()
            };
            load.totals.taken_back += 3;
            load.totals.alone.tokens += 10;
            load.totals.alone.token_seconds += 0.5;
            let decision = Decision {
                slots,
                whole: false,
                why,
                expected: Some(4.0),
            };
            minute.add(Duration::seconds(1), &sample, &load, &before, lent, Some(&decision));
            before = load.totals.clone();
        }
        assert_eq!((minute.production_slot_seconds, minute.production_peak), (7.0, 5));
        assert_eq!((minute.lendable_slot_seconds, minute.lent_slot_seconds), (8.0, 2.0));
        assert_eq!((minute.slot_limit, minute.why), (Some(1), Some(Why::Floor)));
        assert_eq!(
            (minute.taken_back, minute.alone.tokens, minute.alone.token_ms),
            (6, 20, 1000.0)
        );
    }

    #[test]
    fn a_use_is_what_came_since_the_day_began() {
        let used = |sampled, thrown_away| Used {
            sampled,
            thrown_away,
            ..Used::default()
        };
        let run = Uuid::from_u128(7);
        let day = datetime!(2026-11-02 0:00 UTC).date();
        let one = Use::between(1, day, Work::Rollout(Some(run)), &used(30, 4), &used(10, 1));
        assert_eq!((one.work.as_str(), one.run), ("rollout", Some(run)));
        assert_eq!((one.sampled, one.thrown_away, one.engine), (20, 3, 1));
    }
}
