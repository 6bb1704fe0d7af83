//! An alarm when the learning arm declines almost everything. A policy that is mostly wrong gains
//! by declining, and then gets too little feedback to learn from.
//!
//! Compares the recent show rates of the arms, whether or not the realtime run executes. When the
//! alarm begins and when it ends, it appends one event to the run; metrics are set at every poll.
//! It stops nothing: people decide whether a low show rate is right for their users.

mod bound;

use crate::alarm::Alarm;
use crate::learning;
use crate::options::{REALTIME_LINE, Realtime};
use crate::realtime::{self, Run};
use crate::select::first_id_of_the_last;
use artifact::assignment::{CHAMPION, LEARNER};
use bound::{Observation, Reference, ShowCounts};
use serde_json::json;
use sqlx::PgPool;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// Marks the alarm's events in `run_event.data`.
const ALARM: &str = "show_rate";
const POLL_EVERY: Duration = Duration::from_secs(5);
/// Older generations are ignored.
const RECENT: Duration = Duration::from_secs(60 * 60);
/// Rows read per poll, in windows of one arm. More rows find arms with less traffic.
const WINDOWS_READ_MAX: i64 = 8;

/// Polls until `shutdown`. Errors are logged and tried again.
pub async fn watch(pool: PgPool, policy: &str, options: &Realtime, shutdown: &CancellationToken) {
    if !options.enabled {
        return;
    }
    let mut alarm = ShowRateAlarm::new(pool, policy, options);
    loop {
        if let Err(error) = alarm.poll().await {
            tracing::warn!(%error, "could not read the show rates of the arms");
        }
        tokio::select! {
            () = tokio::time::sleep(POLL_EVERY) => {}
            () = shutdown.cancelled() => return,
        }
    }
}

/// The alarm, with its state between polls.
#[derive(Debug)]
pub struct ShowRateAlarm<'a> {
    pool: PgPool,
    policy: &'a str,
    options: &'a Realtime,
    /// `None`: not read from the run's events yet.
    alarm: Option<Alarm>,
}

/// The recent generations of one arm.
struct Arm {
    arm: String,
    generations: i64,
    shown: i64,
    closed: i64,
    unscored: i64,
    explore: f32,
}

impl<'a> ShowRateAlarm<'a> {
    pub fn new(pool: PgPool, policy: &'a str, options: &'a Realtime) -> Self {
        ShowRateAlarm {
            pool,
            policy,
            options,
            alarm: None,
        }
    }

    /// Reads the show rates once. Appends an event if the alarm begins or ends.
    pub async fn poll(&mut self) -> Result<(), sqlx::Error> {
        let Some(run) = realtime::find(&self.pool, self.policy, REALTIME_LINE).await? else {
            return Ok(());
        };
        let mut alarm = match self.alarm.take() {
            Some(alarm) => alarm,
            None => Alarm::open(&self.pool, run.id, ALARM).await?,
        };
        let arms = self.recent_arms().await?;
        arms.iter().for_each(Arm::record_metrics);
        let alias = learning::read(&self.pool, self.policy).await?.alias;
        let Some(learning) = arms.iter().find(|arm| arm.arm == alias) else {
            return Ok(());
        };
        let observation = Observation {
            arm: alias,
            shown: learning.shown(),
            reference: self.reference(&arms, &run).await?,
            explore: f64::from(learning.explore),
            rate_min: self.options.alarms.show_rate_min,
        };
        let active = observation.is_low(alarm.is_active());
        let message = match active {
            true => observation.begin_message(),
            false => observation.end_message(),
        };
        let data = json!({
            "show_rate": observation.shown.rate(),
            "bound": observation.bound(),
            "reference": observation.reference.map(Reference::rate),
        });
        alarm.set(&self.pool, run.id, active, &message, data).await?;
        metrics::gauge!("springtide_train_show_rate_alarm", "arm" => alias.to_owned()).set(alarm.gauge());
        self.alarm = Some(alarm);
        Ok(())
    }

    async fn recent_arms(&self) -> Result<Vec<Arm>, sqlx::Error> {
        let window = i64::from(self.options.alarms.show_rate_window);
        sqlx::query_file_as!(
            Arm,
            "src/show_rate/window.sql",
            self.policy,
            first_id_of_the_last(RECENT),
            window,
            window.saturating_mul(WINDOWS_READ_MAX)
        )
        .fetch_all(&self.pool)
        .await
    }

    /// The arms that do not follow the run if they have traffic, else the version that the run started
    /// from.
    async fn reference(&self, arms: &[Arm], run: &Run) -> Result<Option<Reference>, sqlx::Error> {
        let mut others = ShowCounts::default();
        // `champion` follows `learner`, so it would fall silent with it
        for arm in arms.iter().filter(|arm| ![LEARNER, CHAMPION].contains(&&*arm.arm)) {
            others.generations += arm.generations;
            others.shown += arm.shown;
        }
        if others.is_enough() {
            return Ok(Some(Reference::Others(others)));
        }
        let Some(version) = run.base_version else {
            return Ok(None);
        };
        let shown = sqlx::query_file_as!(
            ShowCounts,
            "src/show_rate/first.sql",
            self.policy,
            version,
            i64::from(self.options.alarms.show_rate_window)
        )
        .fetch_one(&self.pool)
        .await?;
        Ok(shown.is_enough().then_some(Reference::First { version, shown }))
    }
}

impl Arm {
    fn shown(&self) -> ShowCounts {
        ShowCounts {
            generations: self.generations,
            shown: self.shown,
        }
    }

    fn record_metrics(&self) {
        metrics::gauge!("springtide_train_show_rate", "arm" => self.arm.clone()).set(self.shown().rate());
        if self.closed > 0 {
            let unscored = self.unscored as f64 / self.closed as f64;
            metrics::gauge!("springtide_train_unscored_share", "arm" => self.arm.clone()).set(unscored);
        }
    }
}
