//! What answers are like, beside what they earn: how many are shown, accepted, edited, unanswered or unscored,
//! how long they are, how much they repeat themselves. The trainer watches the same figures of the learning
//! arm; the function `answer_figures` defines them.

use serde::{Deserialize, Serialize};
use sqlx::PgConnection;
use uuid::Uuid;

/// Answers that are looked at for one request.
pub const ANSWERS_MAX: usize = 4_000;

/// Means over answers. All but `shown` are over those that were shown. `None`: over none.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    /// How many answers were looked at.
    pub answers: i64,
    /// Shares of answers: the policy did not decline, and the surface showed it.
    pub shown: Option<f64>,
    /// The user accepted it.
    pub accepted: Option<f64>,
    /// The user sent what should have been written instead (`demonstration`).
    pub edited: Option<f64>,
    /// No feedback came until the horizon.
    pub unanswered: Option<f64>,
    /// It closed without a reward.
    pub unscored: Option<f64>,
    /// Accepted and rejected, accepted with a reward below 0, or rejected with one above 0. A number below
    /// 0 counts as a reject.
    pub disagreement: Option<f64>,
    /// The harness sent `tool_failed`.
    pub tool_failed: Option<f64>,
    /// Sampled tokens.
    pub length: Option<f64>,
    /// Share of 4-grams that occurred before in the answer, of its last 512 tokens.
    pub repetition: Option<f64>,
    /// Mean −ln probability of the sampled tokens, nats per token.
    pub entropy: Option<f64>,
}

/// Of these answers. `None`: there are none that the reader may see.
pub async fn read(reader: &mut PgConnection, ids: &[Uuid]) -> sqlx::Result<Option<Figures>> {
    let figures = sqlx::query_as!(
        Figures,
        r#"select count(*) as "answers!", avg(shown::int)::float8 as shown, avg(accepted::int)::float8 as accepted,
                  avg(edited::int)::float8 as edited, avg(unanswered::int)::float8 as unanswered,
                  avg(unscored::int)::float8 as unscored, avg(disagreement::int)::float8 as disagreement,
                  avg(tool_failed::int)::float8 as tool_failed, avg(length)::float8 as length,
                  avg(repetition)::float8 as repetition, avg(entropy)::float8 as entropy
           from answer_figures($1)"#,
        ids
    );
    let figures = figures.fetch_one(reader).await?;
    Ok((figures.answers > 0).then_some(figures))
}
