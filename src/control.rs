//! The control API: the routers of the crates that own runs, versions, releases and the fleet, and two questions that no
//! crate can answer alone: do the counts add up, and where does a served token come from. Reads only.

mod ledger;
mod origin;

use axum::Router;
use axum::routing::get;
use serving::release::Desk;
use sqlx::PgPool;

/// Everything behind the key check; `/health` and `/metrics` are the role's.
pub fn router(pool: &PgPool, policy: &str, desk: Desk) -> Router {
    let questions = Router::new()
        .route("/v1/ledger", get(ledger::counts))
        .route("/v1/generations/{id}/origin", get(origin::of))
        .with_state(pool.clone());
    questions
        .merge(trainer::runs::router(pool.clone(), policy))
        .merge(trainer::versions::router(pool.clone(), policy))
        .merge(serving::release::router(desk))
        .merge(serving::fleet::router(pool.clone()))
}
