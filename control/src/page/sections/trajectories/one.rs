//! `/trajectories/{id}`: one answer: who sampled it, what users made of it, what became of it, and the
//! other turns of its episode. Without the user's key; texts are a page of their own (`texts`).

use axum::extract::State;
use edge::Problem;
use edge::path::Path;
use maud::{Markup, html};
use report::number::{decimal, percent};
use serde_json::Value;
use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

use super::{NO_TEXT, texts};
use crate::page::layout::{Page, Region, Shown, table, text};
use crate::page::site::Site;
use crate::page::viewer::Viewer;
use crate::page::words::{ago, clock, count, short, version};
use crate::tables::unavailable;

#[derive(Debug)]
struct Trajectory {
    tenant_id: String,
    version: i64,
    version_spans: Value,
    line: String,
    arm: String,
    arm_probability: f32,
    replica: String,
    purpose: String,
    finish_reason: String,
    declined: bool,
    decline_suppressed: bool,
    proven: Option<bool>,
    sampled_at: OffsetDateTime,
    disposition: String,
    code: Option<String>,
    run_id: Option<Uuid>,
    step: Option<i64>,
    typed_tokens: Option<i32>,
    teacher: Option<Uuid>,
    decided_at: Option<OffsetDateTime>,
    surface: Option<String>,
    reward: Option<f64>,
    turn_reward: Option<f64>,
    signal: Option<String>,
    reward_definition: Option<i32>,
    feedback_at: Option<OffsetDateTime>,
    closed_at: Option<OffsetDateTime>,
    episode_id: Option<Uuid>,
    episode_turns: Option<i32>,
}

/// Another answer of the same episode.
#[derive(Debug)]
struct Turn {
    id: Uuid,
    version: i64,
    sampled_at: OffsetDateTime,
    reward: Option<f64>,
    turn_reward: Option<f64>,
}

/// A run that used it.
#[derive(Debug)]
struct Used {
    run_id: Uuid,
    step: i64,
    purpose: String,
}

async fn read(
    reader: &mut PgConnection,
    policy: &str,
    id: Uuid,
    tenant: Option<&str>,
) -> sqlx::Result<Option<(Trajectory, Vec<Turn>, Vec<Used>)>> {
    let found = sqlx::query_as!(
        Trajectory,
        r#"select g.tenant_id, g.version, g.version_spans, g.line, g.arm, g.arm_probability, g.replica, g.purpose,
                  g.finish_reason, g.declined, g.decline_suppressed, g.proven, g.sampled_at,
                  disposition_of(d.kind, t.generation_id is not null, t.censor_code) as "disposition!",
                  coalesce(d.code, t.censor_code) as code, d.run_id as "run_id?", d.step, d.typed_tokens, d.teacher,
                  d.decided_at as "decided_at?",
                  t.surface as "surface?", t.reward, t.turn_reward, t.signal, t.reward_definition as "reward_definition?",
                  t.feedback_at, t.closed_at as "closed_at?", t.episode_id, t.episode_turns
           from generation g
           left join trajectory t on t.generation_id = g.id
           left join disposition d on d.generation_id = g.id
           where g.id = $1 and g.policy = $2 and ($3::text is null or g.tenant_id = $3)"#,
        id,
        policy,
        tenant
    )
    .fetch_optional(&mut *reader)
    .await?;
    let Some(found) = found else { return Ok(None) };
    let turns = sqlx::query_as!(
        Turn,
        "select g.id, g.version, g.sampled_at, t.reward, t.turn_reward
         from trajectory t join generation g on g.id = t.generation_id
         where t.episode_id = $1 and g.tenant_id = $2 order by g.id limit 100",
        found.episode_id,
        found.tenant_id
    )
    .fetch_all(&mut *reader)
    .await?;
    let uses = sqlx::query_as!(
        Used,
        "select run_id, step, purpose from trajectory_use where generation_id = $1 order by used_at limit 20",
        id
    )
    .fetch_all(reader)
    .await?;
    Ok(Some((found, turns, uses)))
}

