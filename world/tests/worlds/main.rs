//! Tests with real machines. They need an image and take minutes, so `make check NAME=world` runs them and
//! `make test` lists them as ignored.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod service;
mod support;
mod vm;
