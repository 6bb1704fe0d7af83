//! Charts as inline SVG. Shapes carry style classes; the colors are in the page's style sheet.

use maud::{Markup, html};

/// Units of the drawing. On the page it is as wide as its card.
const WIDTH: f64 = 480.0;
const HEIGHT: f64 = 200.0;
const LEFT: f64 = 50.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 26.0;
/// Lines with more points than this get no dots.
const DOTS_MAX: usize = 60;

#[derive(Debug, Clone)]
pub struct Point {
    pub x: f64,
    pub y: f64,
    pub ci95: Option<[f64; 2]>,
    /// Shown while the pointer is over the dot.
    pub tooltip: String,
}

/// A line through its points, with a band between the ends of their intervals.
#[derive(Debug)]
pub struct Series {
    /// `primary`, `second` or `baseline`.
    pub class: &'static str,
    pub points: Vec<Point>,
}

impl Series {
    /// The only one of a chart.
    pub fn alone(points: Vec<Point>) -> Vec<Self> {
        let class = "primary";
        vec![Series { class, points }]
    }
}

/// Where an axis begins and ends, and the labels along it.
#[derive(Debug, Clone)]
pub struct Axis {
    pub min: f64,
    pub max: f64,
    pub ticks: Vec<(f64, String)>,
}

impl Axis {
    /// About `count` round numbers that enclose all `values`.
    pub fn around(values: impl Iterator<Item = f64>, count: f64, format: impl Fn(f64) -> String) -> Self {
        let (min, max) = values
            .filter(|value| value.is_finite())
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(min, max), value| {
                (min.min(value), max.max(value))
            });
        let (min, max) = match max - min {
            range if range > 0.0 => (min, max),
            _ if min.is_finite() => (min - 0.5 * min.abs().max(1e-3), max + 0.5 * max.abs().max(1e-3)),
            _ => (0.0, 1.0), // no value at all
        };
        let step = step((max - min) / count);
        let first = (min / step + 1e-9).floor() as i64;
        let last = (max / step - 1e-9).ceil() as i64;
        let ticks = (first..=last).map(|nth| nth as f64 * step);
        Self {
            min: first as f64 * step,
            max: last as f64 * step,
            ticks: ticks.map(|tick| (tick, format(tick))).collect(),
        }
    }

    /// From 0 to `seconds`, labeled in minutes.
    pub fn minutes(seconds: f64) -> Self {
        let step = step(seconds / 60.0 / 6.0);
        let ticks = (0..)
            .map(|nth| f64::from(nth) * step)
            .take_while(|tick| 60.0 * tick <= seconds * 1.001);
        let label = |minutes: f64| {
            let text = format!("{minutes:.2}");
            format!("{} min", text.trim_end_matches('0').trim_end_matches('.'))
        };
        Self {
            min: 0.0,
            max: seconds.max(1e-9),
            ticks: ticks.map(|tick| (60.0 * tick, label(tick))).collect(),
        }
    }

    /// Position of `value`, from 0 to 1.
    pub fn position(&self, value: f64) -> f64 {
        (value - self.min) / (self.max - self.min)
    }
}

/// The next 1, 2 or 5 times a power of ten.
fn step(rough: f64) -> f64 {
    let power = 10_f64.powf(rough.max(1e-12).log10().floor());
    let factor = [1.0, 2.0, 5.0]
        .into_iter()
        .find(|factor| factor * power >= rough * 0.999);
    factor.unwrap_or(10.0) * power
}

#[derive(Debug)]
pub struct Chart<'a> {
    pub title: &'a str,
    /// What is measured, and its unit.
    pub note: &'a str,
    pub x: Axis,
    pub format_y: fn(f64) -> String,
    /// The y axis includes 0 even if no point is near it.
    pub from_zero: bool,
    /// Later series are drawn on top.
    pub series: Vec<Series>,
}

impl Chart<'_> {
    /// A figure with its title. Without points it says that nothing was measured.
    pub fn draw(&self) -> Markup {
        let any = self.series.iter().any(|series| !series.points.is_empty());
        html! {
            figure .card {
                figcaption { b { (self.title) } " " span { (self.note) } }
                @if any { (self.svg()) } @else { p .none { "Nothing was measured." } }
            }
        }
    }

    fn svg(&self) -> Markup {
        let points = self.series.iter().flat_map(|series| &series.points);
        let values = points.flat_map(|point| [point.y].into_iter().chain(point.ci95.into_iter().flatten()));
        let values = values.chain(self.from_zero.then_some(0.0));
        let plane = Plane {
            x: self.x.clone(),
            y: Axis::around(values, 4.0, self.format_y),
        };
        html! {
            svg viewBox=(format!("0 0 {WIDTH} {HEIGHT}")) role="img" aria-label=(self.title) {
                (plane.grid())
                @for series in &self.series {
                    g class=(series.class) { (plane.line(&series.points)) }
                }
            }
        }
    }
}

/// Places values on the drawing.
struct Plane {
    x: Axis,
    y: Axis,
}

impl Plane {
    fn x(&self, value: f64) -> f64 {
        LEFT + self.x.position(value) * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, value: f64) -> f64 {
        HEIGHT - BOTTOM - self.y.position(value) * (HEIGHT - TOP - BOTTOM)
    }

