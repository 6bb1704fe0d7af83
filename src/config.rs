//! The configuration of every role: `springtide.toml`, overridden by `SPRINGTIDE__SECTION__FIELD`
//! in the environment. Each crate declares its own section; this file declares the binary's.
//! Invalid values are refused when the file is loaded. Over 500 lines, because the sections are
//! declared together, in the order of the file.

mod check;
#[cfg(test)]
mod tests;
mod tls;

use std::collections::BTreeMap;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use figment::Figment;
use figment::providers::{Env, Format};
use release::{Learning, LearningAlias};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::stack::{kafka, postgres, vllm};
pub use tls::Tls;

/// TOML for figment, parsed by the same `toml` crate as everywhere else.
struct Toml;

impl Format for Toml {
    type Error = toml::de::Error;
    const NAME: &'static str = "TOML";

    fn from_str<T: DeserializeOwned>(text: &str) -> Result<T, Self::Error> {
        toml::from_str(text)
    }
}

/// The file that is read if `--config` is not given and the file exists.
const DEFAULT_FILE: &str = "springtide.toml";
const ENV_PREFIX: &str = "SPRINGTIDE__";
/// Variables that name a file which holds the value: secrets are mounted as files.
const ENV_FILE_PREFIX: &str = "SPRINGTIDE_FILE__";

edge::options! {
    /// The configuration: defaults, overridden by the file, overridden by the environment. Relative
    /// paths are relative to the folder of the file.
    pub struct Config {
        /// Folder of everything that a stack on this machine keeps: database, log, weights, keys,
        /// log files.
        pub state_dir: PathBuf = ".springtide".into(),
        pub policy: Policy,
        pub listen: Listen,
        pub client: Client,
        pub auth: edge::auth::AuthOptions,
        pub tls: Tls,
        pub telemetry: Telemetry,
        pub postgres: Postgres,
        pub kafka: Kafka,
        pub stack: Stack,
        pub serve: serving::ServeOptions,
        pub release: release::Options,
        pub ingest: ingest::Options,
        pub spool: ingest::spool::Options,
        pub relay: serving::relay::Options,
        pub follow: serving::follow::Options,
        pub world: world::service::Options,
        pub trainer: runs::Options,
    }
}

edge::options! {
    /// `[policy]`: the model that is trained and served.
    #[derive(Eq)]
    pub struct Policy {
        /// Name of the model. Requests give it as `model`.
        pub name: String = "demo".to_owned(),
        /// The tenant that the policy belongs to: keys of this tenant decide about its runs and
        /// releases, and it learns from this tenant's users. Others must consent (`springtide tenant
        /// consent`). Another than `default` needs `auth.required`.
        pub tenant: String = edge::auth::OPEN_TENANT.to_owned(),
        /// Hugging Face folder that becomes the first version of a new policy.
        pub base: PathBuf = "demo/models/base".into(),
        /// Precision of matrix products in sampler and trainer: `f32`, or `bf16`, which is faster
        /// with AVX512-BF16 and gives other results.
        pub compute: model::exact::Compute = model::exact::Compute::F32,
        /// Quantized copies that every manifest names, for engines that serve them:
        /// `fp8-e4m3-b128.1`, `int4-sym-g32.1`, `nvfp4-e4m3-g16.1`.
        #[serde(rename = "quantised")]
        pub quantized: Vec<artifact::quant::Spec> = vec![],
        /// One of these copies, which the fleet serves in place of the versions: engines of
        /// `[serve.remote]` and `[follow]` get it, and our sampler, the trainer and the
        /// log-probabilities in manifests compute with the values of its codes. Without it, all of
        /// them have the versions' own weights.
        pub serves: Option<artifact::quant::Spec> = None,
        /// Object store of versions: a `file://` or `s3://` URL, or a relay's `http://` or `https://` URL
        /// for reading only. Default: `store` in the state folder.
        pub store: Option<String> = None,
        /// API key for a relay. Never printed.
        #[serde(skip_serializing)]
        pub store_api_key: Option<String> = None,
        /// Largest size of the cache for objects of a remote store, bytes. The cache is `objects` in
        /// the state folder. All processes share it, and interrupted downloads resume from it. An
        /// object that is larger than the cache is an error.
        pub cache_bytes_max: u64 = 64 << 30,
        /// Parts of a remote object (8 MiB each) to fetch at once, 1 to 256.
        pub cache_streams: usize = 8 => 1..=256,
        /// Memory per process for weights that it keeps and does not compute with, bytes. The rest of
        /// them lies in files without a name in `weights` in the state folder.
        pub memory_bytes: u64 = 1 << 30,
        /// Threads per process for encoding, verifying and applying deltas and packing weights, 1 to
        /// 256.
        pub sync_threads: u16 = 1 => 1..=256,
        /// Folder of the signing keys and the trusted public keys. Default: `keys` in the state folder.
        pub keys: Option<PathBuf> = None,
    }
}

