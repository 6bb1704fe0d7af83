//! What a version was trained on: the step that made it, and the generations that the step learned from.
//! For its page, and for `springtide policy inspect`.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;
use sqlx::PgConnection;
use time::{Duration, OffsetDateTime};
use uuid::Uuid;

/// How long before a step what it dropped may have been decided.
const DROPPED_MAX: Duration = Duration::DAY;
/// How much earlier than the oldest that was trained on it may have been sampled.
const DROPPED_EARLIER: Duration = Duration::HOUR;

/// A step of a run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Step {
    pub run: Uuid,
    /// Of the run, such as `realtime`.
    pub kind: String,
    pub step: i64,
    #[serde(with = "time::serde::rfc3339")]
    pub committed_at: OffsetDateTime,
    /// What the trainer measured.
    pub metrics: Value,
    /// Generations that it was trained on: of all tenants, and also those that retention has deleted.
    pub generations: i64,
    /// Those of them that are stored and may be shown.
    pub groups: Vec<Group>,
    /// Generations that the run dropped since the step before, for a day at most.
    pub dropped: Vec<Dropped>,
}

/// What a step was trained on of one tenant and arm.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Group {
    pub tenant: String,
    pub arm: String,
    pub generations: i64,
    #[serde(with = "time::serde::rfc3339")]
    pub first_sampled_at: OffsetDateTime,
    #[serde(with = "time::serde::rfc3339")]
    pub last_sampled_at: OffsetDateTime,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Dropped {
    pub code: String,
    pub generations: i64,
}

impl Step {
    /// Mean reward of its trajectories.
    pub fn reward_mean(&self) -> Option<f64> {
        self.metrics["reward_mean"].as_f64()
    }

    /// When the first and the last of its generations were sampled, of those that are shown.
    pub fn sampled(&self) -> Option<[OffsetDateTime; 2]> {
        sampled(&self.groups)
    }

    /// `learner 60, champion 4`
    pub fn arms(&self) -> String {
        listed(self.groups.iter().map(|group| (&*group.arm, group.generations)))
    }

    /// `default 64`
    pub fn tenants(&self) -> String {
        listed(self.groups.iter().map(|group| (&*group.tenant, group.generations)))
    }

    /// `stale 7, zero_variance_group 2`
    pub fn dropped(&self) -> String {
        listed(self.dropped.iter().map(|one| (&*one.code, one.generations)))
    }

    /// Generations that it was trained on and that are not shown.
    pub fn hidden(&self) -> i64 {
        let shown: i64 = self.groups.iter().map(|group| group.generations).sum();
        (self.generations - shown).max(0)
    }
}

fn sampled(groups: &[Group]) -> Option<[OffsetDateTime; 2]> {
    let first = groups.iter().map(|group| group.first_sampled_at).min()?;
    let last = groups.iter().map(|group| group.last_sampled_at).max()?;
    Some([first, last])
}

/// Sums by name, the largest first. A dash if there are none.
fn listed<'a>(counts: impl Iterator<Item = (&'a str, i64)>) -> String {
    let mut sums: BTreeMap<&str, i64> = BTreeMap::new();
    for (name, count) in counts {
        *sums.entry(name).or_default() += count;
    }
    let mut sums: Vec<(&str, i64)> = sums.into_iter().collect();
    sums.sort_by_key(|(_, count)| Reverse(*count));
    let sums: Vec<String> = sums.iter().map(|(name, count)| format!("{name} {count}")).collect();
    match sums.is_empty() {
        true => "–".to_owned(),
        false => sums.join(", "),
    }
}

/// The step of a run, with what is shown to `tenant`; `None`: to all. `None` if there is no such step.
pub async fn of_step(
    reader: &mut PgConnection,
    run: Uuid,
    step: i64,
    tenant: Option<&str>,
) -> sqlx::Result<Option<Step>> {
    let found = sqlx::query!(
        r#"select r.kind, s.metrics, s.committed_at,
                  coalesce((select b.committed_at from step b where b.run_id = s.run_id and b.step = s.step - 1),
                           r.created_at) as "before!",
                  (select count(*) from trajectory_use u
                   where u.run_id = s.run_id and u.step = s.step and u.purpose = 'trained') as "generations!"
           from step s
           join run r on r.id = s.run_id
           where s.run_id = $1 and s.step = $2"#,
        run,
        step
    )
    .fetch_optional(&mut *reader)
    .await?;
    let Some(row) = found else { return Ok(None) };
    let groups = sqlx::query_file_as!(Group, "src/trained/groups.sql", run, step, tenant)
        .fetch_all(&mut *reader)
        .await?;
    let since = row.before.max(row.committed_at - DROPPED_MAX);
    let oldest = sampled(&groups).map_or(since, |[first, _]| first.min(since).max(since - DROPPED_MAX));
    let dropped = match &*row.kind {
        "realtime" | "grpo" => {
            let earliest = oldest - DROPPED_EARLIER;
            sqlx::query_file_as!(
                Dropped,
                "src/trained/dropped.sql",
                run,
                since,
                row.committed_at,
                earliest
            )
            .fetch_all(reader)
            .await?
        }
        // a run over a dataset drops nothing
        _ => Vec::new(),
    };
    Ok(Some(Step {
        run,
        kind: row.kind,
        step,
        committed_at: row.committed_at,
        metrics: row.metrics,
        generations: row.generations,
        groups,
        dropped,
    }))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use serde_json::json;
    use time::macros::datetime;

    /// Trained on 64 generations, of which 62 are shown.
    pub(crate) fn step() -> Step {
        let group = |tenant: &str, arm: &str, generations, minute| Group {
            tenant: tenant.into(),
            arm: arm.into(),
            generations,
            first_sampled_at: datetime!(2026-11-26 02:00 UTC) + Duration::minutes(minute),
            last_sampled_at: datetime!(2026-11-26 02:30 UTC) + Duration::minutes(minute),
        };
        Step {
            run: Uuid::from_u128(7),
            kind: "realtime".into(),
            step: 4,
            committed_at: datetime!(2026-11-26 03:00 UTC),
            metrics: json!({"loss": -0.25, "kl": 1e-5, "reward_mean": 0.312}),
            generations: 64,
            groups: vec![
                group("default", "champion", 30, 5),
                group("other", "<learner>", 20, 0),
                group("default", "<learner>", 12, 10),
            ],
            dropped: vec![Dropped {
                code: "stale".into(),
                generations: 7,
            }],
        }
    }

    #[test]
    fn what_a_step_was_trained_on_is_summed_by_arm_and_by_tenant() {
        let step = step();
        assert_eq!(step.arms(), "<learner> 32, champion 30");
        assert_eq!(step.tenants(), "default 42, other 20");
        assert_eq!((step.dropped(), step.hidden()), ("stale 7".to_owned(), 2));
        assert_eq!(
            step.sampled(),
            Some([datetime!(2026-11-26 02:00 UTC), datetime!(2026-11-26 02:40 UTC)])
        );
        let gone = Step {
            groups: Vec::new(),
            dropped: Vec::new(),
            ..step
        };
        assert_eq!((gone.arms(), gone.hidden()), ("–".to_owned(), 64));
        assert_eq!(gone.sampled(), None);
    }
}
