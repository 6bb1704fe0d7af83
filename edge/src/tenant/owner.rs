//! Routes that only the tenant of a policy may use.

use std::sync::Arc;

use sqlx::PgPool;

use crate::auth::{Principal, Scope};
use crate::problem::Problem;

/// Lets only keys of a policy's tenant pass, and those of administrators. Cheap to clone.
#[derive(Debug, Clone)]
pub struct OwnerOnly {
    pool: PgPool,
    policy: Arc<str>,
}

impl OwnerOnly {
    pub fn new(pool: PgPool, policy: &str) -> Self {
        let policy = policy.into();
        Self { pool, policy }
    }

    /// Asks the table at each request, so that a policy that was handed over needs no restart. The
    /// owner is not named: other tenants need not know it.
    pub async fn check(&self, principal: &Principal) -> Result<(), Problem> {
        if principal.scopes.allow(Scope::Admin) {
            return Ok(());
        }
        let owner = super::owner(&self.pool, &self.policy).await.map_err(|error| {
            tracing::warn!(%error, "cannot read the policy's owner");
            Problem::unavailable("the database does not answer", 2)
        })?;
        if owner.as_ref() == Some(&principal.tenant) {
            return Ok(());
        }
        Err(Problem::forbidden(format!(
            "the policy {} does not belong to this key's tenant, {}: use a key of the tenant that it belongs to \
             (`springtide tenant list` shows it, `springtide key create --tenant` makes one)",
            self.policy, principal.tenant
        )))
    }
}
