//! Runs the fuzz targets of `ingest` under libFuzzer (`make fuzz NAME=ingest`).
#![no_main]
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a failure must end the run, as in a test"
)]

use ingest::fuzz::{TARGETS, Target};

include!("../../tools/fuzz_driver.rs");
