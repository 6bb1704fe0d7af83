//! One file for every role: `springtide.toml`, overlaid by `SPRINGTIDE__SECTION__FIELD` from the environment. This file holds
//! what the binary itself needs; each crate brings its own section. Contradictions are refused here, before anything
//! starts, with what to do about them. Knows nothing of what the roles do with their sections.

mod check;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use figment::Figment;
use figment::providers::{Env, Format, Toml};
use serde::{Deserialize, Serialize};

use crate::stack::postgres;

/// Read where no `--config` is given, if it is there.
pub const FILE: &str = "springtide.toml";
const ENV_PREFIX: &str = "SPRINGTIDE__";

/// Everything in force. Relative paths are relative to the folder of the file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Folder of everything that a stack on this machine remembers: database, log, weights, keys, log files.
    /// Default: `.springtide`.
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
    /// Hugging Face folder that becomes the first version where there is none yet. Default: `models/demo-base`.
    pub base: PathBuf,
    /// In which precision the factors of matrix products are, in every role: `f32` or `bf16`. Default: `f32`.
    pub compute: policy::model::Compute,
    /// Quantised copies that the manifest of every version names, by their specs: `fp8-e4m3-b128.1`, `int4-sym-g32.1`. Default: none.
    pub quantised: Vec<policy::quant::Spec>,
    /// Object store of versions, a `file://` or `s3://` URL, or the `http://` URL of a relay where it is only read. Default:
    /// `store` in the state folder.
    pub store: Option<String>,
    /// The key that a relay asks for. Never printed. Default: none.
    #[serde(skip_serializing)]
    pub store_api_key: Option<String>,
    /// Disk in the state folder for objects of a store that is not on this machine, bytes: what was begun is not fetched again,
    /// and processes share it. An object that is larger is an error. Default: 64 GiB.
    pub cache_bytes_max: u64,
    /// Parts of such an object (8 MiB each) that are fetched at once. Default: 8.
    pub cache_streams: usize,
    /// Threads that make, check and follow deltas, and lay weights out for an engine, in every process that does. Default: 1.
    pub sync_threads: u16,
    /// Folder of the signing keys and of the public keys that are trusted. Default: `keys` in the state folder.
    pub keys: Option<PathBuf>,
}

/// `[listen]`: where each role listens. Anything but loopback needs `auth.required`.
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
    /// Base URL. Default: where `listen.serve` listens.
    pub serve: Option<String>,
    /// Base URL. Default: where `listen.ingest` listens.
    pub ingest: Option<String>,
    /// Base URL. Default: where `listen.control` listens.
    pub control: Option<String>,
    /// API key that commands such as `springtide release` send. Never printed. Default: none.
    #[serde(skip_serializing)]
    pub api_key: Option<String>,
}

/// `[telemetry]`: what every role says about itself. Prometheus metrics are always on, at `/metrics`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Telemetry {
    /// `human` or `json`. Default: `human`.
    pub format: LogFormat,
    /// Levels by module, as the crate tracing-subscriber reads them. Default: `info`.
    pub filter: String,
    /// OTLP endpoint for traces over HTTP, e.g. `http://127.0.0.1:4318/v1/traces`. Default: none, no traces.
    pub otlp_endpoint: Option<String>,
}

/// How log lines look.
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
    /// An external Postgres 18: `postgres://user:password@host/database`. Never printed. Default: none, `springtide up`
    /// runs a private one.
    #[serde(skip_serializing)]
    pub url: Option<String>,
    /// Loopback port of the private one. Default: 15432.
    pub port: u16,
    /// Connections that one role holds at most. Default: 16.
    pub connections_max: u32,
}

/// `[kafka]`: the log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Kafka {
    /// An external cluster: `host:port`, comma-separated. Default: none, `springtide up` runs a private node.
    pub brokers: Option<String>,
    /// First part of every topic's name. Default: `springtide`.
    pub topic_prefix: String,
    /// How long topics that are made here keep events, hours. Default: 168.
    pub log_retention_hours: u32,
    /// Largest size of one of their partitions, bytes; 0: no bound. Default: 0.
    pub log_bytes_max: u64,
    /// How long dead letters are kept, days. Default: 90.
    pub dead_letter_retention_days: u32,
    /// librdkafka settings, handed through as they are; they win over Springtide's own. Never printed. Default: none.
    #[serde(skip_serializing)]
    pub librdkafka: BTreeMap<String, String>,
    /// Loopback port of the private node. Default: 19192.
    pub port: u16,
    /// Loopback port on which the private node's broker and controller meet. Default: 19193.
    pub controller_port: u16,
    /// Largest Java heap of the private node, MiB. Default: 384.
    pub heap_mib: u32,
}

