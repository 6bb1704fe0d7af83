//! A Postgres, a broker and ingest processes that may be killed. Each is restarted as soon as it
//! ends. `springtide stack start` creates the stack's folder once; this module then runs the same
//! commands itself, without the back-off.

use std::fs::{self, File, Permissions};
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use edge::bind::free_ports;
use event_log::ClientOptions;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, Uid};
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;

use crate::support::{SPRINGTIDE, eventually, settings, socket_url};

/// Like the folders of `springtide stack test-env`, whose next run removes ours if this process is
/// killed.
const PREFIX: &str = "springtide-stack-";
const START: Duration = Duration::from_secs(120);
/// Who the servers run as when root runs the tests.
const SERVER_USER: u32 = 65_530;
const KILLED_WITHIN: Duration = Duration::from_secs(5);
const AGAIN_AFTER: Duration = Duration::from_millis(200);

/// A program that is restarted whenever it ends. Dropping it kills the program.
pub struct Supervised {
    pub name: String,
    pub log: PathBuf,
    state: Arc<Mutex<State>>,
    stop: CancellationToken,
}

#[derive(Default)]
struct State {
    pid: Option<Pid>,
    /// The exit statuses of runs that this test did not end.
    ended_by_itself: Vec<String>,
    killed: Option<Pid>,
    /// Do not restart.
    ending: bool,
}

impl Supervised {
    /// Call this on a runtime thread: the kernel ends such a child with the thread that started it.
    pub fn start(name: &str, log: PathBuf, mut command: impl FnMut() -> Command + Send + 'static) -> Self {
        let state = Arc::new(Mutex::new(State::default()));
        let stop = CancellationToken::new();
        let supervised = Self {
            name: name.to_owned(),
            log: log.clone(),
            state: state.clone(),
            stop: stop.clone(),
        };
        tokio::spawn(async move {
            while !stop.is_cancelled() {
                let output = File::options().create(true).append(true).open(&log).unwrap();
                let mut command = command();
                command
                    .stdin(Stdio::null())
                    .stdout(output.try_clone().unwrap())
                    .stderr(output);
                let mut child = tokio::process::Command::from(command)
                    .kill_on_drop(true)
                    .spawn()
                    .unwrap();
                let pid = Pid::from_raw(i32::try_from(child.id().unwrap()).unwrap());
                state.lock().unwrap().pid = Some(pid);
                let status = tokio::select! {
                    status = child.wait() => status.unwrap(),
                    () = stop.cancelled() => return,
                };
                {
                    let mut state = state.lock().unwrap();
                    state.pid = None;
                    if state.ending {
                        return;
                    }
                    if state.killed != Some(pid) {
                        state.ended_by_itself.push(status.to_string());
                    }
                }
                tokio::time::sleep(AGAIN_AFTER).await;
            }
        });
        supervised
    }

    pub fn pid(&self) -> Option<Pid> {
        self.state.lock().unwrap().pid
    }

    /// Sends SIGKILL. Returns false if the program is not running.
    pub fn kill(&self) -> bool {
        self.signal(Signal::SIGKILL)
    }

    pub fn signal(&self, signal: Signal) -> bool {
        let mut state = self.state.lock().unwrap();
        let Some(pid) = state.pid else { return false };
        if signal == Signal::SIGKILL {
            state.killed = Some(pid);
        }
        kill(pid, signal).is_ok()
    }

    pub fn ended_by_itself(&self) -> Vec<String> {
        self.state.lock().unwrap().ended_by_itself.clone()
    }

