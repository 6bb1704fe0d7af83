//! The configuration of every role: `springtide.toml`, overridden by `SPRINGTIDE__SECTION__FIELD`
//! in the environment. Each crate declares its own section; this file declares the binary's.
//! Contradictions are refused before anything starts. Over 500 lines, because a fifth of it is the
//! tests that compare it with `springtide.toml`.

mod check;

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use figment::Figment;
use figment::providers::{Env, Format};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::stack::postgres;

/// The file's language, read by the `toml` crate that the rest of the program uses.
struct Toml;

impl Format for Toml {
    type Error = toml::de::Error;
    const NAME: &'static str = "TOML";

    fn from_str<T: DeserializeOwned>(text: &str) -> Result<T, Self::Error> {
        toml::from_str(text)
    }
}

/// Read without `--config`, if it exists.
pub const FILE: &str = "springtide.toml";
const ENV_PREFIX: &str = "SPRINGTIDE__";

/// Everything in force. Relative paths are relative to the folder of the file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Folder of everything that a stack on this machine keeps: database, log, weights, keys, log
    /// files. Default: `.springtide`.
    pub state_dir: PathBuf,
    pub policy: Policy,
    pub listen: Listen,
    pub client: Client,
    pub auth: edge::auth::AuthOptions,
    pub telemetry: Telemetry,
    pub postgres: Postgres,
    pub kafka: Kafka,
    pub stack: Stack,
    pub serve: serving::ServeOptions,
    pub release: serving::ReleaseOptions,
    pub ingest: ingest::Options,
    pub spool: ingest::spool::Options,
    pub relay: serving::relay::Options,
    pub trainer: trainer::Options,
}

/// `[policy]`: the model that is trained and served.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Policy {
    /// Its name, also the `model` of requests. Default: `demo`.
    pub name: String,
    /// Hugging Face folder that becomes the first version of a new policy. Default:
    /// `models/demo-base`.
    pub base: PathBuf,
    /// Precision of matrix products in every role: `f32` or `bf16`. Default: `f32`.
    pub compute: model::exact::Compute,
    /// Quantised copies that every manifest names: `fp8-e4m3-b128.1`, `int4-sym-g32.1`. Default:
    /// none.
    pub quantised: Vec<artifact::quant::Spec>,
    /// Object store of versions: a `file://` or `s3://` URL, or a relay's `http://` URL for reading
    /// only. Default: `store` in the state folder.
    pub store: Option<String>,
    /// API key for a relay. Never printed. Default: none.
    #[serde(skip_serializing)]
    pub store_api_key: Option<String>,
    /// Disk in the state folder for objects of a remote store, bytes. Processes share it, and
    /// interrupted downloads resume from it. A larger object is an error. Default: 64 GiB.
    pub cache_bytes_max: u64,
    /// Parts of a remote object (8 MiB each) to fetch at once, 1 to 256. Default: 8.
    pub cache_streams: usize,
    /// Threads per process for encoding, verifying and applying deltas and packing weights, 1 to
    /// 256. Default: 1.
    pub sync_threads: u16,
    /// Folder of the signing keys and the trusted public keys. Default: `keys` in the state folder.
    pub keys: Option<PathBuf>,
}

/// `[listen]`: where each role listens. Addresses other than loopback need `auth.required`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Listen {
    /// Completions. Default: `127.0.0.1:8000`.
    pub serve: SocketAddr,
    /// Feedback and generations. Default: `127.0.0.1:8001`.
    pub ingest: SocketAddr,
    /// Runs, versions, releases, fleet. Default: `127.0.0.1:8002`.
    pub control: SocketAddr,
    /// The trainer's health and metrics. Default: `127.0.0.1:8003`.
    pub train: SocketAddr,
}

/// `[client]`: how roles and commands reach the roles.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Client {
    /// Base URL. Default: the address of `listen.serve`.
    pub serve: Option<String>,
    /// Base URL. Default: the address of `listen.ingest`.
    pub ingest: Option<String>,
    /// Base URL. Default: the address of `listen.control`.
    pub control: Option<String>,
    /// API key that commands such as `springtide release` send. Never printed. Default: none.
    #[serde(skip_serializing)]
    pub api_key: Option<String>,
}

