//! The view that fills the terminal: the arms, their reward over time, the loop and the problems.
//! Pure: it turns a [`Scene`] into cells.

use std::time::Duration;

use ratatui::{
    Frame,
    layout::{Alignment, Constraint, Layout, Rect},
    style::{Color, Modifier, Style, Stylize},
    symbols::Marker,
    text::{Line, Span},
    widgets::{Axis, Block, Cell, Chart, Dataset, GraphType, LineGauge, Paragraph, Row, Table},
};
use report::{
    Interval,
    number::{decimal, percent, range, signed},
};

use super::line::{clock, loop_facts, problems, rate};
use crate::{
    progress::{Progress, Run},
    queries::Live,
    stats::{self, ArmStats, FOLLOWING, FROZEN, LEARNING, Measure, Outcome, Period},
};

/// Newest lines of the log that are shown.
pub const LOG_LINES_MAX: usize = 3;
/// Points of each arm's line.
const PERIODS: u32 = 12;
const ARMS: [(&str, Color); 3] = [
    (LEARNING, Color::Cyan),
    (FOLLOWING, Color::Magenta),
    (FROZEN, Color::Gray),
];

/// All that the view shows.
pub struct Scene<'a> {
    pub run: Run,
    pub elapsed: Duration,
    pub progress: &'a Progress<Outcome>,
    pub live: &'a Live,
    pub log: Vec<String>,
}

pub fn draw(frame: &mut Frame, scene: &Scene) {
    let [title, progress, arms, chart, facts, notes, keys] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Length(8),
        Constraint::Min(8),
        Constraint::Length(1),
        Constraint::Length(LOG_LINES_MAX as u16 + 1),
        Constraint::Length(1),
    ])
    .areas(frame.area());

    frame.render_widget(heading(scene), title);
    frame.render_widget(gauge(scene), progress);
    frame.render_widget(table(scene), arms);
    reward_over_time(frame, chart, scene);
    frame.render_widget(Line::from(loop_facts(scene.live)), facts);
    frame.render_widget(Paragraph::new(notes_lines(scene)), notes);
    frame.render_widget(keys_line(scene.progress.interrupted), keys);
}

fn panel(title: &str) -> Block<'_> {
    Block::bordered()
        .border_style(Style::new().dark_gray())
        .title(title.bold())
}

fn heading(scene: &Scene) -> Line<'static> {
    let Run { users, seed, .. } = scene.run;
    let (pauses, rate) = (scene.progress.counts.due, rate(scene.elapsed, scene.progress));
    let rest = format!("  {users} developers, seed {seed}, {pauses} pauses, {rate}");
    Line::from(vec!["Springtide".bold(), Span::raw(rest)])
}

fn gauge(scene: &Scene) -> LineGauge<'static> {
    let Scene { run, elapsed, .. } = scene;
    let left = run.length.saturating_sub(*elapsed);
    let label = format!("{} of {}, {} left", clock(*elapsed), clock(run.length), clock(left));
    LineGauge::default()
        .ratio((elapsed.as_secs_f64() / run.length.as_secs_f64()).clamp(0.0, 1.0))
        .label(label)
        .filled_style(Style::new().fg(ARMS[0].1))
        .unfilled_style(Style::new().dark_gray())
}

fn table(scene: &Scene) -> Table<'static> {
    let (outcomes, tau) = (&scene.progress.outcomes, scene.run.tau);
    let arms = stats::arms(outcomes, tau);
    let differences = [LEARNING, FOLLOWING].map(|arm| {
        let difference = |measure| stats::difference(outcomes, arm, measure, tau);
        difference_row(arm, difference(Measure::Reward), difference(Measure::Accepts))
    });
    let header = ["", "reward", "95%", "accepts/100", "shown", "of shown", "pauses"];
    let rows = ARMS.map(|(arm, color)| arm_row(arm, &arms[arm]).fg(color));
    let widths = [15, 8, 18, 12, 7, 9, 8].map(Constraint::Length);
    Table::new(rows.into_iter().chain(differences), widths)
        .header(Row::new(header.map(right)).dark_gray())
        .column_spacing(0)
        .block(panel(" The arms so far "))
}

