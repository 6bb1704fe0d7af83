//! `GET /runs/{id}`: a run as a page for browsers. `GET /runs/compare?ids=…`: up to three runs in the
//! same charts.

use std::collections::BTreeMap;

use ::runs::api::curve::{self, Curve, Ids, Point, described, differences, parse};
use ::runs::api::leases::{self, Progress};
use ::runs::api::runs::{self, Run};
use axum::extract::State;
use axum::response::Html;
use edge::path::Path;
use edge::problem::Problem;
use edge::query::Query;
use maud::{Markup, html};
use report::chart::{self, Axis, Chart, Series};
use report::number::{decimal, percent, range, scientific};
use report::page::{Tile, document, name_value_table, render_tiles, section};
use serde_json::Value;
use uuid::Uuid;

use crate::page::site::Site;

/// Style classes of the runs in a chart.
const CLASSES: [&str; 3] = ["primary", "second", "baseline"];

/// What a chart shows of each step.
struct Measure {
    title: &'static str,
    note: &'static str,
    of: fn(&Point) -> Option<f64>,
    interval: fn(&Point) -> Option<[f64; 2]>,
    format: fn(f64) -> String,
    from_zero: bool,
}

const MEASURES: [Measure; 7] = [
    Measure {
        title: "Reward",
        note: "mean of a step's trajectories, with its 95% interval",
        of: |point| point.reward_mean,
        interval: |point| point.reward_interval,
        format: |value| decimal(Some(value), 2),
        from_zero: false,
    },
    Measure {
        title: "Loss",
        note: "of a step",
        of: |point| point.loss,
        interval: |_| None,
        format: |value| decimal(Some(value), 3),
        from_zero: false,
    },
    Measure {
        title: "KL of a step",
        note: "nats a token, from the parent to the version",
        of: |point| point.kl,
        interval: |_| None,
        format: |value| scientific(Some(value)),
        from_zero: true,
    },
    Measure {
        title: "Entropy",
        note: "nats a token, of the parent",
        of: |point| point.entropy,
        interval: |_| None,
        format: |value| decimal(Some(value), 2),
        from_zero: true,
    },
    Measure {
        title: "Gradient norm",
        note: "before clipping",
        of: |point| point.gradient_norm,
        interval: |_| None,
        format: |value| decimal(Some(value), 2),
        from_zero: true,
    },
    Measure {
        title: "Stale tokens",
        note: "share that versions before the parent sampled",
        of: |point| point.stale_share,
        interval: |_| None,
        format: |value| percent(Some(value), 0),
        from_zero: true,
    },
    Measure {
        title: "Speed",
        note: "sequences trained on, per second",
        of: |point| point.sequences_per_second,
        interval: |_| None,
        format: |value| decimal(Some(value), 1),
        from_zero: true,
    },
];

impl Measure {
    fn series(&self, class: &'static str, points: &[Point]) -> Series {
        let of = |point: &Point| {
            let y = (self.of)(point).filter(|y| y.is_finite())?;
            Some(chart::Point {
                x: point.step as f64,
                y,
                ci95: (self.interval)(point),
                tooltip: format!("step {}, version {}: {}", point.step, point.version, (self.format)(y)),
            })
        };
        Series {
            class,
            points: points.iter().filter_map(of).collect(),
        }
    }
}

/// Charts of what the steps of up to three runs measured, without those that none of them measured.
fn charts(runs: &[&[Point]]) -> Markup {
    let steps = runs
        .iter()
        .flat_map(|points| points.iter())
        .map(|point| point.step as f64);
    let axis = Axis::around(steps, 6.0, |step| decimal(Some(step), 0));
    let drawn = MEASURES.iter().filter_map(|measure| {
        let series = runs
            .iter()
            .zip(CLASSES)
            .map(|(points, class)| measure.series(class, points));
        // the first run is drawn last, on top
        let series: Vec<Series> = series.collect::<Vec<_>>().into_iter().rev().collect();
        series.iter().any(|series| !series.points.is_empty()).then(|| {
            let chart = Chart {
                title: measure.title,
                note: measure.note,
                x: axis.clone(),
                format_y: measure.format,
                from_zero: measure.from_zero,
                series,
            };
            chart.draw()
        })
    });
    let drawn: Vec<Markup> = drawn.collect();
    html! {
        @if drawn.is_empty() { p .none { "No step has been made yet." } }
        div .grid { @for chart in drawn { (chart) } }
    }
}

pub async fn one(State(site): State<Site>, Path(id): Path<Uuid>) -> Result<Html<String>, Problem> {
    let run = runs::get(site.pool(), site.policy(), id).await?;
    let curve = curve::newest(site.pool(), &run).await?;
    let rollouts = leases::rollouts(site.pool(), id).await?;
    Ok(Html(page_of_one(&run, &curve, &rollouts)))
}

