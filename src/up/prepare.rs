//! Makes what the roles need before they start: database and schema, topics, signing keys.

use anyhow::Context;
use artifact::sign::SigningKey;

use crate::config::Config;
use crate::database;
use crate::stack::postgres;

/// The first signs versions, the second assignments.
const KEYS: [&str; 2] = ["trainer", "release"];

/// Makes what is missing and leaves the rest alone, so it can run at every start.
pub async fn all(config: &Config) -> anyhow::Result<()> {
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
