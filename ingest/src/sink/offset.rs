//! `consumer_offset`: where each partition stands, who may move it, and up to which moment its events are in the tables.

use std::collections::BTreeMap;

use sqlx::{PgConnection, PgPool};
use time::OffsetDateTime;

/// A topic and one of its partitions.
pub(super) type Slot = (String, i32);
/// The fence under which each owned partition may be moved, and how far its owner has moved it.
pub(super) type Claims = BTreeMap<Slot, Claim>;
/// The first offset of each partition that is not in the tables.
pub(super) type Next = BTreeMap<Slot, i64>;

/// The right to move one partition, until someone else claims it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claim {
    pub next_offset: i64,
    pub fence: i64,
}

/// Whether the tables were filled from another cluster and never from this one: then the tables' offsets mean nothing here.
pub(crate) async fn other_cluster(pool: &PgPool, cluster_id: &str, topics: &[String]) -> sqlx::Result<Option<String>> {
    let row = sqlx::query_scalar!(
        "select cluster_id from consumer_offset o \
         where consumer = 'sink' and topic = any($2) and next_offset > 0 and cluster_id <> $1 \
           and not exists (select 1 from consumer_offset \
                           where consumer = 'sink' and topic = o.topic and cluster_id = $1) \
         limit 1",
        cluster_id,
        topics
    )
    .fetch_optional(pool)
    .await?;
    Ok(row)
}

/// Makes sure that each partition has its row, starting at the given first offset of the log. Without all of them the
/// closer would not know that a partition is missing.
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

/// Takes registered partitions over: from here on, transactions under an older fence are refused.
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

/// Moves a claimed partition to another offset of another log, as an operator allowed.
pub(super) async fn jump(
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

/// A partition's row while it is locked: nobody moves it, nor says that more of it is in the tables.
pub(super) struct Held {
    pub claim: Claim,
    pub caught_up_to: Option<OffsetDateTime>,
}

/// The rows of these partitions, held until the transaction ends, in an order that cannot deadlock.
pub(super) async fn lock(
    connection: &mut PgConnection,
    cluster_id: &str,
    slots: impl Iterator<Item = &Slot>,
) -> sqlx::Result<BTreeMap<Slot, Held>> {
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
    let held = rows.into_iter().map(|row| {
        let held = Held {
            claim: Claim {
                next_offset: row.next_offset,
                fence: row.fence,
            },
            caught_up_to: row.caught_up_to,
        };
        ((row.topic, row.partition), held)
    });
    Ok(held.collect())
}

/// Moves locked partitions on.
pub(super) async fn advance(connection: &mut PgConnection, cluster_id: &str, next: &Next) -> sqlx::Result<()> {
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

/// One partition's news: under this fence, everything up to this moment is in the tables, as long as they reach this offset.
pub(super) struct Progress {
    pub slot: Slot,
    pub claim: Claim,
    pub caught_up_to: OffsetDateTime,
}

/// Notes progress where the fence still holds and nothing was lost with the database's last transactions; for how many.
pub(super) async fn note_progress(pool: &PgPool, cluster_id: &str, progress: &[Progress]) -> sqlx::Result<u64> {
    let (topics, numbers) = columns(progress.iter().map(|progress| &progress.slot));
    let fences: Vec<i64> = progress.iter().map(|progress| progress.claim.fence).collect();
    let offsets: Vec<i64> = progress.iter().map(|progress| progress.claim.next_offset).collect();
    let times: Vec<_> = progress.iter().map(|progress| progress.caught_up_to).collect();
    let noted = sqlx::query!(
        "update consumer_offset o \
         set caught_up_to = greatest(o.caught_up_to, p.caught_up_to), updated_at = now() \
         from unnest($2::text[], $3::int[], $4::bigint[], $5::bigint[], $6::timestamptz[]) \
              as p (topic, partition, fence, next_offset, caught_up_to) \
         where o.consumer = 'sink' and o.cluster_id = $1 \
           and o.topic = p.topic and o.partition = p.partition and o.fence = p.fence and o.next_offset >= p.next_offset",
        cluster_id,
        &topics,
        &numbers,
        &fences,
        &offsets,
        &times
    )
    .execute(pool)
    .await?;
    Ok(noted.rows_affected())
}

/// The moment up to which every event of every partition is in the tables; `None` while one partition has no such moment.
pub async fn caught_up_to(pool: &PgPool, cluster_id: &str, topics: &[String]) -> sqlx::Result<Option<OffsetDateTime>> {
    sqlx::query_scalar!(
        "select case when bool_and(caught_up_to is not null) then min(caught_up_to) end \
         from consumer_offset where consumer = 'sink' and cluster_id = $1 and topic = any($2)",
        cluster_id,
        topics
    )
    .fetch_one(pool)
    .await
}

/// The same of the log that was read last, for whoever does not know which log that is.
pub async fn last_caught_up_to(pool: &PgPool, topics: &[String]) -> sqlx::Result<Option<OffsetDateTime>> {
    sqlx::query_scalar!(
        "select case when bool_and(caught_up_to is not null) then min(caught_up_to) end \
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
