//! The alarm on samples of the learning arm of which nothing proves who sampled them: a replica whose
//! key is not registered or has expired, a clock that is wrong, or somebody who logs generations with
//! an API key.
//!
//! It is not the quarantine's alarm. Whoever may log generations can send any number of these, and
//! must not be able to hide what the quarantine shows, nor what it needs to see a fault of the system.

use crate::executor::Executor;
use crate::share_alarm::{Change, ShareAlarm};
use runs::claim;
use runs::select::{Selection, provenance};
use serde_json::json;

/// The alarm's name in `run_event.data`.
const ALARM: &str = "unproven";

#[derive(Debug, Default)]
pub(crate) struct Unproven(ShareAlarm);

impl Unproven {
    /// With the state of the alarm when the run was last executed.
    pub async fn open(executor: &Executor<'_>) -> Result<Self, sqlx::Error> {
        let active = claim::alarm_is_on(&executor.trainer.pool, executor.claim.run, ALARM).await?;
        Ok(Unproven(ShareAlarm::new(active)))
    }

    /// Counts what a poll selected and excluded, and begins or ends the alarm.
    pub async fn watch(
        &mut self,
        executor: &Executor<'_>,
        selection: &Selection,
        share_max: f64,
    ) -> Result<(), sqlx::Error> {
        let excluded = selection.set_aside.iter();
        let unproven = excluded.filter(|(code, _)| provenance::is_code(code));
        let unproven: u64 = unproven.map(|(_, count)| count).sum();
        self.0.record(selection.ready.iter().flatten().count() as u64, false);
        self.0.record(unproven, true);
        let change = self.0.change(share_max);
        let line = executor.line.clone();
        metrics::gauge!("springtide_train_unproven_share", "line" => line.clone()).set(self.0.share());
        metrics::gauge!("springtide_train_unproven_alarm", "line" => line).set(f64::from(u8::from(self.0.is_active())));
        let Some(change) = change else { return Ok(()) };
        let (level, state, share, about) = match change {
            Change::Begins { share } => (
                "warn",
                "began",
                share,
                ". `select code, count(*) from disposition group by code` says what they lack; `springtide sampler list` \
                 shows the registered samplers",
            ),
            Change::Ends { share } => ("info", "ended", share, ""),
        };
        let message = format!(
            "{:.0}% of the latest samples lack proof of who sampled them{about}",
            100.0 * share
        );
        let run = executor.claim.run;
        tracing::warn!(%run, line = executor.line, state, "{message}");
        let data = json!({"alarm": ALARM, "state": state, "share": share, "share_max": share_max});
        let mut connection = executor.trainer.pool.acquire().await?;
        claim::append_event(&mut connection, run, level, &message, &data).await
    }
}
