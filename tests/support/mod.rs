//! The environment of every test: [`Stack::start`] creates a migrated database, topics and folders
//! for one test, and removes them at its end.
//!
//! All tests share one Postgres and one broker: those in SPRINGTIDE_TEST_POSTGRES and
//! SPRINGTIDE_TEST_KAFKA (with the settings in SPRINGTIDE_TEST_KAFKA_FILE), or else `springtide stack test-env` starts them when they are first
//! needed and stops them when this process ends.

pub mod broker;
pub mod ca;
pub mod disk;
pub mod memory;
pub mod process;

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use edge::audit::Actor;
use edge::auth::Role;
use edge::auth::key::{self, Grant, NewKey};
use event_log::ClientOptions;
use rdkafka::admin::{AdminClient, AdminOptions};
use rdkafka::client::DefaultClientContext;
use reqwest::Method;
use serde::Deserialize;
use serde_json::Value;
use sqlx::postgres::PgPoolOptions;
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, PgPool};
use tempfile::TempDir;

/// The binary under test.
pub const SPRINGTIDE: &str = env!("CARGO_BIN_EXE_springtide");
/// Partitions of the event topics: more than one, so that no test relies on order across
/// partitions.
pub const PARTITIONS: i32 = 2;
const CONNECTIONS_MAX: u32 = 8;

/// The resources of one test. Keep it until the end of the test.
pub struct Stack {
    /// A fresh database with all migrations.
    pub pool: PgPool,
    pub database_url: String,
    /// With a unique topic prefix; the topics exist.
    pub kafka: ClientOptions,
    /// The broker's settings for clients, for a process under test.
    pub kafka_file: PathBuf,
    /// The `file://` URL of a policy store.
    pub store_url: String,
    pub keys_dir: std::path::PathBuf,
    /// Contains the store and the keys; the test may add files.
    pub dir: TempDir,
    database: String,
}

impl Stack {
    /// `name` becomes part of the names of database and topics, so that leftovers of a killed test
    /// can be recognized.
    pub async fn start(name: &str) -> Self {
        let servers = tokio::task::spawn_blocking(servers).await.unwrap();
        let unique = format!("it_{name}_{}", uuid::Uuid::now_v7().simple());
        let database = unique.replace('-', "_").to_lowercase();
        let mut admin = PgConnection::connect(&servers.postgres).await.unwrap();
        let create = format!("create database {database}");
        admin.execute(AssertSqlSafe(create)).await.unwrap();
        admin.close().await.unwrap();
        let database_url = with_database(&servers.postgres, &database);
        let pool = PgPoolOptions::new()
            .max_connections(CONNECTIONS_MAX)
            .connect(&database_url)
            .await
            .unwrap();
        sqlx::migrate!().run(&pool).await.unwrap();
        let kafka = ClientOptions {
            brokers: servers.kafka.clone(),
            topic_prefix: unique,
            librdkafka: settings(&servers.kafka_file),
            ..ClientOptions::default()
        };
        event_log::ensure_topics(&kafka, PARTITIONS).await.unwrap();
        let dir = tempfile::tempdir().unwrap();
        Self {
            pool,
            database_url,
            kafka,
            kafka_file: servers.kafka_file.clone(),
            store_url: format!("file://{}", dir.path().join("store").display()),
            keys_dir: dir.path().join("keys"),
            dir,
            database,
        }
    }

    /// The URL of the database for a role's own database user.
    pub fn url_of(&self, role: &str) -> String {
        let mut url = reqwest::Url::parse(&self.database_url).unwrap();
        url.set_username(&format!("springtide_{role}")).unwrap();
        url.into()
    }

    /// Connections of a role's own database user, which has the least rights.
    pub fn pool_of(&self, role: &str) -> PgPool {
        let options = PgPoolOptions::new().max_connections(CONNECTIONS_MAX);
        options.connect_lazy(&self.url_of(role)).unwrap()
    }

    /// A command of the binary under test, on this database.
    pub fn springtide(&self, args: &[&str]) -> Command {
        let mut command = Command::new(SPRINGTIDE);
        command
            .args(args)
            .current_dir(self.dir.path())
            .env("SPRINGTIDE__POSTGRES__URL", &self.database_url)
            .env("SPRINGTIDE__STATE_DIR", self.dir.path());
        command
    }

