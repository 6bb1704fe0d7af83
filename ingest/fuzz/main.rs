//! The decoders of ingest under libFuzzer; `make fuzz-ingest` builds and runs it. See `ingest::fuzz`.
#![no_main]

libfuzzer_sys::fuzz_target!(init: ingest::fuzz::start(), |input: &[u8]| ingest::fuzz::step(input));
