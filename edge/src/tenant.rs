//! Which tenant a policy belongs to, and which other tenants let it train on what they log.
//!
//! The owner decides about a policy's runs and releases, and always consents to it. Everybody else's
//! data is trained on only while they consent. The SQL function `consenting_tenants` says who does;
//! whatever trains asks it. Each change is a row of the audit, in the same transaction.
//!
//! A policy is only a name here.

mod owner;

use anyhow::{Context, bail, ensure};
use serde::Serialize;
use sqlx::{PgConnection, PgPool};
use time::OffsetDateTime;
use uuid::Uuid;

pub use owner::OwnerOnly;

use crate::audit::Actor;
use crate::audit::rows::{Audited, Fingerprint};
use crate::auth::key;

/// First part of the name of the advisory lock that orders steps and withdrawals.
const LOCK: &str = "springtide/consent/";

/// A policy and its owner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Owned {
    pub policy: String,
    pub tenant: String,
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
}

/// A tenant's consent that a policy is trained on its data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Consent {
    pub policy: String,
    pub tenant: String,
    pub given_by: String,
    #[serde(with = "time::serde::rfc3339")]
    pub given_at: OffsetDateTime,
    pub withdrawn_by: Option<String>,
    #[serde(with = "time::serde::rfc3339::option")]
    pub withdrawn_at: Option<OffsetDateTime>,
}

/// The tenant that a policy belongs to. `None`: nobody has used the policy yet.
pub async fn owner(pool: &PgPool, policy: &str) -> sqlx::Result<Option<String>> {
    sqlx::query_scalar!("select tenant_id from policy where name = $1", policy)
        .fetch_optional(pool)
        .await
}

/// Gives a new policy to `tenant`. Fails if it belongs to another tenant.
pub async fn own(pool: &PgPool, policy: &str, tenant: &str, actor: Actor<'_>) -> anyhow::Result<()> {
    if owner(pool, policy).await.context("read the policy's owner")?.is_none() {
        let mut transaction = crate::database::begin(pool).await.context("begin")?;
        key::ensure_tenant(&mut transaction, tenant, actor, "for its policy", "").await?;
        let inserted = sqlx::query!(
            "insert into policy (name, tenant_id) values ($1, $2) on conflict (name) do nothing",
            policy,
            tenant
        )
        .execute(&mut *transaction)
        .await
        .context("store the policy's owner")?;
        if inserted.rows_affected() > 0 {
            record_policy(&mut transaction, actor, "policy.own", policy, "").await?;
        }
        transaction.commit().await.context("commit")?;
    }
    let owner = owner(pool, policy).await.context("read the policy's owner")?;
    let owner = owner.context("the policy's owner was just stored")?;
    ensure!(
        owner == tenant,
        "the policy {policy} belongs to the tenant {owner}, not to {tenant}: set policy.tenant = {owner:?}, or choose \
         another policy.name, or hand it over with `springtide tenant transfer --policy {policy} --to {tenant}`"
    );
    Ok(())
}

/// Hands a policy over to another tenant. What its old owner logs is no longer trained on, unless
/// that tenant consents.
pub async fn transfer(pool: &PgPool, policy: &str, to: &str, actor: Actor<'_>, reason: &str) -> anyhow::Result<()> {
    let mut transaction = crate::database::begin(pool).await.context("begin")?;
    let owner = locked_owner(&mut transaction, policy).await?;
    ensure!(owner != to, "the policy {policy} belongs to the tenant {to} already");
    key::ensure_tenant(&mut transaction, to, actor, "for its policy", reason).await?;
    sqlx::query!("update policy set tenant_id = $2 where name = $1", policy, to)
        .execute(&mut *transaction)
        .await
        .context("store the policy's owner")?;
    record_policy(&mut transaction, actor, "policy.transfer", policy, reason).await?;
    transaction.commit().await.context("commit")
}