/// `[telemetry]`: logs and traces. Prometheus metrics are always on, at `/metrics`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Telemetry {
    /// Format of log lines: `human` or `json`. Default: `human`.
    pub format: LogFormat,
    /// Log levels by module, in the syntax of the crate tracing-subscriber. Default: `info`.
    pub filter: String,
    /// OTLP endpoint for traces over HTTP, e.g. `http://127.0.0.1:4318/v1/traces`. Default: none,
    /// no traces.
    pub otlp_endpoint: Option<String>,
}

/// Format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    Human,
    Json,
}

/// `[postgres]`: the trajectory store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Postgres {
    /// An external Postgres 18: `postgres://user:password@host/database`. Never printed.
    /// Default: none, `springtide up` runs a private one.
    #[serde(skip_serializing)]
    pub url: Option<String>,
    /// Loopback port of the private Postgres. Default: 15432.
    pub port: u16,
    /// Largest number of connections per role, at least 4. Default: 16.
    pub connections_max: u32,
}

/// `[kafka]`: the log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Kafka {
    /// An external cluster: `host:port`, comma-separated. Default: none, `springtide up` runs a
    /// private node.
    pub brokers: Option<String>,
    /// First part of every topic's name. Default: `springtide`.
    pub topic_prefix: String,
    /// Retention of new topics, hours. Must exceed the longest outage of ingest. Default: 168.
    pub log_retention_hours: u32,
    /// Largest size of a partition of new topics, bytes; 0: no limit. Default: 0.
    pub log_bytes_max: u64,
    /// Retention of the dead-letter queue, days. Default: 90.
    pub dead_letter_retention_days: u32,
    /// librdkafka settings, passed through unchanged; they override Springtide's own. Never
    /// printed. Default: none.
    #[serde(skip_serializing)]
    pub librdkafka: BTreeMap<String, String>,
    /// Loopback port of the private node. Default: 19192.
    pub port: u16,
    /// Loopback port between the private node's broker and controller. Default: 19193.
    pub controller_port: u16,
    /// Largest Java heap of the private node, MiB. Default: 384.
    pub heap_mib: u32,
}

/// `[stack]`: the private Postgres and Kafka.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Stack {
    /// Folder of what is downloaded once, about 150 MB unpacked. Default: `.stack`.
    pub cache: PathBuf,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            state_dir: ".springtide".into(),
            policy: Policy::default(),
            listen: Listen::default(),
            client: Client::default(),
            auth: edge::auth::AuthOptions::default(),
            telemetry: Telemetry::default(),
            postgres: Postgres::default(),
            kafka: Kafka::default(),
            stack: Stack::default(),
            serve: serving::ServeOptions::default(),
            release: serving::ReleaseOptions::default(),
            ingest: ingest::Options::default(),
            spool: ingest::spool::Options::default(),
            relay: serving::relay::Options::default(),
            trainer: trainer::Options::default(),
        }
    }
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            name: "demo".to_owned(),
            base: "models/demo-base".into(),
            compute: model::exact::Compute::F32,
            quantised: vec![],
            store: None,
            store_api_key: None,
            cache_bytes_max: 64 << 30,
            cache_streams: 8,
            sync_threads: 1,
            keys: None,
        }
    }
}

impl Default for Listen {
    fn default() -> Self {
        Self {
            serve: loopback(8000),
            ingest: loopback(8001),
            control: loopback(8002),
            train: loopback(8003),
        }
    }
}

impl Default for Telemetry {
    fn default() -> Self {
        Self {
            format: LogFormat::Human,
            filter: "info".to_owned(),
            otlp_endpoint: None,
        }
    }
}

impl Default for Postgres {
    fn default() -> Self {
        Self {
            url: None,
            port: 15432,
            connections_max: 16,
        }
    }
}

impl Default for Kafka {
    fn default() -> Self {
        Self {
            brokers: None,
            topic_prefix: "springtide".to_owned(),
            log_retention_hours: 168,
            log_bytes_max: 0,
            dead_letter_retention_days: 90,
            librdkafka: BTreeMap::new(),
            port: 19192,
            controller_port: 19193,
            heap_mib: 384,
        }
    }
}

impl Default for Stack {
    fn default() -> Self {
        Self { cache: ".stack".into() }
    }
}

impl Config {
    /// Reads `file` (default: `springtide.toml` in the current folder) and the environment. Checks
    /// the values and makes paths absolute.
    pub fn load(file: Option<&Path>) -> anyhow::Result<Self> {
        let config = Self::load_without_keys(file)?;
        config.check_auth().context("the configuration contradicts itself")?;
        Ok(config)
    }

