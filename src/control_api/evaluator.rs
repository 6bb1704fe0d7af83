//! The gate of a canary asks the trainer's API for evaluations: here the two crates meet.

use edge::audit;
use edge::auth::{OPEN_TENANT, Principal, Scope, Scopes};
use serving::release::Evaluator;
use sqlx::PgPool;
use uuid::Uuid;

pub struct Evaluations {
    pub pool: PgPool,
    pub policy: String,
}

#[async_trait::async_trait]
impl Evaluator for Evaluations {
    async fn start(&self, version: i64, dataset: &str) -> Result<Uuid, String> {
        let owner = sqlx::query_scalar!("select tenant_id from policy where name = $1", self.policy)
            .fetch_optional(&self.pool)
            .await
            .map_err(|error| format!("the database does not answer ({error})"))?;
        let principal = Principal {
            tenant: owner.unwrap_or_else(|| OPEN_TENANT.to_owned()),
            scopes: Scopes::of(&[Scope::Research]),
            label: audit::role_name("control"),
            key: None,
            replica: None,
            requests_per_second: None,
        };
        trainer::api::create::evaluate_version(&self.pool, &self.policy, version, dataset, &principal)
            .await
            .map_err(|problem| problem.detail.unwrap_or_else(|| problem.title.into_owned()))
    }
}
