//! Lines for a person at the terminal. They are printed at once, or after a full-screen view has
//! ended. Everything that prints beside such a view must use this module.

use std::collections::VecDeque;
use std::io::{self, IsTerminal, Write};
use std::panic;
use std::sync::{Mutex, Once, PoisonError};

use nix::unistd::{getpgrp, tcgetpgrp};

/// Largest number of lines held back for a view; older lines are dropped.
const KEPT_MAX: usize = 1000;

/// The lines held back; `None` without a view.
static KEPT: Mutex<Option<VecDeque<String>>> = Mutex::new(None);

/// Whether a full-screen view can be shown: there is a terminal to read from and write to, and this
/// process is in its foreground.
pub fn has_screen() -> bool {
    let stdin = io::stdin();
    stdin.is_terminal() && io::stderr().is_terminal() && tcgetpgrp(&stdin).is_ok_and(|group| group == getpgrp())
}

/// Prints a line, or holds it back.
pub fn say(line: &str) {
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    match &mut *kept {
        None => eprintln!("{line}"),
        Some(lines) => {
            lines.extend(line.lines().map(str::to_owned));
            let excess = lines.len().saturating_sub(KEPT_MAX);
            lines.drain(..excess);
        }
    }
}

/// The newest lines that are held back, oldest first.
#[cfg(feature = "demo")]
pub fn waiting(count: usize) -> Vec<String> {
    let kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    let lines = kept.iter().flatten();
    lines
        .skip(kept.iter().flatten().count().saturating_sub(count))
        .cloned()
        .collect()
}

/// Holds lines back, including messages of panics, until the guard is dropped.
pub fn keep() -> Kept {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let usual = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            let waits = KEPT.lock().unwrap_or_else(PoisonError::into_inner).is_some();
            if waits {
                say(&info.to_string());
            } else {
                usual(info);
            }
        }));
    });
    KEPT.lock()
        .unwrap_or_else(PoisonError::into_inner)
        .get_or_insert_default();
    Kept
}

/// Prints the lines that were held back when it is dropped.
pub struct Kept;

impl Drop for Kept {
    fn drop(&mut self) {
        let kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner).take();
        for line in kept.into_iter().flatten() {
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

#[cfg(all(test, feature = "demo"))]
mod tests {
    use super::*;

    #[test]
    fn lines_and_panics_are_held_back_until_the_view_ends() {
        let kept = keep();
        say("one");
        Writer.write_all(b"two\nthree\n").unwrap();
        let told = std::thread::spawn(|| panic!("a simulated one")).join();
        assert!(told.is_err());
        let lines = waiting(usize::MAX);
        assert_eq!(lines[..3], ["one", "two", "three"]);
        assert!(
            lines[3..].iter().any(|line| line.contains("a simulated one")),
            "{lines:?}"
        );
        assert_eq!(waiting(1).len(), 1);
        for nth in 0..2 * KEPT_MAX {
            say(&nth.to_string());
        }
        assert_eq!(waiting(usize::MAX).len(), KEPT_MAX);
        assert_eq!(waiting(1), [(2 * KEPT_MAX - 1).to_string()]);
        drop(kept);
        assert!(waiting(1).is_empty());
    }
}
