//! `/trajectories`: the newest answers with their rewards and what became of them, filtered.
//!
//! Texts are a page of their own, for those who may read them.

pub mod one;
pub mod texts;

use axum::extract::State;
use edge::Problem;
use edge::query::Query;
use maud::{Markup, html};
use report::number::decimal;
use serde::Deserialize;
use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::fields::{encoded, filled};
use crate::page::layout::{Page, Region, Shown, table, text};
use crate::page::site::Site;
use crate::page::viewer::Viewer;
use crate::page::words::{clock, count, short, version};
use crate::tables::unavailable;

/// Generations that are looked through for those that match.
const LOOKED_MAX: i64 = 10_000;
const HOURS_DEFAULT: i32 = 24;
const HOURS_MAX: i32 = 24 * 366;

/// The filter. An empty field of the form is none.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Asked {
    #[serde(deserialize_with = "filled")]
    reward_min: Option<f64>,
    #[serde(deserialize_with = "filled")]
    reward_max: Option<f64>,
    #[serde(deserialize_with = "filled")]
    arm: Option<String>,
    #[serde(deserialize_with = "filled")]
    version: Option<i64>,
    #[serde(deserialize_with = "filled")]
    code: Option<String>,
    #[serde(deserialize_with = "filled")]
    hours: Option<i32>,
    /// Only generations with a lower id.
    #[serde(deserialize_with = "filled")]
    before: Option<Uuid>,
}

#[derive(Debug)]
struct Row {
    id: Uuid,
    version: i64,
    arm: String,
    purpose: String,
    replica: String,
    sampled_at: OffsetDateTime,
    finish_reason: String,
    declined: bool,
    reward: Option<f64>,
    signal: Option<String>,
    episode_id: Option<Uuid>,
    disposition: String,
    code: Option<String>,
    /// The same in all rows: how many were looked through, and the oldest of them.
    looked: i64,
    oldest: Option<Uuid>,
}

impl Asked {
    fn hours(&self) -> Result<i32, Problem> {
        match self.hours.unwrap_or(HOURS_DEFAULT) {
            hours if (1..=HOURS_MAX).contains(&hours) => Ok(hours),
            hours => Err(Problem::bad_request(format!("hours is {hours}; give 1 to {HOURS_MAX}"))),
        }
    }

    /// The address of the same filter from an id on.
    fn address(&self, before: Uuid) -> String {
        let mut address = format!("/trajectories?before={before}");
        let mut add = |name: &str, value: Option<String>| {
            if let Some(value) = value {
                address += &format!("&{name}={}", encoded(&value));
            }
        };
        add("reward_min", self.reward_min.map(|reward| reward.to_string()));
        add("reward_max", self.reward_max.map(|reward| reward.to_string()));
        add("arm", self.arm.clone());
        add("version", self.version.map(|version| version.to_string()));
        add("code", self.code.clone());
        add("hours", self.hours.map(|hours| hours.to_string()));
        address
    }
}

async fn read(
    reader: &mut PgConnection,
    policy: &str,
    asked: &Asked,
    hours: i32,
    tenant: Option<&str>,
) -> sqlx::Result<Vec<Row>> {
    sqlx::query_file_as!(
        Row,
        "src/page/sections/trajectories.sql",
        policy,
        asked.before.unwrap_or(Uuid::max()),
        hours,
        asked.version,
        asked.arm,
        tenant,
        asked.reward_min,
        asked.reward_max,
        asked.code,
        LOOKED_MAX
    )
    .fetch_all(reader)
    .await
}

pub async fn page(State(site): State<Site>, viewer: Viewer, Query(asked): Query<Asked>) -> Result<Shown, Problem> {
    let (tenant, hours) = (viewer.audience.tenant(), asked.hours()?);
    let read = async {
        let mut reader = site.read(tenant).await?;
        read(&mut reader, site.policy(), &asked, hours, tenant)
            .await
            .map_err(unavailable)
    };
    let rows = site.read_many(read).await?;
    let regions = [Region {
        id: "trajectories",
        title: "Newest first",
        body: shown(&rows, hours, OffsetDateTime::now_utc()),
        sources: vec![
            "GET /v1/generations/ID/origin   (one of them)".into(),
            "springtide dataset create   (all that a query selects)".into(),
            "the tables generation, trajectory and disposition, by id".into(),
        ],
    }];
    let page = Page {
        title: "Trajectories",
        section: "/trajectories",
        lead: html! { "Answers, what users made of them, and whether they were trained on." },
        live: None,
        top: filter(&asked, hours),
        regions: &regions,
        bottom: older(&rows, &asked),
    };
    Ok(page.show(&site, &viewer))
}

/// What texts need.
pub const NO_TEXT: &str = "they need a key with the scope texts; each reading is in the audit.";

