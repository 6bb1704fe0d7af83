//! Whether a run's rollouts can be told from what the policy does for users. If they can, the policy may
//! behave otherwise where it is trained than where it is used, and what the run learns may not carry
//! over.
//!
//! ```text
//! traces      the run's first rollouts, and users' traces that begin with the same prompts
//! pairs       of each prompt: same version, same sampling settings, same engine
//! classifier  learns on half of the prompts what rollouts look like, and is tested on the others
//! ```
//! The result is in `run.result` and, while the classifier can tell, an alarm of the run. It stops
//! nothing.
//!
//! Only equal versions are compared. A version that the run made differs from users' versions because
//! it has learned, and no classifier knows that from a policy that knows where it is. So what counts
//! is the first rollouts, before the head has moved: those of the version that users have.

mod classifier;
mod trace;

use crate::options::Realism as Options;
use crate::runs::claim;
use crate::runs::executor::Executor;
use crate::select::rollouts::an_hour_before;
use classifier::{Comparison, Pair, compare};
use serde::Serialize;
use serde_json::json;
use sqlx::PgPool;
use std::collections::{BTreeMap, BTreeSet};
use trace::{FIRST_TOKENS, Trace, Turn};
use uuid::Uuid;

/// Marks the alarm's events in `run_event.data`.
const ALARM: &str = "realism";
/// Rollouts, and traces of production.
const TRACES_MAX: i64 = 2_000;
/// Traces of production of one prompt.
const TRACES_OF_PROMPT_MAX: i64 = 64;
/// Generations of production that are looked at, of each version.
const READ_MAX: i64 = 20_000;

/// `result.realism` of a run.
#[derive(Debug, Serialize)]
struct Report {
    /// After so many steps of the run.
    step: i64,
    /// Rollouts that have closed with a reward, and were read.
    rollouts: usize,
    /// Traces of production that begin with one of their prompts and versions.
    production: usize,
    /// Traces of both that are left out: the caller hung up, the policy was not free to decline, the
    /// request did not consent to training, or a part is gone or elsewhere.
    left_out: usize,
    pairs: usize,
    prompts: usize,
    /// Absent: there are too few pairs.
    #[serde(flatten)]
    comparison: Option<Comparison>,
    /// Why there are too few.
    #[serde(skip_serializing_if = "Option::is_none")]
    not_comparable: Option<String>,
    alarm: bool,
}

/// Compares after a step: the first one, each `every_steps`-th, and the last one of `steps`. A failure
/// is logged and costs nothing else.
pub(super) async fn watch(executor: &Executor<'_>, steps: i64) {
    let options = &executor.trainer.options.offline.realism;
    let (done, every) = (executor.steps_done, i64::from(options.every_steps));
    if every == 0 || done != 1 && done % every != 0 && done != steps {
        return;
    }
    if let Err(error) = check(executor, options).await {
        let run = executor.claim.run;
        tracing::warn!(%run, error = format!("{error:#}"), "could not compare the rollouts with production");
    }
}

async fn check(executor: &Executor<'_>, options: &Options) -> anyhow::Result<()> {
    let (pool, run) = (&executor.trainer.pool, executor.claim.run);
    let rollouts = Traces::of_run(pool, run).await?;
    let production = Traces::of_production(pool, &executor.trainer.policy, &rollouts).await?;
    let mut report = Report {
        step: executor.steps_done,
        rollouts: rollouts.count,
        production: production.count,
        left_out: rollouts.left_out + production.left_out,
        pairs: 0,
        prompts: 0,
        comparison: None,
        not_comparable: None,
        alarm: false,
    };
    let pairs = pair(rollouts, production);
    report.pairs = pairs.len();
    report.prompts = pairs.iter().map(|pair| pair.prompt).collect::<BTreeSet<_>>().len();
    report.comparison = compare(&pairs, options.pairs_min as usize);
    let was_active = claim::alarm_is_on(pool, run, ALARM).await?;
    report.alarm = match &report.comparison {
        None => was_active,
        Some(found) => is_told(found, options.right_share_max, was_active),
    };
    if report.comparison.is_none() {
        report.not_comparable = Some(report.why_not(options));
    }
    report.record_metrics(&executor.line);
    report.store(executor, was_active).await
}

/// Whether the classifier can tell, beyond doubt. The alarm ends when it is right less often than that.
fn is_told(found: &Comparison, right_share_max: f64, was_active: bool) -> bool {
    let [low, _] = found.right_share_interval;
    if was_active {
        found.right_share > right_share_max
    } else {
        low > right_share_max
    }
}

impl Report {
    fn why_not(&self, options: &Options) -> String {
        if self.rollouts == 0 {
            return "no rollout has closed yet".into();
        }
        if self.production == 0 {
            return "no closed trace of a user begins with the prompt and the version of a rollout".into();
        }
        format!(
            "{} pairs of a user's trace and a rollout have the same prompt, version, sampling settings and engine, of {} \
             prompts: each half of the prompts needs {} (trainer.offline.realism.pairs_min)",
            self.pairs, self.prompts, options.pairs_min
        )
    }

