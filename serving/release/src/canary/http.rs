//! The API of canaries: proposals, what is known of them, and decisions of people. The caller's key goes
//! into the audit.

use super::evidence::{self, Evidence};
use super::machine::{Event, Refused, State as CanaryState};
use super::strategy::Strategy;
use super::tables::{self, Canary, Transition};
use super::{Decision, apply, check};
use crate::decide::ReleaseState;
use crate::http::{check_loadable, no_version};
use crate::{CHAMPION, ReleaseService, judgment};
use axum::extract::State;
use axum::http::StatusCode;
use edge::Problem;
use edge::audit;
use edge::auth::oidc::is_same_person;
use edge::auth::{Principal, Scope};
use edge::database::{page_limit, unavailable};
use edge::json::Json;
use edge::path::Path;
use edge::query::Query;
use edge::routes::{Routes, get, post};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

const PAGE_MAX: i64 = 200;
/// Canaries that wait for the one before them.
const PROPOSED_MAX: usize = 20;

pub fn routes() -> Routes<ReleaseService> {
    Routes::new()
        .route(
            Scope::Release,
            "/v1/canaries",
            "Propose a version to be tried on some of champion's users",
            post(propose),
        )
        .route(
            Scope::Read,
            "/v1/canaries",
            "List canaries, the newest first",
            get(list),
        )
        .route(
            Scope::Read,
            "/v1/canaries/{id}",
            "A canary and what was decided about it",
            get(one),
        )
        .route(
            Scope::Read,
            "/v1/canaries/{id}/evidence",
            "What users did with a canary's answers and with champion's",
            get(read_evidence),
        )
        .route(
            Scope::Release,
            "/v1/canaries/{id}/{decision}",
            "approve, hold, resume, promote, abort or rollback a canary",
            post(decide),
        )
}

