//! `/versions`: reward and size by version, and where each comes from.

pub mod one;

use ::runs::api::versions::{self, Version};
use axum::extract::State;
use edge::Problem;
use edge::query::Query;
use maud::{Markup, html};
use report::chart::{Axis, Chart, Point, Series};
use report::number::{decimal, percent, range};
use serde::Deserialize;
use time::{Duration, OffsetDateTime};

use crate::fields::encoded;
use crate::page::layout::{Page, Region, Shown, table, text};
use crate::page::site::Site;
use crate::page::viewer::Viewer;
use crate::page::words::{ago, bytes, count, version, version_or_none};
use crate::rewards::{self, Of, Period};
use crate::tables::unavailable;

const VERSIONS_MAX: i64 = 30;
/// Of a version, for its reward in the list.
const ANSWERS_MAX: i64 = 200;
/// Of `champion`, beside the last one: how long periods are, and how long ago they ended.
const COMPARED: Duration = Duration::minutes(15);
const COMPARED_AGES: [Duration; 4] = [Duration::ZERO, Duration::HOUR, Duration::DAY, Duration::WEEK];
const COMPARED_NAMES: [&str; 4] = ["now", "an hour ago", "a day ago", "a week ago"];
/// Of the chart.
const HOURS: i64 = 24;
/// With fewer users an interval is so wide that the chart shows nothing else.
const DRAWN_USERS_MIN: usize = 5;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Asked {
    /// Only versions older than this one.
    before: Option<i64>,
    line: Option<String>,
}

pub async fn page(State(site): State<Site>, viewer: Viewer, Query(asked): Query<Asked>) -> Result<Shown, Problem> {
    let tenant = viewer.audience.tenant();
    let read = async {
        let compared = read_compared(&site, tenant).await;
        let mut reader = site.read(tenant).await?;
        let asked = versions::Page {
            line: asked.line.clone().filter(|line| !line.is_empty()),
            after: asked.before,
            ..versions::Page::default()
        };
        let versions = versions::newest(&mut *reader, site.policy(), asked, VERSIONS_MAX).await;
        let versions = versions.map_err(unavailable)?;
        let serials: Vec<i64> = versions.iter().map(|version| version.serial).collect();
        let of = Of {
            policy: site.policy(),
            arm: None,
            surface: None,
            tenant,
        };
        let uses = rewards::read_versions(&mut reader, of, &serials, ANSWERS_MAX).await;
        let uses = uses.map_err(unavailable)?;
        Ok((versions, uses, compared))
    };
    let (versions, uses, found) = site.read_many(read).await?;
    let compared = Region {
        id: "compared",
        title: "Is champion worse than before?",
        body: match found {
            Ok((before, hours)) => compared(&before, &hours),
            // the rest of the page is as good without
            Err(problem) => html! { p .note { "It could not be read: " (problem.detail.unwrap_or_default()) } },
        },
        sources: vec![
            "springtide release compare".into(),
            "springtide release compare --period 1h --since 1d".into(),
            "GET /v1/rewards?arm=champion".into(),
        ],
    };
    let by_version = Region {
        id: "versions",
        title: "Reward and size",
        body: shown(&versions, &uses, OffsetDateTime::now_utc()),
        sources: vec![
            "springtide policy versions".into(),
            format!("GET /v1/versions?limit={VERSIONS_MAX}"),
            "GET /v1/rewards?versions=A,B   (there of up to 1,000 answers)".into(),
        ],
    };
    let regions = [compared, by_version];
    let page = Page {
        title: "Versions",
        section: "/versions",
        lead: html! { "What users think of champion now and before; then the newest versions, by reward and size." },
        live: None,
        top: filter(&asked),
        regions: &regions,
        bottom: older(&versions, &asked),
    };
    Ok(page.show(&site, &viewer))
}

/// `champion` in the periods that are compared, and by hour.
async fn read_compared(site: &Site, tenant: Option<&str>) -> Result<(Vec<Period>, Vec<Period>), Problem> {
    let mut reader = site.read(tenant).await?;
    let champion = Of {
        policy: site.policy(),
        arm: Some("champion"),
        surface: None,
        tenant,
    };
    let before = rewards::read(&mut reader, champion, COMPARED, &COMPARED_AGES).await;
    let hours = rewards::read(&mut reader, champion, Duration::HOUR, &hours()).await;
    Ok((before.map_err(unavailable)?, hours.map_err(unavailable)?))
}

/// How long ago the hours of the chart ended, the oldest first.
fn hours() -> Vec<Duration> {
    (0..HOURS).rev().map(Duration::hours).collect()
}

