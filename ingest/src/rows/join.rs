//! The join protocol: what keeps sink and closer consistent when feedback about a generation is
//! stored while the generation closes.
//!
//! Invariants:
//! 1. A closure either used a feedback event, or the event is marked late. The same holds for
//!    retractions. Feedback about an episode whose generations are trajectories of their own is late
//!    when none of them is open any more: those that had closed before did not use it.
//! 2. The closer never waits for the sink. It leaves a contested generation to its next round. Only
//!    the sink may wait for the closer, so the two cannot deadlock.
//! 3. Sink transactions lock rows in the order of their ids, so they cannot deadlock with each
//!    other.
//! 4. A consequence of two events is found whichever is stored first, also if two concurrent
//!    transactions store them ([`settle`]).
//!
//! For feedback about a generation, the sink does one of three things before it stores it
//! ([`hold`]):
//!
//! ```text
//!  its generation is                                               the sink
//!  open, not due, and its surface never closes early               does nothing
//!  open otherwise                                                  locks its row `for share`
//!  not visible as an open row (closed, or being stored just now)   announces its id
//! ```
//!
//! Feedback about an episode, and a retraction of such feedback, always announces the episode's id. The
//! closer asks about the episode of everything that it closes.
//!
//! Where an episode is the trajectory, one row of `open_episode` stands for all of its turns:
//!
//! 5. Sink and closer lock the episode's row, never the rows of its turns. A sink that stores a turn
//!    locks it too, so no turn is added while the episode closes.
//! 6. Sinks lock episodes before generations, in the order of their ids and all at once
//!    ([`hold::hold_episodes`]), and nothing waits for an episode while it holds a generation that
//!    others wait for. What a sink finds out later about other episodes, it does after its commit
//!    ([`settle`]). Only episodes whose first turns two sinks store at the same time may deadlock.
//!    Postgres then aborts one of the two transactions, which is repeated.
//! 7. A turn that is stored after its episode has closed opens a row of its own. The closer finds that
//!    the episode has closed, and censors the turn as late.
//! 8. An episode with too many turns is marked as full. Its further turns wait for no lock: they are
//!    strays, which close alone and are late.
//!
//! "Nothing" is safe because the sink's transaction also locks the offsets of its partitions. Until
//! it ends, these partitions are not marked as caught up further. The closer closes nothing beyond
//! the time up to which all partitions are caught up.
//!
//! The closer locks its rows `for update skip locked`, so it skips rows that the sink holds. A sink
//! that waited for the closer sees the closure and marks its event late. Announced ids work where
//! there is no row to lock: the closer skips them ([`ids_being_written`]). Retractions announce the
//! ids of their feedback in the same way, because that feedback may not be stored yet
//! ([`signals`]).
//!
//! An announcement matters only if the sink could not see what it is about. The closer asks about a
//! thousand turns at once, and announced ids share few locks, so it asks only about rows that a sink
//! which is still writing may not have seen ([`visible`]). Otherwise a long episode would meet
//! somebody's announcement in every round.

pub(crate) mod hold;
pub(crate) mod settle;
pub(crate) mod signals;
pub(crate) mod visible;

use std::collections::HashSet;

use sqlx::PgConnection;
use uuid::Uuid;

use crate::rows::insert::TenantId;

/// Announces that this transaction stores something about these ids of tenants: feedback about
/// generations or episodes without a visible open row, or retractions of feedback.
///
/// Ids share 4,096 advisory locks, because the server has little memory for locks. A collision only
/// delays a generation to the closer's next round.
pub(crate) async fn announce_writes(connection: &mut PgConnection, ids: &[TenantId]) -> sqlx::Result<()> {
    let (tenants, ids): (Vec<String>, Vec<Uuid>) = ids.iter().cloned().unzip();
    sqlx::query!(
        "select pg_advisory_xact_lock_shared(1, part) \
         from (select distinct hashtext(tenant_id || id) & 4095 as part \
               from unnest($1::text[], $2::uuid[]) as written (tenant_id, id) order by 1) as parts",
        &tenants,
        &ids
    )
    .execute(connection)
    .await?;
    Ok(())
}

/// The ids that other transactions have announced. Does not wait.
///
/// Until this transaction ends, no other transaction can announce the other ids.
pub(crate) async fn ids_being_written(
    connection: &mut PgConnection,
    ids: &[TenantId],
) -> sqlx::Result<HashSet<TenantId>> {
    let (tenants, ids): (Vec<String>, Vec<Uuid>) = ids.iter().cloned().unzip();
    let announced = sqlx::query!(
        "select tenant_id as \"tenant_id!\", id as \"id!\" from unnest($1::text[], $2::uuid[]) as asked (tenant_id, id) \
         where not pg_try_advisory_xact_lock(1, hashtext(tenant_id || id) & 4095)",
        &tenants,
        &ids
    )
    .fetch_all(connection)
    .await?;
    Ok(announced.into_iter().map(|row| (row.tenant_id, row.id)).collect())
}
