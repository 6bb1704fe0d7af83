//! Fuzz targets for every decoder and endpoint of this crate.
//!
//! For any input, a decoder or endpoint must not panic and must use bounded memory and time. An
//! accepted input must be equal after it is written and read again. The tests run each target
//! briefly with random inputs. `make fuzz NAME=ingest` runs them under libFuzzer (`fuzz/main.rs`).
//! Compiled only in tests or with the feature `fuzz`.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a violated property must end the run, as in a test"
)]

mod accepted;
mod configuration;
mod dlq;
mod events;
mod requests;
mod seeds;
#[cfg(test)]
mod tests;

use crate::entry::spool;

/// One decoder or endpoint.
pub struct Target {
    pub name: &'static str,
    /// Inputs that the fuzzer mutates. Most of them are valid.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Reads one input and returns whether it was accepted. Panics if a property is violated.
    pub run: fn(&[u8]) -> bool,
    /// Number of inputs in the tests.
    pub test_inputs: u32,
}

const TEST_INPUTS: u32 = 4_000;

pub const TARGETS: &[Target] = &[
    target("event_protobuf", seeds::protobuf, events::protobuf),
    target("event_json", seeds::json, events::json),
    target("announcement", seeds::announcement, events::announcement),
    target("dlq_record", seeds::dlq_record, dlq::record),
    target("dlq_repair", seeds::json, dlq::repair),
    target("dlq_position", seeds::dlq_position, dlq::position),
    target("http_feedback", seeds::feedback, |input| {
        requests::body("/v1/feedback", requests::JSON, input)
    }),
    target("http_generation", seeds::generation, |input| {
        requests::body("/v1/generations", requests::JSON, input)
    }),
    target("http_retraction", seeds::retraction, |input| {
        requests::body("/v1/retractions", requests::JSON, input)
    }),
    target("http_episode_end", seeds::episode_end, |input| {
        requests::body("/v1/episode-ends", requests::JSON, input)
    }),
    target("http_batch", seeds::batch, |input| {
        requests::body("/v1/events:batch", requests::JSON, input)
    }),
    target("http_cloudevent", seeds::cloudevent, |input| {
        requests::body("/v1/events", requests::STRUCTURED, input)
    }),
    target("http_cloudevent_batch", seeds::cloudevent_batch, |input| {
        requests::body("/v1/events", requests::BATCHED, input)
    }),
    target("http_request", seeds::request, requests::request),
    target("http_compressed", seeds::compressed, requests::compressed),
    target("reward_expression", seeds::expression, configuration::expression),
    target("ingest_options", seeds::options, configuration::ingest_options),
    target("spool_segment", seeds::segment, spool::fuzz::segment),
    Target {
        test_inputs: 400,
        ..target("spool_folder", seeds::folder, spool::fuzz::folder)
    },
];

const fn target(name: &'static str, seeds: fn() -> Vec<Vec<u8>>, run: fn(&[u8]) -> bool) -> Target {
    Target {
        name,
        seeds,
        run,
        test_inputs: TEST_INPUTS,
    }
}
