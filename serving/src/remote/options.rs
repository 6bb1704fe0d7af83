//! Configuration of engines that run elsewhere: `[serve.remote]`.

use anyhow::ensure;
use artifact::quant::Spec;
use edge::options::above;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::net::SocketAddr;
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

edge::options! {
    /// Engines that answer instead of our own. Without any, our own engine answers.
    pub struct Options {
        /// vLLM servers with our weight-transfer backend; each holds one version: [{ url =
        /// "http://10.0.0.8:8100", control_url = "…", api_key = "…", weight = 1 }]. url: http://,
        /// https:// or unix:/PATH. control_url: where it takes weights, if not at url. control =
        /// false: a `springtide follow` in front of it changes its weights. api_key: sent as a
        /// bearer token.
        pub vllm: Vec<Server> = Vec::new(),
        /// SGLang servers with the loader of our wheel; the same fields.
        pub sglang: Vec<Server> = Vec::new(),
        /// Servers with OpenAI's /v1/completions, which take no weights from us: [{ url = "…",
        /// api_key = "…", model = "…", alias = "…", weight = 1 }]. model: its name there. alias:
        /// only for one that returns no token ids, the alias that it answers for; it is never
        /// trained on.
        pub openai: Vec<OpenAiServer> = Vec::new(),
        /// Sequences that one engine samples together. Default: the fewest that an engine says, or 256.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub slots: Option<usize> = None,
        /// Where the workers of vLLM and SGLang get weights: an address of this machine that they reach, the
        /// port of your choice (0: any free one). Plain HTTP; each update has a random path, which only its
        /// engine is told.
        pub weights_listen: SocketAddr = ([127, 0, 0, 1], 0).into(),
        /// Requests that run when an engine changes its version. `drain`: they end on their version.
        /// `cross`: they go on with the next one, and the log names the version of each token. With
        /// control = false set what the follower has.
        pub in_flight: InFlight = InFlight::Drain,
        /// Largest difference between a log-probability that an engine serves and the one in the version's
        /// manifest, in nats. An engine above it gets no traffic. 1e-3 suits f32, 0.05 bf16.
        pub probe_error_max: f32 = 1e-3 => above(0.0),
        /// A version whose manifest has no log-probabilities goes unproved, if this is set: its publisher states
        /// that those of the engines are within so many nats of the exact ones. Nothing checks that here. Without
        /// it, such a version gets no traffic.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub unproved_error_max: Option<f32> = None,
        /// How long running requests may take to finish before an engine changes its version, in
        /// milliseconds. Then they are cut off.
        pub drain_ms_max: u64 = 30_000,
        /// Longest wait for an engine's answer to a command and between two tokens, in milliseconds. Commands about
        /// weights may take a second longer for each 100 MB of the version.
        pub timeout_ms: u64 = 60_000 => 1..,
        /// Longest wait for the first token, in milliseconds: reading a long prompt on a busy engine takes long.
        pub first_token_ms: u64 = 300_000 => 1..,
        /// Whether an engine gets the seeds of requests. vLLM on the CPU dies of one when a prompt is read
        /// in parts.
        pub send_seeds: bool = false,
        /// How long an engine beside others of its version takes to get its full share of requests after
        /// its probe, in milliseconds: its caches are cold. 0: it gets it at once.
        pub slow_start_ms: u64 = 10_000,
        /// How many more requests than the least busy engine of its version one may run and still get the
        /// next turn of a session whose earlier turns it has in its cache. 0: sessions go to the least busy.
        pub affinity_slack: usize = 4,
        /// What engines get in place of a version: its copy by this spec.
        #[serde(skip)]
        pub quantized: Option<Spec> = None,
        /// Where versions that are adapters lie for the servers that take them.
        #[serde(skip)]
        pub adapters_dir: PathBuf = PathBuf::from("adapters"),
        /// Whether the engine's callers send it text, which it reads with the tokenizer that it was started with.
        #[serde(skip)]
        pub reads_text: bool = false,
    }
}

edge::options! {
    /// Addresses of one engine.
    pub struct Server {
        /// `http://HOST:PORT`, or `unix:/PATH` of a socket on this machine.
        pub url: String = String::new(),
        /// Where it takes new weights, if not at `url`. Only this role should reach it.
        pub control_url: Option<String> = None,
        /// False: somebody else changes its weights, as `springtide follow` does that stands in front of
        /// it. It serves the version that it names, after a probe.
        pub control: bool = true,
        /// Sent as a bearer token. Never printed.
        #[serde(skip_serializing)]
        pub api_key: Option<String> = None,
        /// How many requests it gets beside others of its version: twice the weight, twice as many.
        pub weight: f64 = 1.0,
        /// True, of vLLM: it serves many versions at once, adapters of one base, which it reads from
        /// `state_dir/adapters`. Start it with the base's weights, which stay.
        pub adapters: bool = false,
    }
}

