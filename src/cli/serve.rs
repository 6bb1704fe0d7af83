//! `springtide serve`: the engine and its API.

use anyhow::Context;
use artifact::need::Limit;
use artifact::sign::TrustedKeys;
use edge::sampler::{self, SamplerKey};
use serving::memory;
use sqlx::PgPool;
use store::Store;

use super::App;
use crate::config::{Config, Part};
use crate::policy_store;
use crate::role::{self, Role};

#[derive(Debug, Clone, clap::Args)]
pub struct Args {}

impl Args {
    pub async fn run(self, app: &App) -> anyhow::Result<()> {
        let role = Role::start(app, Part::Serve).await?;
        let config = &app.config;
        let store = policy_store::open(config)?;
        ask_memory(config, &store).await?;
        let listener = role.listen(config, Part::Serve).await?;
        let payloads = config.serve.log_experts.then(|| role::payloads(app)).transpose()?;
        let sampler = SamplerKey::load_or_create(&config.serve.sampler_key_path()).context("load the sampler key")?;
        warn_if_unknown(&sampler, &role.pool).await?;
        let extra_routes = role.metrics(config, Part::Serve);
        let replica = serving::serve::Replica {
            options: config.serve.clone(),
            policy: config.policy.name.clone(),
            compute: config.policy.compute,
            kafka: config.kafka_client()?,
            store,
            payloads,
            keys_dir: config.keys_dir(),
            sampler,
            auth: role.auth,
            control_url: Some(config.control_url()),
            extra_routes,
        };
        replica.run(listener, role.shutdown).await
    }
}

/// Refuses versions that this machine cannot serve, before anything of them is loaded.
async fn ask_memory(config: &Config, store: &Store) -> anyhow::Result<()> {
    let Some(keys) = TrustedKeys::load_if_any(&config.keys_dir()).context("load the trusted keys")? else {
        return Ok(()); // nothing can be loaded before there are trusted keys
    };
    let (policy, machine) = (&config.policy, Limit::of_this_process());
    memory::ask_at_start(store, &policy.name, &keys, &config.serve, policy.compute, &machine).await
}

/// A replica whose key is not registered answers and logs, but nothing is trained on.
async fn warn_if_unknown(key: &SamplerKey, pool: &PgPool) -> anyhow::Result<()> {
    let known = sampler::find(pool, key.id()).await?;
    if known.is_none_or(|sampler| sampler.revoked_at.is_some()) {
        tracing::warn!(
            sampler = key.id(),
            "this replica's sampler key is not registered or is revoked: its generations are stored but never \
             trained on; register it with `springtide sampler add`"
        );
    }
    Ok(())
}
