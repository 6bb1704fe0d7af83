//! How the first page looks. Pure.

use maud::{Markup, html};
use report::number::percent;
use serving::fleet::Replica;
use time::OffsetDateTime;

use super::read::{Alias, Arm, Canary, Data};
use crate::fields::encoded;
use crate::page::layout::{Action, Input, Region, actions, table, text, tile};
use crate::page::sections::fleet;
use crate::page::sections::releases::state;
use crate::page::viewer::Audience;
use crate::page::words::{age, ago, version};

pub fn regions(data: &Data, now: OffsetDateTime) -> Vec<Region> {
    vec![
        Region {
            id: "summary",
            title: "In short",
            body: summary(data, now),
            sources: vec![
                "springtide release list".into(),
                "springtide canary show".into(),
                "springtide run show RUN   (alarms; RUN: the realtime run of springtide run list)".into(),
            ],
        },
        Region {
            id: "back",
            title: "How to go back",
            body: back(data, now),
            sources: vec![
                "springtide release list   (its first lines)".into(),
                "GET /v1/judgments".into(),
            ],
        },
        Region {
            id: "serving",
            title: "What serves whom",
            body: serving(data, now),
            sources: vec![
                "GET /v1/aliases, GET /v1/experiment, GET /v1/replicas, GET /v1/releases?alias=champion".into(),
                "springtide release list".into(),
                "springtide release arms".into(),
            ],
        },
    ]
}

fn summary(data: &Data, now: OffsetDateTime) -> Markup {
    let of = |alias: &str| data.aliases.iter().find(|row| row.alias == alias);
    html! {
        @if !data.alarms.is_empty() {
            div .card .alarm {
                p { b { "Alarms of the realtime run" } }
                ul { @for alarm in &data.alarms { li { (alarm) } } }
                p { a href="/learning" { "What was learned" } }
            }
        }
        @if let Some(canary) = &data.canary { (under_way(canary, now)) }
        div .tiles {
            @match &data.good {
                Some(good) => (tile("Last known good", &version(good.version), &[html! { (ago(good.since, now)) ": " (good.why) }])),
                None => (tile("Last known good", &html! { "–" }, &[html! { "no canary passed, and nobody judged one good" }])),
            }
            @for name in ["champion", "learner"] {
                @if let Some(row) = of(name) {
                    (tile(name, &version(row.version), &[
                        html! { "for " (age(row.since, now)) },
                        html! { (row.follows.as_ref().map_or("pinned".to_owned(), |line| format!("follows {line}"))) },
                    ]))
                }
            }
            (tile("Replicas", &html! { (ready(&data.replicas)) " of " (data.replicas.len()) },
                &[html! { "ready, and heard of in the last 10 s" }]))
            (tile("Alarms", &text(data.alarms.len()), &[html! { "of the realtime run" }]))
        }
    }
}

fn ready(replicas: &[Replica]) -> usize {
    replicas
        .iter()
        .filter(|replica| replica.ready && !replica.silent)
        .count()
}

fn under_way(canary: &Canary, now: OffsetDateTime) -> Markup {
    html! {
        div .card .good-edge {
            p {
                b { "A canary is under way: " }
                (percent(Some(canary.share), 0)) " of champion's users get version " (version(canary.version))
                @if let Some(control) = canary.control { " beside version " (version(control)) }
                ". It is " (state(&canary.state)) ", at step " (canary.step + 1) " of " (canary.steps)
                " for " (age(canary.step_since, now)) "."
            }
            @if let Some(why) = &canary.why { p .note { (why) } }
            p { a href=(format!("/releases/{}", canary.id)) { "Its evidence, and what to do with it" } }
        }
    }
}

/// The replicas that serve an alias's version, of those that report.
fn serves(replicas: &[Replica], row: &Alias) -> (usize, usize) {
    let awake: Vec<&Replica> = replicas.iter().filter(|replica| !replica.silent).collect();
    let serving = awake
        .iter()
        .filter(|replica| fleet::serves(replica, &row.alias, row.version));
    (serving.count(), awake.len())
}

/// The share of all users who get an alias.
fn users(data: &Data, alias: &str) -> Option<f64> {
    let arm = |name: &str| {
        data.arms
            .iter()
            .find(|arm: &&Arm| arm.alias == name)
            .map(|arm| arm.share)
    };
    match &data.canary {
        Some(canary) if alias == "canary" => Some(arm("champion")? * canary.share),
        Some(canary) if alias == "champion" => Some(arm("champion")? * (1.0 - canary.share)),
        _ => arm(alias),
    }
}

fn serving(data: &Data, now: OffsetDateTime) -> Markup {
    let rows: Vec<Vec<Markup>> = data
        .aliases
        .iter()
        .map(|row| {
            let (serving, awake) = serves(&data.replicas, row);
            let late = serving < awake;
            let arm = data.arms.iter().find(|arm| arm.alias == row.alias);
            let explore = arm.map_or(0.0, |arm| arm.explore);
            let temperature_max = arm.and_then(|arm| arm.temperature_max);
            let probability_min = arm.and_then(|arm| arm.probability_min);
            vec![
                html! { b { a href=(format!("/versions/{}", encoded(&row.alias))) { (row.alias) } } },
                version(row.version),
                html! {
                    (percent(users(data, &row.alias), 0))
                    @if explore > 0.0 { small { " explores in " (percent(Some(explore), 0)) } }
                    @if let Some(max) = temperature_max { small { " temperature at most " (max.to_string()) } }
                    @if let Some(min) = probability_min { small { " shows from probability " (min.to_string()) } }
                },
                html! { span .bad[late] { (serving) " of " (awake) } },
                text(row.follows.as_deref().unwrap_or("pinned")),
                ago(row.since, now),
                why(row),
            ]
        })
        .collect();
    let head = ["alias", "version", "users", "replicas", "follows", "since", "why"];
    html! {
        (table("What serves whom", &head, &rows, "No alias names a version yet: the first version gives it one."))
        @if data.replicas.is_empty() { p .note { "No replica has reported yet." } }
    }
}

