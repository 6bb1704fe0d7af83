//! Creates or updates what the roles need before they start: database and schema, the policy's owner,
//! topics, signing keys.

use anyhow::Context;
use artifact::sign::{Role, SigningKey};
use edge::sampler::{self, SamplerKey};
use edge::tenant;
use sqlx::PgPool;

use crate::cli::audit::CommandLine;
use crate::config::Config;
use crate::database;
use crate::stack::postgres;

/// "trainer" signs versions, "release" signs assignments.
const KEYS: [&str; 2] = ["trainer", "release"];

/// Creates what is missing and keeps the rest, so it can run at every start.
pub async fn prepare(config: &Config) -> anyhow::Result<()> {
    if config.postgres.url.is_none() {
        postgres::ensure_database(&postgres::url(
            &config.postgres_dir(),
            config.postgres.port,
            postgres::SUPERUSER,
            postgres::SUPERUSER,
        ))
        .await?;
    }
    let pool = database::connect(config).await?;
    database::migrate(&pool).await?;
    tenant::own(
        &pool,
        &config.policy.name,
        &config.policy.tenant,
        CommandLine::new().actor(),
    )
    .await?;
    register_sampler(config, &pool).await?;
    pool.close().await;
    event_log::ensure_topics(&config.kafka_client()?, config.ingest.partitions)
        .await
        .context("create topics")?;
    let keys = config.keys_dir();
    // In a folder that has keys, a person makes the root key with `springtide policy new-key`, which
    // also signs the revocations that count so far.
    if !KEYS.iter().any(|name| keys.join(format!("{name}.pub")).exists()) {
        SigningKey::create(&keys, Role::Root.name(), Role::Root).context("create the root key")?;
    }
    for name in KEYS {
        SigningKey::load_or_create(&keys, name).with_context(|| format!("create the key {name}"))?;
    }
    Ok(())
}

/// Registers the key of this machine's replica. A revoked key stays revoked.
async fn register_sampler(config: &Config, pool: &PgPool) -> anyhow::Result<()> {
    let key = SamplerKey::load_or_create(&config.serve.sampler_key_path()).context("create the sampler key")?;
    if sampler::find(pool, key.id()).await?.is_none() {
        let name = &config.serve.replica;
        let person = CommandLine::new();
        sampler::register(
            pool,
            &key.public_key(),
            name,
            Some(&config.policy.name),
            None,
            person.actor(),
        )
        .await?;
    }
    Ok(())
}
