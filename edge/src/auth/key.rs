//! Makes, lists, rotates, limits and revokes the keys of the table `api_key`. Each change is a row of the
//! audit, in the same transaction.

use std::num::NonZeroU32;

use anyhow::{Context, bail, ensure};
use rand::TryRngCore;
use serde::Serialize;
use sqlx::{PgConnection, PgPool};
use time::{Duration, OffsetDateTime};
use uuid::Uuid;

use super::digest;
use super::limits::REQUESTS_PER_SECOND_MAX;
use super::scope::{Role, Scopes};
use crate::audit::Actor;
use crate::audit::rows::{Audited, Fingerprint};

const SECRET_PREFIX: &str = "spring_";
/// The role of keys whose scopes are listed one by one.
const CUSTOM: &str = "custom";
/// Keys that are neither revoked nor expired. Every process holds them in memory.
const KEYS_MAX: i64 = 100_000;
/// Random bytes of a secret; it has two hexadecimal digits for each.
const SECRET_BYTES: usize = 32;

/// What a new key may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Grant {
    Role(Role),
    Scopes(Scopes),
}

impl Grant {
    /// From the columns `role` and `scopes`.
    pub(super) fn parse(role: &str, scopes: Option<&[String]>) -> anyhow::Result<Self> {
        match scopes {
            Some(names) => Scopes::parse(names).map(Self::Scopes),
            None => {
                let role = Role::parse(role).with_context(|| format!("unknown role {role:?}"))?;
                Ok(Self::Role(role))
            }
        }
    }

    pub fn scopes(self) -> Scopes {
        match self {
            Self::Role(role) => role.scopes(),
            Self::Scopes(scopes) => scopes,
        }
    }
}

/// A key to make.
#[derive(Debug, Clone)]
pub struct NewKey<'a> {
    pub tenant: &'a str,
    pub grant: Grant,
    /// Who holds the key, for people.
    pub label: &'a str,
    /// `None`: never.
    pub expires_at: Option<OffsetDateTime>,
    /// The only replica that it may report for.
    pub replica: Option<&'a str>,
    /// Of each process; `None`: what the configuration says.
    pub requests_per_second: Option<NonZeroU32>,
}

/// A key that was made. Only the secret's digest is stored.
#[derive(Debug, Clone)]
pub struct Created {
    pub id: Uuid,
    pub secret: String,
    pub expires_at: Option<OffsetDateTime>,
}

/// A key as the table has it.
#[derive(Debug, Clone, Serialize)]
pub struct Listed {
    pub id: Uuid,
    pub tenant: String,
    pub role: String,
    /// What it may do.
    pub scopes: Vec<String>,
    pub label: String,
    pub replica: Option<String>,
    pub requests_per_second: Option<NonZeroU32>,
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
    pub created_by: Option<String>,
    #[serde(with = "time::serde::rfc3339::option")]
    pub expires_at: Option<OffsetDateTime>,
    #[serde(with = "time::serde::rfc3339::option")]
    pub revoked_at: Option<OffsetDateTime>,
    /// To the hour.
    #[serde(with = "time::serde::rfc3339::option")]
    pub last_used: Option<OffsetDateTime>,
}

impl Listed {
    /// `valid`, `expired` or `revoked`.
    pub fn status(&self, now: OffsetDateTime) -> &'static str {
        if self.revoked_at.is_some() {
            "revoked"
        } else if self.expires_at.is_some_and(|at| at <= now) {
            "expired"
        } else {
            "valid"
        }
    }
}

/// Makes a key, and its tenant if that is new.
pub async fn create(pool: &PgPool, key: &NewKey<'_>, actor: Actor<'_>, reason: &str) -> anyhow::Result<Created> {
    let mut transaction = crate::database::begin(pool).await.context("begin")?;
    let created = create_within(&mut transaction, key, new_secret()?, actor, reason).await?;
    transaction.commit().await.context("commit")?;
    Ok(created)
}

