//! `/releases`: canaries, and every move of an alias with who and why.

pub mod canary;

use axum::extract::State;
use edge::Problem;
use maud::{Markup, html};
use report::number::percent;
use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::page::layout::{Action, Input, Region, Shown, actions, framed, table, text};
use crate::page::site::Site;
use crate::page::viewer::{Audience, Viewer};
use crate::page::watched::Watched;
use crate::page::words::{ago, clock, version, version_or_none};
use crate::tables::unavailable;

/// A canary in the list.
#[derive(Debug, Clone)]
pub struct Listed {
    pub id: Uuid,
    pub version: i64,
    pub control: Option<i64>,
    pub state: String,
    pub actor: String,
    pub reason: String,
    pub created_at: OffsetDateTime,
    /// Of champion's users, 0 to 1.
    pub share: f64,
    /// Of the last decision.
    pub why: Option<String>,
}

/// An alias that moved, or was not allowed to.
#[derive(Debug, Clone)]
pub struct Move {
    pub alias: String,
    pub from_version: Option<i64>,
    pub to_version: i64,
    pub kind: String,
    pub status: String,
    pub epoch: Option<i64>,
    pub actor: String,
    pub reason: String,
    pub at: OffsetDateTime,
}

/// What a person can decide about a canary in a state, and what it does.
pub fn decisions(state: &str) -> &'static [(&'static str, &'static str)] {
    const ABORT: (&str, &str) = (
        "abort",
        "The canary ends. Its users get champion again, within seconds.",
    );
    const PROMOTE: (&str, &str) = (
        "promote",
        "All of champion's users get this version now, without further evidence.",
    );
    const HOLD: (&str, &str) = ("hold", "The canary stays at this step. Its users keep it.");
    match state {
        "proposed" => &[
            (
                "approve",
                "You approve it. With enough approvals, some of champion's users get it step by step.",
            ),
            ABORT,
        ],
        "gated" | "shadow" => &[ABORT],
        "canary" => &[
            HOLD,
            ("resume", "A pause ends at once. An analysis goes on."),
            PROMOTE,
            ABORT,
        ],
        "paused" => &[
            ("resume", "The analysis goes on for as long as its timeout says."),
            PROMOTE,
            HOLD,
            ABORT,
        ],
        "held" => &[
            (
                "resume",
                "It goes on with the step where it was. What has held it may hold it again.",
            ),
            PROMOTE,
            ABORT,
        ],
        "champion" => &[(
            "rollback",
            "champion goes back to the version that it had before this canary. This one counts as bad, with all that was \
             trained on top of it; release.after_harm says what becomes of learner.",
        )],
        _ => &[],
    }
}

/// A canary's state, in its color.
pub fn state(state: &str) -> Markup {
    let class = match state {
        "champion" | "retired" => "good",
        "aborted" | "rolled_back" => "bad",
        _ => "open",
    };
    html! { span .state .(class) { (state.replace('_', " ")) } }
}

async fn read(reader: &mut PgConnection, policy: &str) -> sqlx::Result<(Vec<Listed>, Vec<Move>)> {
    let canaries = sqlx::query_as!(
        Listed,
        r#"select c.id, c.version, c.control, c.state, c.actor, c.reason, c.created_at,
                  coalesce(last.share, 0) as "share!", last.reason as "why?"
           from canary c
           left join lateral (select t.share, t.reason from canary_transition t
                              where t.canary_id = c.id order by t.id desc limit 1) last on true
           where c.policy = $1 order by c.id desc limit 30"#,
        policy
    )
    .fetch_all(&mut *reader)
    .await?;
    // the newest transitions are found by their ids, which are in the order of time
    let moves = sqlx::query_as!(
        Move,
        r#"select r.alias, r.from_version, r.to_version, r.kind, r.status, t.epoch, t.actor, t.reason, t.at
           from (select * from transition order by id desc limit 300) t
           join release r on r.id = t.release_id
           where r.policy = $1
           order by t.id desc limit 60"#,
        policy
    )
    .fetch_all(reader)
    .await?;
    Ok((canaries, moves))
}

pub async fn regions(site: &Site) -> Result<Vec<Region>, Problem> {
    let mut reader = site.read(Some("")).await?;
    let (canaries, moves) = read(&mut reader, site.policy()).await.map_err(unavailable)?;
    Ok(shown(&canaries, &moves, OffsetDateTime::now_utc()))
}

fn shown(canaries: &[Listed], moves: &[Move], now: OffsetDateTime) -> Vec<Region> {
    vec![
        Region {
            id: "canaries",
            title: "Canaries",
            body: listed(canaries, now),
            sources: vec!["springtide canary list".into(), "GET /v1/canaries?limit=30".into()],
        },
        Region {
            id: "moves",
            title: "Moves of aliases",
            body: moved(moves, now),
            sources: vec![
                "springtide release list --history 60".into(),
                "GET /v1/releases?limit=60".into(),
                "springtide audit list --action release   (those that people made; --action canary: their decisions about canaries)".into(),
            ],
        },
    ]
}