/// `[stack]`: the private Postgres and Kafka.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Stack {
    /// Folder of what is downloaded once (about 150 MB unpacked). Default: `.stack`.
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
            compute: policy::model::Compute::F32,
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
        let loopback = |port| SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port);
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
    /// What `file` (or `springtide.toml` here, if there is one) and the environment say, checked, with absolute paths.
    pub fn load(file: Option<&Path>) -> anyhow::Result<Self> {
        let config = Self::load_to_make_keys(file)?;
        config.check_auth().context("the configuration contradicts itself")?;
        Ok(config)
    }

    /// As [`Config::load`], but keys that are not there yet are no contradiction: for the commands that make them.
    pub fn load_to_make_keys(file: Option<&Path>) -> anyhow::Result<Self> {
        let here = std::env::current_dir().context("find the current folder")?;
        let file = match file {
            Some(file) if !file.is_file() => bail!("there is no file {}", file.display()),
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

    /// Makes paths absolute. The follower's memory moves with the state folder unless it was given.
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

    /// Folder of one log file per supervised process.
    pub fn log_dir(&self) -> PathBuf {
        self.state_dir.join("log")
    }

    pub fn postgres_url(&self) -> String {
        let own = || postgres::url(self.postgres.port, postgres::DATABASE);
        self.postgres.url.clone().unwrap_or_else(own)
    }

    pub fn kafka_client(&self) -> ingest::kafka::ClientOptions {
        let own = || format!("127.0.0.1:{}", self.kafka.port);
        ingest::kafka::ClientOptions {
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
}

fn url(given: Option<&String>, listens: SocketAddr) -> String {
    match given {
        Some(url) => url.trim_end_matches('/').to_owned(),
        // An address that means "every interface" is reached over loopback.
        None if listens.ip().is_unspecified() => format!("http://127.0.0.1:{}", listens.port()),
        None => format!("http://{listens}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(toml: &str) -> anyhow::Result<Config> {
        Ok(Figment::new().merge(Toml::string(toml)).extract()?)
    }

    #[test]
    fn the_documented_file_says_what_the_defaults_are() {
        let documented = include_str!("../springtide.toml");
        assert_eq!(parse(documented).unwrap(), Config::default());
    }

    #[test]
    fn the_documented_file_names_every_field_in_its_section() {
        let sections = sections(include_str!("../springtide.toml"));
        let table = toml::Table::try_from(Config::default()).unwrap();
        let mut fields = Vec::new();
        collect_fields(&table, "", &mut fields);
        assert!(fields.len() > 50, "only {} fields were found", fields.len());
        for (path, name) in fields {
            // an inline table stands in the nearest section around it
            let mut section = path.as_str();
            while !sections.contains_key(section) {
                section = section.rsplit_once('.').map_or("", |(outer, _)| outer);
            }
            let text = &sections[section];
            let there = text.match_indices(&name).any(|(at, _)| {
                let before = text[..at].chars().next_back();
                let after = text[at + name.len()..].trim_start();
                after.starts_with('=') && !before.is_some_and(|c| c.is_alphanumeric() || c == '_')
            });
            assert!(there, "springtide.toml does not mention {path}.{name}");
        }
    }

    /// The text under each `[header]`, commented ones included; what precedes the first is under "".
    fn sections(documented: &str) -> BTreeMap<String, String> {
        let mut sections = BTreeMap::from([(String::new(), String::new())]);
        let mut current = String::new();
        for line in documented.lines() {
            let bare = line.trim_start_matches(['#', ' ']);
            if let Some((header, _)) = bare.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
                current = header.trim_start_matches('[').to_owned();
            }
            let text = sections.entry(current.clone()).or_default();
            text.push_str(line);
            text.push('\n');
        }
        sections
    }

    /// Every plain field as (section, name).
    fn collect_fields(table: &toml::Table, path: &str, fields: &mut Vec<(String, String)>) {
        for (name, value) in table {
            match value {
                toml::Value::Table(inner) => {
                    let inner_path = if path.is_empty() {
                        name.clone()
                    } else {
                        format!("{path}.{name}")
                    };
                    collect_fields(inner, &inner_path, fields);
                }
                toml::Value::Array(_) => {}
                _ => fields.push((path.to_owned(), name.clone())),
            }
        }
    }

    #[test]
    fn an_unknown_field_is_refused_by_name() {
        let error = parse("[listen]\nserv = \"127.0.0.1:1\"").unwrap_err();
        assert!(error.to_string().contains("serv"), "{error}");
    }

    #[test]
    fn what_lies_in_the_state_folder_moves_with_it() {
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
    fn a_role_that_listens_everywhere_is_reached_over_loopback() {
        let config = parse("[listen]\ncontrol = \"0.0.0.0:9002\"").unwrap();
        assert_eq!(config.control_url(), "http://127.0.0.1:9002");
        let config = parse("[client]\ncontrol = \"https://control.example/\"").unwrap();
        assert_eq!(config.control_url(), "https://control.example");
    }

    #[test]
    fn secrets_are_not_shown() {
        let text = "[postgres]\nurl = 'postgres://u:secret-1@h/d'\n[client]\napi_key = 'secret-2'\n\
                    [serve]\napi_key = 'secret-3'\n[trainer]\napi_key = 'secret-4'\n\
                    [spool]\napi_key = 'secret-6'\ncaller_key = 'secret-7'\n\
                    [relay]\napi_key = 'secret-8'\ncaller_key = 'secret-9'\n[policy]\nstore_api_key = 'secret-10'\n\
                    [kafka.librdkafka]\n'sasl.password' = 'secret-5'";
        let shown = toml::to_string(&parse(text).unwrap()).unwrap();
        assert!(!shown.contains("secret"), "{shown}");
    }
}
