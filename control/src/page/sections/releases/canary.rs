//! `/releases/{id}`: one canary: where it is, its evidence over time, each decision, and what can be
//! decided now.

use axum::extract::State;
use edge::Problem;
use edge::path::Path;
use maud::{Markup, html};
use report::chart::{Axis, Chart, Point, Series};
use report::number::{decimal, percent, range, signed};
use serde_json::Value;
use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

use super::{decisions, state};
use crate::page::layout::{Action, Input, Region, Shown, actions, framed, table, text, tile};
use crate::page::site::Site;
use crate::page::viewer::{Audience, Viewer};
use crate::page::watched::Watched;
use crate::page::words::{age, ago, clock, count, version, version_or_none};
use crate::tables::unavailable;

#[derive(Debug, Clone)]
pub struct Canary {
    pub id: Uuid,
    pub version: i64,
    pub control: Option<i64>,
    pub strategy: Value,
    pub state: String,
    pub step: i32,
    pub step_since: OffsetDateTime,
    pub actor: String,
    pub reason: String,
    pub created_at: OffsetDateTime,
}

/// A decision.
#[derive(Debug, Clone)]
pub struct Transition {
    pub event: String,
    pub from_state: String,
    pub to_state: String,
    pub share: f64,
    pub actor: String,
    pub reason: String,
    pub evidence: Option<Value>,
    pub at: OffsetDateTime,
}

/// The canary with its decisions, the latest first.
async fn read(reader: &mut PgConnection, policy: &str, id: Uuid) -> sqlx::Result<Option<(Canary, Vec<Transition>)>> {
    let canary = sqlx::query_as!(
        Canary,
        "select id, version, control, strategy, state, step, step_since, actor, reason, created_at
         from canary where policy = $1 and id = $2",
        policy,
        id
    )
    .fetch_optional(&mut *reader)
    .await?;
    let Some(canary) = canary else { return Ok(None) };
    let transitions = sqlx::query_as!(
        Transition,
        "select event, from_state, to_state, share, actor, reason, evidence, at
         from canary_transition where canary_id = $1 order by id desc limit 200",
        id
    )
    .fetch_all(reader)
    .await?;
    Ok(Some((canary, transitions)))
}

async fn found(site: &Site, id: Uuid) -> Result<(Canary, Vec<Transition>), Problem> {
    let mut reader = site.read(Some("")).await?;
    let found = read(&mut reader, site.policy(), id).await.map_err(unavailable)?;
    found.ok_or_else(|| Problem::not_found(format!("there is no canary {id}: /releases lists them")))
}

pub async fn regions(site: &Site, id: Uuid) -> Result<Vec<Region>, Problem> {
    let (canary, transitions) = found(site, id).await?;
    Ok(shown(&canary, &transitions, OffsetDateTime::now_utc()))
}

pub async fn page(State(site): State<Site>, viewer: Viewer, Path(id): Path<Uuid>) -> Result<Shown, Problem> {
    let (canary, transitions) = found(&site, id).await?;
    let regions = shown(&canary, &transitions, OffsetDateTime::now_utc());
    let title = format!("Canary: version {}", canary.version);
    let lead = html! {
        "Proposed " (ago(canary.created_at, OffsetDateTime::now_utc())) " by " b { (canary.actor) }
        @if !canary.reason.is_empty() { ": " (canary.reason) }
    };
    let parts = [lead, html! {}, decide(&canary, &viewer.audience)];
    Ok(framed(
        &site,
        &viewer,
        Watched::Canary(id),
        &title,
        "/releases",
        parts,
        &regions,
    ))
}

fn shown(canary: &Canary, transitions: &[Transition], now: OffsetDateTime) -> Vec<Region> {
    let id = canary.id;
    vec![
        Region {
            id: "state",
            title: "Where it is",
            body: standing(canary, transitions, now),
            sources: vec![format!("springtide canary show {id}"), format!("GET /v1/canaries/{id}")],
        },
        Region {
            id: "evidence",
            title: "Evidence",
            body: evidence(canary, transitions, now),
            sources: vec![
                format!("springtide canary show {id}   (with the evidence of this moment)"),
                format!("GET /v1/canaries/{id}/evidence"),
                format!("GET /v1/canaries/{id}   (transitions[].evidence: what each decision was made on)"),
            ],
        },
        Region {
            id: "decisions",
            title: "Decisions so far",
            body: decided(transitions, now),
            sources: vec![
                format!("springtide canary watch {id}"),
                format!("springtide audit list --subject {id}   (those of people)"),
            ],
        },
    ]
}

