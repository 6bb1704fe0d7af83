//! `consumer_offset`: the offset of each partition, its owner's fence, and up to when the tables
//! hold its events.

use std::collections::BTreeMap;

use sqlx::{PgConnection, PgPool};
use time::OffsetDateTime;

/// The log from which the tables are filled.
#[derive(Debug, Clone)]
pub(crate) struct EventLog {
    pub cluster_id: String,
    /// The event topics.
    pub topics: Vec<String>,
}

/// A topic and one of its partitions.
pub(crate) type Slot = (String, i32);
/// The claims of owned partitions.
pub(crate) type Claims = BTreeMap<Slot, Claim>;
/// The first offset of each partition that the tables do not have yet.
pub(crate) type Next = BTreeMap<Slot, i64>;

/// The database's time.
pub(crate) async fn now(pool: &PgPool) -> sqlx::Result<OffsetDateTime> {
    let now = sqlx::query_scalar!("select clock_timestamp() as \"now!\"");
    now.fetch_one(pool).await
}

/// The right to move a partition's offset, until another sink claims it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claim {
    pub next_offset: i64,
    pub fence: i64,
}

/// Another cluster from which a topic was read, if the topic was never read from this one. Offsets
/// of that cluster do not apply here.
pub(crate) async fn other_cluster(pool: &PgPool, log: &EventLog) -> sqlx::Result<Option<String>> {
    let row = sqlx::query_scalar!(
        "select cluster_id from consumer_offset o \
         where consumer = 'sink' and topic = any($2) and next_offset > 0 and cluster_id <> $1 \
           and not exists (select 1 from consumer_offset \
                           where consumer = 'sink' and topic = o.topic and cluster_id = $1) \
         limit 1",
        log.cluster_id,
        &log.topics
    )
    .fetch_optional(pool)
    .await?;
    Ok(row)
}

/// Ensures that each partition has a row, which starts at the given first offset of the log. The
/// closer needs the rows of all partitions.
pub(crate) async fn register(
    pool: &PgPool,
    cluster_id: &str,
    partitions: &BTreeMap<(String, i32), i64>,
) -> sqlx::Result<()> {
    let (topics, numbers) = columns(partitions.keys());
    let first: Vec<i64> = partitions.values().copied().collect();
    sqlx::query!(
        "insert into consumer_offset (consumer, cluster_id, topic, partition, next_offset) \
         select 'sink', $1, topic, partition, first \
         from unnest($2::text[], $3::int[], $4::bigint[]) as p (topic, partition, first) \
         on conflict do nothing",
        cluster_id,
        &topics,
        &numbers,
        &first
    )
    .execute(pool)
    .await?;
    Ok(())
}

/// Claims registered partitions. From now on, transactions with an older fence are refused.
pub async fn claim(
    pool: &PgPool,
    cluster_id: &str,
    partitions: &[(String, i32)],
) -> sqlx::Result<BTreeMap<(String, i32), Claim>> {
    let (topics, numbers) = columns(partitions.iter());
    let rows = sqlx::query!(
        "update consumer_offset o set fence = o.fence + 1, updated_at = now() \
         from unnest($2::text[], $3::int[]) as p (topic, partition) \
         where o.consumer = 'sink' and o.cluster_id = $1 \
           and o.topic = p.topic and o.partition = p.partition \
         returning o.topic, o.partition, o.next_offset, o.fence",
        cluster_id,
        &topics,
        &numbers
    )
    .fetch_all(pool)
    .await?;
    let claims = rows.into_iter().map(|row| {
        let claim = Claim {
            next_offset: row.next_offset,
            fence: row.fence,
        };
        ((row.topic, row.partition), claim)
    });
    Ok(claims.collect())
}

/// Moves a claimed partition to an offset of another log. The operator must have allowed it.
pub(crate) async fn jump(
    pool: &PgPool,
    cluster_id: &str,
    (topic, partition): &Slot,
    fence: i64,
    next_offset: i64,
) -> sqlx::Result<()> {
    sqlx::query!(
        "update consumer_offset set next_offset = $5, updated_at = now() \
         where consumer = 'sink' and cluster_id = $1 and topic = $2 and partition = $3 and fence = $4",
        cluster_id,
        topic,
        partition,
        fence,
        next_offset
    )
    .execute(pool)
    .await?;
    Ok(())
}

/// A locked row. Its offset and `caught_up_to` cannot change.
pub(crate) struct Locked {
    pub claim: Claim,
    pub caught_up_to: Option<OffsetDateTime>,
}

/// Locks the rows of these partitions until the transaction ends, in an order that cannot deadlock.
pub(crate) async fn lock(
    connection: &mut PgConnection,
    cluster_id: &str,
    slots: impl Iterator<Item = &Slot>,
) -> sqlx::Result<BTreeMap<Slot, Locked>> {
    let (topics, numbers) = columns(slots);
    let rows = sqlx::query!(
        "select topic, partition, next_offset, fence, caught_up_to from consumer_offset \
         where consumer = 'sink' and cluster_id = $1 \
           and (topic, partition) in (select * from unnest($2::text[], $3::int[])) \
         order by topic, partition for update",
        cluster_id,
        &topics,
        &numbers
    )
    .fetch_all(connection)
    .await?;
    let locked = rows.into_iter().map(|row| {
        let locked = Locked {
            claim: Claim {
                next_offset: row.next_offset,
                fence: row.fence,
            },
            caught_up_to: row.caught_up_to,
        };
        ((row.topic, row.partition), locked)
    });
    Ok(locked.collect())
}

