//! A real broker whose only listener for clients is SASL_SSL with SCRAM.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use edge::bind::free_ports;
use event_log::ClientOptions;
use rdkafka::client::ClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::KafkaError;
use serde_json::Value;

use fixture::ca::Authority;
use fixture::{SPRINGTIDE, eventually};

const START: Duration = Duration::from_secs(120);
const METADATA_TIMEOUT: Duration = Duration::from_secs(2);
const ATTEMPTS_MAX: u32 = 30;
const USER: &str = "springtide";
const PASSWORD: &str = "right";

pub struct Broker {
    process: Child,
    options: ClientOptions,
}

impl Broker {
    /// `dir`: for its files. Its certificate is from `authority`.
    pub async fn start(dir: &Path, authority: &Authority) -> Self {
        let fetched = Command::new(&*SPRINGTIDE)
            .args(["stack", "fetch", "--json"])
            .output()
            .unwrap();
        let fetched: Value = serde_json::from_slice(&fetched.stdout).unwrap();
        let (jars, java) = (fetched["kafka"].as_str().unwrap(), fetched["java"].as_str().unwrap());
        let jars = format!("{jars}/*");
        let dir = dir.join("broker");
        fs::create_dir(&dir).unwrap();
        let ca = authority.write(&dir, "ca.pem");
        let own = authority.issue(&["127.0.0.1"]);
        let keystore = dir.join("own.pem");
        fs::write(&keystore, [own.key, own.certificate].concat()).unwrap();
        let [port, controller_port] = free_ports().unwrap();
        let properties = dir.join("server.properties");
        let text = include_str!("server.properties")
            .replace("@port@", &port.to_string())
            .replace("@controller_port@", &controller_port.to_string())
            .replace("@user@", USER)
            .replace("@password@", PASSWORD)
            .replace("@keystore@", &keystore.display().to_string())
            .replace("@ca@", &ca.display().to_string())
            .replace("@data@", &dir.join("log").display().to_string());
        fs::write(&properties, text).unwrap();
        let formatted = Command::new(java)
            .args([
                "-Dlog4j2.level=ERROR",
                "-cp",
                &jars,
                "kafka.tools.StorageTool",
                "format",
            ])
            .args(["--cluster-id", "c3ByaW5ndGlkZS10bHMtMQ", "--config"])
            .arg(&properties)
            .args([
                "--add-scram",
                &format!("SCRAM-SHA-512=[name={USER},password={PASSWORD}]"),
            ])
            .output()
            .unwrap();
        assert!(
            formatted.status.success(),
            "{}",
            String::from_utf8_lossy(&formatted.stderr)
        );
        let log = dir.join("broker.log");
        let process = Command::new(java)
            .args([
                "-Xmx384m",
                "-XX:+UseSerialGC",
                "-Dlog4j2.level=WARN",
                "-cp",
                &jars,
                "kafka.Kafka",
            ])
            .arg(&properties)
            .stdout(Stdio::from(File::create(&log).unwrap()))
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let settings = [
            ("security.protocol", "sasl_ssl"),
            ("ssl.ca.location", &ca.display().to_string()),
            ("sasl.mechanism", "SCRAM-SHA-512"),
            ("sasl.username", USER),
            ("sasl.password", PASSWORD),
        ];
        let settings: BTreeMap<_, _> = settings
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect();
        let mut broker = Self {
            process,
            options: ClientOptions {
                brokers: format!("127.0.0.1:{port}"),
                topic_prefix: format!("tls_{}", uuid::Uuid::now_v7().simple()),
                librdkafka: settings,
                ..ClientOptions::default()
            },
        };
        eventually("the broker answers over SASL_SSL", START, async || {
            let ended = broker.process.try_wait().unwrap();
            assert!(ended.is_none(), "{}", fs::read_to_string(&log).unwrap());
            let options = broker.options.clone();
            let has_metadata = move || {
                let client: BaseConsumer = options.config(&[]).create().unwrap();
                let metadata = client.fetch_metadata(None, METADATA_TIMEOUT);
                metadata.is_ok_and(|metadata| !metadata.brokers().is_empty())
            };
            tokio::task::spawn_blocking(has_metadata).await.unwrap().then_some(())
        })
        .await;
        broker
    }

    pub fn options(&self) -> ClientOptions {
        self.options.clone()
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

struct Reasons(mpsc::Sender<String>);

impl ClientContext for Reasons {
    fn error(&self, error: KafkaError, reason: &str) {
        self.0.send(format!("{error}: {reason}")).ok();
    }
}

impl ConsumerContext for Reasons {}

/// Tries until a client with these options is refused with a reason that contains `expected`.
pub fn until_refused(options: &ClientOptions, expected: &str) {
    let (sender, reasons) = mpsc::channel();
    let client: BaseConsumer<Reasons> = options.config(&[]).create_with_context(Reasons(sender)).unwrap();
    let mut seen = Vec::new();
    for _ in 0..ATTEMPTS_MAX {
        let metadata = client.fetch_metadata(None, METADATA_TIMEOUT);
        assert!(metadata.is_err(), "not refused, for want of: {expected}");
        client.poll(Duration::from_millis(10));
        seen.extend(reasons.try_iter());
        if seen.iter().any(|reason| reason.contains(expected)) {
            return;
        }
    }
    panic!("refused for other reasons than {expected}: {seen:#?}");
}
