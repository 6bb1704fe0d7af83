//! The realtime run: production's trajectories become versions of the line that `learner` follows.
//!
//! It is on-policy: it trains only on what the head sampled. Only of episodes it also takes turns of a
//! few versions before, if `staleness_max` says so.
//! - A release that moves the alias re-bases the line on the version that serves: a new branch and
//!   a fresh optimizer.
//! - A pinned alias makes training off-policy, so the run pauses, and continues by itself when the
//!   alias follows again.
//! - Several refused cohorts in a row, a fault of all samplers, or a person also pause the run. It
//!   then waits for a person. One bad sample never does: it is quarantined, and the others go on.
//!
//! Most of a step is computed while its cohort fills. Baselines are known before the cohort is, so
//! the gradient of each trajectory is added as soon as it joins. A pause, a re-base or an error
//! drops the sums; the rows are unchanged.

mod admission;
mod alias;

use crate::executor::{Executor, StepInputs, StepOutcome, Trains};
use crate::learn::learner::thread::Handle;
use crate::quarantine;
use crate::share_alarm::{CAPPED, ShareAlarm, UNPROVEN};
use crate::trainer::{Trainer, pause};
use crate::typed;
use admission::{Candidate, Joining};
use alias::{AliasState, Announced};
use futures::FutureExt;
use runs::advantage::Baselines;
use runs::claim::{self, Claim, Fenced, append_event};
use runs::options::{REALTIME_LINE, Realtime};
use runs::publish;
use runs::run::Status;
use runs::sample::{Sample, Trajectory};
use runs::select::caps::{self, Member, Recent};
use runs::select::{self, AnswerTimes, Answers, Criteria, provenance};
use serde_json::json;
use sqlx::postgres::PgListener;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};
use time::OffsetDateTime;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

/// How far back a poll looks for trajectories to exclude, and how often. A scan reads all rows of
/// its span, so longer spans are scanned less often. A run that is opened or re-based scans
/// everything first.
const SCANS: [(Option<Duration>, Duration); 3] = [
    (None, Duration::from_secs(6 * 3600)),
    (Some(Duration::from_secs(24 * 3600)), Duration::from_secs(600)),
    (Some(Duration::from_secs(15 * 60)), Duration::ZERO),
];
const BACKOFF_MIN: Duration = Duration::from_millis(500);
const BACKOFF_MAX: Duration = Duration::from_secs(15);
/// How often a run that cannot continue is checked.
const IDLE: Duration = Duration::from_millis(500);
/// How often the time that answers take is read again.
const TIMED_EVERY: Duration = Duration::from_secs(5);
/// The channel on which the database announces closed trajectories.
pub(crate) const CLOSED_CHANNEL: &str = "springtide_trajectory";

/// Why an execution ended without an error.
enum End {
    Shutdown,
    /// Paused, or nothing to claim: try again later.
    Idle,
}