/// The body of `POST /v1/canaries`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Proposal {
    /// Serial of the version to try.
    version: i64,
    /// For the audit.
    #[serde(default)]
    reason: String,
    /// Default: `[release.canary]` of the configuration.
    strategy: Option<Strategy>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Why {
    /// For the audit.
    #[serde(default)]
    reason: String,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct CanaryView {
    pub id: Uuid,
    pub version: i64,
    /// The version of `champion` that it is compared with. Null: it is not compared yet.
    pub control: Option<i64>,
    pub state: CanaryState,
    /// Of `strategy.steps`.
    pub step: usize,
    #[serde(with = "time::serde::rfc3339")]
    pub step_since: OffsetDateTime,
    /// Of `champion`'s users, 0 to 1.
    pub share: f64,
    /// The clusters whose users it takes. Null: all.
    pub clusters: Option<Vec<String>>,
    pub strategy: Strategy,
    pub actor: String,
    pub reason: String,
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
}

impl From<Canary> for CanaryView {
    fn from(canary: Canary) -> Self {
        CanaryView {
            share: canary.share(),
            clusters: canary.clusters(),
            id: canary.id,
            version: canary.version,
            control: canary.control,
            state: canary.state,
            step: canary.step,
            step_since: canary.step_since,
            strategy: canary.strategy,
            actor: canary.actor,
            reason: canary.reason,
            created_at: canary.created_at,
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
pub struct Canaries {
    pub canaries: Vec<CanaryView>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct FullCanary {
    #[serde(flatten)]
    pub canary: CanaryView,
    /// The latest first.
    pub transitions: Vec<TransitionView>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct TransitionView {
    pub event: String,
    pub from_state: String,
    pub to_state: String,
    pub step: i32,
    /// The assignment that it led to. Null: none.
    pub epoch: Option<i64>,
    pub share: f64,
    /// The key's label; `release`: the release loop.
    pub actor: String,
    pub reason: String,
    /// What the release loop decided on. Null: a person decided, or there were no users yet.
    pub evidence: Option<Value>,
    #[serde(with = "time::serde::rfc3339")]
    pub at: OffsetDateTime,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ListQuery {
    limit: Option<i64>,
}

async fn list(
    State(service): State<ReleaseService>,
    Query(query): Query<ListQuery>,
) -> Result<Json<Canaries>, Problem> {
    let limit = page_limit(query.limit, 20, PAGE_MAX)?;
    let mut connection = service.0.pool.acquire().await.map_err(unavailable)?;
    let canaries = tables::latest(&mut connection, &service.0.policy, limit)
        .await
        .map_err(unavailable)?;
    Ok(Json(Canaries {
        canaries: canaries.into_iter().map(CanaryView::from).collect(),
    }))
}

async fn one(State(service): State<ReleaseService>, Path(id): Path<Uuid>) -> Result<Json<FullCanary>, Problem> {
    let mut connection = service.0.pool.acquire().await.map_err(unavailable)?;
    Ok(Json(full(&mut connection, &service, id).await?))
}

async fn full(connection: &mut PgConnection, service: &ReleaseService, id: Uuid) -> Result<FullCanary, Problem> {
    let canary = find(connection, service, id).await?;
    let transitions = sqlx::query_as!(
        TransitionView,
        "select event, from_state, to_state, step, epoch, share, actor, reason, evidence, at
         from canary_transition where canary_id = $1 order by id desc limit 200",
        id
    )
    .fetch_all(connection)
    .await
    .map_err(unavailable)?;
    Ok(FullCanary {
        canary: canary.into(),
        transitions,
    })
}

async fn find(connection: &mut PgConnection, service: &ReleaseService, id: Uuid) -> Result<Canary, Problem> {
    let found = tables::one(connection, &service.0.policy, id)
        .await
        .map_err(unavailable)?;
    found.ok_or_else(|| Problem::not_found(format!("there is no canary {id}; GET /v1/canaries lists them")))
}

async fn read_evidence(State(service): State<ReleaseService>, Path(id): Path<Uuid>) -> Result<Json<Evidence>, Problem> {
    let mut connection = service.0.pool.acquire().await.map_err(unavailable)?;
    let canary = find(&mut connection, &service, id).await?;
    let (periods, _) = tables::periods(&mut connection, canary.id).await.map_err(unavailable)?;
    if periods.is_empty() && canary.shadow().is_none() {
        return Err(Problem::conflict(format!(
            "the canary is {}, and no user had it: what its decisions were made on is in GET /v1/canaries/{id}",
            canary.state.name()
        )));
    }
    // It begins transactions on a connection of the pool, so it is not dropped with the request.
    let read = async move { evidence::read(&mut connection, &service.0.policy, &canary, false).await };
    let evidence = tokio::spawn(read).await.map_err(Problem::internal)?;
    Ok(Json(evidence.map_err(unavailable)?))
}

async fn propose(
    State(service): State<ReleaseService>,
    principal: Principal,
    Json(proposal): Json<Proposal>,
) -> Result<(StatusCode, Json<FullCanary>), Problem> {
    let (inner, policy) = (&service.0, &service.0.policy);
    let strategy = proposal.strategy.unwrap_or_else(|| inner.options.canary.clone());
    strategy
        .check()
        .map_err(|error| Problem::bad_request(format!("strategy: {error}")))?;
    let (asked, least) = (strategy.requires_approval, inner.options.canary.requires_approval);
    if asked < least {
        return Err(Problem::bad_request(format!(
            "strategy: requiresApproval is {asked}; the configuration asks for {least}, and a proposal can only ask for more"
        )));
    }
    let mut transaction = crate::tables::begin(&inner.pool, policy).await.map_err(unavailable)?;
    let known = crate::tables::has_version(&mut transaction, policy, proposal.version).await;
    if !known.map_err(unavailable)? {
        return Err(no_version(policy, proposal.version));
    }
    let state = crate::tables::read(&mut transaction, policy, service.rules()).await;
    check(&state.map_err(unavailable)?, proposal.version).map_err(Problem::conflict)?;
    let bad = judgment::bad_ancestor(&mut transaction, policy, proposal.version).await;
    if let Some(bad) = bad.map_err(unavailable)? {
        return Err(Problem::conflict(judgment::explain(proposal.version, &bad)));
    }
    let unfinished = tables::unfinished(&mut transaction, policy)
        .await
        .map_err(unavailable)?;
    let same = |other: &&Canary| other.version == proposal.version && other.state != CanaryState::Champion;
    if let Some(other) = unfinished.iter().find(same) {
        return Err(Problem::conflict(format!(
            "version {} is a canary already: {} is {}",
            proposal.version,
            other.id,
            other.state.name()
        )));
    }
    let waiting = unfinished.iter().filter(|other| other.state == CanaryState::Proposed);
    if waiting.count() >= PROPOSED_MAX {
        return Err(Problem::conflict(format!(
            "{PROPOSED_MAX} canaries are proposed already: abort one with `springtide canary abort ID --reason …`"
        )));
    }
    let (version, actor, reason) = (proposal.version, &principal.label, &proposal.reason);
    let id = tables::propose(&mut transaction, policy, version, &strategy, actor, reason).await;
    let id = id.map_err(unavailable)?;
    note(
        &mut transaction,
        &principal,
        id,
        "propose",
        &format!("version {version} of {policy}"),
        reason,
    )
    .await?;
    let full = full(&mut transaction, &service, id).await?;
    transaction.commit().await.map_err(unavailable)?;
    tracing::info!(canary = %id, version, "canary proposed");
    Ok((StatusCode::CREATED, Json(full)))
}

async fn decide(
    State(service): State<ReleaseService>,
    principal: Principal,
    Path((id, decision)): Path<(Uuid, String)>,
    Json(why): Json<Why>,
) -> Result<Json<FullCanary>, Problem> {
    let event = requested(&decision)?;
    let policy = &service.0.policy;
    let mut transaction = crate::tables::begin(&service.0.pool, policy)
        .await
        .map_err(unavailable)?;
    let canary = find(&mut transaction, &service, id).await?;
    canary
        .state
        .after(event)
        .map_err(|refused: Refused| Problem::conflict(refused))?;
    match event {
        Event::Approve => approve(&mut transaction, &canary, &principal, &why.reason).await?,
        _ => {
            let state = crate::tables::read(&mut transaction, policy, service.rules()).await;
            let state = state.map_err(unavailable)?;
            check_champion(&state, &canary, event)?;
            if let (Event::Rollback, Some(control)) = (event, canary.control) {
                check_loadable(&service, control).await?;
            }
            let made = Decision {
                event,
                actor: principal.label.clone(),
                reason: why.reason.clone(),
                evidence: None,
            };
            let done = apply(&mut transaction, policy, &state, &canary, made).await;
            done.map_err(|error| match error.downcast::<sqlx::Error>() {
                Ok(error) => unavailable(error),
                Err(error) => Problem::internal(format!("{error:#}")),
            })?;
        }
    }
    let about = format!(
        "version {} of {policy}, which was {}",
        canary.version,
        canary.state.name()
    );
    note(&mut transaction, &principal, id, event.name(), &about, &why.reason).await?;
    let full = full(&mut transaction, &service, id).await?;
    transaction.commit().await.map_err(unavailable)?;
    tracing::info!(canary = %id, version = canary.version, event = event.name(), "canary decided by a person");
    // the change is committed; if the store is down, the loop publishes it later
    if let Err(error) = service.publish_missing().await {
        tracing::warn!(canary = %id, error = format!("{error:#}"), "assignment not published yet");
    }
    Ok(Json(full))
}

/// A person decides on what they saw: `champion` has not moved since.
fn check_champion(state: &ReleaseState, canary: &Canary, event: Event) -> Result<(), Problem> {
    let expected = match event {
        Event::Promote | Event::Resume => canary.control,
        Event::Rollback => Some(canary.version),
        _ => None,
    };
    let serves = state.alias(CHAMPION).map(|champion| champion.version);
    if expected.is_none() || serves == expected {
        return Ok(());
    }
    Err(Problem::conflict(format!(
        "champion moved to version {} meanwhile, so {} would not do what you see: look again with `springtide canary show`",
        serves.map_or("none".to_owned(), |version| version.to_string()),
        event.name()
    )))
}

fn requested(decision: &str) -> Result<Event, Problem> {
    let event: Option<Event> = serde_json::from_value(Value::from(decision)).ok();
    event.filter(|event| event.is_a_request()).ok_or_else(|| {
        Problem::not_found(format!(
            "a canary has no decision {decision:?}; there are approve, hold, resume, promote, abort and rollback"
        ))
    })
}

fn check_approver(principal: &Principal, proposer: &str, wanted: u32, approvals: &[String]) -> Result<(), Problem> {
    let actor = &principal.label;
    if !principal.is_person {
        return Err(Problem::forbidden(
            "people approve canaries, and an identity provider says here who is one: log in at the page",
        ));
    }
    if is_same_person(actor, proposer) {
        return Err(Problem::forbidden(format!(
            "{actor} proposed the canary, so others must approve it: it needs {wanted}"
        )));
    }
    match approvals.iter().any(|other| is_same_person(actor, other)) {
        false => Ok(()),
        true => Err(Problem::conflict(format!(
            "{actor} has approved it already; it has {} of {wanted} approvals",
            approvals.len()
        ))),
    }
}

/// One person's approval. The release loop goes on when there are enough.
async fn approve(
    transaction: &mut PgConnection,
    canary: &Canary,
    principal: &Principal,
    reason: &str,
) -> Result<(), Problem> {
    let (actor, wanted) = (&principal.label, canary.strategy.requires_approval);
    if wanted == 0 {
        return Err(Problem::conflict(
            "the canary needs no approval; it waits for the canary before it",
        ));
    }
    let approvals = tables::approvals(&mut *transaction, canary.id)
        .await
        .map_err(unavailable)?;
    check_approver(principal, &canary.actor, wanted, &approvals)?;
    let transition = Transition {
        event: Event::Approve,
        from: canary.state,
        epoch: None,
        actor: actor.clone(),
        reason: reason.to_owned(),
        evidence: None,
    };
    // it stays proposed
    tables::write(transaction, canary, &transition)
        .await
        .map_err(unavailable)
}

async fn note(
    transaction: &mut PgConnection,
    principal: &Principal,
    id: Uuid,
    verb: &str,
    detail: &str,
    reason: &str,
) -> Result<(), Problem> {
    let change = audit::Change {
        tenant: &principal.tenant,
        action: &format!("canary.{verb}"),
        subject: &id.to_string(),
        detail,
        reason,
    };
    audit::append(transaction, principal.actor(), change)
        .await
        .map_err(unavailable)
}

#[cfg(test)]
mod tests {
    use super::*;
    use edge::auth::Role;

    #[test]
    fn other_people_approve_each_once() {
        let check = |label: &str, is_person: bool| {
            let principal = Principal {
                is_person,
                ..Principal::with_role("default", Role::Release, label)
            };
            let approvals = ["Bo (u2)".to_owned()];
            check_approver(&principal, "Ada (u1)", 2, &approvals).map_err(|problem| problem.status.as_u16())
        };
        assert_eq!(check("Cy (u3)", true), Ok(()));
        assert_eq!(check("ci", false), Err(403), "no person");
        assert_eq!(
            check("Ada Lovelace (u1)", true),
            Err(403),
            "the proposer by another name"
        );
        assert_eq!(check("Bob (u2)", true), Err(409), "a second time by another name");
    }
}