    /// Like [`Config::load`], but API keys may be missing: for the commands that make them.
    pub fn load_without_keys(file: Option<&Path>) -> anyhow::Result<Self> {
        let here = std::env::current_dir().context("find the current folder")?;
        let file = match file {
            Some(file) if !file.is_file() => bail!("--config {}: there is no such file", file.display()),
            Some(file) => Some(here.join(file)),
            None => Some(here.join(FILE)).filter(|file| file.is_file()),
        };
        let mut figment = Figment::new();
        if let Some(file) = &file {
            figment = figment.merge(Toml::file_exact(file));
        }
        let mut config = Self::extract(figment)?;
        config.check().context("the configuration contradicts itself")?;
        let base = file.as_deref().and_then(Path::parent).unwrap_or(&here);
        config.resolve(base);
        Ok(config)
    }

    fn extract(figment: Figment) -> anyhow::Result<Self> {
        figment
            .merge(Env::prefixed(ENV_PREFIX).split("__"))
            .extract()
            .context("read the configuration")
    }

    /// Makes paths absolute. `serve.state_dir` is in the state folder unless it was set.
    fn resolve(&mut self, base: &Path) {
        if self.serve.state_dir == serving::ServeOptions::default().state_dir {
            self.serve.state_dir = self.state_dir.join("serve");
        }
        for path in [
            &mut self.state_dir,
            &mut self.policy.base,
            &mut self.stack.cache,
            &mut self.serve.state_dir,
        ] {
            *path = base.join(&*path);
        }
        self.policy.keys = self.policy.keys.take().map(|keys| base.join(keys));
        let payloads = || format!("file://{}", self.state_dir.join("payloads").display());
        self.ingest.payload_store.get_or_insert_with(payloads);
    }

    pub fn store_url(&self) -> String {
        let own = || format!("file://{}", self.state_dir.join("store").display());
        self.policy.store.clone().unwrap_or_else(own)
    }

    pub fn keys_dir(&self) -> PathBuf {
        let own = || self.state_dir.join("keys");
        self.policy.keys.clone().unwrap_or_else(own)
    }

    /// Folder of the log files, one per supervised process.
    pub fn log_dir(&self) -> PathBuf {
        self.state_dir.join("log")
    }

    pub fn postgres_url(&self) -> String {
        let own = || postgres::url(self.postgres.port, postgres::DATABASE);
        self.postgres.url.clone().unwrap_or_else(own)
    }

    pub fn kafka_client(&self) -> ingest::log::ClientOptions {
        let own = || format!("127.0.0.1:{}", self.kafka.port);
        ingest::log::ClientOptions {
            brokers: self.kafka.brokers.clone().unwrap_or_else(own),
            topic_prefix: self.kafka.topic_prefix.clone(),
            log_retention_hours: self.kafka.log_retention_hours,
            log_bytes_max: self.kafka.log_bytes_max,
            dead_letter_retention_days: self.kafka.dead_letter_retention_days,
            librdkafka: self.kafka.librdkafka.clone(),
        }
    }

    pub fn serve_url(&self) -> String {
        url(self.client.serve.as_ref(), self.listen.serve)
    }

    pub fn ingest_url(&self) -> String {
        url(self.client.ingest.as_ref(), self.listen.ingest)
    }

    pub fn control_url(&self) -> String {
        url(self.client.control.as_ref(), self.listen.control)
    }

    /// The addresses that a stack on this machine listens on, with the fields that set them.
    pub fn own_addresses(&self) -> Vec<(&'static str, SocketAddr)> {
        let listen = &self.listen;
        let mut addresses = vec![
            ("listen.serve", listen.serve),
            ("listen.ingest", listen.ingest),
            ("listen.control", listen.control),
            ("listen.train", listen.train),
        ];
        if self.postgres.url.is_none() {
            addresses.push(("postgres.port", loopback(self.postgres.port)));
        }
        if self.kafka.brokers.is_none() {
            addresses.push(("kafka.port", loopback(self.kafka.port)));
            addresses.push(("kafka.controller_port", loopback(self.kafka.controller_port)));
        }
        addresses
    }
}

fn url(given: Option<&String>, listens: SocketAddr) -> String {
    match given {
        Some(url) => url.trim_end_matches('/').to_owned(),
        None => local_url(listens),
    }
}

/// How this machine reaches a role: over loopback where the role listens on every interface.
pub fn local_url(listens: SocketAddr) -> String {
    match listens.ip().is_unspecified() {
        true => format!("http://{}", loopback(listens.port())),
        false => format!("http://{listens}"),
    }
}

