//! Compares what callers were told with the log, and the log with our exact model.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use anyhow::Context;
use bench::versions::Versions;
use model::exact::ExactModel;
use model::sampling::{self, Params, PreviousTokens};
use serde::Serialize;
use sqlx::PgPool;
use uuid::Uuid;

use crate::callers::{self, Attempt, End};

/// How many versions older than the newest one an answer may be. An engine skips those that came while
/// it could take none, so this is how long an update may take, in versions.
const VERSIONS_BEHIND_MAX: i64 = 24;

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
            for difference in differences(&model, &row.prompt_ids, &row.token_ids, &row.logprobs, row.temperature)? {
                scored.add(difference, error_max);
            }
        }
    }
    Ok(scored)
}

impl Scored {
    fn add(&mut self, difference: f32, error_max: f32) {
        self.largest_difference = self.largest_difference.max(difference);
        self.tokens_wrong += usize::from(difference > error_max);
        self.tokens += 1;
    }
}

/// Scores what callers saw of answers that broke. No last chunk named their version, so each is compared
/// with every version that may have answered: all tokens of an answer must be of the same one.
pub fn score_cut(versions: &Versions, attempts: &[Attempt], error_max: f32) -> anyhow::Result<Scored> {
    let mut by_number: BTreeMap<i64, Vec<usize>> = BTreeMap::new();
    for (index, attempt) in attempts.iter().enumerate() {
        if !matches!(attempt.end, End::Cut) {
            continue;
        }
        let oldest = (attempt.newest.start() - VERSIONS_BEHIND_MAX).max(1);
        for number in oldest..=*attempt.newest.end() {
            by_number.entry(number).or_default().push(index);
        }
    }
    // of each answer, its differences from the version that is nearest, and that version
    let mut nearest: HashMap<usize, (i64, Vec<f32>)> = HashMap::new();
    let worst = |differences: &[f32]| differences.iter().copied().max_by(f32::total_cmp).unwrap_or(0.0);
    for (number, indexes) in by_number {
        let model = ExactModel::from_checkpoint(&versions.checkpoint(number)?)?;
        for index in indexes {
            let Attempt {
                prompt,
                tokens,
                logprobs,
                ..
            } = &attempts[index];
            let differences = differences(&model, prompt, tokens, logprobs, callers::TEMPERATURE)?;
            let known = nearest.get(&index);
            if known.is_none_or(|(_, known)| worst(&differences) < worst(known)) {
                nearest.insert(index, (number, differences));
            }
        }
    }
    let numbers: BTreeSet<i64> = nearest.values().map(|(number, _)| *number).collect();
    let mut scored = Scored {
        versions: numbers.len(),
        ..Scored::default()
    };
    for difference in nearest.into_values().flat_map(|(_, differences)| differences) {
        scored.add(difference, error_max);
    }
    Ok(scored)
}

/// How far log-probabilities are from those of the model, in nats. One that is not a number is
/// infinitely far.
fn differences(
    model: &ExactModel,
    prompt: &[i32],
    tokens: &[i32],
    logprobs: &[f32],
    temperature: f32,
) -> anyhow::Result<Vec<f32>> {
    let params = Params {
        temperature,
        ..Params::default()
    };
    let ids = prompt.iter().chain(tokens).copied();
    let ids: Vec<u32> = ids.map(u32::try_from).collect::<Result<_, _>>()?;
    let rows: Vec<usize> = (prompt.len() - 1..ids.len() - 1).collect();
    let pass = model.score(&[&ids], &rows, None).context("score an answer")?;
    // a token without a log-probability is wrong
    let logprobs = logprobs.iter().copied().chain(std::iter::repeat(f32::NAN));
    let sampled = ids[prompt.len()..].iter().zip(logprobs);
    let differences = pass.logits.rows().zip(sampled).map(|(logits, (&id, logprob))| {
        let exact = sampling::log_prob_of(logits, &params, &PreviousTokens::default(), id);
        let difference = (exact - logprob).abs();
        if difference.is_nan() { f32::INFINITY } else { difference }
    });
    Ok(differences.collect())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn a_broken_answer_must_be_of_one_version_that_may_have_answered() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../demo/models/base");
        let versions = Versions::new(&folder, 1).unwrap();
        let (prompt, tokens) = (vec![5, 6, 7], vec![8, 9, 10, 11]);
        let of = |number| {
            let model = ExactModel::from_checkpoint(&versions.checkpoint(number).unwrap()).unwrap();
            let differences = differences(&model, &prompt, &tokens, &[0.0; 4], callers::TEMPERATURE).unwrap();
            differences.iter().map(|difference| -difference).collect::<Vec<f32>>()
        };
        let (second, third) = (of(2), of(3));
        let wrong = |logprobs: &[f32], newest| {
            let attempt = Attempt {
                phase: 0,
                user: String::new(),
                prompt: prompt.clone(),
                tokens: tokens.clone(),
                logprobs: logprobs.to_vec(),
                newest,
                end: End::Cut,
                first_token: None,
            };
            let scored = score_cut(&versions, &[attempt], 1e-3).unwrap();
            assert_eq!(scored.tokens, 4);
            scored.tokens_wrong
        };
        assert_eq!(wrong(&second, 2..=2), 0);
        assert_eq!(wrong(&third, 2..=3), 0);
        assert!(wrong(&third, 1..=2) > 0, "version 3 was not there yet");
        let mixed = [&second[..2], &third[2..]].concat();
        assert!(wrong(&mixed, 2..=3) > 0);
        assert!(wrong(&[f32::NAN; 4], 2..=2) == 4);
    }
}