/// Lets a policy be trained on what `tenant` logs. Returns whether it was not allowed before.
pub async fn consent(
    pool: &PgPool,
    policy: &str,
    tenant: &str,
    actor: Actor<'_>,
    reason: &str,
) -> anyhow::Result<bool> {
    let mut transaction = crate::database::begin(pool).await.context("begin")?;
    if locked_owner(&mut transaction, policy).await? == tenant {
        return Ok(false); // an owner always consents
    }
    key::ensure_tenant(&mut transaction, tenant, actor, "for its consent", reason).await?;
    let given = sqlx::query_scalar!(
        "insert into tenant_consent (policy, tenant_id, given_by) values ($1, $2, $3)
         on conflict (policy, tenant_id) where withdrawn_at is null do nothing
         returning id",
        policy,
        tenant,
        actor.name
    )
    .fetch_optional(&mut *transaction)
    .await
    .context("store the consent")?;
    if let Some(id) = given {
        record_consent(&mut transaction, actor, "consent.give", id, reason).await?;
    }
    transaction.commit().await.context("commit")?;
    Ok(given.is_some())
}

/// Withdraws a tenant's consent. Nothing of the tenant is trained on from then on, what waits in a
/// cohort included; steps that are committed stay. Returns whether there was a consent.
pub async fn withdraw(
    pool: &PgPool,
    policy: &str,
    tenant: &str,
    actor: Actor<'_>,
    reason: &str,
) -> anyhow::Result<bool> {
    let mut transaction = crate::database::begin(pool).await.context("begin")?;
    ensure!(
        locked_owner(&mut transaction, policy).await? != tenant,
        "the policy {policy} belongs to the tenant {tenant}, so it is always trained on that tenant's data: pause its \
         runs with `springtide run pause`, or hand it over with `springtide tenant transfer`"
    );
    let withdrawn = sqlx::query_scalar!(
        "update tenant_consent set withdrawn_at = clock_timestamp(), withdrawn_by = $3
         where policy = $1 and tenant_id = $2 and withdrawn_at is null
         returning id",
        policy,
        tenant,
        actor.name
    )
    .fetch_optional(&mut *transaction)
    .await
    .context("withdraw the consent")?;
    if let Some(id) = withdrawn {
        record_consent(&mut transaction, actor, "consent.withdraw", id, reason).await?;
    }
    transaction.commit().await.context("commit")?;
    Ok(withdrawn.is_some())
}

/// All policies with their owners, by name.
pub async fn policies(pool: &PgPool) -> anyhow::Result<Vec<Owned>> {
    sqlx::query_as!(
        Owned,
        "select name as policy, tenant_id as tenant, created_at from policy order by name"
    )
    .fetch_all(pool)
    .await
    .context("list policies")
}

/// All consents, the newest first. `in_force`: only those that are not withdrawn.
pub async fn consents(pool: &PgPool, in_force: bool) -> anyhow::Result<Vec<Consent>> {
    sqlx::query_as!(
        Consent,
        "select policy, tenant_id as tenant, given_by, given_at, withdrawn_by, withdrawn_at
         from tenant_consent where not $1 or withdrawn_at is null order by given_at desc, id desc",
        in_force
    )
    .fetch_all(pool)
    .await
    .context("list consents")
}

/// Keeps consents to a policy as they are until the caller's transaction ends: a withdrawal waits
/// for the commit of a step, and a step that commits later sees the withdrawal.
pub async fn hold_consents(connection: &mut PgConnection, policy: &str) -> sqlx::Result<()> {
    sqlx::query!(
        "select from pg_advisory_xact_lock_shared(hashtextextended($1, 0))",
        format!("{LOCK}{policy}")
    )
    .execute(connection)
    .await?;
    Ok(())
}

/// Until the transaction ends, no step of any policy is committed.
pub async fn hold_steps(connection: &mut PgConnection) -> sqlx::Result<()> {
    let policies = sqlx::query_scalar!("select name from policy order by name");
    for policy in policies.fetch_all(&mut *connection).await? {
        lock_steps(connection, &policy).await?;
    }
    Ok(())
}

