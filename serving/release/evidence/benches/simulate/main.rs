//! Simulated releases: false alarms when both arms are the same, power, and time to detection.
//!
//! There is a look after every visit of a user. The defaults are the parameters of the reported run
//! (`docs/measurements/evidence.md`). They were chosen before it and must not be changed after a run was seen.

mod replay;
mod runs;
mod traffic;

use std::path::PathBuf;

use anyhow::Context;
use clap::Parser;
use evidence::Clusters;
use serde_json::{Value, json};
use traffic::{Release, Sums, Traffic};

/// Simulates releases that are looked at continuously.
#[derive(Parser)]
struct Args {
    /// Releases with equal arms.
    #[arg(long, default_value_t = 2000)]
    releases: u64,
    /// Releases for each effect and traffic.
    #[arg(long, default_value_t = 200)]
    releases_per_effect: u64,
    /// Hours of traffic of each release with equal arms.
    #[arg(long, default_value_t = 72)]
    hours: u64,
    /// Days after which a release with an effect counts as not detected.
    #[arg(long, default_value_t = 14)]
    days_max: u64,
    #[arg(long, default_value_t = 0.05)]
    alpha: f64,
    /// Relative effect that the design sees soonest.
    #[arg(long, default_value_t = 0.1)]
    soonest: f64,
    #[arg(long, default_value_t = 50)]
    users_min: u64,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Make releases of these logged answers instead: `release-answers.csv` of `make bench NAME=release`.
    #[arg(long, value_name = "FILE")]
    answers: Option<PathBuf>,
    /// With `--answers`: releases for each effect and number of users.
    #[arg(long, default_value_t = 20)]
    replays: usize,
    /// File for the results.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Passed by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

/// Requests per hour of the releases with equal arms.
const HOURLY: u64 = 1_000;
/// Requests per hour of both arms together.
const HOURLY_ALL: [u64; 5] = [100, 300, 1_000, 3_000, 10_000];
const EFFECTS: [f64; 4] = [0.05, 0.1, 0.2, -0.5];
/// Share of failures: candidate, baseline.
const FAILURES: [[f64; 2]; 6] = [
    [0.5, 0.0],
    [0.5, 0.02],
    [0.2, 0.01],
    [0.1, 0.01],
    [0.05, 0.01],
    [0.02, 0.01],
];

/// A user sends 20 requests on an average day, so there are as many users as that takes.
fn traffic(hourly: u64) -> Traffic {
    Traffic {
        users: (hourly * 24 / 20) as usize,
        activity_sigma: 1.0,
        visit_requests_mean: 5.0,
        zero_share: 0.4,
        failure_share: 0.02,
    }
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    check_sums()?;
    if let Some(answers) = &args.answers {
        let replayed = replay::run(answers, args.replays, args.seed)?;
        return args.json.as_deref().map_or(Ok(()), |path| write_json(path, &replayed));
    }
    let plan = runs::Plan {
        alpha: args.alpha,
        soonest: args.soonest * traffic::reward_mean(traffic(HOURLY).zero_share),
        users_min: args.users_min,
    };

    let requests = HOURLY * args.hours;
    println!("Equal arms: {} releases, {requests} requests each\n", args.releases);
    let alarms = alarms_of(runs::false_alarms(
        &plan,
        traffic(HOURLY),
        requests,
        args.releases,
        args.seed,
    )?);
    println!(
        "\nEqual arms in steps: {} releases, {requests} requests each\n",
        args.releases
    );
    let stepped = alarms_of(runs::false_alarms_in_steps(
        &plan,
        traffic(HOURLY),
        requests,
        args.releases,
        args.seed,
    )?);

    let mut detections = Vec::new();
    println!(
        "\nDetection: {} releases each, at most {} days\n",
        args.releases_per_effect, args.days_max
    );
    println!(
        "| requests per hour | users | effect | detected | hours: median | 90% | requests: median |\n|---|---|---|---|---|---|---|"
    );
    for hourly in HOURLY_ALL {
        for effect in EFFECTS {
            let traffic = traffic(hourly);
            let requests_max = hourly * 24 * args.days_max;
            let found = runs::detections(
                &plan,
                traffic,
                effect,
                requests_max,
                args.releases_per_effect,
                args.seed,
            )?;
            let hours =
                |share| quantile(&found.requests, found.releases, share).map(|requests| requests / hourly as f64);
            let detected = found.requests.len() as f64 / found.releases as f64;
            println!(
                "| {hourly} | {} | {:+.0}% | {:.0}% | {} | {} | {} |",
                traffic.users,
                100.0 * effect,
                100.0 * detected,
                cell(hours(0.5), 1),
                cell(hours(0.9), 1),
                cell(quantile(&found.requests, found.releases, 0.5), 0),
            );
            detections.push(json!({
                "requests_per_hour": hourly, "users": traffic.users, "effect": effect, "detected": detected,
                "wrong_direction": found.wrong, "hours_median": hours(0.5), "hours_p90": hours(0.9),
            }));
        }
    }

    let mut failures = Vec::new();
    println!("\nFailures: 1000 releases each, at most 5000 requests of each arm, alpha 1%\n");
    println!(
        "| candidate | baseline | detected | requests of each arm: median | 90% | 99% |\n|---|---|---|---|---|---|"
    );
    for [candidate, baseline] in FAILURES {
        let requests = runs::failures(candidate, baseline, 5_000, 1000, args.seed)?;
        let [median, p90, p99] = [0.5, 0.9, 0.99].map(|share| quantile(&requests, 1000, share));
        let detected = requests.len() as f64 / 1000.0;
        println!(
            "| {:.0}% | {:.0}% | {:.1}% | {} | {} | {} |",
            100.0 * candidate,
            100.0 * baseline,
            100.0 * detected,
            cell(median, 0),
            cell(p90, 0),
            cell(p99, 0)
        );
        failures.push(json!({
            "candidate": candidate, "baseline": baseline, "detected": detected,
            "requests_median": median, "requests_p90": p90, "requests_p99": p99,
        }));
    }
    match &args.json {
        Some(path) => write(
            path,
            &args,
            &[
                ("false_alarms", alarms),
                ("false_alarms_in_steps", stepped),
                ("detections", detections),
                ("failures", failures),
            ],
        ),
        None => Ok(()),
    }
}

/// Prints the table. Returns its rows.
fn alarms_of(kinds: Vec<runs::Kind>) -> Vec<Value> {
    println!("| alarm | nominal | releases with it | 95% interval |\n|---|---|---|---|");
    let row = |kind: runs::Kind| {
        let [low, high] = kind.wilson();
        let nominal = kind
            .nominal
            .map_or("none".to_owned(), |nominal| format!("{:.1}%", 100.0 * nominal));
        let share = 100.0 * kind.count as f64 / kind.releases as f64;
        println!(
            "| {} | {nominal} | {share:.1}% | {:.1}% to {:.1}% |",
            kind.name,
            100.0 * low,
            100.0 * high
        );
        json!({"name": kind.name, "nominal": kind.nominal, "count": kind.count, "wilson95": [low, high]})
    };
    kinds.into_iter().map(row).collect()
}

fn write(path: &std::path::Path, args: &Args, results: &[(&str, Vec<Value>)]) -> anyhow::Result<()> {
    let mut document = json!({
        "releases": args.releases, "releases_per_effect": args.releases_per_effect, "hours": args.hours,
        "days_max": args.days_max, "alpha": args.alpha, "soonest_relative": args.soonest,
        "users_min": args.users_min, "seed": args.seed, "requests_per_hour": HOURLY, "traffic": traffic(HOURLY),
        "reward_mean": traffic::reward_mean(traffic(HOURLY).zero_share),
    });
    for (name, values) in results {
        document[*name] = json!(values);
    }
    write_json(path, &document)
}

fn write_json(path: &std::path::Path, document: &Value) -> anyhow::Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).context("create the folder of the results")?;
    }
    std::fs::write(path, serde_json::to_string_pretty(document)? + "\n").context("write the results")
}

