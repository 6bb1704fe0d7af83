//! `POST /v1/events:batch`: many canonical events, with a result for each.
//!
//! A 2xx means that nothing needs to be sent again. If the log did not acknowledge a single event,
//! the whole answer is a 503 (or 429). Sending everything again is harmless, because an identical
//! event is a no-op.
//!
//! The body is a bare array, as in the batch format of CloudEvents.

use axum::Json as Answer;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use edge::auth::{Principal, Scope};
use edge::problem::Problem;
use edge::query::Query;
use event_log::event::{self, Body, EpisodeEnd, Event, Feedback, FeedbackFields, Generation, Retraction};
use serde::Deserialize;
use serde_json::value::RawValue;
use time::OffsetDateTime;
use utoipa::ToSchema;

use super::answer::{Outcome, Outcomes, Refusal};
use super::body::{self, FEEDBACK_BYTES_MAX, JsonText};
use super::dryrun::Taken;
use super::{Api, dryrun, tally};

/// An event without its tenant, which comes from the API key. It has exactly one of the four
/// bodies.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = CanonicalEvent)]
struct Item {
    #[schema(min_length = 1, max_length = 256)]
    source: String,
    /// Unique within the source.
    #[schema(min_length = 1, max_length = 256)]
    id: String,
    #[serde(with = "time::serde::rfc3339")]
    time: OffsetDateTime,
    generation: Option<Generation>,
    #[schema(value_type = Option<FeedbackFields>)]
    feedback: Option<Feedback>,
    retraction: Option<Retraction>,
    episode_end: Option<EpisodeEnd>,
}

/// The bodies of an item whose length is limited.
#[derive(Deserialize)]
struct ShortBodies<'a> {
    #[serde(borrow)]
    feedback: Option<&'a RawValue>,
    #[serde(borrow)]
    retraction: Option<&'a RawValue>,
    #[serde(borrow)]
    episode_end: Option<&'a RawValue>,
}

impl Item {
    fn read(text: &[u8]) -> Result<Self, Problem> {
        if text.len() > FEEDBACK_BYTES_MAX {
            let bodies: ShortBodies<'_> = body::read(text)?;
            let bodies = [bodies.feedback, bodies.retraction, bodies.episode_end];
            bodies
                .into_iter()
                .flatten()
                .try_for_each(|body| body::check_short(body.get().len()))?;
        }
        body::read(text)
    }

    fn into_event(self, tenant: &str) -> Result<Event, Problem> {
        let body = event::one_body(self.generation, self.feedback, self.retraction, self.episode_end);
        Ok(Event {
            tenant: tenant.to_owned(),
            source: self.source,
            id: self.id,
            time: event::to_microseconds(self.time),
            teacher: None,
            body: body.map_err(Problem::bad_request)?,
        })
    }
}

/// Reads a short text in one pass if all events are readable, and otherwise each event by itself.
fn read_events(text: &[u8], count_max: usize, tenant: &str) -> Result<Vec<Result<Event, Problem>>, Problem> {
    if text.len() <= FEEDBACK_BYTES_MAX
        && let Ok(items) = body::read_items::<Item>(text, count_max)
    {
        return Ok(items.into_iter().map(|item| item.into_event(tenant)).collect());
    }
    let items: Vec<&RawValue> = body::read_items(text, count_max)?;
    let events = items
        .iter()
        .map(|item| Item::read(item.get().as_bytes())?.into_event(tenant));
    Ok(events.collect())
}

/// Send many events.
///
/// The body is a JSON array of canonical events without their tenants. A 2xx means that nothing
/// needs to be sent again. After a 429 or 503, send all of them again.
#[utoipa::path(
    post,
    path = "/v1/events:batch",
    tag = "events",
    security(("bearer" = ["feedback"]), ("bearer" = ["generations"]), ()),
    params(dryrun::Options),
    request_body = Vec<Item>,
    responses(
        (status = 200, description = "the log has acknowledged all events", body = Outcomes),
        (status = 207, description = "some events will never be accepted, the others are acknowledged", body = Outcomes),
        Refusal
    )
)]
pub(super) async fn batch(
    State(api): State<Api>,
    principal: Principal,
    Query(options): Query<dryrun::Options>,
    JsonText(text): JsonText,
) -> Result<Response, Problem> {
    let events = read_events(&text, api.events_max, &principal.tenant)?;
    take(&api, &principal, options, &text, events).await
}

