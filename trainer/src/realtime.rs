//! The realtime run: production's trajectories become versions of the line that `champion` follows.
//!
//! It is always on-policy: only what the head sampled is trained on. When a release moves the alias elsewhere, the line is
//! re-based on the version that serves (a new branch, a fresh optimiser); when the alias is pinned, training would be off
//! policy, so the run pauses visibly and goes on by itself once the alias follows again. A guard's breach or a person also
//! pause it; those wait for a person.
//!
//! Most of a step is computed while its cohort fills: what an advantage is compared with is known before the cohort is, so
//! each trajectory's gradient is added as soon as the trajectory may join. A pause, a re-base or an error throws the sums
//! away; the rows are as they were.

mod standing;

use crate::advantage;
use crate::claim::Fenced;
use crate::execute::{Trainer, pause};
use crate::learner::thread::Handle;
use crate::options::BaselineKind;
use crate::sample::Sample;
use crate::select::{self, Rules};
use crate::session::{Adaptation, Session, StepPlan, Stepped};
use futures::FutureExt;
use serde_json::json;
use sqlx::postgres::PgListener;
use standing::Standing;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

/// How far back each look decides what is set aside, and how often: what was decided is only known by going through it, so the
/// further back the seldomer. A run that is opened or re-based looks at everything.
const LOOKS: [(Option<Duration>, Duration); 3] = [
    (None, Duration::from_secs(6 * 3600)),
    (Some(Duration::from_secs(24 * 3600)), Duration::from_secs(600)),
    (Some(Duration::from_secs(15 * 60)), Duration::ZERO),
];
const BACKOFF_MIN: Duration = Duration::from_millis(500);
const BACKOFF_MAX: Duration = Duration::from_secs(15);
/// How often a run that cannot go on is looked at again.
const IDLE: Duration = Duration::from_millis(500);
/// On which the database says that trajectories have closed.
const CLOSED: &str = "springtide_trajectory";

/// Why a session ended without an error.
enum End {
    Shutdown,
    /// Paused, or nothing to claim: look again later.
    Idle,
}

/// Executes the realtime run until `shutdown`. Errors are logged, and the run is taken up again from the database.
pub(crate) async fn run(trainer: &Trainer, shutdown: &CancellationToken) -> anyhow::Result<()> {
    if !trainer.options.realtime.enabled {
        return Ok(());
    }
    let learner = Handle::spawn("learner-realtime", trainer.options.threads)?;
    let mut backoff = BACKOFF_MIN;
    loop {
        let wait = match session(trainer, &learner, shutdown).await {
            Ok(End::Shutdown) => return Ok(()),
            Ok(End::Idle) => {
                backoff = BACKOFF_MIN;
                IDLE
            }
            Err(error) if error.chain().any(|cause| cause.is::<Fenced>()) => {
                tracing::warn!("the realtime run was taken over or ended; looking again");
                IDLE
            }
            Err(error) => {
                tracing::error!(
                    error = format!("{error:#}"),
                    "the realtime run stumbled; taking it up again from the database"
                );
                backoff = (backoff * 2).min(BACKOFF_MAX);
                backoff
            }
        };
        if !pause(shutdown, wait).await {
            return Ok(());
        }
    }
}

