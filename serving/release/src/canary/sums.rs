//! Sums of what users did with a canary's answers: one row per side, period and user. A look reads these and
//! what was stored since, so it takes no longer after many answers than after few.
//!
//! An answer is added by the time at which it was stored, a trajectory by the time at which it closed: rows
//! of both are written once. What was stored within [`SETTLED_AFTER`] is not added yet, because the
//! transaction that writes it may not have ended.

use super::evidence::{Answers, begin};
use sqlx::PgConnection;
use std::time::{Duration, Instant};
use time::OffsetDateTime;
use uuid::Uuid;

/// Far longer than a transaction of the sink or of the closer takes.
const SETTLED_AFTER: Duration = Duration::from_secs(60);
/// What is younger is read as it is.
const STEP_MIN: Duration = Duration::from_secs(30);
/// A replica's clock may be so much ahead of the database's.
pub const CLOCKS_DIFFER_MAX: Duration = Duration::from_secs(3600);
/// How long one look adds at most.
const LOOK_MAX: Duration = Duration::from_secs(10);
/// Of sums/counted.sql.
const COUNTED_MAX: i64 = 100_000;
/// A step that takes longer is followed by a shorter one.
const STEP_TAKES_MAX: Duration = Duration::from_millis(500);

/// Adds what has settled. Fails if more is left than one look adds: the next one goes on.
pub async fn advance(connection: &mut PgConnection, answers: &Answers<'_>) -> sqlx::Result<()> {
    let (began, mut step) = (Instant::now(), STEP_MIN);
    loop {
        let step_began = Instant::now();
        let (until, settled) = add(connection, answers, step).await?;
        // it looks at all that wait, so only once everything is added
        if until >= settled && count(connection, answers).await? < COUNTED_MAX {
            return Ok(());
        }
        if began.elapsed() > LOOK_MAX {
            let left = format!("what users did is summed up until {until} so far; the next look goes on");
            return Err(sqlx::Error::Protocol(left));
        }
        step = match step_began.elapsed() > STEP_TAKES_MAX {
            true => (step / 2).max(STEP_MIN),
            false => step * 2,
        };
    }
}

/// Adds what was stored in the next `step`. Returns until when everything is added, and until when it could be.
async fn add(
    connection: &mut PgConnection,
    answers: &Answers<'_>,
    step: Duration,
) -> sqlx::Result<(OffsetDateTime, OffsetDateTime)> {
    let mut transaction = begin(connection).await?;
    let canary = answers.canary;
    lock(&mut transaction, canary).await?;
    let summed = sqlx::query!("select since, until_at from canary_sums where canary_id = $1", canary)
        .fetch_optional(&mut *transaction)
        .await?;
    let from = match summed {
        Some(summed) if summed.since == answers.from => summed.until_at,
        // none yet, or the evidence begins anew because a new `champion` is watched
        _ => {
            forget(&mut transaction, canary).await?;
            let from = answers.from - CLOCKS_DIFFER_MAX;
            sqlx::query!(
                "insert into canary_sums (canary_id, since, until_at) values ($1, $2, $3)",
                canary,
                answers.from,
                from
            )
            .execute(&mut *transaction)
            .await?;
            from
        }
    };
    let now = sqlx::query_scalar!(r#"select clock_timestamp() as "now!""#)
        .fetch_one(&mut *transaction)
        .await?;
    let settled = now - SETTLED_AFTER;
    if settled - from < STEP_MIN {
        transaction.commit().await?;
        return Ok((from, from));
    }
    let until = settled.min(from + step);
    sqlx::query_file!(
        "src/canary/sums/answers.sql",
        canary,
        answers.policy,
        answers.version,
        answers.champion,
        answers.shares,
        answers.weight,
        answers.from,
        answers.until,
        answers.slow_seconds,
        from,
        until
    )
    .execute(&mut *transaction)
    .await?;
    sqlx::query_file!(
        "src/canary/sums/closed.sql",
        canary,
        answers.policy,
        answers.version,
        answers.champion,
        answers.shares,
        answers.weight,
        answers.from,
        answers.until,
        answers.slow_seconds,
        from,
        until
    )
    .execute(&mut *transaction)
    .await?;
    sqlx::query!(
        "update canary_sums set until_at = $2 where canary_id = $1",
        canary,
        until
    )
    .execute(&mut *transaction)
    .await?;
    transaction.commit().await?;
    Ok((until, settled))
}

/// Adds closed trajectories that count now, at most [`COUNTED_MAX`]. Returns how many.
async fn count(connection: &mut PgConnection, answers: &Answers<'_>) -> sqlx::Result<i64> {
    let mut transaction = begin(connection).await?;
    lock(&mut transaction, answers.canary).await?;
    let counted = sqlx::query_file_scalar!(
        "src/canary/sums/counted.sql",
        answers.canary,
        answers.policy,
        answers.version,
        answers.champion,
        answers.shares,
        answers.weight,
        answers.from,
        answers.until,
        answers.slow_seconds
    )
    .fetch_one(&mut *transaction)
    .await?;
    transaction.commit().await?;
    Ok(counted)
}

/// Until the end of the transaction: a loop that leads no more may still look.
async fn lock(connection: &mut PgConnection, canary: Uuid) -> sqlx::Result<()> {
    sqlx::query!(
        "select pg_advisory_xact_lock(hashtextextended($1::uuid::text, 0))",
        canary
    )
    .execute(connection)
    .await?;
    Ok(())
}

/// Of a canary that nothing is compared with any more. Its decisions have the evidence that they were made on.
pub async fn forget(connection: &mut PgConnection, canary: Uuid) -> sqlx::Result<()> {
    sqlx::query!("delete from canary_user where canary_id = $1", canary)
        .execute(&mut *connection)
        .await?;
    sqlx::query!("delete from canary_closed where canary_id = $1", canary)
        .execute(&mut *connection)
        .await?;
    sqlx::query!("delete from canary_sums where canary_id = $1", canary)
        .execute(&mut *connection)
        .await?;
    Ok(())
}
