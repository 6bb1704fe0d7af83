//! `springtide demo`: developers at work on real code, replayed against the running stack through its public API, and the
//! report on whether the policy that learned from them served them better than the frozen one.
//!
//! The maths is pure and apart ([`arrivals`], [`developer`], [`tally`], [`interval`]); around it are the HTTP client, the
//! loop that replays, and read-only queries. It has no way into the stack but the API that any product would use, and it
//! teaches nothing: that is the trainer's business.

mod args;
mod arrivals;
mod client;
mod control;
mod developer;
mod draw;
mod figures;
mod headroom;
mod history;
mod house;
mod interval;
mod live;
mod number;
mod records;
mod references;
mod rehearse;
mod replay;
mod report;
mod suggester;
mod tally;
mod users;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, anyhow, ensure};
use ingest::reward::{Definition, MetricType};
use policy::image::Image;
use reqwest::Url;
use sqlx::PgPool;
use time::OffsetDateTime;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

pub use self::{
    args::{Args, Command},
    client::SURFACE,
    users::Users,
};
use self::{
    arrivals::{Arrivals, Shape},
    client::Client,
    developer::Desk,
    records::{Live, Scope},
    references::{Headroom, Scale},
    replay::{Plan, Replayed},
    report::Parameters,
};

/// How long to wait for the stack at the start.
const READY_PATIENCE: Duration = Duration::from_secs(120);
/// How long to wait at the end, after the horizon, until every generation has come to its end.
const SETTLE_PATIENCE: Duration = Duration::from_secs(60);
/// Queued rows that have not changed for this long are less than a cohort: no step will take them.
const SETTLED_AFTER: Duration = Duration::from_secs(10);
const POLL_EVERY: Duration = Duration::from_secs(1);
/// Looks at the tables for one count of the ledger.
const LEDGER_EVERY: u64 = 5;
/// For this many developers that are replayed there is one other, on whom thresholds are chosen.
const OTHERS_OF: usize = 3;

/// What showing a suggestion costs: with this surface an accept earns 1 − τ, a reject −τ, and declining 0.
///
/// Errors when it rewards otherwise: the demo's figures would not be the trainer's.
fn price(surface: &Definition) -> anyhow::Result<f64> {
    let tau = -surface.reject;
    let fits = surface.metric_type == MetricType::Boolean
        && (surface.accept - (1.0 - tau)).abs() < 1e-9
        && surface.decline == Some(0.0)
        && 0.0 < tau
        && tau < 1.0;
    ensure!(
        fits,
        "[[ingest.surface]] {:?} does not reward as the demo's developers count: for a price of τ, 0 to 1, of showing a \
         suggestion set accept = 1 − τ, reject = −τ and decline = 0 (such as 0.75, −0.25 and 0)",
        surface.name
    );
    Ok(tau)
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
    /// Hugging Face folder of the base, for references.
    pub base: PathBuf,
    /// Where versions are, for the report's examples: the store's URL, and the folder of the trusted keys.
    pub store: String,
    pub keys: PathBuf,
    /// How the stack rewards the surface that is replayed.
    pub surface: Definition,
    /// Where the report goes by default.
    pub state_dir: PathBuf,
}

