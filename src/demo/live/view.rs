//! The view that fills the terminal: both arms, their reward over time, the loop, the ledger, and what went wrong. Pure: from
//! what is known now to cells.

use std::time::Duration;

use ratatui::{
    Frame,
    layout::{Alignment, Constraint, Layout, Rect},
    style::{Color, Modifier, Style, Stylize},
    symbols::Marker,
    text::{Line, Span},
    widgets::{Axis, Block, Cell, Chart, Dataset, GraphType, LineGauge, Paragraph, Row, Table},
};

use super::Run;
use crate::demo::{
    interval::Interval,
    number::{or_dash, percent, range, signed},
    records::Live,
    replay::Replayed,
    tally::{self, FROZEN, Figures, LEARNING, Measure, Stretch},
};

/// Lines of trouble and of the log that are shown at most.
pub const SAID_MAX: usize = 3;
/// Points of each arm's line.
const STRETCHES: u32 = 12;
const LEARNING_COLOUR: Color = Color::Cyan;
const FROZEN_COLOUR: Color = Color::Gray;

/// All that the view shows.
pub struct Scene<'a> {
    pub run: Run,
    pub elapsed: Duration,
    /// Pauses per second of late.
    pub rate: f64,
    pub replayed: &'a Replayed,
    pub live: &'a Live,
    /// The newest lines of the log.
    pub said: Vec<String>,
}

pub fn draw(frame: &mut Frame, scene: &Scene) {
    let [title, progress, arms, middle, notes, keys] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Length(6),
        Constraint::Min(8),
        Constraint::Length(SAID_MAX as u16 + 1),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    let [chart, side] = Layout::horizontal([Constraint::Min(30), Constraint::Length(36)]).areas(middle);
    let [the_loop, ledger] = Layout::vertical([Constraint::Min(8), Constraint::Length(5)]).areas(side);

    frame.render_widget(heading(scene), title);
    frame.render_widget(gauge(scene), progress);
    frame.render_widget(table(scene), arms);
    reward_over_time(frame, chart, scene);
    frame.render_widget(loop_panel(scene), the_loop);
    frame.render_widget(ledger_panel(scene.live), ledger);
    frame.render_widget(Paragraph::new(troubles(scene)), notes);
    frame.render_widget(keys_line(scene.replayed.interrupted), keys);
}

fn panel(title: &str) -> Block<'_> {
    Block::bordered()
        .border_style(Style::new().dark_gray())
        .title(title.bold())
}

fn heading(scene: &Scene) -> Line<'static> {
    let Run { users, seed, .. } = scene.run;
    let rest = format!(
        "  {users} developers, seed {seed}, {} pauses, {:.1}/s",
        scene.replayed.counts.due, scene.rate
    );
    Line::from(vec!["Springtide".bold(), Span::raw(rest)])
}

fn gauge(scene: &Scene) -> LineGauge<'static> {
    let Scene { run, elapsed, .. } = scene;
    let left = run.length.saturating_sub(*elapsed);
    let label = format!("{} of {}, {} left", clock(*elapsed), clock(run.length), clock(left));
    LineGauge::default()
        .ratio((elapsed.as_secs_f64() / run.length.as_secs_f64()).clamp(0.0, 1.0))
        .label(label)
        .filled_style(Style::new().fg(LEARNING_COLOUR))
        .unfilled_style(Style::new().dark_gray())
}

fn clock(time: Duration) -> String {
    format!("{:02}:{:02}", time.as_secs() / 60, time.as_secs() % 60)
}

fn table(scene: &Scene) -> Table<'static> {
    let (outcomes, tau) = (&scene.replayed.outcomes, scene.run.tau);
    let arms = tally::arms(outcomes.iter(), tau);
    let reward = tally::difference(outcomes, Measure::Reward, tau);
    let accepts = tally::difference(outcomes, Measure::Accepts, tau);
    let header = ["", "reward", "95%", "accepts/100", "shown", "of shown", "pauses"];
    let rows = [(LEARNING, LEARNING_COLOUR), (FROZEN, FROZEN_COLOUR)]
        .map(|(arm, colour)| arm_row(arm, &arms.get(arm).cloned().unwrap_or_default()).fg(colour))
        .into_iter()
        .chain([difference_row(reward, accepts)]);
    let widths = [12, 8, 20, 13, 8, 10, 8].map(Constraint::Length);
    Table::new(rows, widths)
        .header(Row::new(header.map(right)).dark_gray())
        .column_spacing(0)
        .block(panel(" Both arms so far "))
}

fn right(text: impl Into<String>) -> Cell<'static> {
    Cell::from(Line::from(text.into()).alignment(Alignment::Right))
}

fn arm_row(arm: &str, figures: &Figures) -> Row<'static> {
    let cells = [
        signed(figures.reward_mean, 3),
        range(figures.reward_ci95, 3),
        or_dash(figures.accepts_per_100, 1),
        percent(figures.show_rate, 0),
        percent(figures.accept_rate, 0),
        figures.pauses.to_string(),
    ];
    Row::new([Cell::from(arm.to_owned())].into_iter().chain(cells.map(right)))
}

