//! What the person sees while a run goes on: a view that fills the terminal, or, where there is none, a line every few
//! seconds. Both show the same facts.

mod line;
mod screen;
mod view;

use std::{future::pending, time::Duration};

use self::screen::Screen;
use super::{records::Live, replay::Replayed};
use crate::console;

const LINE_EVERY: Duration = Duration::from_secs(3);
const VIEW_EVERY: Duration = Duration::from_secs(1);

/// What does not change during a run.
#[derive(Debug, Clone, Copy)]
pub struct Run {
    pub length: Duration,
    pub users: usize,
    pub seed: u64,
    pub tau: f64,
}

/// What a person asked for with a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asked {
    End,
    Redraw,
}

pub struct Board {
    run: Run,
    /// None: plain lines.
    screen: Option<Screen>,
    shown_at: Duration,
    shown_due: u64,
    rate: f64,
}

impl Board {
    /// Takes the terminal where there is one, until the board is dropped.
    pub fn new(run: Run) -> Self {
        let screen = console::has_screen().then(Screen::take).and_then(|screen| {
            screen
                .inspect_err(|error| tracing::warn!(%error, "the terminal cannot be used; plain lines instead"))
                .ok()
        });
        Self {
            run,
            screen,
            shown_at: Duration::ZERO,
            shown_due: 0,
            rate: 0.0,
        }
    }

    /// How often to show.
    pub fn every(&self) -> Duration {
        if self.screen.is_some() { VIEW_EVERY } else { LINE_EVERY }
    }

    pub fn show(&mut self, elapsed: Duration, replayed: &Replayed, live: &Live) {
        // Over one line's time at least: a redraw in between says nothing new.
        let seconds = (elapsed - self.shown_at).as_secs_f64();
        if seconds >= LINE_EVERY.as_secs_f64() || self.screen.is_none() || self.shown_at.is_zero() {
            self.rate = (replayed.counts.due - self.shown_due) as f64 / seconds.max(0.1);
            (self.shown_at, self.shown_due) = (elapsed, replayed.counts.due);
        }
        let Some(screen) = &mut self.screen else {
            return console::say(&line::line(elapsed, self.rate, replayed, live, self.run.tau));
        };
        let scene = view::Scene {
            run: self.run,
            elapsed,
            rate: self.rate,
            replayed,
            live,
            said: console::waiting(view::SAID_MAX),
        };
        if let Err(error) = screen.draw(|frame| view::draw(frame, &scene)) {
            tracing::warn!(%error, "the view could not be drawn; plain lines instead");
            self.screen = None;
        }
    }

    /// Waits for a key; for ever where there is no view, since Ctrl-C is a signal there.
    pub async fn asked(&mut self) -> Asked {
        match &mut self.screen {
            Some(screen) => screen.asked().await,
            None => pending().await,
        }
    }
}
