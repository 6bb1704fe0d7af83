//! What both demos do around their users: wait for the stack, deal the code out, wait until every
//! generation has its final disposition, read what the tables have of the run, and write the report.

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, anyhow};
use report::number::decimal;
use reqwest::Url;
use serde::Serialize;
use sqlx::PgPool;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};
use uuid::Uuid;

use crate::{
    Args, POLL_EVERY, Settings,
    arrivals::{Arrival, Arrivals},
    client::{Asker, Client},
    developer::FilePart,
    progress::{Counts, Ended, Progress},
    queries::{self, Alarm, FeedbackToServing, Ledger, LoopTotals, Scope, Step},
    replay::replay,
    results::patiently,
    shuffle::Shuffle,
    stats::quantile,
    terminal::View,
    users::Users,
};

/// How long to wait for the stack at the start.
const READY_PATIENCE: Duration = Duration::from_secs(120);
/// How long to wait, after the last horizon, until every generation has its final disposition.
const SETTLE_PATIENCE: Duration = Duration::from_secs(60);
/// If queued rows do not change for this long, they are fewer than a cohort and no step takes them.
const SETTLED_AFTER: Duration = Duration::from_secs(10);

/// A stack that is ready, and the users that are replayed against it.
pub struct Stage {
    pub args: Args,
    pub settings: Settings,
    pub pool: PgPool,
    pub scope: Scope,
    pub client: Client,
    /// Code of each user who is replayed, and of each other one.
    pub user_parts: Vec<Vec<FilePart>>,
    pub others: Vec<Vec<FilePart>>,
    /// Files of the corpus.
    files: usize,
}

/// A replay that is over.
pub struct Replayed<T> {
    pub progress: Progress<T>,
    pub began: OffsetDateTime,
    pub seconds: f64,
}

/// What was asked for, in both demos.
#[derive(Debug, Default, Serialize)]
pub struct Setup {
    pub policy: String,
    pub seed: u64,
    pub minutes: f64,
    pub rate: f64,
    pub temperature: f32,
    /// Answers were permuted: there was nothing to learn.
    pub control: bool,
    pub users: Users,
    pub developers: usize,
    pub files: usize,
    /// `None`: the demo split of the crates that this build fetched.
    pub corpus: Option<PathBuf>,
    pub horizon_seconds: f64,
}

/// What happened, in both demos.
#[derive(Debug, Default, Serialize)]
pub struct Facts {
    /// RFC 3339.
    pub started_at: String,
    /// Length of the replay, without the wait for final dispositions.
    pub seconds: f64,
    /// Ended early by hand.
    pub interrupted: bool,
    #[serde(flatten)]
    pub totals: LoopTotals,
    pub steps_taken: Vec<Step>,
    pub feedback_to_serving_seconds: FeedbackToServing,
    pub ledger: Ledger,
    /// When the figures were taken, no generation was open and no full cohort was queued.
    pub settled: bool,
    pub completion_latency_ms: Latency,
    pub counts: Counts,
    /// Warnings of the realtime run, such as that its arm declines almost everything.
    pub alarms: Vec<Alarm>,
}

#[derive(Debug, Default, Serialize)]
pub struct Latency {
    pub p50: Option<f64>,
    pub p95: Option<f64>,
}

impl Stage {
    /// Reads the corpus, deals it out and waits for the stack.
    pub async fn set(args: Args, settings: Settings, pool: PgPool) -> anyhow::Result<Self> {
        let corpus = args.corpus.clone();
        let dealt = tokio::task::spawn_blocking(move || corpus.deal());
        let dealt = dealt.await.context("read the corpus")??;
        let client = Client::new(settings.clone(), args.temperature);
        let scope = Scope {
            policy: settings.policy.clone(),
            since: OffsetDateTime::now_utc(),
        };
        client.wait_until_ready(READY_PATIENCE).await?;
        Ok(Self {
            args,
            settings,
            pool,
            scope,
            client,
            user_parts: dealt.replayed,
            others: dealt.others,
            files: dealt.files,
        })
    }

    pub fn length(&self) -> Duration {
        Duration::from_secs_f64(60.0 * self.args.minutes)
    }

    /// With `--control`: permutes the answers.
    pub fn shuffle(&self) -> Option<Shuffle> {
        self.args.control.then(|| Shuffle::new(self.args.seed))
    }

    /// Who asks. The seed is part of the name, so that another seed puts other people into the arms.
    pub fn asker(&self, arrival: &Arrival, session_id: Uuid) -> Asker {
        Asker {
            user: format!("s{}-u{:04}", self.args.seed, arrival.user),
            session_id,
            surface: self.args.surface.name(),
        }
    }