/// Coloured once the interval says which arm is ahead.
fn difference_row(reward: Option<Interval>, accepts: Option<Interval>) -> Row<'static> {
    let colour = match reward {
        Some(Interval { ci95: [low, _], .. }) if low > 0.0 => Color::Green,
        Some(Interval { ci95: [_, high], .. }) if high < 0.0 => Color::Red,
        _ => Color::Reset,
    };
    let cells = [
        right(signed(reward.map(|d| d.mean), 3)),
        right(range(reward.map(|d| d.ci95), 3)),
        right(signed(accepts.map(|d| d.mean), 1)),
    ];
    Row::new([Cell::from("difference")].into_iter().chain(cells))
        .fg(colour)
        .bold()
}

fn reward_over_time(frame: &mut Frame, area: Rect, scene: &Scene) {
    let timeline = tally::timeline(&scene.replayed.outcomes, scene.run.length, STRETCHES, scene.run.tau);
    let [learning, frozen] = [LEARNING, FROZEN].map(|arm| rewards(&timeline, arm));
    let both = || learning.iter().chain(&frozen).map(|(_, reward)| *reward);
    let low = both().fold(0.0, f64::min);
    let high = both().fold(0.1, f64::max);
    let line = |name: &'static str, colour, data| {
        Dataset::default()
            .name(name)
            .marker(Marker::Braille)
            .graph_type(GraphType::Line)
            .style(Style::new().fg(colour))
            .data(data)
    };
    let minutes = scene.run.length.as_secs_f64() / 60.0;
    let x_labels = [0.0, 0.5, 1.0].map(|share| Span::raw(format!("{:.1} min", share * minutes)));
    let y_labels = [0.0, 0.5, 1.0].map(|share| Span::raw(format!("{:+.2}", low + share * (high - low))));
    let chart = Chart::new(vec![
        line(FROZEN, FROZEN_COLOUR, &frozen),
        line(LEARNING, LEARNING_COLOUR, &learning),
    ])
    .block(panel(" Reward per pause over time ").title(legend()))
    .legend_position(None)
    .x_axis(
        Axis::default()
            .bounds([0.0, minutes])
            .labels(x_labels)
            .style(Style::new().dark_gray()),
    )
    .y_axis(
        Axis::default()
            .bounds([low, high])
            .labels(y_labels)
            .style(Style::new().dark_gray()),
    );
    frame.render_widget(chart, area);
}

fn legend() -> Line<'static> {
    Line::from(vec![
        LEARNING.fg(LEARNING_COLOUR),
        " ".into(),
        FROZEN.fg(FROZEN_COLOUR),
        " ".into(),
    ])
}

/// Middle of each stretch in minutes, and the arm's mean reward there.
fn rewards(timeline: &[Stretch], arm: &str) -> Vec<(f64, f64)> {
    let points = timeline.iter().filter_map(|stretch| {
        let middle = (stretch.from + stretch.until).as_secs_f64() / 120.0;
        Some((middle, stretch.arms.get(arm)?.reward_mean?))
    });
    points.collect()
}

fn loop_panel(scene: &Scene) -> Paragraph<'static> {
    let live = scene.live;
    let integer = |value: Option<i64>| value.map_or("–".to_owned(), |value| value.to_string());
    let facts = [
        ("version", format!("v{}", integer(live.champion))),
        ("step", integer(live.step)),
        (
            "feedback to serving",
            format!("{} s", or_dash(live.feedback_to_serving, 1)),
        ),
        ("tables behind the log", format!("{} s", or_dash(live.lag_seconds, 1))),
        ("last delta", percent(live.delta_ratio, 2)),
        ("last swap's pause", format!("{} ms", or_dash(live.swap_pause_ms, 3))),
    ];
    let lines = facts.map(|(name, value)| fact(name, &value));
    Paragraph::new(lines.to_vec()).block(panel(" The loop "))
}

/// 34 columns: what the panel is wide inside.
fn fact(name: &str, value: &str) -> Line<'static> {
    let width = 34_usize.saturating_sub(name.chars().count());
    Line::from(vec![
        Span::raw(name.to_owned()).dark_gray(),
        Span::raw(format!("{value:>width$}")),
    ])
}

fn ledger_panel(live: &Live) -> Paragraph<'static> {
    let ledger = &live.ledger;
    let stale = ledger.reasons.get("dropped: stale").copied().unwrap_or_default();
    let rows = [
        [("trained", ledger.trained), ("held out", ledger.held_out)],
        [("censored", ledger.censored), ("dropped", ledger.dropped)],
        [("waiting", ledger.queued + ledger.open), ("of it stale", stale)],
    ];
    let line = |row: [(&'static str, i64); 2]| {
        let cells = row.into_iter().flat_map(|(name, n)| {
            let width = 16_usize.saturating_sub(name.len());
            [Span::raw(name).dark_gray(), Span::raw(format!("{n:>width$}  "))]
        });
        Line::from_iter(cells)
    };
    Paragraph::new(rows.map(line).to_vec()).block(panel(" Generations "))
}

