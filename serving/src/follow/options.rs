//! Configuration of `springtide follow`: `[follow]`.

use crate::remote::{self, InFlight};
use anyhow::{Context, ensure};
use artifact::assignment::CHAMPION;
use artifact::quant::Spec;
use edge::options::{above, above_to};
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::path::PathBuf;

/// What a follower keeps up to date.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// A vLLM server with our weight-transfer backend. The follower is in front of it.
    Vllm,
    /// The same with an SGLang server and our loader.
    Sglang,
    /// A folder of Hugging Face folders.
    Folder,
    /// The same, and a command that has an engine take each version.
    Command,
}

edge::options! {
    /// `[follow]` of the configuration file; only `springtide follow` reads it.
    pub struct Options {
        /// `vllm`, `sglang`, `folder` or `command`. `--engine` overrides it. Default: none; the command needs it.
        pub engine: Option<Engine> = None,
        /// The alias whose version is followed.
        pub alias: String = CHAMPION.into(),
        /// Address that the follower listens on: health, metrics, and for `vllm` and `sglang` the
        /// routes that sample.
        pub listen: SocketAddr = ([127, 0, 0, 1], 8005).into(),
        /// The API key that callers must send. Without it, `listen` must be a loopback address.
        /// Never printed.
        #[serde(skip_serializing)]
        pub caller_key: Option<String> = None,
        /// For `vllm` and `sglang`: where the engine listens, `unix:/PATH` (its `--uds`) or `http://127.0.0.1:PORT`.
        /// Nobody else should reach it.
        pub engine_url: Option<String> = None,
        /// Sent to the engine as a bearer token. Never printed.
        #[serde(skip_serializing)]
        pub engine_api_key: Option<String> = None,
        /// For them, what an update does with requests in flight. `drain`: they end on their
        /// version, and new ones get 503 meanwhile. `cross`: they go on with the next version, and
        /// new ones wait.
        pub in_flight: InFlight = InFlight::Drain,
        /// As in `[serve.remote]`.
        pub drain_ms_max: u64 = 30_000,
        /// As in `[serve.remote]`.
        pub probe_error_max: f32 = 1e-3 => above(0.0),
        /// As in `[serve.remote]`.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub unproved_error_max: Option<f32> = None,
        /// As in `[serve.remote]`.
        pub timeout_ms: u64 = 60_000 => 1..,
        /// As in `[serve.remote]`.
        pub weights_listen: SocketAddr = ([127, 0, 0, 1], 0).into(),
        /// What the engine gets in place of a version: its copy by this spec.
        #[serde(skip)]
        pub quantized: Option<Spec> = None,
        /// Largest body of a request that is passed on, in bytes.
        pub body_bytes_max: u64 = 64 << 20 => 1..,
        /// For `vllm` and `sglang`: most requests that sample or wait to at the same time; further
        /// ones get 503.
        pub requests_max: u32 = 1024 => 1..,
        /// For `folder` and `command`: where the versions are kept. Who may read this folder may read them.
        pub dir: Option<PathBuf> = None,
        /// Versions kept in `dir`, the one in force included.
        pub keep: usize = 2 => 1..,
        /// For `command`: a command line for `/bin/sh` that runs before a version is in force.
        /// `SPRINGTIDE_FOLDER`, `SPRINGTIDE_VERSION`, `SPRINGTIDE_ROOT` and mostly
        /// `SPRINGTIDE_PATCH` are in its environment.
        pub command: Option<String> = None,
        /// After so many seconds the command is killed, and tried again.
        pub command_seconds_max: f64 = 600.0 => above_to(0.0, 86_400.0),
        /// Longest wait before a version that failed is tried again, in milliseconds.
        pub back_off_ms_max: u64 = 60_000 => 1..,
        /// Name of this follower in the fleet.
        pub replica: String = "follower-1".into(),
        /// Location that it shares with others.
        pub cluster: String = "local".into(),
        /// API key for the control role, if it requires one. Never printed.
        #[serde(skip_serializing)]
        pub api_key: Option<String> = None,
        /// Folder of the trust state, such as the highest epoch that was verified. Default: `follow` in the
        /// state folder.
        pub state_dir: PathBuf = PathBuf::from(".springtide/follow"),
        /// Time between two polls of the store, in milliseconds; twenty times as long, up to 5 s,
        /// while assignments are announced.
        pub poll_interval_ms: u64 = 250 => 1..,
        /// How old the store's timestamp may be for a replica that has no trust state yet, in
        /// seconds. With more than 60 it can start while `control` is away, and whoever controls the
        /// store can give it a release that was replaced in that time.
        pub first_timestamp_seconds_max: u64 = 60,
        /// Time between two reports to the control role, in milliseconds.
        pub heartbeat_interval_ms: u64 = 1000 => 1..,
    }
}

