//! What a person sees during a run: a view that fills the terminal, or a line every few seconds if
//! there is no terminal. Both show the same facts.

mod line;
mod screen;
mod view;

use std::{future::pending, time::Duration};

pub use self::line::{clock, problems};
use self::screen::Screen;
use crate::{
    Console,
    progress::{Progress, Run},
    queries::Live,
    stats::Outcome,
};

const LINE_EVERY: Duration = Duration::from_secs(3);
const VIEW_EVERY: Duration = Duration::from_secs(1);

/// Input from the terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Key {
    End,
    Redraw,
}

pub struct Display {
    console: Console,
    /// `None`: plain lines.
    screen: Option<Screen>,
}

impl Display {
    /// Takes the terminal, if there is one, until it is dropped.
    pub fn new(console: Console) -> Self {
        let screen = (console.has_screen)()
            .then(|| Screen::take(console))
            .and_then(|screen| {
                screen
                    .inspect_err(|error| tracing::warn!(%error, "the terminal cannot be used; plain lines instead"))
                    .ok()
            });
        Self { console, screen }
    }

    /// How often to call [`Display::show`].
    pub fn period(&self) -> Duration {
        if self.screen.is_some() { VIEW_EVERY } else { LINE_EVERY }
    }

    pub fn show(&mut self, run: &Run, elapsed: Duration, progress: &Progress<Outcome>, live: &Live) {
        let Some(screen) = &mut self.screen else {
            return eprintln!("{}", line::line(elapsed, progress, live, run.tau));
        };
        let scene = view::Scene {
            run: *run,
            elapsed,
            progress,
            live,
            log: (self.console.newest_log_lines)(view::LOG_LINES_MAX),
        };
        if let Err(error) = screen.draw(|frame| view::draw(frame, &scene)) {
            tracing::warn!(%error, "the view could not be drawn; plain lines instead");
            self.screen = None;
        }
    }

    /// Prints a line, unless a view has the terminal.
    pub fn say(&self, line: &str) {
        if self.screen.is_none() {
            eprintln!("{line}");
        }
    }

    /// Waits for a key. Without a view it waits forever, because Ctrl-C is a signal then.
    pub async fn key(&mut self) -> Key {
        match &mut self.screen {
            Some(screen) => screen.key().await,
            None => pending().await,
        }
    }
}