fn listed(canaries: &[Listed], now: OffsetDateTime) -> Markup {
    let rows: Vec<Vec<Markup>> = canaries
        .iter()
        .map(|canary| {
            vec![
                html! { a href=(format!("/releases/{}", canary.id)) { "version " (canary.version) } },
                state(&canary.state),
                text(percent((canary.share > 0.0).then_some(canary.share), 0)),
                version_or_none(canary.control),
                ago(canary.created_at, now),
                html! { span .long { b { (canary.actor) } ": " (canary.reason) } },
                html! { span .long { (canary.why.as_deref().unwrap_or("–")) } },
            ]
        })
        .collect();
    let head = [
        "canary",
        "state",
        "users",
        "beside",
        "proposed",
        "by, and why",
        "last decision",
    ];
    table("Canaries", &head, &rows, "No canary has been proposed yet.")
}

fn moved(moves: &[Move], now: OffsetDateTime) -> Markup {
    let rows: Vec<Vec<Markup>> = moves
        .iter()
        .map(|one| {
            let refused = one.status != "done";
            vec![
                clock(one.at, now),
                html! { b { (one.alias) } },
                version_or_none(one.from_version),
                version(one.to_version),
                html! { (one.kind) @if refused { " " span .state .bad { (one.status) } } },
                text(one.epoch.map_or("–".to_owned(), |epoch| epoch.to_string())),
                text(&one.actor),
                html! { span .long { (one.reason) } },
            ]
        })
        .collect();
    let head = ["at (UTC)", "alias", "from", "to", "kind", "epoch", "by", "why"];
    table("Moves of aliases", &head, &rows, "No alias has moved yet.")
}

/// A button that proposes a canary.
fn propose(audience: &Audience) -> Markup {
    let action = Action {
        id: "propose".into(),
        button: "Propose a canary".into(),
        does: "Some of champion's users get this version, step by step, while it is compared with champion on what they do. The \
               steps are those of [release.canary] in the configuration. champion must be held (pinned)."
            .into(),
        path: "/v1/canaries".into(),
        fixed: serde_json::Map::new(),
        inputs: vec![Input::version(None), Input::reason()],
        command: "springtide canary propose VERSION --reason '…'".into(),
        dangerous: false,
    };
    actions(&[action], (!audience.may_release).then_some("release"))
}

pub async fn page(State(site): State<Site>, viewer: Viewer) -> Result<Shown, Problem> {
    let lead = html! { "Versions that are tried on some users first, and every move of an alias." };
    let parts = [lead, html! {}, propose(&viewer.audience)];
    let regions = regions(&site).await?;
    Ok(framed(
        &site,
        &viewer,
        Watched::Releases,
        "Releases",
        "/releases",
        parts,
        &regions,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use time::macros::datetime;

    const NOW: OffsetDateTime = datetime!(2026-11-26 03:00 UTC);

    #[test]
    fn canaries_and_moves_are_listed_with_who_and_why() {
        let canary = Listed {
            id: Uuid::from_u128(7),
            version: 60,
            control: Some(41),
            state: "rolled_back".into(),
            actor: "ada".into(),
            reason: "try <it>".into(),
            created_at: NOW,
            share: 0.0,
            why: Some("rewards: harm".into()),
        };
        let refused = Move {
            alias: "champion".into(),
            from_version: None,
            to_version: 3,
            kind: "promote".into(),
            status: "refused".into(),
            epoch: None,
            actor: "bob".into(),
            reason: "<b>".into(),
            at: NOW,
        };
        let page: String = shown(&[canary], &[refused], NOW)
            .into_iter()
            .map(|region| region.body.into_string())
            .collect();
        for part in [
            "/releases/00000000-0000-0000-0000-000000000007",
            "rolled back",
            "try &lt;it&gt;",
            "rewards: harm",
            "refused",
            "&lt;b&gt;",
        ] {
            assert!(page.contains(part), "{part}: {page}");
        }
        let none: Vec<_> = shown(&[], &[], NOW);
        assert!(none[0].body.clone().into_string().contains("No canary"));
    }

    #[test]
    fn every_decision_says_what_it_does() {
        for state in ["proposed", "gated", "shadow", "canary", "paused", "held", "champion"] {
            assert!(!decisions(state).is_empty(), "{state}");
            assert!(decisions(state).iter().all(|(_, does)| does.ends_with('.')), "{state}");
        }
        assert!(decisions("retired").is_empty());
    }
}
