//! `springtide demo --surface session`: users work with an assistant on one line, for up to four
//! turns, and say only at the end whether it was good. The policy learns from that.
//!
//! [`task`] and [`stats`] are pure. [`start`] tries the base in this process, [`play`] asks the
//! stack.

mod play;
mod report;
pub mod start;
mod stats;
pub mod task;

use std::{sync::Arc, time::Duration};

use anyhow::{Context, ensure};
use artifact::checkpoint::Checkpoint;
use sqlx::PgPool;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use self::{
    play::Plan,
    report::{Parameters, SessionReport},
    start::Start,
    stats::{Part, Rewards, Session},
    task::Task,
};
use crate::{
    Args, Dealt, READY_PATIENCE, Settings, Surface,
    arrivals::Arrivals,
    client::{Client, SESSION_SURFACE},
    deal,
    developer::FilePart,
    file_url,
    progress::Progress,
    queries::{self, Scope},
    random::Draws,
    results::patiently,
    settle,
    shuffle::Shuffle,
    stats::quantile,
    unless_interrupted, write_json,
};

impl Surface {
    /// What a verdict is worth.
    ///
    /// Errors when the surface rewards otherwise.
    fn verdicts(&self) -> anyhow::Result<Rewards> {
        ensure!(
            self.is_of_episodes && self.is_boolean && self.accept > self.reject,
            "[[ingest.surface]] {SESSION_SURFACE:?} does not reward sessions by a verdict: set trajectory = \"episode\", \
             metric = \"accept\", metric_type = \"boolean\", and accept above reject (as in demo/session.toml)"
        );
        Ok(Rewards {
            accept: self.accept,
            reject: self.reject,
        })
    }
}

/// Tries the base, plays the sessions, waits until every generation has its final disposition,
/// prints the table and writes the report.
pub async fn run(args: Args, settings: Settings, pool: PgPool) -> anyhow::Result<()> {
    let rewards = settings.surface.verdicts()?;
    let Dealt {
        replayed: user_parts,
        others,
        files,
    } = deal(&args).await?;
    let scope = Scope {
        policy: settings.policy.clone(),
        since: OffsetDateTime::now_utc(),
    };
    let client = Client::new(settings.clone(), args.temperature)?;
    client.wait_until_ready(READY_PATIENCE).await?;
    let start = measure_base(&args, &settings, others).await?;
    eprintln!("{start}");
    let (length, users) = (Duration::from_secs_f64(60.0 * args.minutes), user_parts.len());
    eprintln!(
        "{users} users on {files} files, {} sessions a second for {} minutes, seed {}",
        args.rate(),
        args.minutes,
        args.seed
    );

    let plan = Plan {
        arrivals: Arrivals::new(args.seed, args.rate(), length, users),
        length,
        user_parts,
        seed: args.seed,
        turn_signals: args.turn_signals,
        shuffle: args.control.then(|| Shuffle::new(args.seed)),
    };
    let began = OffsetDateTime::now_utc();
    let started = std::time::Instant::now();
    let progress = play::play(client, plan).await;
    let seconds = started.elapsed().as_secs_f64();
    eprintln!("waiting for the last sessions to close (Ctrl-C: do not wait)");
    let settled = unless_interrupted(settle(&pool, &scope)).await.unwrap_or(false);

    let parameters = Parameters {
        policy: scope.policy.clone(),
        seed: args.seed,
        minutes: args.minutes,
        rate: args.rate(),
        temperature: args.temperature,
        control: args.control,
        turn_signals: args.turn_signals,
        users: args.corpus.users,
        developers: users,
        rewards,
        horizon_seconds: settings.surface.horizon_seconds,
        turns_max: task::TURNS_MAX,
        silent_share: task::SILENT_SHARE,
        message_share: task::MESSAGE_SHARE,
        delay_median_seconds: task::DELAY_MEDIAN_SECONDS,
    };
    let report = collect(&pool, &scope, progress, parameters, start, (began, seconds), settled).await?;
    println!("{}", report.table());
    let json = args.report_file(&settings);
    write_json(&json, &report)?;
    println!("report: {}", file_url(&json)?);
    Ok(())
}

/// Tries the base at sessions of users who do not take part.
async fn measure_base(args: &Args, settings: &Settings, others: Vec<Vec<FilePart>>) -> anyhow::Result<Start> {
    eprintln!("trying the base at {} sessions of other users", args.start_sessions);
    let checkpoint = Arc::new(Checkpoint::read_dir(&settings.base)?);
    let (seed, temperature) = (args.seed, args.temperature);
    let tasks = tasks(&others, args.corpus.developers as usize, seed, args.start_sessions);
    let measured = tokio::task::spawn_blocking(move || start::measure(&checkpoint, &tasks, temperature, seed));
    measured.await.context("measure the base")?
}

/// `n` sessions of random users, who are numbered from `first`.
pub fn tasks(user_parts: &[Vec<FilePart>], first: usize, seed: u64, n: usize) -> Vec<(usize, Task)> {
    let mut draws = Draws::new("springtide demo session users 1", &[seed, first as u64]);
    let drawn = (0..n as u64).filter_map(|nth| {
        let user = draws.below(user_parts.len());
        Some((first + user, task::task(&user_parts[user], seed, first + user, nth)?))
    });
    drawn.collect()
}

async fn collect(
    pool: &PgPool,
    scope: &Scope,
    progress: Progress<Session>,
    parameters: Parameters,
    start: Start,
    (began, seconds): (OffsetDateTime, f64),
    settled: bool,
) -> anyhow::Result<SessionReport> {
    let Progress {
        outcomes: sessions,
        counts,
        interrupted,
    } = progress;
    let generations = sessions.iter().flat_map(|session| session.generations.iter().copied());
    let generations: Vec<_> = generations.collect();
    let latencies = sessions.iter().flat_map(|session| &session.latencies);
    let latencies: Vec<f64> = latencies.map(|latency| 1e3 * latency.as_secs_f64()).collect();
    let totals = patiently(|| queries::loop_totals(pool, scope)).await?;
    let length = Duration::from_secs_f64((60.0 * parameters.minutes).min(seconds));
    let rewards = parameters.rewards;
    let mut report = SessionReport {
        start,
        started_at: scope.since.format(&Rfc3339).context("format the start of the run")?,
        seconds,
        interrupted,
        conclusion: "",
        whole: Part::of(sessions.iter(), rewards),
        halves: Part::halves(&sessions, length, rewards),
        steps: totals.steps,
        steps_taken: patiently(|| queries::steps(pool, scope, began)).await?,
        parity_log_prob_difference_max: totals.parity_max,
        episodes: patiently(|| queries::episodes(pool, scope, SESSION_SURFACE)).await?,
        ledger: patiently(|| queries::ledger(pool, scope, &generations)).await?,
        settled,
        feedback_to_serving_seconds: patiently(|| queries::feedback_to_serving(pool, scope)).await?,
        turn_latency_ms_p50: quantile(latencies.clone(), 0.5),
        turn_latency_ms_p95: quantile(latencies, 0.95),
        parameters,
        counts,
        alarms: patiently(|| queries::alarms(pool, scope, began)).await?,
    };
    report.conclude();
    Ok(report)
}
