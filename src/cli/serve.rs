//! `springtide serve`: the engine and its API.

use super::App;
use crate::policy_store;
use crate::role::{self, Role};

#[derive(Debug, Clone, clap::Args)]
pub struct Args {}

impl Args {
    pub async fn run(self, app: &App) -> anyhow::Result<()> {
        let role = Role::start(app).await?;
        let config = &app.config;
        let listener = role.listen(config.listen.serve).await?;
        let payloads = config.serve.log_experts.then(|| role::payloads(app)).transpose()?;
        let replica = serving::serve::Replica {
            options: config.serve.clone(),
            policy: config.policy.name.clone(),
            compute: config.policy.compute,
            kafka: config.kafka_client(),
            store: policy_store::open(config)?,
            payloads,
            keys_dir: config.keys_dir(),
            auth: role.auth,
            control_url: Some(config.control_url()),
            extra_routes: role.metrics,
        };
        replica.run(listener, role.shutdown).await
    }
}
