//! Accepts events, or previews them in a dry run.
//!
//! A dry run checks events and joins them with the tables, but does not send them. It needs the
//! database but not the log.

use std::collections::HashMap;

use edge::problem::Problem;
use event_log::event::{Body, Event, Target};
use serde::Deserialize;
use sqlx::PgPool;
use time::OffsetDateTime;
use utoipa::IntoParams;
use uuid::Uuid;

use super::Api;
use super::accept::{Checked, Lookup};
use super::answer::{JoinOutcome, Preview, TargetState};

/// The query parameters of every endpoint that takes events.
#[derive(Debug, Clone, Copy, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Options {
    /// Check and join without writing anything.
    #[serde(default)]
    #[param(required = false)]
    pub dryrun: bool,
}

/// The event, with its preview in a dry run.
pub(super) type Taken = Result<(Event, Option<Preview>), Problem>;

/// A target as the tables hold it.
#[derive(Debug, Clone, Copy, Default)]
struct Stored {
    generations: i64,
    open: i64,
    closes_at: Option<OffsetDateTime>,
    feedback: i64,
}

impl Stored {
    fn state(self) -> TargetState {
        match self {
            Self { generations: 0, .. } => TargetState::Unknown,
            Self { open: 0, .. } => TargetState::Closed,
            _ => TargetState::Open,
        }
    }

    /// The decision of the sink and the closer about feedback that was given at `given_at`.
    fn outcome(self, given_at: OffsetDateTime) -> JoinOutcome {
        match self.state() {
            TargetState::Unknown => JoinOutcome::Waits,
            TargetState::Closed => JoinOutcome::Late,
            TargetState::Open if self.closes_at.is_some_and(|closes_at| given_at > closes_at) => JoinOutcome::Late,
            TargetState::Open => JoinOutcome::Counts,
        }
    }
}

impl Api {
    /// Accepts one event, or previews it in a dry run.
    pub(super) async fn take_one(&self, event: Event, dryrun: bool) -> Result<(Event, Option<Preview>), Problem> {
        let mut results = self.take(vec![Ok(event)], dryrun).await?;
        let result = results.pop();
        result.unwrap_or_else(|| Err(Problem::internal("an event without a result")))
    }

    /// Accepts events of one tenant, or previews them in a dry run. The results are in the same
    /// order. Problems in `events` are returned unchanged.
    pub(super) async fn take(&self, events: Vec<Result<Event, Problem>>, dryrun: bool) -> Result<Vec<Taken>, Problem> {
        if dryrun {
            return self.preview(events).await;
        }
        let results = self.accept(events).await.into_iter();
        Ok(results.map(|result| result.map(|event| (event, None))).collect())
    }

    /// Previews events of one tenant, in order.
    async fn preview(&self, events: Vec<Result<Event, Problem>>) -> Result<Vec<Taken>, Problem> {
        let checked = self.check(events, Lookup::All).await;
        let pool = self
            .pool
            .as_ref()
            .ok_or_else(|| Problem::not_implemented("a collector has no tables; send dry runs to its upstream"))?;
        let _turn = self.dryruns.acquire().await.map_err(Problem::internal)?;
        let stored = stored_targets(pool, &checked).await.map_err(|error| {
            tracing::warn!(%error, "cannot join a dry run");
            Problem::unavailable("a dry run needs the database, which is unavailable", 1)
        })?;
        let preview = |Checked { event, duplicate, .. }: Checked| {
            let stored = stored.get(&target(&event)).copied().unwrap_or_default();
            let preview = Preview {
                duplicate,
                target: stored.state(),
                closes_at: stored.closes_at,
                feedback_stored: stored.feedback,
                feedback: match event.body {
                    Body::Feedback(_) => Some(stored.outcome(event.time)),
                    Body::Generation(_) | Body::Retraction(_) | Body::EpisodeEnd(_) => None,
                },
            };
            (event, Some(preview))
        };
        Ok(checked.into_iter().map(|checked| checked.map(preview)).collect())
    }
}

async fn stored_targets(
    pool: &PgPool,
    checked: &[Result<Checked, Problem>],
) -> sqlx::Result<HashMap<(Uuid, bool), Stored>> {
    let valid = || checked.iter().flatten().map(|checked| &checked.event);
    let Some(tenant) = valid().map(|event| &event.tenant).next() else {
        return Ok(HashMap::new());
    };
    let mut wanted: Vec<(Uuid, bool)> = valid().map(target).collect();
    wanted.sort_unstable();
    wanted.dedup();
    let (ids, episodes): (Vec<Uuid>, Vec<bool>) = wanted.into_iter().unzip();
    let mut transaction = edge::database::begin_with(pool, "begin read only").await?;
    // What answers a caller sees that caller's tenant alone, whatever the query says.
    let visible = sqlx::query!(
        "select set_config('springtide.tenant', $1, true) as tenant, \
                set_config('statement_timeout', '5s', true) as statement_timeout",
        tenant
    );
    visible.fetch_one(&mut *transaction).await?;
    let rows = sqlx::query_file!("src/entry/api/dryrun.sql", tenant, &ids, &episodes)
        .fetch_all(&mut *transaction)
        .await?;
    let mut targets = HashMap::new();
    for row in rows {
        let stored = Stored {
            generations: row.generations,
            open: row.open,
            closes_at: row.closes_at,
            feedback: row.feedback,
        };
        targets.insert((row.id, row.episode), stored);
    }
    Ok(targets)
}

/// The id of an event's target, and whether it is an episode.
fn target(event: &Event) -> (Uuid, bool) {
    match &event.body {
        Body::Generation(generation) => (generation.id, false),
        // The feedback's own target is not looked up, so the state is always unknown.
        Body::Retraction(retraction) => (retraction.feedback_id, false),
        Body::EpisodeEnd(end) => (end.episode_id, true),
        Body::Feedback(feedback) => match feedback.target {
            Target::Generation(id) => (id, false),
            Target::Episode(id) => (id, true),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use time::macros::datetime;

    #[test]
    fn feedback_counts_waits_or_is_late_as_the_sink_and_the_closer_decide() {
        let closes_at = datetime!(2026-11-21 10:00 UTC);
        let second = time::Duration::seconds(1);
        let unknown = Stored::default();
        let closed = Stored {
            generations: 2,
            ..unknown
        };
        let open = Stored {
            open: 1,
            closes_at: Some(closes_at),
            ..closed
        };
        let decide = |stored: Stored, given_at| (stored.state(), stored.outcome(given_at));
        assert_eq!(decide(unknown, closes_at), (TargetState::Unknown, JoinOutcome::Waits));
        assert_eq!(decide(closed, closes_at), (TargetState::Closed, JoinOutcome::Late));
        assert_eq!(decide(open, closes_at), (TargetState::Open, JoinOutcome::Counts));
        assert_eq!(decide(open, closes_at + second), (TargetState::Open, JoinOutcome::Late));
    }
}
