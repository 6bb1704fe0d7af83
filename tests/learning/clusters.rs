//! One run whose rollouts are made in four clusters far from the control role, over links with delay
//! and loss. Each cluster is a network namespace with a replica. A harness stands beside each replica,
//! so that tasks cross the links; then the same with the harnesses in the center, so that every token
//! does. Needs root for namespaces and TUN devices.
//!
//! `make bench NAME=clusters` runs it longer: `SPRINGTIDE_CLUSTERS_STEPS`. The figures are also in
//! `target/chaos/clusters.json`. Replicas read weights from the store's folder, which is on this
//! machine: `make bench NAME=link` measures how those cross a link.

use std::ffi::OsString;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use edge::bind::free_ports;
use link::{Conditions, Link, Namespace};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream, UnixStream};

use fixture::servers::{Servers, Supervised};
use fixture::{SPRINGTIDE, eventually, succeed, write_figures};

const START: Duration = Duration::from_secs(90);
const RUN: Duration = Duration::from_secs(1200);
const SETTLED: Duration = Duration::from_secs(60);
const QUIET: Duration = Duration::from_secs(5);
/// The addresses of cluster n are `10.77.FIRST_SUBNET + n.0/24`.
const FIRST_SUBNET: u8 = 41;
const GROUP: i64 = 4;
const TASKS_PER_STEP: i64 = 4;
const TURNS: i64 = 4;
const STEPS: i64 = 2;
/// One-way delay in ms, and the share of packets that is lost.
const LINKS: [(u64, f64); 4] = [(10, 0.001), (40, 0.001), (75, 0.005), (100, 0.01)];
const RATE_BITS: u64 = 100_000_000;

/// A replica in a namespace of its own.
struct Cluster {
    name: String,
    namespace: Namespace,
    link: Link,
    replica: Supervised,
}

#[derive(Debug, Serialize)]
struct Report {
    links: Vec<(u64, f64)>,
    rate_bits: u64,
    steps: i64,
    /// Over all links, while nothing is asked for.
    idle_bytes_per_second: f64,
    /// Harnesses beside the replicas.
    near: Figures,
    /// Harnesses in the center.
    far: Figures,
}

#[derive(Debug, Serialize)]
struct Figures {
    seconds: f64,
    rollouts: i64,
    /// Rollouts that ended without a reward, by why.
    lost: Value,
    /// Turns that were sampled in each cluster.
    turns_by_cluster: Vec<i64>,
    /// Median over all turns, from request to last token.
    turn_seconds: f64,
    /// Over all links, both directions, and less what crosses them when idle.
    link_bytes_per_rollout: f64,
    packets_lost: u64,
}