fn filter(asked: &Asked, hours: i32) -> Markup {
    let fields: [(&str, &str, &str, Option<String>); 6] = [
        (
            "reward_min",
            "Reward from",
            "any",
            asked.reward_min.map(|reward| reward.to_string()),
        ),
        (
            "reward_max",
            "to",
            "any",
            asked.reward_max.map(|reward| reward.to_string()),
        ),
        ("arm", "Arm", "learner", asked.arm.clone()),
        (
            "version",
            "Version",
            "41",
            asked.version.map(|version| version.to_string()),
        ),
        ("code", "Code", "no_feedback", asked.code.clone()),
        ("hours", "Hours back", "24", Some(hours.to_string())),
    ];
    html! {
        form .filter method="get" action="/trajectories" {
            @for (name, label, example, value) in fields {
                div {
                    label for=(name) { (label) }
                    input id=(name) name=(name) value=(value.unwrap_or_default()) placeholder=(example) autocomplete="off";
                }
            }
            button { "Show" }
        }
    }
}

fn older(rows: &[Row], asked: &Asked) -> Markup {
    let last = rows.last();
    // a full page goes on below its last row, another one below what was looked through
    let next = match rows.len() {
        50 => last.map(|last| last.id),
        _ => last
            .filter(|last| last.looked == LOOKED_MAX)
            .and_then(|last| last.oldest),
    };
    html! { @if let Some(next) = next { p { a href=(asked.address(next)) { "Older ones" } } } }
}

fn shown(rows: &[Row], hours: i32, now: OffsetDateTime) -> Markup {
    let cells: Vec<Vec<Markup>> = rows
        .iter()
        .map(|row| {
            vec![
                html! { a href=(format!("/trajectories/{}", row.id)) { (short(row.id)) } },
                clock(row.sampled_at, now),
                version(row.version),
                text(&row.arm),
                text(decimal(row.reward, 3)),
                text(row.signal.as_deref().unwrap_or("–")),
                html! {
                    (row.disposition.replace('_', " "))
                    @if let Some(code) = &row.code { " " code { (code) } }
                },
                html! { (row.finish_reason) @if row.declined { ", declined" } },
                html! { @match row.episode_id { Some(id) => (short(id)), None => "–" } },
                text(&row.purpose),
                text(&row.replica),
            ]
        })
        .collect();
    let head = [
        "answer", "at (UTC)", "version", "arm", "reward", "signal", "became", "ended", "episode", "purpose", "replica",
    ];
    let none = format!(
        "None of the newest {} answers of the last {hours} hours matches. Older ones: more hours, or an arm or version.",
        count(LOOKED_MAX)
    );
    html! {
        (table("Trajectories", &head, &cells, &none))
        @if let Some(row) = rows.first() {
            p .note { "Of the " (count(row.looked)) " newest answers of that arm and version in the last " (hours) " hours." }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use time::macros::datetime;

    fn asked(query: &str) -> Result<Asked, String> {
        let uri: axum::http::Uri = format!("/trajectories?{query}").parse().unwrap();
        let read = axum::extract::Query::<Asked>::try_from_uri(&uri);
        read.map(|query| query.0).map_err(|rejection| rejection.body_text())
    }

    #[test]
    fn empty_fields_of_the_form_filter_nothing_and_others_are_kept_for_the_next_page() {
        let none = asked("reward_min=&reward_max=&arm=&version=&code=&hours=").unwrap();
        assert!(none.reward_min.is_none() && none.arm.is_none() && none.version.is_none());
        assert_eq!(none.hours().unwrap(), 24);
        let some = asked("reward_min=-0.5&arm=a%26b&version=7&hours=48").unwrap();
        let next = some.address(Uuid::from_u128(9));
        assert!(
            next.contains("&reward_min=%2D0%2E5&arm=a%26b&version=7&hours=48"),
            "{next}"
        );
        assert_eq!(asked("hours=0").unwrap().hours().unwrap_err().status, 400);
        for wrong in ["version=x", "reward_min=much", "before=7", "sort=reward"] {
            assert!(asked(wrong).is_err(), "{wrong}");
        }
    }

    fn row(code: Option<&str>, looked: i64) -> Row {
        Row {
            id: Uuid::from_u128(0x77),
            version: 7,
            arm: "<arm>".into(),
            purpose: "production".into(),
            replica: "r1".into(),
            sampled_at: datetime!(2026-11-26 02:00 UTC),
            finish_reason: "stop".into(),
            declined: true,
            reward: Some(-0.5),
            signal: Some("reject".into()),
            episode_id: None,
            disposition: "held_out".into(),
            code: code.map(str::to_owned),
            looked,
            oldest: Some(Uuid::from_u128(0x11)),
        }
    }

    #[test]
    fn rows_say_what_became_of_an_answer_and_texts_are_escaped() {
        let page = shown(&[row(Some("<stale>"), 5)], 24, datetime!(2026-11-26 03:00 UTC)).into_string();
        for part in [
            "−0.500",
            "reject",
            "held out",
            "&lt;stale&gt;",
            "&lt;arm&gt;",
            "stop, declined",
            "/trajectories/00000000",
        ] {
            assert!(page.contains(part), "{part}: {page}");
        }
    }

    #[test]
    fn there_are_older_ones_if_the_page_is_full_or_not_all_was_looked_through() {
        let of = |rows: &[Row]| older(rows, &Asked::default()).into_string();
        assert!(of(&[row(None, 5)]).is_empty());
        assert!(of(&[row(None, LOOKED_MAX)]).contains("000000000011"));
        let full: Vec<Row> = (0..50).map(|_| row(None, 5)).collect();
        assert!(of(&full).contains("000000000077"));
    }
}