/// Executes the realtime run until `shutdown`. After an error the run is opened again from the
/// database.
pub(crate) async fn run(trainer: &Trainer, shutdown: &CancellationToken) -> anyhow::Result<()> {
    if !trainer.options.realtime.enabled {
        return Ok(());
    }
    let learner = Handle::spawn("learner-realtime", trainer.computing.clone())?;
    let mut backoff = BACKOFF_MIN;
    loop {
        let wait = match execute(trainer, &learner, shutdown).await {
            Ok(End::Shutdown) => return Ok(()),
            Ok(End::Idle) => {
                backoff = BACKOFF_MIN;
                IDLE
            }
            Err(error) if error.chain().any(|cause| cause.is::<Fenced>()) => {
                tracing::warn!("the realtime run was taken over or ended; checking again");
                IDLE
            }
            Err(error) => {
                tracing::error!(
                    error = format!("{error:#}"),
                    "the realtime run failed; opening it again from the database"
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

async fn execute(trainer: &Trainer, learner: &Handle, shutdown: &CancellationToken) -> anyhow::Result<End> {
    let options = &trainer.options.realtime;
    let pool = &trainer.pool;
    let run = runs::realtime::ensure(pool, &trainer.policy, options).await?;
    if !alias::may_run(trainer, run).await? {
        return Ok(End::Idle);
    }
    // seeded by the run's id: a restart before the first step starts with the same factors
    let trains = Trains::of(&options.trainer, options.lora.as_ref(), run.as_u128() as u64);
    if publish::line(pool, &trainer.policy, REALTIME_LINE).await?.is_none() {
        return Ok(End::Idle);
    }
    let Some(claim) = Claim::take(pool, run).await? else {
        return Ok(End::Idle);
    };
    let opened = Executor::open(trainer, learner, claim, REALTIME_LINE, trains, options.guards);
    let Some(mut executor) = opened.await? else {
        return Ok(End::Idle);
    };
    if options.demonstration_share_max > 0.0
        && let Err(why) = typed::Encoder::new(&executor.model_limits)
    {
        let reason = format!("{why}; or set trainer.realtime.demonstration_share_max to 0, then resume the run");
        executor.release(Status::Paused, &reason).await?;
        return Ok(End::Idle);
    }
    trainer.publisher.announce(executor.head).await;
    let poll = Duration::from_millis(trainer.options.poll_ms);
    let mut closed = PgListener::connect_with(&trainer.pool).await?;
    closed.listen(CLOSED_CHANNEL).await?;
    let mut set_aside: BTreeMap<String, u64> = BTreeMap::new();
    let mut recent = trained(trainer, &executor).await?;
    let mut announced = Announced::open(&trainer.pool, &executor.claim).await?;
    let mut unproven = ShareAlarm::open(pool, run, UNPROVEN).await?;
    let mut capped = ShareAlarm::open(pool, run, CAPPED).await?;
    let mut versions: Vec<i64> = Vec::new();
    let mut answer_times = AnswerTimes::default();
    let mut timed: Option<Instant> = None;
    let mut scanned: [Option<Instant>; SCANS.len()] = Default::default();
    // somebody may have withdrawn the consent, and weighs nothing then
    let mut has_leavers = false;
    loop {
        if shutdown.is_cancelled() {
            return Ok(End::Shutdown);
        }
        if executor.claim.requested(&trainer.pool).await?.is_some() {
            executor.release(Status::Paused, claim::PAUSED).await?;
            return Ok(End::Idle);
        }
        let (alias, state) = alias::state(trainer, executor.branch).await?;
        match state {
            AliasState::Follows => {
                let (claim, steps_done) = (&executor.claim, executor.steps_done);
                announced
                    .learns_from(&trainer.pool, claim, alias, &options.other_arms, steps_done)
                    .await?;
            }
            AliasState::Waits(obstacle) => {
                announced.waits(&trainer.pool, &executor.claim, &obstacle).await?;
                if !pause(shutdown, IDLE).await {
                    return Ok(End::Shutdown);
                }
                continue;
            }
            AliasState::Elsewhere(place) => {
                let reason = format!("{alias} {place}; the run goes on when it follows line {REALTIME_LINE} again");
                runs::realtime::wait_for_alias(pool, &executor.claim, &reason).await?;
                return Ok(End::Idle);
            }
            AliasState::Rebase { branch, version } => {
                rebase(&mut executor, branch, version).await?;
                recent = trained(trainer, &executor).await?;
                scanned = Default::default();
                continue;
            }
        }
        while let Some(notification) = closed.recv().now_or_never() {
            notification?; // the poll below sees its row
        }
        if executor.awaits_commit() {
            match executor.committed().await? {
                StepOutcome::Waiting => tokio::select! {
                    () = shutdown.cancelled() => return Ok(End::Shutdown),
                    () = tokio::time::sleep(poll) => {}
                },
                StepOutcome::Paused => return Ok(End::Idle),
                // its trainer may have dropped some, who then used up no cap
                StepOutcome::Published | StepOutcome::Empty | StepOutcome::Refused => {
                    recent = trained(trainer, &executor).await?;
                    has_leavers = false;
                }
            }
            continue;
        }
        let size = executor.cohort.size(options);
        let arms = options.arms(alias);
        let due = |(at, (_, every)): (&Option<Instant>, (_, Duration))| at.is_none_or(|at| at.elapsed() >= every);
        let scan = scanned.iter().zip(SCANS).position(due).unwrap_or(SCANS.len() - 1);
        if timed.is_none_or(|at| at.elapsed() >= TIMED_EVERY) {
            answer_times =
                select::answer_times(&trainer.pool, &trainer.policy, &arms, options.answer_seconds_max).await?;
            timed = Some(Instant::now());
        }
        if versions.first() != Some(&executor.head) {
            let staleness_max = options.staleness_max;
            versions = select::versions(&trainer.pool, &trainer.policy, executor.head, staleness_max).await?;
        }
        recent.forget_before(OffsetDateTime::now_utc() - caps::MEMORY);
        let joined = executor.cohort.last_generations();
        let criteria = Criteria {
            policy: &trainer.policy,
            arms: &arms,
            answers: match options.step.loss.reads_own_probabilities() {
                true => Answers::Judged,
                false => Answers::Sampled,
            },
            versions: &versions,
            credit: options.credit,
            discount: options.discount,
            trajectory_tokens_max: options.trajectory_tokens_max,
            model_limits: &executor.model_limits,
            room: executor.cohort.room(size),
            joined: &joined,
            exhausted: &recent.exhausted(),
            answer_times: &answer_times,
        };
        let (since, _) = SCANS[scan];
        // It only keeps the books: these trajectories are never selected.
        if scan + 1 < SCANS.len() {
            let (policy, claim) = (&trainer.policy, &executor.claim);
            let dropped = select::drop_without_consent(&trainer.pool, policy, claim, since).await?;
            has_leavers |= dropped > 0 || since.is_none();
            if dropped > 0 {
                count(&mut set_aside, BTreeMap::from([("tenant_without_consent", dropped)]));
            }
        }
        let mut selection = select::next(&trainer.pool, &trainer.payloads, &executor.claim, &criteria, since).await?;
        scanned[scan..].fill(Some(Instant::now())); // a scan covers the shorter ones
        if let Some((last, tokens)) = selection.too_large {
            let message = format!(
                "dropped {} turns of sessions that are too large: the one that ends with {last} has {tokens} tokens, each \
                 turn with its context, and trainer.realtime.trajectory_tokens_max is {}",
                selection.set_aside.get(select::TOO_LARGE).copied().unwrap_or(0),
                options.trajectory_tokens_max
            );
            tracing::warn!(%run, line = executor.line, "{message}");
            executor.append_event("warn", &message).await?;
        }
        unproven.record(selection.ready.iter().flatten().count() as u64, false);
        unproven.record(sum(&selection.set_aside, provenance::is_code), true);
        unproven
            .watch(pool, run, REALTIME_LINE, options.alarms.unproven_share_max)
            .await?;
        let is_quarantined = |code: &str| code.starts_with(quarantine::PREFIX);
        let quarantined = &mut executor.quarantine.alarm;
        quarantined.record(sum(&selection.set_aside, is_quarantined), true);
        capped.record(sum(&selection.set_aside, caps::is_code), true);
        count(&mut set_aside, selection.set_aside);
        let places = (options.demonstration_share_max * f64::from(options.cohort_size)) as usize;
        let (limits, taken) = (&executor.model_limits, executor.cohort.typed());
        typed::take_places(pool, limits, &mut selection.ready, taken, places).await?;
        metrics::gauge!("springtide_train_ready_trajectories").set((joined.len() + selection.ready.len()) as f64);
        let is_full = |executor: &Executor<'_>| {
            let cohort = &executor.cohort;
            cohort.len() > 0 && cohort.room(cohort.size(options)) == 0
        };
        if selection.ready.is_empty() && !is_full(&executor) {
            watch(&mut executor, &mut capped).await?;
            tokio::select! {
                () = shutdown.cancelled() => return Ok(End::Shutdown),
                () = tokio::time::sleep(poll) => {}
                notification = closed.recv() => drop(notification?),
            }
            continue;
        }
        let members = executor.cohort.generations().len();
        let dropped = join(&mut executor, selection.ready, &mut recent).await?;
        capped.record((executor.cohort.generations().len() - members) as u64, false);
        capped.record(sum(&dropped, caps::is_code), true);
        count(&mut set_aside, dropped);
        watch(&mut executor, &mut capped).await?;
        if let Some(reason) = executor.quarantine.systemic(2 * options.cohort_size as usize) {
            executor.release(Status::Paused, &reason).await?;
            return Ok(End::Idle);
        }
        if !is_full(&executor) {
            continue;
        }
        metrics::gauge!("springtide_train_user_share_max").set(recent.largest_user_share());
        metrics::gauge!("springtide_train_users").set(recent.users() as f64);
        let set_aside = std::mem::take(&mut set_aside);
        match step(&mut executor, &set_aside).await? {
            // who was in a refused cohort has used up that part of the cap
            StepOutcome::Refused => recent.use_up(OffsetDateTime::now_utc()),
            StepOutcome::Published if !has_leavers => recent.use_up(OffsetDateTime::now_utc()),
            // reads many rows, so this is rare
            StepOutcome::Published | StepOutcome::Empty => {
                recent = trained(trainer, &executor).await?;
                has_leavers = false;
            }
            StepOutcome::Waiting => {}
            StepOutcome::Paused => return Ok(End::Idle),
        }
    }
}

/// What the run has trained on lately.
async fn trained(trainer: &Trainer, executor: &Executor<'_>) -> Result<Recent, sqlx::Error> {
    select::trained(&trainer.pool, executor.claim.run, trainer.options.realtime.caps).await
}

/// Begins or ends the alarms on samples that were quarantined, or dropped by a cap.
async fn watch(executor: &mut Executor<'_>, capped: &mut ShareAlarm) -> sqlx::Result<()> {
    let (pool, run, alarms) = (
        &executor.trainer.pool,
        executor.claim.run,
        executor.trainer.options.realtime.alarms,
    );
    let quarantined = &mut executor.quarantine.alarm;
    quarantined
        .watch(pool, run, &executor.line, alarms.quarantine_share_max)
        .await?;
    capped.watch(pool, run, &executor.line, alarms.capped_share_max).await
}

/// How many generations have such a code.
fn sum<K: AsRef<str>>(by_code: &BTreeMap<K, u64>, is_code: impl Fn(&str) -> bool) -> u64 {
    let of_code = by_code.iter().filter(|(code, _)| is_code(code.as_ref()));
    of_code.map(|(_, count)| count).sum()
}

/// Counts generations that were set aside, by code.
fn count<K: Into<String>>(set_aside: &mut BTreeMap<String, u64>, by_code: BTreeMap<K, u64>) {
    for (code, count) in by_code {
        let code = code.into();
        metrics::counter!("springtide_train_set_aside_total", "code" => code.clone()).increment(count);
        *set_aside.entry(code).or_default() += count;
    }
}

/// The samples of a trajectory with their advantages.
fn with_advantages(samples: Vec<Sample>, options: &Realtime, baselines: &Baselines) -> Candidate {
    let credited = samples.iter().map(|sample| {
        let Sample {
            class, reward, turn, ..
        } = sample;
        let credited = options.credit.of(options.discount, class, *reward, turn.as_ref());
        (credited.baseline, credited.value)
    });
    let (classes, values): (Vec<String>, Vec<f64>) = credited.unzip();
    let advantages = options.baseline.advantages(baselines, &classes, &values);
    let judged = samples.into_iter().zip(advantages);
    judged
        .map(|(sample, advantage)| match sample.typed {
            Some(_) => (sample, 1.0), // right, whatever became of what was sampled
            None => (sample, advantage),
        })
        .collect()
}

/// Adds trajectories to the cohort. Returns how many generations were dropped instead, by code.
async fn join(
    executor: &mut Executor<'_>,
    trajectories: Vec<Vec<Sample>>,
    recent: &mut Recent,
) -> anyhow::Result<BTreeMap<&'static str, u64>> {
    let options = &executor.trainer.options.realtime;
    let mut candidates: Vec<Candidate> = trajectories
        .into_iter()
        .map(|samples| with_advantages(samples, options, &executor.baselines))
        .collect();
    let size = executor.cohort.size(options);
    let mut dropped = BTreeMap::new();
    loop {
        let admission = admission::admit(candidates, &executor.cohort, size, recent);
        executor.cohort.leave_out(admission.rewards_without_signal);
        let mut ids_by_code = BTreeMap::from([("no_signal", admission.without_signal)]);
        let first_turns = admission.joining.iter().filter_map(|joining| joining.turns.first());
        let joined: Vec<Trajectory> = first_turns.map(|(sample, _)| sample.trajectory()).collect();
        let quarantined = accumulate(executor, admission.joining, recent).await?;
        *dropped.entry(quarantine::LOGPROB).or_default() += quarantined;
        candidates = vec![];
        for (candidate, code) in admission.capped {
            let is_rest = || {
                candidate
                    .first()
                    .is_some_and(|(sample, _)| joined.contains(&sample.trajectory()))
            };
            // Bad samples give their places back, perhaps to those whose user they named. The rest of
            // a trajectory of which turns have joined would count as another one.
            if quarantined > 0 && !is_rest() {
                candidates.push(candidate);
            } else {
                let ids = candidate.iter().map(|(sample, _)| sample.generation);
                ids_by_code.entry(code).or_default().extend(ids);
            }
        }
        ids_by_code.retain(|_, ids| !ids.is_empty());
        for (code, count) in executor.drop_generations(&ids_by_code).await? {
            *dropped.entry(code).or_default() += count;
        }
        if candidates.is_empty() {
            dropped.retain(|_, count| *count > 0);
            return Ok(dropped);
        }
    }
}

/// Adds trajectories within the caps to the cohort. Quarantined generations use up no cap. Returns how
/// many there were.
async fn accumulate(executor: &mut Executor<'_>, joining: Vec<Joining>, recent: &mut Recent) -> anyhow::Result<u64> {
    if joining.is_empty() {
        return Ok(0);
    }
    let options = &executor.trainer.options.realtime;
    let mut members: Vec<(Member, Vec<(Uuid, usize)>)> = Vec::new();
    let (mut samples, mut advantages) = (Vec::new(), Vec::new());
    for Joining { turns, member } in joining {
        let tokens = turns
            .iter()
            .map(|(sample, _)| (sample.generation, caps::tokens(sample)));
        members.push((member, tokens.collect()));
        for (sample, advantage) in turns {
            samples.push(sample);
            advantages.push(advantage);
        }
    }
    let quarantined = executor
        .accumulate(samples, advantages, options.step, options.guards)
        .await?;
    let quarantined: BTreeSet<Uuid> = quarantined.ids.into_iter().collect();
    for (member, turns) in &members {
        let bad = turns.iter().filter(|(id, _)| quarantined.contains(id));
        let bad_tokens: Vec<usize> = bad.map(|(_, tokens)| *tokens).collect();
        if !bad_tokens.is_empty() {
            recent.withdraw(member);
        }
        if !bad_tokens.is_empty() && bad_tokens.len() < turns.len() {
            recent.add(Member {
                from: member.from.clone(),
                generations: member.generations - bad_tokens.len(),
                tokens: member.tokens - bad_tokens.iter().sum::<usize>(),
            });
        }
    }
    Ok(quarantined.len() as u64)
}

async fn step(executor: &mut Executor<'_>, set_aside: &BTreeMap<String, u64>) -> anyhow::Result<StepOutcome> {
    let options = &executor.trainer.options.realtime;
    let mut baselines = executor.baselines.clone();
    let (classes, values) = executor.cohort.returns(options.credit, options.discount);
    options.baseline.update(&mut baselines, &classes, &values);
    let cohort = executor.cohort.generations();
    let inputs = StepInputs {
        settings: options.step,
        limits: options.guards,
        baselines,
        random: 0,
        notes: json!({"set_aside": set_aside, "cohort": {"first": cohort.first(), "last": cohort.last()}}),
    };
    executor.step(inputs).await
}

/// Moves the line to the version that the alias serves. Samples of other versions are dropped later
/// as stale.
async fn rebase(executor: &mut Executor<'_>, branch: i32, version: i64) -> anyhow::Result<()> {
    let (run, from) = (executor.claim.run, executor.head);
    let message =
        format!("re-based: branch {branch} continues from version {version} instead of {from}, with a fresh optimizer");
    tracing::warn!(%run, from, version, branch, "re-basing the line on the version that serves");
    let mut transaction = executor.claim.begin(&executor.trainer.pool).await?;
    publish::rebase_line(
        &mut transaction,
        &executor.trainer.policy,
        &executor.line,
        branch,
        version,
    )
    .await?;
    let data = json!({"branch": branch, "from": from, "to": version});
    append_event(&mut transaction, run, "warn", &message, &data).await?;
    transaction.commit().await?;
    executor.branch = branch;
    executor.head = version;
    executor.load().await
}
