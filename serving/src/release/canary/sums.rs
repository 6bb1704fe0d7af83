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

/// Far longer than a transaction of the sink or of the closer takes.
const SETTLED_AFTER: Duration = Duration::from_secs(60);
/// What is younger is read as it is.
const STEP_MIN: Duration = Duration::from_secs(30);
/// A replica's clock may be so much ahead of the database's.
const CLOCKS_DIFFER_MAX: Duration = Duration::from_secs(3600);
/// How long one look adds at most.
const LOOK_MAX: Duration = Duration::from_secs(10);
/// A step that takes longer is followed by a shorter one.
const STEP_TAKES_MAX: Duration = Duration::from_millis(500);

/// Adds what has settled. Returns until when everything is added, or `None`: more is left than one look adds.
pub async fn advance(connection: &mut PgConnection, answers: &Answers<'_>) -> sqlx::Result<Option<OffsetDateTime>> {
    let (began, mut step) = (Instant::now(), STEP_MIN);
    loop {
        let step_began = Instant::now();
        let (until, settled) = add(connection, answers, step).await?;
        if until >= settled {
            return Ok(Some(until));
        }
        if began.elapsed() > LOOK_MAX {
            return Ok(None);
        }
        step = match step_began.elapsed() > STEP_TAKES_MAX {
            true => (step / 2).max(Duration::from_secs(1)),
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
    // the evidence may begin anew, when a new `champion` is watched
    sqlx::query!(
        "with forgotten as (
             delete from canary_sums where canary_id = $1 and since <> $2 returning canary_id
         ), users as (
             delete from canary_user where canary_id in (select canary_id from forgotten)
         )
         delete from canary_closed where canary_id in (select canary_id from forgotten)",
        canary,
        answers.from
    )
    .execute(&mut *transaction)
    .await?;
    sqlx::query!(
        "insert into canary_sums (canary_id, since, until_at) values ($1, $2, $3) on conflict do nothing",
        canary,
        answers.from,
        answers.from - CLOCKS_DIFFER_MAX
    )
    .execute(&mut *transaction)
    .await?;
    let now = sqlx::query!(
        r#"select until_at, clock_timestamp() as "now!" from canary_sums where canary_id = $1 for update"#,
        canary
    )
    .fetch_one(&mut *transaction)
    .await?;
    let (from, settled) = (now.until_at, now.now - SETTLED_AFTER);
    if settled - from < STEP_MIN {
        return Ok((from, from));
    }
    let until = settled.min(from + step);
    sqlx::query_file!(
        "src/release/canary/sums/answers.sql",
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
        "src/release/canary/sums/closed.sql",
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
        "src/release/canary/sums/counted.sql",
        canary,
        answers.policy,
        answers.version,
        answers.champion,
        answers.shares,
        answers.weight,
        answers.from,
        answers.until,
        answers.slow_seconds
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
