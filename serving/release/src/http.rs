//! The release API: `GET /v1/aliases`, `GET /v1/releases`, `POST /v1/releases`, and the arms
//! (`experiment`). The caller's key goes into the audit.

use super::decide::manual::{self, Kind, ReleaseRequest, RequestError};
use super::decide::{Change, ReleaseState};
use super::judgment::{self, Verdict};
use super::{CANARY, CHAMPION, ReleaseService, canary, experiment, tables, webhook};
use artifact::digest::Digest;
use axum::extract::State;
use axum::http::StatusCode;
use edge::Problem;
use edge::audit;
use edge::auth::{Principal, Scope};
use edge::database::{page_limit, unavailable};
use edge::json::Json;
use edge::query::Query;
use edge::routes::{Routes, get, post};
use serde::{Deserialize, Serialize};
use sqlx::PgConnection;
use std::time::Duration;
use time::OffsetDateTime;
use uuid::Uuid;

/// Largest page of `GET /v1/releases`.
const PAGE_MAX: i64 = 500;

pub fn routes(service: ReleaseService) -> Routes {
    Routes::new()
        .route(
            Scope::Read,
            "/v1/aliases",
            "Which version each alias serves",
            get(aliases),
        )
        .route(Scope::Read, "/v1/releases", "List releases", get(releases))
        .route(Scope::Release, "/v1/releases", "Move an alias", post(request_release))
        .merge(experiment::routes())
        .merge(canary::http::routes())
        .merge(judgment::routes())
        .merge(webhook::routes())
        .with_state(service)
}

