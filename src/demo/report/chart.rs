//! Charts as inline SVG. Shapes carry classes and no colours: the page's style sheet has those, for light and for dark.
//! Knows axes, lines, bands, whiskers and bars; nothing of what is drawn.

use maud::{Markup, html};

/// The drawing's own units; on the page it is as wide as its card.
const WIDTH: f64 = 480.0;
const HEIGHT: f64 = 200.0;
const LEFT: f64 = 50.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 26.0;
/// Lines with more points than this get no mark for each.
const MARKS_MAX: usize = 60;

/// One value, and the ends of its interval where it has one.
#[derive(Debug, Clone)]
pub struct Point {
    pub x: f64,
    pub y: f64,
    pub ends: Option<[f64; 2]>,
    /// Shown when the pointer rests on it.
    pub says: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// A line, with a band between the ends.
    Line,
    /// Marks, with a whisker from end to end.
    Marks,
    /// From 0, this wide in units of x, 1 being the distance between neighbours.
    Bars,
}

#[derive(Debug)]
pub struct Series {
    /// In the style sheet.
    pub class: &'static str,
    pub shape: Shape,
    pub points: Vec<Point>,
}

/// An axis: where it begins and ends, and what is written along it.
#[derive(Debug, Clone)]
pub struct Axis {
    pub min: f64,
    pub max: f64,
    pub ticks: Vec<(f64, String)>,
}

impl Axis {
    /// Round numbers, about `count` of them, around everything in `values`.
    pub fn around(values: impl Iterator<Item = f64>, count: f64, write: impl Fn(f64) -> String) -> Self {
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
            ticks: ticks.map(|tick| (tick, write(tick))).collect(),
        }
    }

    /// From 0 to `seconds`, written in minutes.
    pub fn minutes(seconds: f64) -> Self {
        let step = step(seconds / 60.0 / 6.0);
        let ticks = (0..)
            .map(|nth| f64::from(nth) * step)
            .take_while(|tick| 60.0 * tick <= seconds * 1.001);
        Self {
            min: 0.0,
            max: seconds.max(1e-9),
            ticks: ticks
                .map(|tick| (60.0 * tick, format!("{} min", short(tick))))
                .collect(),
        }
    }

    /// Position of `value`, 0 to 1.
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

/// As few digits as it takes.
fn short(value: f64) -> String {
    let text = format!("{value:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// A chart. `lines` are values to mark across it; `include` must be on the y axis as well.
#[derive(Debug)]
pub struct Chart<'a> {
    pub title: &'a str,
    pub note: &'a str,
    pub x: Axis,
    pub write_y: fn(f64) -> String,
    pub include: &'a [f64],
    pub lines: Vec<(f64, &'static str)>,
    pub series: Vec<Series>,
}

impl Chart<'_> {
    /// A figure with its title; where there are no points it says so.
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
        let values = points.flat_map(|point| [point.y].into_iter().chain(point.ends.into_iter().flatten()));
        let values = values
            .chain(self.include.iter().copied())
            .chain(self.lines.iter().map(|(value, _)| *value));
        let plane = Plane {
            x: self.x.clone(),
            y: Axis::around(values, 4.0, self.write_y),
        };
        html! {
            svg viewBox=(format!("0 0 {WIDTH} {HEIGHT}")) role="img" aria-label=(self.title) {
                (plane.grid())
                @for (value, class) in &self.lines {
                    @let y = plane.up(*value);
                    line class={ "across " (class) } x1=(LEFT) x2=(WIDTH - RIGHT) y1=(px(y)) y2=(px(y)) {}
                }
                @for series in &self.series {
                    g class=(series.class) {
                        @match series.shape {
                            Shape::Line => { (plane.line(&series.points)) }
                            Shape::Marks => { (plane.marks(&series.points)) }
                            Shape::Bars => { (plane.bars(&series.points)) }
                        }
                    }
                }
            }
        }
    }
}

struct Plane {
    x: Axis,
    y: Axis,
}

impl Plane {
    fn along(&self, value: f64) -> f64 {
        LEFT + self.x.position(value) * (WIDTH - LEFT - RIGHT)
    }

    fn up(&self, value: f64) -> f64 {
        HEIGHT - BOTTOM - self.y.position(value) * (HEIGHT - TOP - BOTTOM)
    }

    fn grid(&self) -> Markup {
        html! {
            @for (value, text) in &self.y.ticks {
                @let y = self.up(*value);
                line class=(if *value == 0.0 { "rule zero" } else { "rule" }) x1=(LEFT) x2=(WIDTH - RIGHT) y1=(px(y)) y2=(px(y)) {}
                text .tick x=(LEFT - 6.0) y=(px(y + 3.5)) text-anchor="end" { (text) }
            }
            @for (value, text) in &self.x.ticks {
                @let x = self.along(*value);
                text .tick x=(px(x)) y=(HEIGHT - 8.0) text-anchor=(anchor(x)) { (text) }
            }
        }
    }

    fn line(&self, points: &[Point]) -> Markup {
        let at = |point: &Point, y: f64| format!("{},{}", px(self.along(point.x)), px(self.up(y)));
        let line = points.iter().map(|point| at(point, point.y)).collect::<Vec<_>>();
        let end = |nth: usize| points.iter().filter_map(move |point| Some(at(point, point.ends?[nth])));
        let band = end(0).chain(end(1).rev()).collect::<Vec<_>>();
        html! {
            @if !band.is_empty() { polygon .band points=(band.join(" ")) {} }
            polyline .line points=(line.join(" ")) {}
            @if points.len() <= MARKS_MAX {
                @for point in points { (self.mark(point)) }
            }
        }
    }

