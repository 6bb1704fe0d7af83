//! `POST /v1/events:batch`: many canonical events, an answer for each. A 2xx means that nothing needs to be sent again: a
//! single event that the log did not acknowledge makes the whole answer a 503 (or 429), and since the same event again is
//! the same event, sending everything again is harmless.
//!
//! The body is a bare array and not an object around one, as in the batch format of CloudEvents: a client of one needs to
//! change nothing but the media type and the items.

use axum::Json as Answer;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use edge::auth::{Principal, Role};
use edge::problem::{Kind, Problem};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;
use time::OffsetDateTime;
use utoipa::ToSchema;

use super::Api;
use super::body::{self, JsonText};
use super::dryrun::{self, Outlook};
use super::openapi::Refusal;
use super::query::Query;
use super::tally;
use crate::event::{self, Body, Event};

/// An [`Event`] as JSON, without its tenant, which is the key's.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Item<'a> {
    source: String,
    id: String,
    #[serde(with = "time::serde::rfc3339")]
    time: OffsetDateTime,
    #[serde(borrow)]
    generation: Option<&'a RawValue>,
    #[serde(borrow)]
    feedback: Option<&'a RawValue>,
    #[serde(borrow)]
    retraction: Option<&'a RawValue>,
    #[serde(borrow)]
    episode_end: Option<&'a RawValue>,
}

impl Item<'_> {
    fn into_event(self, tenant: &str) -> Result<Event, Problem> {
        let body = match (self.generation, self.feedback, self.retraction, self.episode_end) {
            (Some(generation), None, None, None) => Body::Generation(body::read(generation.get().as_bytes())?),
            (None, Some(feedback), None, None) => Body::Feedback(body::read_feedback(feedback.get().as_bytes())?),
            (None, None, Some(retraction), None) => Body::Retraction(body::read_feedback(retraction.get().as_bytes())?),
            (None, None, None, Some(end)) => Body::EpisodeEnd(body::read_feedback(end.get().as_bytes())?),
            _ => {
                return Err(Problem::bad_request(
                    "exactly one of generation, feedback, retraction and episode_end is needed",
                ));
            }
        };
        Ok(Event {
            tenant: tenant.to_owned(),
            source: self.source,
            id: self.id,
            time: event::to_microseconds(self.time),
            body,
        })
    }
}

/// What became of one event.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Outcome {
    /// As if it had been sent alone: 200, or the problem's.
    status: u16,
    /// The event's; absent where it could not be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    source: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<super::openapi::ProblemDocument>, no_recursion)]
    problem: Option<Value>,
    /// Of a dry run only.
    #[serde(skip_serializing_if = "Option::is_none")]
    dryrun: Option<Outlook>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Outcomes {
    /// In the order of the request.
    results: Vec<Outcome>,
}

