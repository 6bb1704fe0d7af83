//! How a role ends: SIGTERM or SIGINT asks it to; what has not ended after a while is cut off, so that a thread that hangs
//! in foreign code cannot keep a process alive.

use std::time::Duration;

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// A little more than servers take to drain (20 s), a little less than the supervisor waits (30 s).
const STOP_SECONDS_MAX: u64 = 25;

/// A token that the first signal cancels; the second, or time, ends the process.
pub fn on_signal() -> anyhow::Result<CancellationToken> {
    let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
    let token = CancellationToken::new();
    let cancel = token.clone();
    tokio::spawn(async move {
        let mut asked = async || {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        };
        asked().await;
        tracing::info!("stopping");
        std::thread::spawn(cut_off); // not a task: the runtime may be what hangs
        cancel.cancel();
        asked().await;
        tracing::warn!("asked twice: leaving at once");
        std::process::exit(1);
    });
    Ok(token)
}

fn cut_off() {
    std::thread::sleep(Duration::from_secs(STOP_SECONDS_MAX));
    tracing::warn!(seconds = STOP_SECONDS_MAX, "not stopped in time: leaving");
    std::process::exit(1);
}