impl Options {
    /// The engine as the updater knows engines.
    pub(super) fn remote(&self) -> anyhow::Result<remote::Options> {
        let url = self.engine_url.clone();
        let url = url.context("follow.engine_url is not set; give unix:/PATH or http://127.0.0.1:PORT")?;
        let server = remote::Server {
            url,
            api_key: self.engine_api_key.clone(),
            ..remote::Server::default()
        };
        let (vllm, sglang) = match self.engine {
            Some(Engine::Vllm) => (vec![server], vec![]),
            Some(Engine::Sglang) => (vec![], vec![server]),
            None | Some(Engine::Folder | Engine::Command) => (vec![], vec![]),
        };
        Ok(remote::Options {
            vllm,
            sglang,
            slow_start_ms: 0,
            weights_listen: self.weights_listen,
            quantized: self.quantized,
            probe_error_max: self.probe_error_max,
            unproved_error_max: self.unproved_error_max,
            drain_ms_max: self.drain_ms_max,
            timeout_ms: self.timeout_ms,
            in_flight: self.in_flight,
            reads_text: true,
            ..remote::Options::default()
        })
    }

    /// Checks all values. The error names the first invalid one.
    pub fn check(&self) -> anyhow::Result<()> {
        ensure!(
            !self.alias.is_empty(),
            "follow.alias is empty; name an alias, such as champion"
        );
        ensure!(
            !self.replica.is_empty() && !self.replica.contains(['/', ' ']),
            "follow.replica is {:?}; give a name without spaces or slashes",
            self.replica
        );
        self.check_ranges("follow")?;
        for (field, text) in [
            ("caller_key", &self.caller_key),
            ("engine_api_key", &self.engine_api_key),
            ("api_key", &self.api_key),
            ("command", &self.command),
        ] {
            ensure!(
                text.as_ref().is_none_or(|text| !text.is_empty()),
                "follow.{field} is empty; leave it out or give a value"
            );
        }
        match self.engine {
            None => Ok(()),
            Some(Engine::Vllm | Engine::Sglang) => self.remote()?.check().context("follow"),
            Some(Engine::Folder | Engine::Command) => {
                ensure!(
                    self.dir.is_some(),
                    "follow.dir is not set; name the folder where versions are kept"
                );
                ensure!(
                    self.engine != Some(Engine::Command) || self.command.is_some(),
                    "follow.command is not set; give the command that has your engine take a version"
                );
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_what_is_missing() {
        Options::default().check().unwrap();
        let error = |options: Options| format!("{:#}", options.check().unwrap_err());
        let of = |engine| Options {
            engine: Some(engine),
            ..Options::default()
        };
        assert!(error(of(Engine::Vllm)).contains("follow.engine_url"));
        assert!(error(of(Engine::Folder)).contains("follow.dir"));
        let with_dir = Options {
            dir: Some("/srv/weights".into()),
            ..of(Engine::Command)
        };
        assert!(error(with_dir).contains("follow.command"));
        let with_url = |url: &str| Options {
            engine_url: Some(url.into()),
            ..of(Engine::Vllm)
        };
        with_url("unix:/run/vllm.sock").check().unwrap();
        assert!(error(with_url("localhost:8000")).contains("http://HOST:PORT"));
        let none_kept = Options {
            keep: 0,
            ..Options::default()
        };
        assert!(error(none_kept).contains("follow.keep"));
    }
}
