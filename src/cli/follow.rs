//! `springtide follow`: keeps an engine that is not ours on the version of an alias.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::Context;
use edge::auth::Auth;
use serving::follow::{Engine, Follow, Options};
use serving::remote::InFlight;

use super::App;
use crate::config::{Config, Part};
use crate::policy_store;
use crate::role::{listen_with_key, shutdown};

/// Each overrides the field of `[follow]` with the same name.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// What is kept up to date.
    #[arg(long)]
    engine: Option<EngineName>,
    /// The alias whose version is followed.
    #[arg(long)]
    alias: Option<String>,
    /// Address to listen on: health, metrics, and the routes of an engine.
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<SocketAddr>,
    /// For vllm and sglang: where the engine listens, `unix:/PATH` or `http://127.0.0.1:PORT`.
    #[arg(long, value_name = "URL")]
    engine_url: Option<String>,
    /// For vllm and sglang: whether requests in flight end before an update, or go on with the next version.
    #[arg(long)]
    in_flight: Option<InFlightName>,
    /// For folder and command: where the versions are kept.
    #[arg(long)]
    dir: Option<PathBuf>,
    /// For folder and command: how many versions are kept.
    #[arg(long, value_name = "COUNT")]
    keep: Option<usize>,
    /// For command: a command line for /bin/sh that has the engine take a version.
    #[arg(long)]
    command: Option<String>,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum EngineName {
    /// A vLLM server, which is reached through the follower alone.
    Vllm,
    /// An SGLang server, likewise.
    Sglang,
    /// A folder per version, and a link to the one in force.
    Folder,
    /// The same, and a command for each version.
    Command,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum InFlightName {
    Drain,
    Cross,
}

impl Args {
    pub async fn run(self, app: &App) -> anyhow::Result<()> {
        let shutdown = shutdown::on_signal(&app.config.listen)?;
        let mut config = app.config.clone();
        self.set(&mut config.follow)?;
        config.follow.check()?;
        let options = config.follow.clone();
        let store = policy_store::open(&config)?;
        let listener = listen_with_key(&config, Part::Follow, options.caller_key.as_ref(), "follow.caller_key").await?;
        let auth = Auth::fixed(options.caller_key.as_deref());
        let extra_routes = auth.protect_beyond_loopback(app.metrics.clone(), options.listen);
        let follow = Follow {
            policy: config.policy.name.clone(),
            kafka: announcements(&config),
            store,
            keys_dir: config.keys_dir(),
            control_url: config.control_url(),
            extra_routes,
            options,
        };
        follow.run(listener, shutdown).await
    }

    fn set(self, options: &mut Options) -> anyhow::Result<()> {
        let engine = self.engine.map(|engine| match engine {
            EngineName::Vllm => Engine::Vllm,
            EngineName::Sglang => Engine::Sglang,
            EngineName::Folder => Engine::Folder,
            EngineName::Command => Engine::Command,
        });
        options.engine = engine.or(options.engine);
        let in_flight = self.in_flight.map(|in_flight| match in_flight {
            InFlightName::Drain => InFlight::Drain,
            InFlightName::Cross => InFlight::Cross,
        });
        options.in_flight = in_flight.unwrap_or(options.in_flight);
        options.listen = self.listen.unwrap_or(options.listen);
        options.keep = self.keep.unwrap_or(options.keep);
        if let Some(alias) = self.alias {
            options.alias = alias;
        }
        if let Some(dir) = self.dir {
            options.dir = Some(std::path::absolute(dir).context("--dir")?);
        }
        options.engine_url = self.engine_url.or_else(|| options.engine_url.take());
        options.command = self.command.or_else(|| options.command.take());
        Ok(())
    }
}

/// An engine's machine need not reach the log: then assignments are found by polling the store.
fn announcements(config: &Config) -> Option<event_log::ClientOptions> {
    match config.kafka_client() {
        Ok(client) => Some(client),
        Err(error) => {
            let error = format!("{error:#}");
            tracing::info!(error, "no log: new versions are found by polling the store");
            None
        }
    }
}
