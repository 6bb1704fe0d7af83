//! How this crate's transactions begin, and how sink and closer keep out of each other's way where there is no row to lock.

use std::collections::HashSet;

use sqlx::{PgConnection, PgPool, Postgres, Transaction};
use uuid::Uuid;

/// A transaction whose locks end soon after its process has stopped working on it: whoever was stopped, or lost its
/// machine, in the middle would otherwise keep its partitions and generations from everybody else for as long as its
/// connection lives. Longer than the log may take to acknowledge (5 s).
pub(crate) async fn begin(pool: &PgPool) -> sqlx::Result<Transaction<'static, Postgres>> {
    // One message to the server, as a bare `begin` is.
    pool.begin_with("begin; set local idle_in_transaction_session_timeout = '10s'")
        .await
}

/// The same for a transaction that moves offsets with its rows, and does not wait until it is flushed. What a crash of the
/// server takes back, the offsets with it, is still in the log; the sink notices and reads it again. Whatever is committed later
/// and waits, as a closure does, flushes it first, so nothing is built on what could go.
pub(crate) async fn begin_repeatable(pool: &PgPool) -> sqlx::Result<Transaction<'static, Postgres>> {
    pool.begin_with("begin; set local synchronous_commit = off; set local idle_in_transaction_session_timeout = '10s'")
        .await
}

/// Until its end, this transaction stores feedback about generations or episodes of which it sees nothing open, or takes
/// feedback back. One of 4,096 locks stands for an id: the server's room for locks is small, and two ids that share one cost
/// nothing but a round of the closer.
pub(crate) async fn expect(connection: &mut PgConnection, ids: &[Uuid]) -> sqlx::Result<()> {
    sqlx::query!(
        "select pg_advisory_xact_lock_shared(1, part) \
         from (select distinct hashtext(id::text) & 4095 as part from unnest($1::uuid[]) as id order by 1) as parts",
        ids
    )
    .execute(connection)
    .await?;
    Ok(())
}

/// Those about which another transaction stores something just now, without a row that could be locked; the others are this
/// transaction's until its end. Waits for nobody.
pub(crate) async fn expected(connection: &mut PgConnection, ids: &[Uuid]) -> sqlx::Result<HashSet<Uuid>> {
    let expected = sqlx::query_scalar!(
        "select id as \"id!\" from unnest($1::uuid[]) as id \
         where not pg_try_advisory_xact_lock(1, hashtext(id::text) & 4095)",
        ids
    )
    .fetch_all(connection)
    .await?;
    Ok(expected.into_iter().collect())
}
