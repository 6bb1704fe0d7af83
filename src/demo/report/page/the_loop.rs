//! The policy while it learns, and the loop that carries it: entropy, lengths, what went unscored, latency, staleness,
//! deltas, swaps.

use maud::{Markup, html};

use super::{arms::ARMS, facts, section};
use crate::demo::{
    history::{StepTaken, Traffic},
    number::{or_dash, percent},
    report::{
        Report,
        chart::{Chart, Point, Series, Shape},
    },
    tally::LEARNING,
};

impl Report {
    pub fn policy_section(&self) -> Markup {
        let length = |traffic: &Traffic| traffic.tokens_mean;
        let unscored =
            |traffic: &Traffic| (traffic.closed > 0).then(|| traffic.censored as f64 / traffic.closed as f64);
        section(
            "The policy while it learns",
            &html! {
                p { "An entropy that falls to nothing, or suggestions that shrink, say that the policy has stopped exploring." }
                div .grid {
                    (self.by_step("Entropy", "nats a token, at each step", |step| step.entropy, |v| format!("{v:.2}")))
                    (self.by_step("KL of each step", "nats a token, new from old", |step| step.kl, exponent))
                    (self.by_stretch("Length of suggestions", "tokens, the one that ends it included", length, |v| format!("{v:.1}")))
                    (self.by_stretch("Unscored", "closed without an answer, of all closed", unscored, |v| percent(Some(v), 0)))
                }
            },
        )
    }

    pub fn loop_section(&self) -> Markup {
        let staleness = &self.staleness;
        let waits = &self.feedback_to_serving_seconds;
        let seconds = |value| format!("{} s", or_dash(value, 1));
        let milliseconds = |value| format!("{} ms", or_dash(value, 3));
        let stale = |traffic: &Traffic| Some(traffic.stale as f64);
        section(
            "The loop",
            &html! {
                div .grid {
                    div .card {
                        (facts(&[
                            ("feedback to serving, median", seconds(waits.p50)),
                            ("95% within", seconds(waits.p95)),
                            ("trajectories that it is over", format!("{} (and {} not yet served)", waits.n, waits.not_served)),
                            ("completion latency, median", format!("{} ms", or_dash(self.completion_latency_ms.p50, 0))),
                            ("95% within", format!("{} ms", or_dash(self.completion_latency_ms.p95, 0))),
                            ("swap pause, median", milliseconds(self.swap_pause_ms.p50)),
                            ("longest of all swaps", format!("{}, of {}", milliseconds(self.swap_pause_ms.max), self.swap_pause_ms.n)),
                        ]))
                    }
                    div .card {
                        (facts(&[
                            ("steps", self.steps.to_string()),
                            ("versions that answered", self.versions_served.len().to_string()),
                            ("deltas, of the versions' bytes", percent(self.delta_ratio, 2)),
                            ("roots of answers and of the trainer", if self.roots_agree { "agree" } else { "DISAGREE" }.to_owned()),
                            ("logged against recomputed, largest |Δ log p|", self.parity_log_prob_difference_max.map_or("–".to_owned(), |p| format!("{p:.1e}"))),
                            ("lost to staleness 0, of the learning arm", format!("{} of {} ({})", staleness.dropped, staleness.generations, percent(staleness.share, 1))),
                            ("trained on by a later version (must be 0)", self.ledger.trained_stale.to_string()),
                        ]))
                    }
                    (self.phases())
                    (self.bars_of_stretches("Dropped as stale", "generations of the learning arm, by when they were sampled", stale))
                    (self.by_step("Weights that changed", "published values, of all, at each step", |step| step.density, |v| percent(Some(v), 1)))
                    (self.by_step("Size of deltas", "bytes, of the version's", |step| step.delta_ratio, |v| percent(Some(v), 1)))
                    (self.pauses())
                }
            },
        )
    }

