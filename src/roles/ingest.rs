//! `springtide ingest`: events in.

use super::Base;

pub async fn run(base: Base) -> anyhow::Result<()> {
    let listener = base.listen(base.config.listen.ingest).await?;
    ingest::run(
        base.config.ingest.clone(),
        base.config.kafka_client(),
        base.pool,
        base.auth,
        listener,
        base.metrics,
        base.shutdown,
    )
    .await
}
