//! Which versions are good and which are bad: what canaries and people found out, in the table
//! `judgment`.
//!
//! A version without a judgment counts as its nearest judged ancestor does, because it was trained on
//! top of it. So all that was learned from a bad version is bad until a canary or a person says
//! otherwise.

use super::ReleaseService;
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
use std::collections::{BTreeSet, VecDeque};
use std::sync::{Mutex, PoisonError};
use time::OffsetDateTime;
use uuid::Uuid;

const PAGE_MAX: i64 = 200;
/// Heads that are remembered as clear. The next head is a child of one of them.
const CLEAR_MAX: usize = 64;

pub(super) fn routes() -> Routes<ReleaseService> {
    Routes::new()
        .route(
            Scope::Release,
            "/v1/judgments",
            "Say that a version is good or bad",
            post(judge),
        )
        .route(
            Scope::Read,
            "/v1/judgments",
            "The last version known to be good, and what was judged, the latest first",
            get(list),
        )
}

/// What a version is known to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    Good,
    Bad,
}

impl Verdict {
    fn name(self) -> &'static str {
        match self {
            Verdict::Good => "good",
            Verdict::Bad => "bad",
        }
    }
}

/// A judgment to write.
#[derive(Debug, Clone, PartialEq)]
pub struct New<'a> {
    pub version: i64,
    pub verdict: Verdict,
    /// Whose evidence it is.
    pub canary: Option<Uuid>,
    pub actor: &'a str,
    pub reason: &'a str,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Judgment {
    pub version: i64,
    /// `good` or `bad`.
    pub verdict: String,
    /// Whose evidence it is; null: a person's word.
    pub canary_id: Option<Uuid>,
    /// The key's label; `release`: the release loop.
    pub actor: String,
    pub reason: String,
    #[serde(with = "time::serde::rfc3339")]
    pub at: OffsetDateTime,
}

pub async fn write(connection: &mut PgConnection, policy: &str, new: New<'_>) -> sqlx::Result<()> {
    sqlx::query!(
        "insert into judgment (policy, version, verdict, canary_id, actor, reason) values ($1, $2, $3, $4, $5, $6)",
        policy,
        new.version,
        new.verdict.name(),
        new.canary,
        new.actor,
        new.reason
    )
    .execute(connection)
    .await?;
    Ok(())
}

/// The version that was judged good last, and not bad since. `except`: not this one.
pub async fn last_good(
    connection: &mut PgConnection,
    policy: &str,
    except: Option<i64>,
) -> sqlx::Result<Option<Judgment>> {
    sqlx::query_as!(
        Judgment,
        r#"select version as "version!", verdict as "verdict!", canary_id, actor as "actor!", reason as "reason!", at as "at!"
           from version_judgment
           where policy = $1 and verdict = 'good' and version is distinct from $2
           order by id desc limit 1"#,
        policy,
        except
    )
    .fetch_optional(connection)
    .await
}

/// Versions that were found clear of bad ancestors, until the next judgment: their ancestors are not
/// walked again for each new head.
#[derive(Debug, Default)]
pub struct Clear(Mutex<Found>);

#[derive(Debug, Default)]
struct Found {
    /// The newest judgment when they were looked at.
    newest: Option<Uuid>,
    versions: VecDeque<i64>,
}

impl Clear {
    /// Those of `versions` that are bad, or were trained on top of a bad one.
    pub async fn bad(
        &self,
        connection: &mut PgConnection,
        policy: &str,
        versions: BTreeSet<i64>,
    ) -> sqlx::Result<BTreeSet<i64>> {
        let newest = sqlx::query_scalar!(
            "select id from judgment where policy = $1 order by id desc limit 1",
            policy
        )
        .fetch_optional(&mut *connection)
        .await?;
        let mut bad = BTreeSet::new();
        for version in versions {
            let clear = self.known(newest);
            if newest.is_none() || clear.contains(&version) {
                continue;
            }
            match nearest(&mut *connection, policy, version, &clear).await? {
                Some(_) => {
                    bad.insert(version);
                }
                None => self.note(version),
            }
        }
        Ok(bad)
    }

    fn known(&self, newest: Option<Uuid>) -> Vec<i64> {
        let mut found = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if found.newest != newest {
            *found = Found {
                newest,
                versions: VecDeque::new(),
            };
        }
        found.versions.iter().copied().collect()
    }

    fn note(&self, version: i64) {
        let mut found = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        found.versions.push_back(version);
        if found.versions.len() > CLEAR_MAX {
            found.versions.pop_front();
        }
    }
}

/// The bad version that `version` is or was trained on top of. `None`: none, or its nearest judged
/// ancestor is good.
pub async fn bad_ancestor(connection: &mut PgConnection, policy: &str, version: i64) -> sqlx::Result<Option<Judgment>> {
    nearest(connection, policy, version, &[]).await
}