#[derive(Debug, Serialize, Deserialize)]
pub struct Aliases {
    pub policy: String,
    /// The newest assignment.
    pub epoch: i64,
    pub aliases: Vec<AliasView>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct AliasView {
    pub alias: String,
    pub version: i64,
    pub root: Option<String>,
    /// The line whose head it follows; null: pinned.
    pub follows: Option<String>,
    pub branch: i32,
    pub epoch: i64,
    #[serde(with = "time::serde::rfc3339")]
    pub since: OffsetDateTime,
}

async fn aliases(State(service): State<ReleaseService>) -> Result<Json<Aliases>, Problem> {
    let inner = &service.0;
    let rows = sqlx::query!(
        r#"select a.alias as "alias!", a.version as "version!", a.follows, a.branch as "branch!", a.epoch as "epoch!",
                  a.created_at as "created_at!", v.root as "root?"
           from alias a
           left join version v on v.policy = a.policy and v.serial = a.version
           where a.policy = $1 and not a.withdrawn
           order by a.alias"#,
        inner.policy
    )
    .fetch_all(&inner.pool)
    .await
    .map_err(unavailable)?;
    let epoch = sqlx::query_scalar!(
        r#"select coalesce(max(epoch), 0) as "epoch!" from assignment where policy = $1"#,
        inner.policy
    )
    .fetch_one(&inner.pool)
    .await
    .map_err(unavailable)?;
    Ok(Json(Aliases {
        policy: inner.policy.clone(),
        epoch,
        aliases: rows
            .into_iter()
            .map(|row| AliasView {
                alias: row.alias,
                version: row.version,
                root: row
                    .root
                    .map(|root| Digest::from_slice(&root).map_or_else(String::new, |root| root.to_string())),
                follows: row.follows,
                branch: row.branch,
                epoch: row.epoch,
                since: row.created_at,
            })
            .collect(),
    }))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ReleaseQuery {
    alias: Option<String>,
    limit: Option<i64>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct Releases {
    pub releases: Vec<ReleaseView>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct ReleaseView {
    pub id: Uuid,
    pub alias: String,
    pub from_version: Option<i64>,
    pub to_version: i64,
    pub kind: String,
    pub status: String,
    pub epoch: Option<i64>,
    pub actor: String,
    pub reason: String,
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
}

async fn releases(
    State(service): State<ReleaseService>,
    Query(query): Query<ReleaseQuery>,
) -> Result<Json<Releases>, Problem> {
    let limit = page_limit(query.limit, 50, PAGE_MAX)?;
    let inner = &service.0;
    let releases = sqlx::query_as!(
        ReleaseView,
        "select r.id, r.alias, r.from_version, r.to_version, r.kind, r.status, t.epoch, t.actor, t.reason, r.created_at
         from release r
         join transition t on t.release_id = r.id
         where r.policy = $1 and ($2::text is null or r.alias = $2)
         order by r.id desc limit $3",
        inner.policy,
        query.alias,
        limit
    )
    .fetch_all(&inner.pool)
    .await
    .map_err(unavailable)?;
    Ok(Json(Releases { releases }))
}

#[derive(Debug, Serialize, Deserialize)]
pub struct Released {
    pub release_id: Uuid,
    pub epoch: i64,
    pub alias: String,
    pub from_version: Option<i64>,
    pub to_version: i64,
    pub kind: String,
    pub status: String,
    /// The line whose head it follows from now on; null: pinned.
    pub follows: Option<String>,
    /// `learner`, if a move of `champion` moved it too.
    pub also: Vec<Moved>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct Moved {
    pub alias: String,
    pub from_version: Option<i64>,
    pub to_version: i64,
    pub follows: Option<String>,
}

impl From<Change> for Moved {
    fn from(change: Change) -> Self {
        Moved {
            alias: change.alias,
            from_version: change.from,
            to_version: change.to,
            follows: change.follows,
        }
    }
}

pub(super) fn no_version(policy: &str, version: i64) -> Problem {
    Problem::not_found(format!(
        "policy {policy} has no version {version}; GET /v1/versions lists them"
    ))
}

/// How long a release waits for the store to say whether a version can be loaded.
const LOADABLE_MAX: Duration = Duration::from_secs(5);

/// A conflict if garbage collection has deleted objects that the version needs: replicas could not
/// load it. If the store does not answer, the release proceeds.
pub(super) async fn check_loadable(service: &ReleaseService, version: i64) -> Result<(), Problem> {
    let inner = &service.0;
    let reachable = async {
        let keys = service.trusted().await?;
        anyhow::Ok(inner.store.reachable(&inner.policy, version, &keys).await?)
    };
    // A release holds the lock on the policy's assignments meanwhile.
    let reachable = match tokio::time::timeout(LOADABLE_MAX, reachable).await {
        Ok(reachable) => reachable,
        Err(_) => Err(anyhow::anyhow!("no answer within {} s", LOADABLE_MAX.as_secs())),
    };
    let Err(error) = reachable else { return Ok(()) };
    if let Some(store::Error::NoPath { .. } | store::Error::NotFound(_)) = error.downcast_ref() {
        return Err(Problem::conflict(format!(
            "version {version} can no longer be loaded ({error}); `springtide policy versions` shows which can"
        )));
    }
    tracing::warn!(
        version,
        error = format!("{error:#}"),
        "could not check that the version is loadable"
    );
    Ok(())
}

async fn request_release(
    State(service): State<ReleaseService>,
    principal: Principal,
    Json(request): Json<ReleaseRequest>,
) -> Result<(StatusCode, Json<Released>), Problem> {
    let (inner, kind, actor) = (&service.0, request.kind.name(), &principal.label);
    let policy = &inner.policy;
    let mut transaction = tables::begin(&inner.pool, policy).await.map_err(unavailable)?;
    let state = tables::read(&mut transaction, policy, service.rules())
        .await
        .map_err(unavailable)?;
    let before = rollback_target(&mut transaction, policy, &state, &request.alias)
        .await
        .map_err(unavailable)?;
    if request.alias == CANARY && canary::serves(&mut transaction, policy).await.map_err(unavailable)? {
        return Err(Problem::conflict(
            "a canary is under way, and the alias `canary` is its: decide about it with `springtide canary`, or abort it first",
        ));
    }
    let changes = manual::decide(&state, before, &request).map_err(|error| {
        tracing::info!(alias = request.alias, kind, reason = %error, "release refused");
        into_problem(&error)
    })?;
    let (change, also) = changes
        .split_first()
        .ok_or_else(|| Problem::internal("a release without a change"))?;
    let known = tables::has_version(&mut transaction, policy, change.to)
        .await
        .map_err(unavailable)?;
    let loadable = match known {
        false => Err(no_version(policy, change.to)),
        true => check_loadable(&service, change.to).await,
    };
    if let Err(problem) = loadable {
        let release = tables::record(&mut transaction, policy, kind, actor, change, None)
            .await
            .map_err(unavailable)?;
        transaction.commit().await.map_err(unavailable)?;
        return Err(problem.with("release_id", release.to_string()));
    }
    let (epoch, releases) = tables::write(&mut transaction, policy, 0, kind, actor, &changes)
        .await
        .map_err(unavailable)?;
    let verdict = match (request.kind, &*change.alias, change.from) {
        (Kind::Rollback, CHAMPION, Some(from)) if from != change.to => Some((from, Verdict::Bad)),
        (Kind::Promote, CHAMPION, _) => {
            let bad = judgment::bad_ancestor(&mut transaction, policy, change.to).await;
            // else champion would follow to nothing that is trained on top of it
            bad.map_err(unavailable)?.map(|_| (change.to, Verdict::Good))
        }
        _ => None,
    };
    if let Some((version, verdict)) = verdict {
        let new = judgment::New {
            version,
            verdict,
            canary: None,
            actor,
            reason: &request.reason,
        };
        judgment::write(&mut transaction, policy, new)
            .await
            .map_err(unavailable)?;
    }
    for change in &changes {
        let change_of_alias = audit::Change {
            tenant: &principal.tenant,
            action: &format!("release.{kind}"),
            subject: &format!("{policy}@{}", change.alias),
            detail: &format!("version {}, epoch {epoch}", change.to),
            reason: &request.reason,
        };
        audit::append(&mut transaction, principal.actor(), change_of_alias)
            .await
            .map_err(unavailable)?;
    }
    transaction.commit().await.map_err(unavailable)?;
    tracing::info!(epoch, alias = change.alias, version = change.to, kind, "alias moved");
    metrics::counter!("springtide_alias_moves_total", "kind" => kind).increment(1);
    // the change is committed; if the store is down, the loop publishes it later
    if let Err(error) = service.publish_missing().await {
        tracing::warn!(epoch, error = format!("{error:#}"), "assignment not published yet");
    }
    let released = Released {
        release_id: releases.first().copied().unwrap_or_default(),
        epoch,
        alias: change.alias.clone(),
        from_version: change.from,
        to_version: change.to,
        kind: kind.to_owned(),
        status: "done".to_owned(),
        follows: change.follows.clone(),
        also: also.iter().cloned().map(Moved::from).collect(),
    };
    Ok((StatusCode::CREATED, Json(released)))
}

/// Where a rollback goes that names no version. `champion` goes to the last version known to be good;
/// without one, and all other aliases, to the version served before.
async fn rollback_target(
    connection: &mut PgConnection,
    policy: &str,
    state: &ReleaseState,
    alias: &str,
) -> sqlx::Result<Option<i64>> {
    if alias == CHAMPION {
        let current = state.alias(CHAMPION).map(|champion| champion.version);
        if let Some(good) = judgment::last_good(&mut *connection, policy, current).await? {
            return Ok(Some(good.version));
        }
    }
    tables::served_before(connection, policy, alias).await
}

fn into_problem(error: &RequestError) -> Problem {
    match error {
        RequestError::NoAlias(_) => Problem::not_found(error),
        RequestError::Already { .. } | RequestError::NothingBefore(..) => Problem::conflict(error),
        RequestError::Name(_) | RequestError::Run(_) | RequestError::Shadow | RequestError::NoVersion => {
            Problem::bad_request(error)
        }
    }
}
