//! The table `judgement`: the queue of the judges, the record of their answers, and the cache.
//!
//! ```text
//!  queued ── taken ── answered ── sent          next_at null
//!    ▲         │          └── sent again after a crash: the same event
//!    └─ failed ┘── given up (error)             next_at null
//! ```
//!
//! A process takes a judgement for a short time and renews that while it works. So what a killed
//! process had taken is soon taken by another. What happens to a text happens to its queued copies.

mod queue;

use event_log::event::{Feedback, Target, Value};
use sqlx::PgConnection;
use time::{Duration, OffsetDateTime};

use super::feedback::SIGNALS_MAX;
use super::insert::Row;
use crate::judge::Judges;
pub(crate) use queue::{Answer, Key, Queue, State, Taken};

/// Queues the texts among this feedback, which has just been stored.
pub(super) async fn queue(
    connection: &mut PgConnection,
    feedback: &[Row<'_, Feedback>],
    judges: &Judges,
) -> sqlx::Result<()> {
    let (mut tenants, mut ids, mut names, mut digests) = (vec![], vec![], vec![], vec![]);
    for row in feedback {
        let Value::Text(text) = &row.body.value else { continue };
        for judge in judges.iter().filter(|judge| judge.of() == row.body.metric_name) {
            if judge.reads_texts_of(&row.event.tenant) {
                tenants.push(row.event.tenant.clone());
                ids.push(row.body.id);
                names.push(judge.name().to_owned());
                digests.push(blake3::hash(text.as_bytes()).as_bytes().to_vec());
            }
        }
    }
    if ids.is_empty() {
        return Ok(());
    }
    sqlx::query!(
        "insert into judgement (tenant_id, feedback_id, judge, text_digest) \
         select * from unnest($1::text[], $2::uuid[], $3::text[], $4::bytea[]) on conflict do nothing",
        &tenants,
        &ids,
        &names,
        &digests
    )
    .execute(connection)
    .await?;
    Ok(())
}

/// Whose answers a trajectory needs, about what, and of texts given until when.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    pub tenant: String,
    pub target: Target,
    pub judge: String,
    /// The metric of the texts.
    pub of: String,
    pub until: OffsetDateTime,
    /// Absent: all that has arrived counts.
    pub arrived: Option<Arrived>,
}

/// Which events count: those that had arrived by then.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arrived {
    pub until: OffsetDateTime,
    /// When the trajectory was closed. What is marked late arrived afterwards, even if its transaction
    /// began before.
    pub closed_at: OffsetDateTime,
}

/// The first answer that is not there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Missing {
    /// It may still come.
    Open,
    /// It will not come.
    Failed,
}

/// What is missing of each.
pub(crate) async fn missing(connection: &mut PgConnection, asked: &[Asked]) -> sqlx::Result<Vec<Option<Missing>>> {
    let mut missing = vec![None; asked.len()];
    if asked.is_empty() {
        return Ok(missing);
    }
    macro_rules! column {
        ($row:ident => $value:expr) => {
            &asked.iter().map(|$row| $value).collect::<Vec<_>>()
        };
    }
    let rows = sqlx::query_file!(
        "src/rows/judgement/missing.sql",
        column!(row => row.tenant.clone()),
        column!(row => match row.target { Target::Generation(id) | Target::Episode(id) => id }),
        column!(row => matches!(row.target, Target::Episode(_))),
        column!(row => row.judge.clone()),
        column!(row => row.of.clone()),
        column!(row => row.until),
        column!(row => row.arrived.map(|arrived| arrived.until)) as _,
        column!(row => row.arrived.map(|arrived| arrived.closed_at + Duration::microseconds(1))) as _,
        SIGNALS_MAX
    )
    .fetch_all(connection)
    .await?;
    for row in rows {
        if let Some(missing) = usize::try_from(row.nth - 1).ok().and_then(|nth| missing.get_mut(nth)) {
            *missing = Some(if row.is_open { Missing::Open } else { Missing::Failed });
        }
    }
    Ok(missing)
}