/// Takes the events of the JSON array `text`, in order, and returns a result for each.
pub(super) async fn take(
    api: &Api,
    principal: &Principal,
    options: dryrun::Options,
    text: &[u8],
    events: Vec<Result<Event, Problem>>,
) -> Result<Response, Problem> {
    let events = events.into_iter().map(|event| allowed(principal, event?));
    let results = api.take(events.collect(), options.dryrun).await?;
    // Refused events have been dropped; their names are in the request.
    let items: Vec<&RawValue> = match results.iter().any(Result::is_err) {
        true => body::read_items(text, api.events_max)?,
        false => Vec::new(),
    };
    let mut problems = Vec::new();
    let outcomes = results
        .into_iter()
        .enumerate()
        .map(|(index, result)| outcome(result, items.get(index).copied(), &mut problems));
    let outcomes = Outcomes {
        results: outcomes.collect(),
    };
    problems.iter().for_each(tally::refused);
    let mut response = answer(outcomes, &problems);
    // Keeps the middleware from counting the events again.
    response.extensions_mut().remove::<Problem>();
    Ok(response)
}

/// Checks the scopes of the caller's key, as the endpoints for single events do, and notes whether it may teach.
pub(super) fn allowed(principal: &Principal, mut event: Event) -> Result<Event, Problem> {
    match event.body {
        Body::Generation(_) => principal.require(Scope::Generations)?,
        Body::Feedback(_) | Body::Retraction(_) | Body::EpisodeEnd(_) => {
            principal.require(Scope::Feedback)?;
            principal.require_trusted()?;
            if matches!(event.body, Body::Feedback(_)) {
                event.teacher = principal.teacher();
            }
        }
    }
    Ok(event)
}

/// The members that name an unreadable event.
#[derive(Debug, Default, Deserialize)]
struct Named {
    source: Option<String>,
    id: Option<String>,
}

fn outcome(result: Taken, item: Option<&RawValue>, problems: &mut Vec<Problem>) -> Outcome {
    match result {
        Ok((event, dryrun)) => Outcome {
            status: 200,
            source: Some(event.source),
            id: Some(event.id),
            problem: None,
            dryrun,
        },
        Err(problem) => {
            let named: Option<Named> = item.and_then(|item| serde_json::from_str(item.get()).ok());
            let named = named.unwrap_or_default();
            let outcome = Outcome {
                status: problem.status.as_u16(),
                source: named.source,
                id: named.id,
                problem: Some(problem.document()),
                dryrun: None,
            };
            problems.push(problem);
            outcome
        }
    }
}

