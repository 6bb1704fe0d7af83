//! Lines for a person at the terminal. They are printed at once, or after a full-screen view has
//! ended. Everything that prints beside such a view must use this module.

use std::collections::VecDeque;
use std::io::{self, IsTerminal, Write};
use std::panic;
use std::sync::{Mutex, Once, PoisonError};

use nix::unistd::{getpgrp, tcgetpgrp};

/// Largest number of lines held back for a view; older lines are dropped.
const LINES_HELD_MAX: usize = 1000;

/// The lines held back; `None` without a view.
static HELD_LINES: Mutex<Option<VecDeque<String>>> = Mutex::new(None);

/// Whether a full-screen view can be shown: there is a terminal to read from and write to, and this
/// process is in its foreground.
pub fn has_screen() -> bool {
    let stdin = io::stdin();
    stdin.is_terminal() && io::stderr().is_terminal() && tcgetpgrp(&stdin).is_ok_and(|group| group == getpgrp())
}

/// Prints a line, or holds it back.
pub fn say(line: &str) {
    let mut held = HELD_LINES.lock().unwrap_or_else(PoisonError::into_inner);
    match &mut *held {
        None => eprintln!("{line}"),
        Some(lines) => {
            lines.extend(line.lines().map(str::to_owned));
            let excess = lines.len().saturating_sub(LINES_HELD_MAX);
            lines.drain(..excess);
        }
    }
}

/// The newest lines that are held back, oldest first.
pub fn newest_held(count: usize) -> Vec<String> {
    let held = HELD_LINES.lock().unwrap_or_else(PoisonError::into_inner);
    let lines = held.iter().flatten();
    lines
        .skip(held.iter().flatten().count().saturating_sub(count))
        .cloned()
        .collect()
}

/// Holds lines back, including messages of panics, until the guard is dropped.
pub fn hold_lines() -> HoldGuard {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let default_hook = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            let holding = HELD_LINES.lock().unwrap_or_else(PoisonError::into_inner).is_some();
            if holding {
                say(&info.to_string());
            } else {
                default_hook(info);
            }
        }));
    });
    HELD_LINES
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .get_or_insert_default();
    HoldGuard
}

/// When dropped, prints the lines that were held back.
pub struct HoldGuard;

impl Drop for HoldGuard {
    fn drop(&mut self) {
        let held = HELD_LINES.lock().unwrap_or_else(PoisonError::into_inner).take();
        for line in held.into_iter().flatten() {
            eprintln!("{line}");
        }
    }
}

/// Standard error for log lines; each write is a line.
pub struct Writer;

impl Write for Writer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        say(String::from_utf8_lossy(bytes).trim_end_matches('\n'));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_and_panics_are_held_back_until_the_view_ends() {
        let guard = hold_lines();
        say("one");
        Writer.write_all(b"two\nthree\n").unwrap();
        let panicked = std::thread::spawn(|| panic!("a simulated one")).join();
        assert!(panicked.is_err());
        let lines = newest_held(usize::MAX);
        assert_eq!(lines[..3], ["one", "two", "three"]);
        assert!(
            lines[3..].iter().any(|line| line.contains("a simulated one")),
            "{lines:?}"
        );
        assert_eq!(newest_held(1).len(), 1);
        for nth in 0..2 * LINES_HELD_MAX {
            say(&nth.to_string());
        }
        assert_eq!(newest_held(usize::MAX).len(), LINES_HELD_MAX);
        assert_eq!(newest_held(1), [(2 * LINES_HELD_MAX - 1).to_string()]);
        drop(guard);
        assert!(newest_held(1).is_empty());
    }
}
