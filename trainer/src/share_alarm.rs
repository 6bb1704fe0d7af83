//! Alarms on the share of the latest samples that something is wrong with. The window is empty when
//! a run is opened.

use runs::alarm::Alarm;
use serde_json::json;
use sqlx::PgPool;
use std::collections::VecDeque;
use uuid::Uuid;

/// Samples that the share is computed from.
pub(crate) const WINDOW: usize = 512;
/// Fewer samples have no share.
const SAMPLES_MIN: usize = 32;

/// What is wrong with samples.
#[derive(Debug)]
pub(crate) struct Fault {
    /// The alarm's name in `run_event.data`.
    name: &'static str,
    alarm_gauge: &'static str,
    share_gauge: &'static str,
    /// "Of the samples, so many …".
    what: &'static str,
    advice: &'static str,
}

/// Something about them cannot be true or must not count: see [`crate::quarantine`].
pub(crate) const QUARANTINED: Fault = Fault {
    name: "quarantine",
    alarm_gauge: "springtide_train_quarantine_alarm",
    share_gauge: "springtide_train_quarantine_share",
    what: "were quarantined",
    advice: "`select code, count(*) from disposition where code like 'quarantined%' group by code` says why",
};

/// Nothing proves who sampled them: a replica whose key is not registered or has expired, a clock that is
/// wrong, or somebody who logs generations with an API key. It is not the quarantine's alarm: whoever may
/// log generations can send any number of these, and must not be able to hide what the quarantine shows,
/// nor what it needs to see a fault of the system.
pub(crate) const UNPROVEN: Fault = Fault {
    name: "unproven",
    alarm_gauge: "springtide_train_unproven_alarm",
    share_gauge: "springtide_train_unproven_share",
    what: "lack proof of who sampled them",
    advice: "`select code, count(*) from disposition group by code` says what they lack; `springtide sampler list` shows \
             the registered samplers",
};

/// They were dropped because of a cap: somebody sends far more than the others, or the others are gone
/// and steps have become rare.
pub(crate) const CAPPED: Fault = Fault {
    name: "capped",
    alarm_gauge: "springtide_train_capped_alarm",
    share_gauge: "springtide_train_capped_share",
    what: "were dropped by a cap",
    advice: "steps are rarer than traffic allows. `select code, count(*) from disposition where code like 'capped%' group \
             by code` says which cap, and `[trainer.realtime.caps]` sets them",
};

/// Begins above a share and ends at half of it.
#[derive(Debug)]
pub(crate) struct ShareAlarm {
    fault: Fault,
    alarm: Alarm,
    /// Newest last: whether the sample is bad.
    window: VecDeque<bool>,
}

impl ShareAlarm {
    pub fn new(fault: Fault, alarm: Alarm) -> Self {
        ShareAlarm {
            fault,
            alarm,
            window: VecDeque::new(),
        }
    }

    /// With the state of the alarm when the run was last executed.
    pub async fn open(pool: &PgPool, run: Uuid, fault: Fault) -> sqlx::Result<Self> {
        let alarm = Alarm::open(pool, run, fault.name).await?;
        Ok(ShareAlarm::new(fault, alarm))
    }

    /// Counts samples.
    pub fn record(&mut self, count: u64, bad: bool) {
        for _ in 0..count.min(WINDOW as u64) {
            if self.window.len() == WINDOW {
                self.window.pop_front();
            }
            self.window.push_back(bad);
        }
    }

    /// Share of the window that is bad.
    fn share(&self) -> f64 {
        let bad = self.window.iter().filter(|bad| **bad).count();
        bad as f64 / self.window.len().max(1) as f64
    }

    /// Whether the alarm is to be on now.
    pub fn is_high(&self, share_max: f64) -> bool {
        let is_active = self.alarm.is_active();
        match self.window.len() < SAMPLES_MIN {
            true => is_active,
            false => self.share() > if is_active { share_max / 2.0 } else { share_max },
        }
    }

    /// Begins or ends the alarm, as an event of the run.
    pub async fn watch(&mut self, pool: &PgPool, run: Uuid, line: &str, share_max: f64) -> sqlx::Result<()> {
        let (share, is_high) = (self.share(), self.is_high(share_max));
        let what = self.fault.what;
        let mut message = format!("{:.0}% of the latest samples {what}", 100.0 * share);
        if is_high {
            message += &format!(", more than {:.0}%: {}", 100.0 * share_max, self.fault.advice);
        }
        let data = json!({"share": share, "share_max": share_max});
        self.alarm.set(pool, run, is_high, &message, data).await?;
        metrics::gauge!(self.fault.share_gauge, "line" => line.to_owned()).set(share);
        metrics::gauge!(self.fault.alarm_gauge, "line" => line.to_owned()).set(self.alarm.gauge());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn alarm(active: bool) -> ShareAlarm {
        ShareAlarm::new(CAPPED, Alarm::new("capped", active))
    }

    #[test]
    fn it_begins_above_its_bound_and_ends_at_half_of_it() {
        let mut ended = alarm(false);
        ended.record(1, true);
        assert!(!ended.is_high(0.05), "one sample is no share");
        ended.record(40, false);
        assert!(!ended.is_high(0.05));
        ended.record(3, true);
        assert_eq!(ended.share(), 4.0 / 44.0);
        assert!(ended.is_high(0.05));
        let mut begun = alarm(true);
        assert!(begun.is_high(0.05), "no sample is no share");
        begun.record(2, true);
        begun.record(38, false);
        assert!(begun.is_high(0.05), "half of the bound is 1 of 40");
        begun.record(40, false);
        assert!(!begun.is_high(0.05));
    }

    #[test]
    fn it_counts_the_latest_samples() {
        let mut alarm = alarm(false);
        alarm.record(u64::MAX, true);
        alarm.record(384, false);
        assert_eq!((alarm.window.len(), alarm.share()), (WINDOW, 0.25));
    }
}
