//! The control API: the routers of the crates that own runs, versions, releases and the fleet, two questions that no crate can
//! answer alone (do the counts add up, and where does a served token come from), and the demo's page. Reads only.

mod ledger;
mod origin;
mod report;

use std::path::PathBuf;

use axum::Router;
use axum::routing::get;
use serving::release::Desk;
use sqlx::PgPool;

/// Everything behind the key check; `/health` and `/metrics` are the role's. `page`: where the demo leaves its report.
pub fn router(pool: &PgPool, policy: &str, desk: Desk, page: PathBuf) -> Router {
    let questions = Router::new()
        .route("/v1/ledger", get(ledger::counts))
        .route("/v1/generations/{id}/origin", get(origin::of))
        .with_state(pool.clone());
    questions
        .merge(Router::new().route("/report", get(report::page)).with_state(page))
        .merge(trainer::runs::router(pool.clone(), policy))
        .merge(trainer::versions::router(pool.clone(), policy))
        .merge(serving::release::router(desk))
        .merge(serving::fleet::router(pool.clone()))
}