edge::options! {
    /// `[listen]`: where each role listens. Addresses other than loopback need `auth.required`.
    #[derive(Eq)]
    pub struct Listen {
        /// Completions.
        pub serve: SocketAddr = loopback(8000),
        /// Feedback and generations.
        pub ingest: SocketAddr = loopback(8001),
        /// Runs, versions, releases, fleet.
        pub control: SocketAddr = loopback(8002),
        /// The trainer's health, its metrics and whether it computes.
        pub train: SocketAddr = loopback(8003),
        /// Without `auth.required` a role answers only requests to localhost, *.localhost and
        /// loopback addresses, and to these names. It answers no page of another site in a browser.
        pub hosts: Vec<String> = Vec::new(),
        /// After SIGTERM, `/health` answers 503 for so many seconds and everything else goes on, so
        /// that a load balancer or Kubernetes stops sending requests. Set it there to a few checks'
        /// time (10), and terminationGracePeriodSeconds above the sum of this and `drain_seconds` +
        /// 5.
        pub unready_seconds: u64 = 0 => 0..=3600,
        /// Then open requests have so many seconds to end.
        pub drain_seconds: u64 = 20 => 0..=3600,
        pub connections_max: ConnectionsMax,
    }
}

/// Fewer would lock out the callers that a role always has.
const CONNECTIONS: RangeInclusive<usize> = 8..=1_000_000;

edge::options! {
    /// `[listen.connections_max]`: how many connections each role keeps open. When all are taken, the one
    /// that has waited longest for a request is closed.
    #[derive(Eq)]
    pub struct ConnectionsMax {
        pub serve: usize = 4096 => CONNECTIONS,
        /// Also of a collector.
        pub ingest: usize = 4096 => CONNECTIONS,
        pub control: usize = 1024 => CONNECTIONS,
        pub train: usize = 128 => CONNECTIONS,
        pub relay: usize = 1024 => CONNECTIONS,
        pub follow: usize = 1024 => CONNECTIONS,
        pub world: usize = 1024 => CONNECTIONS,
    }
}

/// A role that listens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    Serve,
    Ingest,
    Control,
    Train,
    Relay,
    Follow,
    World,
}

impl Part {
    pub const ALL: [Self; 7] = [
        Self::Serve,
        Self::Ingest,
        Self::Control,
        Self::Train,
        Self::Relay,
        Self::Follow,
        Self::World,
    ];

    /// The name of the role.
    pub fn name(self) -> &'static str {
        match self {
            Self::Serve => "serve",
            Self::Ingest => "ingest",
            Self::Control => "control",
            Self::Train => "train",
            Self::Relay => "relay",
            Self::Follow => "follow",
            Self::World => "world",
        }
    }

    /// Its user in Postgres. The migration of database roles makes it and says what it may do.
    pub fn database_user(self) -> String {
        format!("springtide_{}", self.name())
    }
}

