//! Configuration of the relay.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use anyhow::ensure;
use serde::{Deserialize, Serialize};

/// `[relay]` of the configuration file; only `springtide relay` reads it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// Address that the relay listens on. Default: `127.0.0.1:8004`.
    pub listen: SocketAddr,
    /// Source of the objects: `file://`, `s3://`, or the `http://` or `https://` URL of another
    /// relay. `--upstream` overrides it. Default: `policy.store`.
    pub upstream: Option<String>,
    /// The API key for the upstream, if that is a relay. Never printed. Default: none.
    #[serde(skip_serializing)]
    pub api_key: Option<String>,
    /// The API key that callers must send. There is only one, because a relay has no database.
    /// Without it, `listen` must be a loopback address. Never printed. Default: none.
    #[serde(skip_serializing)]
    pub caller_key: Option<String>,
    /// Requests per second of all callers with `caller_key` together; further ones get 429. 0: no
    /// limit. Default: 0.
    pub requests_per_second_max: u32,
    /// Disk space for objects, in bytes; the least recently used are deleted first. Objects larger
    /// than this are refused. Default: 64 GiB.
    pub bytes_max: u64,
    /// Parts of an object (8 MiB each) that are fetched at once, 1 to 256. Default: 8.
    pub streams: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            listen: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8004),
            upstream: None,
            api_key: None,
            caller_key: None,
            requests_per_second_max: 0,
            bytes_max: 64 << 30,
            streams: 8,
        }
    }
}

impl Options {
    /// Refuses values out of range.
    pub fn check(&self) -> anyhow::Result<()> {
        ensure!(
            (1..=256).contains(&self.streams),
            "relay.streams is {}; give 1 to 256",
            self.streams
        );
        ensure!(
            self.bytes_max > 0,
            "relay.bytes_max is 0; give the disk space for objects in bytes"
        );
        for (field, key) in [("api_key", &self.api_key), ("caller_key", &self.caller_key)] {
            ensure!(
                key.as_ref().is_none_or(|key| !key.is_empty()),
                "relay.{field} is empty; leave it out or give a key"
            );
        }
        Ok(())
    }
}
