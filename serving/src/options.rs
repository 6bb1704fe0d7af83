//! Configuration of `springtide serve`. Every field has a unit and a default.

use crate::{remote, tide};
use anyhow::ensure;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;
use text::answer::Format;

/// What happens to users' answers while the log takes none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogAway {
    /// They are withheld: requests get 503.
    #[default]
    Refuse,
    /// They are given, but nobody can give feedback on them or train on them.
    Answer,
}

edge::options! {
    /// Options of `springtide serve`.
    pub struct Options {
        /// Name of this replica, unique in the fleet; part of the source of every event it logs.
        pub replica: String = "replica-1".into(),
        /// Location that this replica shares with others.
        pub cluster: String = "local".into(),
        /// Address at which others reach it. Default: the address it listens on.
        pub address: Option<String> = None,
        /// Folder of the follower's trust state, such as the highest assignment epoch it has verified.
        pub state_dir: PathBuf = PathBuf::from(".springtide/serve"),
        /// Threads of one forward pass. Results do not depend on it.
        pub threads: u16 = 1 => 1..,
        /// Sequences that one loaded version decodes together in our engine.
        pub slots: usize = 16,
        /// How many of `slots` rollouts and evaluations never use.
        pub slots_reserved_for_production: usize = 4,
        /// Longest prompt and completion together in our engine, in tokens. The model's own limit
        /// applies too.
        pub context_tokens_max: usize = 4096 => 1..,
        /// Choices that may wait for a slot. If all places are taken, a key or tenant that holds more than
        /// its share loses one to another; otherwise requests get 429.
        pub queue_choices_max: usize = 256 => 1..,
        /// Bytes of the requests that are read, wait or are answered at a time, and of the log-probabilities
        /// that they list; further ones get 429. A tenant may hold half of them. Memory use is a small multiple.
        pub in_flight_bytes_max: usize = 64 << 20,
        /// Threads that render chat templates and tokenize long prompts. As many prompts may wait for them
        /// as choices for a slot.
        pub prompt_threads: usize = 2 => 1..,
        /// A session's turn is logged without the tokens it shares with the previous turn if these are
        /// at least so many. A shorter prefix costs a reader more than it saves.
        pub shared_prefix_tokens_min: usize = 1024,
        /// Longest wait of a user's choice for a slot, in milliseconds; then its request gets 429.
        /// Rollouts and evaluations wait as long as it takes.
        pub queue_wait_ms_max: u64 = 60_000 => 1..,
        /// Tokens of prompts that one pass of the model reads, beside one token of each sequence that
        /// decodes. More reads prompts sooner, less delays the others by less.
        pub prompt_tokens_per_pass_max: usize = 256 => 1..,
        /// Longest wait of a stream for its first token, or error, before its headers are sent. No setting.
        #[serde(skip)]
        pub headers_wait_max: Duration = Duration::from_secs(10),
        /// Default `max_tokens` of a completion, in tokens.
        pub max_tokens_default: usize = 16 => 1..,
        /// Largest `n` of one request.
        pub choices_max: usize = 16 => 1..,
        /// How the model writes calls of tools. Default: as its chat template does.
        pub tool_format: Option<Format> = None,
        /// Mixtures of experts: store the experts of every token in `ingest.payload_store`, so that
        /// a trainer can replay them.
        pub log_experts: bool = true,
        /// While the log takes no answers: `refuse` withholds them (503); `answer` gives users
        /// theirs with captured = false: not acknowledged. Those that may still arrive take
        /// feedback. Rollouts and evaluations are always refused.
        pub log_away: LogAway = LogAway::Refuse,
        /// Memory for weights and caches of all resident versions, and for what is kept of the
        /// version that left last, bytes. A version needs three times its weights, and its cache. With
        /// engines elsewhere it needs nothing: `policy.memory_bytes` bounds what is kept for them.
        pub resident_bytes_max: u64 = 4 << 30,
        /// Time between two polls of the store, in milliseconds; twenty times as long, up to 5 s,
        /// while assignments are announced.
        pub poll_interval_ms: u64 = 250 => 1..,
        /// How old the store's timestamp may be for a replica that has no trust state yet, in seconds. With
        /// more than 60 it can start while `control` is away, and whoever controls the store can give it
        /// a release that was replaced in that time.
        pub first_timestamp_seconds_max: u64 = 60,
        /// Time between two reports to the control role, in milliseconds.
        pub heartbeat_interval_ms: u64 = 1000 => 1..,
        /// API key for the control role, if it requires one. Never printed.
        #[serde(skip_serializing)]
        pub api_key: Option<String> = None,
        /// File of the private key that signs this replica's generations. Default: `sampler.key` in
        /// `state_dir`, which the replica makes.
        pub sampler_key: Option<PathBuf> = None,
        /// Engines that answer instead of our own.
        pub remote: remote::Options,
        /// What rollouts and evaluations may use.
        pub tide: tide::Options,
    }
}

impl Options {
    /// The file of the replica's sampler key, which signs its generations.
    pub fn sampler_key_path(&self) -> PathBuf {
        let default_file = || self.state_dir.join("sampler.key");
        self.sampler_key.clone().unwrap_or_else(default_file)
    }

    /// Checks all values. The error names the first invalid one.
    pub fn check(&self) -> anyhow::Result<()> {
        ensure!(
            !self.replica.is_empty() && !self.replica.contains(['/', ' ']),
            "serve.replica is {:?}; give a name without spaces or slashes",
            self.replica
        );
        ensure!(
            self.slots_reserved_for_production < self.slots,
            "serve.slots_reserved_for_production is {} of {} slots; rollouts need at least one",
            self.slots_reserved_for_production,
            self.slots
        );
        self.check_ranges("serve")?;
        ensure!(
            self.choices_max <= self.queue_choices_max,
            "serve.choices_max {} does not fit serve.queue_choices_max {}",
            self.choices_max,
            self.queue_choices_max
        );
        self.remote.check()?;
        self.tide.check()?;
        let needed = edge::routes::in_flight_bytes_min();
        ensure!(
            self.in_flight_bytes_max >= needed,
            "serve.in_flight_bytes_max is {}; the largest request needs {needed}",
            self.in_flight_bytes_max
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid() {
        Options::default().check().unwrap();
    }

    #[test]
    fn an_error_names_the_invalid_field() {
        let options = Options {
            slots: 4,
            ..Options::default()
        };
        assert!(
            options
                .check()
                .unwrap_err()
                .to_string()
                .contains("slots_reserved_for_production")
        );
        let options = Options {
            queue_choices_max: 0,
            ..Options::default()
        };
        assert!(options.check().unwrap_err().to_string().contains("queue_choices_max"));
    }
}