    fn grid(&self) -> Markup {
        html! {
            @for (value, label) in &self.y.ticks {
                @let y = self.y(*value);
                line class=(rule(*value)) x1=(LEFT) x2=(WIDTH - RIGHT) y1=(px(y)) y2=(px(y)) {}
                text .tick x=(LEFT - 6.0) y=(px(y + 3.5)) text-anchor="end" { (label) }
            }
            @for (value, label) in &self.x.ticks {
                @let x = self.x(*value);
                text .tick x=(px(x)) y=(HEIGHT - 8.0) text-anchor=(anchor(x)) { (label) }
            }
        }
    }

    fn line(&self, points: &[Point]) -> Markup {
        let at = |point: &Point, y: f64| format!("{},{}", px(self.x(point.x)), px(self.y(y)));
        let line = points.iter().map(|point| at(point, point.y)).collect::<Vec<_>>();
        let end = |nth: usize| points.iter().filter_map(move |point| Some(at(point, point.ci95?[nth])));
        let band = end(0).chain(end(1).rev()).collect::<Vec<_>>();
        html! {
            @if !band.is_empty() { polygon .band points=(band.join(" ")) {} }
            polyline .line points=(line.join(" ")) {}
            @if points.len() <= DOTS_MAX {
                @for point in points {
                    @let (x, y) = (px(self.x(point.x)), px(self.y(point.y)));
                    circle .dot cx=(x) cy=(y) r="2.5" {}
                    // A larger target for the pointer.
                    circle .hover cx=(x) cy=(y) r="9" { title { (point.tooltip) } }
                }
            }
        }
    }
}

fn rule(value: f64) -> &'static str {
    if value == 0.0 { "rule zero" } else { "rule" }
}

/// Keeps labels at the edges inside the drawing.
fn anchor(x: f64) -> &'static str {
    if x > WIDTH - RIGHT - 20.0 {
        "end"
    } else if x < LEFT + 1.0 {
        "start"
    } else {
        "middle"
    }
}

fn px(value: f64) -> String {
    format!("{value:.1}")
}

fn percent_of_width(axis: &Axis, value: f64) -> String {
    format!("{:.2}%", 100.0 * axis.position(value))
}

/// One value with its interval, on a horizontal axis that the rows of a table share.
pub fn strip(axis: &Axis, class: &str, value: f64, ci95: Option<[f64; 2]>) -> Markup {
    let at = |value: f64| percent_of_width(axis, value);
    html! {
        svg .strip class=(class) height="30" aria-hidden="true" {
            @for (tick, _) in &axis.ticks {
                line class=(rule(*tick)) x1=(at(*tick)) x2=(at(*tick)) y1="0" y2="30" {}
            }
            @if let Some([low, high]) = ci95 {
                line .whisker x1=(at(low)) x2=(at(high)) y1="15" y2="15" {}
            }
            circle .dot cx=(at(value)) cy="15" r="4.5" {}
        }
    }
}

/// The labels below such rows.
pub fn strip_axis(axis: &Axis) -> Markup {
    html! {
        svg .strip height="16" aria-hidden="true" {
            @for (tick, label) in &axis.ticks {
                text .tick x=(percent_of_width(axis, *tick)) y="11" text-anchor="middle" { (label) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_axis_has_round_numbers_around_all_values() {
        let axis = Axis::around([0.013, 0.087].into_iter(), 4.0, |tick| format!("{tick:.2}"));
        let labels = axis.ticks.iter().map(|(_, label)| label.as_str()).collect::<Vec<_>>();
        assert_eq!(labels, ["0.00", "0.02", "0.04", "0.06", "0.08", "0.10"]);
        assert_eq!((axis.position(0.0), axis.position(0.1)), (0.0, 1.0));
    }

    #[test]
    fn an_axis_needs_neither_a_range_nor_values() {
        let one = Axis::around([3.0].into_iter(), 4.0, |_| String::new());
        assert!(one.min < 3.0 && one.max > 3.0 && one.position(3.0).is_finite());
        let none = Axis::around([f64::NAN].into_iter(), 4.0, |_| String::new());
        assert_eq!((none.min, none.max), (0.0, 1.0));
    }

    #[test]
    fn minutes_are_round_and_end_with_the_run() {
        let axis = Axis::minutes(600.0);
        let labels = axis.ticks.iter().map(|(_, label)| label.as_str()).collect::<Vec<_>>();
        assert_eq!(labels, ["0 min", "2 min", "4 min", "6 min", "8 min", "10 min"]);
        assert_eq!(Axis::minutes(60.0).ticks[1].1, "0.2 min");
    }

    #[test]
    fn a_chart_draws_every_point_and_says_when_there_is_none() {
        let chart = |points: Vec<Point>| {
            let chart = Chart {
                title: "t",
                note: "n",
                x: Axis::minutes(120.0),
                format_y: |y| y.to_string(),
                from_zero: true,
                series: vec![Series {
                    class: "primary",
                    points,
                }],
            };
            chart.draw().into_string()
        };
        let points = [0.0, 60.0, 120.0].map(|x: f64| Point {
            x,
            y: x * x,
            ci95: Some([0.0, x * x + 1.0]),
            tooltip: format!("at {x}"),
        });
        let drawn = chart(points.into());
        assert!(
            drawn.contains("<polyline") && drawn.contains("class=\"band\"") && drawn.contains("at 60"),
            "{drawn}"
        );
        assert!(!drawn.contains("NaN") && !drawn.contains("inf"), "{drawn}");
        let empty = chart(Vec::new());
        assert!(
            empty.contains("Nothing was measured") && !empty.contains("<svg"),
            "{empty}"
        );
    }
}