/// What a harness noted of a rollout.
#[derive(Debug, Deserialize)]
struct Played {
    turn_seconds: Vec<f64>,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn clusters_far_apart_make_the_rollouts_of_a_run_and_their_tokens_stay_there() {
    let Some(python) = std::env::var_os("SPRINGTIDE_PYTHON") else {
        eprintln!("not run: SPRINGTIDE_PYTHON names no Python with the package springtide");
        return;
    };
    let linked = match linked() {
        Ok(linked) => linked,
        Err(error) => {
            eprintln!("not run: namespaces and TUN devices cannot be made here (that needs root): {error}");
            return;
        }
    };
    let steps = std::env::var("SPRINGTIDE_CLUSTERS_STEPS").map_or(STEPS, |text| text.parse().unwrap());
    let [port] = free_ports().unwrap();
    let servers = Servers::start(&config(&linked, port), &[]).await;
    let _roles = ["control", "train", "ingest"].map(|role| servers.role(role, role, &[]));
    let mut clusters = Vec::new();
    for (nth, (namespace, link)) in linked.into_iter().enumerate() {
        clusters.push(Cluster::start(&servers, nth, namespace, link, port).await);
    }
    for cluster in &clusters {
        let url = format!("http://{}:{port}/health", cluster.link.far());
        let serves = async {
            while get(&url).await.is_none() {
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        };
        if tokio::time::timeout(START, serves).await.is_err() {
            panic!("{} does not serve:\n{}", cluster.name, cluster.replica.output());
        }
    }
    let began = bytes(&clusters);
    tokio::time::sleep(QUIET).await;
    let idle_bytes_per_second = (bytes(&clusters) - began) as f64 / QUIET.as_secs_f64();
    let run = async |far| {
        Run {
            python: &python,
            servers: &servers,
            clusters: &clusters,
            steps,
            far,
        }
        .figures(idle_bytes_per_second)
        .await
    };
    let report = Report {
        links: LINKS.to_vec(),
        rate_bits: RATE_BITS,
        steps,
        idle_bytes_per_second,
        near: run(false).await,
        far: run(true).await,
    };
    println!("{}", serde_json::to_string_pretty(&report).unwrap());
    write_figures("clusters.json", &report);

    for figures in [&report.near, &report.far] {
        assert_eq!(figures.lost, json!({}), "{figures:?}");
        assert_eq!(figures.rollouts, steps * TASKS_PER_STEP * GROUP);
        assert!(figures.turns_by_cluster.iter().all(|turns| *turns > 0), "{figures:?}");
        assert_eq!(figures.turns_by_cluster.iter().sum::<i64>(), figures.rollouts * TURNS);
    }
    assert!(
        report.near.link_bytes_per_rollout < report.far.link_bytes_per_rollout,
        "{report:?}"
    );
}

fn linked() -> std::io::Result<Vec<(Namespace, Link)>> {
    let center = Namespace::current()?;
    let link = |(nth, (delay, loss)): (u8, (u64, f64))| {
        let conditions = Conditions {
            rate_bits: Some(RATE_BITS),
            delay: Duration::from_millis(delay),
            loss,
            queue_bytes: RATE_BITS / 8 / 20,
        };
        let namespace = Namespace::new()?;
        namespace.run(|| Command::new("ip").args(["link", "set", "lo", "up"]).status())??;
        let link = Link::between(&center, &namespace, FIRST_SUBNET + nth, conditions, u64::from(nth))?;
        Ok((namespace, link))
    };
    (0..).zip(LINKS).map(link).collect()
}

fn config(linked: &[(Namespace, Link)], port: u16) -> String {
    let addresses: Vec<Ipv4Addr> = linked.iter().map(|(_, link)| link.far()).collect();
    let hosts: Vec<String> = addresses.iter().map(|address| format!("\"{address}\"")).collect();
    let clusters: Vec<String> = (0..)
        .zip(&addresses)
        .map(|(nth, address)| {
            format!("near-{nth} = 'http://127.0.0.1:{port}'\nfar-{nth} = 'http://{address}:{port}'\n")
        })
        .collect();
    format!(
        "policy.base = '{}/demo/models/base'\nlisten.hosts = [{}]\n\
         [trainer]\npoll_ms = 50\n[trainer.realtime]\nenabled = false\n\
         [serve]\nslots = 8\nslots_reserved_for_production = 0\n\
         [telemetry]\nfilter = \"warn,springtide=info\"\n[client]\nserve = 'http://{}:{port}'\n[client.clusters]\n{}",
        env!("CARGO_MANIFEST_DIR"),
        hosts.join(","),
        addresses[0],
        clusters.concat()
    )
}

impl Cluster {
    /// The replica reaches database, broker and control role at their usual addresses, each of which
    /// leads over the link.
    async fn start(servers: &Servers, nth: usize, namespace: Namespace, link: Link, port: u16) -> Self {
        let name = format!("cluster-{nth}");
        let socket = format!(".springtide/postgres/.s.PGSQL.{}", servers.postgres_port);
        for (local, to) in [
            (servers.control_port, To::port(servers.control_port)),
            (servers.kafka_port, To::port(servers.kafka_port)),
            (servers.postgres_port, To::Unix(servers.path().join(socket))),
        ] {
            let near = SocketAddr::from((link.near(), local));
            let listener = TcpListener::bind(near).await.unwrap();
            tokio::spawn(async move { forward(&listener, &to).await });
            forward_inside(
                &namespace,
                SocketAddr::from((Ipv4Addr::LOCALHOST, local)),
                To::Tcp(near),
            );
        }
        forward_inside(&namespace, SocketAddr::from((link.far(), port)), To::port(port));
        let state = servers.path().join(&name);
        fs::create_dir_all(&state).unwrap();
        let key = state.join("sampler.key").display().to_string();
        for words in [&["new-key", &key][..], &["add", "--name", &name, "--key", &key]] {
            let mut command = Command::new(&*SPRINGTIDE);
            succeed(command.arg("sampler").args(words).current_dir(servers.path()));
        }
        let (folder, inside) = (servers.path().to_owned(), namespace.path());
        let postgres = format!(
            "postgres://springtide_serve@127.0.0.1:{}/springtide",
            servers.postgres_port
        );
        let log = servers.path().join(format!("{name}.log"));
        let replica = Supervised::start(&name.clone(), log, {
            let name = name.clone();
            move || {
                let mut command = entering(&inside);
                command
                    .arg(&*SPRINGTIDE)
                    .args(["--die-with", &std::process::id().to_string(), "serve"])
                    .current_dir(&folder)
                    .env("SPRINGTIDE__LISTEN__SERVE", format!("127.0.0.1:{port}"))
                    .env("SPRINGTIDE__SERVE__REPLICA", &name)
                    .env("SPRINGTIDE__SERVE__CLUSTER", &name)
                    .env("SPRINGTIDE__SERVE__STATE_DIR", &state)
                    .env("SPRINGTIDE__POSTGRES__URL", &postgres);
                command
            }
        });
        Cluster {
            name,
            namespace,
            link,
            replica,
        }
    }
}

/// A command in a namespace.
fn entering(namespace: &Path) -> Command {
    let mut command = Command::new("nsenter");
    command.arg(format!("--net={}", namespace.display())).arg("--");
    command
}

/// Where a connection leads.
enum To {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

impl To {
    /// Of this machine.
    fn port(port: u16) -> Self {
        To::Tcp(SocketAddr::from((Ipv4Addr::LOCALHOST, port)))
    }
}

async fn forward(listener: &TcpListener, to: &To) {
    while let Ok((from, _)) = listener.accept().await {
        from.set_nodelay(true).unwrap();
        match to {
            To::Tcp(address) => {
                let address = *address;
                tokio::spawn(async move {
                    if let Ok(to) = TcpStream::connect(address).await {
                        let _ = to.set_nodelay(true);
                        join(from, to).await;
                    }
                });
            }
            To::Unix(path) => {
                let path = path.clone();
                tokio::spawn(async move {
                    if let Ok(to) = UnixStream::connect(path).await {
                        join(from, to).await;
                    }
                });
            }
        }
    }
}

/// The same in a namespace, on a thread of its own.
fn forward_inside(namespace: &Namespace, listen: SocketAddr, to: To) {
    let forward = async move { forward(&TcpListener::bind(listen).await.unwrap(), &to).await };
    let start = move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        std::thread::spawn(move || runtime.unwrap().block_on(forward));
    };
    namespace.run(start).unwrap();
}

async fn join(mut one: impl AsyncRead + AsyncWrite + Unpin, mut other: impl AsyncRead + AsyncWrite + Unpin) {
    // either side may end it
    let _ = copy_bidirectional(&mut one, &mut other).await;
}

/// One run in all clusters.
struct Run<'a> {
    python: &'a OsString,
    servers: &'a Servers,
    clusters: &'a [Cluster],
    steps: i64,
    far: bool,
}

impl Run<'_> {
    async fn figures(self, idle_bytes_per_second: f64) -> Figures {
        let id = self.create().await;
        let control = format!("{}/v1/runs/{id}", self.servers.control());
        let (began, bytes_before, lost_before) = (Instant::now(), bytes(self.clusters), lost(self.clusters));
        let harnesses: Vec<Supervised> = (0..self.clusters.len()).map(|nth| self.harness(&id, nth)).collect();
        let run = eventually("the run ends", RUN, async || {
            get(&control).await.filter(|run| run["finished_at"].is_string())
        })
        .await;
        let seconds = began.elapsed().as_secs_f64();
        assert_eq!(
            (run["status"].as_str(), run["steps_done"].as_i64()),
            (Some("succeeded"), Some(self.steps)),
            "{run}"
        );
        let link_bytes = (bytes(self.clusters) - bytes_before) as f64 - idle_bytes_per_second * seconds;
        let packets_lost = lost(self.clusters) - lost_before;
        for harness in &harnesses {
            harness.stop().await;
        }
        let rollouts = get(&format!("{control}/rollouts")).await.unwrap();
        let spent = rollouts["by_state"]["spent"].as_i64().unwrap();
        let mut turn_seconds: Vec<f64> = (0..self.clusters.len())
            .flat_map(|nth| {
                fs::read_to_string(self.notes(&id, nth))
                    .unwrap()
                    .lines()
                    .map(str::to_owned)
                    .collect::<Vec<_>>()
            })
            .flat_map(|line| serde_json::from_str::<Played>(&line).unwrap().turn_seconds)
            .collect();
        turn_seconds.sort_by(f64::total_cmp);
        Figures {
            seconds,
            rollouts: spent,
            lost: rollouts["lost"].clone(),
            turns_by_cluster: self.turns_by_cluster(&id).await,
            turn_seconds: turn_seconds[turn_seconds.len() / 2],
            link_bytes_per_rollout: link_bytes / spent as f64,
            packets_lost,
        }
    }

