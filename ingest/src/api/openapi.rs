//! `GET /openapi.json`: the OpenAPI 3.1 document of this role, made from the routes themselves. The shapes of canonical events
//! are written out here, because `event` knows nothing of HTTP; tests hold them against the real types.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use time::OffsetDateTime;
use utoipa::openapi::header::HeaderBuilder;
use utoipa::openapi::path::{HttpMethod, Operation, OperationBuilder};
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{Components, ContentBuilder, InfoBuilder, ObjectBuilder, OpenApi, Ref, RefOr, ResponseBuilder};
use utoipa::{IntoResponses, ToSchema};
use uuid::Uuid;

/// What is only referred to in a circle, so that no route brings it along.
#[derive(utoipa::OpenApi)]
#[openapi(components(schemas(ProblemDocument)))]
pub(super) struct Base;

pub(super) const PATH: &str = "/openapi.json";

/// What the routes cannot say of themselves.
pub(super) fn complete(mut document: OpenApi) -> OpenApi {
    document.info = InfoBuilder::new()
        .title("Springtide ingest")
        .version(env!("CARGO_PKG_VERSION"))
        .description(Some(
            "Events in: generations and feedback about them. A 2xx means that the log has acknowledged. A path that is not here \
             is a 404 (`NoSuchPath`), a method that its path does not have a 405 (`MethodNotAllowed`), with or without a key.",
        ))
        .build();
    let bearer = SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer));
    let basic = SecurityScheme::Http(Http::new(HttpAuthScheme::Basic));
    let components = document.components.get_or_insert_with(Components::new);
    components.add_security_scheme("bearer", bearer);
    components.add_security_scheme("basic", basic);
    let allow = HeaderBuilder::new()
        .description(Some("the methods that it has"))
        .build();
    let method_not_allowed = problem("The path does not have this method.").header("allow", allow);
    for (name, response) in [
        (NO_SUCH_PATH, problem("There is nothing at this path.").build()),
        (METHOD_NOT_ALLOWED, method_not_allowed.build()),
    ] {
        components.responses.insert(name.to_owned(), RefOr::T(response));
    }
    let empty = || Vec::<String>::new();
    document.security = Some(vec![
        SecurityRequirement::new("bearer", empty()),
        SecurityRequirement::new("basic", empty()),
        // Where `auth.required` is false.
        SecurityRequirement::default(),
    ]);
    for item in document.paths.paths.values_mut() {
        let Some(post) = &mut item.post else { continue };
        if let Some(RefOr::T(taken)) = post.responses.responses.get("200") {
            let mut spooled = taken.clone();
            spooled.description = "by a collector: flushed to its disk, not in the log yet".to_owned();
            post.responses.responses.insert("202".to_owned(), RefOr::T(spooled));
        }
    }
    document.paths.add_path_operation(PATH, vec![HttpMethod::Get], itself());
    for (path, item) in &mut document.paths.paths {
        let operations = [&mut item.get, &mut item.post, &mut item.put];
        for operation in operations.into_iter().flatten() {
            let mut answers = |status: &str, name: &str| {
                let reference = RefOr::Ref(Ref::new(format!("#/components/responses/{name}")));
                operation.responses.responses.insert(status.to_owned(), reference);
            };
            answers("405", METHOD_NOT_ALLOWED);
            // With nothing in the place of its last part, a path is another one.
            if path.ends_with('}') {
                answers("404", NO_SUCH_PATH);
            }
        }
    }
    document
}

const NO_SUCH_PATH: &str = "NoSuchPath";
const METHOD_NOT_ALLOWED: &str = "MethodNotAllowed";

fn problem(description: &str) -> ResponseBuilder {
    let schema = Ref::from_schema_name("ProblemDocument");
    let content = ContentBuilder::new().schema(Some(schema)).build();
    ResponseBuilder::new()
        .description(description)
        .content("application/problem+json", content)
}

