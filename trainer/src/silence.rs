//! Silence is not learning: an alarm when the learning arm shows hardly anything any more. A policy that is wrong most of
//! the time gains by declining, and then has nothing left to learn from.
//!
//! Looks at what the arms showed lately, beside the realtime run and whether that runs or not. When the arm falls silent,
//! and when it shows again, it writes one event of the run; metrics say the same at every look. It stops nothing: whether
//! silence is right for these users is for people to say.

mod judge;

use crate::claim;
use crate::options::Realtime;
use crate::select::first_id_of_the_last;
pub use judge::GENERATIONS_MIN;
use judge::{Look, Reference, Shown};
use serde_json::json;
use sqlx::PgPool;
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

/// Marks the alarm's events in `run_event.data`.
const ALARM: &str = "show_rate";
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// What is older says nothing about now.
const LATELY: Duration = Duration::from_secs(60 * 60);
/// Rows read at one look, in windows of one arm: an arm with little traffic is seen as far back as this.
const WINDOWS_READ_MAX: i64 = 8;

/// Looks every few seconds until `shutdown`. What fails is logged and tried again.
pub async fn watch(pool: PgPool, policy: &str, options: &Realtime, shutdown: &CancellationToken) {
    if !options.enabled {
        return;
    }
    let mut watch = Watch::new(pool, policy, options);
    loop {
        if let Err(error) = watch.look().await {
            tracing::warn!(%error, "could not look at what the arms show");
        }
        tokio::select! {
            () = tokio::time::sleep(LOOK_EVERY) => {}
            () = shutdown.cancelled() => return,
        }
    }
}

/// Whether the alarm is on, from one look to the next.
#[derive(Debug)]
pub struct Watch<'a> {
    pool: PgPool,
    policy: &'a str,
    options: &'a Realtime,
    /// None: not asked of the run's events yet.
    silent: Option<bool>,
}

/// The realtime run.
struct Run {
    id: Uuid,
    base_version: Option<i64>,
}

/// One arm's window.
struct Arm {
    arm: String,
    generations: i64,
    shown: i64,
    closed: i64,
    unscored: i64,
    explore: f32,
}

impl<'a> Watch<'a> {
    pub fn new(pool: PgPool, policy: &'a str, options: &'a Realtime) -> Self {
        Watch {
            pool,
            policy,
            options,
            silent: None,
        }
    }

    /// Looks once; says so in the run's events if the alarm begins or ends with it.
    pub async fn look(&mut self) -> Result<(), sqlx::Error> {
        let Some(run) = self.run().await? else { return Ok(()) };
        let was = match self.silent {
            Some(silent) => silent,
            None => self.was_silent(run.id).await?,
        };
        let arms = self.window().await?;
        arms.iter().for_each(observe);
        let alias = self.options.alias.as_str();
        let Some(learning) = arms.iter().find(|arm| arm.arm == alias) else {
            return Ok(());
        };
        let look = Look {
            arm: alias,
            shown: learning.shown(),
            reference: self.reference(&arms, &run).await?,
            explore: f64::from(learning.explore),
            rate_min: self.options.alarms.show_rate_min,
        };
        let silent = look.is_silent(was);
        metrics::gauge!("springtide_train_show_rate_alarm", "arm" => alias.to_owned()).set(f64::from(u8::from(silent)));
        if silent != was {
            self.say(run.id, &look, silent).await?;
        }
        self.silent = Some(silent);
        Ok(())
    }

    async fn run(&self) -> Result<Option<Run>, sqlx::Error> {
        sqlx::query_as!(
            Run,
            "select id, base_version from run where policy = $1 and line = $2 and kind = 'realtime'",
            self.policy,
            self.options.line
        )
        .fetch_optional(&self.pool)
        .await
    }

    /// As the process before this one left it.
    async fn was_silent(&self, run: Uuid) -> Result<bool, sqlx::Error> {
        let state = sqlx::query_scalar!(
            r#"
            select data ->> 'state' as "state!" from run_event
            where run_id = $1 and data ->> 'alarm' = $2
            order by id desc
            limit 1
            "#,
            run,
            ALARM
        )
        .fetch_optional(&self.pool)
        .await?;
        Ok(state.as_deref() == Some("began"))
    }

    async fn window(&self) -> Result<Vec<Arm>, sqlx::Error> {
        let window = i64::from(self.options.alarms.show_rate_window);
        sqlx::query_file_as!(
            Arm,
            "src/silence/window.sql",
            self.policy,
            first_id_of_the_last(LATELY),
            window,
            window.saturating_mul(WINDOWS_READ_MAX)
        )
        .fetch_all(&self.pool)
        .await
    }

    /// The other arms where they have traffic, else what the run started from.
    async fn reference(&self, arms: &[Arm], run: &Run) -> Result<Option<Reference>, sqlx::Error> {
        let mut others = Shown::default();
        for arm in arms.iter().filter(|arm| arm.arm != self.options.alias) {
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
            Shown,
            "src/silence/first.sql",
            self.policy,
            version,
            i64::from(self.options.alarms.show_rate_window)
        )
        .fetch_one(&self.pool)
        .await?;
        Ok(shown.is_enough().then_some(Reference::First { version, shown }))
    }

    async fn say(&self, run: Uuid, look: &Look<'_>, silent: bool) -> Result<(), sqlx::Error> {
        let (level, state, message) = match silent {
            true => ("warn", "began", look.began()),
            false => ("info", "ended", look.ended()),
        };
        let data = json!({
            "alarm": ALARM,
            "state": state,
            "show_rate": look.shown.rate(),
            "bound": look.bound(),
            "reference": look.reference.map(Reference::rate),
        });
        let mut connection = self.pool.acquire().await?;
        claim::event(&mut connection, run, level, &message, &data).await?;
        if silent {
            tracing::warn!(%run, "{message}");
        } else {
            tracing::info!(%run, "{message}");
        }
        Ok(())
    }
}

impl Arm {
    fn shown(&self) -> Shown {
        Shown {
            generations: self.generations,
            shown: self.shown,
        }
    }
}

fn observe(arm: &Arm) {
    metrics::gauge!("springtide_train_show_rate", "arm" => arm.arm.clone()).set(arm.shown().rate());
    if arm.closed > 0 {
        let unscored = arm.unscored as f64 / arm.closed as f64;
        metrics::gauge!("springtide_train_unscored_share", "arm" => arm.arm.clone()).set(unscored);
    }
}
