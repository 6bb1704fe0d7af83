//! `POST /v1/feedback`: one feedback event.

use std::collections::BTreeMap;

use axum::Json as Answer;
use axum::extract::State;
use edge::auth::{Principal, Scope};
use edge::problem::Problem;
use edge::query::Query;
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use utoipa::ToSchema;
use uuid::Uuid;

use super::answer::{Preview, Refusal, invalid};
use super::body::{self, JsonText};
use super::dryrun;
use super::idempotency::{IdempotencyKey, Identity, Untrusted};
use super::{Api, SOURCE};
// utoipa treats any type named `Value` as arbitrary JSON.
use event_log::event::Value as FeedbackValue;
use event_log::event::{self, Event, Feedback};
use event_log::feedback_token::FeedbackToken;

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = FeedbackRequest)]
pub(super) struct Request {
    /// UUIDv7. Resending the same id and body is a no-op. Absent: derived from the Idempotency-Key,
    /// or new. With a key that may only give feedback, the stored id is derived from it; the answer
    /// has it.
    id: Option<Uuid>,
    /// The completion's `feedback_token`. Keys that may only give feedback need it. A collector does
    /// not verify its signature.
    #[schema(max_length = 256)]
    token: Option<String>,
    /// The target: either this or `episode_id`. Absent with a token: its generation.
    generation_id: Option<Uuid>,
    episode_id: Option<Uuid>,
    #[schema(max_length = 256)]
    metric_name: String,
    value: FeedbackValue,
    #[serde(default)]
    tags: BTreeMap<String, String>,
    /// When the feedback was given. Absent: now. With a key that may only give feedback: always now.
    #[serde(default, with = "time::serde::rfc3339::option")]
    time: Option<OffsetDateTime>,
    /// The producer. Absent: `springtide/api`.
    source: Option<String>,
    /// Check and join without writing anything, like the query parameter.
    #[serde(default)]
    dryrun: bool,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AcceptedFeedback)]
pub(super) struct Accepted {
    feedback_id: Uuid,
    /// In dry runs only.
    #[serde(skip_serializing_if = "Option::is_none")]
    dryrun: Option<Preview>,
}

/// Send a feedback event.
///
/// The same id, or the same `Idempotency-Key`, with the same body is the same event. With another
/// body it is a conflict.
#[utoipa::path(
    post,
    path = "/v1/feedback",
    tag = "events",
    security(("bearer" = ["feedback"]), ()),
    params(
        dryrun::Options,
        (
            "Idempotency-Key" = Option<String>,
            Header,
            description = "identifies the request if its body has no id; printable ASCII",
            min_length = 1,
            max_length = 255
        )
    ),
    request_body = Request,
    responses((status = 200, description = "acknowledged by the log", body = Accepted), Refusal)
)]
pub(super) async fn feedback(
    State(api): State<Api>,
    principal: Principal,
    Query(options): Query<dryrun::Options>,
    IdempotencyKey(key): IdempotencyKey,
    JsonText(text): JsonText,
) -> Result<Answer<Accepted>, Problem> {
    principal.require(Scope::Feedback)?;
    let mut request: Request = body::read_short(&text)?;
    let untrusted = api.check_token(&mut request, &principal).await?;
    let dryrun = options.dryrun || request.dryrun;
    let (mut event, feedback_id) = event(request, key.as_deref(), untrusted, &principal.tenant, api.now())?;
    event.teacher = principal.teacher();
    let (_, dryrun) = api.take_one(event, dryrun).await?;
    Ok(Answer(Accepted { feedback_id, dryrun }))
}

impl Api {
    /// Verifies the token, and that the feedback is about its generation or episode. Fills in a
    /// missing target. Returns the caller if it needs a token.
    async fn check_token(&self, request: &mut Request, principal: &Principal) -> Result<Option<Untrusted>, Problem> {
        let Some(token) = &request.token else {
            return match principal.needs_feedback_token() {
                true => Err(Problem::forbidden(
                    "this key may only give feedback with a token: send the completion's `feedback_token` as `token`",
                )),
                false => Ok(None),
            };
        };
        let token = FeedbackToken::read(token).map_err(|error| invalid(&error))?;
        if let Some(tokens) = &self.tokens {
            tokens.verify(&token, &principal.tenant).await?;
        }
        if (request.generation_id, request.episode_id) == (None, None) {
            request.generation_id = Some(token.generation);
        }
        let target = event::one_target(request.generation_id, request.episode_id).map_err(Problem::bad_request)?;
        if !token.covers(target) {
            return Err(Problem::forbidden("the token is of another generation and episode"));
        }
        Ok(principal.needs_feedback_token().then(|| Untrusted {
            lineage: principal.key.map(|key| key.lineage).unwrap_or_default(),
            generation: token.generation,
        }))
    }
}

