//! Reads the release state from the tables and writes changes as the rows of one epoch. Reading,
//! deciding and writing happen in one transaction, under a lock that every writer of the policy's
//! assignments takes.

use super::decide::arms::{Draft, Experiment, Source};
use super::decide::{Alias, Change, Line, ReleaseState, Rules, Run};
use super::{ArmOptions, LEARNER, REALTIME};
use sqlx::types::Json;
use sqlx::{PgConnection, PgPool, Postgres, Transaction};
use std::collections::{BTreeMap, BTreeSet};
use uuid::Uuid;

/// First half of the advisory lock's key; the second is a hash of the policy's name.
const LOCK_CLASS: i32 = 0x5274_6173;

/// Begins a transaction and takes the lock on the policy's assignments.
pub async fn begin(pool: &PgPool, policy: &str) -> sqlx::Result<Transaction<'static, Postgres>> {
    let mut transaction = edge::database::begin(pool).await?;
    lock(&mut transaction, policy).await?;
    Ok(transaction)
}

/// The same on the release loop's own connection.
pub async fn begin_on<'a>(connection: &'a mut PgConnection, policy: &str) -> sqlx::Result<Transaction<'a, Postgres>> {
    #[expect(clippy::disallowed_methods, reason = "the connection is in no pool")]
    let mut transaction = sqlx::Connection::begin(connection).await?;
    lock(&mut transaction, policy).await?;
    Ok(transaction)
}

async fn lock(transaction: &mut PgConnection, policy: &str) -> sqlx::Result<()> {
    sqlx::query!(
        "select pg_advisory_xact_lock($1, hashtext($2)) as \"unit!: ()\"",
        LOCK_CLASS,
        policy
    )
    .fetch_one(transaction)
    .await?;
    Ok(())
}

pub async fn read(connection: &mut PgConnection, policy: &str, rules: Rules) -> sqlx::Result<ReleaseState> {
    let aliases = sqlx::query_as!(
        Alias,
        r#"select alias as "alias!", version as "version!", follows, branch as "branch!", withdrawn as "withdrawn!",
                  created_at as "created_at!"
           from alias where policy = $1 order by alias"#,
        policy
    )
    .fetch_all(&mut *connection)
    .await?;
    let lines = sqlx::query_as!(
        Line,
        r#"select l.line, l.head, l.branch,
                  (select min(v.serial) from version v where v.policy = l.policy and v.line = l.line) as "first!"
           from line l where l.policy = $1
           and exists (select from version v where v.policy = l.policy and v.line = l.line)
           order by l.line"#,
        policy
    )
    .fetch_all(&mut *connection)
    .await?;
    // a finished run matters only while its alias exists or it may become the candidate
    let runs = sqlx::query_as!(
        Run,
        r#"select id, kind, line, status, base_version, finished_at
           from run r
           where policy = $1 and kind <> 'realtime'
           and (status in ('running', 'pausing', 'paused')
                or exists (select from alias a where a.policy = r.policy and a.alias = r.line and not a.withdrawn)
                or (status = 'succeeded'
                    and finished_at > coalesce((select max(c.created_at) from alias c
                                                where c.policy = r.policy and c.alias = 'candidate'
                                                and not c.withdrawn), '-infinity')))
           order by created_at"#,
        policy
    )
    .fetch_all(&mut *connection)
    .await?;
    Ok(ReleaseState {
        rules,
        bad: BTreeSet::new(),
        aliases,
        lines,
        runs,
        parents: parents(&mut *connection, policy, rules).await?,
        experiment: experiment(&mut *connection, policy, i64::MAX).await?,
        canary_serves: super::canary::serves(connection, policy).await?,
    })
}

/// Parents of the newest versions: `champion_every` generations back from the line's head and from
/// `learner`.
async fn parents(connection: &mut PgConnection, policy: &str, rules: Rules) -> sqlx::Result<BTreeMap<i64, i64>> {
    let rows = sqlx::query!(
        r#"
        with recursive path (serial, parent, depth) as (
            select v.serial, v.parent, 1
            from version v
            where v.policy = $1
              and v.serial in (select head from line where policy = $1 and line = $2
                               union all
                               select version from alias where policy = $1 and alias = $3)
            union
            select v.serial, v.parent, path.depth + 1
            from path
            join version v on v.policy = $1 and v.serial = path.parent
            where path.depth < $4::bigint
        )
        select distinct serial as "serial!", parent as "parent!" from path where parent is not null
        "#,
        policy,
        REALTIME,
        LEARNER,
        i64::from(rules.champion_every)
    )
    .fetch_all(connection)
    .await?;
    Ok(rows.into_iter().map(|row| (row.serial, row.parent)).collect())
}

