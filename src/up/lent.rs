//! The terminal while a child uses it for a full-screen view. This process holds its own lines
//! back, and restores the terminal if the child was killed.

use std::io::{self, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use nix::sys::termios::{SetArg, Termios, tcgetattr, tcsetattr};

use crate::console::{self, HoldGuard};

/// Leaves the alternate screen and shows the cursor again (xterm's private modes 1049 and 25).
const RESTORE: &[u8] = b"\x1b[?1049l\x1b[?25h";

pub struct TerminalGuard {
    /// The settings to restore; `None` without a terminal.
    before: Option<Termios>,
    /// When dropped, prints the lines that were held back.
    _lines: Option<HoldGuard>,
}

impl TerminalGuard {
    pub fn hand_over() -> Self {
        let has_screen = console::has_screen();
        Self {
            before: if has_screen { tcgetattr(io::stdin()).ok() } else { None },
            _lines: has_screen.then(console::hold_lines),
        }
    }

    /// Call it when the child has ended. A child that was not killed has restored the terminal
    /// itself.
    pub fn restore(mut self, status: ExitStatus) {
        if status.signal().is_none() {
            self.before = None;
        }
    }
}

impl Drop for TerminalGuard {
    fn drop(&mut self) {
        let Some(before) = &self.before else { return };
        // Errors are ignored: they would be printed on this terminal.
        let _ = tcsetattr(io::stdin(), SetArg::TCSADRAIN, before);
        let _ = io::stderr().write_all(RESTORE);
    }
}