pub async fn page(State(site): State<Site>, viewer: Viewer, Path(id): Path<Uuid>) -> Result<Shown, Problem> {
    let tenant = viewer.audience.tenant();
    let mut reader = site.read(tenant).await?;
    let found = read(&mut reader, site.policy(), id, tenant)
        .await
        .map_err(unavailable)?;
    let Some((one, turns, uses)) = found else {
        return Err(Problem::not_found(format!(
            "there is no answer {id} that this key may see: /trajectories lists them"
        )));
    };
    let regions = shown(id, &one, &turns, &uses, OffsetDateTime::now_utc());
    let page = Page {
        title: "One answer",
        section: "/trajectories",
        lead: html! { code { (id) } },
        live: None,
        top: html! {},
        regions: &regions,
        bottom: match viewer.may_read_texts {
            true => texts::form(id),
            false => html! { p .note { "Prompt and answer are not shown: " (NO_TEXT) } },
        },
    };
    Ok(page.show(&site, &viewer))
}

fn shown(id: Uuid, one: &Trajectory, turns: &[Turn], uses: &[Used], now: OffsetDateTime) -> Vec<Region> {
    let mut regions = vec![
        Region {
            id: "answer",
            title: "Where it comes from",
            body: origin(one, now),
            sources: vec![format!("GET /v1/generations/{id}/origin")],
        },
        Region {
            id: "became",
            title: "What became of it",
            body: became(one, uses, now),
            sources: vec![format!("select * from ledger where generation_id = '{id}'")],
        },
    ];
    if one.episode_id.is_some() {
        regions.push(Region {
            id: "episode",
            title: "Its episode",
            body: episode(id, one, turns, now),
            sources: vec!["the table trajectory, by episode_id".into()],
        });
    }
    regions
}

fn origin(one: &Trajectory, now: OffsetDateTime) -> Markup {
    html! {
        div .card {
            dl {
                dt { "Sampled" } dd { (ago(one.sampled_at, now)) " by " b { (one.replica) } }
                dt { "Version" } dd {
                    (version(one.version)) " of the line " (one.line) ", tokens by version " code { (one.version_spans) }
                }
                dt { "Arm" } dd { (one.arm) ", drawn with probability " (decimal(Some(f64::from(one.arm_probability)), 3)) }
                dt { "For" } dd { (one.purpose) }
                dt { "Tenant" } dd { (one.tenant_id) }
                dt { "Ended" } dd {
                    (one.finish_reason)
                    @if one.declined { ", the policy declined" }
                    @if one.decline_suppressed { ", declining was forbidden" }
                }
                dt { "Proof" } dd {
                    (match one.proven { Some(true) => "its sampler's signature is right", Some(false) => "its signature was wrong", None => "none" })
                }
            }
        }
    }
}

fn became(one: &Trajectory, uses: &[Used], now: OffsetDateTime) -> Markup {
    html! {
        div .card {
            dl {
                dt { "Now" } dd {
                    b { (one.disposition.replace('_', " ")) }
                    @if let Some(code) = &one.code { " " code { (code) } }
                    @if let Some(at) = one.decided_at { ", " (ago(at, now)) }
                    @if let (Some(run), Some(step)) = (one.run_id, one.step) {
                        ", " a href=(format!("/runs/{run}")) { "step " (step) }
                    }
                    @if let (Some(tokens), Some(key)) = (one.typed_tokens, one.teacher) {
                        ", on what its user typed (" (tokens) " tokens"
                        @if !key.is_nil() { ", sent by key " (key) }
                        ")"
                    }
                }
                dt { "Reward" } dd {
                    (decimal(one.reward, 3))
                    @if let Some(turn) = one.turn_reward { ", of the turn alone " (decimal(Some(turn), 3)) }
                    @if let Some(signal) = &one.signal { ", decided by " b { (signal) } }
                }
                dt { "Scored" } dd {
                    @match (&one.surface, one.reward_definition) {
                        (Some(surface), Some(definition)) => { "on the surface " (surface) ", by version " (definition) " of its definition" }
                        _ => { "not yet: its horizon has not passed" }
                    }
                }
                @if let Some(at) = one.feedback_at { dt { "Feedback" } dd { (ago(at, now)) } }
                @if let Some(at) = one.closed_at { dt { "Closed" } dd { (ago(at, now)) } }
                @if !uses.is_empty() {
                    dt { "Used by" } dd {
                        @for (nth, used) in uses.iter().enumerate() {
                            @if nth > 0 { ", " }
                            a href=(format!("/runs/{}", used.run_id)) { "step " (used.step) } " (" (used.purpose) ")"
                        }
                    }
                }
            }
        }
    }
}

