//! What honest traffic notices while an attacker is at work: how long its requests take, whether any
//! is refused or lost, and how long its generations take to close.
//!
//! `ingest`, `serve` and `control` run as processes, with keys required. Honest clients send at fixed
//! times, whatever the answers. Each attack of [`Attack`] runs beside them for a while, in a thread
//! of its own that holds no honest key. Times are reported and not asserted.
//!
//! `make bench NAME=attacks` prints the table and writes target/bench/attacks.json. `make test` runs a
//! small size.

mod attacker;
mod clock;
pub mod honest;
mod http2;
mod keys;
mod log;
mod poison;
pub mod report;
mod slow;

use std::collections::BTreeSet;
use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use edge::audit::Actor;
use edge::auth::key::{self, Grant, NewKey};
use edge::auth::{Role as KeyRole, Scope, Scopes};
use event_log::{DlqEntry, DlqReader, DlqRecord};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::process::{Child, Command};
use uuid::Uuid;

use self::attacker::{Attack, Attacker, Did, Place};
use self::honest::Honest;
use self::report::Line;
use crate::ingest_poison;
use fixture::serving::Publisher;
use fixture::store::policy;
use fixture::{PARTITIONS, SPRINGTIDE, Stack, create_key, eventually, process};

const LONG: Duration = Duration::from_secs(300);
/// How long after a generation its feedback counts. Closings cannot be faster.
const HORIZON_SECONDS: f64 = 2.0;
/// Larger than every limit of Springtide, so that the largest poison gets into the log.
const TOPIC_BYTES_MAX: usize = 32 << 20;
/// Keys of one hostile tenant: together they may have more requests open than there are connections.
const HOSTILE_KEYS: usize = 5;
/// Resident memory that `ingest` and `serve` may use, in whatever attack: `tests/log/overload.rs` runs
/// `ingest` under this limit.
const RESIDENT_MIB_MAX: u64 = 768;

fn number(variable: &str, default: f64) -> f64 {
    std::env::var(format!("SPRINGTIDE_ATTACKS_{variable}")).map_or(default, |number| number.parse().unwrap())
}

/// How large everything is. The defaults are for `make test`.
#[derive(Debug, Clone, Copy)]
pub struct Size {
    /// Of each attack.
    seconds: f64,
    /// Honest batches per second.
    rate: f64,
    /// Honest completions per second.
    completions: f64,
    /// The attacker's connections to each of `ingest` and `serve`.
    connections: usize,
    /// How many connections each of them keeps open.
    connections_max: usize,
}

impl Size {
    fn read() -> Self {
        let connections = number("CONNECTIONS", 200.0) as usize;
        Self {
            seconds: number("SECONDS", 2.0),
            rate: number("RATE", 10.0),
            completions: number("COMPLETIONS", 2.0),
            connections,
            // Fewer than the attacker wants, so that the listeners are full.
            connections_max: number("CONNECTIONS_MAX", (connections / 2) as f64) as usize,
        }
    }
}

/// A role as a process.
struct Role {
    process: Child,
    address: SocketAddr,
}

impl Role {
    fn pid(&self) -> u32 {
        self.process.id().unwrap()
    }

    /// User and system time, seconds.
    fn cpu_seconds(&self) -> f64 {
        const TICKS_PER_SECOND: f64 = 100.0; // of every Linux
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid())).unwrap();
        let (_, fields) = stat.rsplit_once(')').unwrap();
        let fields: Vec<&str> = fields.split_whitespace().collect();
        let ticks = [11, 12].map(|field: usize| fields[field].parse::<f64>().unwrap());
        (ticks[0] + ticks[1]) / TICKS_PER_SECOND
    }
}

pub struct World {
    stack: Stack,
    size: Size,
    ingest: Role,
    serve: Role,
    control: Role,
    honest_key: String,
    hostile_keys: Vec<String>,
    /// `None`: all.
    cases: Option<Vec<String>>,
    lines: Vec<Line>,
    /// Dead letters of the attacks so far.
    dead_letters: usize,
    began: Instant,
}

