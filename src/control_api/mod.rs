//! The control API: the routers of the crates that own runs, versions, releases and the fleet, two
//! read-only queries that span crates (the ledger, and the origin of a generation), and the demo's
//! report.

mod ledger;
mod origin;
mod report;

use std::path::PathBuf;

use axum::Router;
use axum::routing::get;
use serving::release::ReleaseService;
use sqlx::PgPool;

/// All routes that need a key. `report`: the path of the demo's report.
pub fn router(pool: &PgPool, policy: &str, releases: ReleaseService, report: PathBuf) -> Router {
    let queries = Router::new()
        .route("/v1/ledger", get(ledger::ledger))
        .route("/v1/generations/{id}/origin", get(origin::origin))
        .with_state(pool.clone());
    queries
        .merge(Router::new().route("/report", get(report::page)).with_state(report))
        .merge(trainer::api::router(pool.clone(), policy))
        .merge(serving::release::router(releases))
        .merge(serving::fleet::router(pool.clone()))
}
