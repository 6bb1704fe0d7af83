//! A generation as it was logged, and how it becomes a sample.

use super::context::Stored;
use crate::learn::explore;
use crate::learn::sample::{Behavior, Sample};
use ingest::event::{Constraint, Sampling};
use sqlx::PgConnection;
use sqlx::types::Json;
use std::sync::Arc;
use time::OffsetDateTime;
use uuid::Uuid;

/// How long after a trajectory has closed its parent may still arrive.
const PARENT_LATE_SECONDS_MAX: f64 = 60.0;

/// Reads generations that `faults.sql` has passed.
pub(super) async fn read(connection: &mut PgConnection, ids: &[Uuid]) -> Result<Stored, sqlx::Error> {
    let rows = sqlx::query_file_as!(Row, "src/select/rows.sql", ids, PARENT_LATE_SECONDS_MAX)
        .fetch_all(&mut *connection)
        .await?;
    Stored::read(connection, rows).await
}

pub(super) struct Row {
    pub id: Uuid,
    pub tenant_id: String,
    pub user_key: String,
    pub replica: String,
    pub engine: Option<String>,
    pub surface: String,
    pub group_id: Option<String>,
    /// For a user.
    pub production: bool,
    pub version_oldest: i64,
    pub prompt_ids: Vec<i32>,
    pub token_ids: Vec<i32>,
    pub logprobs: Vec<f32>,
    pub train_mask: Option<Vec<bool>>,
    pub temperature: f32,
    pub top_p: f32,
    pub sampling: Option<Json<Sampling>>,
    pub declined: bool,
    pub decline_suppressed: bool,
    pub exploration_share: Option<f32>,
    pub reward: f64,
    /// The row has only the end of its prompt.
    pub in_parts: bool,
    /// The sampler's experts were logged.
    pub routed: bool,
    /// Closed so recently that its parents may still arrive.
    pub young: bool,
    /// With the next three: the proof of who sampled it.
    pub signature: Option<Vec<u8>>,
    pub unsigned_digest: Option<Vec<u8>>,
    pub finished_at: OffsetDateTime,
    pub public_key: Option<Vec<u8>>,
}

impl Row {
    pub fn is_constrained(&self) -> bool {
        let sampling = self.sampling.as_ref();
        sampling.is_some_and(|Json(sampling)| sampling.constraint.is_some())
    }

    /// What constrained its sampling.
    pub fn take_constraint(&mut self) -> Option<Constraint> {
        self.sampling.as_mut()?.constraint.take()
    }
}

impl From<Row> for Sample {
    fn from(row: Row) -> Self {
        let ids = |v: Vec<i32>| v.into_iter().map(|id| id as u32).collect();
        let sampling = row.sampling.map(|Json(sampling)| sampling);
        Sample {
            generation: row.id,
            tenant: row.tenant_id,
            user: row.user_key,
            replica: row.replica,
            engine: row.engine,
            class: row.surface,
            // a user's request may name a group too
            group: row.group_id.filter(|_| !row.production),
            turn: None,
            version: row.version_oldest,
            staleness: 0,
            prompt: ids(row.prompt_ids),
            mask: row.train_mask.unwrap_or_else(|| vec![true; row.token_ids.len()]),
            tokens: ids(row.token_ids),
            logprobs: row.logprobs,
            temperature: row.temperature,
            experts: None,
            behavior: Behavior::from_logged(row.temperature, row.top_p, sampling).map(Arc::new),
            reward: row.reward,
            suppressed: row.decline_suppressed,
            weight: explore::weight(row.declined, row.exploration_share),
        }
    }
}