fn itself() -> Operation {
    let json = ContentBuilder::new().schema(Some(ObjectBuilder::new())).build();
    let response = ResponseBuilder::new()
        .description("this document")
        .content("application/json", json);
    OperationBuilder::new()
        .tag("operation")
        .summary(Some("This document."))
        .operation_id(Some("openapi"))
        .security(SecurityRequirement::default())
        .response("200", response)
        .build()
}

/// RFC 9457.
#[derive(Serialize, ToSchema)]
pub(super) struct ProblemDocument {
    /// `/problems/` and a slug to branch on, such as `conflict`.
    r#type: String,
    title: String,
    status: u16,
    /// What to do about it.
    detail: Option<String>,
    /// Of an event that breaks a rule: which of its fields.
    field: Option<String>,
    /// Of a batch that is to be sent again: what became of each event.
    results: Option<Vec<super::batch::Outcome>>,
}

/// Every way in can be refused in these ways.
#[derive(IntoResponses)]
#[expect(dead_code, reason = "only its shape is used")]
pub(super) enum Refusal {
    /// The request cannot be read or breaks a rule.
    #[response(status = 400, content_type = "application/problem+json")]
    BadRequest(ProblemDocument),
    /// There is no key, or one that is not known.
    #[response(status = 401, content_type = "application/problem+json")]
    Unauthorized(ProblemDocument),
    /// The key's role does not allow it.
    #[response(status = 403, content_type = "application/problem+json")]
    Forbidden(ProblemDocument),
    /// The body did not arrive in time.
    #[response(status = 408, content_type = "application/problem+json")]
    TooSlow(ProblemDocument),
    /// The same event came with another body before.
    #[response(status = 409, content_type = "application/problem+json")]
    Conflict(ProblemDocument),
    /// More bytes, before or after decompression, or more events than allowed.
    #[response(status = 413, content_type = "application/problem+json")]
    TooLarge(ProblemDocument),
    /// A content type or encoding that is not taken.
    #[response(status = 415, content_type = "application/problem+json")]
    UnsupportedMediaType(ProblemDocument),
    /// Too much at once; `Retry-After` says when to come again.
    #[response(status = 429, content_type = "application/problem+json")]
    TooMany(ProblemDocument),
    /// Something went wrong on this side.
    #[response(status = 500, content_type = "application/problem+json")]
    Internal(ProblemDocument),
    /// A dry run at a collector, which has no tables to join with, or a payload where there is no object store for it.
    #[response(status = 501, content_type = "application/problem+json")]
    NotImplemented(ProblemDocument),
    /// The log did not acknowledge, or is known to be away; `Retry-After` says when to come again.
    #[response(status = 503, content_type = "application/problem+json")]
    Unavailable(ProblemDocument),
    /// The tables may take no more disk; `Retry-After` says when to come again.
    #[response(status = 507, content_type = "application/problem+json")]
    Full(ProblemDocument),
}

/// What a feedback says: a boolean, a number, or a text of at most 64 KiB.
#[derive(Deserialize, ToSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "only its shape is used")]
pub(super) enum FeedbackValue {
    Bool(bool),
    Float(f64),
    Text(String),
}

/// Consecutive sampled tokens that one version sampled.
#[derive(Deserialize, ToSchema)]
#[expect(dead_code, reason = "only its shape is used")]
struct VersionSpan {
    version: i64,
    /// Root digest of that version, 64 hexadecimal digits.
    root: String,
    tokens: u32,
}

/// The leading prompt tokens shared with the parent generation, not repeated in `prompt_ids`.
#[derive(Deserialize, ToSchema)]
#[expect(dead_code, reason = "only its shape is used")]
struct Prefix {
    length: u32,
    /// BLAKE3 of the shared token ids as u32 little-endian, 64 hexadecimal digits.
    hash: String,
}

/// Bytes kept in the object store: `PUT /v1/payloads/{digest}`.
#[derive(Deserialize, ToSchema)]
#[expect(dead_code, reason = "only its shape is used")]
struct PayloadRef {
    /// BLAKE3, 64 hexadecimal digits.
    digest: String,
    size_bytes: u64,
    media_type: String,
}

