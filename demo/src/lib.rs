//! `springtide demo`: replays developers at work on real code against the running stack, through
//! its public API, and reports whether the policy that learned from them served them better than
//! the frozen one.
//!
//! The maths is pure ([`arrivals`], [`developer`], [`stats`]). Around it are the HTTP client, the
//! loop that replays, and read-only queries. The demo acts on the stack only through the API
//! that any product would use, and it does not teach: that is the trainer's work. No production
//! code depends on this crate, and it knows neither the configuration file nor the binary:
//! [`Settings`] has all it needs.

mod args;
mod arrivals;
mod client;
pub mod corpus;
pub mod developer;
mod house_style;
mod progress;
mod queries;
mod random;
mod references;
pub mod rehearsal;
mod replay;
mod results;
mod session;
mod shuffle;
mod stats;
mod stream_watch;
mod suggester;
mod terminal;

use std::{
    any::Any,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, anyhow, ensure};
use artifact::checkpoint::Checkpoint;
use futures::future::BoxFuture;
use reqwest::Url;
use sqlx::PgPool;
use time::OffsetDateTime;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

pub use self::args::{Args, Corpus, Dealt};
pub use self::results::Served;
pub use self::stats::Judgment;
use self::{
    arrivals::Arrivals,
    client::Client,
    developer::FilePart,
    progress::Progress,
    queries::{Live, Scope},
    references::{Base, Capability, References, VersionAt, served_along},
    replay::Plan,
    results::Parameters,
    shuffle::Shuffle,
    stats::Outcome,
    terminal::Display,
};

/// How long to wait for the stack at the start.
const READY_PATIENCE: Duration = Duration::from_secs(120);
/// How long to wait, after the last horizon, until every generation has its final disposition.
const SETTLE_PATIENCE: Duration = Duration::from_secs(60);
/// If queued rows do not change for this long, they are fewer than a cohort and no step takes them.
const SETTLED_AFTER: Duration = Duration::from_secs(10);
const POLL_EVERY: Duration = Duration::from_secs(1);

/// What the binary tells the demo about the stack and the terminal.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Base URLs without a slash at the end.
    pub serve_url: String,
    pub ingest_url: String,
    pub control_url: String,
    pub api_key: Option<String>,
    /// Trusts the certificates of the roles.
    pub http: reqwest::Client,
    pub policy: String,
    /// Hugging Face folder of the base model.
    pub base: PathBuf,
    /// How the stack rewards the surface that is replayed ([`Args::surface`]).
    pub surface: Surface,
    /// Where the report is written by default.
    pub state_dir: PathBuf,
    /// How the learning arm is served.
    pub learning: Served,
    /// How the arm that follows is served.
    pub following: Served,
    /// Rebuilds a version from the policy store.
    pub load_version: LoadVersion,
    pub console: Console,
}

/// Rebuilds the version of this serial.
#[derive(Clone)]
pub struct LoadVersion(pub Arc<dyn Fn(i64) -> BoxFuture<'static, anyhow::Result<Arc<Checkpoint>>> + Send + Sync>);

impl std::fmt::Debug for LoadVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("LoadVersion")
    }
}

/// What the binary's console offers to a view that fills the terminal.
#[derive(Debug, Clone, Copy)]
pub struct Console {
    /// Whether there is a terminal that a view may take.
    pub has_screen: fn() -> bool,
    /// Holds log lines back until the guard is dropped, and prints them then.
    pub hold_log: fn() -> Box<dyn Any + Send>,
    /// The newest held lines, at most this many.
    pub newest_log_lines: fn(usize) -> Vec<String>,
}

/// The rewards of the replayed surface.
#[derive(Debug, Clone)]
pub struct Surface {
    /// Its trajectories are episodes.
    pub is_of_episodes: bool,
    /// Its metric is boolean: accepted or not.
    pub is_boolean: bool,
    pub accept: f64,
    pub reject: f64,
    pub decline: Option<f64>,
    pub horizon_seconds: f64,
}

