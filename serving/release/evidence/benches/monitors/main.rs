//! Simulated monitors of a learning arm's answers: false alarms where nothing changes, delay by effect, and
//! two policies that avoid being scored.
//!
//! The defaults are those of `trainer.realtime.alarms` and of the reported run (`docs/measurements/monitors.md`).

mod hacks;
mod sessions;
mod streams;

use std::path::PathBuf;

use anyhow::Context;
use clap::Parser;
use evidence::change::Design;
use evidence::figure::Figure;
use serde_json::{Value, json};
use sessions::Hack;
use streams::{ALONE, Stream, Traffic, WITH_OTHERS};

#[derive(Parser)]
struct Args {
    /// Streams in which nothing changes, for each figure.
    #[arg(long, default_value_t = 400)]
    streams: u64,
    /// Trajectories of the watched arm in each of them.
    #[arg(long, default_value_t = 20_000)]
    trajectories: u32,
    /// Streams for each effect.
    #[arg(long, default_value_t = 200)]
    streams_per_effect: u64,
    /// Policies of each kind that avoid being scored.
    #[arg(long, default_value_t = 200)]
    policies: u64,
    #[arg(long, default_value_t = 0.05)]
    margin: f64,
    #[arg(long, default_value_t = 100_000.0)]
    answers_per_false_alarm: f64,
    #[arg(long, default_value_t = 1_000)]
    reference: u32,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// File for the results.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Passed by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

/// Added to a share; multiplied to an amount.
const EFFECTS: [(Figure, f64); 16] = [
    (Figure::Unscored, 0.1),
    (Figure::Unscored, 0.2),
    (Figure::Unscored, 0.4),
    (Figure::Unanswered, 0.1),
    (Figure::Unanswered, 0.2),
    (Figure::Accepted, -0.1),
    (Figure::Accepted, -0.2),
    (Figure::Shown, -0.2),
    (Figure::Edited, 0.1),
    (Figure::Disagreement, 0.1),
    (Figure::ToolFailed, 0.1),
    (Figure::Repetition, 0.1),
    (Figure::Length, 1.5),
    (Figure::Length, 2.0),
    (Figure::Length, 0.5),
    (Figure::Entropy, 0.5),
];
const TRAFFIC: [(&str, Traffic); 2] = [("beside another arm", WITH_OTHERS), ("alone", ALONE)];
/// An arm that is compared with its own past cannot tell a day from a change.
const DAYS_ALONE: (&str, Traffic) = (
    "alone, with days",
    Traffic {
        day_amplitude: WITH_OTHERS.day_amplitude,
        ..ALONE
    },
);
/// Versions of a policy that avoids being scored.
const VERSIONS: u32 = 16;

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let design = |figure: Figure| figure.design(args.margin, args.answers_per_false_alarm, args.reference);
    let false_alarms = false_alarms(&args, design);
    let delays = delays(&args, design);
    let hacks = hacks(&args, design);
    let Some(path) = &args.json else { return Ok(()) };
    let document = json!({
        "streams": args.streams, "trajectories": args.trajectories, "streams_per_effect": args.streams_per_effect,
        "policies": args.policies, "margin": args.margin, "answers_per_false_alarm": args.answers_per_false_alarm,
        "reference": args.reference, "seed": args.seed, "sessions_of_a_version": hacks::SESSIONS_OF_A_VERSION,
        "false_alarms": false_alarms, "delays": delays, "hacks": hacks,
    });
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).context("create the folder of the results")?;
    }
    std::fs::write(path, serde_json::to_string_pretty(&document)? + "\n").context("write the results")
}

fn false_alarms(args: &Args, design: impl Fn(Figure) -> Design) -> Vec<Value> {
    let bound = 100.0 * f64::from(args.trajectories) / args.answers_per_false_alarm;
    println!(
        "Nothing changes: {} streams of {} trajectories of the arm for each figure; at most {bound:.0}% may have an alarm\n",
        args.streams, args.trajectories
    );
    println!(
        "| figure | traffic | streams with an alarm | 95% interval | alarms per 100,000 trajectories |\n|---|---|---|---|---|"
    );
    let mut rows = Vec::new();
    for figure in Figure::ALL {
        for (name, traffic) in TRAFFIC.into_iter().chain([DAYS_ALONE]) {
            let counts = (0..args.streams).map(|nth| {
                let mut stream = Stream::new(figure, traffic, args.seed.wrapping_mul(1_000_003) + nth);
                streams::alarms(&design(figure), &mut stream, args.trajectories)
            });
            let counts: Vec<u32> = counts.collect();
            let with = counts.iter().filter(|count| **count > 0).count() as u64;
            let alarms: u32 = counts.iter().sum();
            let [low, high] = wilson(with, args.streams);
            let rate = f64::from(alarms) / (args.streams as f64 * f64::from(args.trajectories)) * 1e5;
            println!(
                "| {} | {name} | {with} of {} | {:.1}% to {:.1}% | {rate:.2} |",
                figure.name(),
                args.streams,
                100.0 * low,
                100.0 * high
            );
            rows.push(
                json!({"figure": figure, "traffic": name, "with_alarm": with, "wilson95": [low, high],
                "alarms": alarms, "per_100000": rate}),
            );
        }
    }
    rows
}

