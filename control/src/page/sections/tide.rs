//! `/tide`: what production left of each engine in the last hour, and what rollouts used of it.

use std::collections::BTreeMap;

use axum::extract::State;
use edge::Problem;
use maud::{Markup, html};
use report::chart::{Axis, Chart, Point, Series};
use report::number::{decimal, percent};
use time::OffsetDateTime;

use crate::page::layout::{Region, Shown, framed, table, text};
use crate::page::site::Site;
use crate::page::viewer::Viewer;
use crate::page::watched::Watched;
use crate::page::words::{ago, clock};
use crate::tables::unavailable;

/// One minute of one engine.
#[derive(Debug)]
struct Minute {
    replica: String,
    engine: i16,
    minute: OffsetDateTime,
    slots: i32,
    seconds: f64,
    production_slot_seconds: f64,
    production_peak: i32,
    expected: Option<f64>,
    lendable_slot_seconds: f64,
    lent_slot_seconds: f64,
    slot_limit: Option<i32>,
    why: Option<String>,
    taken_back: i64,
}

pub async fn regions(site: &Site) -> Result<Vec<Region>, Problem> {
    let mut reader = site.read(Some("")).await?;
    let minutes = sqlx::query_as!(
        Minute,
        "select replica, engine, minute, slots, seconds, production_slot_seconds, production_peak, expected,
                lendable_slot_seconds, lent_slot_seconds, slot_limit, why, taken_back
         from tide_minute where policy = $1 and minute > now() - interval '1 hour'
         order by minute desc, replica, engine limit 1200",
        site.policy()
    )
    .fetch_all(&mut *reader)
    .await
    .map_err(unavailable)?;
    let now = OffsetDateTime::now_utc();
    Ok(vec![
        Region {
            id: "engines",
            title: "Engines now",
            body: engines(&minutes, now),
            sources: vec!["springtide tide --hours 1".into(), "GET /v1/tide?hours=1".into()],
        },
        Region {
            id: "minutes",
            title: "The last hour",
            body: hour(&minutes, now),
            sources: vec![
                "select * from tide_minute where minute > now() - interval '1 hour'".into(),
                "GET /v1/ledger/cost   (what each run has cost)".into(),
            ],
        },
    ])
}

fn engines(minutes: &[Minute], now: OffsetDateTime) -> Markup {
    let mut newest: BTreeMap<(&str, i16), &Minute> = BTreeMap::new();
    for minute in minutes {
        // the newest stands first
        newest.entry((&minute.replica, minute.engine)).or_insert(minute);
    }
    let rows: Vec<Vec<Markup>> = newest
        .values()
        .map(|minute| {
            vec![
                html! { b { (minute.replica) } @if minute.engine > 0 { " engine " (minute.engine) } },
                text(minute.slots),
                text(minute.production_peak),
                text(decimal(minute.expected, 1)),
                text(minute.slot_limit.map_or("none".to_owned(), |limit| limit.to_string())),
                html! { span .long { (minute.why.as_deref().unwrap_or("–")) } },
                text(minute.taken_back),
                ago(minute.minute, now),
            ]
        })
        .collect();
    let head = [
        "engine",
        "slots",
        "production needed",
        "expected",
        "limit of rollouts",
        "why",
        "taken back",
        "minute",
    ];
    table("Engines", &head, &rows, "No engine has reported in the last hour.")
}

/// Means over all engines, by minute.
fn hour(minutes: &[Minute], now: OffsetDateTime) -> Markup {
    #[derive(Default)]
    struct Sum {
        slots: f64,
        production: f64,
        lendable: f64,
        lent: f64,
    }
    let mut sums: BTreeMap<OffsetDateTime, Sum> = BTreeMap::new();
    for minute in minutes {
        let sum = sums.entry(minute.minute).or_default();
        sum.slots += f64::from(minute.slots) * minute.seconds;
        sum.production += minute.production_slot_seconds;
        sum.lendable += minute.lendable_slot_seconds;
        sum.lent += minute.lent_slot_seconds;
    }
    let first = sums.keys().next().copied().unwrap_or(now);
    let since = |at: OffsetDateTime| (at - first).as_seconds_f64();
    let share = |part: f64, sum: &Sum| (sum.slots > 0.0).then(|| part / sum.slots);
    let series = |class, part: fn(&Sum) -> f64| Series {
        class,
        points: sums
            .iter()
            .filter_map(|(at, sum)| {
                let y = share(part(sum), sum)?;
                Some(Point {
                    x: since(*at),
                    y,
                    ci95: None,
                    tooltip: percent(Some(y), 1),
                })
            })
            .collect(),
    };
    let last = sums.keys().next_back().map_or(0.0, |at| since(*at));
    let chart = Chart {
        title: "Share of all slots",
        note: "by minute",
        x: Axis::minutes(last),
        format_y: |y| percent(Some(y), 0),
        from_zero: true,
        series: vec![
            series("baseline", |sum| sum.production),
            series("second", |sum| sum.production + sum.lendable),
            series("primary", |sum| sum.lent),
        ],
    };
    let rows: Vec<Vec<Markup>> = sums
        .iter()
        .rev()
        .take(60)
        .map(|(at, sum)| {
            let cell = |part: f64| text(percent(share(part, sum), 1));
            vec![
                clock(*at, now),
                cell(sum.production),
                cell(sum.lendable),
                cell(sum.lent),
                text(percent((sum.lendable > 0.0).then(|| sum.lent / sum.lendable), 0)),
            ]
        })
        .collect();
    let head = [
        "minute (UTC)",
        "production",
        "rollouts might use",
        "rollouts used",
        "of what they might",
    ];
    html! {
        @if sums.len() > 1 {
            (chart.draw())
            p .legend {
                span .primary { "rollouts used" } span .baseline { "production" } span .second { "production and what rollouts might use" }
            }
        }
        (table("The last hour", &head, &rows, "Nothing was counted in the last hour."))
    }
}

pub async fn page(State(site): State<Site>, viewer: Viewer) -> Result<Shown, Problem> {
    let lead = html! { "What production leaves of the engines, and what rollouts use of it." };
    let regions = regions(&site).await?;
    Ok(framed(
        &site,
        &viewer,
        Watched::Tide,
        "Tide",
        "/tide",
        [lead, html! {}, html! {}],
        &regions,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use time::macros::datetime;

    #[test]
    fn minutes_of_all_engines_are_added_up() {
        let now = datetime!(2026-11-26 03:00 UTC);
        let minute = |replica: &str, ago: i64, lent: f64| Minute {
            replica: replica.into(),
            engine: 0,
            minute: now - time::Duration::minutes(ago),
            slots: 8,
            seconds: 60.0,
            production_slot_seconds: 120.0,
            production_peak: 3,
            expected: None,
            lendable_slot_seconds: 240.0,
            lent_slot_seconds: lent,
            slot_limit: Some(4),
            why: Some("<forecast>".into()),
            taken_back: 2,
        };
        let minutes = [minute("a", 1, 240.0), minute("b", 1, 0.0), minute("a", 2, 0.0)];
        let page = hour(&minutes, now).into_string();
        for part in ["25.0%", "50%", "<svg", "02:59:00"] {
            assert!(page.contains(part), "{part}: {page}");
        }
        let page = engines(&minutes, now).into_string();
        assert!(
            page.contains("&lt;forecast&gt;") && page.matches("<tr>").count() == 3,
            "{page}"
        );
        assert!(!hour(&[], now).into_string().contains("NaN"));
    }
}