/// Walks from `version` to its nearest judged ancestor, or to one of `clear`. `None`: that is not bad.
async fn nearest(
    connection: &mut PgConnection,
    policy: &str,
    version: i64,
    clear: &[i64],
) -> sqlx::Result<Option<Judgment>> {
    // serials rise from parent to child, so nothing bad lies below the lowest bad one
    let nearest = sqlx::query_as!(
        Judgment,
        r#"
        with recursive path (serial, parent) as (
            select v.serial, v.parent
            from version v
            where v.policy = $1 and v.serial = $2
            union all
            select v.serial, v.parent
            from path
            join version v on v.policy = $1 and v.serial = path.parent
            where path.serial > (select min(version) from version_judgment where policy = $1 and verdict = 'bad')
              and path.serial <> all ($3)
              and not exists (select from judgment j where j.policy = $1 and j.version = path.serial)
        )
        select j.version as "version!", j.verdict as "verdict!", j.canary_id, j.actor as "actor!", j.reason as "reason!",
               j.at as "at!"
        from path
        join version_judgment j on j.policy = $1 and j.version = path.serial
        order by j.version desc limit 1
        "#,
        policy,
        version,
        clear
    )
    .fetch_optional(connection)
    .await?;
    Ok(nearest.filter(|judgment| judgment.verdict == Verdict::Bad.name()))
}

/// Whether `version` is `ancestor` or was trained on top of it.
pub async fn descends(connection: &mut PgConnection, policy: &str, version: i64, ancestor: i64) -> sqlx::Result<bool> {
    sqlx::query_scalar!(
        r#"
        with recursive path (serial, parent) as (
            select v.serial, v.parent
            from version v
            where v.policy = $1 and v.serial = $2
            union all
            select v.serial, v.parent
            from path
            join version v on v.policy = $1 and v.serial = path.parent
            where path.serial > $3
        )
        select exists (select from path where serial = $3) as "descends!"
        "#,
        policy,
        version,
        ancestor
    )
    .fetch_one(connection)
    .await
}

/// In words, for people who ask for such a version.
pub fn explain(version: i64, bad: &Judgment) -> String {
    let what = match version == bad.version {
        true => format!("version {version} was judged bad"),
        false => format!(
            "version {version} was trained on top of version {}, which was judged bad",
            bad.version
        ),
    };
    format!(
        "{what} by {}: {}. If it is good after all: `springtide release judge {version} good --reason …`",
        bad.actor, bad.reason
    )
}

/// The body of `POST /v1/judgments`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    /// Serial of the version.
    version: i64,
    verdict: Verdict,
    /// For the audit.
    #[serde(default)]
    reason: String,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct Judgments {
    /// Null: no version was judged good yet, or all of them bad since.
    pub last_known_good: Option<Judgment>,
    /// The bad version that `champion` is or was trained on top of. Null: none is known.
    pub champion_bad: Option<Judgment>,
    /// Likewise of `learner`.
    pub learner_bad: Option<Judgment>,
    pub judgments: Vec<Judgment>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ListQuery {
    limit: Option<i64>,
}

async fn list(
    State(service): State<ReleaseService>,
    Query(query): Query<ListQuery>,
) -> Result<Json<Judgments>, Problem> {
    let limit = page_limit(query.limit, 20, PAGE_MAX)?;
    let mut connection = service.0.pool.acquire().await.map_err(unavailable)?;
    read(&mut connection, &service.0.policy, limit)
        .await
        .map(Json)
        .map_err(unavailable)
}

async fn read(connection: &mut PgConnection, policy: &str, limit: i64) -> sqlx::Result<Judgments> {
    let judgments = sqlx::query_as!(
        Judgment,
        "select version, verdict, canary_id, actor, reason, at from judgment where policy = $1 order by id desc limit $2",
        policy,
        limit
    )
    .fetch_all(&mut *connection)
    .await?;
    let mut bad = [None, None];
    for (alias, bad) in [super::CHAMPION, super::LEARNER].into_iter().zip(&mut bad) {
        let version = sqlx::query_scalar!(
            r#"select version as "version!" from alias where policy = $1 and alias = $2 and not withdrawn"#,
            policy,
            alias
        )
        .fetch_optional(&mut *connection)
        .await?;
        if let Some(version) = version {
            *bad = bad_ancestor(&mut *connection, policy, version).await?;
        }
    }
    let [champion_bad, learner_bad] = bad;
    Ok(Judgments {
        last_known_good: last_good(connection, policy, None).await?,
        champion_bad,
        learner_bad,
        judgments,
    })
}

async fn judge(
    State(service): State<ReleaseService>,
    principal: Principal,
    Json(request): Json<Request>,
) -> Result<(StatusCode, Json<Judgments>), Problem> {
    let policy = &service.0.policy;
    let mut transaction = super::tables::begin(&service.0.pool, policy)
        .await
        .map_err(unavailable)?;
    let known = super::tables::has_version(&mut transaction, policy, request.version).await;
    if !known.map_err(unavailable)? {
        return Err(super::http::no_version(policy, request.version));
    }
    let new = New {
        version: request.version,
        verdict: request.verdict,
        canary: None,
        actor: &principal.label,
        reason: &request.reason,
    };
    write(&mut transaction, policy, new).await.map_err(unavailable)?;
    let change = audit::Change {
        tenant: &principal.tenant,
        action: &format!("version.{}", request.verdict.name()),
        subject: &format!("{policy}@{}", request.version),
        detail: "",
        reason: &request.reason,
    };
    audit::append(&mut transaction, principal.actor(), change)
        .await
        .map_err(unavailable)?;
    let judgments = read(&mut transaction, policy, 20).await.map_err(unavailable)?;
    transaction.commit().await.map_err(unavailable)?;
    tracing::info!(
        version = request.version,
        verdict = request.verdict.name(),
        "version judged"
    );
    Ok((StatusCode::CREATED, Json(judgments)))
}
