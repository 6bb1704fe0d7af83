//! The alarm on samples that are dropped because of a cap: somebody sends far more than the others, or
//! the others are gone and steps have become rare.

use crate::executor::Executor;
use crate::share_alarm::{Change, ShareAlarm};
use runs::claim;
use runs::select::caps;
use serde_json::json;
use std::collections::BTreeMap;

/// The alarm's name in `run_event.data`.
const ALARM: &str = "capped";

#[derive(Debug)]
pub(super) struct Capped(ShareAlarm);

impl Capped {
    /// With the state of the alarm when the run was last executed.
    pub async fn open(executor: &Executor<'_>) -> Result<Self, sqlx::Error> {
        let active = claim::alarm_is_on(&executor.trainer.pool, executor.claim.run, ALARM).await?;
        Ok(Capped(ShareAlarm::new(active)))
    }

    /// Counts generations that joined the cohort.
    pub fn record_joined(&mut self, count: u64) {
        self.0.record(count, false);
    }

    /// Counts those that were dropped because of a cap, among all that were dropped.
    pub fn record_dropped<K: AsRef<str>>(&mut self, by_code: &BTreeMap<K, u64>) {
        let capped = by_code.iter().filter(|(code, _)| caps::is_code(code.as_ref()));
        self.0.record(capped.map(|(_, count)| count).sum(), true);
    }

    /// Begins or ends the alarm, as an event of the run.
    pub async fn watch(&mut self, executor: &Executor<'_>, share_max: f64) -> Result<(), sqlx::Error> {
        let (change, share) = (self.0.change(share_max), self.0.share());
        let (line, active) = (executor.line.clone(), f64::from(u8::from(self.0.is_active())));
        metrics::gauge!("springtide_train_capped_share", "line" => line.clone()).set(share);
        metrics::gauge!("springtide_train_capped_alarm", "line" => line).set(active);
        let Some(change) = change else { return Ok(()) };
        let (level, state, about) = match change {
            Change::Begins { .. } => (
                "warn",
                "began",
                ", so steps are rarer than traffic allows: `select code, count(*) from disposition where code like 'capped%' \
                 group by code` says which, and `[trainer.realtime.caps]` sets them",
            ),
            Change::Ends { .. } => ("info", "ended", ""),
        };
        let message = format!("a cap dropped {:.0}% of the latest samples{about}", 100.0 * share);
        let run = executor.claim.run;
        tracing::warn!(%run, line = executor.line, state, "{message}");
        let data = json!({"alarm": ALARM, "state": state, "share": share, "share_max": share_max});
        let mut connection = executor.trainer.pool.acquire().await?;
        claim::append_event(&mut connection, run, level, &message, &data).await
    }
}
