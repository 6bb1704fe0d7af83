//! What was said about the generations that close, as far as it stands.

use std::collections::{BTreeMap, HashSet};

use anyhow::Context;
use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::event::Value;
use crate::reward::Signal;
use crate::transaction;

pub(super) struct Joined {
    /// By generation.
    pub signals: BTreeMap<Uuid, Vec<Signal>>,
    /// Generations about whose feedback a retraction is being stored just now: they are for the next round.
    pub unsettled: HashSet<Uuid>,
    /// How long after its generation each feedback was stored, seconds; negative: before.
    waits: Vec<f64>,
}

impl Joined {
    /// For `/metrics`, once the closure is committed.
    pub(super) fn count(&self) {
        for wait in &self.waits {
            let first = if *wait < 0.0 { "feedback" } else { "generation" };
            metrics::histogram!("springtide_ingest_join_seconds", "first" => first).record(wait.abs());
        }
    }
}

/// All feedback about these generations, directly or through their episode, of their own tenant.
pub(super) async fn read(connection: &mut PgConnection, ids: &[Uuid]) -> anyhow::Result<Joined> {
    let rows = sqlx::query_file!("src/closer/signals.sql", ids)
        .fetch_all(&mut *connection)
        .await
        .context("read feedback")?;
    let feedback: Vec<Uuid> = rows.iter().map(|row| row.id).collect();
    let expected = transaction::expected(&mut *connection, &feedback).await;
    let expected = expected.context("look for retractions on their way")?;
    // Read after that look: what was committed before it is seen.
    let retracted = retracted(connection, &feedback).await.context("read retractions")?;
    let unsettled: HashSet<Uuid> = rows
        .iter()
        .filter(|row| expected.contains(&row.id))
        .map(|row| row.generation_id)
        .collect();
    let mut signals: BTreeMap<Uuid, Vec<Signal>> = BTreeMap::new();
    let mut waits = Vec::new();
    for row in rows {
        if unsettled.contains(&row.generation_id) {
            continue;
        }
        let value = match (row.value_bool, row.value_float, row.value_text) {
            (Some(value), _, _) => Value::Bool(value),
            (_, Some(value), _) => Value::Float(value),
            (_, _, value) => Value::Text(value.unwrap_or_default()),
        };
        waits.push(row.after_seconds);
        let signal = Signal {
            id: row.id,
            metric: row.metric_name,
            value,
            given_at: row.given_at,
            retracted_at: retracted.get(&row.id).copied(),
        };
        signals.entry(row.generation_id).or_default().push(signal);
    }
    Ok(Joined {
        signals,
        unsettled,
        waits,
    })
}

/// When each feedback was first taken back.
async fn retracted(connection: &mut PgConnection, feedback: &[Uuid]) -> sqlx::Result<BTreeMap<Uuid, OffsetDateTime>> {
    if feedback.is_empty() {
        return Ok(BTreeMap::new());
    }
    let rows = sqlx::query!(
        "select r.feedback_id, min(r.given_at) as \"given_at!\" \
         from retraction r join feedback f on f.id = r.feedback_id and f.tenant_id = r.tenant_id \
         where r.feedback_id = any($1) group by r.feedback_id",
        feedback
    )
    .fetch_all(connection)
    .await?;
    Ok(rows.into_iter().map(|row| (row.feedback_id, row.given_at)).collect())
}
