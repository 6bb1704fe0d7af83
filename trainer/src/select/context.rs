//! From rows to samples: the prompts of turns that were logged in parts are put together by `ingest`; what cannot be is
//! dropped with its code, waits for a parent that may still come, or waits for an object store that is away.

use std::collections::BTreeMap;

use ingest::context::{self, Broken, Error};
use ingest::payload::Store;
use sqlx::PgConnection;
use uuid::Uuid;

use super::Row;
use crate::sample::Sample;

/// What became of rows.
#[derive(Debug, Default)]
pub struct Whole {
    pub samples: Vec<Sample>,
    /// Never to be put together: code → generations. What is in neither waits.
    pub broken: BTreeMap<&'static str, Vec<Uuid>>,
}

pub(super) async fn complete(
    connection: &mut PgConnection,
    payloads: &Store,
    rows: Vec<Row>,
    context: i64,
    vocabulary: i64,
) -> Result<Whole, sqlx::Error> {
    let in_parts: Vec<Uuid> = rows.iter().filter(|row| row.in_parts).map(|row| row.id).collect();
    let mut prompts = BTreeMap::new();
    if !in_parts.is_empty() {
        let tokens_max = usize::try_from(context).unwrap_or(0);
        match context::prompts(connection, payloads, &in_parts, tokens_max).await {
            Ok(found) => prompts = found,
            Err(Error::Database(error)) => return Err(error),
            Err(error) => {
                let error = anyhow::Error::new(error);
                tracing::warn!(
                    error = format!("{error:#}"),
                    waiting = in_parts.len(),
                    "contexts wait for the store of payloads"
                );
            }
        }
    }
    let mut whole = Whole::default();
    for row in rows {
        let (id, young) = (row.id, row.young);
        if !row.in_parts {
            whole.samples.push(row.into());
            continue;
        }
        match prompts.remove(&id) {
            Some(Ok(prompt)) => {
                let mut sample = Sample::from(row);
                sample.prompt = prompt;
                match refuse(&sample, context, vocabulary) {
                    None => whole.samples.push(sample),
                    Some(code) => whole.broken.entry(code).or_default().push(id),
                }
            }
            Some(Err(Broken::ParentMissing)) if young => {}
            Some(Err(broken)) => whole.broken.entry(broken.code()).or_default().push(id),
            None => {}
        }
    }
    Ok(whole)
}

/// The rules that the row alone could not be held against.
fn refuse(sample: &Sample, context: i64, vocabulary: i64) -> Option<&'static str> {
    let tokens = sample.prompt.len() + sample.tokens.len();
    if sample.prompt.is_empty() {
        return Some("empty");
    }
    if i64::try_from(tokens).is_ok_and(|tokens| tokens > context) {
        return Some("longer_than_context");
    }
    let outside = |id: &u32| i64::from(*id) >= vocabulary;
    sample.prompt.iter().any(outside).then_some("token_outside_vocabulary")
}
