//! Programs in sandboxes: what they may do (`programs`), how limits end them (`limits`), and what they try
//! in order to get out (`escapes`). Needs `bwrap`, `/usr/bin/python3` and user namespaces; `make test` skips
//! `sandbox::` where these are forbidden.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod sandbox {
    mod escapes;
    mod limits;
    mod programs;
}

use std::sync::LazyLock;
use std::time::{Duration, Instant};
use world::process::Sandbox;
use world::{Command, Limits, Output};

/// One for all tests, so that few sandboxes run at a time on a small machine.
static SANDBOX: LazyLock<Sandbox> = LazyLock::new(|| Sandbox::new(4).unwrap());

/// Long enough for a busy machine; what should end by itself does not reach it.
const PATIENCE: Duration = Duration::from_secs(60);

fn patient() -> Limits {
    Limits {
        wall: PATIENCE,
        cpu: PATIENCE,
        ..Limits::default()
    }
}

fn python(source: &str, limits: Limits) -> Command {
    Command {
        program: ["/usr/bin/python3", "-I", "-c", source].map(str::to_owned).into(),
        limits,
        ..Command::default()
    }
}

async fn run(source: &str, limits: Limits) -> Output {
    SANDBOX.run(&python(source, limits)).await.unwrap()
}

/// Waits until no process on this machine has the text among its arguments.
async fn none_left(marker: &str) {
    let start = Instant::now();
    while let Some(process) = running(marker) {
        assert!(start.elapsed() < PATIENCE, "{process} is left of the sandbox");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A process with the text among its arguments.
fn running(marker: &str) -> Option<String> {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let mut names = processes.filter_map(|entry| entry.file_name().into_string().ok());
    names.find(|name| {
        let arguments = std::fs::read(format!("/proc/{name}/cmdline")).unwrap_or_default();
        name.parse::<u32>().is_ok() && String::from_utf8_lossy(&arguments).contains(marker)
    })
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
