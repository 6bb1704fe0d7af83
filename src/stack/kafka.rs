//! One Apache Kafka node in KRaft mode (broker and controller in one JVM) on loopback. Does not supervise: whoever starts the
//! command restarts it. Creates no topics: those are ingest's.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use nix::sys::signal::Signal;
use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};

use super::exec::{self, Tie};

const PROPERTIES: &str = include_str!("../../stack/kafka/server.properties");
const METADATA_TIMEOUT: Duration = Duration::from_secs(2);

/// Orderly: flushes its logs and says goodbye to its controller, about 2 s.
pub const STOP: Signal = Signal::SIGTERM;

/// One private node.
#[derive(Debug, Clone)]
pub struct Kafka {
    pub java: PathBuf,
    /// Folder of the broker's jars.
    pub jars: PathBuf,
    /// Holds `server.properties` and the log segments; created by [`Kafka::prepare`].
    pub data: PathBuf,
    pub port: u16,
    pub controller_port: u16,
    /// Largest Java heap, MiB; the process takes about as much again.
    pub heap_mib: u32,
}

impl Kafka {
    /// Writes the node's configuration and, the first time, formats its storage with a fresh cluster id.
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
        let ask = move || {
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
            return false; // spares librdkafka its own retries
        }
        tokio::task::spawn_blocking(ask).await.unwrap_or(false)
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

    /// The jars one by one, sorted: the same class path every time.
    fn class_path(&self) -> anyhow::Result<String> {
        let mut jars = Vec::new();
        for entry in fs::read_dir(&self.jars).context("list the broker's jars")? {
            let path = entry.context("list the broker's jars")?.path();
            if is_jar(&path) {
                jars.push(path.display().to_string());
            }
        }
        jars.sort_unstable();
        Ok(jars.join(":"))
    }

    fn storage_tool(&self, args: &[&str]) -> anyhow::Result<String> {
        let output = Command::new(&self.java)
            .args(["-Dlog4j2.level=ERROR", "-cp"])
            .arg(self.class_path()?)
            .arg("kafka.tools.StorageTool")
            .args(args)
            .stdin(Stdio::null())
            .output()
            .context("run Kafka's storage tool")?;
        if !output.status.success() {
            bail!(
                "Kafka's storage tool failed ({}):\n{}{}",
                output.status,
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr)
            );
        }
        String::from_utf8(output.stdout).context("read the storage tool's answer")
    }
}

fn is_jar(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "jar")
}