/// Many events.
///
/// A JSON array of canonical events, each without its tenant. A 2xx means that nothing needs to be sent again; after a 429 or
/// 503 send all of them again.
#[utoipa::path(
    post,
    path = "/v1/events:batch",
    tag = "events",
    params(dryrun::Options),
    request_body = Vec<super::openapi::CanonicalEvent>,
    responses(
        (status = 200, description = "all events are acknowledged by the log", body = Outcomes),
        (status = 207, description = "what failed will never be accepted, the rest is", body = Outcomes),
        Refusal
    )
)]
pub(super) async fn batch(
    State(api): State<Api>,
    principal: Principal,
    Query(options): Query<dryrun::Options>,
    JsonText(text): JsonText,
) -> Result<Response, Problem> {
    let items = body::read_items(&text, api.events_max)?;
    let tenant = &principal.tenant;
    let events = items
        .iter()
        .map(|item| body::read::<Item<'_>>(item.get().as_bytes())?.into_event(tenant));
    take(&api, &principal, options, &items, events).await
}

/// Takes the events of `items`, in order, and answers for each.
pub(super) async fn take(
    api: &Api,
    principal: &Principal,
    options: dryrun::Options,
    items: &[&RawValue],
    events: impl Iterator<Item = Result<Event, Problem>>,
) -> Result<Response, Problem> {
    let events: Vec<_> = events.map(|event| allowed(principal, event?)).collect();
    let results: Vec<_> = if options.dryrun {
        let forecasts = api.forecast(events).await?.into_iter();
        forecasts
            .map(|result| result.map(|(event, outlook)| (event, Some(outlook))))
            .collect()
    } else {
        let results = api.accept(events).await.into_iter();
        results.map(|result| result.map(|event| (event, None))).collect()
    };
    let (results, problems): (Vec<_>, Vec<_>) = results
        .into_iter()
        .zip(items)
        .map(|(result, item)| Outcome::new(result, item))
        .unzip();
    let problems: Vec<_> = problems.into_iter().flatten().collect();
    problems.iter().for_each(tally::refused);
    let mut response = answer(Outcomes { results }, &problems);
    // Its events are counted already.
    response.extensions_mut().remove::<Kind>();
    Ok(response)
}

/// Who may send what, as at the endpoints of single events.
pub(super) fn allowed(principal: &Principal, event: Event) -> Result<Event, Problem> {
    let roles: &[Role] = match event.body {
        Body::Generation(_) => &[Role::Serving],
        Body::Feedback(_) | Body::Retraction(_) | Body::EpisodeEnd(_) => &[Role::Serving, Role::Research],
    };
    principal.require(roles)?;
    Ok(event)
}

impl Outcome {
    fn new(result: Result<(Event, Option<Outlook>), Problem>, item: &RawValue) -> (Self, Option<Problem>) {
        match result {
            Ok((event, dryrun)) => {
                let outcome = Self {
                    status: 200,
                    source: Some(event.source),
                    id: Some(event.id),
                    problem: None,
                    dryrun,
                };
                (outcome, None)
            }
            Err(problem) => {
                let named: Named = serde_json::from_str(item.get()).unwrap_or_default();
                let outcome = Self {
                    status: problem.status.as_u16(),
                    source: named.source,
                    id: named.id,
                    problem: Some(problem.document()),
                    dryrun: None,
                };
                (outcome, Some(problem))
            }
        }
    }
}

/// What can be told of an item that is no event.
#[derive(Debug, Default, Deserialize)]
struct Named {
    source: Option<String>,
    id: Option<String>,
}

/// 200: all accepted. 503 or 429: something is to be sent again, later. 207: the rest was accepted, and what was not never
/// will be.
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
            let whole = problem
                .clone()
                .detail("not every event was acknowledged; send all of them again");
            whole.with("results", results).into_response()
        }
        None => (StatusCode::MULTI_STATUS, Answer(outcomes)).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(item: &Value) -> Result<Event, Problem> {
        let text = item.to_string();
        body::read::<Item<'_>>(text.as_bytes())?.into_event("acme")
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
    fn an_item_is_the_canonical_event_of_the_keys_tenant() {
        let event = read(&item()).unwrap();
        let mut canonical = item();
        canonical["tenant"] = "acme".into();
        assert_eq!(event, Event::decode_json(canonical.to_string().as_bytes()).unwrap());
        assert_eq!(event.time.nanosecond(), 123_456_000);
    }

    #[test]
    fn an_item_that_names_a_tenant_or_two_bodies_or_none_is_refused() {
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

    fn status_of(problems: &[Problem]) -> StatusCode {
        answer(Outcomes { results: Vec::new() }, problems).status()
    }

    #[test]
    fn a_2xx_means_that_nothing_needs_to_be_sent_again() {
        let invalid = || Problem::bad_request("never");
        let away = || Problem::unavailable("later", 3);
        assert_eq!(status_of(&[]), 200);
        assert_eq!(status_of(&[invalid(), Problem::conflict("never")]), 207);
        assert_eq!(status_of(&[invalid(), away()]), 503);
        assert_eq!(status_of(&[Problem::too_many("later", 1), away()]), 503);
        assert_eq!(status_of(&[Problem::too_many("later", 1), invalid()]), 429);
        assert_eq!(status_of(&[Problem::internal("ours")]), 500);
        let response = answer(Outcomes { results: Vec::new() }, &[away()]);
        assert_eq!(response.headers()["retry-after"], "3");
    }

    #[test]
    fn a_failed_item_says_which_it_was_as_far_as_it_can_be_read() {
        let outcome = |text: &str| {
            let item = RawValue::from_string(text.to_owned()).unwrap();
            Outcome::new(Err(Problem::bad_request("no")), &item).0
        };
        let named = outcome(r#"{"id": "7", "source": "app", "feedback": 5}"#);
        assert_eq!((named.status, named.id.as_deref()), (400, Some("7")));
        assert_eq!(named.problem.unwrap()["status"], 400);
        assert_eq!(outcome("[1]").id, None);
    }
}
