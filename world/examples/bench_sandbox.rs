//! `make bench NAME=sandbox`: how many sandboxes start and end per second, cold: each is made anew.

#![expect(clippy::unwrap_used, reason = "a benchmark stops at the first error")]

use std::sync::Arc;
use std::time::{Duration, Instant};
use world::process::Sandbox;
use world::{Command, Ended, Limits};

const SECONDS: Duration = Duration::from_secs(5);
const PROGRAMS: [(&str, &[&str]); 2] = [
    ("/bin/true", &["/bin/true"]),
    ("python3 -I -c pass", &["/usr/bin/python3", "-I", "-c", "pass"]),
];

#[tokio::main]
async fn main() {
    let path = std::env::args()
        .nth(1)
        .unwrap_or_else(|| "target/bench/sandbox.json".into());
    println!("| program | at a time | starts per second | median, ms | p99, ms |");
    println!("|---|---|---|---|---|");
    let mut rows = vec![];
    for (name, program) in PROGRAMS {
        for at_a_time in [1, 2, 4] {
            let mut times = measure(program, at_a_time).await;
            times.sort_unstable();
            let rate = times.len() as f64 / SECONDS.as_secs_f64();
            let ms = |share: usize| times[(times.len() - 1) * share / 100].as_secs_f64() * 1e3;
            println!("| `{name}` | {at_a_time} | {rate:.0} | {:.1} | {:.1} |", ms(50), ms(99));
            rows.push(
                serde_json::json!({"program": name, "at_a_time": at_a_time, "starts": times.len(),
                "seconds": SECONDS.as_secs(), "median_ms": ms(50), "p99_ms": ms(99)}),
            );
        }
    }
    let cores = std::thread::available_parallelism().unwrap().get();
    let report = serde_json::json!({"cores": cores, "rows": rows});
    if let Some(folder) = std::path::Path::new(&path).parent() {
        std::fs::create_dir_all(folder).unwrap();
    }
    std::fs::write(&path, report.to_string()).unwrap();
}

/// From the start of each run to its end.
async fn measure(program: &[&str], at_a_time: usize) -> Vec<Duration> {
    let sandbox = Arc::new(Sandbox::new(at_a_time).unwrap());
    let command = Arc::new(Command {
        program: program.iter().map(|word| (*word).to_owned()).collect(),
        limits: Limits::default(),
        ..Command::default()
    });
    let end = Instant::now() + SECONDS;
    let workers: Vec<_> = (0..at_a_time)
        .map(|_| {
            let (sandbox, command) = (sandbox.clone(), command.clone());
            tokio::spawn(async move {
                let mut times = vec![];
                while Instant::now() < end {
                    let output = sandbox.run(&command).await.unwrap();
                    assert_eq!(output.ended, Ended::Exited(0));
                    times.push(output.wall);
                }
                times
            })
        })
        .collect();
    let mut times = vec![];
    for worker in workers {
        times.extend(worker.await.unwrap());
    }
    times
}
