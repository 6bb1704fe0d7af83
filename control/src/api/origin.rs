//! `GET /v1/generations/{id}/origin`: where a served token comes from. Leads from the generation to
//! the version that sampled it, its manifest, the step that made it, and the trajectories that the
//! step learned from. Shows only generations and trajectories of the caller's tenant.

use axum::extract::State;
use edge::Problem;
use edge::auth::Principal;
use edge::json::Json;
use edge::path::Path;
use serde::Serialize;
use serde_json::Value;
use sqlx::{PgConnection, PgPool};
use time::OffsetDateTime;
use uuid::Uuid;

use hex::encode as hex;

use crate::caller::visible_tenant;
use crate::tables::{LONG_STATEMENT_MS_MAX, reader_within};

#[derive(Debug, Serialize)]
pub struct Origin {
    generation: Generation,
    version: Version,
    /// Null: the version was imported, no step made it.
    step: Option<Step>,
    /// The trajectories of the same tenant that the step was trained on; for administrators all.
    trajectories: Vec<Trajectory>,
    /// How many others it was trained on: of tenants that the caller may not see, or expired.
    trajectories_hidden: i64,
}

#[derive(Debug, Serialize)]
struct Generation {
    id: Uuid,
    tenant: String,
    policy: String,
    /// `[[version, tokens], …]` in token order.
    version_spans: Value,
    line: String,
    arm: String,
    replica: String,
    purpose: String,
    #[serde(with = "time::serde::rfc3339")]
    sampled_at: OffsetDateTime,
    disposition: String,
    code: Option<String>,
}

#[derive(Debug, Serialize)]
struct Version {
    serial: i64,
    /// Content hash in hexadecimal. Equal to the one that the generation was logged with, else the
    /// answer is a 409.
    root: String,
    parent: Option<i64>,
    line: String,
    branch: i32,
    /// Object key in the policy store.
    manifest: String,
    #[serde(with = "time::serde::rfc3339")]
    created_at: OffsetDateTime,
}

#[derive(Debug, Serialize)]
struct Step {
    run: Uuid,
    kind: String,
    step: i64,
    parent: i64,
    /// Digest of the sorted generation ids, in hexadecimal.
    cohort_digest: String,
    #[serde(with = "time::serde::rfc3339")]
    committed_at: OffsetDateTime,
}

#[derive(Debug, Serialize)]
struct Trajectory {
    generation: Uuid,
    version: i64,
    reward: Option<f64>,
    signal: Option<String>,
    #[serde(with = "time::serde::rfc3339")]
    closed_at: OffsetDateTime,
}

pub async fn origin(
    State(pool): State<PgPool>,
    principal: Principal,
    Path(id): Path<Uuid>,
) -> Result<Json<Origin>, Problem> {
    let tenant = visible_tenant(&principal, None)?;
    let mut snapshot = reader_within(&pool, tenant, LONG_STATEMENT_MS_MAX).await?;
    read(&mut snapshot, tenant, id).await.map(Json)
}

fn database(error: sqlx::Error) -> Problem {
    Problem::of_database(error, |error| Problem::internal(format!("read the origin: {error}")))
}

/// `tenant`: the only one to show.
async fn read(snapshot: &mut PgConnection, tenant: Option<&str>, id: Uuid) -> Result<Origin, Problem> {
    let found = sqlx::query!(
        r#"select g.tenant_id, g.policy, g.version, g.root, g.version_spans, g.line, g.arm, g.replica, g.purpose,
                  g.sampled_at, l.disposition as "disposition!", l.code,
                  v.root as "version_root?", v.parent, v.line as "version_line?", v.branch as "branch?",
                  v.run_id, v.step, v.manifest_key as "manifest_key?", v.created_at as "created_at?"
           from generation g
           join ledger l on l.generation_id = g.id
           left join version v on v.policy = g.policy and v.serial = g.version
           where g.id = $1 and ($2::text is null or g.tenant_id = $2)"#,
        id,
        tenant
    )
    .fetch_optional(&mut *snapshot)
    .await
    .map_err(database)?;
    let row = found.ok_or_else(|| Problem::not_found(format!("generation {id} is not in the database (yet)")))?;
    let (Some(root), Some(line), Some(branch), Some(manifest), Some(created_at)) = (
        row.version_root,
        row.version_line,
        row.branch,
        row.manifest_key,
        row.created_at,
    ) else {
        // Whoever logs a generation names any version.
        return Err(Problem::not_found(format!(
            "generation {id} names the unknown version {} of {}",
            row.version, row.policy
        )));
    };
    if root != row.root {
        return Err(Problem::conflict(format!(
            "generation {id} was logged with another content hash than that of version {}",
            row.version
        )));
    }
    let (step, trajectories, trajectories_hidden) = match row.run_id.zip(row.step) {
        Some((run, step)) => {
            let trajectories = trajectories_of(&mut *snapshot, run, step, tenant)
                .await
                .map_err(database)?;
            let shown = i64::try_from(trajectories.len()).unwrap_or(i64::MAX);
            let hidden = trained_on(&mut *snapshot, run, step).await.map_err(database)? - shown;
            let step = step_of(&mut *snapshot, run, step).await.map_err(database)?;
            (Some(step), trajectories, hidden.max(0))
        }
        None => (None, Vec::new(), 0),
    };
    Ok(Origin {
        generation: Generation {
            id,
            tenant: row.tenant_id,
            policy: row.policy,
            version_spans: row.version_spans,
            line: row.line,
            arm: row.arm,
            replica: row.replica,
            purpose: row.purpose,
            sampled_at: row.sampled_at,
            disposition: row.disposition,
            code: row.code,
        },
        version: Version {
            serial: row.version,
            root: hex(&root),
            parent: row.parent,
            line,
            branch,
            manifest,
            created_at,
        },
        step,
        trajectories,
        trajectories_hidden,
    })
}

async fn step_of(connection: &mut PgConnection, run: Uuid, step: i64) -> sqlx::Result<Step> {
    let row = sqlx::query!(
        "select r.kind, s.parent, s.cohort_digest, s.committed_at
         from step s join run r on r.id = s.run_id where s.run_id = $1 and s.step = $2",
        run,
        step
    )
    .fetch_one(connection)
    .await?;
    Ok(Step {
        run,
        kind: row.kind,
        step,
        parent: row.parent,
        cohort_digest: hex(&row.cohort_digest),
        committed_at: row.committed_at,
    })
}

/// How many trajectories the step was trained on.
async fn trained_on(connection: &mut PgConnection, run: Uuid, step: i64) -> sqlx::Result<i64> {
    sqlx::query_scalar!(
        r#"select count(*) as "count!" from trajectory_use where run_id = $1 and step = $2 and purpose = 'trained'"#,
        run,
        step
    )
    .fetch_one(connection)
    .await
}

async fn trajectories_of(
    connection: &mut PgConnection,
    run: Uuid,
    step: i64,
    tenant: Option<&str>,
) -> sqlx::Result<Vec<Trajectory>> {
    sqlx::query_as!(
        Trajectory,
        "select t.generation_id as generation, g.version, t.reward, t.signal, t.closed_at
         from trajectory_use u
         join trajectory t on t.generation_id = u.generation_id
         join generation g on g.id = u.generation_id
         where u.run_id = $1 and u.step = $2 and u.purpose = 'trained' and ($3::text is null or g.tenant_id = $3)
         order by t.generation_id",
        run,
        step,
        tenant
    )
    .fetch_all(connection)
    .await
}
