//! A broker that one test may pause, or give its own disk. `springtide stack start` supervises it;
//! Postgres is the one that all tests share.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{SPRINGTIDE, Stack, eventually, process};

const DEADLINE: Duration = Duration::from_secs(600);

/// Stopped on drop.
pub struct Broker {
    process: std::process::Child,
    pub address: String,
    /// librdkafka settings, with its password.
    pub client_file: PathBuf,
}

impl Broker {
    /// `state`: an empty folder for its log.
    pub async fn start(stack: &Stack, state: &Path) -> Self {
        // the supervisor also checks the ports of the roles, which do not run here
        let [port, controller_port, roles @ ..] = edge::bind::free_ports::<6>().unwrap();
        let log = std::fs::File::create(stack.dir.path().join("stack.log")).unwrap();
        let mut command = Command::new(SPRINGTIDE);
        for (role, port) in ["SERVE", "INGEST", "CONTROL", "TRAIN"].into_iter().zip(roles) {
            command.env(format!("SPRINGTIDE__LISTEN__{role}"), format!("127.0.0.1:{port}"));
        }
        let process = command
            .args(["stack", "start"])
            .env("SPRINGTIDE__STATE_DIR", state)
            .env("SPRINGTIDE__POSTGRES__URL", &stack.database_url)
            .env("SPRINGTIDE__KAFKA__PORT", port.to_string())
            .env("SPRINGTIDE__KAFKA__CONTROLLER_PORT", controller_port.to_string())
            .env("SPRINGTIDE__KAFKA__TOPIC_PREFIX", &stack.kafka.topic_prefix)
            .stdout(Stdio::null())
            .stderr(Stdio::from(log))
            .spawn()
            .unwrap();
        let mut broker = Self {
            process,
            address: format!("127.0.0.1:{port}"),
            client_file: state.join("kafka.properties"),
        };
        let log = stack.dir.path().join("stack.log");
        eventually("the broker answers", DEADLINE, async || {
            let log = std::fs::read_to_string(&log).unwrap();
            assert!(broker.process.try_wait().unwrap().is_none(), "{log}");
            log.contains("Kafka:").then_some(())
        })
        .await;
        broker
    }

    /// Suspends the broker until [`Self::go_on`]: it keeps its connections and does not answer.
    pub fn pause(&self) {
        process::signal(&self.node(), Signal::SIGSTOP);
    }

    pub fn go_on(&self) {
        process::signal(&self.node(), Signal::SIGCONT);
    }

    fn node(&self) -> Vec<Pid> {
        let node = process::descendants(self.process.id(), "kafka.Kafka");
        assert!(!node.is_empty(), "the broker does not run");
        node
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        // a paused broker would not receive SIGTERM; errors do not matter if it has ended already
        for node in process::descendants(self.process.id(), "kafka.Kafka") {
            let _ = kill(node, Signal::SIGCONT);
        }
        if let Ok(pid) = i32::try_from(self.process.id()) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
        }
        let _ = self.process.wait();
    }
}
