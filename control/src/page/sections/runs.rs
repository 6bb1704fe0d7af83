//! `/runs`: the latest runs. Each has a page of its own (`/runs/{id}`).

pub mod one;

use ::runs::api::runs::{self, Run};
use axum::extract::State;
use edge::Problem;
use maud::{Markup, html};
use time::OffsetDateTime;

use crate::page::layout::{Region, Shown, framed, table, text};
use crate::page::site::Site;
use crate::page::viewer::Viewer;
use crate::page::watched::Watched;
use crate::page::words::{ago, short, version_or_none};
use crate::tables::unavailable;

const RUNS_MAX: i64 = 60;

pub async fn regions(site: &Site) -> Result<Vec<Region>, Problem> {
    let mut reader = site.read(Some("")).await?;
    let runs = runs::newest(&mut *reader, site.policy(), runs::Page::default(), RUNS_MAX).await;
    let runs = runs.map_err(unavailable)?;
    Ok(vec![Region {
        id: "runs",
        title: "The latest runs",
        body: shown(&runs, OffsetDateTime::now_utc()),
        sources: vec!["springtide run list".into(), format!("GET /v1/runs?limit={RUNS_MAX}")],
    }])
}

fn shown(runs: &[Run], now: OffsetDateTime) -> Markup {
    let rows: Vec<Vec<Markup>> = runs
        .iter()
        .map(|run| {
            let class = match &*run.status {
                "failed" => "bad",
                "running" | "succeeded" => "good",
                _ => "open",
            };
            let total = run.steps_total.map_or(String::new(), |total| format!(" of {total}"));
            vec![
                html! { a href=(format!("/runs/{}", run.id)) { (run.kind) " " (short(run.id)) } },
                html! {
                    span .state .(class) { (run.status.replace('_', " ")) }
                    @if let Some(requested) = &run.requested { " asked to " (requested) }
                },
                html! { (run.steps_done) (total) },
                text(&run.line),
                version_or_none(run.base_version),
                version_or_none(run.head),
                ago(run.created_at, now),
                html! { @match run.finished_at { Some(at) => (ago(at, now)), None => "–" } },
                html! { span .long { (run.reason.as_deref().unwrap_or("–")) } },
            ]
        })
        .collect();
    let head = [
        "run", "status", "steps", "line", "base", "head", "made", "ended", "reason",
    ];
    table(
        "Runs",
        &head,
        &rows,
        "No run has been scheduled yet: springtide run create",
    )
}

pub async fn page(State(site): State<Site>, viewer: Viewer) -> Result<Shown, Problem> {
    let lead = html! { "Training, evaluations and exports. A run's page has its curves; /runs/compare?ids=A,B puts two side by side." };
    let regions = regions(&site).await?;
    Ok(framed(
        &site,
        &viewer,
        Watched::Runs,
        "Runs",
        "/runs",
        [lead, html! {}, html! {}],
        &regions,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use time::macros::datetime;
    use uuid::Uuid;

    #[test]
    fn runs_link_to_their_pages() {
        let now = datetime!(2026-11-26 03:00 UTC);
        let run = Run {
            id: Uuid::from_u128(7),
            kind: "grpo".into(),
            policy: "demo".into(),
            line: "run-<7>".into(),
            status: "failed".into(),
            reason: Some("out of <memory>".into()),
            alarm: None,
            config: serde_json::Value::Null,
            requested: None,
            recurs_from: None,
            result: None,
            base_version: Some(3),
            head: None,
            steps_done: 2,
            steps_total: Some(5),
            created_at: now,
            started_at: None,
            finished_at: Some(now),
        };
        let page = shown(&[run], now).into_string();
        for part in [
            "/runs/00000000-0000-0000-0000-000000000007",
            "2 of 5",
            "out of &lt;memory&gt;",
            "run-&lt;7&gt;",
        ] {
            assert!(page.contains(part), "{part}: {page}");
        }
    }
}
