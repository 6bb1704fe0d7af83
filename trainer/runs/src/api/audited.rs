//! Runs in the audit: who created, paused, resumed or canceled them, and with which configuration.

use crate::claim;
use edge::audit::rows::{Audited, Fingerprint};
use edge::audit::{self, Actor};
use sqlx::PgConnection;
use uuid::Uuid;

/// Appends that `actor` did this to the run. Call it last in the transaction of the change.
pub async fn append(
    connection: &mut PgConnection,
    actor: Actor<'_>,
    run: Uuid,
    action: &str,
    about: &str,
) -> sqlx::Result<()> {
    let rows = read(connection, Some(run)).await?;
    let row = rows.first().ok_or(sqlx::Error::RowNotFound)?;
    row.append(connection, actor, action, about, "").await
}

/// The same, done by the trainer itself.
pub async fn append_by_trainer(
    connection: &mut PgConnection,
    run: Uuid,
    action: &str,
    about: &str,
) -> sqlx::Result<()> {
    let name = &audit::role_name("train");
    append(connection, Actor { key: None, name }, run, action, about).await
}

/// All runs, to be compared with the audit's actions `run.…`.
pub async fn audited(connection: &mut PgConnection) -> sqlx::Result<Vec<Audited>> {
    read(connection, None).await
}

/// What a request decides and nothing changes later. `base_version` of the realtime run is filled in
/// when its line begins. The tenant is the policy's owner.
async fn read(connection: &mut PgConnection, run: Option<Uuid>) -> sqlx::Result<Vec<Audited>> {
    let rows = sqlx::query!(
        r#"
        select run.id, kind, policy, line, config::text as "config!", steps_total,
               case when kind <> 'realtime' then base_version end as base_version,
               coalesce(policy.tenant_id, 'default') as "tenant!"
        from run left join policy on policy.name = run.policy
        where $1::uuid is null or run.id = $1
        "#,
        run
    )
    .fetch_all(connection)
    .await?;
    let audited = rows.into_iter().map(|row| Audited {
        tenant: row.tenant,
        subject: row.id.to_string(),
        fingerprint: Fingerprint::of("run")
            .bytes(&row.id.as_bytes()[..])
            .text(&*row.kind)
            .text(&*row.policy)
            .text(&*row.line)
            .text(&*row.config)
            .number(row.base_version)
            .number(row.steps_total)
            .finish(),
    });
    Ok(audited.collect())
}

/// Runs whose state is not what the newest request left, such as a paused run that somebody set
/// going in its table.
pub async fn faults_of_state(connection: &mut PgConnection) -> sqlx::Result<Vec<String>> {
    let runs = sqlx::query!(
        r#"
        select r.id, r.status, r.reason, r.requested, a.action as "action!"
        from run r
        cross join lateral (
            select action from audit
            where subject = r.id::text
            and action in ('run.known', 'run.create', 'run.pause', 'run.resume', 'run.cancel')
            order by audit.id desc limit 1
        ) a
        order by r.id
        "#
    )
    .fetch_all(connection)
    .await?;
    let faults = runs.into_iter().filter_map(|run| {
        let state = State {
            status: &run.status,
            reason: run.reason.as_deref(),
            requested: run.requested.as_deref(),
        };
        let what = state.contradicts(&run.action)?;
        Some(format!("run {}: {what}", run.id))
    });
    Ok(faults.collect())
}

/// Columns of a run's row.
#[derive(Debug, Clone, Copy)]
struct State<'a> {
    status: &'a str,
    reason: Option<&'a str>,
    requested: Option<&'a str>,
}

impl State<'_> {
    /// How the row contradicts the newest request about the run. An executor that takes over sets a
    /// pausing run to running, and its request stays.
    fn contradicts(self, newest: &str) -> Option<&'static str> {
        let paused = matches!(self.status, "pausing" | "paused");
        let goes_on = matches!(self.status, "validating_files" | "queued" | "running");
        let by_request = |reason, request| self.reason == Some(reason) || self.requested == Some(request);
        let asked_to_pause = by_request(claim::PAUSED, "pause");
        let asked_to_cancel = by_request(claim::CANCELLED, "cancel");
        match newest {
            "run.pause" if goes_on && !asked_to_pause => Some("a request paused it, but it goes on"),
            "run.cancel" if (goes_on || paused) && !asked_to_cancel => Some("a request canceled it, but it goes on"),
            "run.cancel" | "run.known" => None,
            _ if asked_to_cancel => Some("its row says that a request canceled it, but none did"),
            "run.pause" => None,
            _ if paused && asked_to_pause => Some("its row says that a request paused it, but none did"),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_that_no_request_led_to_is_found() {
        let found = |status, reason, requested, newest| {
            let state = State {
                status,
                reason,
                requested,
            };
            state.contradicts(newest).is_some()
        };
        let (paused, canceled) = (Some("paused by request"), Some("cancelled by request"));
        // What requests and executors do.
        for (status, reason, requested, newest) in [
            ("queued", None, None, "run.create"),
            ("running", None, None, "run.resume"),
            ("pausing", paused, Some("pause"), "run.pause"),
            ("running", None, Some("pause"), "run.pause"),
            ("paused", paused, None, "run.pause"),
            ("paused", Some("three cohorts were refused"), None, "run.create"),
            ("succeeded", None, None, "run.pause"),
            ("running", None, Some("cancel"), "run.cancel"),
            ("cancelled", canceled, None, "run.cancel"),
            ("succeeded", None, None, "run.cancel"),
            ("failed", Some("no memory"), None, "run.create"),
            ("queued", Some("waits for its window"), None, "run.resume"),
            ("paused", paused, None, "run.known"),
        ] {
            assert!(!found(status, reason, requested, newest), "{status} after {newest}");
        }
        // What only somebody at the table does.
        for (status, reason, requested, newest) in [
            ("queued", None, None, "run.pause"),
            ("running", None, None, "run.pause"),
            ("queued", None, None, "run.cancel"),
            ("paused", paused, None, "run.create"),
            ("paused", paused, None, "run.resume"),
            ("pausing", None, Some("pause"), "run.create"),
            ("running", None, Some("cancel"), "run.create"),
            ("cancelled", canceled, None, "run.resume"),
            ("cancelled", canceled, None, "run.pause"),
        ] {
            assert!(found(status, reason, requested, newest), "{status} after {newest}");
        }
    }
}
