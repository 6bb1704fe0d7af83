//! `/learning`: what the realtime run has learned, what worried it, and what it did not train on.

use axum::extract::State;
use edge::Problem;
use edge::query::Query;
use maud::{Markup, html};
use report::chart::{Axis, Chart, Point, Series};
use report::number::{decimal, percent, scientific};
use serde_json::{Map, Value};
use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::fields::encoded;
use crate::page::layout::{Action, Input, Region, Shown, actions, framed, table, text, tile};
use crate::page::site::Site;
use crate::page::viewer::{Audience, Viewer};
use crate::page::watched::{Hours, Span, Watched};
use crate::page::words::{ago, clock, count, version, version_or_none};
use crate::tables::unavailable;

/// Steps of the curves.
const STEPS_MAX: i64 = 300;

#[derive(Debug)]
struct Run {
    id: Uuid,
    line: String,
    status: String,
    reason: Option<String>,
    requested: Option<String>,
    steps_done: i64,
    head: Option<i64>,
    /// The version at which `learner` is pinned: a run whose learner is pinned pauses.
    pinned: Option<i64>,
}

#[derive(Debug)]
struct Step {
    step: i64,
    version: i64,
    metrics: Value,
    committed_at: OffsetDateTime,
}

#[derive(Debug)]
struct Event {
    at: OffsetDateTime,
    level: String,
    message: String,
    alarm: Option<String>,
}

/// What became of generations, by code.
#[derive(Debug)]
struct Fate {
    kind: String,
    code: Option<String>,
    generations: i64,
}

/// Where the tests of one surface's figures stand.
#[derive(Debug)]
struct Monitor {
    surface: String,
    /// As trainer/runs/src/monitors.rs writes them.
    figures: Value,
    updated_at: OffsetDateTime,
}

#[derive(Debug)]
struct Data {
    run: Run,
    /// The oldest first.
    steps: Vec<Step>,
    events: Vec<Event>,
    fates: Vec<Fate>,
    monitors: Vec<Monitor>,
}

async fn run(reader: &mut PgConnection, policy: &str) -> sqlx::Result<Option<Run>> {
    sqlx::query_as!(
        Run,
        r#"select r.id, r.line, r.status, r.reason, r.requested, r.steps_done, l.head as "head?",
                  (select a.version from alias a
                   where a.policy = r.policy and a.alias = 'learner' and a.follows is null and not a.withdrawn) as "pinned?"
           from run r left join line l on l.policy = r.policy and l.line = r.line
           where r.policy = $1 and r.kind = 'realtime' order by r.id desc limit 1"#,
        policy
    )
    .fetch_optional(reader)
    .await
}

async fn read(reader: &mut PgConnection, policy: &str, span: Span) -> sqlx::Result<Option<Data>> {
    let Some(run) = run(&mut *reader, policy).await? else {
        return Ok(None);
    };
    let mut steps = sqlx::query_as!(
        Step,
        "select step, version, metrics, committed_at from step where run_id = $1 order by step desc limit $2",
        run.id,
        STEPS_MAX
    )
    .fetch_all(&mut *reader)
    .await?;
    steps.reverse();
    let events = sqlx::query_as!(
        Event,
        r#"select at, level, message, data ->> 'alarm' as alarm
           from (select * from run_event where run_id = $1 order by id desc limit 1000) e
           where level <> 'info' or data ? 'alarm'
           order by id desc limit 40"#,
        run.id
    )
    .fetch_all(&mut *reader)
    .await?;
    let fates = sqlx::query_as!(
        Fate,
        r#"select kind, code, count(*) as "generations!" from disposition
           where generation_id >= first_generation_id(now() - make_interval(hours => $2)) and run_id = $1
           group by kind, code order by 3 desc limit 100"#,
        run.id,
        span.hours()
    )
    .fetch_all(&mut *reader)
    .await?;
    let monitors = sqlx::query_as!(
        Monitor,
        "select surface, figures, updated_at from monitor where run_id = $1 order by surface limit 16",
        run.id
    )
    .fetch_all(&mut *reader)
    .await?;
    Ok(Some(Data {
        run,
        steps,
        events,
        fates,
        monitors,
    }))
}