#[derive(Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum Purpose {
    Production,
    Rollout,
    Evaluation,
}

#[derive(Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum FinishReason {
    Stop,
    Length,
    Abort,
}

/// One sampled completion.
#[derive(Deserialize, ToSchema)]
#[expect(dead_code, reason = "only its shape is used")]
pub(super) struct Generation {
    /// UUIDv7 of the moment of the first sampled token.
    generation_id: Uuid,
    /// A single completion is an episode of its own.
    episode_id: Uuid,
    #[serde(default)]
    segment: u32,
    #[serde(default)]
    turn: u32,
    parent_generation_id: Option<Uuid>,
    policy: String,
    line: String,
    /// In token order; together they cover `token_ids` exactly.
    versions: Vec<VersionSpan>,
    replica: String,
    purpose: Purpose,
    run_id: Option<Uuid>,
    task_id: Option<String>,
    group_id: Option<String>,
    surface: String,
    /// Opaque; never a name or an address.
    user_key: String,
    arm: String,
    /// (0, 1].
    arm_probability: f32,
    prompt_prefix: Option<Prefix>,
    prompt_ids: Vec<u32>,
    /// Sampled, the stop token included.
    token_ids: Vec<u32>,
    /// Nats, one per sampled token.
    logprobs: Vec<f32>,
    train_mask: Option<Vec<bool>>,
    /// Token ids between the shared prefix and `prompt_ids`; uploaded before.
    payload: Option<PayloadRef>,
    /// Expert ids per token and layer; uploaded before.
    experts: Option<PayloadRef>,
    temperature: f32,
    top_p: f32,
    seed: Option<u64>,
    finish_reason: FinishReason,
    #[serde(default)]
    declined: bool,
    shown: Option<bool>,
    /// False: logged, never trained on. Absent: true.
    #[serde(default)]
    consent: bool,
    #[serde(default)]
    decline_suppressed: bool,
    /// (0, 1).
    exploration_share: Option<f32>,
    /// What else shaped the distribution sampled from; absent: nothing.
    sampling: Option<Sampling>,
}

/// What shaped the distribution sampled from beside temperature and top-p. Fields that are absent change nothing.
#[derive(Deserialize, ToSchema)]
#[expect(dead_code, reason = "only its shape is used")]
struct Sampling {
    #[serde(default)]
    top_k: u32,
    /// [0, 1].
    #[serde(default)]
    min_p: f32,
    /// Above 0; absent: 1.
    #[serde(default)]
    repetition_penalty: f32,
    #[serde(default)]
    presence_penalty: f32,
    #[serde(default)]
    frequency_penalty: f32,
    /// By token id.
    #[serde(default)]
    logit_bias: BTreeMap<String, f32>,
    /// How many ids could be drawn, one per sampled token.
    kept: Option<Vec<u32>>,
}

/// A signal about a generation or an episode: exactly one of both.
#[derive(Deserialize, ToSchema)]
#[expect(dead_code, reason = "only its shape is used")]
pub(super) struct Feedback {
    /// UUIDv7.
    feedback_id: Uuid,
    generation_id: Option<Uuid>,
    episode_id: Option<Uuid>,
    metric_name: String,
    value: FeedbackValue,
    #[serde(default)]
    tags: BTreeMap<String, String>,
}

/// A generation, and what stands beside it.
#[derive(Deserialize, ToSchema)]
#[expect(dead_code, reason = "only its shape is used")]
pub(super) struct GenerationRequest {
    #[serde(flatten)]
    generation: Generation,
    /// When its last token was sampled; absent: now.
    #[serde(default, with = "time::serde::rfc3339::option")]
    time: Option<OffsetDateTime>,
    /// Who produced it; absent: `springtide/api`.
    source: Option<String>,
    /// Check and join, and write nothing; as the query parameter.
    #[serde(default)]
    dryrun: bool,
}

