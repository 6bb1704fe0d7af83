//! `/versions/{serial}`: one version: its parents and children, who got it, and what it was trained on. An
//! alias in place of the number leads to the version that it names now.

use ::runs::api::versions::{self, Version};
use axum::extract::State;
use axum::response::{IntoResponse, Redirect, Response};
use edge::Problem;
use edge::path::Path;
use maud::{Markup, html};
use report::number::{decimal, interval, percent, scientific};
use serde_json::Value;
use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

use super::made_by;
use crate::figures::Figures;
use crate::page::layout::{Page, Region, table, text};
use crate::page::site::Site;
use crate::page::viewer::Viewer;
use crate::page::words::{ago, bytes, clock, count, short, version, version_or_none};
use crate::rewards::{self, Of, Period};
use crate::tables::unavailable;
use crate::trained::{self, Step};

/// Trajectories of the step that are listed.
const TRAINED_MAX: i64 = 20;

#[derive(Debug)]
struct Data {
    version: Version,
    /// The parent first.
    ancestors: Vec<i64>,
    children: Vec<i64>,
    /// Aliases that named it, the latest first.
    named: Vec<Named>,
    step: Option<Step>,
    /// Some of what the step was trained on.
    trajectories: Vec<Trained>,
    evaluations: Vec<Evaluation>,
    used: Period,
    /// Its own judgment, else that of the nearest ancestor that has one.
    judged: Option<Judged>,
    /// What its answers are like, and its parent's.
    figures: Vec<(i64, Figures)>,
}

#[derive(Debug)]
struct Judged {
    version: i64,
    verdict: String,
    actor: String,
    reason: String,
    at: OffsetDateTime,
}

#[derive(Debug)]
struct Named {
    alias: String,
    epoch: i64,
    at: OffsetDateTime,
}

/// A trajectory that the step was trained on and the viewer may see.
#[derive(Debug)]
struct Trained {
    id: Uuid,
    version: i64,
    reward: Option<f64>,
    signal: Option<String>,
}

#[derive(Debug)]
struct Evaluation {
    id: Uuid,
    status: String,
    result: Option<Value>,
}

async fn read(
    reader: &mut PgConnection,
    policy: &str,
    serial: i64,
    tenant: Option<&str>,
) -> sqlx::Result<Option<Data>> {
    let Some(version) = versions::read(&mut *reader, policy, serial).await? else {
        return Ok(None);
    };
    let ancestors = sqlx::query_scalar!(
        r#"with recursive path (serial, parent, depth) as (
               select v.serial, v.parent, 0 from version v where v.policy = $1 and v.serial = $2
               union all
               select v.serial, v.parent, path.depth + 1
               from path join version v on v.policy = $1 and v.serial = path.parent
               where path.depth < 10
           )
           select serial as "serial!" from path where depth > 0 order by depth"#,
        policy,
        serial
    )
    .fetch_all(&mut *reader)
    .await?;
    // a child is made after its parent, soon if at all
    let children = sqlx::query_scalar!(
        "select serial from version
         where policy = $1 and serial > $2 and serial <= $2 + 5000 and parent = $2 order by serial limit 20",
        policy,
        serial
    )
    .fetch_all(&mut *reader)
    .await?;
    let named = sqlx::query_as!(
        Named,
        r#"select one.alias as "alias!", one.epoch as "epoch!", one.created_at as "at!"
           from (select distinct alias from alias where policy = $1 order by alias limit 50) known
           cross join lateral (select a.alias, a.epoch, a.created_at from assignment a
                               where a.policy = $1 and a.alias = known.alias and a.version = $2 and not a.withdrawn
                               order by a.epoch desc limit 3) one
           order by 2 desc limit 20"#,
        policy,
        serial
    )
    .fetch_all(&mut *reader)
    .await?;
    let (step, trajectories) = match version.run_id.zip(version.step) {
        Some((run, step)) => (
            trained::of_step(&mut *reader, run, step, tenant).await?,
            trajectories_of(&mut *reader, run, step, tenant).await?,
        ),
        None => (None, Vec::new()),
    };
    let evaluations = sqlx::query_as!(
        Evaluation,
        "select id, status, result from run
         where policy = $1 and kind = 'evaluate' and base_version = $2 order by id desc limit 10",
        policy,
        serial
    )
    .fetch_all(&mut *reader)
    .await?;
    // ancestors are nearest first
    let mut path = vec![serial];
    path.extend(&ancestors);
    let judged = sqlx::query_as!(
        Judged,
        r#"select version as "version!", verdict as "verdict!", actor as "actor!", reason as "reason!", at as "at!"
           from version_judgment where policy = $1 and version = any ($2)
           order by array_position($2, version) limit 1"#,
        policy,
        &path
    )
    .fetch_optional(&mut *reader)
    .await?;
    let of = Of {
        policy,
        arm: None,
        surface: None,
        tenant,
    };
    let compared: Vec<i64> = version.parent.into_iter().chain([serial]).collect();
    let mut used = rewards::read_versions(&mut *reader, of, &compared, rewards::ANSWERS_MAX).await?;
    rewards::add_figures(&mut *reader, &mut used).await?;
    let figures = compared.into_iter().zip(&used);
    let figures = figures
        .filter_map(|(version, used)| Some((version, used.figures()?)))
        .collect();
    Ok(Some(Data {
        version,
        ancestors,
        children,
        named,
        step,
        trajectories,
        evaluations,
        used: used.pop().unwrap_or_default(),
        judged,
        figures,
    }))
}

