//! `POST /api/public/scores`: where Langfuse's clients post a score. Its base URL is this role's, its secret key an API key.

use axum::Json as Answer;
use axum::extract::State;
use edge::auth::{Principal, Role};
use edge::problem::Problem;
use serde::Serialize;
use utoipa::ToSchema;
use uuid::Uuid;

use super::Api;
use super::accept::invalid;
use super::body::{self, JsonText};
use super::dryrun::{self, Outlook};
use super::idempotency::{IdempotencyKey, Identity};
use super::openapi::{LangfuseScore, Refusal};
use super::query::Query;
use crate::dialect::langfuse::{Score, Signals};
use crate::event::{self, Event, Feedback, Invalid, Value};

const SOURCE: &str = "langfuse";

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AcceptedScore)]
pub(super) struct Accepted {
    /// The score's, if it had one; else the feedback's.
    id: String,
    /// Of a dry run only.
    #[serde(skip_serializing_if = "Option::is_none")]
    dryrun: Option<Outlook>,
}

/// A Langfuse score.
///
/// It becomes one feedback, and a second one for its comment. The same `id` (or `Idempotency-Key`) again is the same score;
/// with another content it is a conflict, where Langfuse would overwrite.
#[utoipa::path(
    post,
    path = "/api/public/scores",
    tag = "dialects",
    params(dryrun::Options, IdempotencyKey),
    request_body = LangfuseScore,
    responses((status = 200, description = "acknowledged by the log", body = Accepted), Refusal)
)]
pub(super) async fn scores(
    State(api): State<Api>,
    principal: Principal,
    Query(options): Query<dryrun::Options>,
    IdempotencyKey(key): IdempotencyKey,
    JsonText(text): JsonText,
) -> Result<Answer<Accepted>, Problem> {
    principal.require(&[Role::Serving, Role::Research])?;
    let score: Score = body::read_feedback(&text)?;
    let name = score.id.clone().or(key);
    let id = score.id.clone();
    let signals = Signals::try_from(score).map_err(|error| invalid(&error))?;
    let events = events(&signals, name.as_deref(), &principal.tenant).map_err(|error| invalid(&error))?;
    // Both or none: a score whose comment breaks a rule must not count under a 400.
    let now = event::now();
    for event in &events {
        let valid = event.check().and_then(|()| api.rules.check(event, now));
        valid.map_err(|error| invalid(&error))?;
    }
    let id = id
        .or_else(|| events.first().map(|event| event.id.clone()))
        .unwrap_or_default();
    let mut dryrun = None;
    if options.dryrun {
        for forecast in api.forecast(events.into_iter().map(Ok).collect()).await? {
            let (_, outlook) = forecast?;
            dryrun.get_or_insert(outlook);
        }
    } else {
        for accepted in api.accept(events.into_iter().map(Ok).collect()).await {
            accepted?;
        }
    }
    Ok(Answer(Accepted { id, dryrun }))
}

/// The score first, then its comment. `name`: the sender's, absent: new ones.
fn events(signals: &Signals, name: Option<&str>, tenant: &str) -> Result<Vec<Event>, Invalid> {
    let now = event::now();
    let make = |part: &str, metric_name: String, value: Value| {
        let identity = name.map(|name| Identity::new(tenant, SOURCE, &format!("{part}:{name}")));
        let id = match &identity {
            Some(identity) => identity.feedback_id(signals.target, None)?,
            None => Uuid::now_v7(),
        };
        let feedback = Feedback {
            id,
            target: signals.target,
            metric_name,
            value,
            tags: signals.tags.clone(),
        };
        let mut event = feedback.into_event(tenant, SOURCE, now);
        if let Some(identity) = identity {
            event.id = identity.event_id();
        }
        Ok(event)
    };
    let mut events = vec![make("score", signals.metric_name.clone(), signals.value.clone())?];
    if let Some(comment) = &signals.comment {
        events.push(make("comment", "comment".to_owned(), Value::Text(comment.clone()))?);
    }
    Ok(events)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{Body, Target};
    use std::collections::BTreeMap;

    fn signals() -> Signals {
        Signals {
            target: Target::Generation("019aa5e6-2f40-7abc-8def-0123456789ab".parse().unwrap()),
            metric_name: "accept".to_owned(),
            value: Value::Bool(true),
            tags: BTreeMap::from([("environment".to_owned(), "production".to_owned())]),
            comment: Some("because".to_owned()),
        }
    }

    #[test]
    fn a_score_with_a_comment_is_two_feedbacks_that_a_repetition_makes_again() {
        let first = events(&signals(), Some("score-1"), "default").unwrap();
        let again = events(&signals(), Some("score-1"), "default").unwrap();
        let identity = |event: &Event| (event.id.clone(), event.digest());
        assert_eq!(
            first.iter().map(identity).collect::<Vec<_>>(),
            again.iter().map(identity).collect::<Vec<_>>()
        );
        let bodies: Vec<_> = first
            .iter()
            .map(|event| match &event.body {
                Body::Feedback(feedback) => (&*feedback.metric_name, &feedback.value),
                _ => panic!("a feedback"),
            })
            .collect();
        assert_eq!(bodies[0], ("accept", &Value::Bool(true)));
        assert_eq!(bodies[1], ("comment", &Value::Text("because".to_owned())));
        assert_ne!(first[0].id, first[1].id);
        for event in &first {
            event.check().unwrap();
        }
    }

    #[test]
    fn a_score_without_a_name_is_new_each_time() {
        let [first, again] = [(); 2].map(|()| events(&signals(), None, "default").unwrap());
        assert_ne!(first[0].id, again[0].id);
        assert_ne!(first[0].id, first[1].id);
    }
}
