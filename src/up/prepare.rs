//! Creates or updates what the roles need before they start: database and schema, topics, signing
//! keys.

use anyhow::Context;
use artifact::sign::SigningKey;

use crate::config::Config;
use crate::database;
use crate::stack::postgres;

/// "trainer" signs versions, "release" signs assignments.
const KEYS: [&str; 2] = ["trainer", "release"];

/// Creates what is missing and keeps the rest, so it can run at every start.
pub async fn prepare(config: &Config) -> anyhow::Result<()> {
    if config.postgres.url.is_none() {
        postgres::ensure_database(config.postgres.port).await?;
    }
    let pool = database::connect(config).await?;
    database::migrate(&pool).await?;
    pool.close().await;
    ingest::log::ensure_topics(&config.kafka_client(), config.ingest.partitions)
        .await
        .context("create topics")?;
    let keys = config.keys_dir();
    for name in KEYS {
        SigningKey::load_or_create(&keys, name).with_context(|| format!("create the key {name}"))?;
    }
    Ok(())
}
