//! The reference policies: what the learning arm earned, between always declining and always being
//! right.

use maud::{Markup, html};
use report::{
    Interval,
    chart::{Axis, strip, strip_axis},
    number::{decimal, interval, percent, range, signed},
    page::section,
};

use crate::{
    references::{Capability, Comparison, References},
    results::RunReport,
    stats::{ArmStats, FOLLOWING, LEARNING},
};

struct Row<'a> {
    name: &'a str,
    class: &'static str,
    stats: &'a ArmStats,
}

impl<'a> Row<'a> {
    fn reference(name: &'a str, stats: &'a ArmStats) -> Self {
        Self {
            name,
            class: "baseline",
            stats,
        }
    }
}

impl RunReport {
    pub fn references_section(&self) -> Markup {
        let body = match &self.references {
            None => html! { p { "Reference policies were not measured in this run." } },
            Some(references) => html! {
                p {
                    "The frozen arm samples from the base model. Other ways of serving the same model may earn more: greedily, \
                     or with the confidence threshold that earns most (chosen on users who are not replayed). The oracle shows \
                     the greedy suggestion exactly where it is right; no policy can know that. Always declining earns 0."
                }
                (self.scale(references))
                (differences(references))
                (self.skill(references))
            },
        };
        section("Against other ways of serving the base", &body)
    }

    fn scale(&self, references: &References) -> Markup {
        let [learning, ..] = self.all_arms();
        let learning = Row {
            name: LEARNING,
            class: "primary",
            stats: &learning,
        };
        let own = references.comparisons.iter();
        let own = own.map(|comparison| Row::reference(&comparison.name, &comparison.whole.reference));
        let beforehand = references.beforehand.iter();
        let beforehand = beforehand.map(|reference| Row::reference(&reference.name, &reference.stats));
        let groups = [
            (
                "on the learning arm's own pauses",
                sorted(own.chain([learning]).collect()),
            ),
            ("before the run, on other users' pauses", sorted(beforehand.collect())),
        ];
        let stats = groups.iter().flat_map(|(_, rows)| rows).map(|row| row.stats);
        let values = stats.flat_map(|stats| {
            let ends = stats.reward_ci95.into_iter().flatten();
            stats.reward_mean.into_iter().chain(ends)
        });
        let axis = Axis::around(values.chain([0.0]), 6.0, |value| signed(Some(value), 2));
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

    /// What versions along the run can do, apart from when they are silent.
    fn skill(&self, references: &References) -> Markup {
        let along = || references.earlier.iter().chain(&references.capability);
        let Some(first) = along().next() else {
            return html! {};
        };
        html! {
            p {
                "Capability: how often the greedy text is what was typed, if declining is not allowed. Measured at "
                (first.pauses) " pauses of users on whom nothing was trained, where the base is right at "
                (interval(first.base_right_per_100, 1)) " of 100. Columns with \"minus\" are differences at the \
                 same pauses. Reward is of answered pauses there."
            }
            div .card { table .numbers {
                thead { tr {
                    th { "served at" } th { "version" } th { "trained on" } th { "entropy" } th { "right of 100" }
                    th { "right of 100, minus base" } th { "reward minus base, as served" }
                    th { "reward minus base, greedy" }
                    th { "as " (FOLLOWING) " is served, minus the base greedy with its best threshold" }
                } }
                tbody { @for capability in along() { (self.skill_row(capability)) } }
            } }
        }
    }

    fn skill_row(&self, capability: &Capability) -> Markup {
        let steps = self.facts.steps_taken.iter();
        let trained: i64 = steps
            .clone()
            .filter(|step| step.version <= capability.version)
            .filter_map(|step| step.trajectories)
            .sum();
        let made = steps.clone().find(|step| step.version == capability.version);
        html! {
            tr {
                th { (decimal(Some(capability.at_seconds / 60.0), 1)) " min" }
                td { (capability.version) }
                td { (trained) " trajectories" }
                td { (decimal(made.and_then(|step| step.entropy), 2)) " nats a token" }
                td { (interval(capability.version_right_per_100, 1)) }
                (cell(capability.right_per_100, 1))
                (cell(capability.reward_as_served, 3))
                (cell(capability.reward_greedy, 3))
                (cell(capability.reward_minus_best, 3))
            }
        }
    }
}

/// Most reward first.
fn sorted(mut rows: Vec<Row>) -> Vec<Row> {
    let reward = |row: &Row| row.stats.reward_mean.unwrap_or(f64::NEG_INFINITY);
    rows.sort_by(|a, b| reward(b).total_cmp(&reward(a)));
    rows
}

fn line(axis: &Axis, Row { name, class, stats }: &Row) -> Markup {
    html! {
        tr class=(class) {
            th { (name) }
            td .wide { @if let Some(reward) = stats.reward_mean { (strip(axis, class, reward, stats.reward_ci95)) } }
            td { (signed(stats.reward_mean, 3)) }
            td { (range(stats.reward_ci95, 3)) }
            td { (decimal(stats.accepts_per_100, 1)) }
            td { (percent(stats.show_rate, 0)) }
        }
    }
}

/// The learning arm minus each reference.
fn differences(references: &References) -> Markup {
    html! {
        @if !references.comparisons.is_empty() {
            p {
                "The learning arm minus each reference, on the same pauses; in the last column all users outside the frozen arm. \
                 Green: clearly more. Red: clearly less."
            }
            div .card { table .numbers {
                thead { tr {
                    th { "reference" } th { "reward, whole run" } th { "first third" } th { "second third" } th { "last third" }
                    th { "accepts per 100, whole run" } th { "all users, last third" }
                } }
                tbody { @for comparison in &references.comparisons { (row(comparison)) } }
            } }
        }
    }
}

fn row(comparison: &Comparison) -> Markup {
    html! {
        tr {
            th { (comparison.name) }
            (cell(comparison.whole.reward, 3))
            @for third in &comparison.thirds { (cell(third.reward, 3)) }
            (cell(comparison.whole.accepts_per_100, 1))
            (cell(comparison.together.reward, 3))
        }
    }
}

fn cell(difference: Option<Interval>, digits: usize) -> Markup {
    let Some(difference) = difference else {
        return html! { td { "–" } };
    };
    let tone = match difference {
        _ if difference.is_above_zero() => "good",
        _ if difference.is_below_zero() => "bad",
        _ => "",
    };
    html! {
        td class=(tone) {
            b { (signed(Some(difference.mean), digits)) } br;
            small { (range(Some(difference.ci95), digits)) }
        }
    }
}