impl Surface {
    /// The price τ of showing a suggestion: an accept earns 1 − τ, a reject −τ, a decline 0.
    ///
    /// Errors when the surface rewards otherwise, because the demo's rewards would not be the
    /// trainer's.
    fn price(&self) -> anyhow::Result<f64> {
        let tau = -self.reject;
        let fits = self.is_boolean
            && !self.is_of_episodes
            && (self.accept - (1.0 - tau)).abs() < 1e-9
            && self.decline == Some(0.0)
            && 0.0 < tau
            && tau < 1.0;
        ensure!(
            fits,
            "[[ingest.surface]] {:?} has rewards that the demo cannot use: for a price τ of showing a \
             suggestion, between 0 and 1, set accept = 1 − τ, reject = −τ and decline = 0 (such as 0.75, −0.25 and 0)",
            client::SURFACE
        );
        Ok(tau)
    }
}

/// Replays, waits until every generation has its final disposition, prints the table and writes the
/// report and its page.
///
/// Errors when the stack is not up, the corpus is too small, or the report cannot be made or
/// written. A failed request is no error: the report counts it.
pub async fn run(args: Args, mut settings: Settings, pool: PgPool) -> anyhow::Result<()> {
    if let Some(policy) = &args.policy {
        ensure!(
            !policy.contains('/'),
            "--policy {policy}: this is the name of a policy; to start a stack from a folder, use \
             `springtide up --demo --policy {policy}`"
        );
        settings.policy.clone_from(policy);
    }
    if args.surface == args::Surface::Session {
        ensure!(
            !args.watch_streams && !args.demonstrations,
            "--watch-streams and --demonstrations are for --surface completion; leave them out"
        );
        return session::run(args, settings, pool).await;
    }
    let tau = settings.surface.price()?;
    let (plan, others, files) = plan(&args, tau).await?;
    let user_parts = plan.user_parts.clone();
    let scope = Scope {
        policy: settings.policy.clone(),
        since: OffsetDateTime::now_utc(),
    };
    let json = args.report_file(&settings);
    let html = json.with_extension("html");
    ensure!(
        html != json,
        "--report {}: the page is written there; give a name that ends in .json",
        json.display()
    );
    let client = Client::new(settings.clone(), args.temperature)?;
    client.wait_until_ready(READY_PATIENCE).await?;
    let base = measure_base(&args, tau, &settings.base, others).await?;
    eprintln!(
        "{} developers on {files} files, {} pauses a second for {} minutes, seed {}",
        args.corpus.developers,
        args.rate(),
        args.minutes,
        args.seed
    );

    let streams = match args.watch_streams {
        true => Some(watch_streams(&settings).await?),
        false => None,
    };
    let (live, poller) = poll_live(pool.clone(), scope.clone());
    let began = OffsetDateTime::now_utc();
    let started = std::time::Instant::now();
    let progress = replay::replay(client, plan, Display::new(settings.console), live).await;
    let seconds = started.elapsed().as_secs_f64();
    drop(poller);
    let streams = match streams {
        Some(streams) => Some(streams.finish().await),
        None => None,
    };
    eprintln!("waiting for the last horizons to pass (Ctrl-C: do not wait)");
    let settled = unless_interrupted(async {
        tokio::time::sleep(Duration::from_secs_f64(settings.surface.horizon_seconds)).await;
        settle(&pool, &scope).await
    });
    let settled = settled.await.unwrap_or(false);
    let references = match base {
        Some(base) => {
            let length = Duration::from_secs_f64(seconds.min(60.0 * args.minutes));
            let along = served_along(&progress.outcomes, length, args.capability_points);
            let run_seconds = 60.0 * args.minutes;
            references(base, &progress, user_parts, run_seconds, &along, &settings).await
        }
        None => None,
    };

    let parameters = Parameters {
        policy: scope.policy.clone(),
        seed: args.seed,
        minutes: args.minutes,
        rate: args.rate(),
        temperature: args.temperature,
        learning: settings.learning,
        following: settings.following,
        control: args.control,
        users: args.corpus.users,
        developers: args.corpus.developers as usize,
        files,
        corpus: args.corpus.corpus,
        tau,
        horizon_seconds: settings.surface.horizon_seconds,
        silent_share: developer::SILENT_SHARE,
        delay_median_seconds: developer::DELAY_MEDIAN_SECONDS,
        delay_sigma: developer::DELAY_SIGMA,
        completions_in_flight_max: replay::COMPLETIONS_IN_FLIGHT_MAX,
    };
    let mut report = results::collect(&pool, &scope, progress, parameters, (began, seconds), settled).await?;
    report.references = references;
    report.streams = streams;
    println!("{}", report.table());
    if let Some(streams) = &report.streams {
        println!("{}", streams.table());
    }
    if let Some(references) = &report.references {
        println!("{}", references.table());
    }
    write_json(&json, &report)?;
    write(&html, report.page().as_bytes())?;
    println!("{}", report.summary());
    println!("report: {}", file_url(&html)?);
    println!("        {}", json.display());
    Ok(())
}

