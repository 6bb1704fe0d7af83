//! Compares what callers were told with the log, and the log with our exact model.

use std::collections::{BTreeMap, HashMap};

use anyhow::Context;
use bench::versions::Versions;
use model::exact::ExactModel;
use model::sampling::{self, Params, PreviousTokens};
use serde::Serialize;
use sqlx::PgPool;
use uuid::Uuid;

use crate::callers::{Attempt, End};

/// A logged generation.
#[derive(Debug, sqlx::FromRow)]
pub struct Row {
    id: Uuid,
    user_key: String,
    version: i64,
    prompt_ids: Vec<i32>,
    token_ids: Vec<i32>,
    logprobs: Vec<f32>,
    temperature: f32,
    finish_reason: String,
    untrainable: Option<String>,
}

/// Every generation that ingest has stored, oldest first.
pub async fn rows(pool: &PgPool) -> anyhow::Result<Vec<Row>> {
    let rows = sqlx::query_as(
        "select id, user_key, version, prompt_ids, token_ids, logprobs, temperature, finish_reason, untrainable
         from generation order by id",
    );
    Ok(rows.fetch_all(pool).await?)
}

/// How many of these generations are stored.
pub async fn stored(pool: &PgPool, ids: &[Uuid]) -> anyhow::Result<usize> {
    let count: i64 = sqlx::query_scalar("select count(*) from generation where id = any($1)")
        .bind(ids)
        .fetch_one(pool)
        .await?;
    Ok(usize::try_from(count)?)
}

/// What the log has of what callers saw.
#[derive(Debug, Default, Serialize)]
pub struct Logged {
    pub generations: usize,
    /// Answered to the end, and not in the log, or there with another version or other tokens.
    pub answered_missing: usize,
    pub answered_different: usize,
    /// Requests that were logged twice.
    pub twice: usize,
    /// Answers that broke: not in the log,
    pub cut_absent: usize,
    /// logged as aborted,
    pub cut_aborted: usize,
    /// or logged whole, because only the last chunk got lost.
    pub cut_whole: usize,
    /// What the caller had of it is not how the logged one begins.
    pub cut_different: usize,
    /// Requests that failed before their first token, and are logged nevertheless: as aborted,
    pub failed_aborted: usize,
    /// or whole.
    pub failed_whole: usize,
}

pub fn compare(attempts: &[Attempt], rows: &[Row]) -> Logged {
    let mut logged = Logged {
        generations: rows.len(),
        ..Logged::default()
    };
    let mut by_user: HashMap<&str, &Row> = HashMap::new();
    for row in rows {
        logged.twice += usize::from(by_user.insert(&row.user_key, row).is_some());
    }
    for attempt in attempts {
        let row = by_user.get(attempt.user.as_str());
        let aborted = row.is_some_and(|row| row.finish_reason == "abort");
        match (&attempt.end, row) {
            (End::Whole { .. }, None) => logged.answered_missing += 1,
            (End::Whole { generation, version }, Some(row)) => {
                let same = (row.id, row.version, &row.token_ids) == (*generation, *version, &attempt.tokens);
                logged.answered_different += usize::from(!same);
            }
            (End::Cut, None) => logged.cut_absent += 1,
            (End::Cut, Some(row)) => {
                match aborted {
                    true => logged.cut_aborted += 1,
                    false => logged.cut_whole += 1,
                }
                logged.cut_different += usize::from(!row.token_ids.starts_with(&attempt.tokens));
            }
            (End::Failed(_), None) => {}
            (End::Failed(_), Some(_)) => match aborted {
                true => logged.failed_aborted += 1,
                false => logged.failed_whole += 1,
            },
        }
    }
    logged
}

/// What our exact model says of the logged tokens.
#[derive(Debug, Default, Serialize)]
pub struct Scored {
    pub versions: usize,
    pub tokens: usize,
    /// Tokens whose log-probability is not that of the version that was logged.
    pub tokens_wrong: usize,
    pub largest_difference: f32,
}

/// `numbers`: which of `versions` has which serial.
pub fn score(
    versions: &Versions,
    numbers: &BTreeMap<i64, i64>,
    rows: &[Row],
    error_max: f32,
) -> anyhow::Result<Scored> {
    let mut by_version: BTreeMap<i64, Vec<&Row>> = BTreeMap::new();
    // of an answer that broke, the engine did not say which version sampled it
    let scored = rows.iter().filter(|row| row.untrainable.is_none());
    for row in scored.filter(|row| !row.token_ids.is_empty()) {
        by_version.entry(row.version).or_default().push(row);
    }
    let mut scored = Scored {
        versions: by_version.len(),
        ..Scored::default()
    };
    for (serial, rows) in by_version {
        let number = numbers.get(&serial);
        let number = number.with_context(|| format!("version {serial} is in the log, and was not published"))?;
        let model = ExactModel::from_checkpoint(&versions.checkpoint(*number)?)?;
        for row in rows {
            let params = Params {
                temperature: row.temperature,
                ..Params::default()
            };
            let ids = row.prompt_ids.iter().chain(&row.token_ids).copied();
            let ids: Vec<u32> = ids.map(u32::try_from).collect::<Result<_, _>>()?;
            let rows: Vec<usize> = (row.prompt_ids.len() - 1..ids.len() - 1).collect();
            let pass = model.score(&[&ids], &rows, None).context("score a generation")?;
            let sampled = ids[row.prompt_ids.len()..].iter().zip(&row.logprobs);
            for (logits, (&id, &logprob)) in pass.logits.rows().zip(sampled) {
                let exact = sampling::log_prob_of(logits, &params, &PreviousTokens::default(), id);
                let difference = (exact - logprob).abs();
                scored.largest_difference = scored.largest_difference.max(difference);
                scored.tokens_wrong += usize::from(difference.is_nan() || difference > error_max);
                scored.tokens += 1;
            }
        }
    }
    Ok(scored)
}
