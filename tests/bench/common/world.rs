//! The roles of Springtide as processes, on a database and topics of their own, and a publisher of
//! versions.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use artifact::assignment::LEARNER;
use artifact::sign::SigningKey;
use artifact::threads::Threads;
use runs::publish::{External, Publisher, QuantizedCopies, import_checkpoint, publish_external};
use store::Store;
use tempfile::TempDir;

use crate::process::Process;
use crate::stack::{Room, Stack};
use crate::versions::Versions;

pub const POLICY: &str = "demo";
const LINE: &str = "realtime";
const PARTITIONS: i32 = 2;
const ROLE_START_MAX: Duration = Duration::from_secs(120);
/// A restarted gateway then needs few deltas.
const CHECKPOINT_EVERY: i64 = 10;

/// What a gateway has behind it.
#[derive(Debug, Clone, Copy)]
pub enum Fleet<'a> {
    /// Engines whose weights it changes itself.
    Engines(&'a [SocketAddr]),
    /// Followers, each in front of an engine.
    Followers(&'a [SocketAddr]),
}

/// Everything besides engines.
pub struct World {
    pub room: Room,
    pub stack: Stack,
    dir: TempDir,
    springtide: PathBuf,
    environment: Vec<(&'static str, String)>,
    pub address: SocketAddr,
    roles: Vec<Process>,
}

impl World {
    /// Postgres, broker, ingest and control. `slots`: sequences that each engine samples together.
    pub async fn start(springtide: &Path, slots: usize) -> anyhow::Result<Self> {
        // the roles run in folders of their own
        let springtide = &fs::canonicalize(springtide).with_context(|| format!("find {}", springtide.display()))?;
        let stack = Stack::start(springtide).await?;
        let room = stack.room("bench_engines", PARTITIONS).await?;
        let dir = tempfile::tempdir()?;
        let [ingest, control, serve] = edge::bind::free_ports()?.map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
        let mut environment = vec![
            ("SPRINGTIDE__STATE_DIR", dir.path().join("state").display().to_string()),
            ("SPRINGTIDE__LISTEN__INGEST", ingest.to_string()),
            ("SPRINGTIDE__LISTEN__CONTROL", control.to_string()),
            ("SPRINGTIDE__LISTEN__SERVE", serve.to_string()),
            ("SPRINGTIDE__POLICY__NAME", POLICY.to_owned()),
            ("SPRINGTIDE__INGEST__PARTITIONS", PARTITIONS.to_string()),
            (
                "SPRINGTIDE__RELEASE__ARM",
                format!("[{{alias=\"{LEARNER}\",weight=1.0,explore=0.0}}]"),
            ),
            ("SPRINGTIDE__SERVE__SLOTS", slots.to_string()),
        ];
        environment.extend(room.environment());
        let mut world = World {
            room,
            stack,
            dir,
            springtide: springtide.to_owned(),
            environment,
            address: serve,
            roles: vec![],
        };
        for (role, address) in [("ingest", ingest), ("control", control)] {
            let command = world.command(role);
            let process = world.run(command, role, &format!("http://{address}/health")).await?;
            world.roles.push(process);
        }
        Ok(world)
    }

    /// `springtide serve`, once it answers.
    pub async fn gateway(&self, fleet: Fleet<'_>, settings: &[(&str, String)]) -> anyhow::Result<Process> {
        let mut command = self.command("serve");
        command
            .env("SPRINGTIDE__SERVE__REMOTE__VLLM", vllm_setting(fleet))
            .envs(settings.iter().cloned());
        self.run(command, "serve", &format!("http://{}/health", self.address))
            .await
    }

    /// `springtide serve` with our own engine, beside others. It need not hold a version yet.
    pub async fn replica(
        &self,
        number: usize,
        listen: SocketAddr,
        settings: &[(&str, String)],
    ) -> anyhow::Result<Process> {
        let name = format!("replica-{number}");
        let mut command = self.command("serve");
        command
            .env("SPRINGTIDE__LISTEN__SERVE", listen.to_string())
            .env("SPRINGTIDE__SERVE__REPLICA", &name)
            .env("SPRINGTIDE__SERVE__STATE_DIR", self.dir.path().join(&name))
            .envs(settings.iter().cloned());
        self.run(command, &name, &format!("http://{listen}/metrics")).await
    }

    /// `springtide follow` of the newest version, in front of `engine`. It may not hold one yet.
    pub async fn follower(&self, number: usize, listen: SocketAddr, engine: SocketAddr) -> anyhow::Result<Process> {
        let name = format!("follow-{number}");
        let mut command = self.command("follow");
        command
            .args(["--engine", "vllm", "--engine-url", &format!("http://{engine}")])
            .args(["--alias", LEARNER, "--listen", &listen.to_string()])
            .env("SPRINGTIDE__FOLLOW__REPLICA", &name)
            .env("SPRINGTIDE__FOLLOW__STATE_DIR", self.dir.path().join(&name));
        self.run(command, &name, &format!("http://{listen}/metrics")).await
    }

    fn command(&self, role: &str) -> Command {
        let mut command = Command::new(&self.springtide);
        command
            .arg(role)
            .current_dir(self.dir.path())
            .envs(self.environment.iter().cloned());
        command
    }

    async fn run(&self, command: Command, log: &str, url: &str) -> anyhow::Result<Process> {
        let mut process = Process::start(command, &self.log(log))?;
        process.answers(url, ROLE_START_MAX).await?;
        Ok(process)
    }

    pub fn log(&self, name: &str) -> PathBuf {
        self.dir.path().join(format!("{name}.log"))
    }

    /// A publisher as the trainer has it.
    pub fn publisher(&self) -> anyhow::Result<Publisher> {
        let state = self.dir.path().join("state");
        let keys_dir = state.join("keys");
        let store = Store::open(&format!("file://{}", state.join("store").display()))?;
        Ok(Publisher {
            pool: self.room.pool.clone(),
            store: store.with_threads(Threads::ONE),
            key: Arc::new(SigningKey::load_or_create(&keys_dir, "trainer")?),
            keys_dir,
            announce: Some(event_log::Producer::new(&self.room.kafka)?),
            policy: POLICY.into(),
            checkpoint_every: CHECKPOINT_EVERY,
            run_states_kept: 2,
            quantized: QuantizedCopies::default(),
        })
    }

    /// Keeps the logs, if something is to be looked at.
    pub fn keep_logs(&self, folder: &Path) -> anyhow::Result<()> {
        fs::create_dir_all(folder)?;
        for entry in fs::read_dir(self.dir.path())? {
            let path = entry?.path();
            if let Some(name) = path
                .file_name()
                .filter(|_| path.extension().is_some_and(|end| end == "log"))
            {
                fs::copy(&path, folder.join(name))?;
            }
        }
        Ok(())
    }

    /// Stops everything.
    pub async fn stop(mut self) -> anyhow::Result<()> {
        for mut role in self.roles.drain(..) {
            role.kill()?;
        }
        self.room.pool.close().await;
        self.stack.stop().await
    }
}

fn vllm_setting(fleet: Fleet<'_>) -> String {
    let (addresses, control) = match fleet {
        Fleet::Engines(addresses) => (addresses, true),
        Fleet::Followers(addresses) => (addresses, false),
    };
    let server = |address| format!("{{url=\"http://{address}\",control={control}}}");
    let servers: Vec<String> = addresses.iter().map(server).collect();
    format!("[{}]", servers.join(","))
}

/// Makes `number` the newest version, after the version `parent`. Returns its serial.
pub async fn publish(
    publisher: &Publisher,
    versions: &Versions,
    number: i64,
    parent: Option<i64>,
) -> anyhow::Result<i64> {
    let checkpoint = versions.checkpoint(number)?;
    let Some(parent) = parent else {
        return Ok(import_checkpoint(publisher, Arc::new(checkpoint), LINE).await?);
    };
    let external = External {
        line: LINE.into(),
        parent,
        weights: runs::publish::Weights::All(checkpoint),
        with_checkpoint: number % CHECKPOINT_EVERY == 0,
        reference: None,
    };
    let done = publish_external(publisher, external).await.context("publish")?;
    Ok(done.manifest.version)
}
