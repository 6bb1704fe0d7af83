//! The gate of a canary asks the trainer's API for evaluations: here the two crates meet.

use ::runs::api::control::cancel_run;
use ::runs::api::create::evaluate_version;
use anyhow::Context;
use edge::audit;
use edge::auth::{OPEN_TENANT, Principal, Scope, Scopes};
use release::Evaluator;
use sqlx::PgPool;
use uuid::Uuid;

pub struct Evaluations {
    pub pool: PgPool,
    pub policy: String,
}

impl Evaluations {
    /// The role itself, for the policy's owner.
    async fn principal(&self) -> anyhow::Result<Principal> {
        let owner = sqlx::query_scalar!("select tenant_id from policy where name = $1", self.policy)
            .fetch_optional(&self.pool)
            .await
            .context("read the policy's owner")?;
        Ok(Principal {
            tenant: owner.unwrap_or_else(|| OPEN_TENANT.to_owned()),
            scopes: Scopes::of(&[Scope::Research]),
            label: audit::role_name("control"),
            key: None,
            replica: None,
            requests_per_second: None,
            is_person: false,
        })
    }
}

#[async_trait::async_trait]
impl Evaluator for Evaluations {
    async fn start(&self, version: i64, dataset: &str) -> anyhow::Result<Result<Uuid, String>> {
        let principal = self.principal().await?;
        match evaluate_version(&self.pool, &self.policy, version, dataset, &principal).await {
            Ok(id) => Ok(Ok(id)),
            Err(problem) if problem.status.is_server_error() => Err(problem.into()),
            Err(problem) => Ok(Err(problem.detail.unwrap_or_else(|| problem.title.into_owned()))),
        }
    }

    async fn cancel(&self, run: Uuid) -> anyhow::Result<()> {
        let principal = self.principal().await?;
        match cancel_run(&self.pool, &self.policy, run, &principal).await {
            Err(problem) if problem.status.is_server_error() => Err(problem.into()),
            // it has ended meanwhile
            Err(_) | Ok(()) => Ok(()),
        }
    }
}
