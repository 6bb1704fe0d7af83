//! How a role stops: on SIGTERM or SIGINT. If it has not stopped after a while the process exits,
//! so a thread that hangs in foreign code cannot keep it alive.

use std::time::Duration;

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::config::Listen;

/// How long a role may take to stop once its last request was answered.
const STOP_SECONDS_MAX: u64 = 5;

/// A token that the first signal cancels. A second signal, or the time limit, ends the process.
pub fn on_signal(listen: &Listen) -> anyhow::Result<CancellationToken> {
    let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
    let token = CancellationToken::new();
    let cancel = token.clone();
    let limit = Duration::from_secs(listen.unready_seconds + listen.drain_seconds + STOP_SECONDS_MAX);
    tokio::spawn(async move {
        let mut signal = async || {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        };
        signal().await;
        tracing::info!("stopping");
        std::thread::spawn(move || exit_after(limit)); // not a task: the runtime may be what hangs
        cancel.cancel();
        signal().await;
        tracing::warn!("second signal: exiting at once");
        std::process::exit(1);
    });
    Ok(token)
}

fn exit_after(limit: Duration) {
    std::thread::sleep(limit);
    tracing::warn!(seconds = limit.as_secs(), "not stopped in time: exiting");
    std::process::exit(1);
}
