//! The attacker: a thread with a runtime of its own. It has what [`Place`] says, and no honest key.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::thread::{self, JoinHandle};

use event_log::ClientOptions;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::{clock, keys, log, poison, slow};

/// The clock of a client is wrong by so much.
const CLOCK_SECONDS: i64 = 600;

/// The attacks, in the order of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attack {
    Before,
    SlowHeader { http2: bool },
    SlowBody { http2: bool },
    ReadsNothing { http2: bool },
    RandomKeys { http2: bool },
    PoisonedRequests,
    PoisonedLog,
    FastClock,
    SlowClock,
    AbortedTransactions,
    OpenTransaction,
    After,
}

impl Attack {
    pub const ALL: [Self; 16] = [
        Self::Before,
        Self::SlowHeader { http2: false },
        Self::SlowHeader { http2: true },
        Self::SlowBody { http2: false },
        Self::SlowBody { http2: true },
        Self::ReadsNothing { http2: false },
        Self::ReadsNothing { http2: true },
        Self::RandomKeys { http2: false },
        Self::RandomKeys { http2: true },
        Self::PoisonedRequests,
        Self::PoisonedLog,
        Self::FastClock,
        Self::SlowClock,
        Self::AbortedTransactions,
        Self::OpenTransaction,
        Self::After,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Before => "nobody, before",
            Self::SlowHeader { http2: false } => "slow headers",
            Self::SlowHeader { http2: true } => "slow headers, HTTP/2",
            Self::SlowBody { http2: false } => "slow bodies",
            Self::SlowBody { http2: true } => "slow bodies, HTTP/2",
            Self::ReadsNothing { http2: false } => "reads nothing",
            Self::ReadsNothing { http2: true } => "reads nothing, HTTP/2",
            Self::RandomKeys { http2: false } => "random keys",
            Self::RandomKeys { http2: true } => "random keys, HTTP/2",
            Self::PoisonedRequests => "poisoned requests",
            Self::PoisonedLog => "poisoned log",
            Self::FastClock => "clock 10 minutes fast",
            Self::SlowClock => "clock 10 minutes slow",
            Self::AbortedTransactions => "aborted transactions",
            Self::OpenTransaction => "an open transaction",
            Self::After => "nobody, after",
        }
    }

    async fn run(self, place: Place, stop: CancellationToken) -> Did {
        match self {
            Self::Before | Self::After => {
                stop.cancelled().await;
                Did::default()
            }
            Self::SlowHeader { http2 } => slow::run(slow::Kind::Header, http2, place, stop).await,
            Self::SlowBody { http2 } => slow::run(slow::Kind::Body, http2, place, stop).await,
            Self::ReadsNothing { http2 } => slow::run(slow::Kind::ReadsNothing, http2, place, stop).await,
            Self::RandomKeys { http2 } => keys::run(http2, place, stop).await,
            Self::PoisonedRequests => poison::run(place, stop).await,
            Self::PoisonedLog => log::poison(place, stop).await,
            Self::FastClock => clock::run(CLOCK_SECONDS, place, stop).await,
            Self::SlowClock => clock::run(-CLOCK_SECONDS, place, stop).await,
            Self::AbortedTransactions => log::abort(place, stop).await,
            Self::OpenTransaction => log::leave_open(place, stop).await,
        }
    }
}

/// What the attacker can reach.
#[derive(Clone)]
pub struct Place {
    pub ingest: SocketAddr,
    pub serve: SocketAddr,
    /// Of a tenant of its own, for attacks that need a key.
    pub keys: Vec<String>,
    /// For attacks with access to the broker.
    pub kafka: ClientOptions,
    pub partitions: i32,
    /// To each listener.
    pub connections: usize,
    pub seconds: f64,
    /// Batches per second of a client.
    pub rate: f64,
}

/// What an attack did, and what must become of it.
#[derive(Debug, Default)]
pub struct Did {
    /// For the table.
    pub text: String,
    /// Topic, partition and offset of the records that must become dead letters.
    pub dead_letters: BTreeSet<(String, i32, i64)>,
    /// Generations that must close with the reward of an accept.
    pub closes: Vec<Uuid>,
}

pub struct Attacker {
    stop: CancellationToken,
    thread: JoinHandle<Did>,
}

impl Attacker {
    pub fn start(attack: Attack, place: Place) -> Self {
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        let thread = thread::spawn(move || {
            yield_to_others();
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(attack.run(place, stopped))
        });
        Self { stop, thread }
    }

    pub async fn stop(self) -> Did {
        self.stop.cancel();
        tokio::task::spawn_blocking(|| self.thread.join())
            .await
            .unwrap()
            .unwrap()
    }
}

/// A real attacker has processors of its own, so this thread and those that it starts only get what
/// the others leave.
fn yield_to_others() {
    let thread = nix::unistd::gettid().to_string();
    let mut renice = Command::new("renice");
    renice.args(["-n", "15", "-p", &thread]).stdout(Stdio::null());
    assert!(renice.status().unwrap().success());
}
