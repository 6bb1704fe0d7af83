//! The terminal while a child has it for a full-screen view: this process keeps its own lines back, and puts the terminal in
//! order if the child did not live to do so.

use std::io::{self, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use nix::sys::termios::{SetArg, Termios, tcgetattr, tcsetattr};

use crate::console::{self, Kept};

/// Leaves the other page of the terminal and shows the cursor again (xterm's private modes 1049 and 25).
const LEAVE: &[u8] = b"\x1b[?1049l\x1b[?25h";

pub struct Lent {
    /// As it was. None: there is no terminal to lend.
    before: Option<Termios>,
    /// Said when the terminal is back.
    _kept: Option<Kept>,
}

impl Lent {
    pub fn new() -> Self {
        let lends = console::has_screen();
        Self {
            before: if lends { tcgetattr(io::stdin()).ok() } else { None },
            _kept: lends.then(console::keep),
        }
    }

    /// The child has ended. Unless it was killed, it has left everything in order.
    pub fn back(mut self, status: ExitStatus) {
        if status.signal().is_none() {
            self.before = None;
        }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let Some(before) = &self.before else { return };
        // Nothing can be done about an error: there is no other terminal to say it on.
        let _ = tcsetattr(io::stdin(), SetArg::TCSADRAIN, before);
        let _ = io::stderr().write_all(LEAVE);
    }
}
