//! Publishing in the database: the tables `version`, `line`, `step`, `baseline`, `disposition`,
//! `trajectory_use` and `published_intent`.

use super::{Error, Prepared};
use crate::door;
use crate::select::drop_generations;
use crate::uses::{self, Purpose};
use artifact::digest::Digest;
use artifact::manifest::{Manifest, RunStep};
use sqlx::postgres::PgQueryResult;
use sqlx::{PgConnection, PgExecutor, PgPool};
use uuid::Uuid;

/// A version's row.
#[derive(Debug, Clone)]
pub(super) struct Version {
    pub root: Digest,
    pub line: String,
    pub branch: i32,
}

/// Object key of a version's manifest in the policy store.
pub(super) fn manifest_key(policy: &str, version: i64) -> String {
    format!("policy/{policy}/version/{version:010}.json")
}

pub(super) async fn next_serial(pool: &PgPool) -> Result<i64, sqlx::Error> {
    sqlx::query_scalar!(r#"select nextval('version_serial') as "serial!""#)
        .fetch_one(pool)
        .await
}

/// A version that a run was about to publish.
#[derive(Debug, Clone, Copy)]
pub(super) struct Intent {
    pub serial: i64,
    /// Of the manifest's exact bytes.
    pub manifest: Digest,
    pub run_state: Digest,
}

/// Notes what a run is about to publish. The caller holds the claim's lock and commits.
pub(super) async fn insert_intent(
    connection: &mut PgConnection,
    manifest: &Manifest,
    run: &RunStep,
    intent: &Intent,
) -> Result<(), sqlx::Error> {
    sqlx::query!(
        r#"
        insert into published_intent (policy, serial, run_id, step, fence, manifest_digest, run_state_digest)
        values ($1, $2, $3, $4, $5, $6, $7)
        "#,
        manifest.policy,
        intent.serial,
        run.run,
        run.step,
        manifest.fence,
        &intent.manifest.0[..],
        &intent.run_state.0[..]
    )
    .execute(connection)
    .await?;
    Ok(())
}

/// What the executors of a run were about to publish as this step, newest first.
pub(super) async fn intents(pool: &PgPool, policy: &str, run: Uuid, step: i64) -> Result<Vec<Intent>, sqlx::Error> {
    let rows = sqlx::query!(
        r#"
        select serial, manifest_digest, run_state_digest
        from published_intent
        where policy = $1 and run_id = $2 and step = $3
        order by serial desc
        "#,
        policy,
        run,
        step
    )
    .fetch_all(pool)
    .await?;
    // the table's check makes digests of other lengths impossible
    let intents = rows.into_iter().filter_map(|row| {
        Some(Intent {
            serial: row.serial,
            manifest: Digest::from_slice(&row.manifest_digest)?,
            run_state: Digest::from_slice(&row.run_state_digest)?,
        })
    });
    Ok(intents.collect())
}

pub(super) async fn version(pool: &PgPool, policy: &str, serial: i64) -> Result<Version, Error> {
    let row = sqlx::query!(
        "select root, line, branch from version where policy = $1 and serial = $2",
        policy,
        serial
    )
    .fetch_optional(pool)
    .await?
    .ok_or(Error::NoSuchVersion(serial))?;
    let root: [u8; 32] = row.root.try_into().map_err(|_| Error::NoSuchVersion(serial))?;
    Ok(Version {
        root: Digest(root),
        line: row.line,
        branch: row.branch,
    })
}

pub(super) async fn run_state_key(pool: &PgPool, run: Uuid, step: i64) -> Result<Option<String>, sqlx::Error> {
    sqlx::query_scalar!(
        "select checkpoint_key from step where run_id = $1 and step = $2",
        run,
        step
    )
    .fetch_optional(pool)
    .await
}

/// Inserts the row of a version.
pub(super) async fn insert_version(connection: &mut PgConnection, manifest: &Manifest) -> Result<(), sqlx::Error> {
    sqlx::query!(
        r#"
        insert into version (policy, serial, root, parent, line, branch, run_id, step, manifest_key, delta_bytes, image_bytes)
        values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)
        "#,
        manifest.policy,
        manifest.version,
        &manifest.root.0[..],
        manifest.parent.as_ref().map(|p| p.version),
        manifest.line,
        manifest.branch,
        manifest.run.as_ref().map(|r| r.run),
        manifest.run.as_ref().map(|r| r.step),
        manifest_key(&manifest.policy, manifest.version),
        manifest.delta_bytes().map(|bytes| bytes as i64),
        manifest.tensor_bytes as i64
    )
    .execute(connection)
    .await?;
    Ok(())
}

