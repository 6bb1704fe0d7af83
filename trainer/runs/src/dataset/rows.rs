//! What was logged of a generation, and its reward, as a row of an export: exactly the ids and
//! log-probabilities that were logged, with the whole prompt.

use crate::context;
use bytes::Bytes;
use event_log::payload::Store as Payloads;
use serde::Serialize;
use serde_json::Value;
use sqlx::PgConnection;
use std::collections::BTreeMap;
use time::OffsetDateTime;
use uuid::Uuid;

/// Longest prompt that is put together, tokens. Longer ones are left out with the code
/// `longer_than_context`.
const PROMPT_TOKENS_MAX: usize = 1 << 22;

/// One generation. docs/FORMAT.md describes the fields.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    pub generation_id: Uuid,
    pub tenant: String,
    pub policy: String,
    pub surface: String,
    pub arm: String,
    pub arm_probability: f32,
    pub purpose: String,
    pub version: i64,
    pub version_oldest: i64,
    /// `[[version, tokens], …]` in token order.
    pub version_spans: Value,
    pub line: String,
    pub replica: String,
    pub run_id: Option<Uuid>,
    pub task_id: Option<String>,
    pub group_id: Option<String>,
    pub episode_id: Uuid,
    pub segment: i32,
    pub turn: i32,
    pub parent_id: Option<Uuid>,
    pub user: String,
    #[serde(with = "time::serde::rfc3339")]
    pub sampled_at: OffsetDateTime,
    /// `None`: it cannot be put together.
    pub prompt_ids: Option<Vec<u32>>,
    /// Why not: a code as in the ledger.
    pub prompt_missing: Option<&'static str>,
    pub token_ids: Vec<u32>,
    pub logprobs: Vec<f32>,
    /// `None`: every sampled token may be trained on.
    pub train_mask: Option<Vec<bool>>,
    pub temperature: f32,
    pub top_p: f32,
    pub sampling: Option<Value>,
    pub finish_reason: String,
    pub declined: bool,
    pub decline_suppressed: bool,
    pub exploration_share: Option<f32>,
    pub shown: Option<bool>,
    /// Whether its signature was verified when it was stored.
    pub proven: Option<bool>,
    /// Of the trajectory.
    pub reward: f64,
    /// The turn's own, if it has one.
    pub turn_reward: Option<f64>,
    /// `None`: the generation is the trajectory. Else the trajectory is the episode, of so many turns.
    pub episode_turns: Option<i32>,
    pub signal: Option<String>,
    #[serde(with = "time::serde::rfc3339::option")]
    pub feedback_at: Option<OffsetDateTime>,
    #[serde(with = "time::serde::rfc3339")]
    pub closed_at: OffsetDateTime,
    /// Of a cohort that is leased. An export has none.
    #[serde(skip)]
    pub training: Option<Training>,
}

/// What a step does with a generation.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Training {
    pub advantage: f64,
    /// See [`Sample::weight`](crate::sample::Sample::weight).
    pub weight: f64,
    /// The rollouts of one task, or the turns of one trajectory, have the same number.
    pub bundle: i64,
    /// The logged expert ids, as the payload has them.
    pub experts: Option<Bytes>,
}

/// How many tokens each of these generations has, with its whole context. Ids that are not stored any
/// more are left out.
pub async fn tokens(connection: &mut PgConnection, ids: &[Uuid]) -> Result<BTreeMap<Uuid, u64>, sqlx::Error> {
    let rows = sqlx::query_file!("src/dataset/tokens.sql", ids)
        .fetch_all(connection)
        .await?;
    Ok(rows
        .into_iter()
        .map(|row| (row.id, row.tokens.unsigned_abs()))
        .collect())
}