    async fn create(&self) -> String {
        let request = json!({
            "kind": "grpo",
            "environment": {"kind": "pull", "lease_seconds": 300},
            "tasks": (0..8).map(|nth| json!({"id": format!("t{nth}"), "prompt": format!("fn f{nth}("), "answer": ""})).collect::<Vec<_>>(),
            "group_size": GROUP,
            "tasks_per_step": TASKS_PER_STEP,
            "steps": self.steps,
            "learning_rate": 1e-5,
        });
        let url = format!("{}/v1/runs", self.servers.control());
        eventually("a run is made", START, async || {
            let answer = reqwest::Client::new().post(&url).json(&request).send().await.ok()?;
            let created: Value = answer.json().await.ok()?;
            created["id"].as_str().map(str::to_owned)
        })
        .await
    }

    fn harness(&self, run: &str, nth: usize) -> Supervised {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/learning/clusters/harness.py");
        let (python, run, notes) = (self.python.clone(), run.to_owned(), self.notes(run, nth));
        let control = self.servers.control();
        let place = if self.far { "far" } else { "near" };
        let cluster = format!("{place}-{nth}");
        let inside = (!self.far).then(|| self.clusters[nth].namespace.path());
        let name = format!("harness-{cluster}");
        Supervised::start(&name, self.servers.path().join(format!("{name}.log")), move || {
            let mut command = match &inside {
                Some(namespace) => {
                    let mut command = entering(namespace);
                    command.arg(&python);
                    command
                }
                None => Command::new(&python),
            };
            command
                .args([script.as_os_str(), run.as_ref(), notes.as_os_str()])
                .env("SPRINGTIDE_CONTROL", &control)
                .env("SPRINGTIDE_CLUSTER", &cluster)
                .env_remove("SPRINGTIDE_API_KEY");
            command
        })
    }