edge::options! {
    /// `[client]`: the URLs under which roles and commands reach the other roles.
    #[derive(Eq)]
    pub struct Client {
        /// Base URL of the completions API. Default: the address of `listen.serve`.
        pub serve: Option<String> = None,
        /// Base URL of the completions API in each cluster, by the cluster's name. A harness that
        /// names its cluster gets leases of that URL.
        pub clusters: BTreeMap<String, String>,
        /// Base URL of the feedback API. Default: the address of `listen.ingest`.
        pub ingest: Option<String> = None,
        /// Base URL of the control API. Default: the address of `listen.control`.
        pub control: Option<String> = None,
        /// API key that commands such as `springtide release` send. Never printed.
        #[serde(skip_serializing)]
        pub api_key: Option<String> = None,
    }
}

edge::options! {
    /// `[telemetry]`: logs and traces. Prometheus metrics are always on, at `/metrics`.
    #[derive(Eq)]
    pub struct Telemetry {
        /// Format of log lines: `human` or `json`.
        pub format: LogFormat = LogFormat::Human,
        /// Log levels by module, in the syntax of the crate tracing-subscriber, such as
        /// `info,serving=debug`.
        pub filter: String = "info".to_owned(),
        /// OTLP endpoint for traces over HTTP, e.g. `http://127.0.0.1:4318/v1/traces`. Default: none,
        /// no traces.
        pub otlp_endpoint: Option<String> = None,
    }
}

/// Format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    Human,
    Json,
}

edge::options! {
    /// `[postgres]`: the trajectory store.
    #[derive(Eq)]
    pub struct Postgres {
        /// An external Postgres 18. Its user owns the database. Never printed. On another machine it
        /// needs an sslmode: verify-full, or disable on a network that nobody else can reach.
        /// Default: `springtide up` runs a private one.
        #[serde(skip_serializing)]
        pub url: Option<String> = None,
        /// Number in the name of the private Postgres' socket, `postgres/.s.PGSQL.<port>` in the
        /// state folder. It has no TCP port.
        pub port: u16 = 15432,
        /// Largest number of connections per role, at least 4.
        pub connections_max: u32 = 16 => 4..,
        pub urls: PostgresUrls,
    }
}

edge::options! {
    /// `[postgres.urls]`: of an external Postgres, for the database users of the roles. Never printed.
    #[derive(Eq)]
    pub struct PostgresUrls {
        /// As the user `springtide_serve`, who has the least rights. Default: `postgres.url`, whose
        /// user may do everything.
        #[serde(skip_serializing)]
        pub serve: Option<String> = None,
        /// As the user `springtide_ingest`. Default: `postgres.url`.
        #[serde(skip_serializing)]
        pub ingest: Option<String> = None,
        /// As the user `springtide_control`. Default: `postgres.url`.
        #[serde(skip_serializing)]
        pub control: Option<String> = None,
        /// As the user `springtide_train`. Default: `postgres.url`.
        #[serde(skip_serializing)]
        pub train: Option<String> = None,
    }
}

impl PostgresUrls {
    /// Roles without a database have none.
    pub fn of(&self, part: Part) -> Option<&String> {
        match part {
            Part::Serve => self.serve.as_ref(),
            Part::Ingest => self.ingest.as_ref(),
            Part::Control => self.control.as_ref(),
            Part::Train => self.train.as_ref(),
            Part::Relay | Part::Follow | Part::World => None,
        }
    }

    /// (field, URL) of those that are set.
    pub fn all(&self) -> impl Iterator<Item = (&'static str, &String)> {
        let urls = [
            ("postgres.urls.serve", &self.serve),
            ("postgres.urls.ingest", &self.ingest),
            ("postgres.urls.control", &self.control),
            ("postgres.urls.train", &self.train),
        ];
        urls.into_iter().filter_map(|(field, url)| Some((field, url.as_ref()?)))
    }
}