/// A step of the strategy, in words.
fn step(step: &Value) -> String {
    if let Some(weight) = step["setWeight"].as_f64() {
        return format!("{weight}% of champion's users get it");
    }
    if let Some(analysis) = step.get("analysis") {
        let goal = match analysis["successCondition"].as_str() {
            Some("better") => "it is better than champion",
            _ => "it is not worse than champion",
        };
        let timeout = analysis["timeout"].as_str().unwrap_or("1d");
        return format!("wait until {goal}; after {timeout} a person decides");
    }
    if let Some(pause) = step.get("pause") {
        return match pause["duration"].as_str() {
            Some(duration) => format!("pause for {duration}"),
            None => "pause until a person resumes".to_owned(),
        };
    }
    step.to_string()
}

/// What comes before the first step, in words.
fn shadow(unseen: &Value) -> String {
    format!(
        "answer {}% of champion's requests unseen, until there are {} answers or {} have passed",
        unseen["percent"],
        unseen["answers"],
        unseen["timeout"].as_str().unwrap_or("10m")
    )
}

fn standing(canary: &Canary, transitions: &[Transition], now: OffsetDateTime) -> Markup {
    let last = transitions.first();
    let share = last.map_or(0.0, |last| last.share);
    let steps = canary.strategy["steps"].as_array().map_or(&[][..], Vec::as_slice);
    let over = decisions(&canary.state).is_empty() || canary.state == "champion";
    html! {
        div .tiles {
            (tile("State", &state(&canary.state), &[html! { "for " (age(last.map_or(canary.created_at, |last| last.at), now)) }]))
            (tile("Users", &text(percent(Some(share), 0)), &[html! { "of champion's users get it" }]))
            (tile("Version", &version(canary.version), &[html! { "beside " (version_or_none(canary.control)) }]))
        }
        @if let Some(last) = last { p { "The last decision, by " b { (last.actor) } ": " (last.reason) } }
        ol .card {
            @if let Some(unseen) = canary.strategy.get("shadow") {
                @let current = canary.state == "shadow";
                li aria-current=[current.then_some("step")] {
                    @if current { b { (shadow(unseen)) } ", for " (age(canary.step_since, now)) " so far" } @else { (shadow(unseen)) }
                }
            }
            @for (nth, one) in steps.iter().enumerate() {
                @let current = !over && canary.state != "shadow" && usize::try_from(canary.step) == Ok(nth);
                li aria-current=[current.then_some("step")] {
                    @if current { b { (step(one)) } ", for " (age(canary.step_since, now)) " so far" } @else { (step(one)) }
                }
            }
            li { "it is champion, and held there" }
        }
    }
}

/// The difference of mean rewards, as the release loop saw it.
struct Look<'a> {
    at: OffsetDateTime,
    difference: f64,
    bounds: [f64; 2],
    evidence: &'a Value,
}

/// What decisions were made on, the oldest first. An interval that is open at an end is none.
fn looks(transitions: &[Transition]) -> Vec<Look<'_>> {
    fn look(transition: &Transition) -> Option<Look<'_>> {
        let evidence = transition.evidence.as_ref()?;
        let reward = &evidence["reward"];
        Some(Look {
            at: transition.at,
            difference: reward["difference"].as_f64()?,
            bounds: [reward["low"].as_f64()?, reward["high"].as_f64()?],
            evidence,
        })
    }
    transitions.iter().rev().filter_map(look).collect()
}

fn evidence(canary: &Canary, transitions: &[Transition], now: OffsetDateTime) -> Markup {
    let looks = looks(transitions);
    let newest = transitions.iter().find_map(|transition| transition.evidence.as_ref());
    let margin = canary.strategy["judge"]["margin"].as_f64();
    html! {
        @if looks.is_empty() {
            p .none { "No decision was made on evidence yet." }
        } @else {
            (sequence(&looks, margin))
        }
        @if let Some(newest) = newest { (sides(newest)) }
        @if let Some(last) = looks.last() {
            p .note {
                "The last decision on evidence was made " (ago(last.at, now)) " at a difference of "
                (signed(Some(last.difference), 3)) " (" (range(Some(last.bounds), 3)) "). "
                "The release loop looks every two seconds; it stores what it saw when it decides something."
            }
            @if let Some(summary) = last.evidence["found"]["summary"].as_str() { p { (summary) } }
        }
    }
}

