//! A private Apache Kafka node in KRaft mode (broker and controller in one JVM) on loopback. Does
//! not supervise it, and creates no topics: ingest does.
//!
//! Any local user can connect to a port, so clients must know a generated password. It is in a file
//! of librdkafka settings that only the user who runs Springtide can read, and in the data folder,
//! which only the user who runs the node can enter. Never in arguments, logs or the environment.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, ensure};
use nix::sys::signal::Signal;
use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};

use super::exec::{self, Tie};
use super::{port, reach};
use crate::private;

const PROPERTIES: &str = include_str!("../../tools/pins/kafka/server.properties");
const METADATA_TIMEOUT: Duration = Duration::from_secs(2);
/// The file of settings for clients, in the state folder.
pub const CLIENT_FILE: &str = "kafka.properties";
const USER: &str = "springtide";
const PASSWORD: &str = "sasl.password";
/// In the data folder: the BLAKE3 of the password that the node's metadata has.
const PASSWORD_HASH: &str = "password.blake3";

/// Stops in order: flushes its logs and leaves its controller, in about 2 s.
pub const STOP: Signal = Signal::SIGTERM;

#[derive(Debug, Clone)]
pub struct Kafka {
    pub java: PathBuf,
    /// Folder of the broker's jars.
    pub jars: PathBuf,
    /// Has `server.properties` and the log segments, or is a link to them; [`Kafka::prepare`]
    /// creates it.
    pub data: PathBuf,
    /// What clients must set, as lines `name=value`; [`Kafka::prepare`] creates it.
    pub client_file: PathBuf,
    pub port: u16,
    pub controller_port: u16,
    /// Largest Java heap, MiB; the process takes about as much again.
    pub heap_mib: u32,
}

impl Kafka {
    /// Writes the node's configuration, and formats its storage with a new cluster id the first
    /// time. If the clients' password is missing, makes a new one.
    pub fn prepare(&self) -> anyhow::Result<()> {
        let data = reach::data_folder(&self.data)?;
        let password = self.load_or_create_password()?;
        let log = data.join("log");
        let is_new = !log.join("meta.properties").exists();
        let mechanisms = match is_new || self.remembers(&password)? {
            true => "SCRAM-SHA-256",
            false => "SCRAM-SHA-256,PLAIN",
        };
        let properties = PROPERTIES
            .replace("@mechanisms@", mechanisms)
            .replace("@port@", &self.port.to_string())
            .replace("@controller_port@", &self.controller_port.to_string())
            .replace("@password@", &password)
            .replace("@admin_password@", &private::secret()?)
            .replace("@controller_password@", &private::secret()?)
            .replace("@data@", &log.display().to_string());
        let properties_file = data.join("server.properties");
        private::replace(&properties_file, &properties, exec::server_user())?;
        if !is_new {
            return Ok(());
        }
        // 22 digits of base64 are 16 bytes; the last one has two bits of them
        let id = format!("{}A", &private::secret()?[..21]);
        // Arguments are readable by every user, so these are in a file, one a line.
        let arguments_file = data.join("format.arguments");
        let arguments = format!(
            "format\n--cluster-id\n{id}\n--config\n{}\n--add-scram\nSCRAM-SHA-256=[name={USER},password={password}]\n",
            properties_file.display()
        );
        private::replace(&arguments_file, &arguments, exec::server_user())?;
        let formatted = self.tool("kafka.tools.StorageTool", &[&format!("@{}", arguments_file.display())]);
        fs::remove_file(&arguments_file).context("remove the arguments of the storage tool")?;
        formatted?;
        self.remember(&password)
    }

    /// The node in the foreground, logging to its standard output.
    pub fn command(&self) -> anyhow::Result<Command> {
        let mut command = self.java()?;
        command
            .args(["-Xms128m", &format!("-Xmx{}m", self.heap_mib)])
            .args(["-XX:+UseSerialGC", "-XX:+ExitOnOutOfMemoryError", "-Dlog4j2.level=WARN"])
            // the second compiler would take a third of a short node's processor time
            .arg("-XX:TieredStopAtLevel=1")
            .arg("-cp")
            .arg(self.class_path()?)
            .arg("kafka.Kafka")
            .arg(self.data_folder()?.join("server.properties"));
        Ok(command)
    }