    /// Variables that let a process under test reach the broker.
    pub fn kafka_environment(&self) -> [(&'static str, String); 3] {
        let file = self.kafka_file.display().to_string();
        [
            ("SPRINGTIDE__KAFKA__BROKERS", self.kafka.brokers.clone()),
            ("SPRINGTIDE__KAFKA__LIBRDKAFKA_FILE", file),
            ("SPRINGTIDE__KAFKA__TOPIC_PREFIX", self.kafka.topic_prefix.clone()),
        ]
    }

    /// Replaces the shared broker. Returns its options, to be put back before the end of the test.
    pub fn use_broker(&mut self, broker: &broker::Broker) -> (ClientOptions, PathBuf) {
        let own = ClientOptions {
            brokers: broker.address.clone(),
            librdkafka: settings(&broker.client_file),
            ..self.kafka.clone()
        };
        let file = std::mem::replace(&mut self.kafka_file, broker.client_file.clone());
        (std::mem::replace(&mut self.kafka, own), file)
    }
}

/// The librdkafka settings of a file of lines `name=value`.
pub fn settings(file: &Path) -> BTreeMap<String, String> {
    let text = std::fs::read_to_string(file).unwrap();
    let settings = text.lines().filter_map(|line| line.split_once('='));
    settings
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

/// The URL of a database of a Postgres whose socket is in this folder.
pub fn socket_url(folder: &Path, port: u16, database: &str) -> String {
    let host = folder.display().to_string().replace('/', "%2F");
    format!("postgres://postgres@{host}:{port}/{database}")
}

impl Drop for Stack {
    /// Uses a thread with its own runtime, because a test may end anywhere, also in a panic.
    fn drop(&mut self) {
        let (kafka, database) = (self.kafka.clone(), self.database.clone());
        let clean = move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(remove(&kafka, &database))
        };
        let result = std::thread::spawn(clean).join();
        if !matches!(result, Ok(Ok(()))) {
            eprintln!("a test's database or topics could not be removed: {result:?}");
        }
    }
}

async fn remove(kafka: &ClientOptions, database: &str) -> anyhow::Result<()> {
    let mut admin = PgConnection::connect(&servers().postgres).await?;
    let drop = format!("drop database if exists {database} with (force)");
    admin.execute(AssertSqlSafe(drop)).await?;
    let client: AdminClient<DefaultClientContext> = kafka.config(&[]).create()?;
    let names = kafka.topics();
    let names = [&names.generation, &names.feedback, &names.version, &names.dlq];
    let names = names.map(String::as_str);
    client.delete_topics(&names, &AdminOptions::new()).await?;
    Ok(())
}

/// Runs a command. Returns whether it succeeded, its output and its errors.
pub fn run(command: &mut Command) -> (bool, String, String) {
    let output = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.success(), text(output.stdout), text(output.stderr))
}

/// Runs a command that must succeed. Returns its output.
pub fn succeed(command: &mut Command) -> String {
    let (success, out, error) = run(command);
    assert!(success, "{command:?}: {out}{error}");
    out.trim().to_owned()
}

/// (Path, method, operation) of a role's OpenAPI document.
pub async fn operations(base: &str) -> Vec<(String, Method, Value)> {
    let document = reqwest::get(format!("{base}/openapi.json")).await.unwrap();
    let document: Value = document.json().await.unwrap();
    let mut operations = Vec::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let method = method.to_uppercase().parse().unwrap();
            operations.push((path.clone(), method, operation.clone()));
        }
    }
    operations
}

/// Compares a table that a test made with the one in the docs, between two comments. With
/// SPRINGTIDE_WRITE_DOCS=1 writes it there.
pub fn check_page(page: &str, name: &str, written_by: &str, table: &str) {
    let begin = format!("<!-- {name}: begin; written by {written_by} -->\n");
    let end = format!("<!-- {name}: end -->");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(page);
    let text = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = text.split_once(&begin).unwrap();
    let (committed, after) = rest.split_once(&end).unwrap();
    if std::env::var_os("SPRINGTIDE_WRITE_DOCS").is_some() {
        std::fs::write(&path, format!("{before}{begin}{table}{end}{after}")).unwrap();
    } else {
        assert_eq!(committed, table, "{page} is out of date: SPRINGTIDE_WRITE_DOCS=1");
    }
}

/// Writes the figures of a long run to this file in `target/chaos`.
pub fn write_figures(name: &str, figures: &impl serde::Serialize) -> PathBuf {
    let dir = match std::env::var("CARGO_TARGET_DIR") {
        Ok(dir) => Path::new(&dir).join("chaos"),
        Err(_) => Path::new(env!("CARGO_MANIFEST_DIR")).join("target/chaos"),
    };
    fs::create_dir_all(&dir).unwrap();
    let file = dir.join(name);
    fs::write(&file, serde_json::to_string_pretty(figures).unwrap()).unwrap();
    file
}

/// Calls `poll` every 50 ms until it returns `Some`; panics with `what` after `limit`.
pub async fn eventually<T>(what: &str, limit: Duration, mut poll: impl AsyncFnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(answer) = poll().await {
            return answer;
        }
        assert!(started.elapsed() < limit, "not within {limit:?}: {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Creates a key that never expires and returns its secret. Creates the tenant if it is new.
pub async fn create_key(pool: &PgPool, tenant: &str, role: Role, label: &str) -> String {
    let key = NewKey {
        tenant,
        grant: Grant::Role(role),
        label,
        expires_at: None,
        replica: None,
        requests_per_second: None,
    };
    let actor = Actor {
        key: None,
        name: "tests",
    };
    key::create(pool, &key, actor, "").await.unwrap().secret
}

#[derive(Debug, Deserialize)]
struct Servers {
    postgres: String,
    kafka: String,
    kafka_file: PathBuf,
    /// It stops when its standard input closes, which happens when this process ends.
    #[serde(skip)]
    _process: Option<Child>,
}

fn servers() -> &'static Servers {
    static SERVERS: OnceLock<Servers> = OnceLock::new();
    SERVERS.get_or_init(|| {
        let variable = |name| std::env::var(name).ok();
        let given = variable("SPRINGTIDE_TEST_POSTGRES").zip(variable("SPRINGTIDE_TEST_KAFKA"));
        if let Some((postgres, kafka)) = given {
            return Servers {
                postgres,
                kafka,
                kafka_file: variable("SPRINGTIDE_TEST_KAFKA_FILE").unwrap().into(),
                _process: None,
            };
        }
        let mut process = Command::new(SPRINGTIDE)
            .args(["stack", "test-env"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let output = process.stdout.take().unwrap();
        BufReader::new(output).read_line(&mut line).unwrap();
        let mut servers: Servers =
            serde_json::from_str(&line).unwrap_or_else(|error| panic!("the stack did not start: {error}"));
        servers._process = Some(process);
        servers
    })
}

fn with_database(url: &str, database: &str) -> String {
    let (server, _) = url.rsplit_once('/').unwrap();
    format!("{server}/{database}")
}
