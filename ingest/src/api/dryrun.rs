//! What would become of events, without sending them: checked as if they were sent, and joined with what the tables hold
//! now. Needs the database, and not the log.

use std::collections::HashMap;

use edge::problem::Problem;
use serde::{Deserialize, Serialize};
use sqlx::PgPool;
use time::OffsetDateTime;
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

use super::Api;
use super::accept::Examined;
use crate::event::{Body, Event, Target};

/// Of every way in.
#[derive(Debug, Clone, Copy, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Options {
    /// Check and join, and write nothing.
    #[serde(default)]
    #[param(required = false)]
    pub dryrun: bool,
}

/// What would become of one event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub(super) struct Outlook {
    /// The same event is there already, so nothing would change.
    duplicate: bool,
    /// What it is about: of a feedback its generation or episode, of a generation itself.
    target: Standing,
    /// Until when feedback about it counts; of an episode, about the last of its open generations.
    #[serde(with = "time::serde::rfc3339::option", skip_serializing_if = "Option::is_none")]
    closes_at: Option<OffsetDateTime>,
    /// How many feedbacks about it are stored. They wait where it is not known.
    feedback_stored: i64,
    /// Of a feedback only.
    #[serde(skip_serializing_if = "Option::is_none")]
    feedback: Option<Fate>,
}

/// What the tables say of a generation or an episode of this tenant. The log may hold more for a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum Standing {
    Unknown,
    Open,
    Closed,
}

/// What a feedback would do. Whether its metric decides about a reward is the surface's matter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum Fate {
    /// It would be part of the trajectory.
    Counts,
    /// It would wait for what it is about, and become a dead letter if that never came.
    Waits,
    /// It would be kept and change nothing.
    Late,
}

#[derive(Debug, Clone, Copy, Default)]
struct Known {
    generations: i64,
    open: i64,
    closes_at: Option<OffsetDateTime>,
    feedback: i64,
}

impl Known {
    fn standing(self) -> Standing {
        match self {
            Self { generations: 0, .. } => Standing::Unknown,
            Self { open: 0, .. } => Standing::Closed,
            _ => Standing::Open,
        }
    }

    /// As the sink and the closer would decide about a feedback that was given at `given_at`.
    fn fate(self, given_at: OffsetDateTime) -> Fate {
        match self.standing() {
            Standing::Unknown => Fate::Waits,
            Standing::Closed => Fate::Late,
            Standing::Open if self.closes_at.is_some_and(|closes_at| given_at > closes_at) => Fate::Late,
            Standing::Open => Fate::Counts,
        }
    }
}

type Forecast = Result<(Event, Outlook), Problem>;

impl Api {
    /// One event of one tenant, forecast instead of accepted.
    pub(super) async fn forecast_one(&self, event: Event) -> Forecast {
        let mut results = self.forecast(vec![Ok(event)]).await?;
        results
            .pop()
            .unwrap_or_else(|| Err(Problem::internal("an event without a result")))
    }

    /// Events of one tenant, forecast in order.
    pub(super) async fn forecast(&self, events: Vec<Result<Event, Problem>>) -> Result<Vec<Forecast>, Problem> {
        let examined = self.examine(events).await;
        let pool = self.pool.as_ref().ok_or_else(|| {
            Problem::not_implemented("a collector has no tables to join with: send dry runs to its upstream")
        })?;
        let known = known_of(pool, &examined).await.map_err(|error| {
            tracing::warn!(%error, "a dry run cannot be joined");
            Problem::unavailable("a dry run needs the database, which does not answer", 1)
        })?;
        let forecast = |examined: Examined| {
            let known = known.get(&about(&examined.event)).copied().unwrap_or_default();
            let outlook = Outlook {
                duplicate: examined.duplicate,
                target: known.standing(),
                closes_at: known.closes_at,
                feedback_stored: known.feedback,
                feedback: match examined.event.body {
                    Body::Feedback(_) => Some(known.fate(examined.event.time)),
                    Body::Generation(_) | Body::Retraction(_) | Body::EpisodeEnd(_) => None,
                },
            };
            (examined.event, outlook)
        };
        Ok(examined.into_iter().map(|examined| examined.map(forecast)).collect())
    }
}

async fn known_of(pool: &PgPool, examined: &[Result<Examined, Problem>]) -> sqlx::Result<HashMap<(Uuid, bool), Known>> {
    let valid = || examined.iter().flatten().map(|examined| &examined.event);
    let Some(tenant) = valid().map(|event| &event.tenant).next() else {
        return Ok(HashMap::new());
    };
    let mut wanted: Vec<(Uuid, bool)> = valid().map(about).collect();
    wanted.sort_unstable();
    wanted.dedup();
    let (ids, episodes): (Vec<Uuid>, Vec<bool>) = wanted.into_iter().unzip();
    let rows = sqlx::query_file!("src/api/dryrun.sql", tenant, &ids, &episodes)
        .fetch_all(pool)
        .await?;
    let mut known = HashMap::new();
    for row in rows {
        let found = Known {
            generations: row.generations,
            open: row.open,
            closes_at: row.closes_at,
            feedback: row.feedback,
        };
        known.insert((row.id, row.episode), found);
    }
    Ok(known)
}

/// What an event is about, and whether that is an episode.
fn about(event: &Event) -> (Uuid, bool) {
    match &event.body {
        Body::Generation(generation) => (generation.id, false),
        // What its feedback is about is not looked up: always unknown.
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
    fn feedback_counts_waits_or_is_late_as_the_sink_and_the_closer_would_have_it() {
        let closes_at = datetime!(2026-11-21 10:00 UTC);
        let second = time::Duration::seconds(1);
        let unknown = Known::default();
        let closed = Known {
            generations: 2,
            ..unknown
        };
        let open = Known {
            open: 1,
            closes_at: Some(closes_at),
            ..closed
        };
        assert_eq!(
            (unknown.standing(), unknown.fate(closes_at)),
            (Standing::Unknown, Fate::Waits)
        );
        assert_eq!(
            (closed.standing(), closed.fate(closes_at)),
            (Standing::Closed, Fate::Late)
        );
        assert_eq!((open.standing(), open.fate(closes_at)), (Standing::Open, Fate::Counts));
        assert_eq!(open.fate(closes_at + second), Fate::Late);
    }
}