/// 200 if all events were accepted. 503 or 429 if some must be sent again. 207 if the others will
/// never be accepted.
fn answer(outcomes: Outcomes, problems: &[Problem]) -> Response {
    if problems.is_empty() {
        return Answer(outcomes).into_response();
    }
    let of = |status| problems.iter().find(|problem| problem.status == status);
    let retryable = of(StatusCode::SERVICE_UNAVAILABLE).or_else(|| of(StatusCode::TOO_MANY_REQUESTS));
    let retryable = retryable.or_else(|| problems.iter().find(|problem| problem.status.is_server_error()));
    match retryable {
        Some(problem) => {
            let results = serde_json::to_value(outcomes.results).unwrap_or_default();
            let detail = "not every event was acknowledged; send all of them again";
            problem.clone().detail(detail).with("results", results).into_response()
        }
        None => (StatusCode::MULTI_STATUS, Answer(outcomes)).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    /// Reads the item alone, in a request that is read in one pass, and in one that is not.
    fn read(item: &Value) -> Result<Event, Problem> {
        let alone = Item::read(item.to_string().as_bytes()).and_then(|item| item.into_event("acme"));
        for beside in [vec![], vec![json!(5)], vec![json!(" ".repeat(FEEDBACK_BYTES_MAX))]] {
            let request = Value::from_iter([vec![item.clone()], beside].concat()).to_string();
            let events = read_events(request.as_bytes(), 3, "acme").unwrap();
            assert_eq!(events[0].as_ref().ok(), alone.as_ref().ok());
        }
        alone
    }

    fn item() -> Value {
        json!({
            "source": "app", "id": "1", "time": "2026-11-21T10:00:00.123456789Z",
            "feedback": {
                "feedback_id": "019aa5e6-2f40-7abc-8def-0123456789ab",
                "generation_id": "019aa5e6-2f40-7abc-8def-0123456789ac",
                "metric_name": "accept", "value": true,
            },
        })
    }

    #[test]
    fn an_item_becomes_a_canonical_event_of_the_keys_tenant() {
        let event = read(&item()).unwrap();
        let mut canonical = item();
        canonical["tenant"] = "acme".into();
        assert_eq!(event, Event::decode_json(canonical.to_string().as_bytes()).unwrap());
        assert_eq!(event.time.nanosecond(), 123_456_000);
    }

    #[test]
    fn an_item_with_a_tenant_or_without_exactly_one_body_is_refused() {
        let mut with_tenant = item();
        with_tenant["tenant"] = "other".into();
        assert!(read(&with_tenant).unwrap_err().detail.unwrap().contains("tenant"));
        let mut both = item();
        both["generation"] = json!({});
        assert!(read(&both).is_err());
        let mut none = item();
        none.as_object_mut().unwrap().remove("feedback");
        assert!(read(&none).unwrap_err().detail.unwrap().contains("exactly one"));
    }

    #[test]
    fn feedback_has_a_length_limit_and_a_generation_has_not() {
        let mut long = item();
        long["feedback"]["tags"] = json!({"long": "x".repeat(FEEDBACK_BYTES_MAX)});
        assert_eq!(read(&long).unwrap_err().status, 413);
        let text = json!({"source": "app", "id": "1", "time": "2026-11-21T10:00:00Z", "generation": {
            "generation_id": "019aa5e6-2f40-7abc-8def-0123456789ac", "episode_id": "019aa5e6-2f40-7abc-8def-0123456789ac",
            "policy": "p", "line": "l", "versions": [], "replica": "r", "purpose": "production", "surface": "s",
            "user_key": "u", "arm": "a", "arm_probability": 1, "prompt_ids": vec![100_000; FEEDBACK_BYTES_MAX / 6],
            "token_ids": [], "logprobs": [], "temperature": 1, "top_p": 1, "finish_reason": "stop",
        }});
        assert!(text.to_string().len() > FEEDBACK_BYTES_MAX);
        read(&text).unwrap();
    }

    fn status_of(problems: &[Problem]) -> StatusCode {
        answer(Outcomes { results: Vec::new() }, problems).status()
    }

    #[test]
    fn a_2xx_means_that_nothing_needs_to_be_sent_again() {
        let invalid = || Problem::bad_request("never");
        let unavailable = || Problem::unavailable("later", 3);
        assert_eq!(status_of(&[]), 200);
        assert_eq!(status_of(&[invalid(), Problem::conflict("never")]), 207);
        assert_eq!(status_of(&[invalid(), unavailable()]), 503);
        assert_eq!(status_of(&[Problem::too_many("later", 1), unavailable()]), 503);
        assert_eq!(status_of(&[Problem::too_many("later", 1), invalid()]), 429);
        assert_eq!(status_of(&[Problem::internal("ours")]), 500);
        let response = answer(Outcomes { results: Vec::new() }, &[unavailable()]);
        assert_eq!(response.headers()["retry-after"], "3");
    }

    #[test]
    fn the_outcome_of_an_unreadable_item_names_it_where_possible() {
        let outcome = |text: &str| {
            let item = RawValue::from_string(text.to_owned()).unwrap();
            super::outcome(Err(Problem::bad_request("no")), Some(&item), &mut Vec::new())
        };
        let named = outcome(r#"{"id": "7", "source": "app", "feedback": 5}"#);
        assert_eq!((named.status, named.id.as_deref()), (400, Some("7")));
        assert_eq!(named.problem.unwrap()["status"], 400);
        assert_eq!(outcome("[1]").id, None);
    }
}