    pub fn output(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// Ends the program with SIGTERM and does not restart it.
    pub async fn stop(&self) {
        self.state.lock().unwrap().ending = true;
        if self.signal(Signal::SIGTERM) {
            eventually("the process ends", START, async || self.pid().is_none().then_some(())).await;
        }
        self.stop.cancel();
    }
}

impl Drop for Supervised {
    /// Waits for the end, because the folder is removed next.
    fn drop(&mut self) {
        self.stop.cancel();
        let Some(pid) = self.pid() else { return };
        let _ = kill(pid, Signal::SIGKILL);
        let until = Instant::now() + KILLED_WITHIN;
        while Instant::now() < until && runs(pid) {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// False for zombies.
fn runs(pid: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ")
        .is_some_and(|(_, fields)| !fields.starts_with('Z'))
}

/// Postgres and the broker.
pub struct Servers {
    pub postgres: Supervised,
    pub kafka: Supervised,
    pub postgres_port: u16,
    pub kafka_port: u16,
    pub control_port: u16,
    kafka_command: Vec<String>,
    // Declared last, so that the servers end before their folder is removed.
    dir: TempDir,
    _lock: Flock<File>,
}

impl Servers {
    /// `config` is added to springtide.toml after the ports. `postgres` are server settings.
    pub async fn start(config: &str, postgres: &[&str]) -> Self {
        let dir = tempfile::Builder::new()
            .prefix(PREFIX)
            .permissions(Permissions::from_mode(0o755))
            .tempdir()
            .unwrap();
        let lock = File::create(dir.path().join("lock")).unwrap();
        let lock = Flock::lock(lock, FlockArg::LockExclusiveNonblock).unwrap();
        let [
            postgres_port,
            kafka_port,
            controller_port,
            serve,
            ingest,
            control,
            train,
        ] = free_ports().unwrap();
        let stack = Path::new(env!("CARGO_MANIFEST_DIR")).join(".stack");
        let text = format!(
            "stack.cache = '{}'\npostgres.port = {postgres_port}\nkafka.port = {kafka_port}\n\
             kafka.controller_port = {controller_port}\nlisten.serve = '127.0.0.1:{serve}'\n\
             listen.ingest = '127.0.0.1:{ingest}'\nlisten.control = '127.0.0.1:{control}'\n\
             listen.train = '127.0.0.1:{train}'\n{config}",
            stack.display()
        );
        fs::write(dir.path().join("springtide.toml"), text).unwrap();
        let [mut postgres_command, kafka_command] = create_stack(dir.path()).await;
        for setting in postgres {
            postgres_command.extend(["-c".to_owned(), (*setting).to_owned()]);
        }
        let servers = Self {
            postgres: server("postgres", dir.path(), "SIGINT", postgres_command),
            kafka: server("kafka", dir.path(), "SIGTERM", kafka_command.clone()),
            postgres_port,
            kafka_port,
            control_port: control,
            kafka_command,
            dir,
            _lock: lock,
        };
        servers.answer().await;
        servers
    }

    pub fn client(&self) -> ClientOptions {
        ClientOptions {
            brokers: format!("127.0.0.1:{}", self.kafka_port),
            librdkafka: settings(&self.dir.path().join(".springtide/kafka.properties")),
            ..ClientOptions::default()
        }
    }

    /// Connects lazily, because the server may be down.
    pub fn pool(&self) -> PgPool {
        let folder = self.dir.path().join(".springtide/postgres");
        let url = socket_url(&folder, self.postgres_port, "springtide");
        let options = PgPoolOptions::new()
            .max_connections(4)
            .acquire_timeout(Duration::from_secs(5));
        options.connect_lazy(&url).unwrap()
    }

    /// Waits until both servers respond.
    pub async fn answer(&self) {
        let pool = self.pool();
        eventually("Postgres answers", START, async || {
            sqlx::query("select 1").execute(&pool).await.ok()
        })
        .await;
        eventually("the broker answers", START, async || {
            event_log::ensure_topics(&self.client(), 4).await.ok()
        })
        .await;
    }

    /// The folder of `springtide.toml`, in which roles work.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Where the control role answers.
    pub fn control(&self) -> String {
        format!("http://127.0.0.1:{}", self.control_port)
    }

    /// Starts a role. `name`: of its log.
    pub fn role(&self, role: &'static str, name: &str, environment: &[(&str, &str)]) -> Supervised {
        let dir = self.dir.path().to_owned();
        let environment: Vec<(String, String)> = environment
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        let command = move || {
            let mut command = Command::new(SPRINGTIDE);
            command
                .args(["--die-with", &std::process::id().to_string(), role])
                .current_dir(&dir)
                .envs(environment.iter().cloned());
            command
        };
        Supervised::start(name, self.dir.path().join(format!("{name}.log")), command)
    }

    /// Starts a `springtide ingest` on a free port.
    pub fn ingest(&self, nth: usize, environment: &[(&str, &str)]) -> Ingest {
        let [port] = free_ports().unwrap();
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        let listen = address.to_string();
        let environment = [&[("SPRINGTIDE__LISTEN__INGEST", &*listen)], environment].concat();
        Ingest {
            process: self.role("ingest", &format!("ingest-{nth}"), &environment),
            address,
        }
    }

    /// Replaces the broker's log by an empty one with a new cluster id, like a reinstallation.
    pub async fn recreate_cluster(mut self) -> Self {
        let command = self.kafka_command.clone();
        self.kafka.stop().await;
        let data = self.dir.path().join(".springtide/kafka");
        fs::remove_dir_all(data.join("log")).unwrap();
        let main = command.iter().position(|argument| argument == "kafka.Kafka").unwrap();
        let class_path = command[..main].iter().position(|argument| argument == "-cp").unwrap();
        let tool = |arguments: &[&str]| {
            let output = tied("SIGTERM")
                .arg(&command[0])
                .args([
                    "-Dlog4j2.level=ERROR",
                    "-cp",
                    &command[class_path + 1],
                    "kafka.tools.StorageTool",
                ])
                .args(arguments)
                .output()
                .unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            String::from_utf8(output.stdout).unwrap()
        };
        let id = tool(&["random-uuid"]);
        let password = &self.client().librdkafka["sasl.password"];
        let user = format!("SCRAM-SHA-256=[name=springtide,password={password}]");
        let config = command.last().unwrap();
        tool(&[
            "format",
            "--cluster-id",
            id.trim(),
            "--config",
            config,
            "--add-scram",
            &user,
        ]);
        self.kafka = server("kafka", self.dir.path(), "SIGTERM", command);
        self.answer().await;
        self
    }
}

pub struct Ingest {
    pub process: Supervised,
    pub address: SocketAddr,
}

impl Ingest {
    pub async fn answers(&self) {
        eventually("ingest answers", START, async || {
            let health = reqwest::get(format!("http://{}/health", self.address)).await;
            health.is_ok_and(|answer| answer.status() == 200).then_some(())
        })
        .await;
    }
}

/// Creates database, schema, log and topics with `springtide stack start`, and returns the commands
/// of Postgres and the broker.
async fn create_stack(dir: &Path) -> [Vec<String>; 2] {
    let mut supervisor = Command::new(SPRINGTIDE)
        .args(["--die-with", &std::process::id().to_string(), "stack", "start"])
        .current_dir(dir)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // Read until the end, because it prints more while it stops.
    let mut lines = BufReader::new(supervisor.stderr.take().unwrap()).lines();
    let mut printed = Vec::new();
    for line in lines.by_ref() {
        printed.push(line.unwrap());
        if printed.last().is_some_and(|line| line.starts_with("Kafka: ")) {
            break;
        }
    }
    let ready = printed.last().is_some_and(|line| line.starts_with("Kafka: "));
    assert!(ready, "the stack did not start:\n{}", printed.join("\n"));
    let note = fs::read(dir.join(".springtide/up.json")).unwrap();
    let note: serde_json::Value = serde_json::from_slice(&note).unwrap();
    let command = |name: &str| -> Vec<String> {
        let line = fs::read(format!("/proc/{}/cmdline", note[name]["pid"])).unwrap();
        let words = line.split(|byte| *byte == 0).filter(|word| !word.is_empty());
        words.map(|word| String::from_utf8(word.to_vec()).unwrap()).collect()
    };
    let commands = [command("postgres"), command("kafka")];
    kill(Pid::from_raw(i32::try_from(supervisor.id()).unwrap()), Signal::SIGTERM).unwrap();
    let ended = tokio::task::spawn_blocking(move || supervisor.wait())
        .await
        .unwrap()
        .unwrap();
    assert!(ended.success(), "{ended}");
    commands
}

/// A server that ends with this process, run like the stack does.
fn server(name: &str, dir: &Path, signal: &'static str, words: Vec<String>) -> Supervised {
    let command = move || {
        let mut command = tied(signal);
        command.args(&words).current_dir("/").process_group(0);
        command
    };
    Supervised::start(name, dir.join(format!("{name}.log")), command)
}

/// `springtide stack exec` as the user of the servers; the program comes next.
fn tied(signal: &str) -> Command {
    let mut command = Command::new(SPRINGTIDE);
    let parent = std::process::id().to_string();
    command.args(["stack", "exec", "--parent", &parent, "--signal", signal]);
    if Uid::effective().is_root() {
        command.args(["--user", &SERVER_USER.to_string()]);
    }
    command.arg("--");
    command
}
