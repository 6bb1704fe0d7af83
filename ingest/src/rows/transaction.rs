//! How the transactions of this crate begin.

use sqlx::{PgPool, Postgres, Transaction};

/// Begins a transaction that Postgres aborts once it is idle for 10 s.
///
/// Otherwise a stalled process would keep its locks on partitions and generations for as long as
/// its connection lives. 10 s is longer than the log may take to acknowledge (5 s).
///
/// It uses indexes only. A connection keeps the plan of a statement. One that was made while a table
/// was empty, such as a new week, would read the whole table for each row until Postgres next
/// analyzes it.
pub(crate) async fn begin(pool: &PgPool) -> sqlx::Result<Transaction<'static, Postgres>> {
    // One message to the server, like a plain `begin`.
    edge::database::begin_with(
        pool,
        "begin; set local idle_in_transaction_session_timeout = '10s'; set local enable_seqscan = off",
    )
    .await
}

/// Like [`begin`], but the commit does not wait until it is flushed to disk.
///
/// Only for transactions that move offsets together with their rows. If the server crashes, it
/// loses rows and offsets together, and the sink reads them again from the log. A later commit that
/// does wait, such as a closure, flushes this one first, so nothing durable depends on rows that
/// can be lost.
pub(crate) async fn begin_unflushed(pool: &PgPool) -> sqlx::Result<Transaction<'static, Postgres>> {
    edge::database::begin_with(
        pool,
        "begin; set local synchronous_commit = off; set local idle_in_transaction_session_timeout = '10s'; \
         set local enable_seqscan = off",
    )
    .await
}
