//! `/keys`: who may do what, and who changed what. For administrators alone: labels and reasons are
//! those of all tenants. Neither secrets nor their hashes are read.

use axum::extract::State;
use edge::Problem;
use maud::{Markup, html};
use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::page::layout::{Page, Region, Shown, table, text};
use crate::page::site::Site;
use crate::page::viewer::Viewer;
use crate::page::words::{ago, clock, short};
use crate::tables::unavailable;

#[derive(Debug)]
struct Key {
    id: Uuid,
    tenant_id: String,
    role: String,
    scopes: Option<Vec<String>>,
    label: String,
    replica: Option<String>,
    requests_per_second: Option<i32>,
    created_by: Option<String>,
    created_at: OffsetDateTime,
    expires_at: Option<OffsetDateTime>,
    revoked_at: Option<OffsetDateTime>,
    last_used: Option<OffsetDateTime>,
}

#[derive(Debug)]
struct Change {
    id: i64,
    at: OffsetDateTime,
    actor: String,
    tenant: String,
    action: String,
    subject: String,
    detail: String,
    reason: String,
}

async fn read(reader: &mut PgConnection) -> sqlx::Result<(Vec<Key>, Vec<Change>)> {
    // ids are in the order in which keys were made
    let keys = sqlx::query_as!(
        Key,
        "select id, tenant_id, role, scopes, label, replica, requests_per_second, created_by, created_at, expires_at,
                revoked_at, last_used
         from api_key order by id desc limit 200"
    )
    .fetch_all(&mut *reader)
    .await?;
    let changes = sqlx::query_as!(
        Change,
        "select id, at, actor, tenant, action, subject, detail, reason from audit order by id desc limit 100"
    )
    .fetch_all(reader)
    .await?;
    Ok((keys, changes))
}

pub async fn page(State(site): State<Site>, viewer: Viewer) -> Result<Shown, Problem> {
    let mut reader = site.read(viewer.audience.tenant()).await?;
    let (keys, changes) = read(&mut reader).await.map_err(unavailable)?;
    let now = OffsetDateTime::now_utc();
    let regions = [
        Region {
            id: "keys",
            title: "API keys",
            body: held(&keys, now),
            sources: vec!["springtide key list --all".into()],
        },
        Region {
            id: "audit",
            title: "Who changed what",
            body: changed(&changes, now),
            sources: vec![
                "springtide audit list --limit 100".into(),
                "springtide audit verify   (whether the record was changed)".into(),
            ],
        },
    ];
    let page = Page {
        title: "Keys and audit",
        section: "/keys",
        lead: html! { "The newest 200 keys, without their secrets, and the latest 100 changes that people and keys made." },
        live: None,
        top: html! {},
        regions: &regions,
        bottom: commands(),
    };
    Ok(page.show(&site, &viewer))
}

fn commands() -> Markup {
    html! {
        p .note {
            "Keys are made and revoked by those who reach the database: " code { "springtide key create" } ", "
            code { "springtide key revoke ID --reason '…'" } "."
        }
    }
}

fn held(keys: &[Key], now: OffsetDateTime) -> Markup {
    let rows: Vec<Vec<Markup>> = keys
        .iter()
        .map(|key| {
            let expired = key.expires_at.is_some_and(|at| at <= now);
            let (class, state) = match (key.revoked_at, expired) {
                (Some(_), _) => ("bad", "revoked"),
                (None, true) => ("bad", "expired"),
                (None, false) => ("good", "valid"),
            };
            let may = key.scopes.as_ref().map_or(key.role.clone(), |scopes| scopes.join(", "));
            vec![
                html! { b { (if key.label.is_empty() { "–" } else { &key.label }) } },
                html! { span .state .(class) { (state) } },
                html! {
                    (may)
                    @if let Some(replica) = &key.replica { " for the replica " (replica) }
                },
                text(&key.tenant_id),
                html! { @match key.last_used { Some(at) => (ago(at, now)), None => "never" } },
                html! { @match key.expires_at { Some(at) => (clock(at, now)), None => "never" } },
                html! { (ago(key.created_at, now)) @if let Some(by) = &key.created_by { " by " (by) } },
                text(
                    key.requests_per_second
                        .map_or("–".to_owned(), |limit| limit.to_string()),
                ),
                html! { code { (short(key.id)) } },
            ]
        })
        .collect();
    let head = [
        "holder",
        "state",
        "may",
        "tenant",
        "last used",
        "expires",
        "made",
        "requests/s",
        "id",
    ];
    table("API keys", &head, &rows, "There is no key yet: springtide key create")
}

fn changed(changes: &[Change], now: OffsetDateTime) -> Markup {
    let rows: Vec<Vec<Markup>> = changes
        .iter()
        .map(|change| {
            vec![
                text(change.id),
                clock(change.at, now),
                html! { b { (change.actor) } },
                html! { code { (change.action) } },
                html! { span .long { (change.subject) @if !change.detail.is_empty() { ": " (change.detail) } } },
                html! { span .long { (if change.reason.is_empty() { "–" } else { &change.reason }) } },
                text(&change.tenant),
            ]
        })
        .collect();
    let head = ["row", "at (UTC)", "who", "did", "to what", "why", "tenant"];
    table("Audit", &head, &rows, "Nobody has changed anything yet.")
}

#[cfg(test)]
mod tests {
    use super::*;
    use time::macros::datetime;

    #[test]
    fn keys_are_shown_with_what_they_may_and_whether_they_still_may() {
        let now = datetime!(2026-11-26 03:00 UTC);
        let key = |revoked: bool, expires_at| Key {
            id: Uuid::from_u128(7),
            tenant_id: "default".into(),
            role: "custom".into(),
            scopes: Some(vec!["read".into(), "release".into()]),
            label: "<ada>".into(),
            replica: None,
            requests_per_second: Some(20),
            created_by: Some("root".into()),
            created_at: now,
            expires_at,
            revoked_at: revoked.then_some(now),
            last_used: None,
        };
        let of = |key: Key| held(&[key], now).into_string();
        let page = of(key(false, None));
        for part in ["&lt;ada&gt;", "read, release", ">valid<", "never", "20"] {
            assert!(page.contains(part), "{part}: {page}");
        }
        assert!(of(key(true, None)).contains(">revoked<"));
        assert!(of(key(false, Some(now))).contains(">expired<"));
    }

    #[test]
    fn the_audit_shows_who_did_what_and_why() {
        let change = Change {
            id: 12,
            at: datetime!(2026-11-26 03:00 UTC),
            actor: "night <shift>".into(),
            tenant: "default".into(),
            action: "release.rollback".into(),
            subject: "demo@champion".into(),
            detail: "version 41".into(),
            reason: "bad & ugly".into(),
        };
        let page = changed(&[change], datetime!(2026-11-26 03:00 UTC)).into_string();
        for part in [
            "night &lt;shift&gt;",
            "release.rollback",
            "demo@champion: version 41",
            "bad &amp; ugly",
        ] {
            assert!(page.contains(part), "{part}: {page}");
        }
    }
}