pub async fn regions(site: &Site, span: Span) -> Result<Vec<Region>, Problem> {
    let read = async {
        let mut reader = site.read(Some("")).await?;
        read(&mut reader, site.policy(), span).await.map_err(unavailable)
    };
    let data = site.read_many(read).await?;
    Ok(match data {
        Some(data) => shown(&data, span, OffsetDateTime::now_utc()),
        None => vec![Region {
            id: "run",
            title: "The realtime run",
            body: html! { p .none { "There is no realtime run: springtide train makes it when it starts." } },
            sources: vec!["springtide run list".into()],
        }],
    })
}

pub async fn page(State(site): State<Site>, viewer: Viewer, Query(hours): Query<Hours>) -> Result<Shown, Problem> {
    let span = hours.span()?;
    let mut reader = site.read(Some("")).await?;
    let run = run(&mut reader, site.policy()).await.map_err(unavailable)?;
    drop(reader);
    let lead = html! { "What the realtime run has learned from users, what worried it, and what it did not train on." };
    let bottom = run.map_or(html! {}, |run| decide(&run, &viewer.audience));
    let parts = [lead, span.choice("/learning"), bottom];
    let regions = regions(&site, span).await?;
    Ok(framed(
        &site,
        &viewer,
        Watched::Learning(span),
        "Learning",
        "/learning",
        parts,
        &regions,
    ))
}

fn shown(data: &Data, span: Span, now: OffsetDateTime) -> Vec<Region> {
    let run = data.run.id;
    vec![
        Region {
            id: "run",
            title: "The realtime run",
            body: summary(data, now),
            sources: vec![format!("springtide run show {run}"), format!("GET /v1/runs/{run}")],
        },
        Region {
            id: "curves",
            title: "What the steps measured",
            body: curves(&data.steps),
            sources: vec![
                format!("springtide run curve {run}"),
                format!("GET /v1/runs/{run}/curve"),
                format!("/runs/{run}   (all measures, all steps)"),
            ],
        },
        Region {
            id: "worries",
            title: "Guards and alarms",
            body: worries(&data.events, now),
            sources: vec![format!("springtide run events {run}"), format!("GET /v1/runs/{run}/events")],
        },
        Region {
            id: "answers",
            title: "What the learning arm's answers are like",
            body: monitors(&data.monitors, now),
            sources: vec![
                "springtide release compare --arm learner".into(),
                "GET /v1/rewards?arm=learner".into(),
                format!("select surface, figures from monitor where run_id = '{run}'"),
            ],
        },
        Region {
            id: "fates",
            title: "What was dropped, and why",
            body: fates(&data.fates, span),
            sources: vec![
                "GET /v1/ledger   (all time)".into(),
                "select kind, code, count(*) from disposition where generation_id >= first_generation_id(…) group by 1, 2".into(),
            ],
        },
    ]
}

fn summary(data: &Data, now: OffsetDateTime) -> Markup {
    let (run, last) = (&data.run, data.steps.last());
    let number = |field: &str| last.and_then(|last| last.metrics[field].as_f64());
    html! {
        div .tiles {
            (tile("Status", &text(&run.status), &[
                html! { (run.reason.as_deref().unwrap_or_default()) },
                html! { @if let Some(requested) = &run.requested { "asked to " (requested) } },
            ]))
            (tile("Steps", &text(count(run.steps_done)), &[
                html! { "on the line " a href=(format!("/versions?line={}", encoded(&run.line))) { (run.line) } },
            ]))
            (tile("Head", &version_or_none(run.head), &[
                html! { @if let Some(last) = last { "last step " (ago(last.committed_at, now)) } },
            ]))
            (tile("Reward of the last step", &text(decimal(number("reward_mean"), 3)), &[
                html! { @if let Some(last) = last { "version " (version(last.version)) } },
            ]))
        }
    }
}

