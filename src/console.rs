//! What a person at the terminal is told: at once, or, while a full-screen view has the terminal, after it. Whatever writes
//! lines beside such a view writes them here, so that they do not tear it.

use std::collections::VecDeque;
use std::io::{self, IsTerminal, Write};
use std::panic;
use std::sync::{Mutex, Once, PoisonError};

use nix::unistd::{getpgrp, tcgetpgrp};

/// Lines that wait for the view to end; of more, the oldest are lost.
const KEPT_MAX: usize = 1000;

/// Some while a view has the terminal.
static KEPT: Mutex<Option<VecDeque<String>>> = Mutex::new(None);

/// Whether a full-screen view can be shown: there is a terminal to read from and to write to, and it is ours to use (a job
/// in the background would be stopped for touching it).
pub fn has_screen() -> bool {
    let stdin = io::stdin();
    stdin.is_terminal() && io::stderr().is_terminal() && tcgetpgrp(&stdin).is_ok_and(|group| group == getpgrp())
}

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

/// The newest lines that wait, the oldest of them first.
#[cfg(feature = "torch")]
pub fn waiting(count: usize) -> Vec<String> {
    let kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    let lines = kept.iter().flatten();
    lines
        .skip(kept.iter().flatten().count().saturating_sub(count))
        .cloned()
        .collect()
}

/// From now on lines wait, the message of a panic among them, until the guard is dropped.
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

/// Says what waited when it is dropped.
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

#[cfg(all(test, feature = "torch"))]
mod tests {
    use super::*;

    #[test]
    fn lines_wait_for_the_view_to_end_and_a_panic_waits_with_them() {
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
