//! The table `dataset`: versions are created, found and listed, never changed.

use super::query::{GENERATIONS_MAX, Query};
use super::{Count, Reference, count};
use edge::audit::Actor;
use edge::audit::rows::{Audited, Fingerprint};
use serde_json::{Value, json};
use sqlx::{PgConnection, PgPool, Postgres, Transaction};
use std::time::Duration;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// A trajectory belongs to a dataset only if it closed this long before its creation. Otherwise a
/// transaction that closed it earlier and commits later would add it.
pub const CLOSED_FOR: time::Duration = time::Duration::seconds(30);
/// A query that selects trajectories may read every generation.
pub const STATEMENT_MAX: Duration = Duration::from_secs(300);

/// A row of `dataset`.
#[derive(Debug, Clone)]
pub struct Dataset {
    pub policy: String,
    pub name: String,
    pub version: i32,
    /// Of the key that made it.
    pub tenant: String,
    /// As `dataset_members` reads it.
    pub query: Value,
    pub created_by: String,
    pub created_at: OffsetDateTime,
    /// At its creation.
    pub trajectories: i64,
    /// Of all of them.
    pub generations: i64,
    pub digest: Vec<u8>,
}

impl Dataset {
    pub fn reference(&self) -> Reference {
        Reference {
            name: self.name.clone(),
            version: self.version,
        }
    }
}

/// A dataset to be made.
#[derive(Debug, Clone, Copy)]
pub struct New<'a> {
    pub policy: &'a str,
    pub name: &'a str,
    pub tenant: &'a str,
    pub query: &'a Query,
    pub actor: Actor<'a>,
}