edge::options! {
    /// `[kafka]`: the log.
    #[derive(Eq)]
    pub struct Kafka {
        /// An external cluster: `host:port`, comma-separated. On another machine it needs a
        /// security.protocol in [kafka.librdkafka]. Default: `springtide up` runs a private node.
        pub brokers: Option<String> = None,
        /// First part of every topic's name.
        pub topic_prefix: String = "springtide".to_owned(),
        /// Retention of new topics, hours. Events that expire before they are in the tables are
        /// lost, so allow for the longest outage of ingest.
        pub log_retention_hours: u32 = 168,
        /// Largest size of a partition of new topics, bytes; 0: no limit.
        pub log_bytes_max: u64 = 0,
        /// Retention of the dead-letter queue, days. It keeps at most 16 GiB.
        pub dead_letter_retention_days: u32 = 90,
        /// librdkafka settings, passed through unchanged; they override Springtide's own. Never
        /// printed.
        #[serde(skip_serializing)]
        pub librdkafka: BTreeMap<String, String> = BTreeMap::new(),
        /// File of further librdkafka settings, lines `name=value`: a place for passwords. `librdkafka`
        /// overrides them. Default: none, or `kafka.properties` in the state folder for the private
        /// node, which writes it.
        pub librdkafka_file: Option<PathBuf> = None,
        /// Loopback port of the private node.
        pub port: u16 = 19192,
        /// Loopback port between the private node's broker and controller.
        pub controller_port: u16 = 19193,
        /// Largest Java heap of the private node, MiB.
        pub heap_mib: u32 = 384,
    }
}

edge::options! {
    /// `[stack]`: what `springtide up` runs beside the roles.
    #[derive(Eq)]
    pub struct Stack {
        /// Folder of the downloads of the private Postgres and Kafka, about 150 MB unpacked.
        pub cache: PathBuf = ".stack".into(),
        pub vllm: vllm::Options,
    }
}

impl ConnectionsMax {
    pub fn of(&self, part: Part) -> usize {
        match part {
            Part::Serve => self.serve,
            Part::Ingest => self.ingest,
            Part::Control => self.control,
            Part::Train => self.train,
            Part::Relay => self.relay,
            Part::Follow => self.follow,
            Part::World => self.world,
        }
    }
}

impl Config {
    /// Reads `file` (default: `springtide.toml` in the current folder) and the environment. Checks
    /// the values and makes paths absolute.
    /// `callers`: the roles of this process that call others, and need an API key for that.
    pub fn load(file: Option<&Path>, callers: &[Part]) -> anyhow::Result<Self> {
        let here = std::env::current_dir().context("find the current folder")?;
        let file = match file {
            Some(file) if !file.is_file() => bail!("--config {}: there is no such file", file.display()),
            Some(file) => Some(here.join(file)),
            None => Some(here.join(DEFAULT_FILE)).filter(|file| file.is_file()),
        };
        let mut figment = Figment::new();
        if let Some(file) = &file {
            figment = figment.merge(Toml::file_exact(file));
        }
        let mut config = Self::with_environment(figment)?;
        let checked = config.check().and_then(|()| config.check_auth(callers));
        checked.context("the configuration is not valid")?;
        let config_dir = file.as_deref().and_then(Path::parent).unwrap_or(&here);
        config.resolve(config_dir);
        Ok(config)
    }

    fn with_environment(figment: Figment) -> anyhow::Result<Self> {
        let mut figment = figment.merge(Env::prefixed(ENV_PREFIX).split("__"));
        for (key, file) in Env::prefixed(ENV_FILE_PREFIX).split("__").iter() {
            let text = fs::read_to_string(&file).with_context(|| {
                format!("read the value of {key} from the file {file}, which {ENV_FILE_PREFIX}… names")
            })?;
            figment = figment.merge((key.as_str(), text.trim()));
        }
        Self::complete(&figment)
    }

    /// Reads what was set. A configuration that learns from `champion` and names no arms gets the
    /// default arms without `learner`.
    fn complete(figment: &Figment) -> anyhow::Result<Self> {
        let mut config: Self = figment.extract().context("read the configuration")?;
        if config.learning().alias == LearningAlias::Champion && !figment.contains("release.arm") {
            config.release.arms = release::Options::arms_without_learner();
        }
        Ok(config)
    }

