//! The supervisor restarts its children, and they end with it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use edge::bind::free_ports;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sqlx::{Connection, Executor, PgConnection};
use tempfile::TempDir;

use fixture::{SPRINGTIDE, eventually, socket_url};

const START: Duration = Duration::from_secs(120);
const RETURN: Duration = Duration::from_secs(60);
const END: Duration = Duration::from_secs(30);
const ROLES: [&str; 4] = ["control", "train", "ingest", "serve"];

/// A folder with its own configuration.
pub struct Place {
    pub dir: TempDir,
    pub ports: [u16; 7],
}

impl Place {
    pub fn new() -> Self {
        let place = Self {
            dir: tempfile::tempdir().unwrap(),
            ports: free_ports().unwrap(),
        };
        // Started by root, the servers run as another user, who must pass through.
        let pass = std::os::unix::fs::PermissionsExt::from_mode(0o711);
        fs::set_permissions(place.dir.path(), pass).unwrap();
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let [serve, ingest, control, train, postgres, kafka, controller] = place.ports;
        let config = format!(
            "policy.base = '{root}/demo/models/base'\n\
             stack.cache = '{root}/.stack'\n\
             listen.serve = '127.0.0.1:{serve}'\n\
             listen.ingest = '127.0.0.1:{ingest}'\n\
             listen.control = '127.0.0.1:{control}'\n\
             listen.train = '127.0.0.1:{train}'\n\
             postgres.port = {postgres}\n\
             kafka.port = {kafka}\n\
             kafka.controller_port = {controller}\n",
            root = root.display()
        );
        fs::write(place.dir.path().join("springtide.toml"), config).unwrap();
        place
    }

    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(&*SPRINGTIDE);
        command.current_dir(self.dir.path()).args(args);
        command
    }

    pub fn start(&self, args: &[&str]) -> Supervisor<'_> {
        self.start_command(self.command(args))
    }

    /// With this umask, such as `022`.
    pub fn start_with_umask(&self, umask: &str, args: &[&str]) -> Supervisor<'_> {
        let mut command = Command::new("sh");
        let script = format!("umask {umask} && exec \"$0\" \"$@\"");
        command
            .current_dir(self.dir.path())
            .args(["-c", &script, &SPRINGTIDE])
            .args(args);
        self.start_command(command)
    }

    pub fn start_command(&self, mut command: Command) -> Supervisor<'_> {
        let log = fs::File::create(self.dir.path().join("terminal.log")).unwrap();
        let process = command
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        Supervisor { process, place: self }
    }

    pub fn state(&self, name: &str) -> PathBuf {
        self.dir.path().join(".springtide").join(name)
    }

    /// The terminal output of the supervisor, and the end of every log file.
    pub fn story(&self) -> String {
        let mut story = fs::read_to_string(self.dir.path().join("terminal.log")).unwrap();
        for entry in fs::read_dir(self.state("log")).into_iter().flatten() {
            let path = entry.unwrap().path();
            let text = fs::read_to_string(&path).unwrap_or_default();
            let lines: Vec<_> = text.lines().collect();
            let end = lines[lines.len().saturating_sub(20)..].join("\n");
            story += &format!("\n--- {}\n{end}", path.display());
        }
        story
    }

    pub fn database_url(&self) -> String {
        socket_url(&self.state("postgres"), self.ports[4], "springtide")
    }
}

/// A running `springtide up` or `springtide stack start`.
pub struct Supervisor<'a> {
    pub process: Child,
    place: &'a Place,
}

