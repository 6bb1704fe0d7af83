//! What of the pages is live: which page, and how far back it looks.

use std::time::Duration;

use edge::Problem;
use maud::{Markup, html};
use serde::Deserialize;
use uuid::Uuid;

/// How far back a section looks. There are few, so that viewers share what is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Span {
    Hour,
    SixHours,
    Day,
}

/// The query of pages that look back.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hours {
    hours: Option<u8>,
}

impl Hours {
    pub fn span(&self) -> Result<Span, Problem> {
        Span::of(self.hours)
    }
}

impl Span {
    const ALL: [Self; 3] = [Self::Hour, Self::SixHours, Self::Day];

    pub fn of(hours: Option<u8>) -> Result<Self, Problem> {
        let found = Self::ALL
            .into_iter()
            .find(|span| span.hours() == i32::from(hours.unwrap_or(1)));
        found.ok_or_else(|| Problem::bad_request("hours must be 1, 6 or 24"))
    }

    pub fn hours(self) -> i32 {
        match self {
            Self::Hour => 1,
            Self::SixHours => 6,
            Self::Day => 24,
        }
    }

    /// `the last 6 hours`
    pub fn words(self) -> &'static str {
        match self {
            Self::Hour => "the last hour",
            Self::SixHours => "the last 6 hours",
            Self::Day => "the last 24 hours",
        }
    }

    /// Links to the same page for other spans.
    pub fn choice(self, path: &str) -> Markup {
        html! {
            p {
                "Over "
                @for (nth, span) in Self::ALL.into_iter().enumerate() {
                    @if nth > 0 { " · " }
                    a href=(format!("{path}?hours={}", span.hours())) aria-current=[(span == self).then_some("true")] {
                        (span.words())
                    }
                }
            }
        }
    }
}

/// A page with live regions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Watched {
    Now,
    Releases,
    Canary(Uuid),
    Learning(Span),
    Runs,
    Tide,
    Fleet,
    Feedback(Span),
    Ledger(Span),
}

/// The query of `/live`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Asked {
    section: String,
    id: Option<Uuid>,
    hours: Option<u8>,
}

impl Asked {
    pub fn watched(&self) -> Result<Watched, Problem> {
        let span = || Span::of(self.hours);
        Ok(match (&*self.section, self.id) {
            ("now", None) => Watched::Now,
            ("releases", None) => Watched::Releases,
            ("canary", Some(id)) => Watched::Canary(id),
            ("learning", None) => Watched::Learning(span()?),
            ("runs", None) => Watched::Runs,
            ("tide", None) => Watched::Tide,
            ("fleet", None) => Watched::Fleet,
            ("feedback", None) => Watched::Feedback(span()?),
            ("ledger", None) => Watched::Ledger(span()?),
            _ => {
                return Err(Problem::bad_request(
                    "section must be that of a page, and `canary` needs an id",
                ));
            }
        })
    }
}

impl Watched {
    /// As in [`Asked`].
    pub fn query(self) -> String {
        match self {
            Self::Now => "section=now".into(),
            Self::Releases => "section=releases".into(),
            Self::Canary(id) => format!("section=canary&id={id}"),
            Self::Learning(span) => format!("section=learning&hours={}", span.hours()),
            Self::Runs => "section=runs".into(),
            Self::Tide => "section=tide".into(),
            Self::Fleet => "section=fleet".into(),
            Self::Feedback(span) => format!("section=feedback&hours={}", span.hours()),
            Self::Ledger(span) => format!("section=ledger&hours={}", span.hours()),
        }
    }

    /// Between two looks. What reads many rows is looked at less often.
    pub fn every(self) -> Duration {
        Duration::from_secs(match self {
            Self::Now | Self::Releases | Self::Canary(_) | Self::Fleet => 3,
            Self::Runs | Self::Tide => 10,
            Self::Learning(span) | Self::Feedback(span) | Self::Ledger(span) => match span {
                Span::Hour => 10,
                Span::SixHours | Span::Day => 60,
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_page_is_found_by_the_query_that_it_gives() {
        let id = Uuid::from_u128(7);
        for watched in [
            Watched::Now,
            Watched::Releases,
            Watched::Canary(id),
            Watched::Learning(Span::Day),
            Watched::Runs,
            Watched::Tide,
            Watched::Fleet,
            Watched::Feedback(Span::SixHours),
            Watched::Ledger(Span::Hour),
        ] {
            let uri: axum::http::Uri = format!("/live?{}", watched.query()).parse().unwrap();
            let axum::extract::Query(asked) = axum::extract::Query::<Asked>::try_from_uri(&uri).unwrap();
            assert_eq!(asked.watched().unwrap(), watched);
        }
        for wrong in ["section=canary", "section=none", "section=ledger&hours=7"] {
            let uri: axum::http::Uri = format!("/live?{wrong}").parse().unwrap();
            let asked = axum::extract::Query::<Asked>::try_from_uri(&uri).unwrap();
            assert_eq!(asked.0.watched().unwrap_err().status, 400, "{wrong}");
        }
    }
}
