//! The scale: what the learning arm earned between never saying anything and always being right.

use maud::{Markup, html};

use super::{minus, plus_minus, section};
use crate::demo::{
    interval::Interval,
    number::{or_dash, percent, range, signed},
    references::{Headroom, Shadow},
    report::{
        Report,
        chart::{Axis, strip, strip_axis},
    },
    tally::{Figures, LEARNING},
};

/// One row of the scale.
struct Row<'a> {
    name: &'a str,
    class: &'static str,
    figures: &'a Figures,
}

impl Report {
    pub fn headroom_section(&self) -> Markup {
        let title = "Where that is on the scale";
        let Some(headroom) = &self.headroom else {
            return section(title, &html! { p { "The scale was not measured in this run." } });
        };
        section(
            title,
            &html! {
                p { "Reward per pause. 0 is what declining always earns; the oracle shows exactly what is right." }
                (self.scale(headroom))
                (against(headroom))
            },
        )
    }

    fn scale(&self, headroom: &Headroom) -> Markup {
        let [learning, _] = self.both();
        let own = headroom
            .shadows
            .iter()
            .map(|shadow| reference(&shadow.name, &shadow.whole.reference));
        let learning = Row {
            name: LEARNING,
            class: "learning",
            figures: &learning,
        };
        let own = sorted(own.chain([learning]).collect());
        let beforehand = headroom
            .beforehand
            .iter()
            .map(|r| reference(&r.name, &r.figures))
            .collect();
        let beforehand = sorted(beforehand);
        let all = own.iter().chain(&beforehand);
        let values = all.flat_map(|row| {
            row.figures
                .reward_mean
                .into_iter()
                .chain(row.figures.reward_ci95.into_iter().flatten())
        });
        let axis = Axis::around(values.chain([0.0]), 6.0, plus_minus);
        let groups = [
            ("on the learning arm's own pauses", own),
            ("beforehand, on other users' pauses", beforehand),
        ];
        html! {
            div .card { table .scale {
                thead { tr {
                    th { "" } th .wide { "" } th { "reward" } th { "95%" } th { "accepts per 100" } th { "shown" }
                } }
                @for (title, rows) in groups.iter().filter(|(_, rows)| !rows.is_empty()) {
                    tbody {
                        tr .group { th colspan="6" { (title) } }
                        @for row in rows { (line(&axis, row)) }
                    }
                }
                tfoot { tr {
                    th { "" } td .wide { (strip_axis(&axis)) } td colspan="4" { "reward per pause; 0: always decline" }
                } }
            } }
        }
    }
}

fn reference<'a>(name: &'a str, figures: &'a Figures) -> Row<'a> {
    Row {
        name,
        class: "frozen",
        figures,
    }
}

/// The most reward first.
fn sorted(mut rows: Vec<Row>) -> Vec<Row> {
    let reward = |row: &Row| row.figures.reward_mean.unwrap_or(f64::NEG_INFINITY);
    rows.sort_by(|a, b| reward(b).total_cmp(&reward(a)));
    rows
}

fn line(axis: &Axis, row: &Row) -> Markup {
    let figures = row.figures;
    html! {
        tr class=(row.class) {
            th { (row.name) }
            td .wide { @if let Some(reward) = figures.reward_mean { (strip(axis, row.class, reward, figures.reward_ci95)) } }
            td { (minus(&signed(figures.reward_mean, 3))) }
            td { (minus(&range(figures.reward_ci95, 3))) }
            td { (or_dash(figures.accepts_per_100, 1)) }
            td { (percent(figures.show_rate, 0)) }
        }
    }
}

/// The learning arm minus each reference, on the same pauses.
fn against(headroom: &Headroom) -> Markup {
    html! {
        @if !headroom.shadows.is_empty() {
            p { "The learning arm minus each reference, on the very same pauses. Green: more, red: less, as far as the interval says." }
            div .card { table .numbers {
                thead { tr {
                    th { "reference" } th { "reward, whole run" } th { "first third" } th { "second third" } th { "last third" }
                    th { "accepts per 100, whole run" }
                } }
                tbody { @for shadow in &headroom.shadows { (row(shadow)) } }
            } }
        }
    }
}

fn row(shadow: &Shadow) -> Markup {
    html! {
        tr {
            th { (shadow.name) }
            (cell(shadow.whole.reward, 3))
            @for nth in 0..3 { (cell(shadow.thirds.get(nth).and_then(|third| third.reward), 3)) }
            (cell(shadow.whole.accepts_per_100, 1))
        }
    }
}

fn cell(difference: Option<Interval>, digits: usize) -> Markup {
    let tone = match difference {
        Some(Interval { ci95: [low, _], .. }) if low > 0.0 => "good",
        Some(Interval { ci95: [_, high], .. }) if high < 0.0 => "bad",
        _ => "",
    };
    html! {
        td class=(tone) {
            @match difference {
                Some(d) => { b { (minus(&signed(Some(d.mean), digits))) } br; small { (minus(&range(Some(d.ci95), digits))) } }
                None => { "–" }
            }
        }
    }
}