async fn trajectories_of(
    reader: &mut PgConnection,
    run: Uuid,
    step: i64,
    tenant: Option<&str>,
) -> sqlx::Result<Vec<Trained>> {
    sqlx::query_as!(
        Trained,
        "select g.id, g.version, t.reward, t.signal
         from trajectory_use u
         join generation g on g.id = u.generation_id
         join trajectory t on t.generation_id = u.generation_id
         where u.run_id = $1 and u.step = $2 and u.purpose = 'trained' and ($3::text is null or g.tenant_id = $3)
         order by u.generation_id limit $4",
        run,
        step,
        tenant,
        TRAINED_MAX
    )
    .fetch_all(reader)
    .await
}

/// The version that an alias names now.
async fn named_by(reader: &mut PgConnection, policy: &str, alias: &str) -> sqlx::Result<Option<i64>> {
    sqlx::query_scalar!(
        r#"select version as "version!" from alias where policy = $1 and alias = $2 and not withdrawn"#,
        policy,
        alias
    )
    .fetch_optional(reader)
    .await
}

pub async fn page(State(site): State<Site>, viewer: Viewer, Path(name): Path<String>) -> Result<Response, Problem> {
    let tenant = viewer.audience.tenant();
    let mut reader = site.read(tenant).await?;
    let Ok(serial) = name.parse::<i64>() else {
        let serial = named_by(&mut reader, site.policy(), &name).await.map_err(unavailable)?;
        let serial = serial.ok_or_else(|| {
            Problem::not_found(format!(
                "there is no alias `{name}`: / shows the aliases, and /versions lists versions"
            ))
        })?;
        return Ok(Redirect::to(&format!("/versions/{serial}")).into_response());
    };
    let found = read(&mut reader, site.policy(), serial, tenant)
        .await
        .map_err(unavailable)?;
    let Some(data) = found else {
        return Err(Problem::not_found(format!(
            "there is no version {serial}: /versions lists them"
        )));
    };
    let regions = shown(&data, OffsetDateTime::now_utc());
    let page = Page {
        title: &format!("Version {serial}"),
        section: "/versions",
        lead: html! { "Of the line " b { (data.version.line) } ", made by " (made_by(&data.version)) "." },
        live: None,
        top: html! {},
        regions: &regions,
        bottom: html! {},
    };
    Ok(page.show(&site, &viewer).into_response())
}

fn shown(data: &Data, now: OffsetDateTime) -> Vec<Region> {
    let serial = data.version.serial;
    let mut regions = vec![
        Region {
            id: "version",
            title: "What it is",
            body: facts(data, now),
            sources: vec![
                format!("springtide policy inspect {serial}"),
                format!("GET /v1/versions/{serial}"),
            ],
        },
        Region {
            id: "named",
            title: "Who got it",
            body: named(&data.named, now),
            sources: vec![
                "springtide release list --history 200".into(),
                "GET /v1/releases".into(),
            ],
        },
    ];
    if let Some(step) = &data.step {
        regions.push(Region {
            id: "trained",
            title: "What it was trained on",
            body: trained_on(step, &data.trajectories, now),
            sources: vec![
                format!("springtide policy inspect {serial}"),
                format!("GET /v1/runs/{}/curve", step.run),
            ],
        });
    }
    regions.push(Region {
        id: "answers",
        title: "What its answers are like",
        body: answers(&data.figures),
        sources: vec![
            format!("springtide release compare --versions {serial}"),
            format!("GET /v1/rewards?versions={serial}"),
        ],
    });
    regions.push(Region {
        id: "capability",
        title: "Evaluations",
        body: evaluations(&data.evaluations),
        sources: vec!["springtide run list".into(), "GET /v1/runs?kind=evaluate".into()],
    });
    regions
}