async fn lock_steps(connection: &mut PgConnection, policy: &str) -> sqlx::Result<()> {
    sqlx::query!(
        "select from pg_advisory_xact_lock(hashtextextended($1, 0))",
        format!("{LOCK}{policy}")
    )
    .execute(connection)
    .await?;
    Ok(())
}

/// The owner of a policy whose consents or owner the caller's transaction changes.
async fn locked_owner(connection: &mut PgConnection, policy: &str) -> anyhow::Result<String> {
    lock_steps(connection, policy)
        .await
        .context("wait for the commit of a step")?;
    let owner = sqlx::query_scalar!("select tenant_id from policy where name = $1", policy)
        .fetch_optional(connection)
        .await
        .context("read the policy's owner")?;
    match owner {
        Some(owner) => Ok(owner),
        None => bail!(
            "there is no policy {policy:?}; `springtide tenant list` shows all, and `springtide control` adds the one \
             that is configured when it starts"
        ),
    }
}

async fn record_policy(
    connection: &mut PgConnection,
    actor: Actor<'_>,
    action: &str,
    policy: &str,
    reason: &str,
) -> anyhow::Result<()> {
    let rows = policy_rows(connection, Some(policy)).await.context("read the policy")?;
    let row = rows.first().context("the policy is gone")?;
    let about = format!("belongs to {}", row.tenant);
    row.append(connection, actor, action, &about, reason)
        .await
        .context("append to the audit")
}

async fn record_consent(
    connection: &mut PgConnection,
    actor: Actor<'_>,
    action: &str,
    id: Uuid,
    reason: &str,
) -> anyhow::Result<()> {
    let rows = consent_rows(connection, Some(id)).await.context("read the consent")?;
    let (policy, row) = rows.first().context("the consent is gone")?;
    let about = format!("{policy} is trained on {}", row.tenant);
    row.append(connection, actor, action, &about, reason)
        .await
        .context("append to the audit")
}

/// All policies, to be compared with the audit's actions `policy.…`.
pub async fn audited_policies(connection: &mut PgConnection) -> sqlx::Result<Vec<Audited>> {
    policy_rows(connection, None).await
}

/// All consents, to be compared with the audit's actions `consent.…`.
pub async fn audited_consents(connection: &mut PgConnection) -> sqlx::Result<Vec<Audited>> {
    let rows = consent_rows(connection, None).await?;
    Ok(rows.into_iter().map(|(_, row)| row).collect())
}

async fn policy_rows(connection: &mut PgConnection, policy: Option<&str>) -> sqlx::Result<Vec<Audited>> {
    let rows = sqlx::query!(
        "select name, tenant_id from policy where $1::text is null or name = $1",
        policy
    )
    .fetch_all(connection)
    .await?;
    let audited = rows.into_iter().map(|row| Audited {
        fingerprint: Fingerprint::of("policy")
            .text(&*row.name)
            .text(&*row.tenant_id)
            .finish(),
        tenant: row.tenant_id,
        subject: row.name,
    });
    Ok(audited.collect())
}

/// With the policy of each.
async fn consent_rows(connection: &mut PgConnection, id: Option<Uuid>) -> sqlx::Result<Vec<(String, Audited)>> {
    let rows = sqlx::query!(
        "select id, policy, tenant_id, given_by, given_at, withdrawn_by, withdrawn_at
         from tenant_consent where $1::uuid is null or id = $1",
        id
    )
    .fetch_all(connection)
    .await?;
    let audited = rows.into_iter().map(|row| {
        let fingerprint = Fingerprint::of("tenant_consent")
            .bytes(&row.id.as_bytes()[..])
            .text(&*row.policy)
            .text(&*row.tenant_id)
            .text(&*row.given_by)
            .time(Some(row.given_at))
            .text(row.withdrawn_by.as_deref())
            .time(row.withdrawn_at)
            .finish();
        let audited = Audited {
            fingerprint,
            tenant: row.tenant_id,
            subject: row.id.to_string(),
        };
        (row.policy, audited)
    });
    Ok(audited.collect())
}
