//! Configuration of engines that run elsewhere: `[serve.remote]`.

use anyhow::ensure;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// What an update does with the requests that run on an engine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum InFlight {
    /// They end on the version on which they began.
    #[default]
    Drain,
    /// They go on with the next version.
    Cross,
}

/// Engines that answer instead of our own. Without any, our own engine answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// vLLM servers with our weight-transfer backend. Each holds one version at a time.
    pub vllm: Vec<Server>,
    /// SGLang servers with our loader. Each holds one version at a time.
    pub sglang: Vec<Server>,
    /// Other servers with OpenAI's API, which take no weights from us.
    pub openai: Vec<OpenAiServer>,
    /// Sequences that one engine samples together. Default: the fewest that an engine says, or 256.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slots: Option<usize>,
    /// Folder for weights that an engine reads, best in memory. Engines must see the same files. Its
    /// group may read them; one that somebody else may write to is refused.
    pub patch_dir: PathBuf,
    /// What an update does with the requests that run on an engine.
    pub in_flight: InFlight,
    /// Largest difference between a log-probability that an engine serves and that of our exact model,
    /// in nats. An engine above it gets no traffic. 1e-3 suits f32, 0.05 bf16.
    pub probe_error_max: f32,
    /// Memory for the exact model of one version, and for reading its weights, in bytes.
    pub probe_bytes_max: u64,
    /// A version whose exact model needs more goes unproved, if this is set: its publisher states that the
    /// engines' log-probabilities are within so many nats of the exact ones. Nothing checks that here. Without
    /// it, such a version gets no traffic.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unproved_error_max: Option<f32>,
    /// How long running requests may take to finish before an engine changes its version, in
    /// milliseconds. Then they are cut off.
    pub drain_ms_max: u64,
    /// Longest wait for an engine's answer to a command and between two tokens, in milliseconds.
    pub timeout_ms: u64,
    /// Longest wait for the first token, in milliseconds: reading a long prompt on a busy engine takes long.
    pub first_token_ms: u64,
    /// Whether an engine gets the seeds of requests. vLLM on the CPU dies of one when a prompt is read
    /// in parts.
    pub send_seeds: bool,
    /// How long an engine beside others of its version takes to get its full share of requests after
    /// its probe, in milliseconds: its caches are cold. 0: it gets it at once.
    pub slow_start_ms: u64,
    /// How many more requests than the least busy engine of its version one may run and still get the
    /// next turn of a session whose earlier turns it has in its cache. 0: sessions go to the least busy.
    pub affinity_slack: usize,
    /// Whether the engine's callers send it text, which it reads with the tokenizer that it was started with.
    #[serde(skip)]
    pub reads_text: bool,
}

/// Addresses of one engine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Server {
    /// `http://HOST:PORT`, or `unix:/PATH` of a socket on this machine.
    pub url: String,
    /// Where it takes new weights, if not at `url`. Only this role should reach it.
    pub control_url: Option<String>,
    /// False: somebody else changes its weights, as `springtide follow` does that stands in front of
    /// it. It serves the version that it names, after a probe.
    pub control: bool,
    /// Sent as a bearer token. Never printed.
    #[serde(skip_serializing)]
    pub api_key: Option<String>,
    /// How many requests it gets beside others of its version: twice the weight, twice as many.
    pub weight: f64,
}

/// A server with OpenAI's `POST /v1/completions` that takes no weights from us.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OpenAiServer {
    /// `http://HOST:PORT`, without `/v1`.
    pub url: String,
    /// Sent as a bearer token. Never printed.
    #[serde(skip_serializing)]
    pub api_key: Option<String>,
    /// The model's name there, if the server needs one.
    pub model: Option<String>,
    /// Only for a server that returns no token ids: the alias that it answers for. Whether it holds that
    /// alias' version is not checked, and its answers are never trained on. Without: the server takes and
    /// returns token ids, and a probe tells which version it holds.
    pub alias: Option<String>,
    /// As of other servers.
    pub weight: f64,
}

impl Default for Server {
    fn default() -> Self {
        Server {
            url: String::new(),
            control_url: None,
            control: true,
            api_key: None,
            weight: 1.0,
        }
    }
}

impl Default for OpenAiServer {
    fn default() -> Self {
        OpenAiServer {
            url: String::new(),
            api_key: None,
            model: None,
            alias: None,
            weight: 1.0,
        }
    }
}

impl Server {
    pub fn control_url(&self) -> &str {
        self.control_url.as_deref().unwrap_or(&self.url)
    }

    /// The socket of an engine that has no port.
    pub fn socket(&self) -> Option<&Path> {
        self.url.strip_prefix("unix:").map(Path::new)
    }
}