    fn record_metrics(&self, line: &str) {
        let line = line.to_owned();
        if let Some(found) = &self.comparison {
            metrics::gauge!("springtide_train_realism_right_share", "line" => line.clone()).set(found.right_share);
        }
        metrics::gauge!("springtide_train_realism_alarm", "line" => line).set(f64::from(u8::from(self.alarm)));
    }

    /// Writes the run's result, and an event if the alarm begins or ends.
    async fn store(&self, executor: &Executor<'_>, was_active: bool) -> anyhow::Result<()> {
        let claim = executor.claim;
        let mut transaction = executor.trainer.pool.begin().await?;
        claim.lock(&mut transaction).await?;
        sqlx::query!(
            "update run set result = $2 where id = $1",
            claim.run,
            json!({"realism": self})
        )
        .execute(&mut *transaction)
        .await?;
        if let Some(found) = &self.comparison
            && self.alarm != was_active
        {
            let (level, state) = if self.alarm {
                ("warn", "began")
            } else {
                ("info", "ended")
            };
            let message = message(found, self.alarm);
            tracing::warn!(run = %claim.run, line = executor.line, state, "{message}");
            let data = json!({"alarm": ALARM, "state": state, "right_share": found.right_share});
            claim::append_event(&mut transaction, claim.run, level, &message, &data).await?;
        }
        transaction.commit().await?;
        Ok(())
    }
}

fn message(found: &Comparison, begins: bool) -> String {
    let [low, high] = found.right_share_interval;
    let told = format!(
        "in {:.0}% of {} pairs (95% interval {:.0}% to {:.0}%)",
        100.0 * found.right_share,
        found.pairs_tested,
        100.0 * low,
        100.0 * high
    );
    if !begins {
        return format!("a classifier tells rollouts from what users get only {told} now");
    }
    let most = found.differences.first();
    let most = most.map_or(String::new(), |one| {
        format!(
            " Most telling: {}, {:.2} for users and {:.2} in rollouts.",
            one.what, one.production, one.rollouts
        )
    });
    format!(
        "a classifier tells rollouts from what the same version does for users with the same prompts {told}: what the run \
         learns may not carry over.{most} `result.realism` of the run has more; make the harness do what the product does"
    )
}

/// What was read of one side.
#[derive(Debug, Default)]
struct Traces {
    count: usize,
    left_out: usize,
    /// Those that can be compared.
    like: BTreeMap<Alike, Vec<Found>>,
}

/// Traces of which all of this is equal are samples of one distribution, if the policy does not care who
/// they are for and what happens to it is the same.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Alike {
    /// Hash of the first prompt's tokens.
    prompt: i64,
    /// The version that sampled the first token. Later tokens may be of later versions: without such
    /// traces the others would be the short ones.
    began_with: i64,
    settings: String,
}

#[derive(Debug)]
struct Found {
    trace: Trace,
    /// False: it is a single answer, whatever came after it.
    is_episode: bool,
}

/// A turn of a trace.
struct Row {
    trace: Uuid,
    is_episode: bool,
    /// Of the first turn, if the row has the whole prompt.
    prompt: Option<i64>,
    began_with: i64,
    settings: String,
    is_comparable: bool,
    tokens: i32,
    first_tokens: Vec<i32>,
    ended: bool,
    shown: bool,
}

impl Traces {
    async fn of_run(pool: &PgPool, run: Uuid) -> Result<Self, sqlx::Error> {
        let ids = sqlx::query_scalar!(
            r#"
            select id from rollout
            where run_id = $1 and reward is not null and state in ('settled', 'spent')
            order by draw, id
            limit $2
            "#,
            run,
            TRACES_MAX
        )
        .fetch_all(pool)
        .await?;
        Self::read(pool, &ids, &ids, &vec![true; ids.len()]).await
    }

    /// Those that begin as the rollouts do.
    async fn of_production(pool: &PgPool, policy: &str, rollouts: &Traces) -> Result<Self, sqlx::Error> {
        let unique = |of: fn(&Alike) -> i64| -> Vec<i64> {
            let values: BTreeSet<i64> = rollouts.like.keys().map(of).collect();
            values.into_iter().collect()
        };
        let found = sqlx::query_file!(
            "src/runs/grpo/realism/production.sql",
            policy,
            &unique(|alike| alike.prompt),
            &unique(|alike| alike.began_with),
            READ_MAX,
            TRACES_OF_PROMPT_MAX,
            TRACES_MAX
        )
        .fetch_all(pool)
        .await?;
        let (mut ids, mut episodes, mut are_episodes) = (Vec::new(), Vec::new(), Vec::new());
        for row in found {
            ids.push(row.id);
            episodes.push(row.episode_id);
            are_episodes.push(row.is_episode);
        }
        Self::read(pool, &ids, &episodes, &are_episodes).await
    }

