//! The role `control`: one front for runs, versions, releases, the fleet, the tide and dead letters, as JSON
//! and as pages. It merges the routes of the crates that own them with its own. The binary starts it.
//!
//! Queries that span crates answer every tenant about what it logged itself, and nobody about others. All
//! other routes are about the policy, and only for its tenant. Administrators may use all of them.
//!
//! This crate writes no table but the audit (the database erases users itself), and decides nothing. Files that pages and JSON share are beside
//! this one; `page` uses `api`, never the reverse, apart from what its handlers share (`page/site.rs`).

pub mod api;
mod caller;
pub mod dead_letters;
mod evaluator;
mod fields;
mod figures;
pub mod page;
mod rewards;
pub mod tables;
pub mod times;
pub mod trained;

use std::path::PathBuf;
use std::sync::Arc;

use edge::auth::{Auth, Scope};
use edge::routes::{Routes, get, post};
use edge::tenant::OwnerOnly;
use edge::turns::Turns;
use event_log::payload::Store as Exports;
use release::ReleaseService;
use sqlx::PgPool;
use store::Store;

use api::dead_letters::DeadLetters;
use api::erasures::{self, Erasures};
use api::texts::Texts;
use page::Site;

pub use evaluator::Evaluations;
pub use rewards::Shown;

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

/// What the routes answer from, besides the tables.
pub struct Parts {
    pub site: Site,
    /// What `/login` checks keys with.
    pub auth: Auth,
    pub releases: ReleaseService,
    pub texts: Arc<Texts>,
    pub dead_letters: Arc<DeadLetters>,
    pub erasures: Erasures,
    /// Where exports of datasets lie.
    pub exports: Option<Exports>,
    /// The policy store, where trainers outside upload to.
    pub store: Store,
    /// The path of the demo's report.
    pub report: PathBuf,
    pub harness_urls: ::runs::api::HarnessUrls,
}

/// All routes.
pub fn routes(pool: &PgPool, parts: Parts) -> Routes {
    let Parts {
        site,
        auth,
        releases,
        texts,
        dead_letters,
        erasures,
        exports,
        store,
        report,
        harness_urls,
    } = parts;
    let read = Scope::Read;
    let policy = site.policy();
    let owner = OwnerOnly::new(pool.clone(), policy);
    let erasures = Routes::new()
        .route(
            Scope::Admin,
            "/v1/erasures",
            "Erase what one user left",
            post(erasures::create),
        )
        .route(Scope::Admin, "/v1/erasures", "List erasures", get(erasures::list))
        .with_state(erasures);
    let queries = Routes::new()
        .route(
            read,
            "/v1/ledger",
            "What became of every generation",
            get(api::ledger::ledger).in_turn(Turns::new(LEDGERS_AT_ONCE, LEDGERS_PER_KEY)),
        )
        .route(
            read,
            "/v1/generations/{id}/origin",
            "Where a generation comes from",
            get(api::origin::origin),
        )
        .with_state(pool.clone());
    let rewards = Routes::new()
        .route(
            read,
            "/v1/rewards",
            "What users did with an arm's answers now and before",
            get(api::rewards::rewards).in_turn(Turns::new(REWARDS_AT_ONCE, REWARDS_PER_KEY)),
        )
        .with_state(site.clone());
    let texts = Routes::new()
        .route(
            Scope::Texts,
            "/v1/generations/{id}/texts",
            "A prompt and its answers",
            post(api::texts::texts).in_turn(Turns::new(TEXTS_AT_ONCE, TEXTS_PER_KEY)),
        )
        .with_state(texts);
    let report = Routes::new()
        .route(read, "/report", "The demo's report", get(api::report::page).page())
        .with_state(report);
    let of_the_policy = report
        .merge(rewards)
        .merge(texts)
        .merge(api::dead_letters::routes(dead_letters))
        .merge(::runs::api::routes(pool.clone(), policy, exports, store, harness_urls))
        .merge(release::routes(releases))
        .merge(serving::fleet::routes(pool.clone(), policy))
        .merge(serving::tide::http::routes(pool.clone(), policy))
        .merge(page::routes(site))
        .only_for_owner(owner);
    queries
        .merge(erasures)
        .merge(of_the_policy)
        .merge(page::open_routes(auth))
        .open_route("/health", "Whether the process responds", get(async || "ok"))
}