    fn phases(&self) -> Markup {
        let longest = self
            .feedback_to_serving_phases
            .iter()
            .map(|phase| phase.p95)
            .fold(1e-9, f64::max);
        html! {
            figure .card {
                figcaption { b { "Feedback to serving by phase" } " " span { "seconds; bar: median, line: 95% within" } }
                @if self.feedback_to_serving_phases.is_empty() { p .none { "Nothing was measured." } } @else {
                    table .scale {
                        @for phase in &self.feedback_to_serving_phases {
                            tr {
                                th { (phase.name) }
                                td .wide { svg .strip.learning height="18" aria-hidden="true" {
                                    line .whisker x1="0" x2=(format!("{:.2}%", 100.0 * phase.p95 / longest)) y1="9" y2="9" {}
                                    rect .bar x="0" y="3" height="12" width=(format!("{:.2}%", 100.0 * phase.p50 / longest)) {}
                                } }
                                td { (or_dash(Some(phase.p50), 2)) }
                                td { (or_dash(Some(phase.p95), 2)) }
                            }
                        }
                    }
                }
            }
        }
    }

    /// The learning arm's, one point for each step.
    fn by_step(&self, title: &str, note: &str, of: fn(&StepTaken) -> Option<f64>, write: fn(f64) -> String) -> Markup {
        let points = self.steps_taken.iter().filter_map(|step| {
            let y = of(step)?;
            Some(Point {
                x: step.at_seconds.min(self.time_axis().max),
                y,
                ends: None,
                says: format!("step {}, v{}: {}", step.step, step.version, write(y)),
            })
        });
        self.chart(
            title,
            note,
            write,
            vec![series("learning", Shape::Line, points.collect())],
        )
    }

    /// Both arms', one point for each stretch.
    fn by_stretch(&self, title: &str, note: &str, of: fn(&Traffic) -> Option<f64>, write: fn(f64) -> String) -> Markup {
        let of_arms = ARMS.map(|(arm, class)| series(class, Shape::Line, self.of_stretches(arm, of, write)));
        self.chart(title, note, write, of_arms.into())
    }

    fn bars_of_stretches(&self, title: &str, note: &str, of: fn(&Traffic) -> Option<f64>) -> Markup {
        let write = |value: f64| format!("{value:.0}");
        let points = self.of_stretches(LEARNING, of, write);
        self.chart(title, note, write, vec![series("learning", Shape::Bars, points)])
    }

    fn of_stretches(&self, arm: &str, of: fn(&Traffic) -> Option<f64>, write: fn(f64) -> String) -> Vec<Point> {
        let points = self.timeline.iter().filter_map(|stretch| {
            let traffic = stretch.traffic.get(arm)?;
            let y = of(traffic)?;
            Some(Point {
                x: (stretch.from_seconds + stretch.until_seconds) / 2.0,
                y,
                ends: None,
                says: format!("{arm}, {} of {} generations", write(y), traffic.generations),
            })
        });
        points.collect()
    }

    fn pauses(&self) -> Markup {
        let write = |value: f64| format!("{value:.3} ms");
        let points = self.swaps.iter().map(|swap| Point {
            x: swap.at_seconds.clamp(0.0, self.time_axis().max),
            y: swap.pause_ms,
            ends: None,
            says: format!("v{}: {}", swap.version, write(swap.pause_ms)),
        });
        let marks = vec![series("learning", Shape::Marks, points.collect())];
        self.chart("Swap pauses", "while the engine did nothing else", write, marks)
    }

    fn chart(&self, title: &str, note: &str, write_y: fn(f64) -> String, series: Vec<Series>) -> Markup {
        Chart {
            title,
            note,
            x: self.time_axis(),
            write_y,
            include: &[0.0],
            lines: Vec::new(),
            series,
        }
        .draw()
    }
}

fn exponent(value: f64) -> String {
    if value == 0.0 {
        "0".to_owned()
    } else {
        format!("{value:.1e}")
    }
}

fn series(class: &'static str, shape: Shape, points: Vec<Point>) -> Series {
    Series { class, shape, points }
}
