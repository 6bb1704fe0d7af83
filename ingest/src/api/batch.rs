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
use super::body::{self, FEEDBACK_BYTES_MAX, JsonText};
use super::dryrun::{self, Outlook};
use super::openapi::Refusal;
use super::query::Query;
use super::tally;
use crate::event::{self, Body, EpisodeEnd, Event, Feedback, Generation, Retraction};

/// An [`Event`] as JSON, without its tenant, which is the key's.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Item<G, F, R, E> {
    source: String,
    id: String,
    #[serde(with = "time::serde::rfc3339")]
    time: OffsetDateTime,
    generation: Option<G>,
    feedback: Option<F>,
    retraction: Option<R>,
    episode_end: Option<E>,
}

/// Read to its end.
type Whole = Item<Generation, Feedback, Retraction, EpisodeEnd>;
/// With its bodies as they were written.
type Cut<'a> = Item<&'a RawValue, &'a RawValue, &'a RawValue, &'a RawValue>;

impl Whole {
    /// No body may be longer than that of its kind. A text that could hold a longer one is read twice.
    fn read(text: &[u8]) -> Result<Self, Problem> {
        if text.len() <= FEEDBACK_BYTES_MAX {
            return body::read(text);
        }
        let cut: Cut<'_> = body::read(text)?;
        Ok(Self {
            source: cut.source,
            id: cut.id,
            time: cut.time,
            generation: cut
                .generation
                .map(|text| body::read(text.get().as_bytes()))
                .transpose()?,
            feedback: cut.feedback.map(short).transpose()?,
            retraction: cut.retraction.map(short).transpose()?,
            episode_end: cut.episode_end.map(short).transpose()?,
        })
    }

    fn into_event(self, tenant: &str) -> Result<Event, Problem> {
        let body = event::body(self.generation, self.feedback, self.retraction, self.episode_end);
        Ok(Event {
            tenant: tenant.to_owned(),
            source: self.source,
            id: self.id,
            time: event::to_microseconds(self.time),
            body: body.ok_or_else(|| Problem::bad_request(event::ONE_BODY))?,
        })
    }
}

fn short<'a, T: Deserialize<'a>>(text: &'a RawValue) -> Result<T, Problem> {
    body::read_feedback(text.get().as_bytes())
}

/// In one pass where all of them can be read; otherwise one by one, each by itself.
fn read_events(text: &[u8], count_max: usize, tenant: &str) -> Result<Vec<Result<Event, Problem>>, Problem> {
    if text.len() <= FEEDBACK_BYTES_MAX
        && let Ok(items) = body::read_items::<Whole>(text, count_max)
    {
        return Ok(items.into_iter().map(|item| item.into_event(tenant)).collect());
    }
    let items: Vec<&RawValue> = body::read_items(text, count_max)?;
    let events = items
        .iter()
        .map(|item| Whole::read(item.get().as_bytes())?.into_event(tenant));
    Ok(events.collect())
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
    let events = read_events(&text, api.events_max, &principal.tenant)?;
    take(&api, &principal, options, &text, events).await
}

/// Takes the events of `text`, a JSON array, in order, and answers for each.
pub(super) async fn take(
    api: &Api,
    principal: &Principal,
    options: dryrun::Options,
    text: &[u8],
    events: Vec<Result<Event, Problem>>,
) -> Result<Response, Problem> {
    let events: Vec<_> = events.into_iter().map(|event| allowed(principal, event?)).collect();
    let results: Vec<_> = if options.dryrun {
        let forecasts = api.forecast(events).await?.into_iter();
        forecasts
            .map(|result| result.map(|(event, outlook)| (event, Some(outlook))))
            .collect()
    } else {
        let results = api.accept(events).await.into_iter();
        results.map(|result| result.map(|event| (event, None))).collect()
    };
    // An event that was refused is gone; what it was called stands in the request.
    let items: Vec<&RawValue> = match results.iter().any(Result::is_err) {
        true => body::read_items(text, api.events_max)?,
        false => Vec::new(),
    };
    let (results, problems): (Vec<_>, Vec<_>) = results
        .into_iter()
        .enumerate()
        .map(|(index, result)| Outcome::new(result, items.get(index).copied()))
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
    fn new(result: Result<(Event, Option<Outlook>), Problem>, item: Option<&RawValue>) -> (Self, Option<Problem>) {
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
                let named: Option<Named> = item.and_then(|item| serde_json::from_str(item.get()).ok());
                let named = named.unwrap_or_default();
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

    /// Alone, as an item of a request that is read in one pass, and of one that is not.
    fn read(item: &Value) -> Result<Event, Problem> {
        let alone = Whole::read(item.to_string().as_bytes()).and_then(|item| item.into_event("acme"));
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

    #[test]
    fn a_feedback_longer_than_any_is_refused_and_a_generation_is_not() {
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
            Outcome::new(Err(Problem::bad_request("no")), Some(&item)).0
        };
        let named = outcome(r#"{"id": "7", "source": "app", "feedback": 5}"#);
        assert_eq!((named.status, named.id.as_deref()), (400, Some("7")));
        assert_eq!(named.problem.unwrap()["status"], 400);
        assert_eq!(outcome("[1]").id, None);
    }
}
