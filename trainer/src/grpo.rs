//! Offline runs: GRPO on tasks that a researcher gave, with rollouts from the same fleet that serves users.
//!
//! Rollouts go through the public completions API at low priority and are logged like everything else; grades are feedback
//! events on the log; what is trained on is what arrived in the database. The trainer has no side door into the engine and
//! publishes to the run's own line, never to users. One run at a time.

mod grade;
mod groups;
mod rollout;

use crate::claim::Fenced;
use crate::execute::{Trainer, pause};
use crate::learner::thread::Handle;
use crate::random::Random;
use crate::runs;
use crate::sample::Sample;
use crate::select;
use crate::session::{Adaptation, Session, StepPlan, Stepped};
use anyhow::Context;
use rollout::{Client, Rollout};
use serde_json::json;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

/// How often the queue is looked at, and ended runs are swept.
const IDLE: Duration = Duration::from_secs(1);
/// Sessions of one run that may end in an error one after the other, without a step between them.
const STUMBLES_MAX: u32 = 5;

/// The run cannot be finished; the text is the reason that people read.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Failed(pub String);

/// Executes queued runs until `shutdown`.
pub(crate) async fn run(trainer: &Trainer, shutdown: &CancellationToken) -> anyhow::Result<()> {
    if !trainer.options.offline.enabled {
        return Ok(());
    }
    let learner = Handle::spawn("learner-offline", trainer.options.threads)?;
    let mut stumbles: BTreeMap<Uuid, u32> = BTreeMap::new();
    loop {
        if let Err(error) = turn(trainer, &learner, shutdown, &mut stumbles).await {
            tracing::error!(error = format!("{error:#}"), "could not look after the offline runs");
        }
        if !pause(shutdown, IDLE).await {
            return Ok(());
        }
    }
}

async fn turn(
    trainer: &Trainer,
    learner: &Handle,
    shutdown: &CancellationToken,
    stumbles: &mut BTreeMap<Uuid, u32>,
) -> anyhow::Result<()> {
    let swept = select::sweep_abandoned(&trainer.pool, &trainer.policy).await?;
    if swept > 0 {
        tracing::info!(swept, "dropped rollouts of runs that have ended");
    }
    select::sweep_expired(&trainer.pool).await?;
    let Some(id) = next_run(trainer).await? else {
        return Ok(());
    };
    let Err(error) = execute(trainer, learner, id, shutdown).await else {
        stumbles.remove(&id);
        return Ok(());
    };
    if error.chain().any(|cause| cause.is::<Fenced>()) {
        tracing::info!(run = %id, "the run was ended or taken over while it was executed");
        return Ok(());
    }
    let count = stumbles.entry(id).or_default();
    *count += 1;
    tracing::error!(run = %id, error = format!("{error:#}"), stumbles = *count, "an offline run stumbled");
    if *count >= STUMBLES_MAX || error.chain().any(|cause| cause.is::<Failed>()) {
        stumbles.remove(&id);
        fail(trainer, id, &format!("{error:#}")).await?;
    }
    Ok(())
}

/// The oldest run that an executor left behind, else the oldest queued one.
async fn next_run(trainer: &Trainer) -> Result<Option<Uuid>, sqlx::Error> {
    sqlx::query_scalar!(
        r#"
        select id from run
        where policy = $1 and kind = 'grpo' and status in ('queued', 'running', 'pausing')
        order by status = 'queued', created_at, id
        limit 1
        "#,
        trainer.policy
    )
    .fetch_optional(&trainer.pool)
    .await
}

async fn fail(trainer: &Trainer, run: Uuid, reason: &str) -> anyhow::Result<()> {
    if let Some(claim) = crate::claim::Claim::take(&trainer.pool, run).await? {
        let mut transaction = trainer.pool.begin().await?;
        claim.release(&mut transaction, "failed", Some(reason)).await?;
        transaction.commit().await?;
    }
    Ok(())
}

