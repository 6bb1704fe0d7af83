//! Configuration of engines that run elsewhere: `[serve.remote]`.

use anyhow::ensure;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::PathBuf;

/// Engines that answer instead of our own. Without any, our own engine answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// vLLM servers with our weight-transfer backend. Each holds one version at a time.
    pub vllm: Vec<Server>,
    /// Folder for weights that an engine reads, best in memory. Engines must see the same files.
    pub patch_dir: PathBuf,
    /// Largest difference between a log-probability that an engine serves and that of our exact model,
    /// in nats. An engine above it gets no traffic. 1e-3 suits f32, 0.05 bf16.
    pub probe_error_max: f32,
    /// How long running requests may take to finish before an engine changes its version, in
    /// milliseconds. Then they are cut off.
    pub drain_ms_max: u64,
    /// Longest wait for an engine's answer to a command and between two tokens, in milliseconds.
    pub timeout_ms: u64,
    /// Whether an engine gets the seeds of requests. vLLM on the CPU dies of one when a prompt is read
    /// in parts.
    pub send_seeds: bool,
}

/// Addresses of one engine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Server {
    /// `http://HOST:PORT`.
    pub url: String,
    /// Where it takes new weights, if not at `url`. Only this role should reach it.
    pub control_url: Option<String>,
    /// Sent as a bearer token. Never printed.
    #[serde(skip_serializing)]
    pub api_key: Option<String>,
}

impl Server {
    pub fn control_url(&self) -> &str {
        self.control_url.as_deref().unwrap_or(&self.url)
    }
}

impl Default for Options {
    fn default() -> Self {
        Options {
            vllm: Vec::new(),
            patch_dir: PathBuf::from("/dev/shm/springtide"),
            probe_error_max: 1e-3,
            drain_ms_max: 30_000,
            timeout_ms: 60_000,
            send_seeds: false,
        }
    }
}

impl Options {
    /// Checks all values. The error names the first invalid one.
    pub fn check(&self) -> anyhow::Result<()> {
        let mut urls = BTreeSet::new();
        for server in &self.vllm {
            for url in [&server.url, server.control_url()] {
                ensure!(
                    url.starts_with("http://") || url.starts_with("https://"),
                    "serve.remote.vllm has the address {url:?}; give http://HOST:PORT or https://HOST:PORT"
                );
            }
            ensure!(
                urls.insert(&server.url),
                "serve.remote.vllm has {} twice; name each engine once",
                server.url
            );
        }
        ensure!(
            self.probe_error_max > 0.0 && self.probe_error_max.is_finite(),
            "serve.remote.probe_error_max is {}; it must be a number of nats above 0",
            self.probe_error_max
        );
        ensure!(
            self.timeout_ms > 0,
            "serve.remote.timeout_ms is 0; it must be at least 1"
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_what_is_wrong() {
        Options::default().check().unwrap();
        let server = |url: &str| Server {
            url: url.into(),
            ..Server::default()
        };
        let with = |vllm| Options {
            vllm,
            ..Options::default()
        };
        let error = |options: Options| options.check().unwrap_err().to_string();
        assert!(error(with(vec![server("localhost:8100")])).contains("http://HOST:PORT"));
        let twice = vec![server("http://a:1"), server("http://a:1")];
        assert!(error(with(twice)).contains("twice"));
        let options = Options {
            probe_error_max: f32::NAN,
            ..Options::default()
        };
        assert!(error(options).contains("probe_error_max"));
    }
}
