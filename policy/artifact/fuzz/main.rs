//! Runs the fuzz targets of `artifact` under libFuzzer (`make fuzz NAME=policy`).
#![no_main]
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a failure must end the run, as in a test"
)]

use artifact::fuzz::{TARGETS, Target};

include!("../../../tools/fuzz_driver.rs");
