//! The policy while it learns, and the loop: entropy, lengths, latency, staleness, deltas.

use maud::{Markup, html};
use report::{
    chart::{Chart, Point, Series},
    number::{decimal, percent, scientific},
    page::{name_value_table, section},
};

use super::arms::ARMS;
use crate::{
    queries::{Step, Traffic},
    results::RunReport,
    stats::LEARNING,
};

impl RunReport {
    pub fn policy_section(&self) -> Markup {
        let unanswered =
            |traffic: &Traffic| (traffic.closed > 0).then(|| traffic.censored as f64 / traffic.closed as f64);
        let stale = |traffic: &Traffic| Some(traffic.stale as f64);
        let share = |value| percent(Some(value), 1);
        section(
            "The policy while it learns",
            &html! {
                p { "If the entropy falls to 0 or suggestions become very short, the policy has stopped exploring." }
                div .grid {
                    (self.by_step("Entropy", "nats a token, at each step", |step| step.entropy, |v| format!("{v:.2}")))
                    (self.by_step("KL of each step", "nats a token, from the version before", |step| step.kl, |v| scientific(Some(v))))
                    (self.by_period("Length of suggestions", "tokens, including the one that ends it", |t| t.tokens_mean, |v| format!("{v:.1}")))
                    (self.by_period("No answer", "generations without an answer by the horizon, of all closed", unanswered, |v| percent(Some(v), 0)))
                    (self.by_period("Dropped as stale", "generations, by when they were sampled", stale, |v| format!("{v:.0}")))
                    (self.by_step("Changed weights", "published values, of all, at each step", |step| step.density, share))
                    (self.by_step("Size of deltas", "bytes, of the version's bytes", |step| step.delta_ratio, share))
                }
            },
        )
    }

    pub fn loop_section(&self) -> Markup {
        let (staleness, waits) = (&self.staleness, &self.facts.feedback_to_serving_seconds);
        let seconds = |value| format!("{} s", decimal(value, 1));
        let milliseconds = |value, digits| format!("{} ms", decimal(value, digits));
        section(
            "The loop",
            &html! {
                div .grid {
                    div .card {
                        (name_value_table(&[
                            ("feedback to serving, median", seconds(waits.p50)),
                            ("95% within", seconds(waits.p95)),
                            ("over trained trajectories", format!("{} (and {} not yet served)", waits.served, waits.not_served)),
                            ("latency of a completion, median", milliseconds(self.facts.completion_latency_ms.p50, 0)),
                            ("95% within", milliseconds(self.facts.completion_latency_ms.p95, 0)),
                            ("pause of a swap, median", milliseconds(self.facts.totals.swap_pause_ms_p50, 3)),
                            ("longest of all swaps", format!("{}, of {}", milliseconds(self.facts.totals.swap_pause_ms_max, 3), self.facts.totals.swaps)),
                        ]))
                    }
                    div .card {
                        (name_value_table(&[
                            ("steps", self.facts.totals.steps.to_string()),
                            ("versions that answered", self.versions_served.len().to_string()),
                            ("deltas, of the versions' bytes", percent(self.facts.totals.delta_ratio, 2)),
                            ("content hashes of answers and of the trainer", if self.content_hashes_agree { "agree" } else { "DISAGREE" }.to_owned()),
                            ("logged against recomputed, largest |Δ log p|", scientific(self.facts.totals.parity_max)),
                            ("learning arm's generations, dropped as stale", format!("{} of {} ({})", staleness.dropped, staleness.generations, percent(staleness.share, 1))),
                            ("trained on by a later version than sampled them", self.facts.ledger.counts.trained_stale.to_string()),
                        ]))
                    }
                }
                p { "Where the time from feedback to serving goes, in seconds:" }
                (self.phases())
            },
        )
    }

    fn phases(&self) -> Markup {
        html! {
            @if self.feedback_to_serving_phases.is_empty() { p .none { "Nothing was measured." } } @else {
                div .card { table .numbers {
                    thead { tr { th { "phase" } th { "median" } th { "95% within" } } }
                    @for phase in &self.feedback_to_serving_phases {
                        tr { th { (phase.name) } td { (decimal(Some(phase.p50), 2)) } td { (decimal(Some(phase.p95), 2)) } }
                    }
                } }
            }
        }
    }

    /// One point for each step of the learning arm.
    fn by_step(&self, title: &str, note: &str, of: fn(&Step) -> Option<f64>, format: fn(f64) -> String) -> Markup {
        let points = self.facts.steps_taken.iter().filter_map(|step| {
            let y = of(step)?;
            let x = step.at_seconds.min(self.time_axis().max);
            let tooltip = format!("step {}, v{}: {}", step.step, step.version, format(y));
            Some(Point {
                x,
                y,
                ci95: None,
                tooltip,
            })
        });
        let class = "primary";
        self.chart(
            title,
            note,
            format,
            vec![Series {
                class,
                points: points.collect(),
            }],
        )
    }

    /// One point for each period. The frozen arm is left out where it has no value other than 0.
    fn by_period(&self, title: &str, note: &str, of: fn(&Traffic) -> Option<f64>, format: fn(f64) -> String) -> Markup {
        let series = ARMS.map(|(arm, class)| {
            let points = self.timeline.iter().filter_map(|entry| {
                let traffic = entry.traffic.get(arm)?;
                let y = of(traffic)?;
                let x = (entry.period.from_seconds + entry.period.until_seconds) / 2.0;
                let tooltip = format!("{arm}, {} of {} generations", format(y), traffic.generations);
                Some(Point {
                    x,
                    y,
                    ci95: None,
                    tooltip,
                })
            });
            let points: Vec<Point> = points.collect();
            let is_flat = arm != LEARNING && points.iter().all(|point| point.y == 0.0);
            Series {
                class,
                points: if is_flat { Vec::new() } else { points },
            }
        });
        self.chart(title, note, format, series.into())
    }

    fn chart(&self, title: &str, note: &str, format_y: fn(f64) -> String, series: Vec<Series>) -> Markup {
        Chart {
            title,
            note,
            x: self.time_axis(),
            format_y,
            from_zero: true,
            series,
        }
        .draw()
    }
}