/// The confidence sequence over time.
fn sequence(looks: &[Look<'_>], margin: Option<f64>) -> Markup {
    let first = looks.first().map_or(OffsetDateTime::UNIX_EPOCH, |look| look.at);
    let since = |at: OffsetDateTime| (at - first).as_seconds_f64();
    let points = looks.iter().map(|look| Point {
        x: since(look.at),
        y: look.difference,
        ci95: Some(look.bounds),
        tooltip: format!("{} ({})", signed(Some(look.difference), 3), range(Some(look.bounds), 3)),
    });
    let last = looks.last().map_or(0.0, |look| since(look.at)).max(60.0);
    let limit = margin.map(|margin| {
        [0.0, last].map(|x| Point {
            x,
            y: -margin,
            ci95: None,
            tooltip: format!("−{margin}: the margin of \"not worse\""),
        })
    });
    let mut series = Series::alone(points.collect());
    if let Some(limit) = limit {
        series.insert(
            0,
            Series {
                class: "baseline",
                points: limit.into(),
            },
        );
    }
    let chart = Chart {
        title: "Reward of the canary less that of champion",
        note: "with its confidence sequence, which holds at all looks together; minutes since the first decision on evidence",
        x: Axis::minutes(last),
        format_y: |y| signed(Some(y), 2),
        from_zero: true,
        series,
    };
    html! {
        (chart.draw())
        p .legend { span .primary { "difference, with its interval" } span .baseline { "margin of “not worse”" } }
    }
}

/// What users did on both sides.
fn sides(evidence: &Value) -> Markup {
    let side = |name: &str| {
        let side = &evidence[name];
        let number = |field: &str| side[field].as_i64().unwrap_or(0);
        let share = |field: &str| {
            let answers = number("answers");
            text(percent((answers > 0).then(|| number(field) as f64 / answers as f64), 1))
        };
        vec![
            html! { b { (name) } },
            version_or_none(side["version"].as_i64()),
            text(count(number("users"))),
            text(count(number("answers"))),
            text(decimal(side["mean_reward"].as_f64(), 3)),
            text(decimal(side["mean_tokens"].as_f64(), 1)),
            share("declined"),
            share("aborted"),
            share("unscored"),
        ]
    };
    let head = [
        "side",
        "version",
        "users",
        "answers",
        "mean reward",
        "mean tokens",
        "declined",
        "hung up",
        "without a score",
    ];
    table("Both sides", &head, &[side("canary"), side("champion")], "")
}

fn decided(transitions: &[Transition], now: OffsetDateTime) -> Markup {
    let rows: Vec<Vec<Markup>> = transitions
        .iter()
        .map(|one| {
            vec![
                clock(one.at, now),
                text(&one.event),
                html! { (one.from_state.replace('_', " ")) " → " (state(&one.to_state)) },
                text(percent(Some(one.share), 0)),
                html! { b { (if one.actor == "release" { "the release loop" } else { &one.actor }) } },
                html! { span .long { (one.reason) } },
            ]
        })
        .collect();
    let head = ["at (UTC)", "event", "state", "users", "by", "why"];
    table("Decisions", &head, &rows, "Nothing was decided yet.")
}

fn decide(canary: &Canary, audience: &Audience) -> Markup {
    let all: Vec<Action> = decisions(&canary.state)
        .iter()
        .map(|(decision, does)| Action {
            id: format!("decide-{decision}"),
            button: capital(decision),
            does: (*does).to_owned(),
            path: format!("/v1/canaries/{}/{decision}", canary.id),
            fixed: serde_json::Map::new(),
            inputs: vec![Input::reason()],
            command: format!("springtide canary {decision} {} --reason '…'", canary.id),
            dangerous: matches!(*decision, "abort" | "rollback"),
        })
        .collect();
    html! {
        section aria-labelledby="decide-title" {
            h2 #decide-title { "Decide" }
            @if all.is_empty() {
                p { "It has ended: there is nothing to decide." }
            } @else {
                (actions(&all, (!audience.may_release).then_some("release")))
            }
        }
    }
}

fn capital(word: &str) -> String {
    let mut letters = word.chars();
    letters
        .next()
        .map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

#[cfg(test)]
mod tests;
