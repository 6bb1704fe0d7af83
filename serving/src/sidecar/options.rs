//! Configuration of `springtide follow`: `[follow]`.

use crate::remote::{self, InFlight};
use anyhow::{Context, ensure};
use artifact::assignment::CHAMPION;
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
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

/// `[follow]` of the configuration file; only `springtide follow` reads it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// `vllm`, `sglang`, `folder` or `command`. `--engine` overrides it. Default: none; the command needs it.
    pub engine: Option<Engine>,
    /// The alias whose version is followed. Default: `champion`.
    pub alias: String,
    /// Address that the follower listens on: health, metrics, and for `vllm` and `sglang` the routes that
    /// sample.
    /// Default: `127.0.0.1:8005`.
    pub listen: SocketAddr,
    /// The API key that callers must send. Without it, `listen` must be a loopback address. Never
    /// printed. Default: none.
    #[serde(skip_serializing)]
    pub caller_key: Option<String>,
    /// For `vllm` and `sglang`: where the engine listens, `unix:/PATH` (its `--uds`) or `http://127.0.0.1:PORT`.
    /// Nobody else should reach it.
    pub engine_url: Option<String>,
    /// Sent to the engine as a bearer token. Never printed. Default: none.
    #[serde(skip_serializing)]
    pub engine_api_key: Option<String>,
    /// For them, what an update does with requests in flight. `drain`: they end on their version,
    /// and new ones get 503 meanwhile. `cross`: they go on with the next version, and new ones wait.
    /// Default: `drain`.
    pub in_flight: InFlight,
    /// As in `[serve.remote]`. Default: 30000.
    pub drain_ms_max: u64,
    /// As in `[serve.remote]`. Default: 0.001.
    pub probe_error_max: f32,
    /// As in `[serve.remote]`. Default: 60000.
    pub timeout_ms: u64,
    /// As in `[serve.remote]`. Default: `/dev/shm/springtide`.
    pub patch_dir: PathBuf,
    /// Largest body of a request that is passed on, in bytes. Default: 64 MiB.
    pub body_bytes_max: u64,
    /// For `vllm` and `sglang`: most requests that sample or wait to at the same time; further ones get
    /// 503. Default: 1024.
    pub requests_max: u32,
    /// For `folder` and `command`: where the versions are kept. Who may read this folder may read them.
    pub dir: Option<PathBuf>,
    /// Versions kept in `dir`, the one in force included. Default: 2.
    pub keep: usize,
    /// For `command`: a command line for `/bin/sh`. `SPRINGTIDE_FOLDER`, `SPRINGTIDE_VERSION`,
    /// `SPRINGTIDE_ROOT` and mostly `SPRINGTIDE_PATCH` are in its environment.
    pub command: Option<String>,
    /// After so many seconds the command is killed, and its version is not in force. Default: 600.
    pub command_seconds_max: f64,
    /// Longest wait before a version that failed is tried again, in milliseconds. Default: 60000.
    pub back_off_ms_max: u64,
    /// Name of this follower in the fleet. Default: `follower-1`.
    pub replica: String,
    /// Location that it shares with others. Default: `local`.
    pub cluster: String,
    /// API key for the control role, if it requires one. Never printed. Default: none.
    #[serde(skip_serializing)]
    pub api_key: Option<String>,
    /// Folder of the trust state, such as the highest epoch that was verified. Default: `follow` in the
    /// state folder.
    pub state_dir: PathBuf,
    /// Time between two polls of the store, in milliseconds. Announcements arrive sooner. Default: 250.
    pub poll_interval_ms: u64,
    /// How old the store's timestamp may be for a replica that has no trust state yet, in seconds. With
    /// more than 60 it can start while `control` is away, and whoever controls the store can give it
    /// a release that was replaced in that time. Default: 60.
    pub first_timestamp_seconds_max: u64,
    /// Time between two reports to the control role, in milliseconds. Default: 1000.
    pub heartbeat_interval_ms: u64,
    /// Threads of the exact model that an engine is compared with. Default: 1.
    pub threads: u16,
}

impl Default for Options {
    fn default() -> Self {
        let remote = remote::Options::default();
        Options {
            engine: None,
            alias: CHAMPION.into(),
            listen: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8005),
            caller_key: None,
            engine_url: None,
            engine_api_key: None,
            in_flight: remote.in_flight,
            drain_ms_max: remote.drain_ms_max,
            probe_error_max: remote.probe_error_max,
            timeout_ms: remote.timeout_ms,
            patch_dir: remote.patch_dir,
            body_bytes_max: 64 << 20,
            requests_max: 1024,
            dir: None,
            keep: 2,
            command: None,
            command_seconds_max: 600.0,
            back_off_ms_max: 60_000,
            replica: "follower-1".into(),
            cluster: "local".into(),
            api_key: None,
            state_dir: PathBuf::from(".springtide/follow"),
            poll_interval_ms: 250,
            first_timestamp_seconds_max: 60,
            heartbeat_interval_ms: 1000,
            threads: 1,
        }
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
            Some(Engine::Sglang) => (vec![], vec![server]),
            _ => (vec![server], vec![]),
        };
        Ok(remote::Options {
            vllm,
            sglang,
            slow_start_ms: 0,
            patch_dir: self.patch_dir.clone(),
            probe_error_max: self.probe_error_max,
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
        ensure!(self.keep > 0, "follow.keep is 0; the version in force is always kept");
        ensure!(
            self.command_seconds_max > 0.0 && self.command_seconds_max <= 86_400.0,
            "follow.command_seconds_max is {}; give 0 to 86400 seconds",
            self.command_seconds_max
        );
        for (field, value) in [
            ("poll_interval_ms", self.poll_interval_ms),
            ("heartbeat_interval_ms", self.heartbeat_interval_ms),
            ("back_off_ms_max", self.back_off_ms_max),
            ("body_bytes_max", self.body_bytes_max),
            ("requests_max", self.requests_max.into()),
            ("threads", self.threads.into()),
        ] {
            ensure!(value > 0, "follow.{field} is 0; it must be at least 1");
        }
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
