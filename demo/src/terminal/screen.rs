//! The terminal while the view has it. It is given back as it was, however the run ends.

use std::{
    any::Any,
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

use super::Key;
use crate::Console;

pub struct Screen {
    terminal: Terminal<CrosstermBackend<Stderr>>,
    events: EventStream,
    _raw: RawMode,
    /// Last, because held log lines are printed when the terminal is back.
    _hold: Box<dyn Any + Send>,
}

/// Raw mode on the alternate screen, until it is dropped.
struct RawMode;

impl Screen {
    pub fn take(console: Console) -> io::Result<Self> {
        let hold = (console.hold_log)();
        let raw = RawMode;
        terminal::enable_raw_mode()?;
        execute!(io::stderr(), terminal::EnterAlternateScreen, cursor::Hide)?;
        Ok(Self {
            terminal: Terminal::new(CrosstermBackend::new(io::stderr()))?,
            events: EventStream::new(),
            _raw: raw,
            _hold: hold,
        })
    }

    pub fn draw(&mut self, draw: impl FnOnce(&mut Frame)) -> io::Result<()> {
        self.terminal.draw(draw).map(drop)
    }

    /// The next key that has a meaning, or a change of the window's size.
    pub async fn key(&mut self) -> Key {
        while let Some(Ok(event)) = self.events.next().await {
            match event {
                Event::Resize(..) => return Key::Redraw,
                Event::Key(key) if is_end(key) => return Key::End,
                _ => {}
            }
        }
        pending().await // the keyboard is gone, but the run continues
    }
}

/// `q`, or Ctrl-C, which is not a signal in raw mode.
fn is_end(key: KeyEvent) -> bool {
    let control = key.modifiers.contains(KeyModifiers::CONTROL);
    key.kind == event::KeyEventKind::Press
        && (key.code == KeyCode::Char('q') && !control || key.code == KeyCode::Char('c') && control)
}

impl Drop for RawMode {
    fn drop(&mut self) {
        // An error cannot be reported: there is no other terminal.
        let _ = execute!(io::stderr(), terminal::LeaveAlternateScreen, cursor::Show);
        let _ = terminal::disable_raw_mode();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_q_and_ctrl_c_end_the_run() {
        let key = |char, modifiers| KeyEvent::new(KeyCode::Char(char), modifiers);
        assert!(is_end(key('q', KeyModifiers::NONE)) && is_end(key('c', KeyModifiers::CONTROL)));
        assert!(!is_end(key('c', KeyModifiers::NONE)) && !is_end(key('q', KeyModifiers::CONTROL)));
        let released = KeyEvent::new_with_kind(KeyCode::Char('q'), KeyModifiers::NONE, event::KeyEventKind::Release);
        assert!(!is_end(released));
    }
}
