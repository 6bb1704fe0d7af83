//! `springtide demo`: developers at work on real code, replayed against the running stack through its public API, and the
//! report on whether the policy that learned from them served them better than the frozen one.
//!
//! The maths is pure and apart ([`arrivals`], [`developer`], [`tally`], [`interval`]); around it are the HTTP client, the
//! loop that replays, and read-only queries. It has no way into the stack but the API that any product would use, and it
//! teaches nothing: that is the trainer's business.

mod arrivals;
mod client;
mod developer;
mod draw;
mod interval;
mod live;
mod records;
mod references;
mod replay;
mod report;
mod tally;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, ensure};
use sqlx::PgPool;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use self::{
    arrivals::{Arrivals, Shape},
    client::Client,
    records::{Live, Scope},
    replay::{Plan, Replayed},
    report::{Latency, Parameters, Report, SwapPause, Third},
    tally::Measure,
};

/// How long to wait for the stack at the start.
const READY_PATIENCE: Duration = Duration::from_secs(120);
/// How long to wait at the end, after the horizon, until every generation has come to its end.
const SETTLE_PATIENCE: Duration = Duration::from_secs(60);
/// Queued rows that have not changed for this long are less than a cohort: no step will take them.
const SETTLED_AFTER: Duration = Duration::from_secs(10);
const POLL_EVERY: Duration = Duration::from_secs(1);
const QUERY_ATTEMPTS: u32 = 10;

/// Replays developers at work on real code, and reports how both arms served them.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// How long to replay, minutes.
    #[arg(long, default_value_t = 10.0, value_parser = positive)]
    pub minutes: f64,
    /// Mean pauses per second, over all users; half to twice that at any one time.
    #[arg(long, default_value_t = 8.0, value_parser = positive)]
    pub rate: f64,
    /// Everything random follows from it.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// How many developers, at least 200.
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u32).range(200..=100_000))]
    pub users: u32,
    /// Folder of code to replay instead of the crates that this project's build has fetched.
    #[arg(long, value_name = "DIR")]
    pub corpus: Option<PathBuf>,
    /// Where the report goes; `report.json` in the state folder if not given.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Name of the policy to ask, if not the configured one.
    #[arg(long, value_name = "NAME")]
    pub policy: Option<String>,
    /// Price of showing a suggestion, as the surface's reward has it: accept 1 − τ, reject −τ, decline 0.
    #[arg(long, default_value_t = 0.25, value_parser = share)]
    pub tau: f64,
    /// The surface's horizon, seconds.
    #[arg(long, default_value_t = 4.0, value_parser = positive)]
    pub horizon: f64,
}

fn positive(text: &str) -> Result<f64, String> {
    let value = text.parse::<f64>().map_err(|error| error.to_string())?;
    if value.is_finite() && value > 0.0 {
        Ok(value)
    } else {
        Err("must be above 0".to_owned())
    }
}

fn share(text: &str) -> Result<f64, String> {
    positive(text).and_then(|value| {
        if value < 1.0 {
            Ok(value)
        } else {
            Err("must be below 1".to_owned())
        }
    })
}

/// Where the stack is.
#[derive(Debug, Clone)]
pub struct Endpoints {
    /// Base URLs without a slash at the end.
    pub serve: String,
    pub ingest: String,
    pub control: String,
    /// Where the stack asks for one.
    pub api_key: Option<String>,
    pub policy: String,
    /// Where the report goes by default.
    pub state_dir: PathBuf,
}

