//! The gate of `strategy.evaluation`: before the first user, the canary's version and `champion`'s are
//! evaluated on a held-out dataset of logged trajectories.
//!
//! Evaluation runs belong to the trainer. [`Evaluator`] starts and cancels them; their results are read
//! from `run`.

use super::strategy::Evaluation;
use super::tables::{self, Canary};
use crate::CHAMPION;
use crate::ReleaseService;
use crate::decide::ReleaseState;
use anyhow::Context;
use serde::Deserialize;
use sqlx::PgConnection;
use uuid::Uuid;

/// Starts and cancels evaluation runs.
#[async_trait::async_trait]
pub trait Evaluator: Send + Sync {
    /// Queues a run that evaluates the version on the dataset, such as `held-out@1`. A refusal says what to
    /// do. An error may pass: the next look asks again.
    async fn start(&self, version: i64, dataset: &str) -> anyhow::Result<Result<Uuid, String>>;

    /// Cancels a run that [`Self::start`] queued. One that has ended stays as it is. An error may pass: the
    /// next look asks again.
    async fn cancel(&self, run: Uuid) -> anyhow::Result<()>;
}

/// What the evaluations say.
#[derive(Debug, Clone, PartialEq)]
pub enum Gate {
    /// They run.
    Waits,
    /// In words.
    Passed(String),
    /// In words.
    Refused(String),
}

/// An evaluation run.
#[derive(Debug, Clone, PartialEq)]
struct Run {
    id: Uuid,
    status: String,
    reason: Option<String>,
    result: Option<serde_json::Value>,
    /// Seconds since it was queued.
    age: f64,
}

/// Of `run.result`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
struct Measured {
    version: i64,
    estimate: Option<Estimate>,
    estimate_refused: Option<String>,
    demonstrations: Option<Demonstrated>,
}