impl World {
    async fn start(size: Size) -> Self {
        let stack = Stack::start("attacks").await;
        for topic in [stack.kafka.topics().feedback, stack.kafka.topics().generation] {
            ingest_poison::limit(&stack, &topic, TOPIC_BYTES_MAX).await;
        }
        for role in ["root", "trainer", "release"] {
            let (success, _, error) = policy(&stack, &["new-key", role, "--role", role], true).await;
            assert!(success, "{error}");
        }
        Publisher::new(&stack).publish(1, None, 0).await;
        let replica = NewKey {
            tenant: "default",
            grant: Grant::Scopes(Scopes::of(&[Scope::Replica])),
            label: "a replica",
            expires_at: None,
            replica: None,
            requests_per_second: None,
        };
        let actor = Actor {
            key: None,
            name: "tests/attacks",
        };
        let replica_key = key::create(&stack.pool, &replica, actor, "").await.unwrap().secret;
        configure(&stack, size, &replica_key);
        let control = start(&stack, "control").await;
        let (ingest, serve) = tokio::join!(start(&stack, "ingest"), start(&stack, "serve"));
        let mut hostile_keys = Vec::new();
        for _ in 0..HOSTILE_KEYS {
            hostile_keys.push(create_key(&stack.pool, "hostile", KeyRole::Serving, "hostile").await);
        }
        let cases = std::env::var("SPRINGTIDE_ATTACKS_CASES").unwrap_or_else(|_| "all".to_owned());
        let cases = (cases != "all").then(|| cases.split(';').map(|case| case.trim().to_owned()).collect());
        let world = Self {
            size,
            honest_key: create_key(&stack.pool, "default", KeyRole::Serving, "honest").await,
            hostile_keys,
            stack,
            ingest,
            serve,
            control,
            cases,
            lines: Vec::new(),
            dead_letters: 0,
            began: Instant::now(),
        };
        // The first requests of a process are slower, which is no attack.
        let warm = Honest::new(&world).send_for(1.0).await;
        warm.closed(&world).await;
        world
    }

    /// Everything that the attacker knows.
    fn place(&self) -> Place {
        Place {
            ingest: self.ingest.address,
            serve: self.serve.address,
            keys: self.hostile_keys.clone(),
            kafka: self.stack.kafka.clone(),
            partitions: PARTITIONS,
            connections: self.size.connections,
            seconds: self.size.seconds,
            rate: self.size.rate,
        }
    }

    async fn measure(&mut self, attack: Attack) {
        if self
            .cases
            .as_ref()
            .is_some_and(|cases| !cases.iter().any(|case| case == attack.name()))
        {
            return;
        }
        let roles = [&self.ingest, &self.serve];
        let cpu = roles.map(Role::cpu_seconds);
        roles.iter().for_each(|role| process::forget_peak(role.pid()));
        let attacker = Attacker::start(attack, self.place());
        let sent = Honest::new(self).send_for(self.size.seconds).await;
        let did = attacker.stop().await;
        let closings = sent.closed(self).await;
        let line = Line {
            attack: attack.name(),
            attacker: did.text.clone(),
            ingest_cpu_seconds: self.ingest.cpu_seconds() - cpu[0],
            serve_cpu_seconds: self.serve.cpu_seconds() - cpu[1],
            ingest_peak_mib: process::rss_peak_kib(self.ingest.pid()) / 1024,
            serve_peak_mib: process::rss_peak_kib(self.serve.pid()) / 1024,
            batches: sent.batches.summary(),
            completions: sent.completions.summary(),
            closings: closings.summary(),
            failed: sent.failed,
            broken: sent.broken,
        };
        line.print();
        assert!(
            line.failed.is_empty(),
            "{}: honest requests failed: {:?}",
            line.attack,
            line.failed
        );
        for peak in [line.ingest_peak_mib, line.serve_peak_mib] {
            assert!(peak < RESIDENT_MIB_MAX, "{}: {peak} MiB", line.attack);
        }
        self.lines.push(line);
        self.check(attack, &did).await;
        for role in [&mut self.ingest, &mut self.serve, &mut self.control] {
            assert!(role.process.try_wait().unwrap().is_none(), "a role has ended");
        }
    }

