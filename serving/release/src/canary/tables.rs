//! The tables `canary` and `canary_transition`. All of it runs under the lock on the policy's
//! assignments ([`super::super::tables::begin`]).

use super::machine::{Event, State};
use super::strategy::Strategy;
use crate::CHAMPION;
use serde::Serialize;
use serde_json::Value;
use sqlx::PgConnection;
use sqlx::types::Json;
use time::OffsetDateTime;
use uuid::Uuid;

/// A version on its way to `champion`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Canary {
    pub id: Uuid,
    pub version: i64,
    /// The version of `champion` that it is compared with. `None`: it is not compared yet.
    pub control: Option<i64>,
    pub strategy: Strategy,
    pub state: State,
    /// Of `strategy.steps`.
    pub step: usize,
    #[serde(with = "time::serde::rfc3339")]
    pub step_since: OffsetDateTime,
    pub actor: String,
    pub reason: String,
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
}

impl Canary {
    /// Of `champion`'s users, 0 to 1, who get [`Canary::served`] in its place.
    pub fn share(&self) -> f64 {
        match (self.state, &self.strategy.watch) {
            (State::Watched, Some(watch)) => watch.hold_back / 100.0,
            (state, _) if state.serves() => self.strategy.weight(self.step) / 100.0,
            _ => 0.0,
        }
    }

    /// The version of the alias `canary`: while the new `champion` is watched, the one before it.
    pub fn served(&self) -> i64 {
        match self.state {
            State::Watched => self.control.unwrap_or(self.version),
            _ => self.version,
        }
    }

    /// Of `champion`'s requests, 0 to 1, that it answers too, unseen. `None`: it does not now.
    pub fn shadow(&self) -> Option<f64> {
        let shadow = self.strategy.shadow.as_ref()?;
        (self.state == State::Shadow).then_some(shadow.percent / 100.0)
    }

    /// After how long an answer is slow. `None`: that is not asked, or its answers wait behind production.
    pub fn slow_seconds(&self) -> Option<f64> {
        let slow_ms = self.strategy.judge.slow_ms.filter(|_| self.shadow().is_none());
        slow_ms.map(|ms| f64::from(ms) / 1000.0)
    }

    /// The clusters whose users it takes. `None`: all.
    pub fn clusters(&self) -> Option<Vec<String>> {
        self.strategy.clusters(self.step).filter(|_| self.state.serves())
    }
}

/// One decision about a canary.
#[derive(Debug, Clone)]
pub struct Transition {
    pub event: Event,
    pub from: State,
    pub epoch: Option<i64>,
    pub actor: String,
    pub reason: String,
    pub evidence: Option<Value>,
}

struct Row {
    id: Uuid,
    version: i64,
    control: Option<i64>,
    strategy: Value,
    state: String,
    step: i32,
    step_since: OffsetDateTime,
    actor: String,
    reason: String,
    created_at: OffsetDateTime,
}

impl TryFrom<Row> for Canary {
    type Error = sqlx::Error;

    fn try_from(row: Row) -> sqlx::Result<Self> {
        let unreadable = |what: String| sqlx::Error::Decode(format!("canary {}: {what}", row.id).into());
        let strategy = serde_json::from_value(row.strategy);
        Ok(Canary {
            id: row.id,
            version: row.version,
            control: row.control,
            strategy: strategy.map_err(|error| unreadable(format!("its strategy cannot be read: {error}")))?,
            state: State::of(&row.state).ok_or_else(|| unreadable(format!("unknown state {}", row.state)))?,
            step: usize::try_from(row.step).map_err(|_| unreadable(format!("step {}", row.step)))?,
            step_since: row.step_since,
            actor: row.actor,
            reason: row.reason,
            created_at: row.created_at,
        })
    }
}

/// Without those that a later program wrote, which are logged: one such row stops no other canary.
fn readable(rows: Vec<Row>) -> Vec<Canary> {
    let read = |row: Row| {
        Canary::try_from(row)
            .inspect_err(|error| tracing::error!(%error, "a canary is left out"))
            .ok()
    };
    rows.into_iter().filter_map(read).collect()
}

/// Those that something can still happen to, the oldest first.
pub async fn unfinished(connection: &mut PgConnection, policy: &str) -> sqlx::Result<Vec<Canary>> {
    let rows = sqlx::query_as!(
        Row,
        r#"select id, version, control, strategy, state, step, step_since, actor, reason, created_at
           from canary
           where policy = $1 and state not in ('retired', 'aborted', 'rolled_back')
           order by id"#,
        policy
    )
    .fetch_all(connection)
    .await?;
    Ok(readable(rows))
}

pub async fn one(connection: &mut PgConnection, policy: &str, id: Uuid) -> sqlx::Result<Option<Canary>> {
    let row = sqlx::query_as!(
        Row,
        r#"select id, version, control, strategy, state, step, step_since, actor, reason, created_at
           from canary where policy = $1 and id = $2"#,
        policy,
        id
    )
    .fetch_optional(connection)
    .await?;
    row.map(Canary::try_from).transpose()
}