fn page_of_one(run: &Run, curve: &Curve, rollouts: &Progress) -> String {
    let title = format!("{} run on line {}", run.kind, run.line);
    let last = curve.points.data.last();
    let steps = match run.steps_total {
        Some(total) => format!("{} of {total}", run.steps_done),
        None => run.steps_done.to_string(),
    };
    let head = run.head.map_or("–".to_owned(), |head| head.to_string());
    let made: i64 = rollouts.by_state.values().sum();
    let mut tiles = vec![
        Tile {
            label: "Status",
            value: run.status.clone(),
            notes: run.reason.iter().chain(&run.alarm).cloned().collect(),
        },
        Tile {
            label: "Steps",
            value: steps,
            notes: vec![format!("head of the line: version {head}")],
        },
        Tile {
            label: "Reward of the last step",
            value: decimal(last.and_then(|point| point.reward_mean), 3),
            notes: vec![format!(
                "95% {}",
                range(last.and_then(|point| point.reward_interval), 3)
            )],
        },
    ];
    if made > 0 {
        let lost: i64 = rollouts.lost.values().sum();
        tiles.push(Tile {
            label: "Rollouts",
            value: made.to_string(),
            notes: vec![
                format!("{} rewarded in the last minute", rollouts.rewarded_last_minute),
                format!("{} ended without a reward", percent(Some(lost as f64 / made as f64), 1)),
            ],
        });
    }
    let body = html! {
        p .kicker { a href="/runs" { "Runs" } " · run " (run.id) " of the policy " (run.policy) }
        h1 { (title) }
        (render_tiles(&tiles))
        (section("What the steps measured", &charts(&[&curve.points.data])))
        (counts("Rollouts without a reward", &rollouts.lost))
        (counts("Generations that were dropped", &curve.waste))
        @if let Some(result) = &run.result {
            (section("What came out", &html! { div .card { pre { (pretty(result)) } } }))
        }
        (section("What was asked for", &html! { div .card { pre { (pretty(&run.config)) } } }))
    };
    document(&title, "", &body)
}

/// A table of counts by code; nothing if there are none.
fn counts(title: &str, of: &BTreeMap<String, i64>) -> Markup {
    let rows: Vec<(&str, String)> = of.iter().map(|(code, n)| (code.as_str(), n.to_string())).collect();
    html! {
        @if !rows.is_empty() { (section(title, &html! { div .card { (name_value_table(&rows)) } })) }
    }
}

fn pretty(value: &Value) -> String {
    serde_json::to_string_pretty(value).unwrap_or_else(|_| value.to_string())
}

pub async fn compare(State(site): State<Site>, Query(query): Query<Ids>) -> Result<Html<String>, Problem> {
    let ids = parse(&query.ids).map_err(Problem::bad_request)?;
    if ids.len() > CLASSES.len() {
        return Err(Problem::bad_request(format!(
            "a page compares up to {} runs; /v1/runs/compare takes more",
            CLASSES.len()
        )));
    }
    let mut compared = Vec::new();
    for id in ids {
        let run = runs::get(site.pool(), site.policy(), id).await?;
        let curve = curve::newest(site.pool(), &run).await?;
        compared.push((run, curve));
    }
    Ok(Html(page_of_several(&compared)))
}

fn page_of_several(compared: &[(Run, Curve)]) -> String {
    let described: Vec<_> = compared.iter().map(|(run, _)| described(run)).collect();
    let points: Vec<&[Point]> = compared.iter().map(|(_, curve)| &*curve.points.data).collect();
    let body = html! {
        h1 { "Runs side by side" }
        p .legend {
            @for ((run, _), class) in compared.iter().zip(CLASSES) { span class=(class) { (run.id) ", " (run.status) } }
        }
        (charts(&points))
        (section("In what they differ", &html! {
            div .card { table .numbers {
                thead { tr { th { "Field" } @for (run, _) in compared { th { (run.id) } } } }
                tbody {
                    @for (field, values) in differences(&described) {
                        tr { th { (field) } @for value in values { td { (value) } } }
                    }
                }
            } }
        }))
    };
    document("Runs side by side", "", &body)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ::runs::api::List;
    use ::runs::api::curve::Step;
    use serde_json::json;
    use time::macros::datetime;

    fn run(reason: &str) -> Run {
        Run {
            id: Uuid::from_u128(7),
            kind: "grpo".into(),
            policy: "demo".into(),
            line: "run-7".into(),
            status: "running".into(),
            reason: Some(reason.into()),
            alarm: None,
            config: json!({"steps": 3}),
            base_version: Some(1),
            head: Some(2),
            steps_done: 1,
            steps_total: Some(3),
            requested: None,
            recurs_from: None,
            result: None,
            created_at: datetime!(2026-11-25 12:00 UTC),
            started_at: None,
            finished_at: None,
        }
    }

    fn curve(rewards: &[f64]) -> Curve {
        let points = (1..).zip(rewards).map(|(step, reward)| {
            let step = Step {
                step,
                version: step,
                committed_at: datetime!(2026-11-25 12:00 UTC),
                before: None,
            };
            step.point(&json!({"reward_mean": reward, "reward_std": 0.5, "trajectories": 25}))
        });
        Curve {
            points: List::page(points.collect(), 100),
            waste: BTreeMap::from([("stale".to_owned(), 3)]),
        }
    }

    #[test]
    fn the_page_of_a_run_shows_what_was_measured_and_escapes_what_people_wrote() {
        let rollouts = Progress::default();
        let mut done = run("<script>");
        done.result = Some(json!({"reward": 0.51}));
        let page = page_of_one(&done, &curve(&[0.25, 0.5]), &rollouts);
        for shown in [
            "1 of 3",
            "0.500",
            "Reward",
            "95% interval",
            "stale",
            "&lt;script&gt;",
            "0.51",
        ] {
            assert!(page.contains(shown), "{shown}: {page}");
        }
        assert!(!page.contains("<script>") && !page.contains("Entropy"), "{page}");
        let empty = page_of_one(&run(""), &curve(&[]), &rollouts);
        assert!(empty.contains("No step has been made yet"), "{empty}");
    }

    #[test]
    fn runs_side_by_side_share_charts_and_show_in_what_they_differ() {
        let mut other = run("");
        other.config = json!({"steps": 5});
        let page = page_of_several(&[(run(""), curve(&[0.1])), (other, curve(&[0.2]))]);
        assert_eq!(page.matches("<svg").count(), 1, "one measure: {page}");
        assert!(
            page.contains("class=\"second\"") && page.contains("<td>5</td>"),
            "{page}"
        );
    }
}