/// The quantile over all releases. `None` if so many were not detected.
fn quantile(sorted: &[f64], releases: u64, share: f64) -> Option<f64> {
    sorted.get((share * releases as f64).ceil() as usize - 1).copied()
}

fn cell(value: Option<f64>, digits: usize) -> String {
    value.map_or("none".to_owned(), |value| format!("{value:.digits$}"))
}

/// The running sums must be what the library's clusters compute.
fn check_sums() -> anyhow::Result<()> {
    let traffic = traffic(100);
    let mut release = Release::new(traffic, 0.1, 7);
    let (mut sums, mut clusters) = (Sums::new(traffic.users), Clusters::default());
    for _ in 0..500 {
        let visit = release.visit();
        sums.add(visit.user, &visit.rewards);
        for reward in visit.rewards {
            clusters.add(visit.user, reward);
        }
    }
    let (sums, clusters) = (
        sums.estimate().context("no sums")?,
        clusters.estimate().context("no clusters")?,
    );
    anyhow::ensure!(
        (sums.mean - clusters.mean).abs() < 1e-9
            && (sums.variance / clusters.variance - 1.0).abs() < 1e-6
            && (sums.freedom - clusters.freedom).abs() < 1e-9,
        "running sums {sums:?} differ from {clusters:?}"
    );
    Ok(())
}
