//! `/versions`: reward and size by version, and where each comes from.

pub mod one;

use std::collections::BTreeMap;

use axum::extract::State;
use edge::Problem;
use edge::query::Query;
use maud::{Markup, html};
use report::Clusters;
use report::chart::{Axis, Chart, Point, Series};
use report::number::{decimal, percent, range};
use serde::Deserialize;
use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::layout::{Page, Region, Shown, table, text};
use crate::site::{Site, unavailable};
use crate::viewer::Viewer;
use crate::words::{ago, bytes, count, version, version_or_none};

const VERSIONS_MAX: i64 = 30;
/// With fewer users an interval is so wide that the chart shows nothing else.
const DRAWN_USERS_MIN: usize = 5;

/// A version as it was made.
#[derive(Debug, Clone)]
pub struct Version {
    pub serial: i64,
    pub parent: Option<i64>,
    pub line: String,
    pub branch: i32,
    pub run_id: Option<Uuid>,
    pub step: Option<i64>,
    pub delta_bytes: Option<i64>,
    pub image_bytes: i64,
    pub created_at: OffsetDateTime,
}

/// What users did with the newest answers of a version.
#[derive(Debug, Default)]
pub struct Use {
    pub answers: i64,
    pub declined: i64,
    /// By tenant and user.
    pub rewards: Clusters<(String, String)>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Asked {
    /// Only versions older than this one.
    before: Option<i64>,
    line: Option<String>,
}

async fn read(reader: &mut PgConnection, policy: &str, asked: &Asked) -> sqlx::Result<Vec<Version>> {
    let line = asked.line.as_deref().filter(|line| !line.is_empty());
    sqlx::query_as!(
        Version,
        "select serial, parent, line, branch, run_id, step, delta_bytes, image_bytes, created_at
         from (select * from version where policy = $1 and serial < $2 order by serial desc limit 5000) v
         where $3::text is null or line = $3
         order by serial desc limit $4",
        policy,
        asked.before.unwrap_or(i64::MAX),
        line,
        VERSIONS_MAX
    )
    .fetch_all(reader)
    .await
}

/// By version.
pub async fn uses(
    reader: &mut PgConnection,
    policy: &str,
    serials: &[i64],
    tenant: Option<&str>,
) -> sqlx::Result<BTreeMap<i64, Use>> {
    let rows = sqlx::query_file!("src/sections/versions.sql", policy, serials, tenant)
        .fetch_all(reader)
        .await?;
    let mut uses: BTreeMap<i64, Use> = BTreeMap::new();
    for row in rows {
        let one = uses.entry(row.serial).or_default();
        one.answers += row.answers;
        one.declined += row.declined;
        if row.rewarded > 0 {
            one.rewards
                .add_many((row.tenant_id, row.user_key), row.reward, row.rewarded as f64);
        }
    }
    Ok(uses)
}

pub async fn page(State(site): State<Site>, viewer: Viewer, Query(asked): Query<Asked>) -> Result<Shown, Problem> {
    let tenant = viewer.audience.tenant();
    let read = async {
        let mut reader = site.read(tenant).await?;
        let versions = read(&mut reader, site.policy(), &asked).await.map_err(unavailable)?;
        let serials: Vec<i64> = versions.iter().map(|version| version.serial).collect();
        let uses = uses(&mut reader, site.policy(), &serials, tenant)
            .await
            .map_err(unavailable)?;
        Ok((versions, uses))
    };
    let (versions, uses) = site.read_many(read).await?;
    let regions = [Region {
        id: "versions",
        title: "Reward and size",
        body: shown(&versions, &uses, OffsetDateTime::now_utc()),
        sources: vec![
            "springtide policy versions".into(),
            format!("GET /v1/versions?limit={VERSIONS_MAX}"),
            "rewards: the newest 200 answers of each version to users, in generation and trajectory".into(),
        ],
    }];
    let page = Page {
        title: "Versions",
        section: "/versions",
        lead: html! { "The newest versions, what users thought of their newest answers, and how large they are." },
        live: None,
        top: filter(&asked),
        regions: &regions,
        bottom: older(&versions, &asked),
    };
    Ok(page.show(&site, &viewer))
}

fn filter(asked: &Asked) -> Markup {
    html! {
        form .filter method="get" action="/versions" {
            div {
                label for="line" { "Line" }
                input id="line" name="line" value=(asked.line.as_deref().unwrap_or_default()) placeholder="realtime";
            }
            button { "Show" }
        }
    }
}

fn older(versions: &[Version], asked: &Asked) -> Markup {
    let full = i64::try_from(versions.len()) == Ok(VERSIONS_MAX);
    let last = versions.last().filter(|_| full).map(|version| version.serial);
    let line = asked.line.as_deref().unwrap_or_default();
    html! {
        @if let Some(last) = last {
            p { a href=(format!("/versions?before={last}&line={}", super::trajectories::encoded(line))) { "Older versions" } }
        }
    }
}

fn shown(versions: &[Version], uses: &BTreeMap<i64, Use>, now: OffsetDateTime) -> Markup {
    let rows: Vec<Vec<Markup>> = versions
        .iter()
        .map(|one| {
            let used = uses.get(&one.serial);
            let interval = used
                .and_then(|used| used.rewards.interval())
                .map(|interval| interval.ci95);
            vec![
                html! { b { (version(one.serial)) } },
                html! {
                    (decimal(used.and_then(|used| used.rewards.mean()), 3))
                    @if let Some(ends) = interval { " " small { (range(Some(ends), 3)) } }
                },
                text(count(
                    used.map_or(0, |used| i64::try_from(used.rewards.n()).unwrap_or(i64::MAX)),
                )),
                text(percent(
                    used.filter(|used| used.answers > 0)
                        .map(|used| used.declined as f64 / used.answers as f64),
                    0,
                )),
                text(one.delta_bytes.map_or("–".to_owned(), bytes)),
                text(bytes(one.image_bytes)),
                version_or_none(one.parent),
                html! { (one.line) @if one.branch > 0 { " " small { "branch " (one.branch) } } },
                made_by(one),
                ago(one.created_at, now),
            ]
        })
        .collect();
    let head = [
        "version", "reward", "scored", "declined", "delta", "whole", "parent", "line", "made by", "made",
    ];
    html! {
        (chart(versions, uses))
        (table("Versions", &head, &rows, "There is no such version."))
        p .note { "Rewards: of at most 200 newest answers to users, with the 95% interval by user. A version that served minutes \
                   ago has few scores yet." }
    }
}

/// The step that made a version.
fn made_by(one: &Version) -> Markup {
    html! {
        @match (one.run_id, one.step) {
            (Some(run), Some(step)) => { a href=(format!("/runs/{run}")) { "step " (step) } }
            _ => { "imported" }
        }
    }
}

fn chart(versions: &[Version], uses: &BTreeMap<i64, Use>) -> Markup {
    let points = versions.iter().rev().filter_map(|one| {
        let rewards = &uses.get(&one.serial)?.rewards;
        let mean = rewards.mean()?;
        Some(Point {
            x: one.serial as f64,
            y: mean,
            ci95: rewards
                .interval()
                .filter(|_| rewards.len() >= DRAWN_USERS_MIN)
                .map(|interval| interval.ci95),
            tooltip: format!(
                "version {}: {} of {} answers",
                one.serial,
                decimal(Some(mean), 3),
                rewards.n()
            ),
        })
    });
    let points: Vec<Point> = points.collect();
    let chart = Chart {
        title: "Reward by version",
        note: "mean of its newest answers, with the 95% interval by user",
        x: Axis::around(versions.iter().map(|one| one.serial as f64), 6.0, |serial| {
            decimal(Some(serial), 0)
        }),
        format_y: |y| decimal(Some(y), 2),
        from_zero: false,
        series: vec![Series {
            class: "primary",
            points,
        }],
    };
    html! { @if versions.len() > 1 { (chart.draw()) } }
}

#[cfg(test)]
mod tests {
    use super::*;
    use time::macros::datetime;