/// Why a dataset was not made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "the query selects nothing: no trajectory that closed more than {} s ago, has a reward, and is of a tenant that \
         consents to the policy",
        CLOSED_FOR.whole_seconds()
    )]
    Empty,
    #[error("write the dataset: {0}")]
    Database(#[from] sqlx::Error),
    #[error("write the dataset's query: {0}")]
    Json(#[from] serde_json::Error),
    #[error("write a time: {0}")]
    Time(#[from] time::error::Format),
}

/// Begins a transaction that sees the datasets of a tenant's keys; `None`: all. No statement of it runs
/// longer than [`STATEMENT_MAX`].
pub async fn begin(pool: &PgPool, tenant: Option<&str>) -> Result<Transaction<'static, Postgres>, sqlx::Error> {
    let mut transaction = edge::database::begin(pool).await?;
    sqlx::query!(
        "select set_config('springtide.tenant', coalesce($1, ''), true) as tenant,
                set_config('springtide.all_tenants', case when $1 is null then 'on' else 'off' end, true) as all_tenants,
                set_config('statement_timeout', $2, true) as statement_timeout",
        tenant,
        STATEMENT_MAX.as_millis().to_string()
    )
    .fetch_one(&mut *transaction)
    .await?;
    Ok(transaction)
}

/// Makes the next version of the name. `new.query` has been checked.
pub async fn create(pool: &PgPool, new: New<'_>) -> Result<Dataset, Error> {
    let mut transaction = begin(pool, Some(new.tenant)).await?;
    // Two requests for the same name get two versions.
    sqlx::query!(
        "select from pg_advisory_xact_lock(hashtextextended($1, 0))",
        format!("springtide/dataset/{}/{}", new.policy, new.name)
    )
    .execute(&mut *transaction)
    .await?;
    let now = sqlx::query_scalar!(r#"select clock_timestamp() as "now!""#)
        .fetch_one(&mut *transaction)
        .await?;
    let mut query = serde_json::to_value(new.query)?;
    query["closed_before"] = (now - CLOSED_FOR).format(&Rfc3339)?.into();
    query["limit"] = new.query.limit.unwrap_or(GENERATIONS_MAX).into();
    let Count {
        stored,
        digest,
        last,
        tenants,
        ..
    } = count(&mut transaction, new.policy, &query, true).await?;
    let last = last.ok_or(Error::Empty)?;
    query["last_id"] = last.to_string().into();
    query["tenants"] = json!(tenants);
    let row = sqlx::query!(
        r#"
        insert into dataset (policy, name, version, tenant_id, query, created_by, trajectories, generations, digest)
        values ($1, $2, next_dataset_version($1, $2), $3, $4, $5, $6, $7, $8)
        returning version, created_at
        "#,
        new.policy,
        new.name,
        new.tenant,
        query,
        new.actor.name,
        stored.trajectories,
        stored.generations,
        &digest.0[..]
    )
    .fetch_one(&mut *transaction)
    .await?;
    let made = Dataset {
        policy: new.policy.to_owned(),
        name: new.name.to_owned(),
        version: row.version,
        tenant: new.tenant.to_owned(),
        query,
        created_by: new.actor.name.to_owned(),
        created_at: row.created_at,
        trajectories: stored.trajectories,
        generations: stored.generations,
        digest: digest.0.to_vec(),
    };
    let about = format!("{} trajectories, {} generations", made.trajectories, made.generations);
    let rows = read_audited(&mut transaction, Some((new.policy, &made.reference()))).await?;
    let row = rows.first().ok_or(sqlx::Error::RowNotFound)?;
    row.append(&mut transaction, new.actor, "dataset.create", &about, "")
        .await?;
    transaction.commit().await?;
    Ok(made)
}

/// A version of a dataset. `tenant`: only one that a key of this tenant made.
pub async fn find(
    connection: &mut PgConnection,
    policy: &str,
    reference: &Reference,
    tenant: Option<&str>,
) -> Result<Option<Dataset>, sqlx::Error> {
    sqlx::query_as!(
        Dataset,
        r#"
        select policy, name, version, tenant_id as tenant, query, created_by, created_at, trajectories, generations,
               digest
        from dataset
        where policy = $1 and name = $2 and version = $3 and ($4::text is null or tenant_id = $4)
        "#,
        policy,
        reference.name,
        reference.version,
        tenant
    )
    .fetch_optional(connection)
    .await
}

/// Datasets by name, the newest version of each first. `after`: the last one of the page before.
pub async fn list(
    connection: &mut PgConnection,
    policy: &str,
    tenant: Option<&str>,
    name: Option<&str>,
    after: Option<&Reference>,
    count_max: i64,
) -> Result<Vec<Dataset>, sqlx::Error> {
    sqlx::query_as!(
        Dataset,
        r#"
        select policy, name, version, tenant_id as tenant, query, created_by, created_at, trajectories, generations,
               digest
        from dataset
        where policy = $1
          and ($2::text is null or tenant_id = $2)
          and ($3::text is null or name = $3)
          and ($4::text is null or name > $4 or name = $4 and version < $5)
        order by name, version desc
        limit $6
        "#,
        policy,
        tenant,
        name,
        after.map(|after| after.name.as_str()),
        after.map(|after| after.version),
        count_max
    )
    .fetch_all(connection)
    .await
}

/// All datasets, to be compared with the audit's actions `dataset.…`.
pub async fn audited(connection: &mut PgConnection) -> sqlx::Result<Vec<Audited>> {
    read_audited(connection, None).await
}

async fn read_audited(connection: &mut PgConnection, one: Option<(&str, &Reference)>) -> sqlx::Result<Vec<Audited>> {
    let rows = sqlx::query!(
        r#"
        select policy, name, version, tenant_id, query::text as "query!", created_by, trajectories, generations, digest
        from dataset
        where $1::text is null or policy = $1 and name = $2 and version = $3
        "#,
        one.map(|(policy, _)| policy),
        one.map(|(_, reference)| reference.name.as_str()),
        one.map(|(_, reference)| reference.version)
    )
    .fetch_all(connection)
    .await?;
    let audited = rows.into_iter().map(|row| Audited {
        fingerprint: Fingerprint::of("dataset")
            .text(&*row.policy)
            .text(&*row.name)
            .number(i64::from(row.version))
            .text(&*row.tenant_id)
            .text(&*row.query)
            .text(&*row.created_by)
            .number(row.trajectories)
            .number(row.generations)
            .bytes(&*row.digest)
            .finish(),
        subject: format!("{}/{}@{}", row.policy, row.name, row.version),
        tenant: row.tenant_id,
    });
    Ok(audited.collect())
}