fn right(text: impl Into<String>) -> Cell<'static> {
    Cell::from(Line::from(text.into()).alignment(Alignment::Right))
}

fn arm_row(arm: &str, stats: &ArmStats) -> Row<'static> {
    let cells = [
        signed(stats.reward_mean, 3),
        range(stats.reward_ci95, 3),
        decimal(stats.accepts_per_100, 1),
        percent(stats.show_rate, 0),
        percent(stats.accept_rate, 0),
        stats.pauses.to_string(),
    ];
    Row::new([Cell::from(arm.to_owned())].into_iter().chain(cells.map(right)))
}

/// Green or red once the interval excludes 0.
fn difference_row(arm: &str, reward: Option<Interval>, accepts: Option<Interval>) -> Row<'static> {
    let color = match reward {
        Some(reward) if reward.is_above_zero() => Color::Green,
        Some(reward) if reward.is_below_zero() => Color::Red,
        _ => Color::Reset,
    };
    let cells = [
        signed(reward.map(|d| d.mean), 3),
        range(reward.map(|d| d.ci95), 3),
        signed(accepts.map(|d| d.mean), 1),
    ];
    let name = Cell::from(format!("{arm} − {FROZEN}"));
    Row::new([name].into_iter().chain(cells.map(right))).fg(color).bold()
}

fn reward_over_time(frame: &mut Frame, area: Rect, scene: &Scene) {
    let periods = stats::periods(&scene.progress.outcomes, scene.run.length, PERIODS, scene.run.tau);
    let lines = ARMS.map(|(arm, color)| (arm, color, rewards(&periods, arm)));
    let values = || {
        lines
            .iter()
            .flat_map(|(_, _, points)| points)
            .map(|(_, reward)| *reward)
    };
    let low = values().fold(0.0, f64::min);
    let high = values().fold(0.1, f64::max);
    let minutes = scene.run.length.as_secs_f64() / 60.0;
    let parts = [0.0, 0.5, 1.0];
    let axis = |bounds: [f64; 2], labels: [String; 3]| {
        Axis::default()
            .bounds(bounds)
            .labels(labels)
            .style(Style::new().dark_gray())
    };
    // The learning arm is drawn last, on top.
    let datasets = lines.iter().rev().map(|(arm, color, points)| {
        Dataset::default()
            .name(*arm)
            .marker(Marker::Braille)
            .graph_type(GraphType::Line)
            .style(Style::new().fg(*color))
            .data(points)
    });
    let legend = ARMS.into_iter().flat_map(|(arm, color)| [arm.fg(color), " ".into()]);
    let chart = Chart::new(datasets.collect())
        .block(panel(" Reward per pause over time ").title(Line::from_iter(legend)))
        .legend_position(None)
        .x_axis(axis(
            [0.0, minutes],
            parts.map(|part| format!("{:.1} min", part * minutes)),
        ))
        .y_axis(axis(
            [low, high],
            parts.map(|part| signed(Some(low + part * (high - low)), 2)),
        ));
    frame.render_widget(chart, area);
}

/// Middle of each period in minutes, and the arm's mean reward there.
fn rewards(periods: &[Period], arm: &str) -> Vec<(f64, f64)> {
    let points = periods.iter().filter_map(|period| {
        let middle = (period.from_seconds + period.until_seconds) / 120.0;
        Some((middle, period.arms.get(arm)?.reward_mean?))
    });
    points.collect()
}

/// Problems first, then the newest lines of the log.
fn notes_lines(scene: &Scene) -> Vec<Line<'static>> {
    let halted = scene.live.state.halted();
    let halted = halted.map(|reason| Line::from(format!("training {reason}")).yellow());
    let problems = problems(scene.progress).join(", ");
    let problems = (!problems.is_empty()).then(|| Line::from(problems).red());
    let log = scene
        .log
        .iter()
        .map(|line| Line::from(without_colors(line)).dark_gray());
    halted.into_iter().chain(problems).chain(log).collect()
}

/// Removes the terminal's color codes.
fn without_colors(line: &str) -> String {
    let mut parts = line.split("\x1b[");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| {
        text + part.split_once('m').map_or(part, |(_, rest)| rest)
    })
}

