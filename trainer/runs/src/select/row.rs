//! A generation as it was logged, and how it becomes a sample.

use super::context::Stored;
use crate::explore;
use crate::sample::{Behavior, Sample};
use event_log::event::{Constraint, Sampling};
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
    pub decline_suppressed: bool,
    pub exploration_share: Option<f32>,
    pub reward: f64,
    pub kept_characters: Option<i32>,
    /// Something ended it: an id, or a text that the request named.
    pub stopped: bool,
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

    /// `decline`: the model's decline token.
    pub fn into_sample(self, decline: Option<u32>) -> Sample {
        let ids = |v: Vec<i32>| v.into_iter().map(|id| id as u32).collect();
        // a greedy answer is logged with its probability at temperature 1, and filters did nothing to it
        let is_greedy = self.temperature <= 0.0;
        let (temperature, top_p) = if is_greedy {
            (1.0, 1.0)
        } else {
            (self.temperature, self.top_p)
        };
        let sampling = self.sampling.map(|Json(sampling)| match is_greedy {
            true => Sampling {
                top_k: 0,
                min_p: 0.0,
                kept: None,
                ..sampling
            },
            false => sampling,
        });
        let tokens: Vec<u32> = ids(self.token_ids);
        let declines = decline.is_some_and(|decline| tokens.contains(&decline));
        Sample {
            generation: self.id,
            tenant: self.tenant_id,
            user: self.user_key,
            replica: self.replica,
            engine: self.engine,
            class: self.surface,
            // a user's request may name a group too
            group: self.group_id.filter(|_| !self.production),
            turn: None,
            version: self.version_oldest,
            staleness: 0,
            prompt: ids(self.prompt_ids),
            mask: self.train_mask.unwrap_or_else(|| vec![true; tokens.len()]),
            tokens,
            logprobs: self.logprobs,
            temperature,
            experts: None,
            behavior: Behavior::from_logged(temperature, top_p, sampling).map(Arc::new),
            reward: self.reward,
            kept: None,
            typed: None,
            suppressed: self.decline_suppressed,
            weight: explore::weight(declines, self.exploration_share),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(token_ids: &[i32]) -> Row {
        Row {
            id: Uuid::nil(),
            tenant_id: "default".into(),
            user_key: "u".into(),
            replica: "r".into(),
            engine: None,
            surface: "completion".into(),
            group_id: None,
            production: true,
            version_oldest: 1,
            prompt_ids: vec![1],
            token_ids: token_ids.to_vec(),
            logprobs: vec![-1.0; token_ids.len()],
            train_mask: None,
            temperature: 1.0,
            top_p: 1.0,
            sampling: None,
            decline_suppressed: false,
            exploration_share: Some(0.5),
            reward: 0.0,
            kept_characters: None,
            stopped: false,
            in_parts: false,
            routed: false,
            young: false,
            signature: None,
            unsigned_digest: None,
            finished_at: OffsetDateTime::UNIX_EPOCH,
            public_key: None,
        }
    }

    #[test]
    fn a_text_that_was_held_back_has_not_the_weight_of_a_decline() {
        let weight = |tokens: &[i32], decline| row(tokens).into_sample(decline).weight;
        assert_eq!(weight(&[3, 9], Some(9)), 2.0);
        assert_eq!(weight(&[3, 4], Some(9)), 1.0, "it may be logged as declined");
        assert_eq!(weight(&[3, 9], None), 1.0);
    }

    #[test]
    fn a_greedy_answer_is_read_as_the_policys_own_at_temperature_1() {
        let greedy = Row {
            temperature: 0.0,
            top_p: 0.9,
            sampling: Some(Json(Sampling {
                top_k: 40,
                kept: Some(vec![1, 1]),
                ..Sampling::default()
            })),
            ..row(&[3, 4])
        };
        let sample = greedy.into_sample(None);
        assert_eq!(sample.temperature, 1.0);
        assert!(sample.behavior.is_none() && sample.untrainable().is_none());
        let steered = Row {
            temperature: 0.0,
            sampling: Some(Json(Sampling {
                repetition_penalty: 1.2,
                ..Sampling::default()
            })),
            ..row(&[3, 4])
        };
        assert_eq!(steered.into_sample(None).untrainable(), Some("steered_sampling"));
    }
}