    fn notes(&self, run: &str, nth: usize) -> PathBuf {
        self.servers.path().join(format!("{run}-{nth}.jsonl"))
    }

    /// The last turns arrive after the run's end.
    async fn turns_by_cluster(&self, run: &str) -> Vec<i64> {
        let expected = self.steps * TASKS_PER_STEP * GROUP * TURNS;
        let pool = self.servers.pool();
        let names: Vec<&str> = self.clusters.iter().map(|cluster| cluster.name.as_str()).collect();
        eventually("all turns are in the database", SETTLED, async || {
            let turns: Vec<i64> = sqlx::query_scalar(
                "select (select count(*) from generation g join rollout r on r.id = g.episode_id::uuid \
                 where r.run_id = $1::uuid and r.state = 'spent' and g.replica = name) from unnest($2::text[]) with ordinality as c (name, nth) order by nth",
            )
            .bind(run)
            .bind(&names)
            .fetch_all(&pool)
            .await
            .unwrap();
            (turns.iter().sum::<i64>() >= expected).then_some(turns)
        })
        .await
    }
}

async fn get(url: &str) -> Option<Value> {
    let answer = reqwest::get(url)
        .await
        .ok()?
        .error_for_status()
        .ok()?
        .text()
        .await
        .ok()?;
    Some(serde_json::from_str(&answer).unwrap_or(Value::String(answer)))
}

fn bytes(clusters: &[Cluster]) -> u64 {
    clusters.iter().map(|cluster| cluster.link.counts().bytes).sum()
}

fn lost(clusters: &[Cluster]) -> u64 {
    clusters.iter().map(|cluster| cluster.link.counts().lost).sum()
}
