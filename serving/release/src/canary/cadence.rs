//! Proposals of the release loop: the version of `learner`, as often as `[release.propose]` says.

use super::tables::{self, Canary};
use super::{CHAMPION, LOOP, State, check};
use crate::judgment;
use crate::options::Cadence;
use crate::{REALTIME, ReleaseService};
use anyhow::Context;
use edge::audit::{self, Actor};
use sqlx::PgConnection;
use time::OffsetDateTime;

/// What is known when a proposal may be due.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Known {
    now: OffsetDateTime,
    /// When the canary before it ended. Without one: when `champion` was last moved.
    since: OffsetDateTime,
    /// Of the line, after the one proposed before and after `champion`, up to that of `learner`.
    versions: i64,
    /// That these were trained on.
    trajectories: i64,
}

/// Why the version of `learner` is proposed now. `None`: it is not time yet.
fn due(cadence: &Cadence, known: &Known) -> Option<String> {
    let waited = (known.now - known.since).whole_seconds().max(0).unsigned_abs();
    let (versions, trajectories) = (
        known.versions.max(0).unsigned_abs(),
        known.trajectories.max(0).unsigned_abs(),
    );
    let is_due = waited >= cadence.every.0.as_secs()
        && versions >= u64::from(cadence.versions)
        && trajectories >= cadence.trajectories;
    is_due.then(|| format!("{versions} versions further, trained on {trajectories} trajectories, {waited} s later"))
}

/// Proposes the version of `learner` if it is due. Returns whether it did.
pub async fn propose(service: &ReleaseService, connection: &mut PgConnection) -> anyhow::Result<bool> {
    let inner = &service.0;
    let (policy, Some(cadence)) = (&inner.policy, &inner.options.propose) else {
        return Ok(false);
    };
    let now = OffsetDateTime::now_utc();
    if inner.options.freeze.iter().any(|window| window.contains(now)) {
        return Ok(false);
    }
    let mut transaction = crate::tables::begin_on(connection, policy).await.context("begin")?;
    let latest = tables::latest(&mut transaction, policy, 1)
        .await
        .context("read the last canary")?;
    let last = latest.first();
    let unfinished = tables::unfinished(&mut transaction, policy)
        .await
        .context("read canaries")?;
    if unfinished.iter().any(|canary| canary.state != State::Champion) {
        return Ok(false);
    }
    let state = crate::tables::read(&mut transaction, policy, service.rules()).await;
    let state = state.context("read the release state")?;
    let (Some(learner), Some(champion)) = (state.learner(), state.alias(CHAMPION)) else {
        return Ok(false);
    };
    let version = learner.version;
    let after = last.map_or(champion.version, |last| last.version.max(champion.version));
    let counted = counted(&mut transaction, policy, after, version).await;
    let (versions, trajectories) = counted.context("count versions")?;
    let since = match last {
        Some(canary) => ended(&mut transaction, canary)
            .await
            .context("read when the last canary ended")?,
        None => champion.created_at,
    };
    let known = Known {
        now,
        since,
        versions,
        trajectories,
    };
    let Some(reason) = due(cadence, &known) else {
        return Ok(false);
    };
    let bad = judgment::bad_ancestor(&mut transaction, policy, version).await;
    if bad.context("look for a bad version below it")?.is_some() || check(&state, version).is_err() {
        return Ok(false);
    }
    let id = tables::propose(&mut transaction, policy, version, &inner.options.canary, LOOP, &reason)
        .await
        .context("propose")?;
    let owner = sqlx::query_scalar!("select tenant_id from policy where name = $1", policy)
        .fetch_optional(&mut *transaction)
        .await
        .context("read the policy's owner")?
        .unwrap_or_else(|| edge::auth::OPEN_TENANT.to_owned());
    let change = audit::Change {
        tenant: &owner,
        action: "canary.propose",
        subject: &id.to_string(),
        detail: &format!("version {version} of {policy}"),
        reason: &reason,
    };
    let role = audit::role_name("control");
    let actor = Actor { key: None, name: &role };
    audit::append(&mut transaction, actor, change)
        .await
        .context("write the audit")?;
    transaction.commit().await.context("commit the proposal")?;
    tracing::info!(canary = %id, version, reason, "canary proposed");
    Ok(true)
}

async fn ended(connection: &mut PgConnection, canary: &Canary) -> sqlx::Result<OffsetDateTime> {
    let at = sqlx::query_scalar!(
        "select at from canary_transition where canary_id = $1 order by id desc limit 1",
        canary.id
    )
    .fetch_optional(connection)
    .await?;
    Ok(at.unwrap_or(canary.created_at))
}

/// Versions of the realtime line above `after` up to `until`, and the trajectories that they were trained
/// on.
async fn counted(connection: &mut PgConnection, policy: &str, after: i64, until: i64) -> sqlx::Result<(i64, i64)> {
    let row = sqlx::query!(
        r#"select count(*) as "versions!", coalesce(sum((s.metrics ->> 'trajectories')::bigint), 0)::bigint as "trajectories!"
           from version v
           left join step s on s.run_id = v.run_id and s.step = v.step
           where v.policy = $1 and v.line = $2 and v.serial > $3 and v.serial <= $4"#,
        policy,
        REALTIME,
        after,
        until
    )
    .fetch_one(connection)
    .await?;
    Ok((row.versions, row.trajectories))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::canary::Span;
    use std::time::Duration;
    use time::macros::datetime;

    #[test]
    fn it_is_due_when_all_three_hold() {
        let cadence = Cadence {
            every: Span(Duration::from_secs(600)),
            versions: 3,
            trajectories: 100,
        };
        let known = |minutes, versions, trajectories| Known {
            now: datetime!(2026-12-02 10:00 UTC) + time::Duration::minutes(minutes),
            since: datetime!(2026-12-02 10:00 UTC),
            versions,
            trajectories,
        };
        let reason = due(&cadence, &known(10, 3, 100));
        assert_eq!(
            reason.as_deref(),
            Some("3 versions further, trained on 100 trajectories, 600 s later")
        );
        for not_yet in [known(9, 3, 100), known(10, 2, 100), known(10, 3, 99), known(-1, 9, 999)] {
            assert_eq!(due(&cadence, &not_yet), None, "{not_yet:?}");
        }
    }
}
