//! `springtide`, without libtorch.

use std::process::ExitCode;

fn main() -> ExitCode {
    springtide::main(None)
}
