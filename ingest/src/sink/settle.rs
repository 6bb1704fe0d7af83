//! What follows from two events together: an early close, a retraction that is late because its feedback is. Two transactions
//! that store one of them each do not see the other. So it is looked for twice, in the transaction and after its commit:
//! whoever commits last sees both. Nothing closes in between, because a partition counts as caught up only afterwards. (A
//! process that is killed between the two leaves such a generation to its horizon; what counts until then is the same, for the
//! closer finds out by itself up to when.)

use sqlx::PgConnection;
use uuid::Uuid;

use super::rows::Row;
use crate::event::{EpisodeEnd, Event, Feedback, Generation, Target};
use crate::reward::stored::Surfaces;

/// What a batch has stored that can have such consequences.
#[derive(Debug, Default)]
pub(super) struct Touched {
    by_feedback: Close,
    by_end: Close,
    /// Feedback that came late or was taken back.
    pub(super) feedback: Vec<Uuid>,
}

#[derive(Debug, Default)]
struct Close {
    generations: Vec<Uuid>,
    episodes: Vec<Uuid>,
}

impl Close {
    fn is_empty(&self) -> bool {
        self.generations.is_empty() && self.episodes.is_empty()
    }
}

impl Touched {
    pub(super) fn of(
        generations: &[Row<'_, Generation>],
        feedback: &[Row<'_, Feedback>],
        ends: &[(&Event, &EpisodeEnd)],
        surfaces: &Surfaces,
    ) -> Self {
        let mut touched = Self::default();
        for row in generations {
            let Some((_, rule)) = surfaces.get(&row.body.surface) else {
                continue;
            };
            if rule.definition.close_on_feedback {
                touched.by_feedback.generations.push(row.body.id);
            }
            if rule.definition.close_on_episode_end {
                touched.by_end.generations.push(row.body.id);
            }
        }
        let early: Vec<&str> = surfaces
            .definitions()
            .filter(|surface| surface.close_on_feedback)
            .map(|surface| surface.metric.as_str())
            .collect();
        for row in feedback
            .iter()
            .filter(|row| early.contains(&row.body.metric_name.as_str()))
        {
            match row.body.target {
                Target::Generation(id) => touched.by_feedback.generations.push(id),
                Target::Episode(id) => touched.by_feedback.episodes.push(id),
            }
        }
        if surfaces.definitions().any(|surface| surface.close_on_episode_end) {
            touched.by_end.episodes = ends.iter().map(|(_, end)| end.episode_id).collect();
        }
        touched
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_feedback.is_empty() && self.by_end.is_empty() && self.feedback.is_empty()
    }
}

/// Draws the consequences that can be seen from here. Again is harmless.
pub(super) async fn settle(connection: &mut PgConnection, touched: &Touched, surfaces: &Surfaces) -> sqlx::Result<()> {
    if !touched.feedback.is_empty() {
        sqlx::query!(
            "update retraction r set late = true from feedback f \
             where r.feedback_id = any($1) and not r.late and f.id = r.feedback_id and f.late",
            &touched.feedback
        )
        .execute(&mut *connection)
        .await?;
    }
    let Close { generations, episodes } = &touched.by_end;
    if !touched.by_end.is_empty() {
        let closing = surfaces.definitions().filter(|surface| surface.close_on_episode_end);
        let names: Vec<String> = closing.map(|surface| surface.name.clone()).collect();
        sqlx::query_file!("src/sink/close_ended.sql", generations, episodes, &names)
            .execute(&mut *connection)
            .await?;
    }
    let Close { generations, episodes } = &touched.by_feedback;
    if !touched.by_feedback.is_empty() {
        let early = || surfaces.definitions().filter(|surface| surface.close_on_feedback);
        let names: Vec<String> = early().map(|surface| surface.name.clone()).collect();
        let metrics: Vec<String> = early().map(|surface| surface.metric.clone()).collect();
        sqlx::query_file!("src/sink/close_early.sql", generations, episodes, &names, &metrics)
            .execute(connection)
            .await?;
    }
    Ok(())
}