fn keys_line(interrupted: bool) -> Line<'static> {
    let text = if interrupted {
        "no further pauses; waiting for the developers who are at one. q or Ctrl-C: do not wait"
    } else {
        "q or Ctrl-C: end early and report on what there is"
    };
    Line::from(text).dark_gray().add_modifier(Modifier::ITALIC)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use ratatui::{Terminal, backend::TestBackend};

    use super::*;
    use crate::{progress::Counts, queries::LoopState, results::sample};

    fn text(width: u16, height: u16, scene: &Scene) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, scene)).unwrap();
        let cells = terminal.backend().buffer().content();
        let rows = cells.chunks(usize::from(width));
        rows.map(|row| row.iter().map(|cell| cell.symbol()).collect::<String>() + "\n")
            .collect()
    }

    fn live() -> Live {
        Live {
            state: LoopState {
                learner: Some(37),
                step: Some(36),
                status: Some("paused".to_owned()),
                reason: Some("the loss is not finite".to_owned()),
                lag_seconds: Some(0.44),
                delta_ratio: Some(0.0231),
                swap_pause_ms: Some(0.213),
            },
            feedback_to_serving: Some(8.42),
        }
    }

    fn progress() -> Progress<Outcome> {
        Progress {
            outcomes: sample::outcomes().into_iter().take(3200).collect(),
            counts: Counts {
                due: 3200,
                shed: 2,
                errors: BTreeMap::from([("completion: http 503".to_owned(), 3)]),
                ..Counts::default()
            },
            interrupted: false,
        }
    }

    fn scene<'a>(progress: &'a Progress<Outcome>, live: &'a Live) -> Scene<'a> {
        Scene {
            run: Run {
                length: Duration::from_secs(600),
                users: 300,
                seed: 1,
                tau: 0.25,
            },
            elapsed: Duration::from_secs(400),
            progress,
            live,
            log: vec!["\u{1b}[2m10:00:00\u{1b}[0m \u{1b}[33mWARN\u{1b}[0m the tables cannot be read".to_owned()],
        }
    }

    #[test]
    fn the_view_shows_the_arms_the_loop_and_the_problems() {
        let (progress, live) = (progress(), live());
        let text = text(100, 30, &scene(&progress, &live));
        for shown in [
            "300 developers, seed 1, 3200 pauses, 8.0/s",
            "06:40 of 10:00, 03:20 left",
            "learner",
            "champion",
            "learner − base",
            "champion − base",
            "v37",
            "8.4 s",
            "2.31%",
            "0.213 ms",
            "training paused: the loss is not finite",
            "shed 2, completion: http 503 3",
            "10:00:00 WARN the tables cannot be read",
            "q or Ctrl-C: end early",
        ] {
            assert!(text.contains(shown), "{shown} is not in\n{text}");
        }
        let braille = |char: char| ('\u{2801}'..='\u{28ff}').contains(&char);
        assert!(text.chars().any(braille), "no line is drawn\n{text}");
    }

    #[test]
    fn the_view_fits_small_terminals_and_an_empty_run() {
        let (progress, live) = (Progress::default(), Live::default());
        let [wide, narrow, ..] = [(80, 24), (40, 24), (40, 10), (10, 3), (1, 1)].map(|(width, height)| {
            let mut scene = scene(&progress, &live);
            scene.elapsed = Duration::ZERO;
            text(width, height, &scene)
        });
        for (text, shown) in [
            (&wide, "300 developers, seed 1, 0 pauses"),
            (&wide, "00:00 of 10:00"),
            (&wide, "q or Ctrl-C: end early"),
            (&narrow, "300 developers"),
            (&narrow, "learner"),
        ] {
            assert!(text.contains(shown), "{shown} is not in\n{text}");
        }
    }

    #[test]
    fn the_view_says_that_no_further_pauses_come() {
        let (mut progress, live) = (progress(), live());
        progress.interrupted = true;
        assert!(text(80, 24, &scene(&progress, &live)).contains("no further pauses; waiting"));
    }
}