/// Replays, waits until everything has come to its end, prints the table and writes the report and its page.
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
    let tau = price(&endpoints.surface)?;
    let (plan, others, files) = plan(&args, tau).await?;
    let desks = plan.desks.clone();
    let scope = Scope {
        policy: endpoints.policy.clone(),
        since: OffsetDateTime::now_utc(),
    };
    let json = args
        .json
        .clone()
        .unwrap_or_else(|| endpoints.state_dir.join("report.json"));
    let html = json.with_extension("html");
    ensure!(
        html != json,
        "--json {}: the page goes there; give a name that ends in .json",
        json.display()
    );
    let client = Client::new(endpoints.clone(), args.temperature)?;
    client.wait_until_ready(READY_PATIENCE).await?;
    let scale = scale(&args, tau, &endpoints.base, others).await?;
    eprintln!(
        "{} developers on {files} files, {} pauses a second for {} minutes, seed {}",
        args.corpus.developers, args.rate, args.minutes, args.seed
    );

    let (live, watcher) = follow(pool.clone(), scope.clone());
    let began = OffsetDateTime::now_utc();
    let started = std::time::Instant::now();
    let replayed = replay::replay(client, plan, live).await;
    let seconds = started.elapsed().as_secs_f64();
    drop(watcher);
    eprintln!("waiting for the last horizons to pass (Ctrl-C: no longer)");
    let settled = unless_interrupted(async {
        tokio::time::sleep(Duration::from_secs_f64(endpoints.surface.horizon_seconds)).await;
        settle(&pool, &scope).await
    });
    let settled = settled.await.unwrap_or(false);
    let headroom = match scale {
        Some(scale) => kept(unless_interrupted(headroom_of(scale, &endpoints, &replayed, desks, &args)).await),
        None => None,
    };

    let parameters = Parameters {
        policy: scope.policy.clone(),
        seed: args.seed,
        minutes: args.minutes,
        rate: args.rate,
        temperature: args.temperature,
        control: args.control,
        users: args.corpus.users,
        developers: args.corpus.developers as usize,
        files,
        corpus: args.corpus.corpus,
        tau,
        horizon_seconds: endpoints.surface.horizon_seconds,
        silent_share: developer::SILENT_SHARE,
        delay_median_seconds: developer::DELAY_MEDIAN_SECONDS,
        delay_sigma: developer::DELAY_SIGMA,
        completions_in_flight_max: replay::COMPLETIONS_IN_FLIGHT_MAX,
    };
    let mut report = figures::report(&pool, &scope, replayed, parameters, (began, seconds), settled).await?;
    report.headroom = headroom;
    println!("{}", report.table());
    if let Some(headroom) = &report.headroom {
        println!("{}", headroom.table());
    }
    let mut text = serde_json::to_vec_pretty(&report).context("write the report as JSON")?;
    text.push(b'\n');
    write(&json, &text)?;
    write(&html, report.page().as_bytes())?;
    println!("{}", report.summary());
    println!("report: {}", file_url(&html)?);
    println!("        {}", json.display());
    Ok(())
}

/// None: Ctrl-C came first. (The replay has taken it from the system, so nothing else would answer it.)
async fn unless_interrupted<T>(work: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        done = work => Some(done),
        _ = tokio::signal::ctrl_c() => None,
    }
}

/// A run must not lose its report to the scale.
fn kept(headroom: Option<anyhow::Result<Headroom>>) -> Option<Headroom> {
    match headroom {
        Some(Ok(headroom)) => Some(headroom),
        Some(Err(error)) => {
            tracing::warn!(error = format!("{error:#}"), "the scale is not in the report");
            None
        }
        None => {
            eprintln!("the scale is left out of the report");
            None
        }
    }
}

/// Tries the base on users who are not replayed. None: not wanted.
async fn scale(args: &Args, tau: f64, base: &Path, others: Vec<Vec<Desk>>) -> anyhow::Result<Option<Scale>> {
    if args.reference_pauses == 0 {
        return Ok(None);
    }
    eprintln!(
        "what is possible: the base at {} pauses of other users",
        args.reference_pauses
    );
    let image = Arc::new(Image::read_dir(base)?);
    let first = args.corpus.developers as usize;
    let (pauses, temperature, tau, seed) = (args.reference_pauses, args.temperature, tau, args.seed);
    let measured =
        tokio::task::spawn_blocking(move || Scale::measure(image, (&others, first), pauses, temperature, tau, seed));
    let scale = measured.await.context("measure the references")??;
    eprint!("{}", scale.table());
    Ok(Some(scale))
}

/// The references on the learning arm's own pauses, after the run.
async fn headroom_of(
    scale: Scale,
    endpoints: &Endpoints,
    replayed: &Replayed,
    desks: Vec<Vec<Desk>>,
    args: &Args,
) -> anyhow::Result<Headroom> {
    eprintln!("what was possible: the base at the learning arm's pauses (a minute or two; Ctrl-C: without)");
    let learning = replayed
        .outcomes
        .iter()
        .filter(|outcome| outcome.arm == tally::LEARNING);
    let latest = match learning.map(|outcome| outcome.version).max() {
        Some(serial) => match version(endpoints, serial).await {
            Ok(image) => Some((serial, image)),
            Err(error) => {
                tracing::warn!(
                    serial,
                    error = format!("{error:#}"),
                    "the report has no examples: no such version to ask"
                );
                None
            }
        },
        None => None,
    };
    let outcomes = replayed.outcomes.clone();
    let third = 60.0 * args.minutes / 3.0;
    let compared =
        tokio::task::spawn_blocking(move || scale.headroom(&outcomes, &desks, &[third, 2.0 * third], latest));
    compared.await.context("compare with the references")?
}

