//! `/fleet`: replicas, which versions they hold, how far behind they are, and their swaps.

use axum::extract::State;
use edge::Problem;
use maud::{Markup, html};
use report::chart::{Axis, Chart, Point, Series};
use report::number::decimal;
use serde_json::Value;
use serving::fleet::{self, Replica, Swap};
use time::OffsetDateTime;

use crate::page::layout::{Region, Shown, framed, table, text, tile};
use crate::page::site::Site;
use crate::page::viewer::Viewer;
use crate::page::watched::Watched;
use crate::page::words::{ago, clock, version};
use crate::tables::unavailable;

const SWAPS_MAX: i64 = 60;

/// Whether it answers requests to `alias` with this version.
pub fn serves(replica: &Replica, alias: &str, version: i64) -> bool {
    held(replica).any(|(held, aliases)| held == Some(version) && aliases.iter().any(|name| name == alias))
}

/// The versions in its memory, with the aliases of each.
fn held(replica: &Replica) -> impl Iterator<Item = (Option<i64>, &[Value])> {
    let rows = replica.resident.as_array().into_iter().flatten();
    rows.map(|row| {
        (
            row["version"].as_i64(),
            row["aliases"].as_array().map_or(&[][..], Vec::as_slice),
        )
    })
}

pub async fn regions(site: &Site) -> Result<Vec<Region>, Problem> {
    let mut reader = site.read(Some("")).await?;
    let policy = site.policy();
    let read = async {
        let mut replicas = fleet::replicas(&mut *reader, policy).await?;
        replicas.sort_by(|one, other| (&one.cluster, &one.id).cmp(&(&other.cluster, &other.id)));
        let swaps = fleet::swaps(&mut *reader, policy, None, SWAPS_MAX).await?;
        let epoch = sqlx::query_scalar!("select max(epoch) from assignment where policy = $1", policy)
            .fetch_one(&mut *reader)
            .await?;
        Ok((replicas, swaps, epoch))
    };
    let (replicas, swaps, epoch) = read.await.map_err(unavailable)?;
    Ok(shown(&replicas, &swaps, epoch, OffsetDateTime::now_utc()))
}

fn shown(replicas: &[Replica], swaps: &[Swap], epoch: Option<i64>, now: OffsetDateTime) -> Vec<Region> {
    vec![
        Region {
            id: "replicas",
            title: "Replicas",
            body: known(replicas, epoch, now),
            sources: vec!["GET /v1/replicas".into(), "springtide release list".into()],
        },
        Region {
            id: "swaps",
            title: "Swaps",
            body: swapped(swaps, now),
            sources: vec![format!("GET /v1/swaps?limit={SWAPS_MAX}")],
        },
    ]
}

fn known(replicas: &[Replica], epoch: Option<i64>, now: OffsetDateTime) -> Markup {
    let behind = |replica: &Replica| epoch.unwrap_or(0) - replica.epoch;
    let rows: Vec<Vec<Markup>> = replicas
        .iter()
        .map(|replica| {
            let (class, state) = match (replica.silent, replica.ready) {
                (true, _) => ("bad", "silent"),
                (false, true) => ("good", "ready"),
                (false, false) => ("open", "starting"),
            };
            vec![
                html! { b { (replica.id) } },
                text(&replica.cluster),
                html! { span .state .(class) { (state) } },
                ago(replica.reported_at, now),
                html! { (replica.epoch) @if behind(replica) > 0 { " " span .bad { "−" (behind(replica)) } } },
                resident(replica),
                text(&replica.address),
            ]
        })
        .collect();
    let silent = replicas.iter().filter(|replica| replica.silent).count();
    let late = replicas.iter().filter(|replica| behind(replica) > 0).count();
    let head = [
        "replica",
        "cluster",
        "state",
        "last heard of",
        "epoch",
        "holds",
        "address",
    ];
    html! {
        div .tiles {
            (tile("Replicas", &text(replicas.len()), &[]))
            (tile("Silent", &text(silent), &[html! { "for more than " (edge::REPLICA_SILENT_SECONDS) " s" }]))
            (tile("Behind", &text(late), &[html! { "have not applied epoch " (epoch.unwrap_or(0)) " yet" }]))
        }
        (table("Replicas", &head, &rows, "No replica has reported yet."))
    }
}

fn resident(replica: &Replica) -> Markup {
    html! {
        @for (nth, (serial, aliases)) in held(replica).enumerate() {
            @if nth > 0 { ", " }
            @let names: Vec<&str> = aliases.iter().filter_map(Value::as_str).collect();
            @if names.is_empty() { "draining" } @else { (names.join(", ")) }
            " = " @match serial { Some(serial) => (version(serial)), None => "?" }
        }
    }
}

