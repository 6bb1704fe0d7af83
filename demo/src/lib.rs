//! `springtide demo`: replays developers at work on real code against the running stack, through
//! its public API, and reports whether the policy that learned from them served them better than
//! the frozen one.
//!
//! The maths is pure ([`arrivals`], [`developer`], [`stats`]). Around it are the HTTP client, the
//! loop that replays, and read-only queries. Two demos, [`completion`] and [`session`], share one
//! frame ([`stage`]). The demo acts on the stack only through the API
//! that any product would use, and it does not teach: that is the trainer's work. No production
//! code depends on this crate, and it knows neither the configuration file nor the binary:
//! [`Settings`] has all it needs.

mod args;
mod arrivals;
mod client;
mod completion;
pub mod corpus;
pub mod developer;
mod house_style;
mod progress;
mod queries;
mod random;
mod references;
pub mod rehearsal;
mod replay;
mod results;
mod session;
mod shuffle;
mod stage;
mod stats;
mod suggester;
mod terminal;
mod users;

use std::{any::Any, path::PathBuf, sync::Arc, time::Duration};

use anyhow::ensure;
use artifact::checkpoint::Checkpoint;
use futures::future::BoxFuture;
use sqlx::PgPool;

pub use self::args::{Args, Corpus, Dealt};
pub use self::results::Served;
pub use self::stats::Reaction;

const POLL_EVERY: Duration = Duration::from_secs(1);

/// What the binary tells the demo about the stack and the terminal.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Base URLs without a slash at the end.
    pub serve_url: String,
    pub ingest_url: String,
    pub control_url: String,
    pub api_key: Option<String>,
    /// Trusts the certificates of the roles.
    pub http: reqwest::Client,
    pub policy: String,
    /// Hugging Face folder of the base model.
    pub base: PathBuf,
    /// How the stack rewards the surface that is replayed ([`Args::surface`]).
    pub surface: Surface,
    /// Where the report is written by default.
    pub state_dir: PathBuf,
    /// How the learning arm is served.
    pub learning: Served,
    /// How the arm that follows is served.
    pub following: Served,
    /// Rebuilds a version from the policy store.
    pub load_version: LoadVersion,
    pub console: Console,
}

/// Rebuilds the version of this serial.
#[derive(Clone)]
pub struct LoadVersion(pub Arc<dyn Fn(i64) -> BoxFuture<'static, anyhow::Result<Arc<Checkpoint>>> + Send + Sync>);

impl std::fmt::Debug for LoadVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("LoadVersion")
    }
}

/// What the binary's console offers to a view that fills the terminal.
#[derive(Debug, Clone, Copy)]
pub struct Console {
    /// Whether there is a terminal that a view may take.
    pub has_screen: fn() -> bool,
    /// Holds log lines back until the guard is dropped, and prints them then.
    pub hold_log: fn() -> Box<dyn Any + Send>,
    /// The newest held lines, at most this many.
    pub newest_log_lines: fn(usize) -> Vec<String>,
}

/// The rewards of the replayed surface.
#[derive(Debug, Clone)]
pub struct Surface {
    /// Its trajectories are episodes.
    pub is_of_episodes: bool,
    /// Its metric is boolean: accepted or not.
    pub is_boolean: bool,
    pub accept: f64,
    pub reject: f64,
    pub decline: Option<f64>,
    pub horizon_seconds: f64,
}

impl Surface {
    /// The price τ of showing a suggestion: an accept earns 1 − τ, a reject −τ, a decline 0.
    ///
    /// Errors when the surface rewards otherwise, because the demo's rewards would not be the
    /// trainer's.
    fn price(&self) -> anyhow::Result<f64> {
        let tau = -self.reject;
        let fits = self.is_boolean
            && !self.is_of_episodes
            && (self.accept - (1.0 - tau)).abs() < 1e-9
            && self.decline == Some(0.0)
            && 0.0 < tau
            && tau < 1.0;
        ensure!(
            fits,
            "[[ingest.surface]] {:?} has rewards that the demo cannot use: for a price τ of showing a \
             suggestion, between 0 and 1, set accept = 1 − τ, reject = −τ and decline = 0 (such as 0.75, −0.25 and 0)",
            client::SURFACE
        );
        Ok(tau)
    }
}

/// Replays the users of [`Args::surface`], and reports how well the arms served them.
///
/// Errors when the stack is not up, the corpus is too small, or the report cannot be made or
/// written. A failed request is no error: the report counts it.
pub async fn run(args: Args, mut settings: Settings, pool: PgPool) -> anyhow::Result<()> {
    if let Some(policy) = &args.policy {
        ensure!(
            !policy.contains('/'),
            "--policy {policy}: this is the name of a policy; to start a stack from a folder, use \
             `springtide up --demo --policy {policy}`"
        );
        settings.policy.clone_from(policy);
    }
    match args.surface {
        args::Surface::Completion => completion::run(args, settings, pool).await,
        args::Surface::Session => {
            ensure!(
                !args.demonstrations && !args.kept,
                "--demonstrations and --kept are for --surface completion; leave them out"
            );
            session::run(args, settings, pool).await
        }
    }
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    impl Settings {
        pub fn for_tests() -> Self {
            Self {
                serve_url: String::new(),
                ingest_url: String::new(),
                control_url: String::new(),
                api_key: None,
                http: reqwest::Client::new(),
                policy: "demo".to_owned(),
                base: PathBuf::new(),
                surface: surface(0.75, -0.25, Some(0.0)),
                state_dir: PathBuf::new(),
                learning: Served::default(),
                following: Served::default(),
                load_version: LoadVersion(Arc::new(|_| Box::pin(async { Err(anyhow!("there is no store")) }))),
                console: Console {
                    has_screen: || false,
                    hold_log: || Box::new(()),
                    newest_log_lines: |_| Vec::new(),
                },
            }
        }
    }

    fn surface(accept: f64, reject: f64, decline: Option<f64>) -> Surface {
        Surface {
            is_of_episodes: false,
            is_boolean: true,
            accept,
            reject,
            decline,
            horizon_seconds: 3.0,
        }
    }

    #[test]
    fn the_price_of_showing_follows_from_the_rewards_of_the_surface() {
        assert_eq!(surface(0.75, -0.25, Some(0.0)).price().unwrap(), 0.25);
        assert_eq!(surface(0.6, -0.4, Some(0.0)).price().unwrap(), 0.4);
        for (accept, reject, decline) in [(1.0, -0.25, Some(0.0)), (0.75, -0.25, None), (1.0, 0.0, Some(0.0))] {
            let error = surface(accept, reject, decline).price().unwrap_err();
            assert!(error.to_string().contains("accept = 1 − τ"));
        }
    }
}