    pub fn brokers(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Whether the broker answers a request for metadata. Gives it the clients' password if it
    /// has another, because the file with it was lost.
    pub async fn ready(&self) -> bool {
        let node = self.clone();
        let ready = move || match node.check() {
            Ok(ready) => ready,
            Err(error) => {
                tracing::warn!(error = format!("{error:#}"), "cannot check the private Kafka node");
                false
            }
        };
        tokio::task::spawn_blocking(ready).await.unwrap_or(false)
    }

    fn check(&self) -> anyhow::Result<bool> {
        // librdkafka would retry. Another user's program at this port must not get a password.
        if !port::is_ours(self.port)? {
            return Ok(false);
        }
        let settings = read_settings(&self.client_file)?;
        let password = settings.get(PASSWORD).context("the file of settings has no password")?;
        if !self.remembers(password)? {
            self.set_password(password)?;
        }
        let mut client = ClientConfig::new();
        client.set("bootstrap.servers", self.brokers()).set("log_level", "0");
        client.extend(settings);
        let client: BaseConsumer = client.create().context("create a client")?;
        let metadata = client.fetch_metadata(None, METADATA_TIMEOUT);
        Ok(metadata.is_ok_and(|metadata| !metadata.brokers().is_empty()))
    }

    fn load_or_create_password(&self) -> anyhow::Result<String> {
        let file = &self.client_file;
        if !file.exists() {
            let text = format!(
                "# What clients of the private Kafka node must set. Keep it secret.\n\
                 security.protocol=SASL_PLAINTEXT\nsasl.mechanism=SCRAM-SHA-256\nsasl.username={USER}\n{PASSWORD}={}\n",
                private::secret()?
            );
            private::replace(file, &text, None)?;
        }
        let password = read_settings(file)?.remove(PASSWORD);
        password.with_context(|| format!("{} has no {PASSWORD}: remove the file", file.display()))
    }

    /// Whether the node's metadata has this password.
    fn remembers(&self, password: &str) -> anyhow::Result<bool> {
        match fs::read_to_string(self.data_folder()?.join(PASSWORD_HASH)) {
            Ok(hash) => Ok(hash.trim() == blake3::hash(password.as_bytes()).to_hex().as_str()),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error).context("read the hash of the password"),
        }
    }

    fn remember(&self, password: &str) -> anyhow::Result<()> {
        let hash = blake3::hash(password.as_bytes()).to_hex();
        let file = self.data_folder()?.join(PASSWORD_HASH);
        private::replace(&file, &format!("{hash}\n"), exec::server_user())
    }

    /// Tells the running node the clients' password. [`Kafka::prepare`] has let the user `admin` in
    /// for that.
    fn set_password(&self, password: &str) -> anyhow::Result<()> {
        let data = self.data_folder()?;
        let server = fs::read_to_string(data.join("server.properties")).context("read server.properties")?;
        let login = server
            .lines()
            .find_map(|line| line.strip_prefix("listener.name.client.plain."))
            .context("server.properties has no login for the user admin")?;
        let access = format!("security.protocol=SASL_PLAINTEXT\nsasl.mechanism=PLAIN\n{login}\n");
        let change = format!("SCRAM-SHA-256=password={password}\n");
        let (access_file, change_file) = (data.join("access.properties"), data.join("change.properties"));
        private::replace(&access_file, &access, exec::server_user())?;
        private::replace(&change_file, &change, exec::server_user())?;
        let changed = self.tool(
            "kafka.admin.ConfigCommand",
            &[
                "--bootstrap-server",
                &self.brokers(),
                "--command-config",
                &access_file.display().to_string(),
                "--alter",
                "--entity-type",
                "users",
                "--entity-name",
                USER,
                "--add-config-file",
                &change_file.display().to_string(),
            ],
        );
        for file in [access_file, change_file] {
            fs::remove_file(&file).with_context(|| format!("remove {}", file.display()))?;
        }
        // The tool may quote what it was given.
        if let Err(error) = changed {
            let reason = format!("{error:#}").replace(password, "…");
            return Err(anyhow::anyhow!(reason).context("set the clients' password"));
        }
        self.remember(password)
    }

    fn data_folder(&self) -> anyhow::Result<PathBuf> {
        self.data
            .canonicalize()
            .with_context(|| format!("resolve {}", self.data.display()))
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

    /// A Java program, run by the user who runs the node.
    fn java(&self) -> anyhow::Result<Command> {
        let tie = Tie {
            signal: STOP,
            user: exec::server_user(),
        };
        let mut java = exec::tied(&self.java, tie)?;
        java.current_dir("/");
        Ok(java)
    }

    fn tool(&self, class: &str, args: &[&str]) -> anyhow::Result<String> {
        let mut tool = self.java()?;
        tool.args(["-Dlog4j2.level=ERROR", "-cp"])
            .arg(self.class_path()?)
            .arg(class)
            .args(args);
        exec::output(&mut tool, "Java 17")
    }
}

/// Reads a file of librdkafka settings: lines `name=value`, and comments after `#`. Errors do not
/// quote the file, which may hold secrets.
pub fn read_settings(file: &Path) -> anyhow::Result<BTreeMap<String, String>> {
    let text = fs::read_to_string(file).with_context(|| format!("read {}", file.display()))?;
    let mut settings = BTreeMap::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let number = index + 1;
        let (name, value) = line
            .split_once('=')
            .with_context(|| format!("{} line {number} is not name=value", file.display()))?;
        let twice = settings.insert(name.trim_end().to_owned(), value.trim_start().to_owned());
        ensure!(
            twice.is_none(),
            "{} line {number} sets a value a second time",
            file.display()
        );
    }
    Ok(settings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_settings_is_read_and_errors_do_not_quote_it() {
        let temp = tempfile::tempdir().unwrap();
        let file = temp.path().join("kafka.properties");
        fs::write(&file, "# a comment\n\nsasl.username = me\nsasl.password=a=b\n").unwrap();
        let settings = read_settings(&file).unwrap();
        assert_eq!(settings["sasl.username"], "me");
        assert_eq!(settings["sasl.password"], "a=b");
        for text in ["a=secret\nsecret", "a=secret\na=secret"] {
            fs::write(&file, text).unwrap();
            let refused = format!("{:#}", read_settings(&file).unwrap_err());
            assert!(refused.contains("line 2") && !refused.contains("secret"), "{refused}");
        }
    }
}
