//! `GET /v1/runs/{id}/curve`: what each step of a run measured, as points of a plot.
//! `GET /v1/runs/compare?ids=…`: the same of several runs, and what differs in their configurations.
//!
//! Everything is read from the rows of steps, so a curve is the same while the run works and later.

use super::runs::{self, Run};
use super::{List, Shared, database};
use axum::extract::State;
use edge::json::Json;
use edge::path::Path;
use edge::problem::Problem;
use edge::query::Query;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sqlx::PgPool;
use std::collections::{BTreeMap, BTreeSet};
use time::OffsetDateTime;
use uuid::Uuid;

const POINTS_DEFAULT: i64 = 1_000;
const POINTS_MAX: i64 = 10_000;
/// Runs that are compared.
const COMPARED_MAX: usize = 10;
/// The 97.5% quantile of the normal distribution.
const NORMAL_975: f64 = 1.959_963_984_540_054;

/// A step as a point of a plot. What the step did not measure is null.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Point {
    pub step: i64,
    pub version: i64,
    #[serde(with = "time::serde::rfc3339")]
    pub committed_at: OffsetDateTime,
    pub loss: Option<f64>,
    /// Nats: of the update, from the parent to the version.
    pub kl: Option<f64>,
    pub gradient_norm: Option<f64>,
    /// Nats: of the parent, at the trained tokens.
    pub entropy: Option<f64>,
    /// Of the step's trajectories.
    pub reward_mean: Option<f64>,
    /// The 95% interval of the mean: normal, by the standard deviation of the step's trajectories. Null
    /// for fewer than two, and for steps of builds that did not note the deviation.
    pub reward_interval: Option<[f64; 2]>,
    pub trajectories: Option<u64>,
    /// Sequences that were trained on: rollouts, or turns of sessions.
    pub sequences: Option<u64>,
    pub tokens: Option<u64>,
    /// Of `sequences`, since the commit before; of the first step, since the run began to work.
    pub sequences_per_second: Option<f64>,
    /// Share of the trained tokens that versions before the parent sampled.
    pub stale_share: Option<f64>,
    /// Samples with log-probabilities that are not those of their version.
    pub quarantined: Option<u64>,
    /// What a run over a dataset could not use for the step, by code.
    pub refused: BTreeMap<String, u64>,
    /// What a run of the kinds `dpo` and `kto` measured besides.
    pub preference: Option<Value>,
}

/// Which points.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Points {
    /// The last step of the previous page.
    after: Option<i64>,
    limit: Option<i64>,
}

/// The points of a run, the first step first.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Curve {
    #[serde(flatten)]
    pub points: List<Point>,
    /// Generations that the run dropped so far, by code. Runs over a dataset drop none.
    pub waste: BTreeMap<String, i64>,
}

pub(super) async fn curve(
    State(shared): State<Shared>,
    Path(id): Path<Uuid>,
    Query(page): Query<Points>,
) -> Result<Json<Curve>, Problem> {
    let run = runs::get(&shared.pool, &shared.policy, id).await?;
    let limit = page.limit.unwrap_or(POINTS_DEFAULT);
    if !(1..=POINTS_MAX).contains(&limit) {
        return Err(Problem::bad_request(format!("limit must be in 1..={POINTS_MAX}")));
    }
    read(&shared.pool, &run, page.after.unwrap_or(0), limit).await.map(Json)
}

/// Which runs to compare.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ids {
    /// Separated by commas.
    pub ids: String,
}

/// A run beside others.
#[derive(Debug, Clone, Serialize)]
struct Compared {
    run: Run,
    curve: Curve,
}

#[derive(Debug, Clone, Serialize)]
pub(super) struct Comparison {
    runs: Vec<Compared>,
    /// The fields in which the runs differ, with the value of each run. Null: it has none.
    differences: BTreeMap<String, Vec<Value>>,
}