    /// Has the users begin, as [`replay`] says.
    pub async fn replay<T: Send + 'static, F: Future<Output = Ended<T>> + Send + 'static>(
        &self,
        open_max: usize,
        view: &mut impl View<T>,
        begin: impl FnMut(Arrival) -> Option<F>,
    ) -> Replayed<T> {
        let (args, users) = (&self.args, self.user_parts.len());
        eprintln!(
            "{users} users on {} files, {} {}s a second for {} minutes, seed {}",
            self.files,
            args.rate(),
            args.surface.name(),
            args.minutes,
            args.seed
        );
        let began = OffsetDateTime::now_utc();
        let started = Instant::now();
        let arrivals = Arrivals::new(args.seed, args.rate(), self.length(), users);
        let progress = replay(arrivals, open_max, view, begin).await;
        let seconds = started.elapsed().as_secs_f64();
        Replayed {
            progress,
            began,
            seconds,
        }
    }

    /// Waits until, after `horizon`, no generation is open and the queue of the learning arm is empty or
    /// does not change. False: it took too long, or Ctrl-C came.
    pub async fn settle(&self, horizon: Duration) -> bool {
        eprintln!("waiting for the last trajectories to close (Ctrl-C: do not wait)");
        let settled = unless_interrupted(async {
            tokio::time::sleep(horizon).await;
            self.try_settle().await
        });
        settled.await.unwrap_or(false)
    }

    async fn try_settle(&self) -> bool {
        let deadline = Instant::now() + SETTLE_PATIENCE;
        let mut last = None;
        let mut unchanged_since = Instant::now();
        while Instant::now() < deadline {
            match queries::unsettled(&self.pool, &self.scope).await {
                Ok(now) => {
                    if last != Some(now) {
                        (last, unchanged_since) = (Some(now), Instant::now());
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

    pub fn setup(&self) -> Setup {
        let (args, corpus) = (&self.args, &self.args.corpus);
        Setup {
            policy: self.scope.policy.clone(),
            seed: args.seed,
            minutes: args.minutes,
            rate: args.rate(),
            temperature: args.temperature,
            control: args.control,
            users: corpus.users,
            developers: self.user_parts.len(),
            files: self.files,
            corpus: corpus.corpus.clone(),
            horizon_seconds: self.settings.surface.horizon_seconds,
        }
    }

    /// `answered`: the generations that the demo got as answers, and how long each took.
    pub async fn facts<T>(
        &self,
        replayed: &Replayed<T>,
        settled: bool,
        answered: impl Iterator<Item = (Uuid, Duration)>,
    ) -> anyhow::Result<Facts> {
        let (pool, scope, began) = (&self.pool, &self.scope, replayed.began);
        let (ids, latencies): (Vec<Uuid>, Vec<f64>) =
            answered.map(|(id, latency)| (id, 1e3 * latency.as_secs_f64())).unzip();
        Ok(Facts {
            started_at: scope.since.format(&Rfc3339).context("format the start of the run")?,
            seconds: replayed.seconds,
            interrupted: replayed.progress.interrupted,
            totals: patiently(|| queries::loop_totals(pool, scope)).await?,
            steps_taken: patiently(|| queries::steps(pool, scope, began)).await?,
            feedback_to_serving_seconds: patiently(|| queries::feedback_to_serving(pool, scope)).await?,
            ledger: patiently(|| queries::ledger(pool, scope, &ids)).await?,
            settled,
            completion_latency_ms: Latency {
                p50: quantile(latencies.clone(), 0.5),
                p95: quantile(latencies, 0.95),
            },
            counts: replayed.progress.counts.clone(),
            alarms: patiently(|| queries::alarms(pool, scope, began)).await?,
        })
    }

    /// Writes the report as JSON. Returns its file.
    pub fn write_json(&self, report: &impl Serialize) -> anyhow::Result<PathBuf> {
        let path = self.args.report_file(&self.settings);
        let mut text = serde_json::to_vec_pretty(report).context("write the report as JSON")?;
        text.push(b'\n');
        write(&path, &text)?;
        Ok(path)
    }
}

/// Without a newline at the end.
impl std::fmt::Display for Facts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let waits = &self.feedback_to_serving_seconds;
        write!(
            f,
            "feedback to serving: p50 {} s, p95 {} s (n {}); {} steps\n{}",
            decimal(waits.p50, 1),
            decimal(waits.p95, 1),
            waits.served,
            self.totals.steps,
            self.ledger,
        )?;
        self.alarms.iter().try_for_each(|alarm| write!(f, "\n{alarm}"))
    }
}

/// `None`: Ctrl-C came first. (The replay has taken the signal from the system, so nothing else
/// handles it.)
pub async fn unless_interrupted<T>(work: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        done = work => Some(done),
        _ = tokio::signal::ctrl_c() => None,
    }
}

pub fn write(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
    }
    std::fs::write(path, bytes).with_context(|| format!("write {}", path.display()))
}

/// For opening the report in a browser.
pub fn file_url(path: &Path) -> anyhow::Result<Url> {
    let path = path
        .canonicalize()
        .with_context(|| format!("find {}", path.display()))?;
    Url::from_file_path(&path).map_err(|()| anyhow!("{} has no URL", path.display()))
}