fn episode(id: Uuid, one: &Trajectory, turns: &[Turn], now: OffsetDateTime) -> Markup {
    let rows: Vec<Vec<Markup>> = turns
        .iter()
        .map(|turn| {
            vec![
                html! {
                    @if turn.id == id { b { "this one" } } @else { a href=(format!("/trajectories/{}", turn.id)) { (short(turn.id)) } }
                },
                clock(turn.sampled_at, now),
                version(turn.version),
                text(decimal(turn.reward, 3)),
                text(decimal(turn.turn_reward, 3)),
            ]
        })
        .collect();
    let all = i64::from(one.episode_turns.unwrap_or(0));
    let shown = i64::try_from(turns.len()).unwrap_or(i64::MAX);
    html! {
        (table("Turns", &["turn", "at (UTC)", "version", "reward", "of the turn"], &rows, "Its turns are gone."))
        p .note { (count(shown)) " of " (count(all)) " turns"
            @if all > 0 { " (" (percent(Some(shown as f64 / all as f64), 0)) ")" } ", in order." }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use time::macros::datetime;

    #[test]
    fn an_answer_shows_its_origin_its_fate_and_its_episode() {
        let now = datetime!(2026-11-26 03:00 UTC);
        let id = Uuid::from_u128(0x77);
        let one = Trajectory {
            tenant_id: "<ours>".into(),
            version: 7,
            version_spans: json!([[7, 12]]),
            line: "realtime".into(),
            arm: "learner".into(),
            arm_probability: 0.25,
            replica: "<r1>".into(),
            purpose: "production".into(),
            finish_reason: "stop".into(),
            declined: false,
            decline_suppressed: true,
            proven: Some(true),
            sampled_at: now,
            disposition: "trained".into(),
            code: None,
            run_id: Some(id),
            step: Some(3),
            typed_tokens: Some(9),
            teacher: Some(Uuid::max()),
            decided_at: Some(now),
            surface: Some("chat".into()),
            reward: Some(0.75),
            turn_reward: Some(0.5),
            signal: Some("accept".into()),
            reward_definition: Some(1),
            feedback_at: None,
            closed_at: Some(now),
            episode_id: Some(id),
            episode_turns: Some(2),
        };
        let turns = [Turn {
            id,
            version: 7,
            sampled_at: now,
            reward: Some(0.75),
            turn_reward: None,
        }];
        let uses = [Used {
            run_id: id,
            step: 3,
            purpose: "trained".into(),
        }];
        let page: String = shown(id, &one, &turns, &uses, now)
            .into_iter()
            .map(|region| region.body.into_string())
            .collect();
        for part in [
            "&lt;r1&gt;",
            "&lt;ours&gt;",
            "[[7,12]]",
            "0.250",
            "step 3",
            "of the turn alone 0.500",
            "decided by <b>accept</b>",
            "on what its user typed (9 tokens, sent by key ffffffff-ffff-ffff-ffff-ffffffffffff)",
            "this one",
            "1 of 2 turns (50%)",
            "declining was forbidden",
        ] {
            assert!(page.contains(part), "{part}: {page}");
        }
    }
}
