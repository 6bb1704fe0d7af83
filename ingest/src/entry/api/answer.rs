//! The answers that several endpoints share, with their OpenAPI schemas.

use edge::problem::Problem;
use serde::Serialize;
use serde_json::Value;
use time::OffsetDateTime;
use utoipa::{IntoResponses, ToResponse, ToSchema};

use event_log::event::Invalid;

/// The answer to an event that breaks a rule.
pub(super) fn invalid(error: &Invalid) -> Problem {
    Problem::bad_request(error).with("field", error.field)
}

/// An accepted event.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct AcceptedEvent {
    pub source: String,
    pub id: String,
    /// In dry runs only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dryrun: Option<Preview>,
}

/// The result of one event of a batch.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Outcome {
    /// The status that the event would have got in a request of its own.
    pub status: u16,
    /// Absent if the event could not be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<ProblemDocument>, no_recursion)]
    pub problem: Option<Value>,
    /// In dry runs only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dryrun: Option<Preview>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Outcomes {
    /// In the order of the request.
    pub results: Vec<Outcome>,
}

/// The answer of `/v1/events`: the event, or a result for each event of a batch.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "only its schema is used")]
pub(super) enum AcceptedEvents {
    One(AcceptedEvent),
    Batch(Outcomes),
}

/// What would happen to one event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub(super) struct Preview {
    /// The same event was acknowledged or stored before, so nothing would change.
    pub duplicate: bool,
    /// The state of the target: the generation or episode of a feedback event, or the generation
    /// itself.
    pub target: TargetState,
    /// Feedback given later does not count. For an episode: the latest time of its open
    /// generations. Where the episode is the trajectory: if no turn follows.
    #[serde(with = "time::serde::rfc3339::option", skip_serializing_if = "Option::is_none")]
    pub closes_at: Option<OffsetDateTime>,
    /// Number of stored feedback events about the target, counted up to 1,000.
    pub feedback_stored: i64,
    /// For feedback events only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub feedback: Option<JoinOutcome>,
}

/// The state of a generation or an episode in the tables, which may lag behind the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum TargetState {
    Unknown,
    Open,
    Closed,
}

/// What a feedback event would do. Its surface decides whether its metric affects the reward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum JoinOutcome {
    /// It would be part of the trajectory.
    Counts,
    /// It would wait for its target, and become a dead letter if the target never arrives.
    Waits,
    /// It would be stored without effect.
    Late,
}

/// RFC 9457.
#[derive(Serialize, ToSchema)]
pub(super) struct ProblemDocument {
    /// `/problems/` and a slug to branch on, such as `conflict`.
    r#type: String,
    title: String,
    status: u16,
    /// What happened, and what to do.
    detail: Option<String>,
    /// Which field of the event breaks a rule.
    field: Option<String>,
    /// For a batch that must be sent again: the result of each event.
    results: Option<Vec<Outcome>>,
}

/// The path does not exist.
#[derive(ToResponse)]
#[response(content_type = "application/problem+json")]
#[expect(dead_code, reason = "only its schema is used")]
pub(super) struct NoSuchPath(ProblemDocument);

/// The path does not support this method.
#[derive(ToResponse)]
#[response(content_type = "application/problem+json", headers(("allow", description = "the supported methods")))]
#[expect(dead_code, reason = "only its schema is used")]
pub(super) struct MethodNotAllowed(ProblemDocument);

/// The errors of every endpoint that takes events.
#[derive(IntoResponses)]
#[expect(dead_code, reason = "only its schema is used")]
pub(super) enum Refusal {
    /// The request cannot be read or breaks a rule.
    #[response(status = 400, content_type = "application/problem+json")]
    BadRequest(ProblemDocument),
    /// No API key, or an unknown one.
    #[response(status = 401, content_type = "application/problem+json")]
    Unauthorized(ProblemDocument),
    /// The key's scopes do not allow this.
    #[response(status = 403, content_type = "application/problem+json")]
    Forbidden(ProblemDocument),
    /// The path does not support this method.
    #[response(status = 405)]
    MethodNotAllowed(#[ref_response] MethodNotAllowed),
    /// The body did not arrive in time.
    #[response(status = 408, content_type = "application/problem+json")]
    TooSlow(ProblemDocument),
    /// The same event was sent with another body before. A contradiction that is not known yet is
    /// acknowledged, and goes to the dead-letter queue.
    #[response(status = 409, content_type = "application/problem+json")]
    Conflict(ProblemDocument),
    /// Too many bytes, before or after decompression, or too many events.
    #[response(status = 413, content_type = "application/problem+json")]
    TooLarge(ProblemDocument),
    /// An unsupported content type or encoding.
    #[response(status = 415, content_type = "application/problem+json")]
    UnsupportedMediaType(ProblemDocument),
    /// Too many requests in flight. `Retry-After` says when to try again.
    #[response(status = 429, content_type = "application/problem+json")]
    TooMany(ProblemDocument),
    /// A bug in the server.
    #[response(status = 500, content_type = "application/problem+json")]
    Internal(ProblemDocument),
    /// A dry run at a collector, which has no tables, or a payload without a configured object
    /// store.
    #[response(status = 501, content_type = "application/problem+json")]
    NotImplemented(ProblemDocument),
    /// The log is unavailable. `Retry-After` says when to try again.
    #[response(status = 503, content_type = "application/problem+json")]
    Unavailable(ProblemDocument),
    /// The tables have reached their disk limit. `Retry-After` says when to try again.
    #[response(status = 507, content_type = "application/problem+json")]
    Full(ProblemDocument),
}
