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

/// Options of `springtide serve`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// Name of this replica, unique in the fleet; part of the source of every event it logs.
    pub replica: String,
    /// Location that this replica shares with others.
    pub cluster: String,
    /// Address at which others reach it. Default: the address it listens on.
    pub address: Option<String>,
    /// Folder of the follower's trust state, such as the highest assignment epoch it has verified.
    pub state_dir: PathBuf,
    /// Threads of one forward pass. Results do not depend on it.
    pub threads: u16,
    /// Sequences that one loaded version decodes together.
    pub slots: usize,
    /// How many of `slots` rollouts and evaluations never use.
    pub slots_reserved_for_production: usize,
    /// Longest prompt and completion together, in tokens. The model's own limit applies too.
    pub context_tokens_max: usize,
    /// Choices that may wait for a slot. If all places are taken, a key or tenant that holds more than
    /// its share loses one to another; otherwise requests get 429.
    pub queue_choices_max: usize,
    /// Bytes of the requests that are read, wait or are answered at a time, and of the log-probabilities
    /// that they list; further ones get 429. A tenant may hold half of them. Memory use is a small multiple.
    pub in_flight_bytes_max: usize,
    /// Threads that render chat templates and tokenize long prompts. As many prompts may wait for them
    /// as choices for a slot.
    pub prompt_threads: usize,
    /// A session's turn is logged without the tokens it shares with the previous turn if these are
    /// at least so many. A shorter prefix costs a reader more than it saves.
    pub shared_prefix_tokens_min: usize,
    /// Longest wait of a user's choice for a slot, in milliseconds; then its request gets 429.
    /// Rollouts and evaluations wait as long as it takes.
    pub queue_wait_ms_max: u64,
    /// Tokens of prompts that one pass of the model reads, beside one token of each sequence that
    /// decodes. More reads prompts sooner, less delays the others by less.
    pub prompt_tokens_per_pass_max: usize,
    /// Longest wait of a stream for its first token, or error, before its headers are sent. No setting.
    #[serde(skip)]
    pub headers_wait_max: Duration,
    /// Default `max_tokens` of a completion, in tokens.
    pub max_tokens_default: usize,
    /// Largest `n` of one request.
    pub choices_max: usize,
    /// How the model writes calls of tools. Default: as its chat template does.
    pub tool_format: Option<Format>,
    /// Whether the experts that a mixture-of-experts model used are logged, by reference, for a
    /// trainer to replay.
    pub log_experts: bool,
    /// What happens to users' answers while the log takes none: `refuse` or `answer`. Rollouts and
    /// evaluations are always refused.
    pub log_away: LogAway,
    /// Memory for the weights and caches of all loaded versions, and for spare memory of retired
    /// ones, in bytes.
    pub resident_bytes_max: u64,
    /// Time between two polls of the store, in milliseconds. Announcements arrive sooner.
    pub poll_interval_ms: u64,
    /// How old the store's timestamp may be for a replica that has no trust state yet, in seconds. With
    /// more than 60 it can start while `control` is away, and whoever controls the store can give it
    /// a release that was replaced in that time.
    pub first_timestamp_seconds_max: u64,
    /// Time between two reports to the control role, in milliseconds.
    pub heartbeat_interval_ms: u64,
    /// API key for the control role, if it requires one. Never printed.
    #[serde(skip_serializing)]
    pub api_key: Option<String>,
    /// Engines that answer instead of our own.
    pub remote: remote::Options,
    /// What rollouts and evaluations may use.
    pub tide: tide::Options,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            replica: "replica-1".into(),
            cluster: "local".into(),
            address: None,
            state_dir: PathBuf::from(".springtide/serve"),
            threads: 1,
            slots: 16,
            slots_reserved_for_production: 4,
            context_tokens_max: 4096,
            queue_choices_max: 256,
            in_flight_bytes_max: 64 << 20,
            prompt_threads: 2,
            shared_prefix_tokens_min: 1024,
            queue_wait_ms_max: 60_000,
            prompt_tokens_per_pass_max: 256,
            headers_wait_max: Duration::from_secs(10),
            max_tokens_default: 16,
            choices_max: 16,
            tool_format: None,
            log_experts: true,
            log_away: LogAway::Refuse,
            resident_bytes_max: 4 << 30,
            poll_interval_ms: 250,
            first_timestamp_seconds_max: 60,
            heartbeat_interval_ms: 1000,
            api_key: None,
            remote: remote::Options::default(),
            tide: tide::Options::default(),
        }
    }
}

impl Options {
    /// The file of the replica's sampler key, which signs its generations.
    pub fn sampler_key_path(&self) -> PathBuf {
        self.state_dir.join("sampler.key")
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
        for (field, value) in [
            ("threads", usize::from(self.threads)),
            ("context_tokens_max", self.context_tokens_max),
            ("queue_choices_max", self.queue_choices_max),
            ("prompt_threads", self.prompt_threads),
            ("prompt_tokens_per_pass_max", self.prompt_tokens_per_pass_max),
            ("max_tokens_default", self.max_tokens_default),
            ("choices_max", self.choices_max),
        ] {
            ensure!(value > 0, "serve.{field} is 0; it must be at least 1");
        }
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
        ensure!(
            self.queue_wait_ms_max > 0 && self.poll_interval_ms > 0 && self.heartbeat_interval_ms > 0,
            "serve.queue_wait_ms_max, serve.poll_interval_ms and serve.heartbeat_interval_ms must be at least 1"
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
