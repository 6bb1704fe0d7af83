//! What must be there before the roles start: the database and its schema, the topics, the keys that sign.

use anyhow::Context;
use policy::sign::SigningKey;

use crate::config::Config;
use crate::roles::database;
use crate::stack::postgres;

/// Names of the keys: whose signature is on a version, and whose on an assignment.
const KEYS: [&str; 2] = ["trainer", "release"];

/// Idempotent: brings up to date what is not.
pub async fn all(config: &Config) -> anyhow::Result<()> {
    if config.postgres.url.is_none() {
        postgres::ensure_database(config.postgres.port).await?;
    }
    let pool = database::connect(config).await?;
    database::migrate(&pool).await?;
    pool.close().await;
    ingest::kafka::ensure_topics(&config.kafka_client(), config.ingest.partitions)
        .await
        .context("make topics")?;
    let keys = config.keys_dir();
    for name in KEYS {
        SigningKey::load_or_create(&keys, name).with_context(|| format!("make the key {name}"))?;
    }
    Ok(())
}