pub(super) async fn compare(
    State(shared): State<Shared>,
    Query(query): Query<Ids>,
) -> Result<Json<Comparison>, Problem> {
    let ids = parse(&query.ids).map_err(Problem::bad_request)?;
    let mut compared = Vec::new();
    for id in ids {
        let run = runs::get(&shared.pool, &shared.policy, id).await?;
        let curve = read(&shared.pool, &run, 0, POINTS_DEFAULT).await?;
        compared.push(Compared { run, curve });
    }
    let described: Vec<Map<String, Value>> = compared.iter().map(|one| described(&one.run)).collect();
    Ok(Json(Comparison {
        runs: compared,
        differences: differences(&described),
    }))
}

pub fn parse(ids: &str) -> Result<Vec<Uuid>, String> {
    let ids: Result<Vec<Uuid>, _> = ids.split(',').map(|id| id.trim().parse()).collect();
    let ids = ids.map_err(|why| format!("ids must be ids of runs, separated by commas: {why}"))?;
    let unique: BTreeSet<&Uuid> = ids.iter().collect();
    match (2..=COMPARED_MAX).contains(&ids.len()) && unique.len() == ids.len() {
        true => Ok(ids),
        false => Err(format!("ids must be 2 to {COMPARED_MAX} different runs")),
    }
}

/// What a run was asked for.
pub fn described(run: &Run) -> Map<String, Value> {
    let mut fields = run.config.as_object().cloned().unwrap_or_default();
    fields.insert("kind".into(), run.kind.clone().into());
    fields.insert("base_version".into(), run.base_version.into());
    fields
}

pub fn differences(of: &[Map<String, Value>]) -> BTreeMap<String, Vec<Value>> {
    let fields: BTreeSet<&String> = of.iter().flat_map(Map::keys).collect();
    let values = |field: &String| -> Vec<Value> {
        let value = |one: &Map<String, Value>| one.get(field).cloned().unwrap_or(Value::Null);
        of.iter().map(value).collect()
    };
    let all = fields.into_iter().map(|field| (field.clone(), values(field)));
    all.filter(|(_, values)| values.iter().any(|value| value != &values[0]))
        .collect()
}

/// The newest points of a run.
pub async fn newest(pool: &PgPool, run: &Run) -> Result<Curve, Problem> {
    read(pool, run, (run.steps_done - POINTS_MAX).max(0), POINTS_MAX).await
}

async fn read(pool: &PgPool, run: &Run, after: i64, limit: i64) -> Result<Curve, Problem> {
    let rows = sqlx::query!(
        r#"
            select s.step, s.version, s.metrics, s.committed_at, b.committed_at as "before?"
            from step s
            left join step b on b.run_id = s.run_id and b.step = s.step - 1
            where s.run_id = $1 and s.step > $2
            order by s.step
            limit $3
            "#,
        run.id,
        after,
        limit + 1
    )
    .fetch_all(pool)
    .await
    .map_err(database)?;
    let points = rows.into_iter().map(|row| {
        let step = Step {
            step: row.step,
            version: row.version,
            committed_at: row.committed_at,
            before: row.before.or(run.started_at),
        };
        step.point(&row.metrics)
    });
    let dropped = sqlx::query!(
        r#"
            select code as "code!", count(*) as "count!" from disposition
            where run_id = $1 and kind = 'dropped'
            group by code
            "#,
        run.id
    )
    .fetch_all(pool)
    .await
    .map_err(database)?;
    Ok(Curve {
        points: List::page(points.collect(), limit),
        waste: dropped.into_iter().map(|row| (row.code, row.count)).collect(),
    })
}

/// A step without what it measured.
#[derive(Debug, Clone, Copy)]
pub struct Step {
    pub step: i64,
    pub version: i64,
    pub committed_at: OffsetDateTime,
    /// When the step before was committed, or the run began to work.
    pub before: Option<OffsetDateTime>,
}

