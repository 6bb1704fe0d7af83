//! The control API: the routers of the crates that own runs, versions, releases and the fleet, two
//! read-only queries that span crates (the ledger, and the origin of a generation), rewards of an arm over
//! time, texts, dead letters, the page for browsers, and the demo's report.
//!
//! The two queries answer every tenant about what it logged itself, and nobody about others. All
//! other routes are about the policy, and only for its tenant. Administrators may use all of them.

mod dead_letters;
mod evaluator;
mod ledger;
mod origin;
mod report;
mod rewards;
mod texts;

use std::path::PathBuf;
use std::sync::Arc;

pub use dead_letters::DeadLetters;
pub use evaluator::Evaluations;
pub use texts::Texts;

use edge::Problem;
use edge::audit::{self, Change};
use edge::auth::{Principal, Scope};
use edge::routes::{Routes, get, post};
use edge::tenant::OwnerOnly;
use edge::turns::Turns;
use event_log::payload::Store as Exports;
use release::ReleaseService;
use sqlx::{PgConnection, PgPool};

/// The ledger's query reads every generation, so few run at a time.
const LEDGERS_AT_ONCE: usize = 2;
/// Running ones and those that wait.
const LEDGERS_PER_KEY: usize = 2;

/// Rewards of up to a hundred periods with a thousand answers each.
const REWARDS_AT_ONCE: usize = 2;
const REWARDS_PER_KEY: usize = 4;
/// Texts, for which up to ten thousand prompts are compared.
const TEXTS_AT_ONCE: usize = 2;
const TEXTS_PER_KEY: usize = 4;
/// Of a statement about generations. The ledger reads all of them.
const STATEMENT_MS_MAX: &str = "20000";
/// Of a reason.
const REASON_CHARS_MAX: usize = 500;

/// What the routes answer from, besides the tables.
pub struct Parts {
    pub site: crate::page::Site,
    pub releases: ReleaseService,
    pub texts: Arc<Texts>,
    pub dead_letters: Arc<DeadLetters>,
    /// Where exports of datasets lie.
    pub exports: Option<Exports>,
    /// The path of the demo's report.
    pub report: PathBuf,
    pub harness_urls: runs::api::HarnessUrls,
}

/// All routes.
pub fn routes(pool: &PgPool, parts: Parts) -> Routes {
    let Parts {
        site,
        releases,
        texts,
        dead_letters,
        exports,
        report,
        harness_urls,
    } = parts;
    let read = Scope::Read;
    let policy = site.policy();
    let queries = Routes::new()
        .route(
            read,
            "/v1/ledger",
            "What became of every generation",
            get(ledger::ledger).in_turn(Turns::new(LEDGERS_AT_ONCE, LEDGERS_PER_KEY)),
        )
        .route(
            read,
            "/v1/generations/{id}/origin",
            "Where a generation comes from",
            get(origin::origin),
        )
        .with_state(pool.clone());
    let rewards = Routes::new()
        .route(
            read,
            "/v1/rewards",
            "What users did with an arm's answers now and before",
            get(rewards::rewards).in_turn(Turns::new(REWARDS_AT_ONCE, REWARDS_PER_KEY)),
        )
        .with_state(site.clone());
    let texts = Routes::new()
        .route(
            Scope::Texts,
            "/v1/generations/{id}/texts",
            "A prompt and its answers",
            post(texts::texts).in_turn(Turns::new(TEXTS_AT_ONCE, TEXTS_PER_KEY)),
        )
        .with_state(texts);
    let report = Routes::new()
        .route(read, "/report", "The demo's report", get(report::page).page())
        .with_state(report);
    let of_the_policy = report
        .merge(rewards)
        .merge(texts)
        .merge(dead_letters::routes(dead_letters))
        .merge(runs::api::routes(pool.clone(), policy, exports, harness_urls))
        .merge(release::routes(releases))
        .merge(serving::fleet::routes(pool.clone(), policy))
        .merge(serving::tide::http::routes(pool.clone(), policy))
        .merge(crate::page::routes(site.clone()))
        .only_for_owner(OwnerOnly::new(pool.clone(), policy));
    queries
        .merge(of_the_policy)
        .merge(crate::page::open_routes(site))
        .open_route("/health", "Whether the process responds", get(async || "ok"))
}

/// Sets what row-level security shows to the rest of the transaction: rows of `tenant`, or all. Its
/// statements end in time, because a held snapshot keeps retention from dropping weeks.
async fn show(connection: &mut PgConnection, tenant: Option<&str>) -> sqlx::Result<()> {
    sqlx::query!(
        "select set_config('springtide.tenant', coalesce($1, ''), true) as tenant,
                set_config('springtide.all_tenants', case when $1 is null then 'on' else 'off' end, true) as all_tenants,
                set_config('statement_timeout', $2, true) as statement_timeout",
        tenant,
        STATEMENT_MS_MAX
    )
    .fetch_one(connection)
    .await?;
    Ok(())
}

/// Why somebody does something, for the audit.
fn reason(reason: &str) -> Result<&str, Problem> {
    let reason = reason.trim();
    if reason.is_empty() || reason.chars().count() > REASON_CHARS_MAX {
        return Err(Problem::bad_request(format!(
            "reason: say why in 1 to {REASON_CHARS_MAX} characters; the audit keeps it"
        )));
    }
    Ok(reason)
}

/// Writes rows of the audit, and returns once they are committed.
async fn note(pool: &PgPool, principal: &Principal, changes: &[Change<'_>]) -> Result<(), Problem> {
    let mut transaction = pool.begin().await.map_err(crate::page::unavailable)?;
    audit::append_all(&mut transaction, principal.actor(), changes)
        .await
        .map_err(crate::page::unavailable)?;
    transaction.commit().await.map_err(crate::page::unavailable)
}

/// Whose rows a query shows: those of the caller's tenant, for administrators those of `requested`,
/// or all.
fn visible_tenant<'a>(principal: &'a Principal, requested: Option<&'a str>) -> Result<Option<&'a str>, Problem> {
    if principal.scopes.allow(Scope::Admin) {
        return Ok(requested);
    }
    match requested {
        Some(other) if other != principal.tenant => Err(Problem::forbidden(format!(
            "the key belongs to the tenant {}, and shows only what that tenant logged",
            principal.tenant
        ))),
        _ => Ok(Some(&principal.tenant)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use edge::auth::Role;

    #[test]
    fn a_reason_is_a_sentence_or_so() {
        assert_eq!(reason(" a typo ").unwrap(), "a typo");
        for wrong in ["", "  ", &"x".repeat(REASON_CHARS_MAX + 1)] {
            assert_eq!(reason(wrong).unwrap_err().status, 400);
        }
    }

    #[test]
    fn a_tenant_sees_its_own_rows_and_an_administrator_all() {
        let key = Principal::with_role("ours", Role::Research, "");
        let admin = Principal::with_role("ours", Role::Admin, "");
        assert_eq!(visible_tenant(&key, None).unwrap(), Some("ours"));
        assert_eq!(visible_tenant(&key, Some("ours")).unwrap(), Some("ours"));
        assert_eq!(visible_tenant(&key, Some("theirs")).unwrap_err().status, 403);
        assert_eq!(visible_tenant(&admin, None).unwrap(), None);
        assert_eq!(visible_tenant(&admin, Some("theirs")).unwrap(), Some("theirs"));
    }
}