/// The feedback event and the id of its feedback. `untrusted`: the caller, if it needs a token.
fn event(
    mut request: Request,
    key: Option<&str>,
    untrusted: Option<Untrusted>,
    tenant: &str,
    now: OffsetDateTime,
) -> Result<(Event, Uuid), Problem> {
    let target = event::one_target(request.generation_id, request.episode_id).map_err(Problem::bad_request)?;
    if untrusted.is_some() {
        // A client that backdates itself would come before what the back end says.
        request.time = None;
    }
    let source = request.source.unwrap_or_else(|| SOURCE.to_owned());
    // An id in the body takes precedence over the key.
    let identity = match (untrusted, request.id, key) {
        (Some(caller), Some(id), _) => Some(Identity::untrusted(&caller, tenant, &source, &id.to_string())),
        (Some(caller), None, Some(key)) => Some(Identity::untrusted(&caller, tenant, &source, key)),
        (None, None, Some(key)) => Some(Identity::new(tenant, &source, key)),
        (None, Some(_), _) | (_, None, None) => None,
    };
    let id = match &identity {
        Some(identity) => {
            let time = request.time.or_else(|| request.id.and_then(event::time_of));
            identity.feedback_id(target, time).map_err(|error| invalid(&error))?
        }
        None => request.id.unwrap_or_else(Uuid::now_v7),
    };
    let feedback = Feedback {
        id,
        target,
        metric_name: request.metric_name,
        value: request.value,
        tags: request.tags,
    };
    let time = request.time.unwrap_or(now);
    let mut event = feedback.into_event(tenant, source, time);
    if let Some(identity) = identity {
        event.id = identity.event_id();
    }
    Ok((event, id))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value as Json, json};

    fn body() -> Json {
        json!({
            "generation_id": "019aa5e6-2f40-7abc-8def-0123456789ab",
            "metric_name": "accept", "value": true,
        })
    }

    fn read(body: &Json, key: Option<&str>) -> (Event, Uuid) {
        let request = body::read(body.to_string().as_bytes()).unwrap();
        event(request, key, None, "default", event::now()).unwrap()
    }

    #[test]
    fn with_a_key_a_repetition_is_the_same_event_and_another_body_a_conflict() {
        let (first, id) = read(&body(), Some("key"));
        first.check().unwrap();
        let (again, same) = read(&body(), Some("key"));
        assert_eq!(
            (first.id.clone(), first.digest(), id),
            (again.id.clone(), again.digest(), same)
        );
        for (field, value) in [
            ("value", json!(false)),
            ("generation_id", json!("019aa5e6-2f41-7abc-8def-0123456789ab")),
            ("metric_name", json!("reject")),
        ] {
            let mut other = body();
            other[field] = value;
            let (other, _) = read(&other, Some("key"));
            assert_eq!(other.id, first.id);
            assert_ne!(other.digest(), first.digest(), "{field}");
        }
        let (other, _) = read(&body(), Some("another key"));
        assert_ne!(other.id, first.id);
    }

    #[test]
    fn a_caller_that_needs_a_token_repeats_its_event_and_takes_nobody_elses_identity() {
        let caller = |generation| Untrusted {
            lineage: Uuid::from_u128(1),
            generation: Uuid::from_u128(generation),
        };
        let mut named = body();
        named["id"] = json!("019aa5e6-2f42-7abc-8def-0123456789ab");
        named["source"] = json!("shop");
        let mut of_episode = named.clone();
        of_episode["generation_id"] = Json::Null;
        of_episode["episode_id"] = json!(Uuid::from_u128(7));
        for (body, key) in [(body(), Some("key")), (named, None), (of_episode, None)] {
            let read = |caller| {
                let request = super::body::read(body.to_string().as_bytes()).unwrap();
                event(request, key, caller, "default", event::now()).unwrap()
            };
            let ((first, id), (again, same)) = (read(Some(caller(1))), read(Some(caller(1))));
            first.check().unwrap();
            assert_eq!((&first.id, id), (&again.id, same));
            for (other, other_id) in [read(Some(caller(2))), read(None)] {
                assert!(other.id != first.id && other_id != id, "{body}");
            }
        }
    }

    #[test]
    fn a_caller_that_needs_a_token_does_not_date_its_feedback() {
        let mut old = body();
        old["time"] = json!("2020-01-01T00:00:00Z");
        let now = event::now();
        let read = |untrusted| {
            let request = super::body::read(old.to_string().as_bytes()).unwrap();
            event(request, None, untrusted, "default", now).unwrap().0.time
        };
        let untrusted = Untrusted {
            lineage: Uuid::from_u128(1),
            generation: Uuid::from_u128(2),
        };
        assert_eq!(read(Some(untrusted)), now);
        assert!(read(None) < now, "a back end does");
    }

    #[test]
    fn an_id_in_the_body_overrides_the_key_and_without_either_every_event_is_new() {
        let mut named = body();
        named["id"] = json!("019aa5e6-2f42-7abc-8def-0123456789ab");
        let (event, id) = read(&named, Some("key"));
        assert_eq!(event.id, id.to_string());
        assert_eq!(json!(id), named["id"]);
        assert_ne!(read(&body(), None).1, read(&body(), None).1);
    }
}