    /// What the attack put into the log is in the tables, or a dead letter with the expected reason.
    async fn check(&mut self, attack: Attack, did: &Did) {
        self.dead_letters += did.dead_letters.len();
        let letters = self.letters().await;
        let new = &letters[letters.len() - did.dead_letters.len()..];
        let found: BTreeSet<_> = new
            .iter()
            .map(|letter| {
                let from = letter.from.as_ref().unwrap();
                (from.topic.clone(), from.partition, from.offset)
            })
            .collect();
        assert_eq!(found, did.dead_letters, "{attack:?}");
        for letter in new {
            let expected: &[&str] = match attack {
                // The bytes of a few sizes are an event without its fields.
                Attack::PoisonedLog => &["undecodable", "invalid"],
                _ => &["invalid"],
            };
            assert!(expected.contains(&&*letter.reason), "{attack:?}: {}", letter.reason);
        }
        let closed = "select count(*) from trajectory where generation_id = any($1) and reward = 0.75";
        eventually("the attacker's generations close with their reward", LONG, async || {
            let query = sqlx::query_scalar::<_, i64>(closed).bind(&did.closes);
            let closed = query.fetch_one(&self.stack.pool).await.unwrap();
            (usize::try_from(closed).unwrap() == did.closes.len()).then_some(())
        })
        .await;
    }

    /// All dead letters, once there are as many as expected.
    async fn letters(&self) -> Vec<DlqRecord> {
        eventually("the dead letters arrive", LONG, async || {
            let reader = DlqReader::open(&self.stack.kafka).await.unwrap();
            let mut scan = reader.scan().unwrap();
            let mut letters = Vec::new();
            while let Some(entry) = scan.next().await.unwrap() {
                if let DlqEntry::Record(record) = entry {
                    letters.push(record);
                }
            }
            assert!(
                letters.len() <= self.dead_letters,
                "{:?}",
                letters.last().map(|letter| &letter.detail)
            );
            (letters.len() == self.dead_letters).then_some(letters)
        })
        .await
    }

    fn finish(&self) {
        report::print(&self.lines);
        report::write(self.size, self.began.elapsed(), &self.lines);
    }
}

fn folder(stack: &Stack, role: &str) -> PathBuf {
    stack.dir.path().join(role)
}

/// Writes the configuration of each role into its folder.
fn configure(stack: &Stack, size: Size, replica_key: &str) {
    for role in ["control", "ingest", "serve"] {
        let folder = folder(stack, role);
        fs::create_dir_all(&folder).unwrap();
        let text = format!(
            r#"
state_dir = "{state}"
[policy]
store = "{store}"
keys = "{keys}"
[auth]
required = true
[telemetry]
filter = "warn"
[postgres]
url = "{database}"
[postgres.urls]
{role} = "{as_role}"
[trainer]
api_key = "unused"
[serve]
replica = "replica-1"
api_key = "{replica_key}"
[listen.connections_max]
serve = {connections}
ingest = {connections}
[ingest]
orphan_ttl_seconds = 86400.0
[[ingest.surface]]
name = "completion"
metric = "accept"
metric_type = "boolean"
horizon_seconds = {HORIZON_SECONDS:.1}
accept = 0.75
reject = -0.25
"#,
            state = folder.display(),
            store = stack.store_url,
            keys = stack.keys_dir.display(),
            database = stack.database_url,
            as_role = stack.url_of(role),
            connections = size.connections_max,
        );
        fs::write(folder.join("springtide.toml"), text).unwrap();
    }
}

async fn start(stack: &Stack, role: &str) -> Role {
    let [port] = edge::bind::free_ports().unwrap();
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    // A benchmark may name a release build. It has no libtorch, so it does not serve.
    let release = std::env::var("SPRINGTIDE_ATTACKS_PROGRAM").ok();
    let program = release
        .filter(|_| role != "serve")
        .unwrap_or_else(|| SPRINGTIDE.clone());
    let mut command = Command::new(program);
    command
        .arg(role)
        .current_dir(folder(stack, role))
        .env(
            format!("SPRINGTIDE__LISTEN__{}", role.to_uppercase()),
            address.to_string(),
        )
        .envs(stack.kafka_environment());
    let log = stack.dir.path().join(format!("{role}.log"));
    let process = process::start(command, address, &log).await;
    Role { process, address }
}

/// Raises the limit on open files: the attacker's sockets are this process's.
fn allow_files() {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard.min(65_536), hard).unwrap();
}

/// An id of a host whose clock is ahead by `seconds`.
fn id_ahead(seconds: i64) -> Uuid {
    let now = event_log::event::now() + time::Duration::seconds(seconds);
    let unix = uuid::Timestamp::from_unix(uuid::NoContext, now.unix_timestamp().cast_unsigned(), now.nanosecond());
    Uuid::new_v7(unix)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn honest_traffic_goes_on_during_every_attack() {
    allow_files();
    let mut world = World::start(Size::read()).await;
    for attack in Attack::ALL {
        world.measure(attack).await;
    }
    world.finish();
}