/// Head and branch of a line, if it exists.
pub async fn line(pool: &PgPool, policy: &str, line: &str) -> Result<Option<(i64, i32)>, sqlx::Error> {
    let row = sqlx::query!(
        "select head, branch from line where policy = $1 and line = $2",
        policy,
        line
    )
    .fetch_optional(pool)
    .await?;
    Ok(row.map(|row| (row.head, row.branch)))
}

/// The active run of a line.
pub(super) async fn active_run(
    connection: &mut PgConnection,
    policy: &str,
    line: &str,
) -> Result<Option<Uuid>, sqlx::Error> {
    sqlx::query_scalar!(
        r#"
        select id from run
        where policy = $1 and line = $2 and status in ('validating_files', 'queued', 'running', 'pausing')
        limit 1
        "#,
        policy,
        line
    )
    .fetch_optional(connection)
    .await
}

/// Writes a version that no run made: its row, and the line's head, which must still be its parent.
/// `new_line`: the line does not exist yet.
pub(super) async fn commit_external(
    connection: &mut PgConnection,
    manifest: &Manifest,
    new_line: bool,
) -> Result<(), Error> {
    let parent = manifest.parent.as_ref().map_or(0, |p| p.version);
    if let Some(run) = active_run(connection, &manifest.policy, &manifest.line).await? {
        return Err(Error::LineTaken {
            line: manifest.line.clone(),
            run,
        });
    }
    insert_version(connection, manifest).await?;
    let moved = match new_line {
        true => {
            sqlx::query!(
                "insert into line (policy, line, head, branch) values ($1, $2, $3, $4) on conflict do nothing",
                manifest.policy,
                manifest.line,
                manifest.version,
                manifest.branch
            )
            .execute(connection)
            .await?
        }
        false => move_head(connection, manifest, parent).await?,
    };
    refuse_moved_line(manifest, parent, &moved)
}

/// The line was not where it was when the version was made.
fn refuse_moved_line(manifest: &Manifest, parent: i64, moved: &PgQueryResult) -> Result<(), Error> {
    if moved.rows_affected() == 1 {
        return Ok(());
    }
    Err(Error::LineMoved {
        line: manifest.line.clone(),
        parent,
        branch: manifest.branch,
    })
}

/// Begins a line at a version of another one. It may be there already.
pub async fn begin_line(
    executor: impl PgExecutor<'_>,
    policy: &str,
    line: &str,
    head: i64,
) -> sqlx::Result<PgQueryResult> {
    sqlx::query!(
        "insert into line (policy, line, head) values ($1, $2, $3) on conflict do nothing",
        policy,
        line,
        head
    )
    .execute(executor)
    .await
}

/// Moves a line to the branch and head that a release chose, in the caller's fenced transaction.
pub async fn rebase_line(
    connection: &mut PgConnection,
    policy: &str,
    line: &str,
    branch: i32,
    head: i64,
) -> sqlx::Result<()> {
    sqlx::query!(
        "update line set branch = $3, head = $4, updated_at = now() where policy = $1 and line = $2 and branch < $3",
        policy,
        line,
        branch,
        head
    )
    .execute(connection)
    .await?;
    Ok(())
}

/// Moves the line's head from `parent` to the version, if `parent` is still the head.
async fn move_head(
    connection: &mut PgConnection,
    manifest: &Manifest,
    parent: i64,
) -> Result<PgQueryResult, sqlx::Error> {
    sqlx::query!(
        r#"
        update line set head = $3, updated_at = now()
        where policy = $1 and line = $2 and head = $4 and branch = $5
        "#,
        manifest.policy,
        manifest.line,
        manifest.version,
        parent,
        manifest.branch
    )
    .execute(connection)
    .await
}

/// Fails if a sampler of the cohort has been revoked since its samples were checked, which none can be from now until
/// the transaction ends, or one of the keys that sent what users typed.
pub(crate) async fn refuse_revoked(
    connection: &mut PgConnection,
    cohort: &[Uuid],
    teachers: &[Uuid],
) -> Result<(), Error> {
    edge::sampler::hold_revocations(&mut *connection).await?;
    let revoked = sqlx::query_scalar!(
        r#"
        select exists (
            select from generation g join sampler s on s.id = g.sampler
            where g.id = any($1) and s.revoked_at is not null
        ) or exists (select from api_key k where k.id = any($2) and k.revoked_at is not null) as "revoked!"
        "#,
        cohort,
        teachers
    )
    .fetch_one(connection)
    .await?;
    match revoked {
        true => Err(Error::Revoked),
        false => Ok(()),
    }
}