fn delays(args: &Args, design: impl Fn(Figure) -> Design) -> Vec<Value> {
    println!(
        "\nA change after the reference: {} streams for each, at most {} trajectories\n",
        args.streams_per_effect, args.trajectories
    );
    println!(
        "| figure | from | change | traffic | seen | trajectories of the arm: median | 95% |\n|---|---|---|---|---|---|---|"
    );
    let mut rows = Vec::new();
    for (figure, effect) in EFFECTS {
        for (name, traffic) in TRAFFIC {
            let found = (0..args.streams_per_effect).filter_map(|nth| {
                let mut stream = Stream::new(figure, traffic, args.seed.wrapping_mul(2_000_003) + nth);
                streams::until_alarm(&design(figure), &mut stream, effect, args.trajectories)
            });
            let mut found: Vec<u32> = found.collect();
            found.sort_unstable();
            let [median, p95] = [0.5, 0.95].map(|share| quantile(&found, args.streams_per_effect, share));
            let (level, _) = streams::level(figure);
            let change = match figure {
                Figure::Length | Figure::Entropy => format!("× {effect}"),
                _ => format!("{effect:+}"),
            };
            let seen = found.len() as f64 / args.streams_per_effect as f64;
            println!(
                "| {} | {level} | {change} | {name} | {:.0}% | {} | {} |",
                figure.name(),
                100.0 * seen,
                cell(median),
                cell(p95)
            );
            rows.push(
                json!({"figure": figure, "from": level, "effect": effect, "traffic": name, "seen": seen,
                "median": median, "p95": p95}),
            );
        }
    }
    rows
}

fn hacks(args: &Args, design: impl Fn(Figure) -> Design) -> Vec<Value> {
    println!(
        "\nA policy that avoids being scored: {} of each kind, {VERSIONS} versions of {} sessions\n",
        args.policies,
        hacks::SESSIONS_OF_A_VERSION
    );
    println!(
        "| policy | reward of what is scored | alarm before it began | caught | first alarm, sessions: median | 95% | by figure |\n|---|---|---|---|---|---|---|"
    );
    let mut rows = Vec::new();
    let kinds = [
        ("unchanged", Hack::None),
        ("broken calls", Hack::BrokenCall),
        ("questions", Hack::Question),
    ];
    for (name, hack) in kinds {
        let outcomes: Vec<hacks::Outcome> = (0..args.policies)
            .map(|nth| hacks::play(&design, hack, VERSIONS, args.seed.wrapping_mul(3_000_017) + nth))
            .collect();
        let early = outcomes
            .iter()
            .filter(|one| one.alarms.values().any(|at| *at < 0))
            .count();
        let firsts = outcomes
            .iter()
            .filter_map(|one| one.alarms.values().filter(|at| **at >= 0).min());
        let mut firsts: Vec<u32> = firsts.map(|at| *at as u32).collect();
        firsts.sort_unstable();
        let [median, p95] = [0.5, 0.95].map(|share| quantile(&firsts, args.policies, share));
        let mean = |part: usize| outcomes.iter().map(|one| one.rewards[part]).sum::<f64>() / outcomes.len() as f64;
        let by_figure = Figure::ALL.into_iter().filter_map(|figure| {
            let found = outcomes
                .iter()
                .filter_map(|one| one.alarms.get(&figure))
                .filter(|at| **at >= 0);
            let mut found: Vec<u32> = found.map(|at| *at as u32).collect();
            found.sort_unstable();
            let median = quantile(&found, args.policies, 0.5);
            (!found.is_empty()).then(|| json!({"figure": figure, "caught": found.len(), "median": median}))
        });
        let by_figure: Vec<Value> = by_figure.collect();
        let shown = by_figure.iter().map(|one| {
            format!(
                "{} {} ({})",
                one["figure"].as_str().unwrap_or(""),
                one["caught"],
                one["median"]
            )
        });
        println!(
            "| {name} | {:+.3} → {:+.3} | {early} | {} of {} | {} | {} | {} |",
            mean(0),
            mean(1),
            firsts.len(),
            args.policies,
            cell(median),
            cell(p95),
            shown.collect::<Vec<_>>().join(", ")
        );
        rows.push(
            json!({"policy": name, "reward_before": mean(0), "reward_after": mean(1), "early": early,
            "caught": firsts.len(), "median": median, "p95": p95, "by_figure": by_figure}),
        );
    }
    rows
}

/// Wilson's score interval (Wilson 1927), 95%.
fn wilson(count: u64, of: u64) -> [f64; 2] {
    let (z, n) = (1.959_964_f64, of as f64);
    let p = count as f64 / n;
    let centre = p + z * z / (2.0 * n);
    let half = z * (p * (1.0 - p) / n + z * z / (4.0 * n * n)).sqrt();
    [centre - half, centre + half].map(|bound| (bound / (1.0 + z * z / n)).clamp(0.0, 1.0))
}

/// Over all streams. `None`: fewer raised an alarm.
fn quantile(sorted: &[u32], of: u64, share: f64) -> Option<u32> {
    sorted
        .get(((share * of as f64).ceil() as usize).saturating_sub(1))
        .copied()
}

fn cell(value: Option<u32>) -> String {
    value.map_or("none".to_owned(), |value| value.to_string())
}