/// What a chart shows of each step: title, note, value, format, whether the axis includes 0.
type Measure = (
    &'static str,
    &'static str,
    fn(&Value) -> Option<f64>,
    fn(f64) -> String,
    bool,
);

const MEASURES: [Measure; 5] = [
    (
        "Reward",
        "mean of a step's trajectories",
        |metrics| metrics["reward_mean"].as_f64(),
        |y| decimal(Some(y), 2),
        false,
    ),
    (
        "Loss",
        "of a step",
        |metrics| metrics["loss"].as_f64(),
        |y| decimal(Some(y), 3),
        false,
    ),
    (
        "KL of a step",
        "nats a token, from the parent to the version",
        |metrics| metrics["kl"].as_f64(),
        |y| scientific(Some(y)),
        true,
    ),
    (
        "Entropy",
        "nats a token, of the parent",
        |metrics| metrics["entropy"].as_f64(),
        |y| decimal(Some(y), 2),
        true,
    ),
    (
        "Stale tokens",
        "share that versions before the parent sampled",
        |metrics| {
            let all = metrics["tokens"].as_f64().filter(|all| *all > 0.0)?;
            Some(metrics["stale"]["tokens"].as_f64()? / all)
        },
        |y| percent(Some(y), 0),
        true,
    ),
];