impl Step {
    pub fn point(self, metrics: &Value) -> Point {
        let number = |field: &str| metrics[field].as_f64();
        let count = |field: &str| metrics[field].as_u64();
        let (mean, trajectories) = (number("reward_mean"), count("trajectories"));
        let seconds = self.before.map(|before| (self.committed_at - before).as_seconds_f64());
        let per_second = |sequences: u64| {
            seconds
                .filter(|seconds| *seconds > 0.0)
                .map(|seconds| sequences as f64 / seconds)
        };
        let stale = metrics["stale"]["tokens"]
            .as_u64()
            .zip(count("tokens").filter(|tokens| *tokens > 0));
        let refused = metrics["notes"]["refused"].as_object().into_iter().flatten();
        Point {
            step: self.step,
            version: self.version,
            committed_at: self.committed_at,
            loss: number("loss"),
            kl: number("kl"),
            gradient_norm: number("gradient_norm"),
            entropy: number("entropy"),
            reward_mean: mean,
            reward_interval: interval(mean, number("reward_std"), trajectories),
            trajectories,
            sequences: count("sequences"),
            tokens: count("tokens"),
            sequences_per_second: count("sequences").and_then(per_second),
            stale_share: stale.map(|(stale, tokens)| stale as f64 / tokens as f64),
            quarantined: count("quarantined"),
            refused: refused
                .filter_map(|(code, count)| Some((code.clone(), count.as_u64()?)))
                .collect(),
            preference: metrics["notes"].get("preference").cloned(),
        }
    }
}

/// The 95% interval of a mean of `count` values with this sample standard deviation.
fn interval(mean: Option<f64>, std: Option<f64>, count: Option<u64>) -> Option<[f64; 2]> {
    let (mean, std, count) = (mean?, std?, count.filter(|count| *count >= 2)?);
    let half = NORMAL_975 * std / (count as f64).sqrt();
    Some([mean - half, mean + half])
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use time::macros::datetime;

    fn step() -> Step {
        Step {
            step: 2,
            version: 9,
            committed_at: datetime!(2026-11-25 12:00:04 UTC),
            before: Some(datetime!(2026-11-25 12:00 UTC)),
        }
    }

    #[test]
    fn a_point_has_what_the_step_measured() {
        let point = step().point(&json!({
            "loss": 0.5, "kl": 0.01, "reward_mean": 0.4, "reward_std": 0.5, "trajectories": 25, "sequences": 40,
            "tokens": 200, "stale": {"tokens": 50}, "quarantined": 1,
            "notes": {"refused": {"greedy": 2}, "preference": {"accuracy": 0.75}},
        }));
        assert_eq!(
            (point.loss, point.kl, point.gradient_norm),
            (Some(0.5), Some(0.01), None)
        );
        assert_eq!(
            (point.sequences_per_second, point.stale_share),
            (Some(10.0), Some(0.25))
        );
        let [low, high] = point.reward_interval.unwrap();
        // 0.4 ± 1.95996 · 0.5 / 5
        assert!(
            (low - 0.204_003_601_5).abs() < 1e-9 && (high - 0.595_996_398_4).abs() < 1e-9,
            "{low} {high}"
        );
        assert_eq!(point.refused["greedy"], 2);
        assert_eq!(point.preference, Some(json!({"accuracy": 0.75})));
    }

    #[test]
    fn what_a_step_of_an_older_build_did_not_measure_is_null() {
        let point = step().point(&json!({"reward_mean": 0.4, "trajectories": 25}));
        assert_eq!(
            (point.reward_interval, point.loss, point.stale_share),
            (None, None, None)
        );
        assert_eq!(
            interval(Some(1.0), Some(0.0), Some(1)),
            None,
            "one value has no deviation"
        );
    }

    #[test]
    fn only_fields_that_differ_are_differences() {
        let of = |value: Value| value.as_object().unwrap().clone();
        let runs = [
            of(json!({"steps": 3, "seed": 0})),
            of(json!({"steps": 3, "seed": 1, "lora": {}})),
        ];
        let found = differences(&runs);
        let expected = BTreeMap::from([
            ("lora".to_owned(), vec![Value::Null, json!({})]),
            ("seed".to_owned(), vec![json!(0), json!(1)]),
        ]);
        assert_eq!(found, expected);
    }

    #[test]
    fn at_least_two_different_runs_are_compared() {
        let (a, b) = (Uuid::from_u128(1), Uuid::from_u128(2));
        assert_eq!(parse(&format!("{a}, {b}")), Ok(vec![a, b]));
        for wrong in [a.to_string(), format!("{a},{a}"), "x,y".into(), String::new()] {
            assert!(parse(&wrong).is_err(), "{wrong}");
        }
    }
}
