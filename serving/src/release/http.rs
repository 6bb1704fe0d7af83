//! The release API: GET /v1/aliases, GET /v1/releases, POST /v1/releases. The caller's label goes into the audit.

use super::change::{self, Ask, Refusal};
use super::{Desk, books};
use axum::Router;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::routing::get;
use edge::Problem;
use edge::auth::{Principal, Role};
use edge::json::Json;
use policy::store;
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use uuid::Uuid;

/// Largest page of `GET /v1/releases`.
const PAGE_MAX: i64 = 500;

/// The routes; the caller puts them behind `edge::auth`.
pub fn router(desk: Desk) -> Router {
    Router::new()
        .route("/v1/aliases", get(aliases))
        .route("/v1/releases", get(releases).post(ask))
        .with_state(desk)
}

#[derive(Debug, Serialize)]
struct Aliases {
    policy: String,
    /// The newest assignment.
    epoch: i64,
    aliases: Vec<AliasView>,
}

#[derive(Debug, Serialize)]
struct AliasView {
    alias: String,
    version: i64,
    root: Option<String>,
    /// Line whose head it follows; null: pinned.
    follows: Option<String>,
    branch: i32,
    epoch: i64,
    #[serde(with = "time::serde::rfc3339")]
    since: OffsetDateTime,
}

