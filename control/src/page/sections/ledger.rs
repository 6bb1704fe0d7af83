//! `/ledger`: what became of every generation of the last hours, and whether the counts add up.

use axum::extract::State;
use edge::Problem;
use edge::query::Query;
use maud::{Markup, html};
use report::number::percent;

use crate::fields::encoded;
use crate::page::layout::{Region, Shown, framed, table, text, tile};
use crate::page::site::Site;
use crate::page::viewer::{Audience, Viewer};
use crate::page::watched::{Hours, Span, Watched};
use crate::page::words::count;
use crate::tables::unavailable;

/// In the order of a generation's life.
const DISPOSITIONS: [&str; 7] = ["open", "queued", "trained", "censored", "dropped", "held_out", "erased"];

#[derive(Debug)]
struct Row {
    purpose: String,
    disposition: String,
    code: Option<String>,
    generations: i64,
}

pub async fn regions(site: &Site, audience: &Audience, span: Span) -> Result<Vec<Region>, Problem> {
    let read = async {
        let mut reader = site.read(audience.tenant()).await?;
        let (policy, tenant, hours) = (site.policy(), audience.tenant(), span.hours());
        let rows = sqlx::query_file_as!(Row, "src/page/sections/ledger.sql", policy, hours, tenant)
            .fetch_all(&mut *reader)
            .await
            .map_err(unavailable)?;
        // Counted without the other tables, in the same snapshot, so that the sums can be checked.
        let stored = sqlx::query_scalar!(
            r#"select count(*) as "count!" from generation
               where policy = $1 and id >= first_generation_id(now() - make_interval(hours => $2))
                 and ($3::text is null or tenant_id = $3)"#,
            policy,
            hours,
            tenant
        )
        .fetch_one(&mut *reader)
        .await
        .map_err(unavailable)?;
        Ok((rows, stored))
    };
    let (rows, stored) = site.read_many(read).await?;
    let sources = || {
        vec![
            "GET /v1/ledger?since=TIME   (since this time)".to_owned(),
            "GET /v1/ledger   (all time; it reads every generation)".to_owned(),
        ]
    };
    Ok(vec![
        Region {
            id: "sums",
            title: "What became of them",
            body: sums(&rows, stored, span),
            sources: sources(),
        },
        Region {
            id: "codes",
            title: "By purpose and code",
            body: codes(&rows, stored),
            sources: sources(),
        },
    ])
}

fn sums(rows: &[Row], stored: i64, span: Span) -> Markup {
    let of = |name: &str| -> i64 {
        let same = rows.iter().filter(|row| row.disposition == name);
        same.map(|row| row.generations).sum()
    };
    let known: i64 = DISPOSITIONS.into_iter().map(of).sum();
    html! {
        div .tiles {
            (tile("Generations", &text(count(stored)), &[html! { "sampled in " (span.words()) }]))
            @for name in DISPOSITIONS {
                @let generations = of(name);
                @if generations > 0 {
                    (tile(&name.replace('_', " "), &text(count(generations)), &[text(share(generations, stored))]))
                }
            }
        }
        @if known == stored {
            p { span .state .good { "adds up" } " Each generation became exactly one of these." }
        } @else {
            p { span .state .bad { "does not add up" } " " (count(known)) " of " (count(stored)) " generations are known to have become one of these." }
        }
    }
}

fn share(part: i64, whole: i64) -> String {
    percent((whole > 0).then(|| part as f64 / whole as f64), 1)
}

fn codes(rows: &[Row], stored: i64) -> Markup {
    let cells: Vec<Vec<Markup>> = rows
        .iter()
        .map(|row| {
            vec![
                text(&row.purpose),
                html! { b { (row.disposition.replace('_', " ")) } },
                html! {
                    @match &row.code {
                        Some(code) => a href=(format!("/trajectories?code={}", encoded(code))) { (code) },
                        None => "–",
                    }
                },
                text(count(row.generations)),
                text(share(row.generations, stored)),
            ]
        })
        .collect();
    let head = ["purpose", "became", "code", "generations", "share"];
    table("By purpose and code", &head, &cells, "Nothing was sampled then.")
}

pub async fn page(State(site): State<Site>, viewer: Viewer, Query(hours): Query<Hours>) -> Result<Shown, Problem> {
    let span = hours.span()?;
    let lead = html! { "Every generation becomes exactly one thing, or the counts would not add up." };
    let parts = [lead, span.choice("/ledger"), html! {}];
    let regions = regions(&site, &viewer.audience, span).await?;
    Ok(framed(
        &site,
        &viewer,
        Watched::Ledger(span),
        "Ledger",
        "/ledger",
        parts,
        &regions,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(disposition: &str, code: Option<&str>, generations: i64) -> Row {
        Row {
            purpose: "production".into(),
            disposition: disposition.into(),
            code: code.map(str::to_owned),
            generations,
        }
    }

    #[test]
    fn the_page_says_whether_the_counts_add_up() {
        let rows = [row("trained", None, 3), row("dropped", Some("<stale>"), 1)];
        let page = sums(&rows, 4, Span::Day).into_string();
        assert!(page.contains(">adds up<") && page.contains("75.0%"), "{page}");
        assert!(sums(&rows, 5, Span::Day).into_string().contains("does not add up"));
        let mislaid = [row("trained", None, 3), row("mislaid", None, 1)];
        assert!(sums(&mislaid, 4, Span::Day).into_string().contains("does not add up"));
        let page = codes(&rows, 4).into_string();
        assert!(
            page.contains("&lt;stale&gt;") && page.contains("?code=%3Cstale%3E"),
            "{page}"
        );
    }
}
