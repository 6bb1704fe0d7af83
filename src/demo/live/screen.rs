//! The terminal while the view has it: taken with its keys, given back as it was in whatever way this ends.

use std::{
    future::pending,
    io::{self, Stderr},
};

use crossterm::{
    cursor, event,
    event::{Event, EventStream, KeyCode, KeyEvent, KeyModifiers},
    execute, terminal,
};
use futures::StreamExt;
use ratatui::{Frame, Terminal, backend::CrosstermBackend};

use super::Asked;
use crate::console::{self, Kept};

pub struct Screen {
    terminal: Terminal<CrosstermBackend<Stderr>>,
    keys: EventStream,
    _raw: Raw,
    /// Last: what waited is said when the terminal is back.
    _kept: Kept,
}

/// The terminal in raw mode on its other page. What is undone here was begun in [`Screen::take`].
struct Raw;

impl Screen {
    pub fn take() -> io::Result<Self> {
        let kept = console::keep();
        let raw = Raw;
        terminal::enable_raw_mode()?;
        execute!(io::stderr(), terminal::EnterAlternateScreen, cursor::Hide)?;
        Ok(Self {
            terminal: Terminal::new(CrosstermBackend::new(io::stderr()))?,
            keys: EventStream::new(),
            _raw: raw,
            _kept: kept,
        })
    }

    pub fn draw(&mut self, draw: impl FnOnce(&mut Frame)) -> io::Result<()> {
        self.terminal.draw(draw).map(drop)
    }

    /// The next key that means something, or that the window has another size.
    pub async fn asked(&mut self) -> Asked {
        while let Some(Ok(event)) = self.keys.next().await {
            match event {
                Event::Resize(..) => return Asked::Redraw,
                Event::Key(key) if ends(key) => return Asked::End,
                _ => {}
            }
        }
        pending().await // the keys are gone; the run is not
    }
}

/// `q`, or Ctrl-C, which is no signal in raw mode.
fn ends(key: KeyEvent) -> bool {
    let control = key.modifiers.contains(KeyModifiers::CONTROL);
    key.kind == event::KeyEventKind::Press
        && (key.code == KeyCode::Char('q') && !control || key.code == KeyCode::Char('c') && control)
}

impl Drop for Raw {
    fn drop(&mut self) {
        // Nothing can be done about an error: there is no other terminal to say it on.
        let _ = execute!(io::stderr(), terminal::LeaveAlternateScreen, cursor::Show);
        let _ = terminal::disable_raw_mode();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn q_and_ctrl_c_end_the_run_and_nothing_else_does() {
        let key = |char, modifiers| KeyEvent::new(KeyCode::Char(char), modifiers);
        assert!(ends(key('q', KeyModifiers::NONE)) && ends(key('c', KeyModifiers::CONTROL)));
        assert!(!ends(key('c', KeyModifiers::NONE)) && !ends(key('q', KeyModifiers::CONTROL)));
        let released = KeyEvent::new_with_kind(KeyCode::Char('q'), KeyModifiers::NONE, event::KeyEventKind::Release);
        assert!(!ends(released));
    }
}