    const NOW: OffsetDateTime = datetime!(2026-11-26 03:00 UTC);

    fn version(serial: i64) -> Version {
        Version {
            serial,
            parent: (serial > 1).then_some(serial - 1),
            line: "real<time>".into(),
            branch: 1,
            run_id: (serial > 1).then_some(Uuid::from_u128(7)),
            step: (serial > 1).then_some(serial - 1),
            delta_bytes: (serial > 1).then_some(2048),
            image_bytes: 3 << 20,
            created_at: NOW,
        }
    }

    #[test]
    fn versions_are_shown_with_rewards_sizes_and_origin() {
        let mut of_two = Use {
            answers: 4,
            declined: 1,
            ..Use::default()
        };
        for (user, sum) in [("a", 2.0), ("b", 0.0)] {
            of_two.rewards.add_many(("t".into(), user.into()), sum, 2.0);
        }
        let page = shown(&[version(2), version(1)], &BTreeMap::from([(2, of_two)]), NOW).into_string();
        for part in [
            "0.500",
            "25%",
            "2.0 KiB",
            "3.0 MiB",
            "step 1",
            "imported",
            "real&lt;time&gt;",
            "branch 1",
            "<svg",
        ] {
            assert!(page.contains(part), "{part}: {page}");
        }
        assert!(!page.contains("NaN"), "{page}");
        assert!(
            shown(&[], &BTreeMap::new(), NOW)
                .into_string()
                .contains("no such version")
        );
    }
}
