//! How a role stops: on SIGTERM or SIGINT. If it has not stopped after a while the process exits,
//! so a thread that hangs in foreign code cannot keep it alive.

use std::time::Duration;

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// More than servers take to drain (20 s), less than the supervisor waits (30 s).
const STOP_SECONDS_MAX: u64 = 25;

/// A token that the first signal cancels. A second signal, or the time limit, ends the process.
pub fn on_signal() -> anyhow::Result<CancellationToken> {
    let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
    let token = CancellationToken::new();
    let cancel = token.clone();
    tokio::spawn(async move {
        let mut signal = async || {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        };
        signal().await;
        tracing::info!("stopping");
        std::thread::spawn(exit_after_limit); // not a task: the runtime may be what hangs
        cancel.cancel();
        signal().await;
        tracing::warn!("second signal: exiting at once");
        std::process::exit(1);
    });
    Ok(token)
}

fn exit_after_limit() {
    std::thread::sleep(Duration::from_secs(STOP_SECONDS_MAX));
    tracing::warn!(seconds = STOP_SECONDS_MAX, "not stopped in time: exiting");
    std::process::exit(1);
}
