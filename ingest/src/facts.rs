//! What the tables hold of a generation and of what was said about it, for whoever scores. What of it counts is the reward's
//! matter.

use anyhow::Context;
use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::event::{Purpose, Value};
use crate::reward::Signal;

/// One feedback as it was stored, about one generation of possibly many.
#[derive(Debug, Clone)]
pub(crate) struct Said {
    pub generation_id: Uuid,
    pub id: Uuid,
    pub metric: String,
    pub value: Value,
    pub given_at: OffsetDateTime,
    pub stored_at: OffsetDateTime,
    /// What it is about had closed before it came.
    pub late: bool,
    /// How long after its generation it was stored, seconds; negative: before.
    pub after_seconds: f64,
}

impl Said {
    pub(crate) fn into_signal(self, retracted_at: Option<OffsetDateTime>) -> Signal {
        Signal {
            id: self.id,
            metric: self.metric,
            value: self.value,
            given_at: self.given_at,
            retracted_at,
        }
    }
}

/// One retraction as it was stored.
#[derive(Debug, Clone)]
pub(crate) struct TakenBack {
    pub feedback_id: Uuid,
    pub given_at: OffsetDateTime,
    pub stored_at: OffsetDateTime,
    /// What its feedback is about had closed before it came.
    pub late: bool,
}

/// All feedback about these generations, directly or through their episode, of their own tenant.
pub(crate) async fn feedback(connection: &mut PgConnection, generations: &[Uuid]) -> sqlx::Result<Vec<Said>> {
    let rows = sqlx::query_file!("src/facts/feedback.sql", generations)
        .fetch_all(connection)
        .await?;
    let said = rows.into_iter().map(|row| Said {
        generation_id: row.generation_id,
        id: row.id,
        metric: row.metric_name,
        value: match (row.value_bool, row.value_float, row.value_text) {
            (Some(value), _, _) => Value::Bool(value),
            (_, Some(value), _) => Value::Float(value),
            (_, _, value) => Value::Text(value.unwrap_or_default()),
        },
        given_at: row.given_at,
        stored_at: row.stored_at,
        late: row.late,
        after_seconds: row.after_seconds,
    });
    Ok(said.collect())
}

/// Everything that takes one of these feedbacks back, of its own tenant.
pub(crate) async fn retractions(connection: &mut PgConnection, feedback: &[Uuid]) -> sqlx::Result<Vec<TakenBack>> {
    if feedback.is_empty() {
        return Ok(Vec::new());
    }
    sqlx::query_as!(
        TakenBack,
        "select r.feedback_id, r.given_at, r.stored_at, r.late \
         from retraction r join feedback f on f.id = r.feedback_id and f.tenant_id = r.tenant_id \
         where r.feedback_id = any($1)",
        feedback
    )
    .fetch_all(connection)
    .await
}

/// The sampled length: reading the tokens to count them would fetch each list from where long values are kept.
pub(crate) fn tokens(version_spans: &serde_json::Value) -> u32 {
    let spans = version_spans.as_array().into_iter().flatten();
    let tokens: u64 = spans.filter_map(|span| span.get(1)?.as_u64()).sum();
    u32::try_from(tokens).unwrap_or(u32::MAX)
}

pub(crate) fn purpose(text: &str) -> anyhow::Result<Purpose> {
    [Purpose::Production, Purpose::Rollout, Purpose::Evaluation]
        .into_iter()
        .find(|purpose| purpose.as_str() == text)
        .with_context(|| format!("purpose {text:?} is not known to this program"))
}