fn compared(before: &[Period], hours: &[Period]) -> Markup {
    let rows: Vec<Vec<Markup>> = before
        .iter()
        .zip(COMPARED_NAMES)
        .enumerate()
        .map(|(number, (period, name))| {
            let (scored, users) = period.scored();
            let share = |count: i64| percent(period.share(count), 0);
            let difference = before.first().filter(|_| number > 0).and_then(|now| now.minus(period));
            vec![
                html! { b { (name) } },
                match period.versions {
                    Some([first, last]) if first != last => html! { (version(first)) "–" (version(last)) },
                    of_one => version_or_none(of_one.map(|[first, _]| first)),
                },
                html! {
                    (decimal(period.reward(), 3))
                    @if let Some(ends) = period.interval() { " " small { (range(Some(ends), 3)) } }
                },
                html! {
                    @match difference {
                        Some(difference) => {
                            span .bad[before[0].is_worse_than(period)] { (decimal(Some(difference.mean), 3)) }
                            " " small { (range(Some(difference.ci95), 3)) }
                        }
                        None => "–",
                    }
                },
                html! { (text(scored)) small { " of " (text(users)) " users" } },
                text(share(period.declined)),
                text(share(period.aborted)),
            ]
        })
        .collect();
    let head = [
        "15 minutes",
        "versions",
        "reward",
        "now less that",
        "scored",
        "declined",
        "failed",
    ];
    html! {
        (table("champion now and before", &head, &rows, "champion has not answered yet."))
        (hourly(hours))
        p .note { "Of the newest " (rewards::ANSWERS_MAX) " answers to users in each period; intervals are 95%, by user." }
    }
}

/// `hours`: as [`hours`] says.
fn hourly(hours: &[Period]) -> Markup {
    let ago = |at: usize| at as f64 + 1.0 - hours.len() as f64;
    let points = hours.iter().enumerate().filter_map(|(at, period)| {
        let mean = period.reward()?;
        let (scored, users) = period.scored();
        Some(Point {
            x: ago(at),
            y: mean,
            ci95: period.interval().filter(|_| users >= DRAWN_USERS_MIN),
            tooltip: format!("{} h: {} of {scored} answers", ago(at), decimal(Some(mean), 3)),
        })
    });
    let points: Vec<Point> = points.collect();
    let drawn = points.len() > 1;
    let chart = Chart {
        title: "Reward of champion by hour",
        note: "hours before now; mean with its 95% interval by user",
        x: Axis::around(points.iter().map(|point| point.x), 6.0, |hour| decimal(Some(hour), 1)),
        format_y: |y| decimal(Some(y), 2),
        from_zero: false,
        series: Series::alone(points),
    };
    html! { @if drawn { (chart.draw()) } }
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
            p { a href=(format!("/versions?before={last}&line={}", encoded(line))) { "Older versions" } }
        }
    }
}

fn shown(versions: &[Version], uses: &[Period], now: OffsetDateTime) -> Markup {
    let rows: Vec<Vec<Markup>> = versions
        .iter()
        .zip(uses)
        .map(|(one, used)| {
            vec![
                html! { b { (version(one.serial)) } },
                html! {
                    (decimal(used.reward(), 3))
                    @if let Some(ends) = used.interval() { " " small { (range(Some(ends), 3)) } }
                },
                text(count(i64::try_from(used.scored().0).unwrap_or(i64::MAX))),
                text(percent(used.share(used.declined), 0)),
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
        p .note { "Rewards: of at most " (ANSWERS_MAX) " newest answers to users, with the 95% interval by user. A version that served minutes \
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

fn chart(versions: &[Version], uses: &[Period]) -> Markup {
    let points = versions.iter().zip(uses).rev().filter_map(|(one, used)| {
        let mean = used.reward()?;
        let (scored, users) = used.scored();
        Some(Point {
            x: one.serial as f64,
            y: mean,
            ci95: used.interval().filter(|_| users >= DRAWN_USERS_MIN),
            tooltip: format!("version {}: {} of {scored} answers", one.serial, decimal(Some(mean), 3)),
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
        series: Series::alone(points),
    };
    html! { @if versions.len() > 1 { (chart.draw()) } }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rewards::tests::period;
    use time::macros::datetime;
    use uuid::Uuid;

    const NOW: OffsetDateTime = datetime!(2026-11-26 03:00 UTC);

    fn version(serial: i64) -> Version {
        Version {
            serial,
            root: "ab".into(),
            manifest_key: "policy/m.json".into(),
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
    fn champion_now_stands_beside_what_it_was() {
        let hour = period(41, &[0.0, 0.1, 0.1, 0.2]);
        let many = |reward: f64| -> Vec<f64> { (0..24).map(|user| reward + 0.1 * f64::from(user % 2)).collect() };
        let now = period(41, &many(0.0));
        let day = period(7, &many(0.8));
        let periods = [now.clone(), hour.clone(), day, Period::default()];
        let page = compared(&periods, &[hour, Period::default(), now]).into_string();
        for part in [
            "a day ago",
            "a week ago",
            "class=\"bad\">−0.8",
            "24",
            "4%",
            "Reward of champion by hour",
            "-2 h: 0.100",
        ] {
            assert!(page.contains(part), "{part}: {page}");
        }
        assert!(!page.contains("NaN"), "{page}");
        assert_eq!(hours().last(), Some(&Duration::ZERO));
    }

    #[test]
    fn versions_are_shown_with_rewards_sizes_and_origin() {
        let of_two = period(2, &[1.0, 0.5, 0.0]);
        let page = shown(&[version(2), version(1)], &[of_two, Period::default()], NOW).into_string();
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
        assert!(shown(&[], &[], NOW).into_string().contains("no such version"));
    }
}
