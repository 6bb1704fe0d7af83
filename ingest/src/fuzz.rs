//! What every decoder of this crate has to hold for any bytes whatever: it does not panic, it takes no more than its limits,
//! and what it accepts reads the same again in every form that it is written in. The tests run each target for a moment
//! with drawn inputs; `make fuzz-ingest` runs them at length under libFuzzer (`fuzz/main.rs`), which looks for inputs that
//! reach new code. Built for tests and with the feature `fuzz` only.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a broken property ends the run, as in a test"
)]

mod driver;
mod events;
mod letters;
mod requests;
mod rewards;
mod seeds;
mod segments;
#[cfg(test)]
mod tests;

pub use driver::{start, step};

/// One decoder, or one way in to several.
pub struct Target {
    pub name: &'static str,
    /// Inputs that are accepted, or nearly: where mutation starts.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Reads one input; panics where a property does not hold. Says whether it was accepted.
    pub run: fn(&[u8]) -> bool,
    /// Inputs of the small run in the tests, where each takes long.
    pub runs: u32,
}

const RUNS: u32 = 4_000;

/// All of them.
pub const TARGETS: &[Target] = &[
    target("event_protobuf", seeds::protobuf, events::protobuf),
    target("event_json", seeds::json, events::json),
    target("announcement", seeds::announcement, events::announcement),
    target("letter", seeds::letter, letters::letter),
    target("letter_repair", seeds::json, letters::repair),
    target("letter_place", seeds::place, letters::place),
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
    target("http_score", seeds::score, |input| {
        requests::body("/api/public/scores", requests::JSON, input)
    }),
    target("http_request", seeds::request, requests::request),
    target("http_compressed", seeds::compressed, requests::compressed),
    target("reward_expression", seeds::expression, rewards::expression),
    target("options", seeds::options, rewards::options),
    target("spool_segment", seeds::segment, segments::segment),
    Target {
        runs: 400,
        ..target("spool_folder", seeds::folder, segments::folder)
    },
];

const fn target(name: &'static str, seeds: fn() -> Vec<Vec<u8>>, run: fn(&[u8]) -> bool) -> Target {
    Target {
        name,
        seeds,
        run,
        runs: RUNS,
    }
}
