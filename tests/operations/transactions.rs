//! Transactions whose caller is dropped while they begin.

use fixture::Stack;
use sqlx::postgres::PgPoolOptions;
use sqlx::{Executor, Row};

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_that_is_dropped_leaves_no_connection_in_a_transaction() {
    let stack = Stack::start("begun").await;
    let pool = PgPoolOptions::new().max_connections(1);
    let pool = pool.connect(&stack.database_url).await.unwrap();
    for polls in 0..400 {
        tokio::select! {
            biased;
            begun = edge::database::begin(&pool) => drop(begun.unwrap()),
            () = polled(polls) => {}
        }
        let read = pool.fetch_one("select now() = statement_timestamp()").await.unwrap();
        assert!(
            read.get::<bool, _>(0),
            "dropped after {polls} polls, it goes on around the next statement"
        );
    }
}

/// Is pending this often.
async fn polled(times: u32) {
    for _ in 0..times {
        tokio::task::yield_now().await;
    }
}