/// Fails unless the tenants of the whole cohort consent to the policy and no user of it was erased. None can
/// withdraw or be erased from now until the transaction ends.
pub async fn refuse_withdrawn(connection: &mut PgConnection, policy: &str, cohort: &[Uuid]) -> Result<(), Error> {
    edge::tenant::hold_consents(&mut *connection, policy).await?;
    let allowed = sqlx::query_scalar!(
        r#"
        select count(*) as "allowed!" from generation g
        where g.id = any($1) and g.tenant_id = any((select consenting_tenants($2))::text[])
          and g.untrainable is distinct from 'erased'
          and not exists (select from erasure e
                          where e.tenant_id = g.tenant_id and e.user_digest = user_digest(g.tenant_id, g.user_key))
        "#,
        cohort,
        policy
    )
    .fetch_one(connection)
    .await?;
    match usize::try_from(allowed) == Ok(cohort.len()) {
        true => Ok(()),
        false => Err(Error::ConsentWithdrawn),
    }
}

/// Writes a step. The caller holds the claim's lock and commits.
pub(super) async fn commit(connection: &mut PgConnection, prepared: &Prepared) -> Result<(), Error> {
    let Prepared {
        manifest,
        record,
        run_state_key,
        run_state_digest,
        ..
    } = prepared;
    let parent = manifest.parent.as_ref().map_or(0, |p| p.version);
    insert_version(connection, manifest).await?;
    let moved = move_head(connection, manifest, parent).await?;
    refuse_moved_line(manifest, parent, &moved)?;
    sqlx::query!(
        r#"
        insert into step (run_id, step, version, parent, cohort_digest, metrics, checkpoint_key, run_state_digest)
        values ($1, $2, $3, $4, $5, $6, $7, $8)
        "#,
        record.run,
        record.step,
        manifest.version,
        parent,
        &record.cohort_digest().0[..],
        record.metrics,
        run_state_key,
        &run_state_digest.0[..]
    )
    .execute(&mut *connection)
    .await?;
    let typed: Vec<Uuid> = record.typed.keys().copied().collect();
    let (tokens, teachers): (Vec<i32>, Vec<Uuid>) =
        record.typed.values().map(|typed| (typed.tokens, typed.key)).unzip();
    // What a run over a dataset uses, the realtime ledger decides.
    sqlx::query!(
        r#"
        insert into disposition (generation_id, kind, run_id, step, typed_tokens, teacher)
        select id, 'trained', $2, $3, typed.tokens, typed.teacher
        from unnest($1::uuid[]) as cohort (id)
        left join unnest($4::uuid[], $5::integer[], $6::uuid[]) as typed (id, tokens, teacher) using (id)
        where exists (select from run where run.id = $2 and run.kind in ('realtime', 'grpo'))
        "#,
        &record.cohort,
        record.run,
        record.step,
        &typed,
        &tokens,
        &teachers
    )
    .execute(&mut *connection)
    .await
    .map_err(|error| match error.as_database_error().and_then(|e| e.constraint()) {
        Some("disposition_pkey") => Error::AlreadyDecided,
        _ => error.into(),
    })?;
    for (code, ids) in &record.dropped {
        drop_generations(&mut *connection, record.run, ids, code).await?;
    }
    uses::insert(
        &mut *connection,
        record.run,
        record.step,
        Purpose::Trained,
        &record.cohort,
    )
    .await?;
    refuse_revoked(&mut *connection, &record.cohort, &teachers).await?;
    refuse_withdrawn(&mut *connection, &manifest.policy, &record.cohort).await?;
    let classes: Vec<String> = record.baselines.keys().cloned().collect();
    let values: Vec<f64> = record.baselines.values().map(|b| b.value).collect();
    let weights: Vec<f64> = record.baselines.values().map(|b| b.weight).collect();
    sqlx::query!(
        r#"
        insert into baseline (run_id, class, step, value, weight)
        select $1, class, $2, value, weight
        from unnest($3::text[], $4::double precision[], $5::double precision[]) as after (class, value, weight)
        "#,
        record.run,
        record.step,
        &classes,
        &values,
        &weights
    )
    .execute(&mut *connection)
    .await?;
    if let Some(lease) = record.lease
        && !door::commit(&mut *connection, lease).await?
    {
        return Err(Error::LeaseLost);
    }
    sqlx::query!("update run set steps_done = $2 where id = $1", record.run, record.step)
        .execute(&mut *connection)
        .await?;
    sqlx::query!(
        "delete from published_intent where run_id = $1 and step <= $2",
        record.run,
        record.step
    )
    .execute(connection)
    .await?;
    Ok(())
}
