//! The control API: the routers of the crates that own runs, versions, releases and the fleet, two
//! read-only queries that span crates (the ledger, and the origin of a generation), and the demo's
//! report.

mod ledger;
mod origin;
mod report;

use std::path::PathBuf;

use edge::auth::Scope;
use edge::routes::{Routes, get};
use serving::release::ReleaseService;
use sqlx::PgPool;

/// All routes. `report`: the path of the demo's report.
pub fn routes(pool: &PgPool, policy: &str, releases: ReleaseService, report: PathBuf) -> Routes {
    let read = Scope::Read;
    let queries = Routes::new()
        .route(
            read,
            "/v1/ledger",
            "What became of every generation",
            get(ledger::ledger),
        )
        .route(
            read,
            "/v1/generations/{id}/origin",
            "Where a generation comes from",
            get(origin::origin),
        )
        .with_state(pool.clone());
    let report = Routes::new()
        .route(read, "/report", "The demo's report", get(report::page))
        .with_state(report);
    queries
        .merge(report)
        .merge(trainer::api::routes(pool.clone(), policy))
        .merge(serving::release::routes(releases))
        .merge(serving::fleet::routes(pool.clone()))
        .open_route("/health", "Whether the process responds", get(async || "ok"))
}