async fn aliases(State(desk): State<Desk>, principal: Principal) -> Result<Json<Aliases>, Problem> {
    principal.require(&[Role::Serving, Role::Research, Role::Release])?;
    let desk = &desk.0;
    let rows = sqlx::query!(
        r#"select a.alias as "alias!", a.version as "version!", a.follows, a.branch as "branch!", a.epoch as "epoch!",
                  a.created_at as "created_at!", v.root as "root?"
           from alias a
           left join version v on v.policy = a.policy and v.serial = a.version
           where a.policy = $1 and not a.withdrawn
           order by a.alias"#,
        desk.policy
    )
    .fetch_all(&desk.pool)
    .await
    .map_err(unavailable)?;
    let epoch = sqlx::query_scalar!(
        r#"select coalesce(max(epoch), 0) as "epoch!" from assignment where policy = $1"#,
        desk.policy
    )
    .fetch_one(&desk.pool)
    .await
    .map_err(unavailable)?;
    Ok(Json(Aliases {
        policy: desk.policy.clone(),
        epoch,
        aliases: rows
            .into_iter()
            .map(|row| AliasView {
                alias: row.alias,
                version: row.version,
                root: row.root.map(|root| blake3_hex(&root)),
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
struct Page {
    alias: Option<String>,
    #[serde(default = "default_limit")]
    limit: i64,
}

fn default_limit() -> i64 {
    50
}

#[derive(Debug, Serialize)]
struct Releases {
    releases: Vec<ReleaseView>,
}

#[derive(Debug, Serialize)]
struct ReleaseView {
    id: Uuid,
    alias: String,
    from_version: Option<i64>,
    to_version: i64,
    kind: String,
    status: String,
    epoch: Option<i64>,
    actor: String,
    reason: String,
    #[serde(with = "time::serde::rfc3339")]
    created_at: OffsetDateTime,
}

async fn releases(
    State(desk): State<Desk>,
    principal: Principal,
    Query(page): Query<Page>,
) -> Result<Json<Releases>, Problem> {
    principal.require(&[Role::Serving, Role::Research, Role::Release])?;
    if !(1..=PAGE_MAX).contains(&page.limit) {
        return Err(Problem::bad_request(format!(
            "limit is {}; give 1 to {PAGE_MAX}",
            page.limit
        )));
    }
    let desk = &desk.0;
    let releases = sqlx::query_as!(
        ReleaseView,
        "select r.id, r.alias, r.from_version, r.to_version, r.kind, r.status, t.epoch, t.actor, t.reason, r.created_at
         from release r
         join transition t on t.release_id = r.id
         where r.policy = $1 and ($2::text is null or r.alias = $2)
         order by r.id desc limit $3",
        desk.policy,
        page.alias,
        page.limit
    )
    .fetch_all(&desk.pool)
    .await
    .map_err(unavailable)?;
    Ok(Json(Releases { releases }))
}

#[derive(Debug, Serialize)]
struct Done {
    release_id: Uuid,
    epoch: i64,
    alias: String,
    from_version: Option<i64>,
    to_version: i64,
    kind: &'static str,
    status: &'static str,
    /// Line whose head it follows from here; null: pinned.
    follows: Option<String>,
}

/// Why a version cannot be served any longer, if a collection has taken away what it was made of: replicas would get an
/// assignment that they cannot follow. A store that does not answer is no reason.
async fn gone(desk: &Desk, version: i64) -> Option<Problem> {
    let inner = &desk.0;
    let reachable = match desk.trusted().await {
        Ok(keys) => inner.store.reachable(&inner.policy, version, &keys).await,
        Err(error) => {
            tracing::warn!(
                version,
                error = format!("{error:#}"),
                "could not look whether the version is whole"
            );
            return None;
        }
    };
    match reachable {
        Err(error @ (store::Error::NoPath { .. } | store::Error::NotFound(_))) => Some(Problem::conflict(format!(
            "version {version} can no longer be put together ({error}); `springtide policy versions` shows which can"
        ))),
        Err(error) => {
            tracing::warn!(version, %error, "could not look whether the version is whole");
            None
        }
        Ok(_) => None,
    }
}

async fn ask(
    State(desk): State<Desk>,
    principal: Principal,
    Json(ask): Json<Ask>,
) -> Result<(StatusCode, Json<Done>), Problem> {
    principal.require(&[Role::Release])?;
    let inner = &desk.0;
    let mut connection = inner.pool.acquire().await.map_err(unavailable)?;
    let mut transaction = books::begin(&mut connection, &inner.policy)
        .await
        .map_err(unavailable)?;
    let books = books::read(&mut transaction, &inner.policy)
        .await
        .map_err(unavailable)?;
    let before = books::served_before(&mut transaction, &inner.policy, &ask.alias)
        .await
        .map_err(unavailable)?;
    let change = match change::decide(&books, before, &ask) {
        Ok(change) => change,
        Err(refusal) => {
            tracing::info!(alias = ask.alias, kind = ask.kind.name(), reason = %refusal, "release refused");
            return Err(into_problem(&refusal));
        }
    };
    let known = books::has_version(&mut transaction, &inner.policy, change.to)
        .await
        .map_err(unavailable)?;
    let problem = match known {
        false => Some(Problem::not_found(format!(
            "policy {} has no version {}; GET /v1/versions lists them",
            inner.policy, change.to
        ))),
        true => gone(&desk, change.to).await,
    };
    if let Some(problem) = problem {
        let release = books::record(
            &mut transaction,
            &inner.policy,
            ask.kind.name(),
            &principal.label,
            &change,
            None,
        )
        .await
        .map_err(unavailable)?;
        transaction.commit().await.map_err(unavailable)?;
        return Err(problem.with("release_id", release.to_string()));
    }
    let (epoch, releases) = books::write(
        &mut transaction,
        &inner.policy,
        ask.kind.name(),
        &principal.label,
        std::slice::from_ref(&change),
    )
    .await
    .map_err(unavailable)?;
    transaction.commit().await.map_err(unavailable)?;
    drop(connection);
    tracing::info!(
        epoch,
        alias = change.alias,
        version = change.to,
        kind = ask.kind.name(),
        "alias moved"
    );
    metrics::counter!("springtide_alias_moves_total", "kind" => ask.kind.name()).increment(1);
    // decided already; where the store is away, the loop publishes it later
    if let Err(error) = desk.publish_missing().await {
        tracing::warn!(epoch, error = format!("{error:#}"), "assignment not published yet");
    }
    let done = Done {
        release_id: releases.first().copied().unwrap_or_default(),
        epoch,
        alias: change.alias,
        from_version: change.from,
        to_version: change.to,
        kind: ask.kind.name(),
        status: "done",
        follows: change.follows,
    };
    Ok((StatusCode::CREATED, Json(done)))
}

fn into_problem(refusal: &Refusal) -> Problem {
    match refusal {
        Refusal::NoAlias(_) => Problem::not_found(refusal),
        Refusal::Already { .. } | Refusal::NothingBefore(..) => Problem::conflict(refusal),
        Refusal::Name(_) | Refusal::Run(_) | Refusal::NoVersion => Problem::bad_request(refusal),
    }
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn unavailable(error: sqlx::Error) -> Problem {
    tracing::warn!(error = %error, "release API could not reach the database");
    Problem::unavailable("the database does not answer", 2)
}

fn blake3_hex(root: &[u8]) -> String {
    policy::digest::Digest::from_slice(root).map_or_else(String::new, |root| root.to_string())
}
