//! What row-level security shows to a query about all generations.

use sqlx::PgConnection;

/// Of a statement about generations. The ledger reads all of them.
const STATEMENT_MS_MAX: &str = "20000";

/// Sets what row-level security shows to the rest of the transaction: rows of `tenant`, or all. Its
/// statements end in time, because a held snapshot keeps retention from dropping weeks.
pub async fn show(connection: &mut PgConnection, tenant: Option<&str>) -> sqlx::Result<()> {
    sqlx::query!(
        "select set_config('springtide.tenant', coalesce($1, ''), true) as tenant,
                set_config('springtide.all_tenants', case when $1 is null then 'on' else 'off' end, true) as all_tenants,
                set_config('statement_timeout', $2, true) as statement_timeout",
        tenant,
        STATEMENT_MS_MAX
    )
    .fetch_one(connection)
    .await?;
    Ok(())
}