fn swapped(swaps: &[Swap], now: OffsetDateTime) -> Markup {
    let ms = |value: f64| text(decimal(Some(value), if value < 10.0 { 1 } else { 0 }));
    let rows: Vec<Vec<Markup>> = swaps
        .iter()
        .map(|swap| {
            vec![
                clock(swap.at, now),
                text(&swap.replica),
                version(swap.version),
                text(swap.epoch),
                ms(swap.fetch_ms),
                ms(swap.verify_ms),
                ms(swap.stage_ms),
                ms(swap.pause_ms),
            ]
        })
        .collect();
    let first = swaps.last().map_or(now, |swap| swap.at);
    let points = swaps.iter().rev().map(|swap| Point {
        x: (swap.at - first).as_seconds_f64(),
        y: swap.fetch_ms + swap.verify_ms + swap.stage_ms + swap.pause_ms,
        ci95: None,
        tooltip: format!("version {} on {}", swap.version, swap.replica),
    });
    let points: Vec<Point> = points.collect();
    let last = points.last().map_or(0.0, |point| point.x);
    let chart = Chart {
        title: "Milliseconds of a swap",
        note: "from the download to the flip; minutes since the oldest one shown",
        x: Axis::minutes(last),
        format_y: |y| decimal(Some(y), 0),
        from_zero: true,
        series: Series::alone(points),
    };
    let head = [
        "at",
        "replica",
        "version",
        "epoch",
        "fetch ms",
        "verify ms",
        "stage ms",
        "pause ms",
    ];
    html! {
        @if swaps.len() > 1 { (chart.draw()) }
        (table("Swaps", &head, &rows, "No replica has loaded a version yet."))
    }
}

pub async fn page(State(site): State<Site>, viewer: Viewer) -> Result<Shown, Problem> {
    let lead = html! { "What each replica holds, and how long new versions take to arrive." };
    let regions = regions(&site).await?;
    Ok(framed(
        &site,
        &viewer,
        Watched::Fleet,
        "Fleet",
        "/fleet",
        [lead, html! {}, html! {}],
        &regions,
    ))
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use serde_json::json;
    use time::Duration;
    use time::macros::datetime;

    const NOW: OffsetDateTime = datetime!(2026-11-26 03:00 UTC);

    pub fn replica(id: &str, silent: bool, resident: Value) -> Replica {
        Replica {
            id: id.into(),
            cluster: "here".into(),
            policy: "demo".into(),
            address: "http://127.0.0.1:8000".into(),
            epoch: 9,
            resident,
            ready: true,
            reported_at: NOW,
            silent,
        }
    }

    #[test]
    fn replicas_are_shown_with_what_they_hold_and_how_far_behind_they_are() {
        let awake = replica(
            "r<1>",
            false,
            json!([{"version": 4, "aliases": ["champion", "learner"]}, {"version": 3, "aliases": []}]),
        );
        let silent = replica("r2", true, json!("nonsense"));
        let page = known(&[awake, silent], Some(11), NOW).into_string();
        for part in [
            "r&lt;1&gt;",
            "champion, learner = ",
            "draining = ",
            "−2",
            "silent",
            "ready",
        ] {
            assert!(page.contains(part), "{part}: {page}");
        }
    }

    #[test]
    fn a_replica_serves_an_alias_with_the_version_that_it_holds_for_it() {
        let replica = replica(
            "r",
            false,
            json!([{"version": 4, "aliases": ["champion"]}, {"aliases": 7}, 3]),
        );
        assert!(serves(&replica, "champion", 4));
        assert!(!serves(&replica, "champion", 3) && !serves(&replica, "learner", 4));
    }

    #[test]
    fn swaps_are_drawn_and_listed() {
        let swap = |seconds, pause_ms| Swap {
            id: None,
            replica: "r".into(),
            policy: "demo".into(),
            version: 4,
            epoch: 9,
            fetch_ms: 20.0,
            verify_ms: 1.25,
            stage_ms: 3.0,
            pause_ms,
            at: NOW - Duration::seconds(seconds),
        };
        let page = swapped(&[swap(0, 0.25), swap(60, 0.5)], NOW).into_string();
        assert!(
            page.contains("<svg") && page.contains("0.2") && !page.contains("NaN"),
            "{page}"
        );
        assert!(swapped(&[], NOW).into_string().contains("No replica has loaded"));
    }
}
