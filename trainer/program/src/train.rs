//! `springtide train`: executes scheduled runs. It has no API; its listener serves health, metrics and
//! whether it computes.

use anyhow::ensure;
use artifact::need::Limit;
use axum::routing::get;
use edge::auth::key;
use runs::memory;
use springtide::cli::App;
use springtide::config::{Config, Part};
use springtide::role::{self, Role};
use springtide::{policy_store, signing_keys};
use sqlx::PgPool;
use store::Store;
use trainer::{Computing, Environment};

pub async fn run(app: &App) -> anyhow::Result<()> {
    let role = Role::start(app, Part::Train).await?;
    let config = &app.config;
    role.own_policy(config).await?;
    check_own_key(config, &role.pool).await?;
    signing_keys::prepare(config, &role.pool, "train", "trainer").await?;
    let store = policy_store::open(config)?;
    ask_memory(config, &store, &role.pool).await?;
    let listener = role.listen(config, Part::Train).await?;
    let metrics = role.metrics(config, Part::Train);
    let computing = Computing::default();
    let router = metrics
        .route("/health", get(|| async { "ok" }))
        .merge(computing.routes());
    let environment = Environment {
        policy: config.policy.name.clone(),
        compute: config.policy.compute,
        quantized: config.policy.quantized.clone(),
        serves: config.policy.serves,
        base_dir: Some(config.policy.base.clone()),
        kafka: config.kafka_client()?,
        store,
        payloads: role::payloads(app)?,
        keys_dir: config.keys_dir(),
        serve_url: config.serve_url(),
        control_url: config.control_url(),
        state_dir: config.state_dir.clone(),
        pool: role.pool,
        computing,
    };
    // The server stops when the work ends, for whatever reason.
    let done = role.shutdown.child_token();
    let server = tokio::spawn(edge::server::run(listener, router, done.clone()));
    let outcome = Box::pin(trainer::run(config.trainer.clone(), environment, role.shutdown)).await;
    done.cancel();
    server.await??;
    outcome
}

/// Refuses a model that this machine cannot train, before anything of it is loaded.
async fn ask_memory(config: &Config, store: &Store, pool: &PgPool) -> anyhow::Result<()> {
    let (policy, keys_dir) = (&config.policy, config.keys_dir());
    let size = memory::size_at_start(pool, store, &keys_dir, &policy.name, &policy.base).await?;
    if let Some(size) = size {
        let need = memory::needed(&size, &config.trainer, policy.compute);
        tracing::info!(bytes = need.bytes(), %need, "memory that training needs");
        memory::ask(&size, &config.trainer, policy.compute, &Limit::of_this_process())?;
    }
    Ok(())
}

/// Rollouts belong to the tenant of the key that requests them, and a run reads only its policy's
/// tenant.
async fn check_own_key(config: &Config, pool: &PgPool) -> anyhow::Result<()> {
    let Some(secret) = config.trainer.api_key.as_ref().filter(|_| config.auth.required) else {
        return Ok(());
    };
    let tenant = key::tenant_of(pool, secret).await?;
    let policy = &config.policy;
    ensure!(
        tenant.as_ref().is_none_or(|tenant| *tenant == policy.tenant),
        "trainer.api_key is a key of the tenant {}, but the policy {} belongs to {}: make a key with `springtide key \
         create --scope completions --tenant {}`",
        tenant.unwrap_or_default(),
        policy.name,
        policy.tenant,
        policy.tenant
    );
    Ok(())
}