    /// See turns.sql.
    async fn read(pool: &PgPool, ids: &[Uuid], episodes: &[Uuid], are_episodes: &[bool]) -> Result<Self, sqlx::Error> {
        let Some(oldest) = ids.iter().min() else {
            return Ok(Traces::default());
        };
        let rows = sqlx::query_file_as!(
            Row,
            "src/runs/grpo/realism/turns.sql",
            ids,
            episodes,
            are_episodes,
            an_hour_before(*oldest),
            FIRST_TOKENS
        )
        .fetch_all(pool)
        .await?;
        let mut traces = Traces::default();
        for turns in rows.chunk_by(|a, b| a.trace == b.trace) {
            traces.add(turns);
        }
        Ok(traces)
    }

    /// Adds a trace. `turns`: all of them, in order.
    fn add(&mut self, turns: &[Row]) {
        let Some(first) = turns.first() else { return };
        self.count += 1;
        let Some(prompt) = first.prompt.filter(|_| turns.iter().all(|turn| turn.is_comparable)) else {
            self.left_out += 1;
            return;
        };
        let alike = Alike {
            prompt,
            began_with: first.began_with,
            settings: first.settings.clone(),
        };
        let turn = |row: &Row| Turn {
            tokens: row.tokens.unsigned_abs(),
            first: row.first_tokens.clone(),
            ended: row.ended,
            shown: row.shown,
        };
        let found = Found {
            trace: Trace(turns.iter().map(turn).collect()),
            is_episode: first.is_episode,
        };
        self.like.entry(alike).or_default().push(found);
    }
}

/// As many pairs of traces that are alike as there are. Where a surface scores single answers, they are
/// compared with the first turns of rollouts.
fn pair(mut rollouts: Traces, production: Traces) -> Vec<Pair> {
    let mut pairs = Vec::new();
    for (alike, of_users) in production.like {
        let Some(of_run) = rollouts.like.remove(&alike) else {
            continue;
        };
        for (user, mut rollout) in of_users.into_iter().zip(of_run) {
            if !user.is_episode {
                rollout.trace.0.truncate(1);
            }
            pairs.push(Pair {
                prompt: alike.prompt,
                production: user.trace,
                rollout: rollout.trace,
            });
        }
    }
    pairs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(trace: u128, prompt: i64) -> Row {
        Row {
            trace: Uuid::from_u128(trace),
            is_episode: true,
            prompt: Some(prompt),
            began_with: 1,
            settings: "1 1 {}".into(),
            is_comparable: true,
            tokens: 3,
            first_tokens: vec![7],
            ended: true,
            shown: true,
        }
    }

    fn later(trace: u128) -> Row {
        Row {
            prompt: None,
            ..row(trace, 0)
        }
    }

    fn traces(of: &[Vec<Row>]) -> Traces {
        let mut traces = Traces::default();
        of.iter().for_each(|turns| traces.add(turns));
        traces
    }

    #[test]
    fn traces_are_paired_by_prompt_version_and_settings() {
        let other_version = Row {
            began_with: 2,
            ..row(2, 1)
        };
        let other_settings = Row {
            settings: "0.7 1 {}".into(),
            ..row(3, 1)
        };
        let production = traces(&[
            vec![row(1, 1), later(1)],
            vec![other_version],
            vec![other_settings],
            vec![row(4, 2)],
        ]);
        let rollouts = traces(&[vec![row(5, 1)], vec![row(6, 1)], vec![row(7, 3)]]);
        let pairs = pair(rollouts, production);
        assert_eq!(pairs.len(), 1);
        let turns = |trace: &Trace| trace.0.len();
        assert_eq!(
            (pairs[0].prompt, turns(&pairs[0].production), turns(&pairs[0].rollout)),
            (1, 2, 1)
        );
    }

    #[test]
    fn single_answers_are_compared_with_first_turns() {
        let single = Row {
            is_episode: false,
            ..row(1, 1)
        };
        let rollouts = traces(&[vec![row(2, 1), later(2)]]);
        let pairs = pair(rollouts, traces(&[vec![single]]));
        assert_eq!(pairs[0].production, pairs[0].rollout);
    }

    #[test]
    fn a_trace_with_a_turn_that_cannot_be_compared_is_left_out_and_counted() {
        let hung_up = Row {
            is_comparable: false,
            ..later(1)
        };
        let found = traces(&[vec![row(1, 1), hung_up], vec![later(2)], vec![row(3, 1)]]);
        assert_eq!((found.count, found.left_out, found.like.len()), (3, 2, 1));
    }

    #[test]
    fn the_alarm_begins_beyond_doubt_and_ends_when_the_share_is_below_its_bound() {
        let found = |right_share: f64, low: f64| Comparison {
            pairs_trained: 50,
            pairs_tested: 50,
            right_share,
            right_share_interval: [low, 0.9],
            differences: Vec::new(),
        };
        assert!(!is_told(&found(0.7, 0.59), 0.6, false));
        assert!(is_told(&found(0.7, 0.59), 0.6, true), "it goes on");
        assert!(is_told(&found(0.75, 0.61), 0.6, false));
        assert!(!is_told(&found(0.6, 0.5), 0.6, true));
        let message = message(&found(0.75, 0.61), true);
        assert!(
            message.contains("in 75% of 50 pairs (95% interval 61% to 90%)"),
            "{message}"
        );
    }
}