/// The weights of one version, from the store.
async fn version(endpoints: &Endpoints, serial: i64) -> anyhow::Result<Arc<Image>> {
    let store = policy::store::Store::open(&endpoints.store)?;
    let keys = policy::sign::TrustedKeys::load(&endpoints.keys)?;
    let version = store.materialise(&endpoints.policy, serial, &keys, &[]).await?;
    Ok(version.image)
}

/// Reads the corpus and deals it out, to the users that are replayed and to others. Returns the number of files too.
async fn plan(args: &Args, tau: f64) -> anyhow::Result<(Plan, Vec<Vec<Desk>>, usize)> {
    let corpus = args.corpus.clone();
    let files = tokio::task::spawn_blocking(move || corpus.files())
        .await
        .context("read the corpus")??;
    let users = args.corpus.developers as usize;
    let length = Duration::from_secs_f64(60.0 * args.minutes);
    let mut desks = developer::deal(&files, users + users / OTHERS_OF)?;
    let others = desks.split_off(users);
    let plan = Plan {
        arrivals: Arrivals::new(&Shape::azure_code_2023()?, args.seed, args.rate, length, users),
        length,
        desks,
        seed: args.seed,
        tau,
        control: args.control.then(|| control::Permutation::new(args.seed)),
    };
    Ok((plan, others, files.len()))
}

/// Looks at the tables every so often, beside the replay, so that a slow query delays no arrival.
fn follow(pool: PgPool, scope: Scope) -> (watch::Receiver<Live>, AbortOnDropHandle<()>) {
    let (sender, receiver) = watch::channel(Live::default());
    let task = tokio::spawn(async move {
        for nth in 0_u64.. {
            match look(&pool, &scope, nth, &sender).await {
                Ok(live) => drop(sender.send_replace(live)),
                Err(error) => tracing::debug!(%error, "the tables cannot be read just now"),
            }
            tokio::time::sleep(POLL_EVERY).await;
        }
    });
    (receiver, AbortOnDropHandle::new(task))
}

/// The `nth` look: the ledger is counted at some of them only, and is the last one's otherwise.
async fn look(pool: &PgPool, scope: &Scope, nth: u64, last: &watch::Sender<Live>) -> sqlx::Result<Live> {
    let ledger = if nth.is_multiple_of(LEDGER_EVERY) {
        records::ledger(pool, scope, &[]).await?
    } else {
        last.borrow().ledger.clone()
    };
    let live = records::live(pool, scope).await?;
    Ok(Live { ledger, ..live })
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

fn write(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
    }
    std::fs::write(path, bytes).with_context(|| format!("write {}", path.display()))
}

/// What a person opens in a browser.
fn file_url(path: &Path) -> anyhow::Result<Url> {
    let path = path
        .canonicalize()
        .with_context(|| format!("find {}", path.display()))?;
    Url::from_file_path(&path).map_err(|()| anyhow!("{} has no URL", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_price_of_showing_is_read_off_the_surface() {
        let surface = Definition::completion();
        assert_eq!(price(&surface).unwrap(), 0.25);
        let dearer = Definition {
            accept: 0.6,
            reject: -0.4,
            ..surface.clone()
        };
        assert_eq!(price(&dearer).unwrap(), 0.4);
        for other in [
            Definition {
                accept: 1.0,
                ..surface.clone()
            },
            Definition {
                decline: None,
                ..surface.clone()
            },
            Definition {
                accept: 1.0,
                reject: 0.0,
                ..surface
            },
        ] {
            assert!(price(&other).unwrap_err().to_string().contains("accept = 1 − τ"));
        }
    }
}
