//! `make bench NAME=world`: how fast worlds start, and what memory a fork takes.
//!
//! Cold: from the start of QEMU until the world's Postgres answers. Warm: from the wish for a world until
//! it has answered `select 1`, with a fork made on demand and with one that waited. Memory: the share of
//! each QEMU process (PSS), while all forks exist.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use world::provider::{Provider as _, World};
use world::vm::{Accelerator, Options, Pool, Snapshot};
use world::{Command, Ended, Limits};

type Failure = Box<dyn std::error::Error>;

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let words: Vec<String> = std::env::args().collect();
    let value = |name: &str| {
        let at = words.iter().position(|word| word == name)?;
        words.get(at + 1).cloned()
    };
    let number = |name: &str, default: usize| value(name).map_or(Ok(default), |text| text.parse());
    let (Some(image), Some(accelerator), Some(json_file)) = (value("--image"), value("--accelerator"), value("--json"))
    else {
        return Err(
            "give --image FOLDER --accelerator kvm|tcg --json FILE; optional: --cold N --warm N --alive N".into(),
        );
    };
    let (cold, warm, alive) = (number("--cold", 3)?, number("--warm", 30)?, number("--alive", 8)?);
    let options = Options {
        image: image.into(),
        accelerator: match accelerator.as_str() {
            "kvm" => Accelerator::Kvm,
            "tcg" => Accelerator::Tcg,
            other => return Err(format!("--accelerator is {other}: give kvm or tcg").into()),
        },
        ..Options::default()
    };
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("bench");

    let mut boots = Vec::new();
    for _ in 0..cold {
        boots.push(Snapshot::make(options.clone(), &folder).await?.boot());
    }
    let pool = Pool::start(options.clone(), &folder, 0, warm.max(alive)).await?;
    let snapshot_mib = pool.snapshot().disk_bytes() >> 20;
    let mut on_demand = Vec::new();
    for _ in 0..warm {
        let began = Instant::now();
        let mut world = pool.create().await?;
        select_1(world.as_mut()).await?;
        on_demand.push(began.elapsed());
    }
    let memory = memory_of_forks(&pool, alive).await?;
    drop(pool);
    let _ = std::fs::remove_dir_all(&folder);
    // The lock of the first one may still be held for a moment.
    let folder = folder.with_file_name("bench-waiting");
    let pool = Pool::start(options, &folder, alive, warm.max(alive)).await?;
    let mut waited = Vec::new();
    let mut run_again = Vec::new();
    for _ in 0..warm {
        while pool.state().ready < alive {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let began = Instant::now();
        let mut world = pool.create().await?;
        let taken = began.elapsed();
        select_1(world.as_mut()).await?;
        waited.push((taken, began.elapsed()));
        let began = Instant::now();
        select_1(world.as_mut()).await?;
        run_again.push(began.elapsed());
    }
    let _ = std::fs::remove_dir_all(&folder);

    let rows = [
        ("cold: boot until Postgres answers", boots),
        ("warm: fork on demand until `select 1` answered", on_demand),
        (
            "warm: a fork that waited, until `select 1` answered",
            waited.iter().map(|times| times.1).collect(),
        ),
        (
            "of that, until it takes commands",
            waited.iter().map(|times| times.0).collect(),
        ),
        ("a second `select 1` in the same world", run_again),
    ];
    println!("| {accelerator}, one at a time | n | median, s | worst, s | starts/s |\n|---|---|---|---|---|");
    let mut results = Vec::new();
    for (what, mut times) in rows {
        times.sort();
        let total: Duration = times.iter().sum();
        let (median, worst) = (
            times[times.len() / 2].as_secs_f64(),
            times[times.len() - 1].as_secs_f64(),
        );
        let per_second = times.len() as f64 / total.as_secs_f64();
        println!(
            "| {what} | {} | {median:.3} | {worst:.3} | {per_second:.2} |",
            times.len()
        );
        results.push(
            json!({"what": what, "n": times.len(), "median_s": median, "worst_s": worst, "per_second": per_second}),
        );
    }
    println!("\nmemory: {memory}\nsnapshot on disk: {snapshot_mib} MiB");
    let report = json!({
        "accelerator": accelerator,
        "cores": std::thread::available_parallelism().map_or(0, usize::from),
        "starts": results,
        "memory": memory,
        "snapshot_mib": snapshot_mib,
    });
    write(Path::new(&json_file), &report)
}

async fn select_1(world: &mut dyn World) -> Result<(), Failure> {
    let command = Command {
        program: ["psql", "-qAtc", "select 1"].map(str::to_owned).to_vec(),
        stdin: Vec::new(),
        files: BTreeMap::new(),
        limits: Limits::default(),
    };
    let output = world.run(&command).await?;
    match output.ended {
        Ended::Exited(0) if output.stdout == b"1\n" => Ok(()),
        _ => Err(format!("select 1 gave {output:?}").into()),
    }
}

/// Mean MiB of PSS per QEMU, with `count` forks that have each answered once.
async fn memory_of_forks(pool: &Pool, count: usize) -> Result<Value, Failure> {
    let mut worlds = Vec::new();
    for number in 0..count {
        let mut world = pool.snapshot().fork().await?;
        world.begin(&format!("bench-{number}")).await?;
        select_1(&mut world).await?;
        worlds.push(world);
    }
    let (mut pss, mut private) = (0, 0);
    for world in &worlds {
        // bubblewrap's child is bubblewrap again, and its child QEMU.
        let qemu = only_child(only_child(world.pid())?)?;
        let rollup = std::fs::read_to_string(format!("/proc/{qemu}/smaps_rollup"))?;
        let kib = |field: &str| -> u64 {
            let line = rollup.lines().find_map(|line| line.strip_prefix(field));
            line.and_then(|rest| rest.split_whitespace().next()?.parse().ok())
                .unwrap_or(0)
        };
        pss += kib("Pss:");
        private += kib("Private_Dirty:");
    }
    let count = worlds.len() as u64;
    Ok(json!({"forks": count, "pss_mib_each": pss / count / 1024, "private_dirty_mib_each": private / count / 1024}))
}

fn only_child(pid: u32) -> Result<u32, Failure> {
    for entry in std::fs::read_dir("/proc")?.flatten() {
        let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        // pid (name) state parent …
        let after = stat.rsplit_once(')').map_or("", |(_, after)| after);
        if after.split_whitespace().nth(1) == Some(pid.to_string().as_str()) {
            return Ok(entry.file_name().to_string_lossy().parse()?);
        }
    }
    Err(format!("the process {pid} has no child").into())
}

fn write(path: &Path, report: &Value) -> Result<(), Failure> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    Ok(std::fs::write(path, format!("{report:#}\n"))?)
}
