//! The gate of a canary asks the trainer's API for evaluations: here the two crates meet.

use anyhow::Context;
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
    async fn start(&self, version: i64, dataset: &str) -> anyhow::Result<Result<Uuid, String>> {
        let owner = sqlx::query_scalar!("select tenant_id from policy where name = $1", self.policy)
            .fetch_optional(&self.pool)
            .await
            .context("read the policy's owner")?;
        let principal = Principal {
            tenant: owner.unwrap_or_else(|| OPEN_TENANT.to_owned()),
            scopes: Scopes::of(&[Scope::Research]),
            label: audit::role_name("control"),
            key: None,
            replica: None,
            requests_per_second: None,
        };
        let started =
            trainer::api::create::evaluate_version(&self.pool, &self.policy, version, dataset, &principal).await;
        match started {
            Ok(id) => Ok(Ok(id)),
            Err(problem) if problem.status.is_server_error() => Err(problem.into()),
            Err(problem) => Ok(Err(problem.detail.unwrap_or_else(|| problem.title.into_owned()))),
        }
    }
}
