//! Creates or updates what the roles need before they start: database and schema, the policy's owner,
//! topics, signing keys.

use anyhow::Context;
use artifact::sign::{Role, SigningKey};
use edge::sampler::SamplerKey;
use edge::tenant;

use crate::cli::audit::CommandLine;
use crate::cli::secrets;
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
    let sampler = SamplerKey::load_or_create(&config.serve.sampler_key_path()).context("create the sampler key")?;
    secrets::register_sampler(&pool, config, &sampler, &config.serve.replica).await?;
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