/// Takes a feedback back.
#[derive(Deserialize, ToSchema)]
#[expect(dead_code, reason = "only its shape is used")]
pub(super) struct Retraction {
    /// UUIDv7.
    retraction_id: Uuid,
    feedback_id: Uuid,
    #[serde(default)]
    reason: String,
}

/// Nothing more will come for this episode.
#[derive(Deserialize, ToSchema)]
#[expect(dead_code, reason = "only its shape is used")]
pub(super) struct EpisodeEnd {
    episode_id: Uuid,
}

/// An event without its tenant, which is the key's. Exactly one of its four bodies.
#[derive(Deserialize, ToSchema)]
#[expect(dead_code, reason = "only its shape is used")]
pub(super) struct CanonicalEvent {
    #[schema(min_length = 1, max_length = 256)]
    source: String,
    /// Unique within the source.
    #[schema(min_length = 1, max_length = 256)]
    id: String,
    #[serde(with = "time::serde::rfc3339")]
    time: OffsetDateTime,
    generation: Option<Generation>,
    feedback: Option<Feedback>,
    retraction: Option<Retraction>,
    episode_end: Option<EpisodeEnd>,
}

/// The data of a CloudEvent.
#[derive(Deserialize, ToSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "only its shape is used")]
pub(super) enum Data {
    Generation(Box<Generation>),
    Feedback(Feedback),
    Retraction(Retraction),
    EpisodeEnd(EpisodeEnd),
}

#[derive(Deserialize, ToSchema)]
pub(super) enum SpecVersion {
    #[serde(rename = "1.0")]
    One,
}

/// What kind of event its data is.
#[derive(Deserialize, ToSchema)]
pub(super) enum EventType {
    #[serde(rename = "springtide.generation.v1")]
    Generation,
    #[serde(rename = "springtide.feedback.v1")]
    Feedback,
    #[serde(rename = "springtide.retraction.v1")]
    Retraction,
    #[serde(rename = "springtide.episode_end.v1")]
    EpisodeEnd,
}

/// CloudEvents 1.0, JSON format; other attributes are ignored.
#[derive(Deserialize, ToSchema)]
#[expect(dead_code, reason = "only its shape is used")]
pub(super) struct CloudEvent {
    specversion: SpecVersion,
    r#type: EventType,
    #[schema(min_length = 1, max_length = 256)]
    source: String,
    /// Unique within the source.
    #[schema(min_length = 1, max_length = 256)]
    id: String,
    /// Absent: now.
    #[serde(default, with = "time::serde::rfc3339::option")]
    time: Option<OffsetDateTime>,
    /// `application/json`, if anything.
    datacontenttype: Option<String>,
    data: Data,
}

/// What `/v1/events` answers: the event, or a result for each event of a batch.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "only its shape is used")]
pub(super) enum AcceptedEvents {
    One(super::events::Accepted),
    Batch(super::batch::Outcomes),
}

/// `CreateScoreRequest` of Langfuse's public API; other fields are ignored.
#[derive(Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[expect(dead_code, reason = "only its shape is used")]
pub(super) struct LangfuseScore {
    id: Option<String>,
    /// The episode, where there is no `observationId`.
    trace_id: Option<String>,
    /// The generation.
    observation_id: Option<String>,
    name: String,
    /// A number for NUMERIC, 0 or 1 for BOOLEAN, a text for the others.
    value: LangfuseValue,
    /// Absent: as the value is.
    data_type: Option<LangfuseType>,
    comment: Option<String>,
    environment: Option<String>,
    config_id: Option<String>,
    queue_id: Option<String>,
    /// Scalars.
    #[schema(value_type = Option<Object>)]
    metadata: Option<Value>,
}

#[derive(Deserialize, ToSchema)]
#[serde(rename_all = "UPPERCASE")]
pub(super) enum LangfuseType {
    Numeric,
    Boolean,
    Categorical,
    Text,
}

#[derive(Deserialize, ToSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "only its shape is used")]
pub(super) enum LangfuseValue {
    Number(f64),
    Text(String),
}

#[cfg(test)]
mod tests;
