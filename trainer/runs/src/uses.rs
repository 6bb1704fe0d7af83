//! What runs used trajectories for: the table `trajectory_use`.
//!
//! A generation has at most one disposition, but any number of uses. Each is a row, written in the
//! transaction that makes the use count: the commit of a step, or the end of an evaluation or
//! export.

use sqlx::{PgConnection, PgPool};
use uuid::Uuid;

/// Rows deleted by one statement.
const DELETED_AT_ONCE_MAX: i64 = 5_000;
/// The step of a run that trains nothing.
pub const ONLY_STEP: i64 = 1;

/// What a trajectory was used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// A step had it in its cohort.
    Trained,
    /// A run measured a version on it.
    Evaluated,
    /// A run copied it into a file.
    Exported,
}

impl Purpose {
    fn as_str(self) -> &'static str {
        match self {
            Purpose::Trained => "trained",
            Purpose::Evaluated => "evaluated",
            Purpose::Exported => "exported",
        }
    }
}

/// Writes a use of each generation, in the caller's transaction.
pub async fn insert(
    connection: &mut PgConnection,
    run: Uuid,
    step: i64,
    purpose: Purpose,
    generations: &[Uuid],
) -> Result<(), sqlx::Error> {
    sqlx::query!(
        r#"
        insert into trajectory_use (generation_id, run_id, step, purpose)
        select id, $2, $3, $4 from unnest($1::uuid[]) as used (id)
        "#,
        generations,
        run,
        step,
        purpose.as_str()
    )
    .execute(connection)
    .await?;
    Ok(())
}

/// Deletes uses of generations past retention. Returns how many.
pub async fn sweep_expired(pool: &PgPool) -> Result<u64, sqlx::Error> {
    let done = sqlx::query!(
        "delete from trajectory_use where generation_id in (
             select generation_id from trajectory_use
             where generation_id < (select until_id from generation_horizon)
             order by generation_id limit $1)",
        DELETED_AT_ONCE_MAX
    )
    .execute(pool)
    .await?;
    Ok(done.rows_affected())
}