/// What went wrong, the most lasting first, then the newest lines of the log.
fn troubles(scene: &Scene) -> Vec<Line<'static>> {
    let counts = &scene.replayed.counts;
    let mut counted = vec![("shed", counts.shed), ("failed", counts.failed)];
    counted.extend(counts.errors.iter().map(|(error, n)| (error.as_str(), *n)));
    let counted = counted
        .iter()
        .filter(|(_, n)| *n > 0)
        .map(|(what, n)| format!("{what} {n}"));
    let counted = counted.collect::<Vec<_>>().join(", ");
    let halted = scene
        .live
        .halted
        .iter()
        .map(|reason| Line::from(format!("training {reason}")).yellow());
    let counted = (!counted.is_empty()).then(|| Line::from(counted).red());
    let said = scene.said.iter().map(|line| Line::from(plain(line)).dark_gray());
    halted.chain(counted).chain(said).collect()
}

/// Without the colours that log lines carry.
fn plain(line: &str) -> String {
    let mut parts = line.split("\x1b[");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| {
        text + part.split_once('m').map_or(part, |(_, rest)| rest)
    })
}

fn keys_line(interrupted: bool) -> Line<'static> {
    let text = if interrupted {
        "no further pauses; waiting for the developers who are at one. q or Ctrl-C: leave them"
    } else {
        "q or Ctrl-C: end early, with the report of what there is"
    };
    Line::from(text).dark_gray().add_modifier(Modifier::ITALIC)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use ratatui::{Terminal, backend::TestBackend};

    use super::*;
    use crate::demo::{records::Ledger, replay::Counts, report::sample};

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
            champion: Some(37),
            step: Some(36),
            halted: Some("paused: the loss is not finite".to_owned()),
            lag_seconds: Some(0.44),
            delta_ratio: Some(0.0231),
            swap_pause_ms: Some(0.213),
            feedback_to_serving: Some(8.42),
            ledger: Ledger {
                trained: 1152,
                held_out: 1900,
                censored: 512,
                dropped: 31,
                queued: 12,
                open: 9,
                reasons: BTreeMap::from([("dropped: stale".to_owned(), 29)]),
                ..Ledger::default()
            },
        }
    }

    fn replayed() -> Replayed {
        let outcomes = sample::outcomes(0.9);
        let counts = Counts {
            due: 3200,
            shed: 2,
            errors: BTreeMap::from([("completion: http 503".to_owned(), 3)]),
            ..Counts::default()
        };
        Replayed {
            outcomes: outcomes.into_iter().take(3200).collect(),
            counts,
            interrupted: false,
        }
    }

    fn scene<'a>(replayed: &'a Replayed, live: &'a Live) -> Scene<'a> {
        Scene {
            run: Run {
                length: Duration::from_secs(600),
                users: 300,
                seed: 1,
                tau: 0.25,
            },
            elapsed: Duration::from_secs(400),
            rate: 8.06,
            replayed,
            live,
            said: vec!["\u{1b}[2m10:00:00\u{1b}[0m \u{1b}[33mWARN\u{1b}[0m the tables cannot be read".to_owned()],
        }
    }

    #[test]
    fn the_view_shows_both_arms_the_loop_the_ledger_and_the_troubles() {
        let (replayed, live) = (replayed(), live());
        let text = text(100, 30, &scene(&replayed, &live));
        for shown in [
            "300 developers, seed 1, 3200 pauses, 8.1/s",
            "06:40 of 10:00, 03:20 left",
            "champion",
            "base",
            "difference",
            "v37",
            "8.4 s",
            "2.31%",
            "0.213 ms",
            "1152",
            "29",
            "training paused: the loss is not finite",
            "shed 2, completion: http 503 3",
            "10:00:00 WARN the tables cannot be read",
            "q or Ctrl-C: end early",
        ] {
            assert!(text.contains(shown), "{shown} is not in\n{text}");
        }
        let braille = |char: char| ('\u{2801}'..='\u{28ff}').contains(&char);
        assert!(text.chars().any(braille), "no line is drawn\n{text}");
        println!("{text}");
    }

    #[test]
    fn the_view_fits_small_terminals_and_an_empty_run() {
        let (replayed, live) = (Replayed::default(), Live::default());
        for (width, height) in [(80, 24), (40, 10), (10, 3), (1, 1)] {
            let mut scene = scene(&replayed, &live);
            scene.elapsed = Duration::ZERO;
            text(width, height, &scene);
        }
    }

    #[test]
    fn an_end_by_hand_is_said() {
        let mut replayed = replayed();
        replayed.interrupted = true;
        let live = live();
        assert!(text(80, 24, &scene(&replayed, &live)).contains("no further pauses; waiting"));
    }
}
