//! `/feedback`: how often users say something, what they say, and what stays without a score.

use std::collections::BTreeMap;

use axum::extract::State;
use edge::Problem;
use edge::query::Query;
use maud::{Markup, html};
use report::number::{decimal, percent};

use crate::page::layout::{Region, Shown, framed, table, text, tile};
use crate::page::site::Site;
use crate::page::viewer::{Audience, Viewer};
use crate::page::watched::{Hours, Span, Watched};
use crate::page::words::count;
use crate::tables::unavailable;

/// Answers of one arm that were scored, or not, in the same way.
#[derive(Debug, Clone)]
struct Scored {
    arm: String,
    closed: bool,
    signal: Option<String>,
    censor_code: Option<String>,
    answers: i64,
    /// The sum of rewards.
    reward: Option<f64>,
}

pub async fn regions(site: &Site, audience: &Audience, span: Span) -> Result<Vec<Region>, Problem> {
    let read = async {
        let mut reader = site.read(audience.tenant()).await?;
        sqlx::query_file_as!(
            Scored,
            "src/page/sections/feedback.sql",
            site.policy(),
            span.hours(),
            audience.tenant()
        )
        .fetch_all(&mut *reader)
        .await
        .map_err(unavailable)
    };
    let rows = site.read_many(read).await?;
    let query = "generation and trajectory by arm, signal and censor_code, with ids of that time".to_owned();
    Ok(vec![
        Region {
            id: "rates",
            title: "Rates",
            body: rates(&rows, span),
            sources: vec![query.clone()],
        },
        Region {
            id: "signals",
            title: "What users said",
            body: signals(&rows),
            sources: vec![
                query,
                "springtide reward definitions   (what each signal is worth)".into(),
            ],
        },
        Region {
            id: "unscored",
            title: "Without a score",
            body: unscored(&rows),
            sources: vec!["GET /v1/ledger   (codes, all time)".into()],
        },
    ])
}

fn sum<'a>(rows: impl IntoIterator<Item = &'a Scored>) -> i64 {
    rows.into_iter().map(|row| row.answers).sum()
}

fn share(part: i64, whole: i64) -> Markup {
    text(percent((whole > 0).then(|| part as f64 / whole as f64), 1))
}

fn rates(rows: &[Scored], span: Span) -> Markup {
    let all = sum(rows);
    let open = sum(rows.iter().filter(|row| !row.closed));
    let scored = sum(rows.iter().filter(|row| row.reward.is_some()));
    html! {
        div .tiles {
            (tile("Answers", &text(count(all)), &[html! { "to users, in " (span.words()) }]))
            (tile("Scored", &share(scored, all - open), &[html! { (count(scored)) " of " (count(all - open)) " whose horizon has passed" }]))
            (tile("Open", &text(count(open)), &[html! { "wait for feedback" }]))
        }
    }
}

fn signals(rows: &[Scored]) -> Markup {
    let mut closed: BTreeMap<&str, i64> = BTreeMap::new();
    for row in rows.iter().filter(|row| row.closed) {
        *closed.entry(&row.arm).or_default() += row.answers;
    }
    let cells: Vec<Vec<Markup>> = rows
        .iter()
        .filter(|row| row.reward.is_some())
        .map(|row| {
            vec![
                html! { b { (row.arm) } },
                text(row.signal.as_deref().unwrap_or("–")),
                text(count(row.answers)),
                share(row.answers, closed.get(&*row.arm).copied().unwrap_or(0)),
                text(decimal(row.reward.map(|reward| reward / row.answers.max(1) as f64), 3)),
            ]
        })
        .collect();
    let head = ["arm", "signal", "answers", "share", "mean reward"];
    table(
        "What users said",
        &head,
        &cells,
        "No answer of that time has a score yet.",
    )
}

fn unscored(rows: &[Scored]) -> Markup {
    let all = sum(rows.iter().filter(|row| row.closed));
    let mut codes: BTreeMap<&str, i64> = BTreeMap::new();
    for row in rows {
        if let Some(code) = &row.censor_code {
            *codes.entry(code).or_default() += row.answers;
        }
    }
    let mut codes: Vec<(&str, i64)> = codes.into_iter().collect();
    codes.sort_by_key(|(_, answers)| -answers);
    let cells: Vec<Vec<Markup>> = codes
        .into_iter()
        .map(|(code, answers)| vec![html! { code { (code) } }, text(count(answers)), share(answers, all)])
        .collect();
    table(
        "Without a score",
        &["code", "answers", "share"],
        &cells,
        "Every answer whose horizon has passed has a score.",
    )
}

/// What stands elsewhere, with what shows it.
fn elsewhere() -> Markup {
    html! {
        section aria-labelledby="letters-title" {
            h2 #letters-title { "Dead letters, late feedback" }
            div .card {
                p {
                    "Records that could not be stored are in the log. Administrators see them, and put them back, on the page "
                    a href="/feedback/dead-letters" { "Dead letters" } ". The commands:"
                }
                ul .commands {
                    li { "list them, with reasons: " code { "springtide dlq list --open" } }
                    li { "look at one (it may contain user text): " code { "springtide dlq show POSITION" } }
                    li { "put them back: " code { "springtide dlq replay --cause CAUSE" } }
                }
                p { "This role may not read the table of feedback. Late and orphaned feedback is counted by the metrics of "
                    code { "springtide ingest" } "." }
            }
        }
    }
}

pub async fn page(State(site): State<Site>, viewer: Viewer, Query(hours): Query<Hours>) -> Result<Shown, Problem> {
    let span = hours.span()?;
    let lead = html! { "What users made of answers, and how many stay without a score." };
    let parts = [lead, span.choice("/feedback"), elsewhere()];
    let regions = regions(&site, &viewer.audience, span).await?;
    Ok(framed(
        &site,
        &viewer,
        Watched::Feedback(span),
        "Feedback",
        "/feedback",
        parts,
        &regions,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_of_the_answers_whose_horizon_has_passed() {
        let row = |closed, signal: Option<&str>, code: Option<&str>, answers, reward| Scored {
            arm: "<a>".into(),
            closed,
            signal: signal.map(str::to_owned),
            censor_code: code.map(str::to_owned),
            answers,
            reward,
        };
        let rows = [
            row(false, None, None, 1000, None),
            row(true, Some("accept"), None, 30, Some(15.0)),
            row(true, None, Some("no_feedback"), 10, None),
        ];
        let page = rates(&rows, Span::Hour).into_string();
        assert!(
            page.contains("1,040") && page.contains("75.0%") && page.contains("30 of 40"),
            "{page}"
        );
        let page = signals(&rows).into_string();
        assert!(
            page.contains("0.500") && page.contains("75.0%") && page.contains("&lt;a&gt;"),
            "{page}"
        );
        let page = unscored(&rows).into_string();
        assert!(page.contains("no_feedback") && page.contains("25.0%"), "{page}");
        assert!(!rates(&[], Span::Hour).into_string().contains("NaN"));
    }
}
