//! One snapshot for all tests of a process, and words to speak of worlds.

use std::collections::BTreeMap;
use std::future::Future;
use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;
use tokio::sync::OnceCell;
use world::provider::World;
use world::vm::{Accelerator, Machine, Options, Pool};
use world::{Command, Ended, Limits, Output};

static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| Runtime::new().unwrap());
static POOL: OnceCell<Pool> = OnceCell::const_new();

/// All tests share one runtime, because they share the pool.
pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    RUNTIME.block_on(future)
}

/// The image of `make world-image`, by way of the Makefile.
pub fn options() -> Options {
    let variable =
        |name: &str| std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set: run `make check NAME=world`"));
    Options {
        image: variable("SPRINGTIDE_WORLD_IMAGE").into(),
        accelerator: match variable("SPRINGTIDE_WORLD_ACCELERATOR").as_str() {
            "kvm" => Accelerator::Kvm,
            "tcg" => Accelerator::Tcg,
            other => panic!("SPRINGTIDE_WORLD_ACCELERATOR is {other:?}: give kvm or tcg"),
        },
        setup: ["bash", "-c", "psql -c 'create table seed as select 0 as v'"]
            .map(str::to_owned)
            .to_vec(),
        ..Options::default()
    }
}

pub async fn owned_pool(name: &str, ready: usize, worlds_max: usize) -> Pool {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    Pool::start(options(), &folder, ready, worlds_max).await.unwrap()
}

/// The pool that tests share. Its machines end with the process.
pub async fn pool() -> &'static Pool {
    POOL.get_or_init(|| owned_pool("shared", 1, 64)).await
}

/// A new fork of the shared snapshot.
pub async fn fork() -> Machine {
    fork_of(pool().await).await
}

pub async fn fork_of(pool: &Pool) -> Machine {
    let mut machine = pool.snapshot().fork().await.unwrap();
    machine.begin(&uuid::Uuid::now_v7().simple().to_string()).await.unwrap();
    machine
}

pub fn command(program: &[&str]) -> Command {
    Command {
        program: program.iter().map(|word| (*word).to_owned()).collect(),
        stdin: Vec::new(),
        files: BTreeMap::new(),
        // Machines that are emulated beside other tests are slow.
        limits: Limits {
            wall: Duration::from_secs(60),
            cpu: Duration::from_secs(60),
            ..Limits::default()
        },
    }
}

pub async fn run(world: &mut Machine, program: &[&str]) -> Output {
    world.run(&command(program)).await.unwrap()
}

pub async fn shell(world: &mut Machine, script: &str) -> Output {
    run(world, &["bash", "-c", script]).await
}

/// The answer of the world's Postgres, as plain text.
pub async fn psql(world: &mut Machine, statement: &str) -> String {
    let output = run(world, &["psql", "-qAtc", statement]).await;
    assert_eq!(
        output.ended,
        Ended::Exited(0),
        "{statement}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// Processes that descend from `ancestor`, with their names.
pub fn processes_under(ancestor: u32) -> Vec<(u32, String)> {
    let mut children: BTreeMap<u32, Vec<(u32, String)>> = BTreeMap::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<u32>() else {
            continue;
        };
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else {
            continue;
        };
        let Some((before, after)) = stat.rsplit_once(')') else {
            continue;
        };
        let name = before.split_once('(').map_or("", |(_, name)| name).to_owned();
        let parent = after.split_whitespace().nth(1).unwrap().parse().unwrap();
        children.entry(parent).or_default().push((pid, name));
    }
    let (mut found, mut next) = (Vec::new(), vec![ancestor]);
    while let Some(pid) = next.pop() {
        for child in children.remove(&pid).unwrap_or_default() {
            next.push(child.0);
            found.push(child);
        }
    }
    found
}

/// Whether a process has ended, or waits only to be buried.
pub fn ended(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')')
        .is_none_or(|(_, after)| after.trim().starts_with('Z'))
}

pub fn kill(pid: u32) {
    let pid = nix::unistd::Pid::from_raw(i32::try_from(pid).unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
}

pub async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(120);
    while !holds() {
        assert!(Instant::now() < deadline, "not within two minutes: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Runs one test of this binary in another process, which can be killed.
pub fn this_test_again(name: &str) -> Child {
    std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "--nocapture", name])
        .env("SPRINGTIDE_WORLD_OWNER", "1")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// The number that `child` prints after `prefix`.
pub fn said_by(child: &mut Child, prefix: &str) -> u32 {
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let said = lines.map_while(Result::ok).find_map(|line| {
        let (_, number) = line.split_once(prefix)?;
        number.trim().parse().ok()
    });
    said.expect("the child ended without saying it")
}