impl Supervisor<'_> {
    pub fn pid(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.process.id()).unwrap())
    }

    /// Waits until every line of `lines` was printed.
    pub async fn says(&mut self, lines: &[&str], limit: Duration) {
        let started = std::time::Instant::now();
        loop {
            let output = fs::read_to_string(self.place.dir.path().join("terminal.log")).unwrap();
            if lines.iter().all(|line| output.contains(line)) {
                return;
            }
            let ended = self.process.try_wait().unwrap();
            assert!(
                ended.is_none() && started.elapsed() < limit,
                "not printed within {limit:?} ({ended:?}): {lines:?}\n{}",
                self.place.story()
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// The process ids of all children, by name.
    pub fn parts(&self) -> BTreeMap<String, Pid> {
        let note: BTreeMap<String, serde_json::Value> =
            serde_json::from_slice(&fs::read(self.place.state("up.json")).unwrap()).unwrap();
        let pid = |process: &serde_json::Value| i32::try_from(process["pid"].as_i64().unwrap()).unwrap();
        note.iter()
            .map(|(name, process)| (name.clone(), Pid::from_raw(pid(process))))
            .collect()
    }

    /// The supervisor and all its descendants.
    pub fn family(&self) -> BTreeSet<i32> {
        let mut parents = BTreeMap::new();
        for entry in fs::read_dir("/proc").unwrap().filter_map(Result::ok) {
            let stat = fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
            if let Some((pid, rest)) = stat.split_once(' ')
                && let Some((_, fields)) = rest.rsplit_once(") ")
                && let Some(parent) = fields.split(' ').nth(1)
            {
                parents.insert(pid.parse::<i32>().unwrap(), parent.parse::<i32>().unwrap());
            }
        }
        let mut family = BTreeSet::from([self.pid().as_raw()]);
        loop {
            let known = family.clone();
            family.extend(
                parents
                    .iter()
                    .filter(|(_, parent)| known.contains(parent))
                    .map(|(pid, _)| *pid),
            );
            if family.len() == known.len() {
                return family;
            }
        }
    }
}

impl Drop for Supervisor<'_> {
    fn drop(&mut self) {
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

/// Whether a process runs; a zombie does not.
fn runs(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ")
        .is_some_and(|(_, fields)| !fields.starts_with('Z'))
}

pub async fn all_gone(family: &BTreeSet<i32>, place: &Place) {
    let started = std::time::Instant::now();
    loop {
        let left: Vec<_> = family.iter().filter(|pid| runs(**pid)).collect();
        if left.is_empty() {
            return;
        }
        assert!(started.elapsed() < END, "still there: {left:?}\n{}", place.story());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn healthy(port: u16) -> bool {
    let answer = reqwest::get(format!("http://127.0.0.1:{port}/health")).await;
    answer.is_ok_and(|answer| answer.status().is_success())
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout)
}

#[tokio::test(flavor = "multi_thread")]
async fn roles_are_restarted_when_killed_and_die_with_the_supervisor() {
    let place = Place::new();
    let mut up = place.start(&["up"]);
    up.says(&["Springtide is up."], START).await;
    for port in &place.ports[..4] {
        assert!(healthy(*port).await, "{}", place.story());
    }
    let metrics = reqwest::get(format!("http://127.0.0.1:{}/metrics", place.ports[3]))
        .await
        .unwrap();
    assert!(metrics.status().is_success());

    let before = up.parts();
    for role in ROLES {
        kill(before[role], Signal::SIGKILL).unwrap();
    }
    let back = ROLES.map(|role| format!("{role} is back"));
    up.says(&back.each_ref().map(String::as_str), RETURN).await;
    let after = up.parts();
    assert!(ROLES.iter().all(|role| after[*role] != before[*role]));
    assert_eq!(
        (before["postgres"], before["kafka"]),
        (after["postgres"], after["kafka"])
    );

    let family = up.family();
    assert!(family.len() > 6, "{family:?}");
    kill(up.pid(), Signal::SIGKILL).unwrap();
    all_gone(&family, &place).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn data_survives_a_killed_server_a_killed_supervisor_and_an_orderly_stop() {
    let place = Place::new();
    let start = ["stack", "start"];
    let ready = ["postgres ready", "kafka    ready", "Kafka:"];
    let mut first = place.start(&start);
    first.says(&ready, START).await;
    let mut connection = PgConnection::connect(&place.database_url()).await.unwrap();
    connection
        .execute("create table kept (n int); insert into kept values (41)")
        .await
        .unwrap();

    let parts = first.parts();
    kill(parts["postgres"], Signal::SIGKILL).unwrap();
    kill(parts["kafka"], Signal::SIGKILL).unwrap();
    first.says(&["postgres is back", "kafka is back"], RETURN).await;
    let family = first.family();
    kill(first.pid(), Signal::SIGKILL).unwrap();
    all_gone(&family, &place).await;

    let mut second = place.start(&start);
    second.says(&ready, START).await;
    let mut connection = PgConnection::connect(&place.database_url()).await.unwrap();
    connection.execute("update kept set n = n + 1").await.unwrap();
    let family = second.family();
    kill(second.pid(), Signal::SIGINT).unwrap();
    all_gone(&family, &place).await;
    assert!(second.process.wait().unwrap().success(), "{}", place.story());
    assert!(
        place.story().contains("database system is shut down"),
        "{}",
        place.story()
    );

    let mut third = place.start(&start);
    third.says(&ready, START).await;
    let mut connection = PgConnection::connect(&place.database_url()).await.unwrap();
    let stored: i32 = sqlx::query_scalar("select n from kept")
        .fetch_one(&mut connection)
        .await
        .unwrap();
    assert_eq!(stored, 42);

    let refused = place.command(&start).output().unwrap();
    assert!(!refused.status.success());
    assert!(text(&refused).contains("already runs"), "{}", text(&refused));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backup_is_restored_to_any_moment_of_it() {
    let place = Place::new();
    let run = |args: &[&str]| {
        let output = place.command(&[&["stack"], args].concat()).output().unwrap();
        (output.status.success(), text(&output))
    };
    let ready = ["postgres ready", "kafka    ready", "Kafka:"];
    let mut first = place.start(&["stack", "start"]);
    first.says(&ready, START).await;
    let mut connection = PgConnection::connect(&place.database_url()).await.unwrap();
    connection
        .execute("create table kept (n int); insert into kept values (1)")
        .await
        .unwrap();
    let object = place.state("store/policy/demo/object/00");
    fs::create_dir_all(object.parent().unwrap()).unwrap();
    fs::write(&object, "of a version").unwrap();
    let (works, said) = run(&["backup", "copy"]);
    assert!(works, "{said}");
    connection.execute("update kept set n = 2").await.unwrap();
    let moment: String = sqlx::query_scalar("select to_json(clock_timestamp() at time zone 'UTC') #>> '{}' || 'Z'")
        .fetch_one(&mut connection)
        .await
        .unwrap();
    connection.execute("update kept set n = 3").await.unwrap();
    fs::write(place.state("store/policy/demo/object/01"), "of the next").unwrap();
    assert!(run(&["backup", "copy"]).0);

    let family = first.family();
    let (works, said) = run(&["restore", "copy"]);
    assert!(!works && said.contains("already runs"), "{said}");
    kill(first.pid(), Signal::SIGKILL).unwrap();
    all_gone(&family, &place).await;
    let (works, said) = run(&["restore", "copy"]);
    assert!(!works && said.contains("move that folder away"), "{said}");
    // the machine is lost
    fs::remove_dir_all(place.state("")).unwrap();
    let (works, said) = run(&["restore", "copy", "--to", "2001-01-01T00:00:00Z"]);
    assert!(!works && said.contains("has the moments from"), "{said}");
    let (works, said) = run(&["restore", "copy", "--to", &moment]);
    assert!(works, "{said}");
    assert_eq!(fs::read_to_string(&object).unwrap(), "of a version");
    assert!(place.state("keys/root.key").exists() && place.state("store/policy/demo/object/01").exists());

    let mut second = place.start(&["stack", "start"]);
    second.says(&ready, START).await;
    let mut connection = PgConnection::connect(&place.database_url()).await.unwrap();
    let kept: i32 = sqlx::query_scalar("select n from kept")
        .fetch_one(&mut connection)
        .await
        .unwrap();
    assert_eq!(kept, 2, "what was there at that moment");
    let (works, said) = run(&["backup", "copy"]);
    assert!(!works && said.contains("Back up into a new folder"), "{said}");
    assert!(run(&["backup", "next"]).0);

    let family = second.family();
    kill(second.pid(), Signal::SIGKILL).unwrap();
    all_gone(&family, &place).await;
    fs::remove_dir_all(place.state("postgres")).unwrap();
    assert!(run(&["restore", "next"]).0, "the newest moment");
    fs::remove_dir_all(place.state("postgres")).unwrap();
    let damaged = place.dir.path().join("next/base/global/pg_control");
    let mut bytes = fs::read(&damaged).unwrap();
    bytes[100] ^= 1;
    fs::write(&damaged, bytes).unwrap();
    let (works, said) = run(&["restore", "next"]);
    assert!(!works && said.contains("global/pg_control has other bytes"), "{said}");
    assert!(!place.state("postgres").exists(), "a start would take it");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_role_that_ends_three_times_for_the_same_reason_ends_the_start() {
    let place = Place::new();
    // what only the trainer reads, and a name with capitals
    let base = place.dir.path().join("Broken-Model");
    fs::create_dir(&base).unwrap();
    fs::write(base.join("config.json"), "{}").unwrap();
    let mut supervisor = place.start(&["up", "--policy", base.to_str().unwrap()]);
    let status = eventually("the start is given up", START * 2, async || {
        supervisor.process.try_wait().unwrap()
    })
    .await;
    assert!(!status.success());
    let story = place.story();
    assert!(
        story.contains("the policy of Broken-Model is named broken-model"),
        "{story}"
    );
    assert!(
        story.contains("train does not start: it ended 3 times, each time for the same reason"),
        "{story}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_short_demo_writes_its_report_and_stops_the_stack() {
    let place = Place::new();
    let replay = ["--minutes", "0.25", "--rate", "8", "--reference-pauses", "40"];
    let args = [&["up", "--demo", "--once", "--"][..], &replay].concat();
    let mut command = place.command(&args);
    // as in demo/completion.toml
    let surface = r#"[{name="completion", horizon_seconds=3.0, decline=0.0}]"#;
    command.env("SPRINGTIDE__INGEST__SURFACE", surface);
    let mut supervisor = place.start_command(command);
    let ended = eventually("the demo ends", START * 2, async || {
        supervisor.process.try_wait().unwrap()
    })
    .await;
    assert!(ended.success(), "{}", place.story());

    let report: serde_json::Value = serde_json::from_slice(&fs::read(place.state("report.json")).unwrap()).unwrap();
    assert_eq!(report["parameters"]["users"], "house");
    for arm in ["learner", "champion", "base"] {
        assert!(report["arms"][arm]["pauses"].as_u64().unwrap() > 5, "{arm}: {report}");
    }
    assert_eq!(report["ledger"]["balanced"], true, "{}", report["ledger"]);
    assert_eq!(report["ledger"]["trained_stale"], 0);
    let scale = &report["headroom"];
    assert_eq!(scale["beforehand"].as_array().unwrap().len(), 5);
    // The base as served, on the learning arm's own pauses that somebody answered.
    let shadow = &scale["shadows"][0]["whole"]["reference"];
    assert_eq!(shadow["n"], report["arms"]["learner"]["n"]);
    let page = fs::read_to_string(place.state("report.html")).unwrap();
    assert!(
        page.contains("<svg") && page.contains("oracle"),
        "the page has its charts and its scale"
    );
}

#[test]
fn only_the_trainers_program_loads_libtorch_and_it_is_asked_for_if_it_is_missing() {
    let libraries = Command::new("ldd").arg(&*SPRINGTIDE).output().unwrap();
    assert!(!text(&libraries).contains("torch"), "{}", text(&libraries));

    let alone = tempfile::tempdir_in(Path::new(&*SPRINGTIDE).parent().unwrap()).unwrap();
    let program = alone.path().join("springtide");
    fs::hard_link(&*SPRINGTIDE, &program).unwrap();
    for command in ["train", "up"] {
        let output = Command::new(&program)
            .arg(command)
            .current_dir(alone.path())
            .output()
            .unwrap();
        assert!(!output.status.success());
        assert!(
            text(&output).contains("springtide-trainer is missing"),
            "{}",
            text(&output)
        );
    }
}

#[test]
fn a_contradictory_configuration_is_refused_with_advice() {
    let dir = tempfile::tempdir().unwrap();
    let check = |config: &str| {
        fs::write(dir.path().join("springtide.toml"), config).unwrap();
        Command::new(&*SPRINGTIDE)
            .args(["config", "check"])
            .current_dir(dir.path())
            .output()
            .unwrap()
    };
    assert!(check("state_dir = 'x'").status.success());
    let refused = check("listen.serve = '0.0.0.0:8000'");
    assert!(!refused.status.success());
    assert!(text(&refused).contains("auth.required = true"), "{}", text(&refused));
    let refused = check("[kafka]\nbroker = 'x:1'");
    assert!(
        !refused.status.success() && text(&refused).contains("broker"),
        "{}",
        text(&refused)
    );
}

#[test]
fn the_environment_overrides_the_file_and_secrets_are_not_printed() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(
        dir.path().join("springtide.toml"),
        "policy.name = 'a'\n[postgres]\nurl = 'postgres://u:secret@h/d?sslmode=disable'",
    )
    .unwrap();
    let shown = Command::new(&*SPRINGTIDE)
        .args(["config", "show"])
        .current_dir(dir.path())
        .env("SPRINGTIDE__POLICY__NAME", "b")
        .output()
        .unwrap();
    let shown = text(&shown);
    assert!(shown.contains("name = \"b\"") && !shown.contains("secret"), "{shown}");
}
