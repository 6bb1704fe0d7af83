//! The arms over time.

use maud::{Markup, html};
use report::{
    chart::{Axis, Chart, Point, Series},
    number::{decimal, percent, range, signed},
    page::section,
};

use crate::{
    results::RunReport,
    stats::{ArmStats, Arms, FOLLOWING, FROZEN, LEARNING},
};

/// A mean and its interval.
type Estimated = (Option<f64>, Option<[f64; 2]>);

/// One statistic as a chart.
struct Measure {
    title: &'static str,
    note: &'static str,
    of: fn(&ArmStats) -> Estimated,
    /// Smallest and largest possible value at the price τ. Intervals are clipped to it.
    possible: fn(f64) -> [f64; 2],
    format: fn(f64) -> String,
}

const MEASURES: [Measure; 4] = [
    Measure {
        title: "Reward per pause",
        note: "over pauses whose developer answers",
        of: |stats| (stats.reward_mean, stats.reward_ci95),
        possible: |tau| [-tau, 1.0 - tau],
        format: |value| signed(Some(value), 2),
    },
    Measure {
        title: "Accepts per 100 pauses",
        note: "over pauses whose developer answers",
        of: |stats| (stats.accepts_per_100, stats.accepts_per_100_ci95),
        possible: |_| [0.0, 100.0],
        format: |value| format!("{value:.0}"),
    },
    Measure {
        title: "Show rate",
        note: "pauses with a suggestion, of all pauses",
        of: |stats| (stats.show_rate, stats.show_rate_ci95),
        possible: |_| [0.0, 1.0],
        format: |value| percent(Some(value), 0),
    },
    Measure {
        title: "Accept rate",
        note: "accepted, of what was shown and answered",
        of: |stats| (stats.accept_rate, stats.accept_rate_ci95),
        possible: |_| [0.0, 1.0],
        format: |value| percent(Some(value), 0),
    },
];

/// The arms and their style classes. The learning arm is drawn last, on top.
pub const ARMS: [(&str, &str); 3] = [(FROZEN, "baseline"), (FOLLOWING, "second"), (LEARNING, "primary")];

impl RunReport {
    /// Time since the first pause.
    pub fn time_axis(&self) -> Axis {
        let end = self.timeline.last().map(|entry| entry.period.until_seconds);
        Axis::minutes(end.unwrap_or(self.facts.seconds))
    }

    pub fn over_time_section(&self) -> Markup {
        section(
            "The arms over time",
            &html! {
                div .grid { @for measure in &MEASURES { (self.over_time(measure)) } }
                (self.thirds_table())
            },
        )
    }

    fn over_time(&self, measure: &Measure) -> Markup {
        let [least, most] = (measure.possible)(self.parameters.tau);
        let series = ARMS.map(|(arm, class)| {
            let points = self.timeline.iter().filter_map(|entry| {
                let [from, until] = [entry.period.from_seconds, entry.period.until_seconds];
                let (y, ci95) = (measure.of)(entry.period.arms.get(arm)?);
                let y = y?;
                let ci95 = ci95.map(|ends| ends.map(|end| end.clamp(least, most)));
                let ends = ci95.map(|ends| ends.map(measure.format).join(" … "));
                let ends = ends.map_or(String::new(), |ends| format!(" (95% {ends})"));
                let tooltip = format!(
                    "{arm}, minutes {:.1} to {:.1}: {}{ends}",
                    from / 60.0,
                    until / 60.0,
                    (measure.format)(y)
                );
                Some(Point {
                    x: (from + until) / 2.0,
                    y,
                    ci95,
                    tooltip,
                })
            });
            Series {
                class,
                points: points.collect(),
            }
        });
        Chart {
            title: measure.title,
            note: measure.note,
            x: self.time_axis(),
            format_y: measure.format,
            from_zero: false,
            series: series.into(),
        }
        .draw()
    }

    fn thirds_table(&self) -> Markup {
        let differences = [self.difference, self.following_difference];
        let whole_run = [("whole run", &self.arms, differences)];
        let thirds = self.thirds.iter().zip(["first third", "second third", "last third"]);
        let thirds = thirds.map(|(third, name)| (name, &third.arms, [third.difference, third.following_difference]));
        html! {
            div .card { table .numbers {
                thead { tr {
                    th { "" } th .text { "arm" } th { "users" } th { "pauses" } th { "reward" } th { "95%" }
                    th { "accepts per 100" } th { "shown" } th { "accepted of shown" } th { "minus " (FROZEN) }
                } }
                @for (name, arms, differences) in whole_run.into_iter().chain(thirds) {
                    tbody { @for (nth, (arm, class)) in ARMS.iter().rev().enumerate() {
                        @let stats = stats_of(arms, arm);
                        tr {
                            th { @if nth == 0 { (name) } }
                            td class={ "text " (class) } { (arm) }
                            td { (stats.users) } td { (stats.pauses) }
                            td { (signed(stats.reward_mean, 3)) }
                            td { (range(stats.reward_ci95, 3)) }
                            td { (decimal(stats.accepts_per_100, 1)) }
                            td { (percent(stats.show_rate, 0)) }
                            td { (percent(stats.accept_rate, 0)) }
                            td { @if let Some(d) = differences.get(nth).copied().flatten() {
                                b { (signed(Some(d.mean), 3)) } " (" (range(Some(d.ci95), 3)) ")"
                            } }
                        }
                    } }
                }
            } }
        }
    }
}

fn stats_of(arms: &Arms, arm: &str) -> ArmStats {
    arms.get(arm).cloned().unwrap_or_default()
}
