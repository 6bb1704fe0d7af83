//! The closer's side: the feedback about the generations that it closes.

use std::collections::{BTreeMap, HashSet};

use anyhow::Context;
use sqlx::PgConnection;
use uuid::Uuid;

use super::ids_being_written;
use crate::reward::Signal;
use crate::rows::feedback::{Needed, feedback, first_retractions};

pub(crate) struct Signals {
    /// How many of the generations have been read, from the first.
    pub generations: usize,
    pub by_generation: BTreeMap<Uuid, Vec<Signal>>,
    /// Generations with a retraction that is being stored. The closer's next round takes them.
    pub contested: HashSet<Uuid>,
    /// See [`crate::rows::feedback::FeedbackRow::after_seconds`].
    waits: Vec<f64>,
}

impl Signals {
    /// To be called after the closure is committed.
    pub(crate) fn record_metrics(&self) {
        for wait in &self.waits {
            let first = if *wait < 0.0 { "feedback" } else { "generation" };
            metrics::histogram!("springtide_ingest_join_seconds", "first" => first).record(wait.abs());
        }
    }
}

/// Reads the feedback that scoring the first of these generations needs, each with the time of its
/// first retraction.
pub(crate) async fn read(connection: &mut PgConnection, ids: &[Uuid], needed: &Needed) -> anyhow::Result<Signals> {
    let page = feedback(&mut *connection, ids, needed).await.context("read feedback")?;
    let rows = page.rows;
    let feedback: Vec<Uuid> = rows.iter().map(|row| row.id).collect();
    let being_written = ids_being_written(&mut *connection, &feedback).await;
    let being_written = being_written.context("look for retractions that are being stored")?;
    // Read afterwards, so that it includes the retractions that were committed before that check.
    let retracted = first_retractions(connection, &rows).await;
    let retracted = retracted.context("read retractions")?;
    let contested = rows.iter().filter(|row| being_written.contains(&row.id));
    let mut signals = Signals {
        generations: page.generations,
        by_generation: BTreeMap::new(),
        contested: contested.map(|row| row.generation_id).collect(),
        waits: Vec::new(),
    };
    for row in rows {
        if signals.contested.contains(&row.generation_id) {
            continue;
        }
        signals.waits.push(row.after_seconds);
        let retracted_at = retracted.get(&row.key()).copied();
        let about = signals.by_generation.entry(row.generation_id).or_default();
        about.push(row.into_signal(retracted_at));
    }
    Ok(signals)
}
