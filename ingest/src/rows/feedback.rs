//! Reads stored feedback and retractions. `crate::reward` computes rewards from them.

use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::event::Value;
use crate::reward::Signal;

/// A stored feedback event and one of the generations that it is about.
#[derive(Debug, Clone)]
pub(crate) struct FeedbackRow {
    pub generation_id: Uuid,
    pub id: Uuid,
    pub metric: String,
    pub value: Value,
    pub given_at: OffsetDateTime,
    pub stored_at: OffsetDateTime,
    /// Its target had closed before.
    pub late: bool,
    /// Seconds from the storage of the generation to that of the feedback; negative if the feedback
    /// was first.
    pub after_seconds: f64,
}

impl FeedbackRow {
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

/// A stored retraction.
#[derive(Debug, Clone)]
pub(crate) struct RetractionRow {
    pub feedback_id: Uuid,
    pub given_at: OffsetDateTime,
    pub stored_at: OffsetDateTime,
    /// The target of its feedback had closed before.
    pub late: bool,
}

/// All feedback about these generations, directly or through their episode, of the same tenant.
pub(crate) async fn feedback(connection: &mut PgConnection, generations: &[Uuid]) -> sqlx::Result<Vec<FeedbackRow>> {
    let rows = sqlx::query_file!("src/rows/feedback.sql", generations)
        .fetch_all(connection)
        .await?;
    let rows = rows.into_iter().map(|row| FeedbackRow {
        generation_id: row.generation_id,
        id: row.id,
        metric: row.metric_name,
        value: value(row.value_bool, row.value_float, row.value_text),
        given_at: row.given_at,
        stored_at: row.stored_at,
        late: row.late,
        after_seconds: row.after_seconds,
    });
    Ok(rows.collect())
}

/// The value in the three columns of `feedback`, of which one is set.
pub(crate) fn value(bool: Option<bool>, float: Option<f64>, text: Option<String>) -> Value {
    match (bool, float) {
        (Some(value), _) => Value::Bool(value),
        (_, Some(value)) => Value::Float(value),
        _ => Value::Text(text.unwrap_or_default()),
    }
}

/// All retractions of these feedback events, of the same tenant.
pub(crate) async fn retractions(connection: &mut PgConnection, feedback: &[Uuid]) -> sqlx::Result<Vec<RetractionRow>> {
    if feedback.is_empty() {
        return Ok(Vec::new());
    }
    sqlx::query_as!(
        RetractionRow,
        "select r.feedback_id, r.given_at, r.stored_at, r.late \
         from retraction r join feedback f on f.id = r.feedback_id and f.tenant_id = r.tenant_id \
         where r.feedback_id = any($1)",
        feedback
    )
    .fetch_all(connection)
    .await
}