    fn marks(&self, points: &[Point]) -> Markup {
        html! {
            @for point in points {
                @let x = px(self.along(point.x));
                @if let Some([low, high]) = point.ends {
                    line .whisker x1=(x) x2=(x) y1=(px(self.up(low))) y2=(px(self.up(high))) {}
                }
                (self.mark(point))
            }
        }
    }

    /// A dot, and around it a larger place for the pointer.
    fn mark(&self, point: &Point) -> Markup {
        let (x, y) = (px(self.along(point.x)), px(self.up(point.y)));
        html! {
            circle .dot cx=(x) cy=(y) r="2.5" {}
            circle .hover cx=(x) cy=(y) r="9" { title { (point.says) } }
        }
    }

    fn bars(&self, points: &[Point]) -> Markup {
        let neighbours = points.windows(2).map(|pair| pair[1].x - pair[0].x);
        let distance = neighbours.fold(self.x.max - self.x.min, f64::min);
        let width = 0.7 * (self.along(distance) - self.along(0.0));
        html! {
            @for point in points {
                @let (top, floor) = (self.up(point.y), self.up(0.0));
                rect .bar x=(px(self.along(point.x) - width / 2.0)) y=(px(top.min(floor))) width=(px(width))
                    height=(px((floor - top).abs())) { title { (point.says) } }
            }
        }
    }
}

/// Text at the edge stays inside.
fn anchor(x: f64) -> &'static str {
    if x > WIDTH - RIGHT - 20.0 {
        "end"
    } else if x < LEFT + 1.0 {
        "start"
    } else {
        "middle"
    }
}

/// A tenth of a unit is enough.
fn px(value: f64) -> String {
    format!("{value:.1}")
}

/// One value with its interval on a horizontal axis that other rows of a table share.
pub fn strip(axis: &Axis, class: &str, value: f64, ends: Option<[f64; 2]>) -> Markup {
    let at = |value: f64| format!("{:.2}%", 100.0 * axis.position(value));
    html! {
        svg .strip class=(class) height="30" aria-hidden="true" {
            @for (tick, _) in &axis.ticks {
                line class=(if *tick == 0.0 { "rule zero" } else { "rule" }) x1=(at(*tick)) x2=(at(*tick)) y1="0" y2="30" {}
            }
            @if let Some([low, high]) = ends {
                line .whisker x1=(at(low)) x2=(at(high)) y1="15" y2="15" {}
            }
            circle .dot cx=(at(value)) cy="15" r="4.5" {}
        }
    }
}

/// The numbers under such rows.
pub fn strip_axis(axis: &Axis) -> Markup {
    html! {
        svg .strip height="16" aria-hidden="true" {
            @for (tick, text) in &axis.ticks {
                text .tick x=(format!("{:.2}%", 100.0 * axis.position(*tick))) y="11" text-anchor="middle" { (text) }
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
        assert_eq!(
            axis.ticks.iter().map(|(_, text)| text.as_str()).collect::<Vec<_>>(),
            ["0.00", "0.02", "0.04", "0.06", "0.08", "0.10"]
        );
        assert_eq!((axis.position(0.0), axis.position(0.1)), (0.0, 1.0));
    }

    #[test]
    fn an_axis_stands_without_a_range_and_without_values() {
        let one = Axis::around([3.0].into_iter(), 4.0, short);
        assert!(one.min < 3.0 && one.max > 3.0 && one.position(3.0).is_finite());
        let none = Axis::around([f64::NAN].into_iter(), 4.0, short);
        assert_eq!((none.min, none.max), (0.0, 1.0));
    }

    #[test]
    fn minutes_are_round_and_end_with_the_run() {
        let axis = Axis::minutes(600.0);
        let texts = axis.ticks.iter().map(|(_, text)| text.as_str()).collect::<Vec<_>>();
        assert_eq!(texts, ["0 min", "2 min", "4 min", "6 min", "8 min", "10 min"]);
        assert_eq!(Axis::minutes(60.0).ticks[1].1, "0.2 min");
    }

    #[test]
    fn a_chart_draws_every_point_and_says_when_there_is_none() {
        let point = |x: f64| Point {
            x,
            y: x * x,
            ends: Some([0.0, x * x + 1.0]),
            says: format!("at {x}"),
        };
        let chart = |shape, points: Vec<Point>| Chart {
            title: "t",
            note: "n",
            x: Axis::minutes(120.0),
            write_y: short,
            include: &[0.0],
            lines: vec![(0.5, "frozen")],
            series: vec![Series {
                class: "learning",
                shape,
                points,
            }],
        };
        let points = vec![point(0.0), point(60.0), point(120.0)];
        for (shape, element) in [
            (Shape::Line, "<polyline"),
            (Shape::Marks, "whisker"),
            (Shape::Bars, "<rect"),
        ] {
            let drawn = chart(shape, points.clone()).draw().into_string();
            assert!(drawn.contains(element) && drawn.contains("at 60"), "{drawn}");
            assert!(!drawn.contains("NaN") && !drawn.contains("inf"), "{drawn}");
        }
        let empty = chart(Shape::Line, Vec::new()).draw().into_string();
        assert!(
            empty.contains("Nothing was measured") && !empty.contains("<svg"),
            "{empty}"
        );
    }
}