edge::options! {
    /// A server with OpenAI's `POST /v1/completions` that takes no weights from us.
    pub struct OpenAiServer {
        /// `http://HOST:PORT`, without `/v1`.
        pub url: String = String::new(),
        /// Sent as a bearer token. Never printed.
        #[serde(skip_serializing)]
        pub api_key: Option<String> = None,
        /// The model's name there, if the server needs one.
        pub model: Option<String> = None,
        /// Only for a server that returns no token ids: the alias that it answers for. Whether it holds that
        /// alias' version is not checked, and its answers are never trained on. Without: the server takes and
        /// returns token ids, and a probe tells which version it holds.
        pub alias: Option<String> = None,
        /// As of other servers.
        pub weight: f64 = 1.0,
    }
}

impl Server {
    pub fn control_url(&self) -> &str {
        self.control_url.as_deref().unwrap_or(&self.url)
    }

    /// Whether its base weights are ours to change.
    pub fn gives_weights(&self) -> bool {
        self.control && !self.adapters
    }

    /// The socket of an engine that has no port.
    pub fn socket(&self) -> Option<&Path> {
        self.url.strip_prefix("unix:").map(Path::new)
    }
}

impl Options {
    /// Whether engines elsewhere answer instead of our own.
    pub fn is_used(&self) -> bool {
        !(self.vllm.is_empty() && self.sglang.is_empty() && self.openai.is_empty())
    }

    /// Whether some engine gets its weights from here. Only then weights are held here.
    pub fn gives_weights(&self) -> bool {
        self.native().any(|(_, server)| server.gives_weights())
    }

    /// Servers by their engine's own API, which returns token ids. Those of `openai` have none of their own.
    fn native(&self) -> impl Iterator<Item = (&'static str, &Server)> {
        let vllm = self.vllm.iter().map(|server| ("vllm", server));
        vllm.chain(self.sglang.iter().map(|server| ("sglang", server)))
    }

    /// Each server's share of the requests, in the order of the clients.
    pub(super) fn shares(&self) -> Vec<f64> {
        let openai = self.openai.iter().map(|server| server.weight);
        self.native().map(|(_, server)| server.weight).chain(openai).collect()
    }

    /// Checks all values. The error names the first invalid one.
    pub fn check(&self) -> anyhow::Result<()> {
        let mut urls = BTreeSet::new();
        for (kind, server) in self.native() {
            check_server(kind, &server.url, server.weight, &mut urls)?;
            check_url(kind, server.control_url())?;
            ensure!(
                server.control || server.control_url.is_none(),
                "{kind} {} has control = false and a control_url, which nobody would use; remove one of them",
                server.url
            );
            ensure!(
                !server.adapters || kind == "vllm" && server.control,
                "{kind} {} has adapters = true; only vLLM with control = true takes adapters from here",
                server.url
            );
            ensure!(
                !server.adapters || self.quantized.is_none(),
                "{kind} {} has adapters = true, and policy.serves names a quantized copy, which adapters have none of; \
                 remove one of them",
                server.url
            );
            ensure!(
                server.socket().is_none() || server.control_url.is_none(),
                "{kind} {} has a control_url; an engine on a socket has all routes there",
                server.url
            );
        }
        ensure!(
            self.quantized.is_none() || self.sglang.is_empty(),
            "policy.serves names a quantized copy, which SGLang does not take from here: serve it with vLLM, or have \
             `springtide follow` write folders"
        );
        for server in &self.openai {
            check_server("openai", &server.url, server.weight, &mut urls)?;
            ensure!(
                !server.alias.as_deref().is_some_and(str::is_empty),
                "serve.remote.openai {} has an empty alias; name the alias that it answers for, or leave it out",
                server.url
            );
        }
        self.check_ranges("serve.remote")?;
        ensure!(
            self.unproved_error_max
                .is_none_or(|error| error > 0.0 && error.is_finite()),
            "serve.remote.unproved_error_max must be a number of nats above 0, or be left out"
        );
        ensure!(
            self.slots != Some(0),
            "serve.remote.slots is 0; give at least 1, or leave it out"
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
