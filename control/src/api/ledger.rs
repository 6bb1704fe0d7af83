//! `GET /v1/ledger`: what became of every generation of the caller's tenant. All counts come from one
//! snapshot, so they add up.

use axum::extract::State;
use edge::Problem;
use edge::auth::Principal;
use edge::json::Json;
use edge::query::Query;
use serde::{Deserialize, Serialize};
use sqlx::{PgConnection, PgPool};
use time::OffsetDateTime;

use crate::caller::visible_tenant;
use crate::tables::{LONG_STATEMENT_MS_MAX, reader_within, unavailable};

/// Selects generations; without fields, all.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Filter {
    policy: Option<String>,
    /// `production`, `rollout` or `evaluation`.
    purpose: Option<String>,
    /// Only what this tenant logged. Default: the caller's, for administrators all.
    tenant: Option<String>,
    /// Only those sampled at or after this time (RFC 3339).
    #[serde(default, with = "time::serde::rfc3339::option")]
    since: Option<OffsetDateTime>,
}

/// The number of generations, in all and by disposition.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub struct Ledger {
    generations: i64,
    open: i64,
    queued: i64,
    trained: i64,
    censored: i64,
    dropped: i64,
    held_out: i64,
    erased: i64,
    /// Generations whose rows retention has deleted; they are also counted by disposition.
    expired: i64,
    /// Whether the dispositions add up to the generations.
    balanced: bool,
    /// The same counts by code, for dispositions that have codes.
    codes: Vec<Code>,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Code {
    disposition: String,
    code: String,
    generations: i64,
}

pub async fn ledger(
    State(pool): State<PgPool>,
    principal: Principal,
    Query(filter): Query<Filter>,
) -> Result<Json<Ledger>, Problem> {
    let tenant = visible_tenant(&principal, filter.tenant.as_deref())?;
    let mut snapshot = reader_within(&pool, tenant, LONG_STATEMENT_MS_MAX).await?;
    let ledger = read(&mut snapshot, &filter, tenant).await;
    ledger.map(Json).map_err(unavailable)
}

/// `tenant`: only what it logged.
async fn read(snapshot: &mut PgConnection, filter: &Filter, tenant: Option<&str>) -> sqlx::Result<Ledger> {
    let stored = sqlx::query_file_scalar!(
        "src/api/ledger/stored.sql",
        filter.policy,
        filter.purpose,
        filter.since,
        tenant
    )
    .fetch_one(&mut *snapshot)
    .await?;
    let rows = sqlx::query_file!(
        "src/api/ledger/dispositions.sql",
        filter.policy,
        filter.purpose,
        filter.since,
        tenant
    )
    .fetch_all(&mut *snapshot)
    .await?;
    let expired = sqlx::query_file!(
        "src/api/ledger/expired.sql",
        filter.policy,
        filter.purpose,
        filter.since,
        tenant
    )
    .fetch_all(&mut *snapshot)
    .await?;
    let expired_count = expired.iter().map(|row| row.count).sum();
    let rows = rows.into_iter().map(|row| (row.disposition, row.code, row.count));
    let expired = expired.into_iter().map(|row| (row.disposition, row.code, row.count));
    Ok(add_up(stored, expired_count, rows.chain(expired)))
}

fn add_up(stored: i64, expired: i64, rows: impl IntoIterator<Item = (String, Option<String>, i64)>) -> Ledger {
    let mut ledger = Ledger {
        generations: stored + expired,
        expired,
        ..Ledger::default()
    };
    let mut known = 0;
    for (disposition, code, count) in rows {
        let counter = match disposition.as_str() {
            "open" => &mut ledger.open,
            "queued" => &mut ledger.queued,
            "trained" => &mut ledger.trained,
            "censored" => &mut ledger.censored,
            "dropped" => &mut ledger.dropped,
            "held_out" => &mut ledger.held_out,
            "erased" => &mut ledger.erased,
            _ => continue, // unknown here: `balanced` becomes false
        };
        *counter += count;
        known += count;
        let Some(code) = code else { continue };
        let same = |known: &&mut Code| known.disposition == disposition && known.code == code;
        match ledger.codes.iter_mut().find(same) {
            Some(known) => known.generations += count,
            None => ledger.codes.push(Code {
                disposition,
                code,
                generations: count,
            }),
        }
    }
    ledger.balanced = known == ledger.generations;
    ledger
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(disposition: &str, code: Option<&str>, count: i64) -> (String, Option<String>, i64) {
        (disposition.to_owned(), code.map(str::to_owned), count)
    }

    #[test]
    fn dispositions_add_up_over_their_codes() {
        let rows = [
            row("censored", Some("no_feedback"), 3),
            row("dropped", Some("stale"), 2),
            row("dropped", Some("greedy"), 1),
            row("trained", None, 4),
        ];
        let ledger = add_up(10, 0, rows);
        assert_eq!((ledger.censored, ledger.dropped, ledger.trained), (3, 3, 4));
        assert!(ledger.balanced);
        assert_eq!(ledger.codes.len(), 3);
    }

    #[test]
    fn expired_generations_still_count() {
        let rows = [
            row("dropped", Some("stale"), 2),
            row("dropped", Some("stale"), 3),
            row("trained", None, 4),
        ];
        let ledger = add_up(2, 7, rows);
        assert_eq!((ledger.generations, ledger.dropped, ledger.expired), (9, 5, 7));
        assert!(ledger.balanced);
        assert_eq!(ledger.codes.len(), 1);
    }

    #[test]
    fn a_generation_without_a_known_disposition_unbalances_the_ledger() {
        assert!(!add_up(5, 0, [row("open", None, 4)]).balanced);
        assert!(!add_up(5, 0, [row("open", None, 4), row("mislaid", None, 1)]).balanced);
        assert!(!add_up(5, 0, [row("open", None, 6)]).balanced);
    }
}
