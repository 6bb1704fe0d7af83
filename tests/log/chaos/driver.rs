//! Kills processes at random moments, from a seed: ingest, the broker, Postgres, and single
//! Postgres processes while they write. It also suspends an ingest for longer than its consumer
//! session, so that it wakes without its partitions.

use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use sqlx::PgPool;

use super::parameter;
use fixture::servers::{Ingest, Servers};

/// Longer than the sink's session (6 s) and the group's reaction time.
const ASLEEP: std::ops::Range<u64> = 9_000..14_000;
/// How long to wait for a process that is starting or suspended.
const PATIENCE: Duration = Duration::from_secs(60);
const TRY_EVERY: Duration = Duration::from_millis(5);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Ingest,
    Broker,
    Postgres,
    /// A single Postgres process in a transaction that has written.
    Backend,
    /// Suspended beyond its session, then resumed.
    Zombie,
    /// All brokers are restarted in order, one after the other.
    Roll,
    /// The primary is killed, and its standby takes its place.
    Failover,
    /// Postgres is restored to a moment in the past.
    Restore,
}

const SINGLE: [Kind; 5] = [Kind::Ingest, Kind::Broker, Kind::Postgres, Kind::Backend, Kind::Zombie];
/// What happens at least to three brokers and a Postgres with a standby. Further ones are kills of brokers, or restores.
const REPLICATED: [Kind; 7] = [
    Kind::Roll,
    Kind::Failover,
    Kind::Failover,
    Kind::Failover,
    Kind::Failover,
    Kind::Failover,
    Kind::Ingest,
];

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Ingest => "ingest process",
            Self::Broker => "broker",
            Self::Postgres => "Postgres",
            Self::Backend => "Postgres, one process mid-transaction",
            Self::Zombie => "sink stopped past its session",
            Self::Roll => "brokers restarted in turn",
            Self::Failover => "Postgres failed over to its standby",
            Self::Restore => "Postgres restored to a moment before",
        }
    }

    fn weighted(rng: &mut StdRng) -> Self {
        match rng.random_range(0..100) {
            0..40 => Self::Ingest,
            40..55 => Self::Broker,
            55..68 => Self::Postgres,
            68..88 => Self::Backend,
            _ => Self::Zombie,
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub struct Kill {
    pub kind: Kind,
    pub at: Instant,
    /// For [`Kind::Backend`]: whether it was committing.
    pub in_commit: bool,
}

pub struct Driver<'a> {
    servers: &'a Servers,
    ingests: &'a [Ingest],
    pool: PgPool,
    rng: StdRng,
    asleep: Option<(Pid, Instant)>,
    /// The broker that was killed last.
    broker: usize,
    /// Restore instead of killing brokers.
    restores: bool,
}

impl<'a> Driver<'a> {
    pub fn new(servers: &'a Servers, ingests: &'a [Ingest], seed: u64) -> Self {
        Self {
            servers,
            ingests,
            pool: servers.pool(),
            rng: StdRng::seed_from_u64(seed),
            asleep: None,
            broker: 0,
            restores: parameter("RESTORES", 0) > 0,
        }
    }

    /// Makes `count` kills during `time`, each kind at least once. Resumes suspended processes
    /// before it returns.
    pub async fn run(mut self, count: usize, time: Duration) -> Vec<Kill> {
        let replicated = self.servers.kafka.len() > 1;
        let mut kinds = match replicated {
            true => REPLICATED.to_vec(),
            false => SINGLE.to_vec(),
        };
        while kinds.len() < count {
            kinds.push(match replicated {
                true if self.restores => Kind::Restore,
                true => Kind::Broker,
                false => Kind::weighted(&mut self.rng),
            });
        }
        kinds.truncate(count);
        kinds.shuffle(&mut self.rng);
        let pause = time / u32::try_from(count.max(1)).unwrap();
        let mut kills = Vec::new();
        for kind in kinds {
            // Uniform between 0 and twice the average.
            let pause = pause.mul_f64(2.0 * self.rng.random::<f64>());
            self.sleep(pause).await;
            if let Some(kill) = self.kill_one(kind).await {
                eprintln!("{} killed or stopped", kind.name());
                kills.push(kill);
            }
        }
        while self.asleep.is_some() {
            self.sleep(Duration::from_millis(100)).await;
        }
        kills
    }

    async fn kill_one(&mut self, kind: Kind) -> Option<Kill> {
        // Waits for processes that are just starting, which have nothing to lose yet.
        let until = Instant::now() + PATIENCE;
        while Instant::now() < until {
            let mut in_commit = false;
            let done = match kind {
                Kind::Ingest => self.awake().is_some_and(|ingest| ingest.process.kill()),
                Kind::Broker => {
                    self.broker = (self.broker + 1) % self.servers.kafka.len();
                    self.servers.kafka[self.broker].kill()
                }
                Kind::Postgres => self.servers.postgres.kill(),
                Kind::Backend => match self.writing().await {
                    Some((pid, commits)) => {
                        in_commit = commits;
                        kill(pid, Signal::SIGKILL).is_ok()
                    }
                    None => false,
                },
                Kind::Zombie => self.stop_one(),
                Kind::Roll | Kind::Failover | Kind::Restore => {
                    // the pause that it makes begins now
                    let at = Instant::now();
                    let done = match kind {
                        Kind::Roll => self.servers.roll().await,
                        Kind::Restore => {
                            let share = self.rng.random_range(0.05..0.9);
                            self.servers.restore(share).await
                        }
                        _ => self.servers.fail_over().await,
                    };
                    return done.then_some(Kill { kind, at, in_commit });
                }
            };
            if done {
                let at = Instant::now();
                return Some(Kill { kind, at, in_commit });
            }
            self.sleep(TRY_EVERY).await;
        }
        None
    }

    fn awake(&mut self) -> Option<&'a Ingest> {
        let asleep = self.asleep.map(|(pid, _)| pid);
        let awake: Vec<&Ingest> = self
            .ingests
            .iter()
            .filter(|ingest| ingest.process.pid().is_some_and(|pid| Some(pid) != asleep))
            .collect();
        if awake.is_empty() {
            return None;
        }
        Some(awake[self.rng.random_range(0..awake.len())])
    }

    fn stop_one(&mut self) -> bool {
        if self.asleep.is_some() {
            return false;
        }
        let Some(ingest) = self.awake() else { return false };
        let Some(pid) = ingest.process.pid() else { return false };
        let until = Instant::now() + Duration::from_millis(self.rng.random_range(ASLEEP));
        self.asleep = Some((pid, until));
        ingest.process.signal(Signal::SIGSTOP)
    }

    /// A Postgres process of springtide in a transaction that has written, preferably in its
    /// commit.
    async fn writing(&self) -> Option<(Pid, bool)> {
        let row: Option<(i32, bool)> = sqlx::query_as(
            "select pid, query ilike 'commit' from pg_stat_activity \
             where application_name = 'springtide' and state in ('active', 'idle in transaction') \
               and backend_xid is not null \
             order by query ilike 'commit' desc limit 1",
        )
        .fetch_optional(&self.pool)
        .await
        .ok()?;
        row.map(|(pid, commits)| (Pid::from_raw(pid), commits))
    }

    /// Sleeps, and resumes the suspended process when its time is over.
    async fn sleep(&mut self, pause: Duration) {
        let until = Instant::now() + pause;
        loop {
            let now = Instant::now();
            if let Some((pid, woken)) = self.asleep
                && woken <= now
            {
                // Fails if the process has died meanwhile.
                let _ = kill(pid, Signal::SIGCONT);
                self.asleep = None;
            }
            if now >= until {
                return;
            }
            tokio::time::sleep((until - now).min(Duration::from_millis(50))).await;
        }
    }
}
