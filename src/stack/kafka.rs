//! A private Apache Kafka node in KRaft mode (broker and controller in one JVM) on loopback. Does
//! not supervise it, and creates no topics: ingest does.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::Context;
use nix::sys::signal::Signal;
use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};

use super::exec::{self, Tie};

const PROPERTIES: &str = include_str!("../../stack/kafka/server.properties");
const METADATA_TIMEOUT: Duration = Duration::from_secs(2);

/// Stops in order: flushes its logs and leaves its controller, in about 2 s.
pub const STOP: Signal = Signal::SIGTERM;

#[derive(Debug, Clone)]
pub struct Kafka {
    pub java: PathBuf,
    /// Folder of the broker's jars.
    pub jars: PathBuf,
    /// Has `server.properties` and the log segments; [`Kafka::prepare`] creates it.
    pub data: PathBuf,
    pub port: u16,
    pub controller_port: u16,
    /// Largest Java heap, MiB; the process takes about as much again.
    pub heap_mib: u32,
}

impl Kafka {
    /// Writes the node's configuration, and formats its storage with a new cluster id the first
    /// time.
    pub fn prepare(&self) -> anyhow::Result<()> {
        fs::create_dir_all(&self.data).with_context(|| format!("create {}", self.data.display()))?;
        let segments = self.segments()?;
        let properties = PROPERTIES
            .replace("@port@", &self.port.to_string())
            .replace("@controller_port@", &self.controller_port.to_string())
            .replace("@data@", &segments.display().to_string());
        fs::write(self.properties(), properties).context("write server.properties")?;
        if segments.join("meta.properties").exists() {
            return Ok(());
        }
        let id = self.storage_tool(&["random-uuid"])?;
        let properties = self.properties().display().to_string();
        self.storage_tool(&["format", "--cluster-id", id.trim(), "--config", &properties])?;
        Ok(())
    }

    /// The node in the foreground, logging to its standard output.
    pub fn command(&self) -> anyhow::Result<Command> {
        let mut command = exec::tied(
            &self.java,
            Tie {
                signal: STOP,
                drop_root: false,
            },
        )?;
        command
            .args(["-Xms128m", &format!("-Xmx{}m", self.heap_mib)])
            .args(["-XX:+UseSerialGC", "-XX:+ExitOnOutOfMemoryError", "-Dlog4j2.level=WARN"])
            .arg("-cp")
            .arg(self.class_path()?)
            .arg("kafka.Kafka")
            .arg(self.properties());
        Ok(command)
    }

    pub fn brokers(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Whether the broker answers a request for metadata.
    pub async fn ready(&self) -> bool {
        let brokers = self.brokers();
        let has_brokers = move || {
            let client: Result<BaseConsumer, _> = ClientConfig::new()
                .set("bootstrap.servers", brokers)
                .set("log_level", "0")
                .create();
            client.is_ok_and(|client| {
                client
                    .fetch_metadata(None, METADATA_TIMEOUT)
                    .is_ok_and(|metadata| !metadata.brokers().is_empty())
            })
        };
        if tokio::net::TcpStream::connect(("127.0.0.1", self.port)).await.is_err() {
            return false; // librdkafka would retry
        }
        tokio::task::spawn_blocking(has_brokers).await.unwrap_or(false)
    }

    fn segments(&self) -> anyhow::Result<PathBuf> {
        let data = self
            .data
            .canonicalize()
            .with_context(|| format!("resolve {}", self.data.display()))?;
        Ok(data.join("log"))
    }

    fn properties(&self) -> PathBuf {
        self.data.join("server.properties")
    }

    /// The jars one by one, sorted, so that the class path is always the same.
    fn class_path(&self) -> anyhow::Result<String> {
        let mut jars = Vec::new();
        for entry in fs::read_dir(&self.jars).context("list the broker's jars")? {
            let path = entry.context("list the broker's jars")?.path();
            if path.extension().is_some_and(|extension| extension == "jar") {
                jars.push(path.display().to_string());
            }
        }
        jars.sort_unstable();
        Ok(jars.join(":"))
    }

    fn storage_tool(&self, args: &[&str]) -> anyhow::Result<String> {
        let mut tool = Command::new(&self.java);
        tool.args(["-Dlog4j2.level=ERROR", "-cp"])
            .arg(self.class_path()?)
            .arg("kafka.tools.StorageTool")
            .args(args);
        exec::output(&mut tool, "Java 17")
    }
}
