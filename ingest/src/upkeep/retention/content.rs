//! Takes the content from generations that are older than their tenant or surface keeps it.

use std::time::{Duration, Instant};

use anyhow::Context;
use sqlx::PgConnection;
use time::OffsetDateTime;

use crate::options::ContentRetention;
use crate::upkeep::partition;

/// Rows of one transaction.
const BATCH_ROWS: i32 = 1_000;
/// A first walk reads all generations. Meanwhile weeks must go on to expire.
const ROUND_MAX: Duration = Duration::from_secs(20);

/// Goes on where an earlier call ended, in any process. Returns whether it reached the end: not if time was up, or rows
/// were busy.
pub(super) async fn forget(
    connection: &mut PgConnection,
    rules: &[ContentRetention],
    now: OffsetDateTime,
) -> anyhow::Result<bool> {
    let until = Instant::now() + ROUND_MAX;
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
            match left.context("take content from old generations")? {
                Some(false) => break,
                Some(true) if Instant::now() < until => {}
                Some(true) | None => return Ok(false),
            }
        }
    }
    Ok(true)
}