    /// What releases know of the realtime run. For `control`: the trainer reads the arms in force.
    pub fn learning(&self) -> Learning {
        let realtime = &self.trainer.realtime;
        let named = realtime.alias.as_deref().and_then(LearningAlias::of);
        Learning {
            alias: named.unwrap_or_else(|| LearningAlias::by_arms(&self.release.arms)),
            enabled: realtime.enabled,
        }
    }

    /// Makes paths absolute. `serve.state_dir` is in the state folder unless it was set to something
    /// else than the default.
    fn resolve(&mut self, config_dir: &Path) {
        if self.serve.state_dir == serving::ServeOptions::default().state_dir {
            self.serve.state_dir = self.state_dir.join("serve");
        }
        if self.follow.state_dir == serving::follow::Options::default().state_dir {
            self.follow.state_dir = self.state_dir.join("follow");
        }
        for path in [
            &mut self.state_dir,
            &mut self.policy.base,
            &mut self.stack.cache,
            &mut self.serve.state_dir,
            &mut self.follow.state_dir,
            &mut self.world.machine.image,
        ] {
            *path = config_dir.join(&*path);
        }
        for path in [
            &mut self.policy.keys,
            &mut self.kafka.librdkafka_file,
            &mut self.serve.sampler_key,
            &mut self.follow.dir,
        ] {
            *path = path.take().map(|path| config_dir.join(path));
        }
        if let Some(program) = &mut self.stack.vllm.program {
            *program = config_dir.join(&*program);
        }
        // the servers of this machine answer, unless others are named
        if self.serve.remote.vllm.is_empty() {
            let servers = self.stack.vllm.servers();
            let server = |(_, port)| serving::remote::Server {
                url: vllm::url(port),
                adapters: self.stack.vllm.adapters,
                ..Default::default()
            };
            self.serve.remote.vllm = servers.map(server).collect();
        }
        if let Some(spec) = self.policy.serves {
            if !self.policy.quantized.contains(&spec) {
                self.policy.quantized.push(spec);
            }
            self.serve.remote.quantized = Some(spec);
            self.follow.quantized = Some(spec);
        }
        self.tls.resolve(config_dir);
        let default_url = || format!("file://{}", self.state_dir.join("payloads").display());
        self.ingest.payload_store.get_or_insert_with(default_url);
    }

    pub fn store_url(&self) -> String {
        let default_url = || format!("file://{}", self.state_dir.join("store").display());
        self.policy.store.clone().unwrap_or_else(default_url)
    }

    pub fn keys_dir(&self) -> PathBuf {
        let default_dir = || self.state_dir.join("keys");
        self.policy.keys.clone().unwrap_or_else(default_dir)
    }

    /// Folder of the log files, one per supervised process.
    pub fn log_dir(&self) -> PathBuf {
        self.state_dir.join("log")
    }

    /// Data folder of the private Postgres.
    pub fn postgres_dir(&self) -> PathBuf {
        self.state_dir.join("postgres")
    }

    /// The database, as its owner.
    pub fn postgres_url(&self) -> String {
        self.private_url(postgres::SUPERUSER)
    }

    /// The database, as a role's own user where there is one.
    pub fn postgres_url_of(&self, part: Part) -> String {
        match self.postgres.urls.of(part) {
            Some(url) => url.clone(),
            None => self.private_url(&part.database_user()),
        }
    }

    /// The external database, or the private one as this user.
    fn private_url(&self, user: &str) -> String {
        let private = || postgres::url(&self.postgres_dir(), self.postgres.port, user, postgres::DATABASE);
        self.postgres.url.clone().unwrap_or_else(private)
    }

    /// The private node's file of settings for clients.
    pub fn kafka_client_file(&self) -> PathBuf {
        self.state_dir.join(kafka::CLIENT_FILE)
    }

