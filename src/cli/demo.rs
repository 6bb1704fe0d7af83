//! `springtide demo` and `corpus`: hands the crate `demo` what it needs of the configuration.

use std::sync::Arc;

use anyhow::{Context, bail};
use artifact::sign::TrustedKeys;
use tokio::signal::unix::{SignalKind, signal};

use super::App;
use crate::{config::Config, console, database, policy_store};

#[derive(Debug, Clone, clap::Args)]
#[group(skip)] // the flattened arguments have a group of the same name
pub struct Args {
    #[command(flatten)]
    demo: demo::Args,
}

impl Args {
    pub async fn run(self, app: &App) -> anyhow::Result<()> {
        let replay = async {
            let pool = database::connect(&app.config).await?;
            let settings = settings(app, self.demo.surface.name())?;
            demo::run(self.demo, settings, pool).await
        };
        // On SIGTERM the work is dropped, so that it restores a terminal it has taken.
        let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
        tokio::select! {
            done = replay => done,
            _ = terminate.recv() => bail!("SIGTERM: stopped before the end"),
        }
    }
}

/// Executed by the program `springtide-trainer`.
#[derive(Debug, clap::Args)]
#[group(skip)] // the flattened arguments have a group of the same name
pub struct Rehearse {
    #[command(flatten)]
    pub rehearsal: demo::rehearsal::Args,
}

#[derive(Debug, clap::Args)]
pub struct Corpus {
    #[command(subcommand)]
    command: demo::corpus::Command,
}

impl Corpus {
    pub async fn run(self, _: &App) -> anyhow::Result<()> {
        demo::corpus::run(&self.command)
    }
}

fn settings(app: &App, name: &str) -> anyhow::Result<demo::Settings> {
    let config = &app.config;
    let mut surfaces = config.ingest.surface.iter();
    let surface = surfaces.find(|surface| surface.name == name).with_context(|| {
        format!(
            "the demo needs the surface {name:?}: add [[ingest.surface]] name = {name:?} \
             (demo/session.toml is a configuration with a surface of sessions)"
        )
    })?;
    let served = |alias: &str| {
        let arm = config.release.arms.iter().find(|arm| arm.alias == alias);
        arm.map_or_else(demo::Served::default, |arm| demo::Served {
            temperature_max: arm.temperature_max,
            probability_min: arm.probability_min,
        })
    };
    let url = |url: String| url.trim_end_matches('/').to_owned();
    Ok(demo::Settings {
        serve_url: url(config.serve_url()),
        ingest_url: url(config.ingest_url()),
        control_url: url(config.control_url()),
        api_key: config.client.api_key.clone(),
        http: edge::tls::client().build().context("set up the HTTP client")?,
        policy: config.policy.name.clone(),
        base: config.policy.base.clone(),
        surface: demo::Surface {
            is_of_episodes: surface.trajectory == ingest::reward::Unit::Episode,
            is_boolean: surface.metric_type == ingest::reward::MetricType::Boolean,
            accept: surface.accept,
            reject: surface.reject,
            decline: surface.decline,
            horizon_seconds: surface.horizon_seconds,
        },
        state_dir: config.state_dir.clone(),
        learning: served("learner"),
        following: served("champion"),
        load_version: load_version(app.config.clone()),
        console: demo::Console {
            has_screen: console::has_screen,
            hold_log: || Box::new(console::hold_lines()),
            newest_log_lines: console::newest_held,
        },
    })
}

/// Rebuilds versions from the configured store, trusting the configured keys.
fn load_version(config: Config) -> demo::LoadVersion {
    demo::LoadVersion(Arc::new(move |serial| {
        let config = config.clone();
        Box::pin(async move {
            let (store, policy) = (policy_store::open(&config)?, &config.policy.name);
            let keys = TrustedKeys::load(&config.keys_dir()).context("load the trusted keys")?;
            let keys = store.trusted(policy, keys).await.context("look for revoked keys")?;
            let rebuilt = store.materialize_model(policy, serial, &keys, &[]).await;
            Ok(rebuilt.with_context(|| format!("rebuild version {serial}"))?.checkpoint)
        })
    }))
}
