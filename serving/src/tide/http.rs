//! The control role's side: stores what replicas report, gives them their past, and shows what was
//! harvested and what it cost production.
//!
//! A replica may report for itself only, as for the fleet (`crate::fleet`).

pub mod report;

use super::minute::{MINUTES_MAX, Report, USES_MAX};
use super::task::{Past, Remembered};
use crate::fleet::{Fleet, check_replica, is_admin, not_owned, owner};
use axum::extract::State;
use axum::http::StatusCode;
use edge::Problem;
use edge::auth::{Principal, Scope};
use edge::database::unavailable;
use edge::json::Json;
use edge::path::Path;
use edge::routes::{Routes, get, post};
use sqlx::{PgPool, Postgres, Transaction};

/// Longest past that is kept, in days.
const PAST_DAYS: u32 = 366;

pub fn routes(pool: PgPool, policy: &str) -> Routes {
    let replica = Scope::Replica;
    Routes::new()
        .route(
            Scope::Read,
            "/v1/tide",
            "What rollouts may use of each engine, have used, and what it cost production",
            get(report::tide),
        )
        .route(
            Scope::Read,
            "/v1/ledger/cost",
            "Tokens and engine-seconds by day and run",
            get(report::cost),
        )
        .route(
            replica,
            "/v1/tide/{id}",
            "Report how a replica's slots are used",
            post(post_report),
        )
        .route(
            replica,
            "/v1/tide/{id}/history",
            "How a replica's slots were used",
            get(past),
        )
        .with_state(Fleet::new(pool, policy))
}

async fn post_report(
    State(fleet): State<Fleet>,
    principal: Principal,
    Path(replica): Path<String>,
    Json(report): Json<Report>,
) -> Result<StatusCode, Problem> {
    check_replica(&principal, &replica)?;
    fleet.check_policy(&report.policy)?;
    check(&report)?;
    let mut transaction = edge::database::begin(&fleet.pool).await.map_err(unavailable)?;
    let owns = sqlx::query_scalar!(
        r#"select ($3 or exists (select from replica r where r.id = $1 and r.owner is not distinct from $2)) as "owns!""#,
        replica,
        owner(&principal),
        is_admin(&principal)
    )
    .fetch_one(&mut *transaction)
    .await
    .map_err(unavailable)?;
    if !owns {
        return Err(not_owned(&replica));
    }
    store_minutes(&mut transaction, &replica, &report).await?;
    store_uses(&mut transaction, &replica, &report).await?;
    sqlx::query!(
        "delete from tide_minute
         where policy = $1 and replica = $2 and minute < now() - make_interval(days => $3)",
        report.policy,
        replica,
        i32::try_from(report.history_days).map_err(Problem::internal)?
    )
    .execute(&mut *transaction)
    .await
    .map_err(unavailable)?;
    transaction.commit().await.map_err(unavailable)?;
    Ok(StatusCode::NO_CONTENT)
}

/// Refuses what no replica sends.
fn check(report: &Report) -> Result<(), Problem> {
    let bad = |text: &str| Err(Problem::bad_request(text));
    if report.minutes.len() > MINUTES_MAX || report.uses.len() > USES_MAX {
        return bad("a report has at most 512 minutes and 16384 uses; report more often");
    }
    if !(1..=PAST_DAYS).contains(&report.history_days) {
        return Err(Problem::bad_request(format!(
            "history_days is {}; give 1 to {PAST_DAYS}",
            report.history_days
        )));
    }
    let kinds = ["production", "rollout", "evaluation"];
    if !report.uses.iter().all(|one| kinds.contains(&one.work.as_str())) {
        return bad("the work of a use is production, rollout or evaluation");
    }
    Ok(())
}

async fn store_minutes(
    transaction: &mut Transaction<'_, Postgres>,
    replica: &str,
    report: &Report,
) -> Result<(), Problem> {
    for minute in &report.minutes {
        let json = |felt| serde_json::to_value(felt).map_err(Problem::internal);
        let why = serde_json::to_value(minute.why).map_err(Problem::internal)?;
        sqlx::query!(
            "insert into tide_minute (policy, replica, engine, minute, process, slots, seconds, production_slot_seconds,
                 production_peak, expected, lendable_slot_seconds, lent_slot_seconds, slot_limit, whole, why, taken_back,
                 taking_back_ms_max, alone, beside)
             values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19)
             on conflict on constraint tide_minute_pkey do update set
                 slots = excluded.slots, seconds = excluded.seconds,
                 production_slot_seconds = excluded.production_slot_seconds, production_peak = excluded.production_peak,
                 expected = excluded.expected, lendable_slot_seconds = excluded.lendable_slot_seconds,
                 lent_slot_seconds = excluded.lent_slot_seconds, slot_limit = excluded.slot_limit,
                 whole = excluded.whole, why = excluded.why, taken_back = excluded.taken_back,
                 taking_back_ms_max = excluded.taking_back_ms_max, alone = excluded.alone, beside = excluded.beside",
            report.policy,
            replica,
            minute.engine,
            minute.minute,
            report.process,
            minute.slots,
            minute.seconds,
            minute.production_slot_seconds,
            minute.production_peak,
            minute.expected,
            minute.lendable_slot_seconds,
            minute.lent_slot_seconds,
            minute.slot_limit,
            minute.whole,
            why.as_str(),
            minute.taken_back,
            minute.taking_back_ms_max,
            json(minute.alone)?,
            json(minute.beside)?
        )
        .execute(&mut **transaction)
        .await
        .map_err(unavailable)?;
    }
    Ok(())
}

async fn store_uses(
    transaction: &mut Transaction<'_, Postgres>,
    replica: &str,
    report: &Report,
) -> Result<(), Problem> {
    for one in &report.uses {
        sqlx::query!(
            "insert into engine_use (policy, replica, engine, process, day, work, run_id, sampled, read, read_again,
                 thrown_away, slot_seconds, engine_seconds)
             values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)
             on conflict on constraint engine_use_key do update set
                 sampled = excluded.sampled, read = excluded.read, read_again = excluded.read_again,
                 thrown_away = excluded.thrown_away, slot_seconds = excluded.slot_seconds,
                 engine_seconds = excluded.engine_seconds",
            report.policy,
            replica,
            one.engine,
            report.process,
            one.day,
            one.work,
            one.run,
            one.sampled,
            one.read,
            one.read_again,
            one.thrown_away,
            one.slot_seconds,
            one.engine_seconds
        )
        .execute(&mut **transaction)
        .await
        .map_err(unavailable)?;
    }
    Ok(())
}

async fn past(
    State(fleet): State<Fleet>,
    principal: Principal,
    Path(replica): Path<String>,
) -> Result<Json<Past>, Problem> {
    check_replica(&principal, &replica)?;
    let past = sqlx::query_as!(
        Remembered,
        r#"select engine, date_bin('5 minutes', minute, timestamptz '2000-01-01 00:00+00') as "at!",
                  max(production_peak) as "production_peak!", sum(lent_slot_seconds) as "lent_slot_seconds!"
           from tide_minute where policy = $1 and replica = $2
           group by 1, 2 order by 2, 1"#,
        &*fleet.policy,
        replica
    )
    .fetch_all(&fleet.pool)
    .await
    .map_err(unavailable)?;
    Ok(Json(Past { past }))
}