async fn session(trainer: &Trainer, learner: &Handle, shutdown: &CancellationToken) -> anyhow::Result<End> {
    let options = &trainer.options.realtime;
    let run = standing::ensure_run(trainer).await?;
    if !standing::may_run(trainer, run).await? {
        return Ok(End::Idle);
    }
    // the run's own bits: a restart before the first step begins with the same factors
    let adaptation = options.lora.clone().map(|config| Adaptation {
        config,
        seed: run.as_u128() as u64,
    });
    let Some(mut session) = Session::open(trainer, learner, run, &options.line, adaptation).await? else {
        return Ok(End::Idle);
    };
    trainer.publisher.announce(session.head).await;
    let size = options.cohort_size as usize;
    let poll = Duration::from_millis(trainer.options.poll_ms);
    let mut closed = PgListener::connect_with(&trainer.pool).await?;
    closed.listen(CLOSED).await?;
    let mut set_aside: BTreeMap<String, u64> = BTreeMap::new();
    let mut looked: [Option<Instant>; LOOKS.len()] = Default::default();
    loop {
        if shutdown.is_cancelled() {
            return Ok(End::Shutdown);
        }
        if session.claim.requested(&trainer.pool).await?.is_some() {
            session.release("paused", Some("paused by request")).await?;
            return Ok(End::Idle);
        }
        match standing::of_alias(trainer, session.branch).await? {
            Standing::Follows => {}
            Standing::Away(reason) => {
                session.release("paused", Some(&reason)).await?;
                return Ok(End::Idle);
            }
            Standing::Rebase { branch, version } => {
                rebase(&mut session, branch, version).await?;
                looked = Default::default();
                continue;
            }
        }
        let due = |(at, (_, every)): &(&Option<Instant>, _)| at.is_none_or(|at| at.elapsed() >= *every);
        let depth = looked
            .iter()
            .zip(LOOKS)
            .position(|look| due(&look))
            .unwrap_or(LOOKS.len() - 1);
        while let Some(news) = closed.recv().now_or_never() {
            news?; // the look that follows sees what it was about
        }
        let joined = session.coming.generations();
        let rules = Rules {
            policy: &trainer.policy,
            alias: &options.alias,
            head: session.head,
            shape: &session.shape,
            room: size.saturating_sub(joined.len()) as i64,
            joined: &joined,
        };
        let selection = select::next(&trainer.pool, &trainer.payloads, &session.claim, &rules, LOOKS[depth].0).await?;
        // A deep look is a shallow one too.
        looked[depth..].fill(Some(Instant::now()));
        for (code, count) in selection.set_aside {
            metrics::counter!("springtide_train_set_aside_total", "code" => code.clone()).increment(count);
            *set_aside.entry(code).or_default() += count;
        }
        metrics::gauge!("springtide_train_ready_trajectories").set((joined.len() + selection.ready.len()) as f64);
        if selection.ready.is_empty() {
            tokio::select! {
                () = shutdown.cancelled() => return Ok(End::Shutdown),
                () = tokio::time::sleep(poll) => {}
                news = closed.recv() => drop(news?),
            }
            continue;
        }
        accumulate(&mut session, selection.ready).await?;
        if session.coming.len() < size {
            continue;
        }
        let set_aside = std::mem::take(&mut set_aside);
        if let Stepped::Refused = step(&mut session, &set_aside).await? {
            return Ok(End::Idle);
        }
    }
}

async fn accumulate(session: &mut Session<'_>, samples: Vec<Sample>) -> anyhow::Result<()> {
    let options = &session.trainer.options.realtime;
    let rewards: Vec<f64> = samples.iter().map(|s| s.reward).collect();
    let advantages = match options.baseline {
        BaselineKind::Ema => {
            let classes: Vec<&str> = samples.iter().map(|s| s.class.as_str()).collect();
            advantage::against(&session.baselines, &classes, &rewards)
        }
        BaselineKind::Zero => advantage::zero(&rewards),
    };
    session.accumulate(samples, advantages, options.step).await
}

async fn step(session: &mut Session<'_>, set_aside: &BTreeMap<String, u64>) -> anyhow::Result<Stepped> {
    let options = &session.trainer.options.realtime;
    let mut baselines = session.baselines.clone();
    if options.baseline == BaselineKind::Ema {
        let (classes, rewards) = session.coming.classes_and_rewards();
        advantage::observe(&mut baselines, &classes, &rewards);
    }
    let cohort = session.coming.generations();
    let plan = StepPlan {
        settings: options.step,
        limits: options.guards,
        baselines,
        random: 0,
        // first and last generation, for people who follow a sample
        notes: json!({"set_aside": set_aside, "cohort": {"first": cohort.first(), "last": cohort.last()}}),
    };
    session.step(plan).await
}

/// The line stands where the alias stands; whatever other versions sampled will be dropped as stale.
async fn rebase(session: &mut Session<'_>, branch: i32, version: i64) -> anyhow::Result<()> {
    let from = session.head;
    let message = format!(
        "re-based: branch {branch} goes on from version {version} instead of {from}; the optimiser starts afresh"
    );
    tracing::warn!(run = %session.claim.run, from, version, branch, "re-basing the line on the version that serves");
    let mut transaction = session.trainer.pool.begin().await?;
    session.claim.hold(&mut transaction).await?;
    session.move_line(&mut transaction, branch, version).await?;
    let data = json!({"branch": branch, "from": from, "to": version});
    crate::claim::event(&mut transaction, session.claim.run, "warn", &message, &data).await?;
    transaction.commit().await?;
    session.branch = branch;
    session.head = version;
    session.load().await
}