fn loopback(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn parse(toml: &str) -> anyhow::Result<Config> {
        Ok(Figment::new().merge(Toml::string(toml)).extract()?)
    }

    const DOCUMENTED: &str = include_str!("../springtide.toml");

    #[test]
    fn springtide_toml_has_the_defaults() {
        assert_eq!(parse(DOCUMENTED).unwrap(), Config::default());
    }

    #[test]
    fn springtide_toml_mentions_every_key() {
        let mentioned = mentioned();
        let (mut keys, mut missing) = (0, Vec::new());
        for header in mentioned
            .iter()
            .filter_map(|(header, key)| key.is_none().then_some(header))
        {
            if header == "[kafka.librdkafka]" {
                continue; // takes any key
            }
            // An unknown key makes serde name the keys that a section has.
            let unknown = Toml::string(&format!("{header}\nno_such_key = 1"));
            let error = Figment::new().merge(unknown).extract::<Config>().unwrap_err();
            let figment::error::Kind::UnknownField(_, fields) = error.kind else {
                panic!("{header}: {error}");
            };
            for field in fields {
                let section = header.trim_matches(['[', ']']);
                let path = if section.is_empty() {
                    (*field).to_owned()
                } else {
                    format!("{section}.{field}")
                };
                let is_mentioned = mentioned.iter().any(|(other, key)| {
                    let other_section = other.trim_matches(['[', ']']);
                    (other == header && key.as_deref() == Some(*field))
                        || other_section == path
                        || other_section.starts_with(&format!("{path}."))
                });
                keys += 1;
                if !is_mentioned {
                    missing.push(path);
                }
            }
        }
        assert!(missing.is_empty(), "springtide.toml does not mention {missing:?}");
        assert!(keys > 100, "only {keys} keys were found");
    }

    /// Every section header, with each of its keys and without a key; commented ones included.
    fn mentioned() -> BTreeSet<(String, Option<String>)> {
        let mut header = String::new();
        let mut mentioned = BTreeSet::from([(header.clone(), None)]);
        for line in DOCUMENTED.lines() {
            let line = line.trim_start_matches(['#', ' ']);
            if line.starts_with('[') {
                header = line.split_whitespace().next().unwrap_or_default().to_owned();
                mentioned.insert((header.clone(), None));
            } else if let Some((key, _)) = line.split_once('=') {
                mentioned.insert((header.clone(), Some(key.trim().to_owned())));
            }
        }
        mentioned
    }

    #[test]
    fn an_unknown_field_is_refused_by_name() {
        let error = parse("[listen]\nserv = \"127.0.0.1:1\"").unwrap_err();
        assert!(error.to_string().contains("serv"), "{error}");
    }

    #[test]
    fn default_paths_are_in_the_state_folder() {
        let mut config = parse("state_dir = \"elsewhere\"").unwrap();
        config.resolve(Path::new("/srv"));
        assert_eq!(config.store_url(), "file:///srv/elsewhere/store");
        assert_eq!(config.keys_dir(), Path::new("/srv/elsewhere/keys"));
        assert_eq!(
            config.ingest.payload_store.as_deref(),
            Some("file:///srv/elsewhere/payloads")
        );
        assert_eq!(config.serve.state_dir, Path::new("/srv/elsewhere/serve"));
    }

    #[test]
    fn a_role_on_every_interface_is_reached_over_loopback() {
        let config = parse("[listen]\ncontrol = \"0.0.0.0:9002\"").unwrap();
        assert_eq!(config.control_url(), "http://127.0.0.1:9002");
        let config = parse("[client]\ncontrol = \"https://control.example/\"").unwrap();
        assert_eq!(config.control_url(), "https://control.example");
    }

    #[test]
    fn secrets_are_not_printed() {
        let text = "[postgres]\nurl = 'postgres://u:secret-1@h/d'\n[client]\napi_key = 'secret-2'\n\
                    [serve]\napi_key = 'secret-3'\n[trainer]\napi_key = 'secret-4'\n\
                    [spool]\napi_key = 'secret-6'\ncaller_key = 'secret-7'\n\
                    [relay]\napi_key = 'secret-8'\ncaller_key = 'secret-9'\n[policy]\nstore_api_key = 'secret-10'\n\
                    [kafka.librdkafka]\n'sasl.password' = 'secret-5'";
        let shown = toml::to_string(&parse(text).unwrap()).unwrap();
        assert!(!shown.contains("secret"), "{shown}");
    }
}