#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
struct Demonstrated {
    generations: u64,
    right_per_100: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
struct Estimate {
    reward: f64,
    interval: [f64; 2],
}

/// Starts the evaluations that the strategy asks for, and reads them. `None`: it asks for none.
pub async fn look(
    service: &ReleaseService,
    connection: &mut PgConnection,
    state: &ReleaseState,
    canary: &Canary,
) -> anyhow::Result<Option<Gate>> {
    let (Some(wanted), Some(champion)) = (&canary.strategy.evaluation, state.alias(CHAMPION)) else {
        return Ok(None);
    };
    let ids = tables::evaluations(connection, canary.id)
        .await
        .context("read the evaluations")?;
    if ids.len() < 2 {
        return start(service, connection, wanted, canary, champion.version, ids)
            .await
            .map(Some);
    }
    let runs = sqlx::query_as!(
        Run,
        r#"select r.id, r.status, r.reason, r.result,
                extract(epoch from clock_timestamp() - r.created_at)::float as "age!"
         from unnest($1::uuid[]) with ordinality as asked (id, place)
         join run r on r.id = asked.id
         order by asked.place"#,
        &ids
    )
    .fetch_all(connection)
    .await
    .context("read the evaluation runs")?;
    Ok(Some(judge(wanted, champion.version, &runs)))
}

/// `ids`: of the runs that an earlier look started, of the canary's version first.
async fn start(
    service: &ReleaseService,
    connection: &mut PgConnection,
    wanted: &Evaluation,
    canary: &Canary,
    champion: i64,
    mut ids: Vec<Uuid>,
) -> anyhow::Result<Gate> {
    let Some(evaluator) = service.0.evaluator.get() else {
        return Ok(Gate::Refused("this control role cannot start evaluations".to_owned()));
    };
    for version in [canary.version, champion].into_iter().skip(ids.len()) {
        let started = evaluator.start(version, &wanted.dataset).await;
        match started.context("start an evaluation")? {
            Ok(id) => ids.push(id),
            Err(error) => {
                return Ok(Gate::Refused(format!(
                    "could not evaluate version {version} on dataset {}: {error}",
                    wanted.dataset
                )));
            }
        }
        // each at once, so that it is cancelled if the canary ends now
        tables::note_evaluations(connection, canary.id, &ids)
            .await
            .context("note the evaluations")?;
    }
    tracing::info!(canary = %canary.id, runs = ?ids, dataset = wanted.dataset, "evaluations started");
    Ok(Gate::Waits)
}

/// Cancels the evaluations of canaries that ended before them, of the last month: nobody waits for these.
pub async fn cancel_left(service: &ReleaseService, connection: &mut PgConnection) -> anyhow::Result<()> {
    let Some(evaluator) = service.0.evaluator.get() else {
        return Ok(());
    };
    let left = sqlx::query!(
        "select r.id, c.id as canary
         from canary c
         join run r on r.id = any (c.evaluations)
         where c.policy = $1 and c.id >= first_generation_id(now() - interval '31 days') and c.state = 'aborted'
           and r.status not in ('succeeded', 'failed', 'cancelled') and r.requested is distinct from 'cancel'
         order by r.id",
        service.0.policy
    )
    .fetch_all(connection)
    .await
    .context("look for evaluations that nobody waits for")?;
    for run in left {
        let cancelled = evaluator.cancel(run.id).await;
        cancelled.with_context(|| format!("cancel evaluation run {}", run.id))?;
        tracing::info!(canary = %run.canary, run = %run.id, "evaluation cancelled, because its canary has ended");
    }
    Ok(())
}

/// `runs`: of the canary's version, and of what was `champion`'s when they began.
fn judge(wanted: &Evaluation, champion_now: i64, runs: &[Run]) -> Gate {
    let mut measured = Vec::new();
    for run in runs {
        match run.status.as_str() {
            "succeeded" => {}
            "failed" | "cancelled" => {
                return Gate::Refused(format!(
                    "evaluation run {} {}: {}",
                    run.id,
                    run.status,
                    run.reason.as_deref().unwrap_or("springtide run show says why")
                ));
            }
            status if run.age > wanted.timeout.0.as_secs_f64() => {
                return Gate::Refused(format!(
                    "evaluation run {} is still {status} after {} s, so the evaluations are cancelled: see that the trainer works, and propose the version again",
                    run.id,
                    wanted.timeout.0.as_secs()
                ));
            }
            _ => return Gate::Waits,
        }
        let read = run.result.clone().map(serde_json::from_value::<Measured>);
        match read {
            Some(Ok(one)) => measured.push(one),
            _ => return Gate::Refused(format!("the result of evaluation run {} cannot be read", run.id)),
        }
    }
    let [canary, champion] = measured.as_slice() else {
        return Gate::Refused("an evaluation run is gone: propose the version again".to_owned());
    };
    if champion.version != champion_now {
        return Gate::Refused(format!(
            "champion moved from version {} to {champion_now} while it was evaluated: propose it again",
            champion.version
        ));
    }
    if let Some(why) = wanted
        .right_margin
        .and_then(|margin| regressed(&wanted.dataset, margin, canary, champion))
    {
        return Gate::Refused(why);
    }
    match (canary.estimate, champion.estimate) {
        (Some(own), Some(other)) => {
            let says = format!(
                "on dataset {}, version {} is estimated at {:.3} [{:.3}, {:.3}], version {} at {:.3}",
                wanted.dataset,
                canary.version,
                own.reward,
                own.interval[0],
                own.interval[1],
                champion.version,
                other.reward
            );
            // as if they were independent; both are of the same users, so that is wider than need be
            let half = |of: Estimate| (of.interval[1] - of.interval[0]) / 2.0;
            let half = half(own).hypot(half(other));
            match own.reward + half < other.reward - wanted.margin {
                true => Gate::Refused(format!("{says}: it is worse by more than {}", wanted.margin)),
                false => Gate::Passed(says),
            }
        }
        // users decide what logged answers say nothing about
        _ => {
            let why = canary.estimate_refused.as_ref().or(champion.estimate_refused.as_ref());
            let why = why.map_or("no estimate", String::as_str);
            Gate::Passed(format!("dataset {} says too little about it ({why})", wanted.dataset))
        }
    }
}

/// Why the version may not go on: it writes what users wrote at fewer places, or nobody knows. Both are measured at the
/// same places without sampling, so there is no interval. A version that cannot be asked at as many places as
/// `champion`, as with a shorter context, is not measured.
fn regressed(dataset: &str, margin: f64, canary: &Measured, champion: &Measured) -> Option<String> {
    match (canary.demonstrations, champion.demonstrations) {
        (Some(own), Some(other)) if own.generations < other.generations => Some(format!(
            "on dataset {dataset}, version {} can be measured at {} places, version {} at {}",
            canary.version, own.generations, champion.version, other.generations
        )),
        (Some(own), Some(other)) if own.right_per_100 >= other.right_per_100 - margin => None,
        (Some(own), Some(other)) => Some(format!(
            "on dataset {dataset}, version {} is right at {:.1} of 100 places, version {} at {:.1}: fewer by more than \
             {margin}",
            canary.version, own.right_per_100, champion.version, other.right_per_100
        )),
        _ => Some(format!(
            "evaluation.rightMargin cannot be measured on dataset {dataset}, which needs demonstrations: choose another one, or \
             leave rightMargin out"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::canary::strategy::Span;
    use serde_json::{Value, json};
    use std::time::Duration;

    fn wanted() -> Evaluation {
        Evaluation {
            dataset: "held-out@1".into(),
            margin: 0.02,
            right_margin: None,
            timeout: Span(Duration::from_secs(3600)),
        }
    }

    fn run(status: &str, result: Value) -> Run {
        Run {
            id: Uuid::from_u128(7),
            status: status.into(),
            reason: None,
            result: Some(result),
            age: 30.0,
        }
    }

    fn estimated(version: i64, reward: f64) -> Run {
        let interval = [reward - 0.05, reward + 0.05];
        run(
            "succeeded",
            json!({"version": version, "estimate": {"reward": reward, "interval": interval}, "tokens": 9}),
        )
    }

    #[test]
    fn a_version_that_logged_answers_show_to_be_worse_is_refused() {
        let refused = judge(&wanted(), 40, &[estimated(41, 0.18), estimated(40, 0.3)]);
        let Gate::Refused(why) = refused else {
            panic!("{refused:?}")
        };
        assert!(
            why.contains("version 41 is estimated at 0.180 [0.130, 0.230], version 40 at 0.300: it is worse"),
            "{why}"
        );
        // the interval reaches what the margin allows
        for reward in [0.23, 0.3, 0.9] {
            let passed = judge(&wanted(), 40, &[estimated(41, reward), estimated(40, 0.3)]);
            assert!(matches!(passed, Gate::Passed(_)), "{reward}: {passed:?}");
        }
    }

    #[test]
    fn too_little_overlap_is_no_reason_to_refuse() {
        let silent = run(
            "succeeded",
            json!({"version": 41, "estimate_refused": "too little overlap"}),
        );
        let passed = judge(&wanted(), 40, &[silent, estimated(40, 0.3)]);
        assert_eq!(
            passed,
            Gate::Passed("dataset held-out@1 says too little about it (too little overlap)".into())
        );
    }

    #[test]
    fn a_version_that_is_right_at_fewer_places_is_refused_and_so_is_one_that_nobody_measured() {
        let wanted = Evaluation {
            right_margin: Some(1.0),
            ..wanted()
        };
        let right = |version, right: f64| {
            let demonstrations = json!({"generations": 712, "right_per_100": right, "interval": null});
            run(
                "succeeded",
                json!({"version": version, "demonstrations": demonstrations}),
            )
        };
        for (own, passes) in [(26.0, true), (25.9, false), (30.0, true)] {
            let gate = judge(&wanted, 40, &[right(41, own), right(40, 27.0)]);
            assert_eq!(matches!(gate, Gate::Passed(_)), passes, "{own}: {gate:?}");
        }
        let mut fewer = right(41, 30.0);
        fewer.result.as_mut().unwrap()["demonstrations"]["generations"] = json!(711);
        let gate = judge(&wanted, 40, &[fewer, right(40, 27.0)]);
        assert!(
            matches!(&gate, Gate::Refused(why) if why.contains("711 places")),
            "{gate:?}"
        );
        for runs in [
            [right(41, 30.0), estimated(40, 0.3)],
            [estimated(41, 0.9), right(40, 27.0)],
        ] {
            let gate = judge(&wanted, 40, &runs);
            assert!(
                matches!(&gate, Gate::Refused(why) if why.contains("cannot be measured")),
                "{gate:?}"
            );
        }
    }

    #[test]
    fn runs_that_go_on_are_waited_for_and_those_that_failed_refuse() {
        let running = run("running", Value::Null);
        assert_eq!(
            judge(&wanted(), 40, &[running.clone(), estimated(40, 0.3)]),
            Gate::Waits
        );
        assert_eq!(
            judge(&wanted(), 40, &[estimated(41, 0.3), running.clone()]),
            Gate::Waits
        );
        let forgotten = Run { age: 3601.0, ..running };
        let refused = judge(&wanted(), 40, &[forgotten]);
        assert!(
            matches!(&refused, Gate::Refused(why) if why.contains("still running after 3600 s")),
            "{refused:?}"
        );
        for (runs, said) in [
            (vec![run("failed", Value::Null), estimated(40, 0.3)], "failed"),
            (vec![run("succeeded", json!([])), estimated(40, 0.3)], "cannot be read"),
            (vec![estimated(40, 0.3)], "is gone"),
            (
                vec![estimated(41, 0.3), estimated(39, 0.3)],
                "champion moved from version 39 to 40",
            ),
        ] {
            let Gate::Refused(why) = judge(&wanted(), 40, &runs) else {
                panic!()
            };
            assert!(why.contains(said), "{why}");
        }
    }
}
