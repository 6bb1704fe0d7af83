//! The closer's side: the feedback about the generations and episodes that it closes.

use std::collections::{BTreeMap, HashSet};

use anyhow::Context;
use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

use super::ids_being_written;
use crate::reward::Signal;
use crate::rows::feedback::{
    About, FeedbackRow, Needed, Page, about_episodes, about_turns, feedback, first_retractions,
};
use crate::rows::insert::TenantId;

pub(crate) struct Signals {
    /// How many of the generations or episodes have been read, from the first.
    pub generations: usize,
    /// By generation or episode.
    pub by_generation: BTreeMap<Uuid, Vec<Signal>>,
    /// Those with a retraction that is being stored. The closer's next round takes them.
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
    with_retractions(connection, page, |_| true).await
}

/// The same about episodes, without that about their turns. All transactions that run now could see
/// what was stored up to `visible`.
pub(crate) async fn read_about_episodes(
    connection: &mut PgConnection,
    about: &[About],
    needed: &Needed,
    visible: OffsetDateTime,
) -> anyhow::Result<Signals> {
    let page = about_episodes(&mut *connection, about, needed).await;
    let page = page.context("read feedback about episodes")?;
    with_retractions(connection, page, unseen(about, visible)).await
}

/// The same about turns.
pub(crate) async fn read_about_turns(
    connection: &mut PgConnection,
    about: &[About],
    needed: &Needed,
    visible: OffsetDateTime,
) -> anyhow::Result<Signals> {
    let page = about_turns(&mut *connection, about, needed).await;
    let page = page.context("read feedback about turns")?;
    with_retractions(connection, page, unseen(about, visible)).await
}

/// Whether a transaction that is storing a retraction may not have seen the feedback or its target, so
/// that it could not hold the episode.
fn unseen(about: &[About], visible: OffsetDateTime) -> impl Fn(&FeedbackRow) -> bool {
    let unseen = about.iter().filter(|about| about.stored_at > visible);
    let unseen: HashSet<Uuid> = unseen.map(|about| about.id).collect();
    move |row| row.stored_at > visible || unseen.contains(&row.about)
}

/// Adds retractions. `may_be_unseen`: whether a transaction that is storing a retraction of this
/// feedback may have announced it instead of holding its target.
async fn with_retractions(
    connection: &mut PgConnection,
    page: Page,
    may_be_unseen: impl Fn(&FeedbackRow) -> bool,
) -> anyhow::Result<Signals> {
    let rows = page.rows;
    let feedback: Vec<TenantId> = rows
        .iter()
        .filter(|row| may_be_unseen(row))
        .map(FeedbackRow::key)
        .collect();
    let being_written = ids_being_written(&mut *connection, &feedback).await;
    let being_written = being_written.context("look for retractions that are being stored")?;
    // Read afterwards, so that it includes the retractions that were committed before that check.
    let retracted = first_retractions(&mut *connection, &rows).await;
    let retracted = retracted.context("read retractions")?;
    let contested = rows.iter().filter(|row| being_written.contains(&row.key()));
    let mut signals = Signals {
        generations: page.generations,
        by_generation: BTreeMap::new(),
        contested: contested.map(|row| row.about).collect(),
        waits: Vec::new(),
    };
    for row in rows {
        if signals.contested.contains(&row.about) {
            continue;
        }
        signals.waits.push(row.after_seconds);
        let retracted_at = retracted.get(&row.key()).copied();
        let about = signals.by_generation.entry(row.about).or_default();
        about.push(row.into_signal(retracted_at));
    }
    Ok(signals)
}
