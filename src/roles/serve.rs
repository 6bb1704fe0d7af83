//! `springtide serve`: the engine and its API.

use super::Base;

pub async fn run(base: Base) -> anyhow::Result<()> {
    let config = base.config.clone();
    let listener = base.listen(config.listen.serve).await?;
    let store = base.store()?;
    let payloads = config.serve.log_experts.then(|| base.payloads()).transpose()?;
    serving::serve::run(
        config.serve.clone(),
        config.policy.name.clone(),
        config.policy.compute,
        config.kafka_client(),
        store,
        payloads,
        config.keys_dir(),
        base.auth,
        config.control_url(),
        listener,
        base.metrics,
        base.shutdown,
    )
    .await
}
