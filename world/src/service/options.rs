//! Configuration of the role.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use anyhow::ensure;
use serde::{Deserialize, Serialize};

use crate::vm;

/// `[world]` of the configuration file; only `springtide world` reads it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// Address that the role listens on. Default: `127.0.0.1:8006`.
    pub listen: SocketAddr,
    /// The API key that callers must send. There is only one, because the role has no database.
    /// Without it, `listen` must be a loopback address. Never printed. Default: none.
    #[serde(skip_serializing)]
    pub caller_key: Option<String>,
    /// Requests per second of all callers with `caller_key` together; further ones get 429. 0: no
    /// limit. Default: 0.
    pub requests_per_second_max: u32,
    /// What requests call the image. Default: `postgres`.
    pub name: String,
    /// Worlds that exist at a time, 1 to 10000. Further requests get 503. Default: 8.
    pub worlds_max: usize,
    /// Of these, how many are kept ready while nobody uses them. Default: 2.
    pub ready: usize,
    /// A world ends after this time, in seconds, if its request names none, 1 to 86400. Default: 600.
    pub ttl_seconds: u64,
    /// The longest that a request may ask for, in seconds, 1 to 86400. Default: 7200.
    pub ttl_seconds_max: u64,
    pub machine: vm::Options,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            listen: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8006),
            caller_key: None,
            requests_per_second_max: 0,
            name: "postgres".to_owned(),
            worlds_max: 8,
            ready: 2,
            ttl_seconds: 600,
            ttl_seconds_max: 7200,
            machine: vm::Options::default(),
        }
    }
}

impl Options {
    /// Refuses values out of range.
    pub fn check(&self) -> anyhow::Result<()> {
        ensure!(
            (1..=10_000).contains(&self.worlds_max),
            "world.worlds_max is {}: give 1 to 10000",
            self.worlds_max
        );
        ensure!(
            self.ready <= self.worlds_max,
            "world.ready is {}, more than world.worlds_max ({}): lower it",
            self.ready,
            self.worlds_max
        );
        for (field, seconds) in [
            ("ttl_seconds", self.ttl_seconds),
            ("ttl_seconds_max", self.ttl_seconds_max),
        ] {
            ensure!(
                (1..=86_400).contains(&seconds),
                "world.{field} is {seconds}: give 1 to 86400"
            );
        }
        ensure!(
            self.ttl_seconds <= self.ttl_seconds_max,
            "world.ttl_seconds is {}, more than world.ttl_seconds_max ({}): lower it",
            self.ttl_seconds,
            self.ttl_seconds_max
        );
        ensure!(
            self.caller_key.as_ref().is_none_or(|key| !key.is_empty()),
            "world.caller_key is empty; leave it out or give a key"
        );
        ensure!(
            !self.name.is_empty(),
            "world.name is empty: give the name by which requests ask for the image"
        );
        self.machine
            .check()
            .map_err(|error| anyhow::anyhow!("world.machine.{error}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contradictions_are_refused_with_the_name_of_the_field() {
        assert!(Options::default().check().is_ok());
        let refusal = |change: fn(&mut Options)| {
            let mut options = Options::default();
            change(&mut options);
            options.check().unwrap_err().to_string()
        };
        for (why, field) in [
            (refusal(|options| options.worlds_max = 0), "world.worlds_max"),
            (refusal(|options| options.ready = 9), "world.ready"),
            (refusal(|options| options.ttl_seconds = 8000), "world.ttl_seconds"),
            (refusal(|options| options.ttl_seconds_max = 0), "world.ttl_seconds_max"),
            (
                refusal(|options| options.caller_key = Some(String::new())),
                "world.caller_key",
            ),
            (refusal(|options| options.machine.cpus = 0), "world.machine.cpus"),
        ] {
            assert!(why.contains(field), "{why}");
        }
    }
}