fn why(row: &Alias) -> Markup {
    html! {
        span .long {
            @match (&row.kind, &row.actor) {
                (Some(kind), Some(actor)) => {
                    (kind)
                    @if actor != kind { " by " b { (actor) } }
                    @if let Some(reason) = row.reason.as_ref().filter(|reason| !reason.is_empty()) { ": " (reason) }
                }
                _ => { "not stored with epoch " (row.epoch) }
            }
        }
    }
}

/// The version that one goes back to, and whether it is known to be good.
fn target(data: &Data) -> Option<(i64, bool)> {
    let champion = data.aliases.iter().find(|row| row.alias == "champion")?;
    let good = data.good_before.as_ref().map(|good| (good.version, true));
    good.or(champion.before.map(|before| (before, false)))
}

fn back(data: &Data, now: OffsetDateTime) -> Markup {
    html! {
        div .card {
            @if data.canary.is_some() {
                p { "First take the canary from its users: " code { "springtide canary abort --reason '…'" } }
            }
            @match (target(data), &data.good_before) {
                (Some((to, true)), Some(good)) => {
                    p { "To the last known good version, " (version(to)) " (" (ago(good.since, now)) "): " code { (rollback(to)) } }
                }
                (Some((to, _)), _) => {
                    p { "To the version before, " (version(to)) ": " code { (rollback(to)) } }
                    p .note {
                        "Nobody has said that it is good. Versions follow each other quickly, so the one before is often as bad: "
                        a href="/versions" { "rewards by version" }
                    }
                }
                (None, _) => { p { "Every version that " code { "champion" } " served before was judged bad, or it served none. Choose one: "
                    a href="/versions" { "rewards by version" } } }
            }
            p { "To stop learning as well: " code { "springtide release pin --alias learner --reason '…'" } }
        }
    }
}

fn rollback(to: i64) -> String {
    format!("springtide release rollback {to} --reason '…'")
}

/// Buttons. They stand outside of the live regions; the version can be changed before it is sent.
pub fn decide(data: &Data, audience: &Audience) -> Markup {
    let champion = data.aliases.iter().find(|row| row.alias == "champion");
    if champion.is_none() {
        return html! {};
    }
    let lacks = (!audience.may_release).then_some("release");
    let learner = data.aliases.iter().find(|row| row.alias == "learner");
    let mut all = vec![go_back(target(data).map(|(to, _)| to))];
    all.push(Action {
        id: "pin".into(),
        button: "Hold champion".into(),
        does: "champion keeps its version until somebody promotes another one. Learning goes on.".into(),
        path: "/v1/releases".into(),
        fixed: fixed("pin", "champion"),
        // no version: the one of that moment, not of when the page was opened
        inputs: vec![Input::reason()],
        command: "springtide release pin --reason '…'".into(),
        dangerous: false,
    });
    if let Some(learner) = learner {
        all.push(Action {
            id: "stop".into(),
            button: "Stop learning".into(),
            does: "learner keeps its version, and the realtime run pauses. champion follows it there, unless it is pinned.".into(),
            path: "/v1/releases".into(),
            fixed: fixed("pin", "learner"),
            inputs: vec![Input::reason()],
            command: "springtide release pin --alias learner --reason '…'".into(),
            dangerous: true,
        });
        all.push(Action {
            id: "promote".into(),
            button: "Promote".into(),
            does: "champion gets this version. Where release.champion is \"follow\", it follows learner again from then on."
                .into(),
            path: "/v1/releases".into(),
            fixed: fixed("promote", "champion"),
            inputs: vec![Input::version(Some(learner.version)), Input::reason()],
            command: format!("springtide release promote {} --reason '…'", learner.version),
            dangerous: false,
        });
    }
    html! {
        section aria-labelledby="decide-title" {
            h2 #decide-title { "Decide" }
            (actions(&all, lacks))
        }
    }
}

/// The button that gives `champion` an older version.
fn go_back(to: Option<i64>) -> Action {
    Action {
        id: "rollback".into(),
        button: "Go back".into(),
        does: "champion gets this version and is held there. learner gets it too, unless it is pinned, and learning continues \
               from it. The version that champion leaves counts as bad, and so does what was trained on top of it. Every \
               replica serves the new one within seconds."
            .into(),
        path: "/v1/releases".into(),
        fixed: fixed("rollback", "champion"),
        inputs: vec![Input::version(to), Input::reason()],
        command: to.map_or("springtide release rollback VERSION --reason '…'".into(), rollback),
        dangerous: true,
    }
}

fn fixed(kind: &str, alias: &str) -> serde_json::Map<String, serde_json::Value> {
    [("kind", kind), ("alias", alias)]
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value.into()))
        .collect()
}

#[cfg(test)]
mod tests;