/// The experiment that divides users at `epoch`.
pub async fn experiment(connection: &mut PgConnection, policy: &str, epoch: i64) -> sqlx::Result<Option<Experiment>> {
    let row = sqlx::query!(
        r#"select id, epoch, salt, arms as "arms: Json<Vec<ArmOptions>>", source = 'request' as "by_request!", actor, reason,
                  created_at
           from experiment where policy = $1 and epoch <= $2 order by epoch desc limit 1"#,
        policy,
        epoch
    )
    .fetch_optional(connection)
    .await?;
    Ok(row.map(|row| Experiment {
        id: row.id,
        epoch: row.epoch,
        salt: row.salt,
        arms: row.arms.0,
        source: match row.by_request {
            true => Source::Request,
            false => Source::Configuration,
        },
        actor: row.actor,
        reason: row.reason,
        created_at: row.created_at,
    }))
}

/// Writes the experiment that divides users from `epoch` on. Returns its id.
pub async fn write_experiment(
    connection: &mut PgConnection,
    policy: &str,
    epoch: i64,
    draft: &Draft,
    actor: &str,
) -> sqlx::Result<Uuid> {
    sqlx::query_scalar!(
        "insert into experiment (policy, epoch, salt, arms, source, actor, reason)
         values ($1, $2, $3, $4, $5, $6, $7) returning id",
        policy,
        epoch,
        draft.salt,
        Json(&draft.arms) as _,
        draft.source.name(),
        actor,
        draft.reason
    )
    .fetch_one(connection)
    .await
}

/// The version that the alias served before its current one, of those that are not bad, nor trained on top of a
/// bad one.
pub async fn served_before(connection: &mut PgConnection, policy: &str, alias: &str) -> sqlx::Result<Option<i64>> {
    let served = sqlx::query_scalar!(
        r#"select a.version from assignment a
           where a.policy = $1 and a.alias = $2
           and a.version <> (select version from alias where policy = $1 and alias = $2)
           group by a.version
           order by max(a.epoch) desc"#,
        policy,
        alias
    )
    .fetch_all(&mut *connection)
    .await?;
    for version in served {
        if super::judgment::bad_ancestor(&mut *connection, policy, version)
            .await?
            .is_none()
        {
            return Ok(Some(version));
        }
    }
    Ok(None)
}

/// Writes `changes` as one new epoch, above `taken` and all earlier ones. Returns it with the release
/// id of each change.
pub async fn write(
    transaction: &mut Transaction<'_, Postgres>,
    policy: &str,
    taken: i64,
    kind: &str,
    actor: &str,
    changes: &[Change],
) -> sqlx::Result<(i64, Vec<Uuid>)> {
    let epoch = sqlx::query_scalar!(
        r#"select greatest(coalesce(max(epoch), 0), $2) + 1 as "epoch!" from assignment where policy = $1"#,
        policy,
        taken
    )
    .fetch_one(&mut **transaction)
    .await?;
    let mut releases = Vec::with_capacity(changes.len());
    for change in changes {
        sqlx::query!(
            "insert into assignment (policy, epoch, alias, version, follows, branch, withdrawn, share, clusters, shadow)
             values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)",
            policy,
            epoch,
            change.alias,
            change.to,
            change.follows,
            change.branch,
            change.withdrawn,
            change.share,
            change.clusters.as_deref(),
            change.shadow
        )
        .execute(&mut **transaction)
        .await?;
        let release = record(transaction, policy, kind, actor, change, Some(epoch)).await?;
        releases.push(release);
    }
    Ok((epoch, releases))
}

/// Writes the audit rows of one decision: release and transition. Without an epoch, it was refused.
pub async fn record(
    transaction: &mut Transaction<'_, Postgres>,
    policy: &str,
    kind: &str,
    actor: &str,
    change: &Change,
    epoch: Option<i64>,
) -> sqlx::Result<Uuid> {
    let status = if epoch.is_some() { "done" } else { "refused" };
    let release = sqlx::query_scalar!(
        "insert into release (policy, alias, from_version, to_version, kind, status)
         values ($1, $2, $3, $4, $5, $6) returning id",
        policy,
        change.alias,
        change.from,
        change.to,
        kind,
        status
    )
    .fetch_one(&mut **transaction)
    .await?;
    sqlx::query!(
        "insert into transition (release_id, epoch, actor, reason) values ($1, $2, $3, $4)",
        release,
        epoch,
        actor,
        change.reason
    )
    .execute(&mut **transaction)
    .await?;
    Ok(release)
}

/// Whether the policy has this version.
pub async fn has_version(connection: &mut PgConnection, policy: &str, serial: i64) -> sqlx::Result<bool> {
    let found = sqlx::query_scalar!(
        r#"select exists (select from version where policy = $1 and serial = $2) as "found!""#,
        policy,
        serial
    )
    .fetch_one(connection)
    .await?;
    Ok(found)
}
