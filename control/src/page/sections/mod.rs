//! The sections of the page, one module each.

pub mod dead_letters;
pub mod feedback;
pub mod fleet;
pub mod keys;
pub mod learning;
pub mod ledger;
pub mod now;
pub mod releases;
pub mod runs;
pub mod tide;
pub mod trajectories;
pub mod versions;

use edge::Problem;
use maud::{Markup, html};
use serde::Deserialize;

use crate::page::layout::{Page, Region, Shown};
use crate::page::live::Watched;
use crate::page::site::Site;
use crate::page::viewer::Viewer;

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

/// A page whose content is what is watched, with something above it and below.
pub(crate) async fn watched(
    site: &Site,
    viewer: &Viewer,
    watched: Watched,
    title: &str,
    section: &str,
    parts: [Markup; 3],
) -> Result<Shown, Problem> {
    let regions = watched.regions(site, &viewer.audience).await?;
    Ok(framed(site, viewer, watched, title, section, parts, &regions))
}

/// The same, with regions that were read already.
pub(crate) fn framed(
    site: &Site,
    viewer: &Viewer,
    watched: Watched,
    title: &str,
    section: &str,
    [lead, top, bottom]: [Markup; 3],
    regions: &[Region],
) -> Shown {
    let page = Page {
        title,
        section,
        lead,
        live: Some(watched.query()),
        top,
        regions,
        bottom,
    };
    page.show(site, viewer)
}
