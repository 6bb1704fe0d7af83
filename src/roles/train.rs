//! `springtide train`: executes runs. It has no API; its listener answers for its health and metrics.

use axum::routing::get;
use trainer::Environment;

use super::Base;

pub async fn run(base: Base) -> anyhow::Result<()> {
    let config = base.config.clone();
    let listener = base.listen(config.listen.train).await?;
    let environment = Environment {
        policy: config.policy.name.clone(),
        compute: config.policy.compute,
        quantised: config.policy.quantised.clone(),
        base_dir: Some(config.policy.base.clone()),
        kafka: config.kafka_client(),
        store: base.store()?,
        payloads: base.payloads()?,
        keys_dir: config.keys_dir(),
        serve_url: config.serve_url(),
        pool: base.pool,
    };
    let router = base.metrics.route("/health", get(|| async { "ok" }));
    // The answer to "are you there" ends with the work, whichever way that ends.
    let done = base.shutdown.child_token();
    let server = tokio::spawn(edge::server::run(listener, router, done.clone()));
    let outcome = Box::pin(trainer::run(config.trainer.clone(), environment, base.shutdown)).await;
    done.cancel();
    server.await??;
    outcome
}