/// Replays, waits until everything has come to its end, prints the table and writes the report.
///
/// Errors when the stack is not up, the corpus is too small, or the report cannot be taken or written. Trouble with single
/// requests is no error: it is counted in the report.
pub async fn run(args: Args, mut endpoints: Endpoints, pool: PgPool) -> anyhow::Result<()> {
    if let Some(policy) = &args.policy {
        ensure!(
            !policy.contains('/'),
            "--policy {policy}: this asks for a policy by name; to start a stack from a folder, use \
             `springtide up --demo --policy {policy}`"
        );
        endpoints.policy.clone_from(policy);
    }
    let (plan, files) = plan(&args).await?;
    let scope = Scope {
        policy: endpoints.policy.clone(),
        since: OffsetDateTime::now_utc(),
    };
    let json = args
        .json
        .clone()
        .unwrap_or_else(|| endpoints.state_dir.join("report.json"));
    let client = Client::new(endpoints)?;
    client.wait_until_ready(READY_PATIENCE).await?;
    eprintln!(
        "{} developers on {files} files, {} pauses a second for {} minutes, seed {}",
        args.users, args.rate, args.minutes, args.seed
    );

    let (live, watcher) = follow(pool.clone(), scope.policy.clone());
    let started = std::time::Instant::now();
    let replayed = replay::replay(client, plan, live).await;
    let seconds = started.elapsed().as_secs_f64();
    drop(watcher);
    eprintln!("waiting for the last horizons to pass");
    tokio::time::sleep(Duration::from_secs_f64(args.horizon)).await;
    let settled = settle(&pool, &scope).await;

    let parameters = Parameters {
        policy: scope.policy.clone(),
        seed: args.seed,
        minutes: args.minutes,
        rate: args.rate,
        users: args.users as usize,
        files,
        corpus: args.corpus,
        tau: args.tau,
        horizon_seconds: args.horizon,
        silent_share: developer::SILENT_SHARE,
        delay_median_seconds: developer::DELAY_MEDIAN_SECONDS,
        delay_sigma: developer::DELAY_SIGMA,
        completions_in_flight_max: replay::COMPLETIONS_IN_FLIGHT_MAX,
    };
    let report = report(&pool, &scope, replayed, parameters, seconds, settled).await?;
    println!("{}", report.table());
    write(&report, &json)?;
    println!("report: {}", json.display());
    Ok(())
}

/// Reads the corpus and deals it out. Returns the number of files too.
async fn plan(args: &Args) -> anyhow::Result<(Plan, usize)> {
    let corpus = args.corpus.clone();
    let files = tokio::task::spawn_blocking(move || crate::corpus::demo_files(corpus.as_deref()))
        .await
        .context("read the corpus")??;
    let files = files
        .into_iter()
        .map(|file| (format!("{}/{}", file.krate, file.path), file.text.into()));
    let files = files.collect::<Vec<(String, Arc<str>)>>();
    let users = args.users as usize;
    let length = Duration::from_secs_f64(60.0 * args.minutes);
    let plan = Plan {
        arrivals: Arrivals::new(&Shape::azure_code_2023()?, args.seed, args.rate, length, users),
        length,
        desks: developer::deal(&files, users)?,
        seed: args.seed,
        tau: args.tau,
    };
    Ok((plan, files.len()))
}

/// Looks at the tables every so often, beside the replay, so that a slow query delays no arrival.
fn follow(pool: PgPool, policy: String) -> (watch::Receiver<Live>, AbortOnDropHandle<()>) {
    let (sender, receiver) = watch::channel(Live::default());
    let task = tokio::spawn(async move {
        loop {
            match records::live(&pool, &policy).await {
                Ok(live) => drop(sender.send_replace(live)),
                Err(error) => tracing::debug!(%error, "the tables cannot be read just now"),
            }
            tokio::time::sleep(POLL_EVERY).await;
        }
    });
    (receiver, AbortOnDropHandle::new(task))
}

/// Waits until no generation is open and the queue of the learning arm is empty or stands still. False: it took too long.
async fn settle(pool: &PgPool, scope: &Scope) -> bool {
    let deadline = tokio::time::Instant::now() + SETTLE_PATIENCE;
    let mut last = None;
    let mut unchanged_since = tokio::time::Instant::now();
    while tokio::time::Instant::now() < deadline {
        match records::unsettled(pool, scope).await {
            Ok(now) => {
                if last != Some(now) {
                    (last, unchanged_since) = (Some(now), tokio::time::Instant::now());
                }
                if now.open == 0 && (now.queued == 0 || unchanged_since.elapsed() >= SETTLED_AFTER) {
                    return true;
                }
            }
            Err(error) => tracing::warn!(%error, "the tables cannot be read just now"),
        }
        tokio::time::sleep(POLL_EVERY).await;
    }
    false
}

