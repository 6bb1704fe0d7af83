//! Prompts and answers, for those whose key has the scope `texts`. Who reads which, and why, is in the
//! audit.

use edge::Problem;
use edge::auth::Principal;
use futures::future::BoxFuture;
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::page::sections::trajectories::filled;

/// The body of `POST /v1/generations/{id}/texts`, and the form of the page.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Asked {
    /// Why; kept in the audit.
    pub reason: String,
    /// Another answer to show beside it. Default: those to the same prompt.
    #[serde(default, deserialize_with = "filled")]
    pub beside: Option<Uuid>,
}

/// One answer with its prompt.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Text {
    pub generation: Uuid,
    /// That sampled the last token.
    pub version: i64,
    pub arm: String,
    pub purpose: String,
    #[serde(with = "time::serde::rfc3339")]
    pub sampled_at: OffsetDateTime,
    pub finish_reason: String,
    pub declined: bool,
    /// Of its trajectory. `null`: none yet, or none at all.
    pub reward: Option<f64>,
    /// With special tokens. `null`: it is long, and its context is stored in parts.
    pub prompt: Option<String>,
    /// With special tokens.
    pub answer: String,
}

/// Reads texts.
pub trait Texts: Send + Sync {
    /// The answer first, then those beside it. Notes in the audit who read them.
    ///
    /// # Errors
    /// 404 if the caller may not see one or it cannot be decoded, and 400 without a reason.
    fn read<'a>(
        &'a self,
        principal: &'a Principal,
        id: Uuid,
        asked: &'a Asked,
    ) -> BoxFuture<'a, Result<Vec<Text>, Problem>>;
}

/// There are none.
#[cfg(test)]
pub(crate) struct NoTexts;

#[cfg(test)]
impl Texts for NoTexts {
    fn read<'a>(&'a self, _: &'a Principal, id: Uuid, _: &'a Asked) -> BoxFuture<'a, Result<Vec<Text>, Problem>> {
        Box::pin(async move { Err(Problem::not_found(id)) })
    }
}
