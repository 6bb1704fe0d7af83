//! What was said about the generations that close, as far as it stands.

use std::collections::{BTreeMap, HashSet};

use anyhow::Context;
use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::reward::Signal;
use crate::{facts, transaction};

pub(super) struct Joined {
    /// By generation.
    pub signals: BTreeMap<Uuid, Vec<Signal>>,
    /// Generations about whose feedback a retraction is being stored just now: they are for the next round.
    pub unsettled: HashSet<Uuid>,
    /// How long after its generation each feedback was stored, seconds; negative: before.
    waits: Vec<f64>,
}

impl Joined {
    /// For `/metrics`, once the closure is committed.
    pub(super) fn count(&self) {
        for wait in &self.waits {
            let first = if *wait < 0.0 { "feedback" } else { "generation" };
            metrics::histogram!("springtide_ingest_join_seconds", "first" => first).record(wait.abs());
        }
    }
}

/// All feedback about these generations, and when it was first taken back.
pub(super) async fn read(connection: &mut PgConnection, ids: &[Uuid]) -> anyhow::Result<Joined> {
    let said = facts::feedback(&mut *connection, ids).await.context("read feedback")?;
    let feedback: Vec<Uuid> = said.iter().map(|said| said.id).collect();
    let expected = transaction::expected(&mut *connection, &feedback).await;
    let expected = expected.context("look for retractions on their way")?;
    // Read after that look: what was committed before it is seen.
    let retractions = facts::retractions(connection, &feedback).await;
    let mut retracted: BTreeMap<Uuid, OffsetDateTime> = BTreeMap::new();
    for taken_back in retractions.context("read retractions")? {
        let first = retracted.entry(taken_back.feedback_id).or_insert(taken_back.given_at);
        *first = taken_back.given_at.min(*first);
    }
    let unsettled: HashSet<Uuid> = said
        .iter()
        .filter(|said| expected.contains(&said.id))
        .map(|said| said.generation_id)
        .collect();
    let mut signals: BTreeMap<Uuid, Vec<Signal>> = BTreeMap::new();
    let mut waits = Vec::new();
    for said in said {
        if unsettled.contains(&said.generation_id) {
            continue;
        }
        waits.push(said.after_seconds);
        let retracted_at = retracted.get(&said.id).copied();
        let about = signals.entry(said.generation_id).or_default();
        about.push(said.into_signal(retracted_at));
    }
    Ok(Joined {
        signals,
        unsettled,
        waits,
    })
}