fn facts(data: &Data, now: OffsetDateTime) -> Markup {
    let one = &data.version;
    let links = |serials: &[i64]| {
        html! {
            @for (nth, serial) in serials.iter().enumerate() { @if nth > 0 { ", " } (version(*serial)) }
            @if serials.is_empty() { "–" }
        }
    };
    html! {
        div .card {
            dl {
                dt { "Known to be" } dd {
                    @match &data.judged {
                        Some(judged) => {
                            b { (judged.verdict) }
                            @if judged.version != one.serial { ", because it was trained on top of " (version(judged.version)) }
                            " (by " (judged.actor) ", " (ago(judged.at, now)) ": " (judged.reason) ")"
                        }
                        None => "neither good nor bad: nobody has judged it or the versions right before it",
                    }
                }
                dt { "Content hash" } dd { code { (one.root) } }
                dt { "Made" } dd { (ago(one.created_at, now)) }
                dt { "Parent" } dd { (version_or_none(one.parent)) }
                dt { "Before it" } dd { (links(&data.ancestors)) }
                dt { "Made from it" } dd { (links(&data.children)) }
                dt { "Size" } dd {
                    (bytes(one.image_bytes))
                    @if let Some(delta) = one.delta_bytes { ", as a delta from its parent " (bytes(delta)) }
                }
                dt { "Manifest" } dd { code { (one.manifest_key) } }
                dt { "Reward" } dd {
                    (interval(data.used.rewards.interval(), 3)) " over " (data.used.rewards.n()) " of its newest answers"
                }
            }
        }
    }
}

fn named(named: &[Named], now: OffsetDateTime) -> Markup {
    let rows: Vec<Vec<Markup>> = named
        .iter()
        .map(|one| vec![clock(one.at, now), html! { b { (one.alias) } }, text(one.epoch)])
        .collect();
    table(
        "Who got it",
        &["at (UTC)", "alias", "epoch"],
        &rows,
        "No alias has named it.",
    )
}

fn trained_on(step: &Step, trajectories: &[Trained], now: OffsetDateTime) -> Markup {
    let number = |field: &str| step.metrics[field].as_f64();
    let rows: Vec<Vec<Markup>> = trajectories
        .iter()
        .map(|one| {
            vec![
                html! { a href=(format!("/trajectories/{}", one.id)) { (short(one.id)) } },
                version(one.version),
                text(decimal(one.reward, 3)),
                text(one.signal.as_deref().unwrap_or("–")),
            ]
        })
        .collect();
    html! {
        div .card {
            dl {
                dt { "Committed" } dd { (ago(step.committed_at, now)) }
                dt { "Generations" } dd {
                    (count(step.generations))
                    @if step.hidden() > 0 { ", of which " (count(step.hidden())) " are not shown here" }
                }
                dt { "Sampled" } dd {
                    @match step.sampled() {
                        Some([first, last]) => { (clock(first, now)) " to " (clock(last, now)) " (UTC)" }
                        None => "–",
                    }
                }
                dt { "Arms" } dd { (step.arms()) }
                dt { "Tenants" } dd { (step.tenants()) }
                dt { "Reward" } dd { (decimal(step.reward_mean(), 3)) }
                dt { "Loss" } dd { (decimal(number("loss"), 4)) }
                dt { "KL" } dd { (scientific(number("kl"))) " nats a token" }
                dt { "Entropy" } dd { (decimal(number("entropy"), 3)) " nats a token" }
                dt { "Gradient norm" } dd { (decimal(number("gradient_norm"), 3)) }
                dt { "Dropped" } dd {
                    @if step.dropped.is_empty() { "nothing" } @else { (step.dropped()) ", since the step before" }
                }
            }
        }
        (table("Some of its trajectories", &["trajectory", "sampled by version", "reward", "signal"], &rows,
            "Nothing of it is of your tenant, or retention has deleted it."))
    }
}

fn answers(figures: &[(i64, Figures)]) -> Markup {
    let share = |share: Option<f64>| text(percent(share, 0));
    let rows: Vec<Vec<Markup>> = figures
        .iter()
        .map(|(serial, of)| {
            vec![
                version(*serial),
                text(count(of.answers)),
                share(of.shown),
                share(of.accepted),
                share(of.edited),
                share(of.unanswered),
                share(of.unscored),
                share(of.disagreement),
                share(of.tool_failed),
                text(decimal(of.length, 1)),
                share(of.repetition),
                text(decimal(of.entropy, 2)),
            ]
        })
        .collect();
    let head = [
        "version",
        "answers",
        "shown",
        "accepted",
        "edited",
        "unanswered",
        "unscored",
        "signals disagree",
        "tool failed",
        "tokens",
        "repeated",
        "entropy",
    ];
    html! {
        (table("What its answers are like", &head, &rows, "It has not answered users of your tenant."))
        p .note { "Of the newest answers to users. All but the first share are of those that were shown; entropy in nats a token." }
    }
}

fn evaluations(evaluations: &[Evaluation]) -> Markup {
    let rows: Vec<Vec<Markup>> = evaluations
        .iter()
        .map(|one| {
            let result = one.result.as_ref().map_or("–".to_owned(), Value::to_string);
            let shortened: String = result.chars().take(300).collect();
            vec![
                html! { a href=(format!("/runs/{}", one.id)) { (short(one.id)) } },
                text(&one.status),
                html! { span .long { code { (shortened) } } },
            ]
        })
        .collect();
    table(
        "Evaluations",
        &["run", "status", "result"],
        &rows,
        "No run has evaluated it.",
    )
}

#[cfg(test)]
mod tests;
