//! Assignments compared with the audit: who moves an alias by a row in the table is found.

use edge::audit::rows::Known;
use sqlx::PgConnection;

/// What is wrong with the assignments, in words. Empty: nothing.
pub async fn faults(connection: &mut PgConnection) -> sqlx::Result<Vec<String>> {
    sqlx::query_file_scalar!("src/release/audited.sql")
        .fetch_all(connection)
        .await
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
