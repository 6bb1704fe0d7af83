//! Assignments and experiments compared with the audit: who moves an alias or changes the arms by a
//! row in a table is found.

use super::decide::arms::{Draft, Source};
use super::tables;
use edge::audit::Actor;
use edge::audit::rows::{Audited, Fingerprint, Known};
use sqlx::PgConnection;
use uuid::Uuid;

/// What is wrong with the assignments, in words. Empty: nothing.
pub async fn faults(connection: &mut PgConnection) -> sqlx::Result<Vec<String>> {
    sqlx::query_file_scalar!("src/audited.sql").fetch_all(connection).await
}

/// The newest epoch of each policy. Assignments up to it were there before they were compared.
pub async fn known(connection: &mut PgConnection) -> sqlx::Result<Vec<Known>> {
    let epochs =
        sqlx::query!(r#"select policy, max(epoch) as "epoch!" from assignment group by policy order by policy"#)
            .fetch_all(connection)
            .await?;
    let known = epochs.into_iter().map(|row| Known {
        tenant: "default".to_owned(),
        subject: row.policy,
        detail: format!("assignments up to epoch {}", row.epoch),
    });
    Ok(known.collect())
}

/// All experiments, to be compared with the audit's actions `experiment.…`.
pub async fn experiments(connection: &mut PgConnection) -> sqlx::Result<Vec<Audited>> {
    read(connection, None).await
}

/// Writes the experiment that divides users from `epoch` on, and who did it into the audit. Call it
/// last in the transaction.
pub(super) async fn write_experiment(
    connection: &mut PgConnection,
    policy: &str,
    epoch: i64,
    draft: &Draft,
    actor: Actor<'_>,
) -> sqlx::Result<()> {
    let id = tables::write_experiment(connection, policy, epoch, draft, actor.name).await?;
    let rows = read(connection, Some(id)).await?;
    let row = rows.first().ok_or(sqlx::Error::RowNotFound)?;
    let action = match draft.source {
        Source::Configuration => "experiment.configure",
        Source::Request => "experiment.set",
    };
    let about = format!("policy {policy}, epoch {epoch}: {}", draft.text());
    row.append(connection, actor, action, &about, &draft.reason).await
}

/// No row changes. The tenant is the policy's owner.
async fn read(connection: &mut PgConnection, id: Option<Uuid>) -> sqlx::Result<Vec<Audited>> {
    let rows = sqlx::query!(
        r#"
        select e.id, e.policy, e.epoch, e.salt, e.arms::text as "arms!", e.source, e.actor, e.reason, e.created_at,
               coalesce(policy.tenant_id, 'default') as "tenant!"
        from experiment e left join policy on policy.name = e.policy
        where $1::uuid is null or e.id = $1
        "#,
        id
    )
    .fetch_all(connection)
    .await?;
    let audited = rows.into_iter().map(|row| Audited {
        tenant: row.tenant,
        subject: row.id.to_string(),
        fingerprint: Fingerprint::of("experiment")
            .bytes(&row.id.as_bytes()[..])
            .text(&*row.policy)
            .number(row.epoch)
            .text(&*row.salt)
            .text(&*row.arms)
            .text(&*row.source)
            .text(&*row.actor)
            .text(&*row.reason)
            .time(Some(row.created_at))
            .finish(),
    });
    Ok(audited.collect())
}
