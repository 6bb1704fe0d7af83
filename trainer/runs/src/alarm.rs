//! Alarms of a run: what people are told when something begins to be wrong, and when it ends. They
//! stop nothing. The run's events keep the state, so it survives a restart.

use crate::claim;
use serde_json::Value;
use sqlx::{PgConnection, PgPool};
use uuid::Uuid;

/// An alarm with its state.
#[derive(Debug)]
pub struct Alarm {
    /// In `run_event.data`.
    name: &'static str,
    active: bool,
}

impl Alarm {
    pub fn new(name: &'static str, active: bool) -> Self {
        Alarm { name, active }
    }

    /// As the run's events say.
    pub async fn open(pool: &PgPool, run: Uuid, name: &'static str) -> sqlx::Result<Self> {
        let state = sqlx::query_scalar!(
            r#"
            select data ->> 'state' as "state!" from run_event
            where run_id = $1 and data ->> 'alarm' = $2
            order by id desc
            limit 1
            "#,
            run,
            name
        )
        .fetch_optional(pool)
        .await?;
        Ok(Alarm::new(name, state.as_deref() == Some("began")))
    }

    /// Whether it has begun and not ended.
    pub fn is_active(&self) -> bool {
        self.active
    }

    /// For a gauge.
    pub fn gauge(&self) -> f64 {
        f64::from(u8::from(self.active))
    }

    /// Begins or ends it, with an event of the run. `data`: an object, for `run_event.data`.
    pub async fn set(
        &mut self,
        pool: &PgPool,
        run: Uuid,
        active: bool,
        message: &str,
        data: Value,
    ) -> sqlx::Result<()> {
        if active != self.active {
            let mut connection = pool.acquire().await?;
            tell(&mut connection, run, self.name, active, message, data).await?;
            self.active = active;
        }
        Ok(())
    }
}

/// Appends the event of an alarm that begins or ends.
pub(crate) async fn tell(
    connection: &mut PgConnection,
    run: Uuid,
    alarm: &str,
    begins: bool,
    message: &str,
    mut data: Value,
) -> sqlx::Result<()> {
    let (level, state) = if begins { ("warn", "began") } else { ("info", "ended") };
    tracing::warn!(%run, alarm, state, "{message}");
    data["alarm"] = alarm.into();
    data["state"] = state.into();
    claim::append_event(connection, run, level, message, &data).await
}