/// Takes all figures of the run together.
async fn report(
    pool: &PgPool,
    scope: &Scope,
    replayed: Replayed,
    parameters: Parameters,
    seconds: f64,
    settled: bool,
) -> anyhow::Result<Report> {
    let Replayed {
        outcomes,
        counts,
        interrupted,
    } = replayed;
    let tau = parameters.tau;
    let ids = outcomes.iter().map(|outcome| outcome.generation_id).collect::<Vec<_>>();
    let scored = outcomes
        .iter()
        .map(|o| (o.generation_id, o.arm.clone(), o.recorded_reward(tau)))
        .collect::<Vec<_>>();
    let versions_served = tally::versions_served(&outcomes);
    let serials = versions_served.iter().map(|served| served.version).collect::<Vec<_>>();
    let roots = patiently(|| records::roots(pool, &scope.policy, &serials)).await?;
    let the_loop = patiently(|| records::the_loop(pool, scope)).await?;
    let length = Duration::from_secs_f64(60.0 * parameters.minutes);
    let latencies = outcomes
        .iter()
        .map(|outcome| 1e3 * outcome.latency.as_secs_f64())
        .collect::<Vec<_>>();
    Ok(Report {
        started_at: scope.since.format(&Rfc3339).context("format the start of the run")?,
        seconds,
        interrupted,
        arms: tally::arms(outcomes.iter(), tau),
        difference: tally::difference(&outcomes, Measure::Reward, tau),
        difference_accepts_per_100: tally::difference(&outcomes, Measure::Accepts, tau),
        thirds: tally::thirds(outcomes, length)
            .iter()
            .map(|third| Third {
                arms: tally::arms(third.iter(), tau),
                difference: tally::difference(third, Measure::Reward, tau),
            })
            .collect(),
        roots_agree: versions_served
            .iter()
            .all(|served| roots.get(&served.version) == Some(&served.root)),
        versions_served,
        feedback_to_serving_seconds: patiently(|| records::feedback_to_serving(pool, scope)).await?,
        feedback_to_serving_phases: patiently(|| records::feedback_to_serving_phases(pool, scope)).await?,
        swap_pause_ms: SwapPause {
            p50: the_loop.swap_pause_ms_p50,
            max: the_loop.swap_pause_ms_max,
            n: the_loop.swaps,
        },
        delta_ratio: the_loop.delta_ratio,
        steps: the_loop.steps,
        parity_log_prob_difference_max: the_loop.parity_max,
        ledger: patiently(|| records::ledger(pool, scope, &ids)).await?,
        settled,
        trajectories: patiently(|| records::trajectories(pool, &scored)).await?,
        completion_latency_ms: Latency {
            p50: tally::quantile(latencies.clone(), 0.5),
            p95: tally::quantile(latencies, 0.95),
        },
        parameters,
        counts,
    })
}

/// Asks again while the database is away: a run must not lose its report to a restart of it.
async fn patiently<T, F: Future<Output = sqlx::Result<T>>>(query: impl Fn() -> F) -> anyhow::Result<T> {
    for _ in 1..QUERY_ATTEMPTS {
        match query().await {
            Ok(value) => return Ok(value),
            Err(error) => tracing::warn!(%error, "the tables cannot be read just now"),
        }
        tokio::time::sleep(POLL_EVERY).await;
    }
    query().await.context("take the report's figures from the tables")
}

fn write(report: &Report, path: &Path) -> anyhow::Result<()> {
    let mut json = serde_json::to_vec_pretty(report).context("write the report as JSON")?;
    json.push(b'\n');
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
    }
    std::fs::write(path, json).with_context(|| format!("write {}", path.display()))
}
