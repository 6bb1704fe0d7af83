//! Both arms over time, and the learning arm by version.

use std::collections::BTreeMap;

use maud::{Markup, html};

use super::{minus, plus_minus, section};
use crate::demo::{
    number::{or_dash, percent, range, signed},
    report::{
        Report,
        chart::{Axis, Chart, Point, Series, Shape},
    },
    tally::{FROZEN, Figures, LEARNING},
};

/// A figure and its 95% interval.
type Estimated = (Option<f64>, Option<[f64; 2]>);

/// One of the figures: its value, its interval, how it is written.
struct Measure {
    title: &'static str,
    note: &'static str,
    of: fn(&Figures) -> Estimated,
    /// The least and the most that it can be at the price τ of showing: what is drawn ends there, as an interval may not.
    possible: fn(f64) -> [f64; 2],
    write: fn(f64) -> String,
}

const MEASURES: [Measure; 4] = [
    Measure {
        title: "Reward per pause",
        note: "over all pauses whose developer answers",
        of: |figures| (figures.reward_mean, figures.reward_ci95),
        possible: |tau| [-tau, 1.0 - tau],
        write: plus_minus,
    },
    Measure {
        title: "Accepts per 100 pauses",
        note: "right, of everything",
        of: |figures| (figures.accepts_per_100, figures.accepts_per_100_ci95),
        possible: |_| [0.0, 100.0],
        write: |value| format!("{value:.0}"),
    },
    Measure {
        title: "Show rate",
        note: "pauses with a suggestion, of all",
        of: |figures| (figures.show_rate, figures.show_rate_ci95),
        possible: |_| [0.0, 1.0],
        write: |value| percent(Some(value), 0),
    },
    Measure {
        title: "Accept rate of shown",
        note: "right, of what was shown and answered",
        of: |figures| (figures.accept_rate, figures.accept_rate_ci95),
        possible: |_| [0.0, 1.0],
        write: |value| percent(Some(value), 0),
    },
];

impl Measure {
    fn point(&self, figures: &Figures, tau: f64, x: f64, of: &str) -> Option<Point> {
        let (y, ends) = (self.of)(figures);
        let (y, [least, most]) = (y?, (self.possible)(tau));
        let ends = ends.map(|ends| ends.map(|end| end.clamp(least, most)));
        let written = ends.map(|ends| ends.map(self.write));
        let written = written.map_or(String::new(), |[low, high]| format!(" (95% {low} … {high})"));
        Some(Point {
            x,
            y,
            ends,
            says: format!("{of}: {}{written}", (self.write)(y)),
        })
    }
}

/// Classes of both arms; the learning one is drawn last, on top.
pub const ARMS: [(&str, &str); 2] = [(FROZEN, "frozen"), (LEARNING, "learning")];

impl Report {
    /// Time since the first pause, up to the last stretch.
    pub fn time_axis(&self) -> Axis {
        Axis::minutes(
            self.timeline
                .last()
                .map_or(self.seconds, |stretch| stretch.until_seconds),
        )
    }

    pub fn over_time_section(&self) -> Markup {
        section(
            "Both arms over time",
            &html! {
                div .grid { @for measure in &MEASURES { (self.over_time(measure)) } }
                (self.thirds_table())
            },
        )
    }

    fn over_time(&self, measure: &Measure) -> Markup {
        let series = ARMS.map(|(arm, class)| {
            let points = self.timeline.iter().filter_map(|stretch| {
                let [from, until] = [stretch.from_seconds, stretch.until_seconds];
                let when = format!("{arm}, minutes {:.1} to {:.1}", from / 60.0, until / 60.0);
                measure.point(stretch.arms.get(arm)?, self.parameters.tau, (from + until) / 2.0, &when)
            });
            Series {
                class,
                shape: Shape::Line,
                points: points.collect(),
            }
        });
        Chart {
            title: measure.title,
            note: measure.note,
            x: self.time_axis(),
            write_y: measure.write,
            include: &[],
            lines: Vec::new(),
            series: series.into(),
        }
        .draw()
    }

    fn thirds_table(&self) -> Markup {
        let whole = [("whole run", &self.arms, self.difference)];
        let thirds = self.thirds.iter().zip(["first third", "second third", "last third"]);
        let thirds = thirds.map(|(third, name)| (name, &third.arms, third.difference));
        html! {
            div .card { table .numbers.arms {
                thead { tr {
                    th { "" } th { "arm" } th { "users" } th { "pauses" } th { "reward" } th { "95%" } th { "accepts per 100" }
                    th { "shown" } th { "accepted of shown" } th { (LEARNING) " − " (FROZEN) }
                } }
                @for (name, arms, difference) in whole.into_iter().chain(thirds) {
                    tbody { @for (nth, (arm, class)) in ARMS.iter().rev().enumerate() {
                        @let figures = of(arms, arm);
                        tr {
                            th { @if nth == 0 { (name) } }
                            td class=(class) { (arm) }
                            td { (figures.users) } td { (figures.pauses) }
                            td { (minus(&signed(figures.reward_mean, 3))) }
                            td { (minus(&range(figures.reward_ci95, 3))) }
                            td { (or_dash(figures.accepts_per_100, 1)) }
                            td { (percent(figures.show_rate, 0)) }
                            td { (percent(figures.accept_rate, 0)) }
                            td { @if let (0, Some(d)) = (nth, difference) {
                                b { (minus(&signed(Some(d.mean), 3))) } " (" (minus(&range(Some(d.ci95), 3))) ")"
                            } }
                        }
                    } }
                }
            } }
        }
    }

    pub fn by_version_section(&self) -> Markup {
        let base = of(&self.arms, FROZEN);
        let charts = MEASURES.iter().take(2).map(|measure| {
            let points = self.by_version.iter().zip(0_u32..).filter_map(|(versions, nth)| {
                let figures = &versions.figures;
                let which = format!("{}, {} pauses", span(versions.first, versions.last), figures.pauses);
                measure.point(figures, self.parameters.tau, f64::from(nth) + 0.5, &which)
            });
            let names = self.by_version.iter().zip(0_u32..);
            Chart {
                title: measure.title,
                note: "by version, from the first to the last; dashed: the frozen arm over the whole run",
                x: Axis {
                    min: 0.0,
                    max: self.by_version.len().max(1) as f64,
                    ticks: names
                        .map(|(versions, nth)| (f64::from(nth) + 0.5, format!("v{}", versions.first)))
                        .collect(),
                },
                write_y: measure.write,
                include: &[],
                lines: (measure.of)(&base)
                    .0
                    .map(|value| (value, "frozen"))
                    .into_iter()
                    .collect(),
                series: vec![Series {
                    class: "learning",
                    shape: Shape::Marks,
                    points: points.collect(),
                }],
            }
            .draw()
        });
        section(
            "The learning arm by version",
            &html! {
                p { "Neighbouring versions are taken together until each group has enough answers; the label is the first version of a group." }
                div .grid { @for chart in charts { (chart) } }
            },
        )
    }
}

fn of(arms: &BTreeMap<String, Figures>, arm: &str) -> Figures {
    arms.get(arm).cloned().unwrap_or_default()
}

fn span(first: i64, last: i64) -> String {
    if first == last {
        format!("v{first}")
    } else {
        format!("v{first} to v{last}")
    }
}