    /// The file of settings that clients of the log need, if there is one.
    pub fn kafka_settings_file(&self) -> Option<PathBuf> {
        let private_file = || self.kafka.brokers.is_none().then(|| self.kafka_client_file());
        self.kafka.librdkafka_file.clone().or_else(private_file)
    }

    pub fn kafka_brokers(&self) -> String {
        let default_broker = || format!("127.0.0.1:{}", self.kafka.port);
        self.kafka.brokers.clone().unwrap_or_else(default_broker)
    }

    /// How to reach the log. Reads the file of librdkafka settings.
    pub fn kafka_client(&self) -> anyhow::Result<event_log::ClientOptions> {
        let mut librdkafka = match self.kafka_settings_file() {
            Some(file) => kafka::read_settings(&file)
                .context("read the settings of Kafka clients (`springtide up` writes those of its private node)")?,
            None => BTreeMap::new(),
        };
        librdkafka.extend(self.kafka.librdkafka.clone());
        self.check_kafka(&librdkafka)?;
        Ok(event_log::ClientOptions {
            brokers: self.kafka_brokers(),
            topic_prefix: self.kafka.topic_prefix.clone(),
            log_retention_hours: self.kafka.log_retention_hours,
            log_bytes_max: self.kafka.log_bytes_max,
            dead_letter_retention_days: self.kafka.dead_letter_retention_days,
            librdkafka,
        })
    }

    pub fn serve_url(&self) -> String {
        client_url(self.client.serve.as_ref(), || self.local_url(Part::Serve))
    }

    /// Where harnesses reach the policy.
    pub fn harness_urls(&self) -> runs::api::HarnessUrls {
        let clusters = self.client.clusters.iter();
        let trimmed = |(name, url): (&String, &String)| (name.clone(), url.trim_end_matches('/').to_owned());
        runs::api::HarnessUrls {
            anywhere: self.serve_url(),
            clusters: clusters.map(trimmed).collect(),
        }
    }

    pub fn ingest_url(&self) -> String {
        client_url(self.client.ingest.as_ref(), || self.local_url(Part::Ingest))
    }

    pub fn control_url(&self) -> String {
        client_url(self.client.control.as_ref(), || self.local_url(Part::Control))
    }

    /// Where `part` listens.
    pub fn address(&self, part: Part) -> SocketAddr {
        match part {
            Part::Serve => self.listen.serve,
            Part::Ingest => self.listen.ingest,
            Part::Control => self.listen.control,
            Part::Train => self.listen.train,
            Part::Relay => self.relay.listen,
            Part::Follow => self.follow.listen,
            Part::World => self.world.listen,
        }
    }

    /// The URL of a role from this machine. If the role listens on all interfaces, the URL has the
    /// loopback address.
    pub fn local_url(&self, part: Part) -> String {
        let mut address = self.address(part);
        if address.ip().is_unspecified() {
            address = loopback(address.port());
        }
        let scheme = self.tls.of(part).map_or("http", |_| "https");
        format!("{scheme}://{address}")
    }

    /// (field, address) of everything that `springtide up` starts on this machine.
    pub fn listen_addresses(&self) -> Vec<(&'static str, SocketAddr)> {
        let listen = &self.listen;
        let mut addresses = vec![
            ("listen.serve", listen.serve),
            ("listen.ingest", listen.ingest),
            ("listen.control", listen.control),
            ("listen.train", listen.train),
        ];
        if self.kafka.brokers.is_none() {
            addresses.push(("kafka.port", loopback(self.kafka.port)));
            addresses.push(("kafka.controller_port", loopback(self.kafka.controller_port)));
        }
        let engines = self.stack.vllm.servers();
        addresses.extend(engines.map(|(_, port)| ("stack.vllm.port", loopback(port))));
        addresses
    }
}

fn client_url(configured: Option<&String>, local: impl FnOnce() -> String) -> String {
    match configured {
        Some(url) => url.trim_end_matches('/').to_owned(),
        None => local(),
    }
}

fn loopback(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}
