//! `springtide demo --surface session`: users work with an assistant on one line, for up to four
//! turns, and say only at the end whether it was good. The policy learns from that.
//!
//! [`task`] and [`stats`] are pure. [`start`] tries the base in this process, [`play`] asks the
//! stack.

mod play;
mod report;
mod start;
mod stats;
mod task;

use std::time::Duration;

use anyhow::{Context, ensure};
use artifact::checkpoint::Checkpoint;
use sqlx::PgPool;

use self::{
    report::{Parameters, SessionReport, conclude},
    start::Start,
    stats::{Part, Rewards, Session},
    task::Task,
};
use crate::{
    Args, Settings, Surface,
    client::SESSION_SURFACE,
    developer::FilePart,
    queries,
    random::Draws,
    results::patiently,
    stage::{Replayed, Stage, file_url},
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
    let stage = Stage::set(args, settings, pool).await?;
    let start = measure_base(&stage).await?;
    eprintln!("{start}");
    let replayed = play::play(&stage).await;
    let settled = stage.settle(Duration::ZERO).await;
    let parameters = Parameters {
        setup: stage.setup(),
        turn_signals: stage.args.turn_signals,
        rewards,
        turns_max: task::TURNS_MAX,
        silent_share: task::SILENT_SHARE,
        message_share: task::MESSAGE_SHARE,
        delay_median_seconds: task::DELAY_MEDIAN_SECONDS,
    };
    let report = collect(&stage, &replayed, parameters, start, settled).await?;
    println!("{}", report.table());
    println!("report: {}", file_url(&stage.write_json(&report)?)?);
    Ok(())
}

/// Tries the base at sessions of users who do not take part.
async fn measure_base(stage: &Stage) -> anyhow::Result<Start> {
    let (seed, temperature, sessions) = (stage.args.seed, stage.args.temperature, stage.args.start_sessions);
    eprintln!("trying the base at {sessions} sessions of other users");
    let checkpoint = Checkpoint::read_dir(&stage.settings.base)?;
    let tasks = tasks(&stage.others, stage.user_parts.len(), seed, sessions);
    let measured = tokio::task::spawn_blocking(move || start::measure(&checkpoint, &tasks, temperature, seed));
    measured.await.context("measure the base")?
}

/// `n` sessions of random users, who are numbered from `first`.
fn tasks(user_parts: &[Vec<FilePart>], first: usize, seed: u64, n: usize) -> Vec<(usize, Task)> {
    let mut draws = Draws::new("springtide demo session users 1", &[seed, first as u64]);
    let drawn = (0..n as u64).filter_map(|nth| {
        let user = draws.below(user_parts.len());
        Some((first + user, task::task(&user_parts[user], seed, first + user, nth)?))
    });
    drawn.collect()
}

async fn collect(
    stage: &Stage,
    replayed: &Replayed<Session>,
    parameters: Parameters,
    start: Start,
    settled: bool,
) -> anyhow::Result<SessionReport> {
    let (pool, scope, rewards) = (&stage.pool, &stage.scope, parameters.rewards);
    let sessions = &replayed.progress.outcomes;
    let answered = sessions.iter().flat_map(|session| session.answers.iter().copied());
    let length = stage.length().min(Duration::from_secs_f64(replayed.seconds));
    let whole = Part::of(sessions.iter(), rewards);
    Ok(SessionReport {
        conclusion: conclude(&start, whole.learner, whole.champion),
        start,
        whole,
        halves: Part::halves(sessions, length, rewards),
        episodes: patiently(|| queries::episodes(pool, scope, SESSION_SURFACE)).await?,
        facts: stage.facts(replayed, settled, answered).await?,
        parameters,
    })
}