fn curves(steps: &[Step]) -> Markup {
    let axis = Axis::around(steps.iter().map(|step| step.step as f64), 6.0, |step| {
        decimal(Some(step), 0)
    });
    let drawn = MEASURES.iter().filter_map(|(title, note, value, format_y, from_zero)| {
        let points = steps.iter().filter_map(|step| {
            let y = value(&step.metrics).filter(|y| y.is_finite())?;
            Some(Point {
                x: step.step as f64,
                y,
                ci95: None,
                tooltip: format!("step {}, version {}: {}", step.step, step.version, format_y(y)),
            })
        });
        let points: Vec<Point> = points.collect();
        (!points.is_empty()).then(|| {
            let chart = Chart {
                title,
                note,
                x: axis.clone(),
                format_y: *format_y,
                from_zero: *from_zero,
                series: Series::alone(points),
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

fn worries(events: &[Event], now: OffsetDateTime) -> Markup {
    let rows: Vec<Vec<Markup>> = events
        .iter()
        .map(|event| {
            let class = match &*event.level {
                "error" => "bad",
                "warn" => "open",
                _ => "good",
            };
            vec![
                clock(event.at, now),
                html! { span .state .(class) { (event.level) } },
                text(event.alarm.as_deref().unwrap_or("–")),
                html! { span .long { (event.message) } },
            ]
        })
        .collect();
    let head = ["at (UTC)", "level", "alarm", "what happened"];
    table(
        "Guards and alarms",
        &head,
        &rows,
        "Nothing in the run's latest 1,000 events.",
    )
}

fn monitors(monitors: &[Monitor], now: OffsetDateTime) -> Markup {
    let of_surface = |monitor: &Monitor| -> Vec<Vec<Markup>> {
        let figures = monitor.figures.as_array().map(Vec::as_slice).unwrap_or_default();
        let row = |figure: &Value| {
            let (name, levels) = (figure["figure"].as_str().unwrap_or("–"), &figure["levels"]);
            let level = |which: &str| {
                let level = levels[which].as_f64();
                text(match name {
                    "length" => decimal(level, 1),
                    "entropy" => decimal(level, 2),
                    _ => percent(level, 1),
                })
            };
            let state = match (figure["changed"] == true, levels.is_null()) {
                (true, _) => html! { span .state .open { "changed" } },
                (false, true) => text("its reference is not complete"),
                (false, false) => html! { span .state .good { "as before" } },
            };
            vec![
                text(&monitor.surface),
                text(name.replace('_', " ")),
                level("reference"),
                level("recent"),
                level("others"),
                text(percent(figure["evidence"].as_f64(), 0)),
                state,
            ]
        };
        figures.iter().map(row).collect()
    };
    let rows: Vec<Vec<Markup>> = monitors.iter().flat_map(of_surface).collect();
    let head = [
        "surface",
        "figure",
        "reference",
        "now",
        "other arms",
        "evidence",
        "state",
    ];
    let newest = monitors.iter().map(|monitor| monitor.updated_at).max();
    html! {
        (table("What the learning arm's answers are like", &head, &rows, "No trajectory has closed yet."))
        @if let Some(newest) = newest {
            p .note {
                "Evidence of a change, as a share of what raises an alarm. Shares are of the answers that were shown, "
                "lengths in tokens, entropy in nats a token. Last written " (ago(newest, now)) "."
            }
        }
    }
}

fn fates(fates: &[Fate], span: Span) -> Markup {
    let all: i64 = fates.iter().map(|fate| fate.generations).sum();
    let rows: Vec<Vec<Markup>> = fates
        .iter()
        .map(|fate| {
            vec![
                html! { b { (fate.kind.replace('_', " ")) } },
                html! { @match &fate.code { Some(code) => code { (code) }, None => "–" } },
                text(count(fate.generations)),
                text(percent(Some(fate.generations as f64 / all.max(1) as f64), 1)),
            ]
        })
        .collect();
    let head = ["what", "code", "generations", "share"];
    html! {
        (table("What was dropped, and why", &head, &rows, "The run has decided about nothing that was sampled then."))
        p .note {
            "Of what was sampled in " (span.words()) " and the run has decided about. "
            "What waits, or was closed without a score, is in the " a href="/ledger" { "ledger" } "."
        }
    }
}

fn decide(run: &Run, audience: &Audience) -> Markup {
    let action = |verb: &str, button: &str, does: &str| Action {
        id: verb.to_owned(),
        button: button.to_owned(),
        does: does.to_owned(),
        path: format!("/v1/runs/{}/{verb}", run.id),
        fixed: Map::new(),
        inputs: Vec::new(),
        command: format!("springtide run {verb} {}", run.id),
        dangerous: false,
    };
    let offered = match &*run.status {
        "running" | "queued" => action(
            "pause",
            "Pause learning",
            "The run pauses after its current step. Users keep their versions.",
        ),
        "paused" | "pausing" if run.pinned.is_some() => {
            let version = run.pinned;
            let fixed = [("kind", "promote"), ("alias", "learner")];
            let offered = Action {
                id: "learn".into(),
                button: "Learn again".into(),
                does: "learner is pinned, so the run waits. It follows its line again from this version, and learning continues \
                       there. What was learned after it is left."
                    .into(),
                path: "/v1/releases".into(),
                fixed: fixed.map(|(name, value)| (name.to_owned(), value.into())).into_iter().collect(),
                inputs: vec![Input::version(version), Input::reason()],
                command: format!(
                    "springtide release promote {} --alias learner --reason '…'",
                    version.unwrap_or_default()
                ),
                dangerous: false,
            };
            return decisions(&[offered], (!audience.may_release).then_some("release"));
        }
        "paused" | "pausing" => action("resume", "Resume learning", "The run goes on with what waits for it."),
        _ => return html! {},
    };
    decisions(&[offered], (!audience.may_research).then_some("research"))
}

/// `lacks`: the role that the viewer has not.
fn decisions(offered: &[Action], lacks: Option<&str>) -> Markup {
    html! {
        section aria-labelledby="decide-title" {
            h2 #decide-title { "Decide" }
            (actions(offered, lacks))
        }
    }
}

#[cfg(test)]
mod tests;
