//! Deletes what lies below the horizon in the tables beside `generation`, and events without a
//! generation by their age. In batches, each in its own transaction, so that a stop or a failure
//! loses one batch and nothing waits long.

use anyhow::Context;
use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::upkeep::partition::{self, Week};

/// Rows of one transaction.
const BATCH_ROWS: i64 = 10_000;
/// Identities of events are kept a day longer than needed: an event is received after it happened,
/// up to the skew of clocks.
const KEY_MARGIN: time::Duration = time::Duration::DAY;

/// Runs a statement that deletes a batch until it is at the end. Returns the number of rows.
macro_rules! in_batches {
    ($connection:expr, $file:literal, $from:expr, $until:expr) => {{
        let mut from = $from;
        let mut rows = 0;
        loop {
            let batch = sqlx::query_file!($file, from, $until, BATCH_ROWS)
                .fetch_one(&mut *$connection)
                .await
                .context($file)?;
            rows += batch.rows;
            match batch.next {
                Some(next) => from = next,
                None => break rows,
            }
        }
    }};
}

/// Deletes everything about generations below `until`, unless that has been done.
pub(super) async fn below_horizon(connection: &mut PgConnection, until: Uuid) -> anyhow::Result<()> {
    let cleaned = sqlx::query_scalar!("select cleaned_id from generation_horizon")
        .fetch_optional(&mut *connection)
        .await
        .context("read the horizon")?;
    let (Some(cleaned), Some(until_at)) = (cleaned, time_of(until)) else {
        return Ok(());
    };
    if cleaned.is_some_and(|cleaned| cleaned >= until) {
        return Ok(());
    }
    sqlx::query!("delete from open_generation where generation_id < $1", until)
        .execute(&mut *connection)
        .await
        .context("delete open generations")?;
    if !drop_trajectories(connection, until).await? {
        return Ok(());
    }
    let trajectories = in_batches!(connection, "src/upkeep/retention/trajectories.sql", Uuid::nil(), until);
    let payloads = in_batches!(connection, "src/upkeep/retention/payloads.sql", Uuid::nil(), until);
    let feedback = in_batches!(connection, "src/upkeep/retention/feedback.sql", Uuid::nil(), until);
    let keys = in_batches!(
        connection,
        "src/upkeep/retention/event_keys.sql",
        OffsetDateTime::UNIX_EPOCH,
        until_at - KEY_MARGIN
    );
    tracing::info!(
        trajectories,
        payloads,
        feedback,
        keys,
        "rows of expired generations were deleted"
    );
    sqlx::query!("update generation_horizon set cleaned_id = $1", until)
        .execute(connection)
        .await
        .context("note the end of the sweep")?;
    Ok(())
}

/// Counts and deletes the generations that lie below `until` in the default partition.
pub(super) async fn generations_without_week(connection: &mut PgConnection, until: Uuid) -> anyhow::Result<()> {
    let end = Uuid::from_u128(until.as_u128().saturating_sub(1));
    let mut after = Uuid::nil();
    while after < end {
        let last = sqlx::query_scalar!(
            "select id from generation_default where id > $1 and id < $2 order by id offset $3 limit 1",
            after,
            until,
            BATCH_ROWS - 1
        )
        .fetch_optional(&mut *connection)
        .await
        .context("find generations without a week")?;
        let last = last.unwrap_or(end);
        let rows = sqlx::query_file_scalar!("src/upkeep/retention/default.sql", after, last, until)
            .fetch_one(&mut *connection)
            .await
            .context("delete generations without a week")?;
        metrics::counter!("springtide_ingest_expired_total", "why" => "age").increment(rows.unsigned_abs());
        after = last;
    }
    Ok(())
}

/// Drops the partitions of trajectories below `until`. Returns false if a reader is in the way.
async fn drop_trajectories(connection: &mut PgConnection, until: Uuid) -> anyhow::Result<bool> {
    let names = sqlx::query_scalar!(
        "select c.relname::text as \"name!\" from pg_inherits i join pg_class c on c.oid = i.inhrelid \
         where i.inhparent = 'trajectory'::regclass"
    )
    .fetch_all(&mut *connection)
    .await
    .context("list partitions of trajectories")?;
    for name in names {
        // The default partition has no end.
        if Week::end_of_trajectories(&name).is_none_or(|end| end > until) {
            continue;
        }
        let dropped = sqlx::query!("select drop_trajectories($1)", name);
        let dropped = partition::unless_busy(dropped.execute(&mut *connection).await, &name);
        if dropped.with_context(|| format!("drop {name}"))?.is_none() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Deletes feedback, retractions and episode ends that were stored before this time and are about
/// nothing that is stored. They may hold a user's text.
pub(super) async fn unattached(connection: &mut PgConnection, stored_before: OffsetDateTime) -> anyhow::Result<()> {
    let epoch = OffsetDateTime::UNIX_EPOCH;
    let feedback = in_batches!(
        connection,
        "src/upkeep/retention/unattached_feedback.sql",
        epoch,
        stored_before
    );
    let retractions = in_batches!(
        connection,
        "src/upkeep/retention/unattached_retractions.sql",
        epoch,
        stored_before
    );
    let ends = in_batches!(
        connection,
        "src/upkeep/retention/unattached_ends.sql",
        epoch,
        stored_before
    );
    for (kind, rows) in [
        ("feedback", feedback),
        ("retraction", retractions),
        ("episode_end", ends),
    ] {
        metrics::counter!("springtide_ingest_unattached_expired_total", "kind" => kind).increment(rows.unsigned_abs());
    }
    Ok(())
}

/// The time in the first 48 bits of an id or a bound. `None`: the nil id.
pub(super) fn time_of(id: Uuid) -> Option<OffsetDateTime> {
    let milliseconds = i128::try_from(id.as_u128() >> 80)
        .ok()
        .filter(|milliseconds| *milliseconds > 0)?;
    OffsetDateTime::from_unix_timestamp_nanos(milliseconds * 1_000_000).ok()
}