async fn execute(trainer: &Trainer, learner: &Handle, id: Uuid, shutdown: &CancellationToken) -> anyhow::Result<()> {
    let row = sqlx::query!("select line, config, base_version from run where id = $1", id)
        .fetch_one(&trainer.pool)
        .await?;
    let config: runs::Config = serde_json::from_value(row.config)
        .map_err(|error| Failed(format!("the run's configuration cannot be read: {error}")))?;
    let base = row
        .base_version
        .ok_or_else(|| Failed("the run has no base version".into()))?;
    sqlx::query!(
        "insert into line (policy, line, head) values ($1, $2, $3) on conflict do nothing",
        trainer.policy,
        row.line,
        base
    )
    .execute(&trainer.pool)
    .await?;
    let tasks = sqlx::query_as!(
        grade::Task,
        "select id, prompt, answer from task where run_id = $1 order by id",
        id
    )
    .fetch_all(&trainer.pool)
    .await?;
    let adaptation = config.lora.clone().map(|lora| Adaptation {
        config: lora,
        seed: config.seed,
    });
    let Some(mut session) = Session::open(trainer, learner, id, &row.line, adaptation).await? else {
        return Ok(());
    };
    let client = Client::new(trainer, id, &row.line, &config)?;
    let mut empty_draws = 0;
    while session.steps_done < config.steps {
        if shutdown.is_cancelled() {
            return Ok(());
        }
        match session.claim.requested(&trainer.pool).await?.as_deref() {
            Some("cancel") => return session.release("cancelled", Some("cancelled by request")).await,
            Some(_) => return session.release("paused", Some("paused by request")).await,
            None => {}
        }
        if !wait_until_served(&client, &session, shutdown).await? {
            continue; // stopped or asked to stop: the top of the loop knows which
        }
        let mut random = Random(session.random.unwrap_or(config.seed));
        let drawn = random.choose(tasks.len(), config.tasks_per_step as usize);
        let drawn: Vec<&grade::Task> = drawn.into_iter().filter_map(|i| tasks.get(i)).collect();
        let started = Instant::now();
        let (rollouts, arrived) = tokio::select! {
            drawn = draw(trainer, &session, &client, &config, &drawn) => drawn?,
            wanted = stop_wanted(&session, shutdown) => {
                wanted?;
                continue;
            }
        };
        let gathered = groups::gather(&session, arrived).await?;
        if gathered.samples.is_empty() {
            session.random = Some(random.0);
            empty_draws += 1;
            if empty_draws >= trainer.options.offline.empty_draws_max {
                let why = format!(
                    "no group of the last {empty_draws} draws had rollouts with different rewards: there is nothing to learn from"
                );
                return Err(Failed(why).into());
            }
            continue;
        }
        empty_draws = 0;
        let plan = StepPlan {
            settings: config.step_settings(),
            limits: trainer.options.offline.guards,
            baselines: BTreeMap::new(),
            random: random.0,
            notes: json!({
                "rollouts": rollouts.len(),
                "reward_mean": gathered.reward_mean,
                "dropped": gathered.dropped,
                "rollout_seconds": started.elapsed().as_secs_f64(),
            }),
        };
        session
            .accumulate(gathered.samples, gathered.advantages, plan.settings)
            .await?;
        if let Stepped::Refused = session.step(plan).await? {
            return Ok(());
        }
    }
    let done = format!("{} steps; head is version {}", session.steps_done, session.head);
    session.release("succeeded", Some(&done)).await
}

/// Waits until the fleet answers with the run's head. False: somebody wants the run to stop.
async fn wait_until_served(
    client: &Client<'_>,
    session: &Session<'_>,
    shutdown: &CancellationToken,
) -> anyhow::Result<bool> {
    let patience = Duration::from_secs(session.trainer.options.offline.served_timeout_seconds);
    let started = Instant::now();
    let mut last = String::from("nothing was asked yet");
    while started.elapsed() < patience {
        match client.served_version().await {
            Ok(version) if version == session.head => return Ok(true),
            Ok(version) => last = format!("it answers with version {version}"),
            Err(error) => last = format!("{error:#}"),
        }
        let wanted = session.claim.requested(&session.trainer.pool).await?;
        if wanted.is_some() || !pause(shutdown, Duration::from_millis(250)).await {
            return Ok(false);
        }
    }
    Err(Failed(format!(
        "the fleet did not serve version {} of line {} within {} s: {last}",
        session.head,
        session.line,
        patience.as_secs()
    ))
    .into())
}

/// Rollouts of the drawn tasks, graded, and what of them is in the database.
async fn draw(
    trainer: &Trainer,
    session: &Session<'_>,
    client: &Client<'_>,
    config: &runs::Config,
    tasks: &[&grade::Task],
) -> anyhow::Result<(Vec<Rollout>, Vec<Sample>)> {
    let rollouts = client.roll_out(tasks).await?;
    grade::post(trainer, session.claim.run, config, &rollouts).await?;
    let arrived = arrivals(session, &rollouts, trainer).await?;
    Ok((rollouts, arrived))
}

/// Resolves when the process or the run is to stop: rollouts can take minutes, and nobody should wait for them.
async fn stop_wanted(session: &Session<'_>, shutdown: &CancellationToken) -> anyhow::Result<()> {
    while session.claim.requested(&session.trainer.pool).await?.is_none() {
        if !pause(shutdown, IDLE).await {
            break;
        }
    }
    Ok(())
}

/// Graded rollouts as the database has them; waits until all are there or patience ends.
async fn arrivals(session: &Session<'_>, rollouts: &[Rollout], trainer: &Trainer) -> anyhow::Result<Vec<Sample>> {
    let ids: Vec<Uuid> = rollouts.iter().map(|r| r.generation).collect();
    let patience = Duration::from_secs(trainer.options.offline.arrival_timeout_seconds);
    let started = Instant::now();
    let mut dropped = 0;
    loop {
        let run = session.claim.run;
        let whole = select::rollouts(&trainer.pool, &trainer.payloads, run, &ids, &session.shape)
            .await
            .context("read the rollouts")?;
        if !whole.broken.is_empty() {
            dropped += drop_broken(session, &whole.broken).await?;
        }
        let samples = whole.samples;
        if samples.len() + dropped == ids.len() {
            return Ok(samples);
        }
        if started.elapsed() > patience {
            let missing = ids.len() - dropped - samples.len();
            let message = format!(
                "{missing} of {} graded rollouts did not become trajectories within {} s",
                ids.len(),
                patience.as_secs()
            );
            session.say("warn", &message, json!({})).await?;
            return Ok(samples);
        }
        tokio::time::sleep(Duration::from_millis(trainer.options.poll_ms)).await;
    }
}

/// Drops rollouts whose contexts cannot be put together. Returns how many.
async fn drop_broken(session: &Session<'_>, broken: &BTreeMap<&'static str, Vec<Uuid>>) -> anyhow::Result<usize> {
    let mut transaction = session.trainer.pool.begin().await?;
    session.claim.hold(&mut transaction).await?;
    let mut dropped = 0;
    for (code, ids) in broken {
        dropped += select::drop_all(&mut transaction, session.claim.run, ids, code).await?;
    }
    transaction.commit().await?;
    Ok(usize::try_from(dropped).unwrap_or(usize::MAX))
}