/// `None`: Ctrl-C came first. (The replay has taken the signal from the system, so nothing else
/// handles it.)
async fn unless_interrupted<T>(work: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        done = work => Some(done),
        _ = tokio::signal::ctrl_c() => None,
    }
}

async fn watch_streams(settings: &Settings) -> anyhow::Result<stream_watch::Watching> {
    let dir = settings.base.clone();
    let base = tokio::task::spawn_blocking(move || Checkpoint::read_dir(&dir));
    stream_watch::start(settings, &base.await.context("read the base")??)
}

/// Tries the base at pauses of users who are not replayed. `None`: no references are wanted.
async fn measure_base(args: &Args, tau: f64, dir: &Path, others: Vec<Vec<FilePart>>) -> anyhow::Result<Option<Base>> {
    if args.reference_pauses == 0 {
        return Ok(None);
    }
    eprintln!("measuring the base at {} pauses of other users", args.reference_pauses);
    let checkpoint = Arc::new(Checkpoint::read_dir(dir)?);
    let args = args.clone();
    let first = args.corpus.developers as usize;
    let measured = tokio::task::spawn_blocking(move || Base::measure(checkpoint, (&others, first), &args, tau));
    Ok(Some(measured.await.context("measure the base")??))
}

/// The reference policies on the learning arm's own pauses, and the capability of versions `along` the
/// run. A failure here must not cost the run its report, so it is only logged.
async fn references(
    base: Base,
    progress: &Progress<Outcome>,
    user_parts: Vec<Vec<FilePart>>,
    run_seconds: f64,
    along: &[VersionAt],
    settings: &Settings,
) -> Option<References> {
    eprintln!(
        "measuring the reference policies at the learning arm's pauses, and {} versions at those of other users: some \
         minutes (Ctrl-C: leave them out)",
        along.len()
    );
    let base = Arc::new(base);
    let (asked, outcomes) = (base.clone(), progress.outcomes.clone());
    let compare = tokio::task::spawn_blocking(move || asked.compare(&outcomes, &user_parts, run_seconds));
    let mut references = match unless_interrupted(compare).await {
        Some(compared) => match compared.context("measure the references").flatten() {
            Ok(references) => references,
            Err(error) => {
                tracing::warn!(error = format!("{error:#}"), "the report has no reference policies");
                return None;
            }
        },
        None => {
            eprintln!("the report has no reference policies");
            return None;
        }
    };
    for (nth, at) in along.iter().enumerate() {
        let is_last = nth + 1 == along.len();
        match unless_interrupted(capability(&base, *at, settings)).await {
            Some(Ok(capability)) if is_last => references.capability = Some(capability),
            Some(Ok(capability)) => references.earlier.push(capability),
            Some(Err(error)) => {
                let (error, version) = (format!("{error:#}"), at.version);
                tracing::warn!(error, version, "the report does not say what this version can");
            }
            None => {
                eprintln!("the report does not say what the other versions can");
                break;
            }
        }
    }
    Some(references)
}

/// Loads a version and tries it.
async fn capability(base: &Arc<Base>, at: VersionAt, settings: &Settings) -> anyhow::Result<Capability> {
    let checkpoint = (settings.load_version.0)(at.version).await?;
    let (base, bar) = (base.clone(), settings.following.probability_min);
    let tried = tokio::task::spawn_blocking(move || base.capability(at, &checkpoint, bar));
    tried.await.context("try the version")?
}

async fn plan(args: &Args, tau: f64) -> anyhow::Result<(Plan, Vec<Vec<FilePart>>, usize)> {
    let Dealt {
        replayed: user_parts,
        others,
        files,
    } = deal(args).await?;
    let length = Duration::from_secs_f64(60.0 * args.minutes);
    let plan = Plan {
        arrivals: Arrivals::new(args.seed, args.rate(), length, user_parts.len()),
        length,
        user_parts,
        seed: args.seed,
        tau,
        shuffle: args.control.then(|| Shuffle::new(args.seed)),
        demonstrations: args.demonstrations,
    };
    Ok((plan, others, files))
}

