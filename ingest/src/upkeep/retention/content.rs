//! Takes the content from generations that are older than their tenant or surface keeps it.

use anyhow::Context;
use sqlx::PgConnection;
use time::OffsetDateTime;

use crate::options::ContentRetention;
use crate::upkeep::partition;

/// Rows of one transaction.
const BATCH_ROWS: i32 = 1_000;

/// Goes on where an earlier call ended, in any process. Busy rows are left to the next call.
pub(super) async fn forget(
    connection: &mut PgConnection,
    rules: &[ContentRetention],
    now: OffsetDateTime,
) -> anyhow::Result<()> {
    for rule in rules {
        let tenant = rule.tenant.as_deref().unwrap_or_default();
        let surface = rule.surface.as_deref().unwrap_or_default();
        let before = now - time::Duration::days(rule.days.into());
        loop {
            let left = sqlx::query_scalar!(
                r#"select forget_content($1, $2, $3, $4) as "left!""#,
                tenant,
                surface,
                before,
                BATCH_ROWS
            );
            let left = partition::unless_busy(left.fetch_one(&mut *connection).await, "generation");
            if !left.context("take content from old generations")?.unwrap_or(false) {
                break;
            }
        }
    }
    Ok(())
}