/// Reads the rows of these generations, in the order of the ids. Ids that are not stored any more are
/// left out. Fails if the store of payloads does not answer.
pub async fn read(
    connection: &mut PgConnection,
    payloads: &Payloads,
    ids: &[Uuid],
) -> Result<Vec<Row>, context::Error> {
    let found = sqlx::query_file!("src/dataset/rows.sql", ids)
        .fetch_all(&mut *connection)
        .await?;
    let in_parts: Vec<Uuid> = found.iter().filter(|row| row.in_parts).map(|row| row.id).collect();
    let mut prompts = context::prompts(connection, payloads, &in_parts, PROMPT_TOKENS_MAX).await?;
    let rows = found.into_iter().map(|row| {
        let prompt = match row.in_parts {
            false => Ok(unsigned(row.prompt_ids)),
            true => prompts
                .remove(&row.id)
                .unwrap_or(Err(context::Broken::ParentMissing))
                .map_err(context::Broken::code),
        };
        Row {
            generation_id: row.id,
            tenant: row.tenant_id,
            policy: row.policy,
            surface: row.surface,
            arm: row.arm,
            arm_probability: row.arm_probability,
            purpose: row.purpose,
            version: row.version,
            version_oldest: row.version_oldest,
            version_spans: row.version_spans,
            line: row.line,
            replica: row.replica,
            run_id: row.run_id,
            task_id: row.task_id,
            group_id: row.group_id,
            episode_id: row.episode_id,
            segment: row.segment,
            turn: row.turn,
            parent_id: row.parent_id,
            user: row.user_key,
            sampled_at: row.sampled_at,
            prompt_missing: prompt.as_ref().err().copied(),
            prompt_ids: prompt.ok(),
            token_ids: unsigned(row.token_ids),
            logprobs: row.logprobs,
            train_mask: row.train_mask,
            temperature: row.temperature,
            top_p: row.top_p,
            sampling: row.sampling,
            finish_reason: row.finish_reason,
            declined: row.declined,
            decline_suppressed: row.decline_suppressed,
            exploration_share: row.exploration_share,
            shown: row.shown,
            proven: row.proven,
            reward: row.reward,
            turn_reward: row.turn_reward,
            episode_turns: row.episode_turns,
            signal: row.signal,
            feedback_at: row.feedback_at,
            closed_at: row.closed_at,
            training: None,
        }
    });
    let mut rows: BTreeMap<Uuid, Row> = rows.map(|row| (row.generation_id, row)).collect();
    Ok(ids.iter().filter_map(|id| rows.remove(id)).collect())
}

fn unsigned(ids: Vec<i32>) -> Vec<u32> {
    ids.into_iter().map(i32::cast_unsigned).collect()
}

#[cfg(test)]
impl Row {
    /// A small row for tests.
    pub(crate) fn example() -> Self {
        Row {
            generation_id: Uuid::from_u128(7),
            tenant: "default".into(),
            policy: "demo".into(),
            surface: "completion".into(),
            arm: "champion".into(),
            arm_probability: 0.6,
            purpose: "production".into(),
            version: 17,
            version_oldest: 17,
            version_spans: serde_json::json!([[17, 2]]),
            line: "realtime".into(),
            replica: "r".into(),
            run_id: None,
            task_id: None,
            group_id: None,
            episode_id: Uuid::from_u128(8),
            segment: 0,
            turn: 3,
            parent_id: None,
            user: "u".into(),
            sampled_at: OffsetDateTime::UNIX_EPOCH,
            prompt_ids: Some(vec![1, 2, 3]),
            prompt_missing: None,
            token_ids: vec![4, 5],
            logprobs: vec![-0.1, -2.5],
            train_mask: None,
            temperature: 1.0,
            top_p: 1.0,
            sampling: None,
            finish_reason: "stop".into(),
            declined: false,
            decline_suppressed: false,
            exploration_share: Some(0.25),
            shown: None,
            proven: Some(true),
            reward: 0.75,
            turn_reward: None,
            episode_turns: None,
            signal: Some("accept".into()),
            feedback_at: None,
            closed_at: OffsetDateTime::UNIX_EPOCH,
            training: None,
        }
    }
}