/// The newest first.
pub async fn latest(connection: &mut PgConnection, policy: &str, limit: i64) -> sqlx::Result<Vec<Canary>> {
    let rows = sqlx::query_as!(
        Row,
        r#"select id, version, control, strategy, state, step, step_since, actor, reason, created_at
           from canary where policy = $1 order by id desc limit $2"#,
        policy,
        limit
    )
    .fetch_all(connection)
    .await?;
    Ok(readable(rows))
}

pub async fn propose(
    connection: &mut PgConnection,
    policy: &str,
    version: i64,
    strategy: &Strategy,
    actor: &str,
    reason: &str,
) -> sqlx::Result<Uuid> {
    sqlx::query_scalar!(
        "insert into canary (policy, version, strategy, actor, reason) values ($1, $2, $3, $4, $5) returning id",
        policy,
        version,
        Json(strategy) as _,
        actor,
        reason
    )
    .fetch_one(connection)
    .await
}

/// Stores where the canary is now, and the transition that led there.
pub async fn write(connection: &mut PgConnection, canary: &Canary, transition: &Transition) -> sqlx::Result<()> {
    let step = i32::try_from(canary.step).unwrap_or(i32::MAX);
    sqlx::query!(
        "update canary set state = $2, step = $3, step_since = $4, control = $5 where id = $1",
        canary.id,
        canary.state.name(),
        step,
        canary.step_since,
        canary.control
    )
    .execute(&mut *connection)
    .await?;
    sqlx::query!(
        "insert into canary_transition (canary_id, event, from_state, to_state, step, epoch, share, actor, reason, evidence)
         values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)",
        canary.id,
        transition.event.name(),
        transition.from.name(),
        canary.state.name(),
        step,
        transition.epoch,
        canary.share(),
        transition.actor,
        transition.reason,
        transition.evidence
    )
    .execute(connection)
    .await?;
    Ok(())
}

/// Whether replicas were told to load it.
pub async fn was_prepared(connection: &mut PgConnection, id: Uuid) -> sqlx::Result<bool> {
    sqlx::query_scalar!(
        r#"select exists (select from canary_transition where canary_id = $1 and event = 'prepare') as "was_prepared!""#,
        id
    )
    .fetch_one(connection)
    .await
}

/// The evaluation runs that its gate waits for.
pub async fn evaluations(connection: &mut PgConnection, id: Uuid) -> sqlx::Result<Vec<Uuid>> {
    sqlx::query_scalar!(r#"select evaluations as "evaluations!" from canary where id = $1"#, id)
        .fetch_one(connection)
        .await
}

pub async fn note_evaluations(connection: &mut PgConnection, id: Uuid, runs: &[Uuid]) -> sqlx::Result<()> {
    sqlx::query!("update canary set evaluations = $2 where id = $1", id, runs)
        .execute(connection)
        .await?;
    Ok(())
}

/// Who has approved it.
pub async fn approvals(connection: &mut PgConnection, id: Uuid) -> sqlx::Result<Vec<String>> {
    sqlx::query_scalar!(
        r#"select distinct actor as "actor!" from canary_transition where canary_id = $1 and event = 'approve' and actor <> 'release'
           order by 1"#,
        id
    )
    .fetch_all(connection)
    .await
}

/// The periods of one share of `champion`'s users: when each began, and the share. And when the last one
/// ended. `None`: it goes on.
pub async fn periods(
    connection: &mut PgConnection,
    id: Uuid,
) -> sqlx::Result<(Vec<(OffsetDateTime, f64)>, Option<OffsetDateTime>)> {
    let rows = sqlx::query!(
        "select at, share from canary_transition where canary_id = $1 order by id",
        id
    )
    .fetch_all(connection)
    .await?;
    let (mut periods, mut until, mut share) = (Vec::new(), None, 0.0);
    for row in rows {
        let (had, has) = (share > 0.0, row.share > 0.0);
        if has && row.share != share {
            periods.push((row.at, row.share));
        }
        if had && !has {
            until = Some(row.at);
        }
        share = row.share;
    }
    Ok((periods, until))
}

/// The share of all users who were `champion`'s while the canary had users, its own included. The arms stay as
/// they are meanwhile.
pub async fn champion_weight(connection: &mut PgConnection, policy: &str, id: Uuid) -> sqlx::Result<f64> {
    let epoch = sqlx::query_scalar!(
        "select min(epoch) from canary_transition where canary_id = $1 and share > 0",
        id
    )
    .fetch_one(&mut *connection)
    .await?;
    let experiment = crate::tables::experiment(connection, policy, epoch.unwrap_or(i64::MAX)).await?;
    let arms = experiment.map(|experiment| experiment.arms).unwrap_or_default();
    let total: f64 = arms.iter().map(|arm| arm.weight).sum();
    let champion = arms.iter().find(|arm| arm.alias == CHAMPION);
    Ok(champion.map_or(1.0, |arm| arm.weight / total))
}