/// Makes a key whose secret somebody has. A key that is known stays as it is, also if it is revoked.
pub async fn register(
    pool: &PgPool,
    secret: &str,
    key: &NewKey<'_>,
    actor: Actor<'_>,
    reason: &str,
) -> anyhow::Result<()> {
    let digits = secret.strip_prefix(SECRET_PREFIX).unwrap_or_default();
    ensure!(
        digits.len() == 2 * SECRET_BYTES && digits.bytes().all(|digit| digit.is_ascii_hexdigit()),
        "it is no API key: {SECRET_PREFIX} and {} hexadecimal digits",
        2 * SECRET_BYTES
    );
    if tenant_of(pool, secret).await?.is_some() {
        return Ok(());
    }
    let mut transaction = crate::database::begin(pool).await.context("begin")?;
    match create_within(&mut transaction, key, secret.to_owned(), actor, reason).await {
        Ok(_) => transaction.commit().await.context("commit"),
        Err(error) if is_known(&error) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Whether the table has the digest already: of a revoked key, or of one that was registered meanwhile.
fn is_known(error: &anyhow::Error) -> bool {
    let cause = error.downcast_ref::<sqlx::Error>();
    cause
        .and_then(sqlx::Error::as_database_error)
        .is_some_and(|error| error.is_unique_violation())
}

async fn create_within(
    connection: &mut PgConnection,
    key: &NewKey<'_>,
    secret: String,
    actor: Actor<'_>,
    reason: &str,
) -> anyhow::Result<Created> {
    ensure_tenant(connection, key.tenant, actor, "for its first key", reason).await?;
    let created = insert(connection, key, secret, None, actor.name).await?;
    let row = audited_key(connection, created.id).await?;
    row.append(connection, actor, "key.create", &describe(key), reason)
        .await
        .context("append to the audit")?;
    Ok(created)
}

/// A secret that nobody knows yet.
pub fn new_secret() -> anyhow::Result<String> {
    let mut random = [0_u8; SECRET_BYTES];
    rand::rngs::OsRng
        .try_fill_bytes(&mut random)
        .context("draw random bytes")?;
    Ok(format!("{SECRET_PREFIX}{}", hex::encode(random)))
}

/// Replaces a key by a new one that may do the same. The old one expires after `overlap`, so that
/// its holder can change over. `expires_at`: of the new one; `None`: it lives as long as the old one
/// was meant to.
pub async fn rotate(
    pool: &PgPool,
    id: Uuid,
    overlap: Duration,
    expires_at: Option<OffsetDateTime>,
    actor: Actor<'_>,
    reason: &str,
) -> anyhow::Result<Created> {
    let mut transaction = crate::database::begin(pool).await.context("begin")?;
    let old = sqlx::query!(
        r#"select tenant_id, role, scopes, label, created_at, expires_at, revoked_at, replica, requests_per_second,
                  coalesce(lineage, id) as "lineage!", now() as "now!"
           from api_key where id = $1 for update"#,
        id
    )
    .fetch_optional(&mut *transaction)
    .await
    .context("read key")?
    .with_context(|| format!("there is no key {id}; `springtide key list` shows them"))?;
    let ended = old.revoked_at.is_some() || old.expires_at.is_some_and(|at| at <= old.now);
    ensure!(
        !ended,
        "key {id} is revoked or expired, so nobody should hold it: make a new one with `springtide key create`"
    );
    let lifetime = old.expires_at.map(|at| at - old.created_at);
    let new = NewKey {
        tenant: &old.tenant_id,
        grant: Grant::parse(&old.role, old.scopes.as_deref())?,
        label: &old.label,
        expires_at: expires_at.or_else(|| lifetime.map(|lifetime| old.now + lifetime)),
        replica: old.replica.as_deref(),
        requests_per_second: per_second(old.requests_per_second),
    };
    let created = insert(&mut transaction, &new, new_secret()?, Some(old.lineage), actor.name).await?;
    let until = old.expires_at.map_or(old.now + overlap, |at| at.min(old.now + overlap));
    sqlx::query!("update api_key set expires_at = $2 where id = $1", id, until)
        .execute(&mut *transaction)
        .await
        .context("let the old key expire")?;
    let row = audited_key(&mut transaction, created.id).await?;
    let about = format!("{}; replaces {id}", describe(&new));
    row.append(&mut transaction, actor, "key.create", &about, reason)
        .await
        .context("append to the audit")?;
    let row = audited_key(&mut transaction, id).await?;
    let about = format!("replaced by {}; works until {until}", created.id);
    row.append(&mut transaction, actor, "key.rotate", &about, reason)
        .await
        .context("append to the audit")?;
    transaction.commit().await.context("commit")?;
    Ok(created)
}

/// Ends a key. Processes that reach the database refuse it within 5 seconds. Revoking it again is an
/// error.
pub async fn revoke(pool: &PgPool, id: Uuid, actor: Actor<'_>, reason: &str) -> anyhow::Result<()> {
    let mut transaction = crate::database::begin(pool).await.context("begin")?;
    let revoked = sqlx::query_scalar!(
        "update api_key set revoked_at = now() where id = $1 and revoked_at is null returning label",
        id
    )
    .fetch_optional(&mut *transaction)
    .await
    .context("revoke key")?;
    let Some(label) = revoked else {
        bail!("there is no key {id}, or it is revoked already; `springtide key list --all` shows them");
    };
    let row = audited_key(&mut transaction, id).await?;
    row.append(&mut transaction, actor, "key.revoke", &label, reason)
        .await
        .context("append to the audit")?;
    transaction.commit().await.context("commit")?;
    Ok(())
}

/// Sets how many requests per second each process takes of a key. `None`: what the configuration
/// says. Processes that reach the database follow within 5 seconds.
pub async fn limit(
    pool: &PgPool,
    id: Uuid,
    requests_per_second: Option<NonZeroU32>,
    actor: Actor<'_>,
    reason: &str,
) -> anyhow::Result<()> {
    let mut transaction = crate::database::begin(pool).await.context("begin")?;
    let changed = sqlx::query!(
        "update api_key set requests_per_second = $2 where id = $1 and revoked_at is null",
        id,
        stored(requests_per_second)?
    )
    .execute(&mut *transaction)
    .await
    .context("limit key")?;
    ensure!(
        changed.rows_affected() > 0,
        "there is no key {id}, or it is revoked; `springtide key list` shows them"
    );
    let about = match requests_per_second {
        Some(requests) => format!("{requests} requests per second"),
        None => "no limit of its own".to_owned(),
    };
    let row = audited_key(&mut transaction, id).await?;
    row.append(&mut transaction, actor, "key.limit", &about, reason)
        .await
        .context("append to the audit")?;
    transaction.commit().await.context("commit")?;
    Ok(())
}

/// All keys, the newest first. `tenant`: only its keys.
pub async fn list(pool: &PgPool, tenant: Option<&str>) -> anyhow::Result<Vec<Listed>> {
    let rows = sqlx::query!(
        "select id, tenant_id, role, scopes, label, replica, created_at, created_by, expires_at, revoked_at, last_used,
                requests_per_second
         from api_key where $1::text is null or tenant_id = $1 order by id desc",
        tenant
    )
    .fetch_all(pool)
    .await
    .context("list keys")?;
    let listed = |scopes: Option<Vec<String>>, role: &str| match Grant::parse(role, scopes.as_deref()) {
        Ok(grant) => grant.scopes().names(),
        Err(_) => scopes.unwrap_or_default(),
    };
    let keys = rows.into_iter().map(|row| Listed {
        scopes: listed(row.scopes, &row.role),
        id: row.id,
        tenant: row.tenant_id,
        role: row.role,
        label: row.label,
        replica: row.replica,
        requests_per_second: per_second(row.requests_per_second),
        created_at: row.created_at,
        created_by: row.created_by,
        expires_at: row.expires_at,
        revoked_at: row.revoked_at,
        last_used: row.last_used,
    });
    Ok(keys.collect())
}

/// Makes the tenant if it is new, with its row in the audit. `about`: what for.
pub(crate) async fn ensure_tenant(
    connection: &mut PgConnection,
    tenant: &str,
    actor: Actor<'_>,
    about: &str,
    reason: &str,
) -> anyhow::Result<()> {
    ensure!(!tenant.is_empty(), "the tenant is empty: give it a name");
    let inserted = sqlx::query!("insert into tenant (id) values ($1) on conflict do nothing", tenant)
        .execute(&mut *connection)
        .await
        .context("create tenant")?;
    if inserted.rows_affected() > 0 {
        let row = audited_tenant(tenant.to_owned());
        row.append(connection, actor, "tenant.create", about, reason)
            .await
            .context("append to the audit")?;
    }
    Ok(())
}

/// The tenant of a key with this secret. `None`: there is none, or it is revoked.
pub async fn tenant_of(pool: &PgPool, secret: &str) -> anyhow::Result<Option<String>> {
    let digest = digest(secret);
    sqlx::query_scalar!(
        "select tenant_id from api_key where digest = $1 and revoked_at is null",
        digest.as_slice()
    )
    .fetch_optional(pool)
    .await
    .context("look up the key's tenant")
}

async fn insert(
    connection: &mut PgConnection,
    key: &NewKey<'_>,
    secret: String,
    lineage: Option<Uuid>,
    created_by: &str,
) -> anyhow::Result<Created> {
    ensure!(
        !key.grant.scopes().is_empty(),
        "the key has no scope: give it a role or a scope"
    );
    ensure!(
        key.expires_at.is_none_or(|at| at > OffsetDateTime::now_utc()),
        "the key would be expired from the start: give a later time"
    );
    let valid = sqlx::query_scalar!(
        r#"select count(*) as "count!" from api_key where revoked_at is null and (expires_at is null or expires_at > now())"#
    )
    .fetch_one(&mut *connection)
    .await
    .context("count keys")?;
    ensure!(
        valid < KEYS_MAX,
        "there are {valid} valid keys, and every role holds all of them in memory: revoke unused ones"
    );
    let digest = digest(&secret);
    let requests_per_second = stored(key.requests_per_second)?;
    let (role, scopes) = match key.grant {
        Grant::Role(role) => (role.as_str(), None),
        Grant::Scopes(scopes) => (CUSTOM, Some(scopes.names())),
    };
    let id = sqlx::query_scalar!(
        "insert into api_key
             (tenant_id, role, scopes, digest, label, expires_at, replica, lineage, created_by, requests_per_second)
         values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10) returning id",
        key.tenant,
        role,
        scopes.as_deref(),
        digest.as_slice(),
        key.label,
        key.expires_at,
        key.replica,
        lineage,
        created_by,
        requests_per_second
    )
    .fetch_one(connection)
    .await
    .context("store key")?;
    Ok(Created {
        id,
        secret,
        expires_at: key.expires_at,
    })
}

/// What the audit says about a new key.
fn describe(key: &NewKey<'_>) -> String {
    let mut text = match key.grant {
        Grant::Role(role) => format!("role {}", role.as_str()),
        Grant::Scopes(scopes) => format!("scopes {scopes}"),
    };
    for (name, value) in [("label", Some(key.label)), ("replica", key.replica)] {
        if let Some(value) = value.filter(|value| !value.is_empty()) {
            text += &format!("; {name} {value}");
        }
    }
    if let Some(requests) = key.requests_per_second {
        text += &format!("; {requests} requests per second");
    }
    if let Some(at) = key.expires_at {
        text += &format!("; expires {at}");
    }
    text
}

/// From the column `requests_per_second`.
pub(super) fn per_second(column: Option<i32>) -> Option<NonZeroU32> {
    column
        .and_then(|requests| u32::try_from(requests).ok())
        .and_then(NonZeroU32::new)
}

/// For the column `requests_per_second`.
fn stored(requests_per_second: Option<NonZeroU32>) -> anyhow::Result<Option<i32>> {
    let Some(requests) = requests_per_second else {
        return Ok(None);
    };
    ensure!(
        requests.get() <= REQUESTS_PER_SECOND_MAX,
        "{requests} requests per second are too many: give at most {REQUESTS_PER_SECOND_MAX}"
    );
    Ok(Some(i32::try_from(requests.get())?))
}

async fn audited_key(connection: &mut PgConnection, id: Uuid) -> anyhow::Result<Audited> {
    let row = audited_rows(connection, Some(id)).await.context("read key")?.pop();
    row.with_context(|| format!("the key {id} is gone"))
}

/// All keys, to be compared with the audit's actions `key.…`.
pub async fn audited(connection: &mut PgConnection) -> sqlx::Result<Vec<Audited>> {
    audited_rows(connection, None).await
}

/// All columns but the time of last use, and those that nothing reads.
async fn audited_rows(connection: &mut PgConnection, id: Option<Uuid>) -> sqlx::Result<Vec<Audited>> {
    let rows = sqlx::query!(
        "select id, tenant_id, role, scopes, digest, label, expires_at, revoked_at, replica, lineage, requests_per_second
         from api_key where $1::uuid is null or id = $1",
        id
    )
    .fetch_all(connection)
    .await?;
    let audited = rows.into_iter().map(|row| Audited {
        fingerprint: Fingerprint::of("api_key")
            .bytes(&row.id.as_bytes()[..])
            .text(&*row.tenant_id)
            .text(&*row.role)
            .text(row.scopes.map(|scopes| scopes.join(",")).as_deref())
            .bytes(&row.digest[..])
            .text(&*row.label)
            .time(row.expires_at)
            .time(row.revoked_at)
            .text(row.replica.as_deref())
            .bytes(row.lineage.as_ref().map(|lineage| &lineage.as_bytes()[..]))
            .number(row.requests_per_second.map(i64::from))
            .finish(),
        tenant: row.tenant_id,
        subject: row.id.to_string(),
    });
    Ok(audited.collect())
}

/// All tenants, to be compared with the audit's actions `tenant.…`.
pub async fn audited_tenants(connection: &mut PgConnection) -> sqlx::Result<Vec<Audited>> {
    let tenants = sqlx::query_scalar!("select id from tenant")
        .fetch_all(connection)
        .await?;
    Ok(tenants.into_iter().map(audited_tenant).collect())
}

fn audited_tenant(id: String) -> Audited {
    Audited {
        fingerprint: Fingerprint::of("tenant").text(&*id).finish(),
        tenant: id.clone(),
        subject: id,
    }
}