/// Reads the corpus and deals it out.
async fn deal(args: &Args) -> anyhow::Result<Dealt> {
    let corpus = args.corpus.clone();
    tokio::task::spawn_blocking(move || corpus.deal())
        .await
        .context("read the corpus")?
}

/// Reads the tables in the background, so that a slow query delays no arrival.
fn poll_live(pool: PgPool, scope: Scope) -> (watch::Receiver<Live>, AbortOnDropHandle<()>) {
    let (sender, receiver) = watch::channel(Live::default());
    let task = tokio::spawn(async move {
        loop {
            match queries::live(&pool, &scope).await {
                Ok(live) => drop(sender.send_replace(live)),
                Err(error) => tracing::debug!(%error, "the tables cannot be read now"),
            }
            tokio::time::sleep(POLL_EVERY).await;
        }
    });
    (receiver, AbortOnDropHandle::new(task))
}

/// Waits until no generation is open and the queue of the learning arm is empty or does not change.
/// False: it took too long.
async fn settle(pool: &PgPool, scope: &Scope) -> bool {
    let deadline = tokio::time::Instant::now() + SETTLE_PATIENCE;
    let mut last = None;
    let mut unchanged_since = tokio::time::Instant::now();
    while tokio::time::Instant::now() < deadline {
        match queries::unsettled(pool, scope).await {
            Ok(now) => {
                if last != Some(now) {
                    (last, unchanged_since) = (Some(now), tokio::time::Instant::now());
                }
                if now.open == 0 && (now.queued == 0 || unchanged_since.elapsed() >= SETTLED_AFTER) {
                    return true;
                }
            }
            Err(error) => tracing::warn!(%error, "the tables cannot be read now"),
        }
        tokio::time::sleep(POLL_EVERY).await;
    }
    false
}

fn write_json(path: &Path, report: &impl serde::Serialize) -> anyhow::Result<()> {
    let mut text = serde_json::to_vec_pretty(report).context("write the report as JSON")?;
    text.push(b'\n');
    write(path, &text)
}

fn write(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
    }
    std::fs::write(path, bytes).with_context(|| format!("write {}", path.display()))
}

/// For opening the page in a browser.
fn file_url(path: &Path) -> anyhow::Result<Url> {
    let path = path
        .canonicalize()
        .with_context(|| format!("find {}", path.display()))?;
    Url::from_file_path(&path).map_err(|()| anyhow!("{} has no URL", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Settings {
        pub fn for_tests() -> Self {
            Self {
                serve_url: String::new(),
                ingest_url: String::new(),
                control_url: String::new(),
                api_key: None,
                http: reqwest::Client::new(),
                policy: "demo".to_owned(),
                base: PathBuf::new(),
                surface: surface(0.75, -0.25, Some(0.0)),
                state_dir: PathBuf::new(),
                learning: Served::default(),
                following: Served::default(),
                load_version: LoadVersion(Arc::new(|_| Box::pin(async { Err(anyhow!("there is no store")) }))),
                console: Console {
                    has_screen: || false,
                    hold_log: || Box::new(()),
                    newest_log_lines: |_| Vec::new(),
                },
            }
        }
    }

    fn surface(accept: f64, reject: f64, decline: Option<f64>) -> Surface {
        Surface {
            is_of_episodes: false,
            is_boolean: true,
            accept,
            reject,
            decline,
            horizon_seconds: 3.0,
        }
    }

    #[test]
    fn the_price_of_showing_follows_from_the_rewards_of_the_surface() {
        assert_eq!(surface(0.75, -0.25, Some(0.0)).price().unwrap(), 0.25);
        assert_eq!(surface(0.6, -0.4, Some(0.0)).price().unwrap(), 0.4);
        for (accept, reject, decline) in [(1.0, -0.25, Some(0.0)), (0.75, -0.25, None), (1.0, 0.0, Some(0.0))] {
            let error = surface(accept, reject, decline).price().unwrap_err();
            assert!(error.to_string().contains("accept = 1 − τ"));
        }
    }
}