impl Default for Options {
    fn default() -> Self {
        Options {
            vllm: Vec::new(),
            sglang: Vec::new(),
            openai: Vec::new(),
            slots: None,
            patch_dir: PathBuf::from("/dev/shm/springtide"),
            in_flight: InFlight::Drain,
            probe_error_max: 1e-3,
            probe_bytes_max: 4 << 30,
            unproved_error_max: None,
            drain_ms_max: 30_000,
            timeout_ms: 60_000,
            first_token_ms: 300_000,
            send_seeds: false,
            slow_start_ms: 10_000,
            affinity_slack: 4,
            reads_text: false,
        }
    }
}

impl Options {
    /// Whether engines elsewhere answer instead of our own.
    pub fn is_used(&self) -> bool {
        !(self.vllm.is_empty() && self.sglang.is_empty() && self.openai.is_empty())
    }

    /// Whether some engine gets its weights from here. Only then weights are held here.
    pub fn gives_weights(&self) -> bool {
        self.controlled().any(|(_, server)| server.control)
    }

    fn controlled(&self) -> impl Iterator<Item = (&'static str, &Server)> {
        let vllm = self.vllm.iter().map(|server| ("vllm", server));
        vllm.chain(self.sglang.iter().map(|server| ("sglang", server)))
    }

    /// Of all servers, in the order of their clients.
    pub(super) fn weights(&self) -> Vec<f64> {
        let openai = self.openai.iter().map(|server| server.weight);
        self.controlled()
            .map(|(_, server)| server.weight)
            .chain(openai)
            .collect()
    }

    /// Checks all values. The error names the first invalid one.
    pub fn check(&self) -> anyhow::Result<()> {
        let mut urls = BTreeSet::new();
        for (kind, server) in self.controlled() {
            check_server(kind, &server.url, server.weight, &mut urls)?;
            check_url(kind, server.control_url())?;
            ensure!(
                server.control || server.control_url.is_none(),
                "{kind} {} has control = false and a control_url, which nobody would use; remove one of them",
                server.url
            );
            ensure!(
                server.socket().is_none() || server.control_url.is_none(),
                "{kind} {} has a control_url; an engine on a socket has all routes there",
                server.url
            );
        }
        for server in &self.openai {
            check_server("openai", &server.url, server.weight, &mut urls)?;
            ensure!(
                !server.alias.as_deref().is_some_and(str::is_empty),
                "serve.remote.openai {} has an empty alias; name the alias that it answers for, or leave it out",
                server.url
            );
        }
        ensure!(
            self.probe_error_max > 0.0 && self.probe_error_max.is_finite(),
            "probe_error_max is {}; it must be a number of nats above 0",
            self.probe_error_max
        );
        ensure!(
            self.unproved_error_max
                .is_none_or(|error| error > 0.0 && error.is_finite()),
            "serve.remote.unproved_error_max must be a number of nats above 0, or be left out"
        );
        ensure!(
            self.slots != Some(0),
            "serve.remote.slots is 0; give at least 1, or leave it out"
        );
        ensure!(self.timeout_ms > 0, "timeout_ms of engines is 0; it must be at least 1");
        ensure!(
            self.first_token_ms > 0,
            "serve.remote.first_token_ms is 0; it must be at least 1"
        );
        Ok(())
    }
}

fn check_server<'a>(kind: &str, url: &'a str, weight: f64, urls: &mut BTreeSet<&'a str>) -> anyhow::Result<()> {
    check_url(kind, url)?;
    ensure!(urls.insert(url), "serve.remote has {url} twice; name each engine once");
    ensure!(
        weight > 0.0 && weight.is_finite(),
        "serve.remote.{kind} {url} has the weight {weight}; give a number above 0"
    );
    Ok(())
}

fn check_url(kind: &str, url: &str) -> anyhow::Result<()> {
    ensure!(
        ["http://", "https://", "unix:/"]
            .iter()
            .any(|scheme| url.starts_with(scheme)),
        "{kind} has the address {url:?}; give http://HOST:PORT, https://HOST:PORT or unix:/PATH"
    );
    Ok(())
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
        let other = Options {
            openai: vec![OpenAiServer {
                url: "http://a:1".into(),
                weight: 0.0,
                ..OpenAiServer::default()
            }],
            ..with(vec![server("http://a:1")])
        };
        assert!(error(other.clone()).contains("twice"));
        let weightless = Options { vllm: vec![], ..other };
        assert!(error(weightless).contains("weight"));
        let options = Options {
            probe_error_max: f32::NAN,
            ..Options::default()
        };
        assert!(error(options).contains("probe_error_max"));
    }
}
