//! A Postgres and a broker of their own, and databases in them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::Context;
use event_log::ClientOptions;
use serde::Deserialize;
use sqlx::postgres::PgPoolOptions;
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, PgPool};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

const CONNECTIONS_MAX: u32 = 8;

/// Postgres and the broker, until dropped.
pub struct Stack {
    process: Child,
    addresses: Addresses,
}

#[derive(Deserialize)]
struct Addresses {
    postgres: String,
    kafka: String,
    /// librdkafka settings, lines `name=value`.
    kafka_file: PathBuf,
}

/// A separate database and topics.
pub struct Room {
    pub pool: PgPool,
    pub database_url: String,
    pub kafka: ClientOptions,
    kafka_file: PathBuf,
}

impl Room {
    /// Variables that let a process reach the database and the broker.
    pub fn environment(&self) -> [(&'static str, String); 4] {
        [
            ("SPRINGTIDE__POSTGRES__URL", self.database_url.clone()),
            ("SPRINGTIDE__KAFKA__BROKERS", self.kafka.brokers.clone()),
            (
                "SPRINGTIDE__KAFKA__LIBRDKAFKA_FILE",
                self.kafka_file.display().to_string(),
            ),
            ("SPRINGTIDE__KAFKA__TOPIC_PREFIX", self.kafka.topic_prefix.clone()),
        ]
    }

    /// The database as the user of a role, to whom row-level security applies.
    pub fn url_of(&self, role: &str) -> anyhow::Result<String> {
        let mut url: reqwest::Url = self.database_url.parse().context("a database URL")?;
        let set = url.set_username(&format!("springtide_{role}"));
        set.ok().context("a database URL without a user")?;
        Ok(url.into())
    }
}

impl Stack {
    /// Runs `springtide stack test-env --durable`, where Postgres flushes to disk as in production.
    pub async fn start(springtide: &Path) -> anyhow::Result<Self> {
        let mut process = Command::new(springtide)
            .args(["stack", "test-env", "--durable"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("run {}", springtide.display()))?;
        let output = process.stdout.take().context("output of the stack")?;
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line).await?;
        let addresses: Addresses = serde_json::from_str(&line).context("the stack did not start")?;
        Ok(Self { process, addresses })
    }

    /// A migrated database and empty topics.
    pub async fn room(&self, name: &str, partitions: i32) -> anyhow::Result<Room> {
        let mut admin = PgConnection::connect(&self.addresses.postgres).await?;
        admin.execute(AssertSqlSafe(format!("create database {name}"))).await?;
        let postgres = &self.addresses.postgres;
        let slash = postgres.rfind('/').context("a database URL")?;
        let database_url = format!("{}/{name}", &postgres[..slash]);
        let options = PgPoolOptions::new().max_connections(CONNECTIONS_MAX);
        let pool = options.connect(&database_url).await?;
        sqlx::migrate!("../../migrations").run(&pool).await?;
        let kafka_file = self.addresses.kafka_file.clone();
        let settings = fs::read_to_string(&kafka_file).context("read the settings of Kafka clients")?;
        let settings = settings.lines().filter_map(|line| line.split_once('='));
        let kafka = ClientOptions {
            brokers: self.addresses.kafka.clone(),
            topic_prefix: name.to_owned(),
            librdkafka: settings
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .collect(),
            ..ClientOptions::default()
        };
        event_log::ensure_topics(&kafka, partitions).await?;
        Ok(Room {
            pool,
            database_url,
            kafka,
            kafka_file,
        })
    }

    /// Stops both.
    pub async fn stop(mut self) -> anyhow::Result<()> {
        drop(self.process.stdin.take());
        self.process.wait().await?;
        Ok(())
    }

    pub fn pid(&self) -> Option<u32> {
        self.process.id()
    }
}