/// Moves the offsets of locked partitions.
pub(crate) async fn advance(connection: &mut PgConnection, cluster_id: &str, next: &Next) -> sqlx::Result<()> {
    let (topics, numbers) = columns(next.keys());
    let offsets: Vec<i64> = next.values().copied().collect();
    sqlx::query!(
        "update consumer_offset o set next_offset = p.next_offset, updated_at = now() \
         from unnest($2::text[], $3::int[], $4::bigint[]) as p (topic, partition, next_offset) \
         where o.consumer = 'sink' and o.cluster_id = $1 \
           and o.topic = p.topic and o.partition = p.partition",
        cluster_id,
        &topics,
        &numbers,
        &offsets
    )
    .execute(connection)
    .await?;
    Ok(())
}

/// If the tables reach the claim's offset under its fence, they hold all events from before
/// `caught_up_to`.
pub(crate) struct Progress {
    pub slot: Slot,
    pub claim: Claim,
    /// The log has no events between the claim's offset and this one, only markers of transactions.
    pub reached: i64,
    /// By the database's clock.
    pub caught_up_to: OffsetDateTime,
}

/// Stores progress where the fence is still valid and the database has not lost transactions.
/// Returns the number of partitions.
pub(crate) async fn store_progress(pool: &PgPool, cluster_id: &str, progress: &[Progress]) -> sqlx::Result<u64> {
    let (topics, numbers) = columns(progress.iter().map(|progress| &progress.slot));
    let fences: Vec<i64> = progress.iter().map(|progress| progress.claim.fence).collect();
    let offsets: Vec<i64> = progress.iter().map(|progress| progress.claim.next_offset).collect();
    let reached: Vec<i64> = progress.iter().map(|progress| progress.reached).collect();
    let times: Vec<_> = progress.iter().map(|progress| progress.caught_up_to).collect();
    // An earlier time replaces a later one, because that was of a clock that ran ahead.
    let stored = sqlx::query!(
        "update consumer_offset o \
         set caught_up_to = p.caught_up_to, next_offset = greatest(o.next_offset, p.reached), updated_at = now() \
         from unnest($2::text[], $3::int[], $4::bigint[], $5::bigint[], $6::bigint[], $7::timestamptz[]) \
              as p (topic, partition, fence, next_offset, reached, caught_up_to) \
         where o.consumer = 'sink' and o.cluster_id = $1 \
           and o.topic = p.topic and o.partition = p.partition and o.fence = p.fence and o.next_offset >= p.next_offset",
        cluster_id,
        &topics,
        &numbers,
        &fences,
        &offsets,
        &reached,
        &times
    )
    .execute(pool)
    .await?;
    Ok(stored.rows_affected())
}

/// How far the tables are, by the database's clock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CaughtUp {
    /// The tables hold all events of all partitions up to this time.
    pub to: OffsetDateTime,
    /// All partitions have moved since this time.
    pub moved_since: OffsetDateTime,
    /// When this was read.
    pub read_at: OffsetDateTime,
}

/// `None` if it is unknown for a partition, because nobody has read it yet or because its time lies
/// ahead.
pub(crate) async fn caught_up(pool: &PgPool, log: &EventLog) -> sqlx::Result<Option<CaughtUp>> {
    let row = sqlx::query!(
        "select case when bool_and(caught_up_to is not null and caught_up_to <= clock_timestamp()) \
                     then min(caught_up_to) end as \"to\", \
                min(updated_at) as moved_since, clock_timestamp() as \"read_at!\" \
         from consumer_offset where consumer = 'sink' and cluster_id = $1 and topic = any($2)",
        log.cluster_id,
        &log.topics
    )
    .fetch_one(pool)
    .await?;
    Ok(row.to.zip(row.moved_since).map(|(to, moved_since)| CaughtUp {
        to,
        moved_since,
        read_at: row.read_at,
    }))
}

/// [`CaughtUp::to`] alone.
pub(crate) async fn caught_up_to(pool: &PgPool, log: &EventLog) -> sqlx::Result<Option<OffsetDateTime>> {
    Ok(caught_up(pool, log).await?.map(|caught_up| caught_up.to))
}

/// Like [`CaughtUp::to`], for the cluster that was read last.
pub async fn last_caught_up_to(pool: &PgPool, topics: &[String]) -> sqlx::Result<Option<OffsetDateTime>> {
    sqlx::query_scalar!(
        "select case when bool_and(caught_up_to is not null and caught_up_to <= clock_timestamp()) \
                     then min(caught_up_to) end \
         from consumer_offset where consumer = 'sink' and topic = any($1) and cluster_id = ( \
             select cluster_id from consumer_offset where consumer = 'sink' and topic = any($1) \
             order by updated_at desc limit 1)",
        topics
    )
    .fetch_one(pool)
    .await
}

fn columns<'a>(slots: impl Iterator<Item = &'a (String, i32)>) -> (Vec<String>, Vec<i32>) {
    slots.cloned().unzip()
}
