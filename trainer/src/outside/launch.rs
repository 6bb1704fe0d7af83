//! Starts the command of a launcher for a run, and starts it again when it ends, until the run ends, pauses or
//! is canceled. The command takes the run's cohorts by itself: it gets `SPRINGTIDE_RUN`,
//! `SPRINGTIDE_CONTROL` and `SPRINGTIDE_API_KEY`. What it prints goes into a file.

use anyhow::Context;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use runs::claim::{Claim, append_event};
use runs::door;
use runs::options::Launcher;
use serde_json::json;
use sqlx::PgPool;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;
use tokio::process::Command;
use tokio_util::sync::{CancellationToken, DropGuard};

/// How long a command that is to end may take before it is killed.
/// torchrun gives its workers 30 s.
const STOP: Duration = Duration::from_secs(60);
/// Settings of this process that are none of the command's.
const HIDDEN: [&str; 4] = [
    "SPRINGTIDE__POSTGRES",
    "SPRINGTIDE_FILE__POSTGRES",
    "SPRINGTIDE__KAFKA",
    "SPRINGTIDE__TRAINER",
];
const BACKOFF_MIN: Duration = Duration::from_secs(1);
const BACKOFF_MAX: Duration = Duration::from_secs(30);
/// So much of what it printed last is in the event of its end, bytes.
const TAIL_BYTES: u64 = 2 << 10;

/// A launched command. Dropping it ends the command.
pub(super) struct Launched {
    shared: Arc<Shared>,
    _stop: DropGuard,
}

struct Shared {
    launcher: Launcher,
    pool: PgPool,
    claim: Claim,
    control_url: String,
    log: PathBuf,
    /// Steps of the run, so that a command that makes some may end as often as it likes.
    steps: AtomicI64,
    gave_up: AtomicBool,
}

impl Launched {
    /// `folder`: for what it prints.
    pub fn start(
        launcher: Launcher,
        pool: PgPool,
        claim: Claim,
        control_url: String,
        folder: &Path,
    ) -> anyhow::Result<Self> {
        std::fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
        let stop = CancellationToken::new();
        let shared = Arc::new(Shared {
            launcher,
            pool,
            claim,
            control_url,
            log: folder.join(format!("{}.log", claim.run)),
            steps: AtomicI64::new(0),
            gave_up: AtomicBool::new(false),
        });
        tokio::spawn(supervise(Arc::clone(&shared), stop.clone()));
        Ok(Launched {
            shared,
            _stop: stop.drop_guard(),
        })
    }

    /// A step was made of one of its commits.
    pub fn made_step(&self) {
        self.shared.steps.fetch_add(1, Ordering::Relaxed);
    }

    /// Why it is not started again, if so.
    pub fn gave_up(&self) -> Option<String> {
        let Shared { launcher, log, .. } = &*self.shared;
        self.shared.gave_up.load(Ordering::Relaxed).then(|| {
            format!(
                "the launcher `{}` ended {} times in a row without a step; {} has what it printed. Resume the run to try again",
                launcher.name,
                launcher.restarts_max + 1,
                log.display()
            )
        })
    }
}

async fn supervise(shared: Arc<Shared>, stop: CancellationToken) {
    let (mut ends, mut steps, mut backoff) = (0, 0, BACKOFF_MIN);
    while !stop.is_cancelled() {
        let ended = match shared.once(&stop).await {
            Ok(None) => return,
            Ok(Some(ended)) => ended,
            Err(error) => format!("{error:#}"),
        };
        let made = shared.steps.load(Ordering::Relaxed);
        if made > steps {
            (ends, steps, backoff) = (0, made, BACKOFF_MIN);
        }
        ends += 1;
        shared.tell(&ended).await;
        if ends > shared.launcher.restarts_max {
            shared.gave_up.store(true, Ordering::Relaxed);
            return;
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(backoff) => {}
        }
        backoff = (backoff * 2).min(BACKOFF_MAX);
    }
}

impl Shared {
    /// Runs the command once. Returns how it ended; `None`: it was told to.
    async fn once(&self, stop: &CancellationToken) -> anyhow::Result<Option<String>> {
        // of an attempt before this one, which is dead
        door::end_lease(&self.pool, &self.claim)
            .await
            .context("end the lease before")?;
        let log = File::options().create(true).append(true).open(&self.log);
        let log = log.with_context(|| format!("open {}", self.log.display()))?;
        let (program, arguments) = self.launcher.command.split_first().context("its command is empty")?;
        // the command ends with this process, however that dies
        let mut command = Command::new("setpriv");
        command
            .args(["--pdeathsig", "TERM", "--", program])
            .args(arguments)
            .env("SPRINGTIDE_RUN", self.claim.run.to_string())
            .env("SPRINGTIDE_CONTROL", &self.control_url)
            .stdin(Stdio::null())
            .stdout(log.try_clone().context("share its log")?)
            .stderr(log)
            .process_group(0);
        for (name, _) in std::env::vars() {
            if HIDDEN.iter().any(|hidden| name.starts_with(hidden)) {
                command.env_remove(name);
            }
        }
        if let Some(key) = &self.launcher.api_key {
            command.env("SPRINGTIDE_API_KEY", key);
        }
        let mut child = command.spawn().context("start it with setpriv (util-linux)")?;
        let group = child.id().and_then(|id| i32::try_from(id).ok()).map(Pid::from_raw);
        let signal = |signal| group.map(|group| killpg(group, signal));
        let status = tokio::select! {
            status = child.wait() => Some(status),
            () = stop.cancelled() => None,
        };
        let Some(status) = status else {
            signal(Signal::SIGTERM);
            if tokio::time::timeout(STOP, child.wait()).await.is_err() {
                signal(Signal::SIGKILL);
            }
            return Ok(None);
        };
        signal(Signal::SIGKILL); // what it left behind
        Ok(Some(status.context("wait for it")?.to_string()))
    }

    /// An event of the run.
    async fn tell(&self, ended: &str) {
        let name = &self.launcher.name;
        tracing::warn!(run = %self.claim.run, launcher = name, ended, log = %self.log.display(), "a launched trainer ended");
        let message = format!(
            "the launcher `{name}` ended ({ended}); {} has what it printed",
            self.log.display()
        );
        let data = json!({"launcher": name, "tail": tail(&self.log)});
        let appended = async {
            let mut connection = self.pool.acquire().await?;
            append_event(&mut connection, self.claim.run, "warn", &message, &data).await
        };
        if let Err(error) = appended.await {
            tracing::warn!(%error, "could not append an event");
        }
    }
}

/// The end of a file, from the beginning of a line.
fn tail(path: &Path) -> String {
    let read = || -> std::io::Result<Vec<u8>> {
        let file = File::open(path)?;
        let size = file.metadata()?.len();
        let from = size.saturating_sub(TAIL_BYTES);
        let mut bytes = vec![0; usize::try_from(size - from).unwrap_or(0)];
        file.read_exact_at(&mut bytes, from)?;
        Ok(bytes)
    };
    String::from_utf8_lossy(&read().unwrap_or_default()).into_owned()
}
