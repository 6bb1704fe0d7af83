//! Configuration of the relay.

use std::net::SocketAddr;

use anyhow::ensure;

edge::options! {
    /// `[relay]` of the configuration file; only `springtide relay` reads it.
    pub struct Options {
        /// Address that the relay listens on.
        pub listen: SocketAddr = ([127, 0, 0, 1], 8004).into(),
        /// Source of the objects: `file://`, `s3://`, or the `http://` or `https://` URL of another
        /// relay. `--upstream` overrides it. Default: `policy.store`.
        pub upstream: Option<String> = None,
        /// The API key for the upstream, if that is a relay. Never printed.
        #[serde(skip_serializing)]
        pub api_key: Option<String> = None,
        /// The API key that callers must send. There is only one, because a relay has no database.
        /// Without it, `listen` must be a loopback address. Never printed.
        #[serde(skip_serializing)]
        pub caller_key: Option<String> = None,
        /// Requests per second of all callers with `caller_key` together; further ones get 429. 0:
        /// no limit.
        pub requests_per_second_max: u32 = 0,
        /// Disk space for objects in `relay` in the state folder, bytes. The least recently used are
        /// deleted first. Larger objects are passed through: each follower fetches them from upstream.
        pub bytes_max: u64 = 64 << 30 => 1..,
        /// Parts of an object (8 MiB each) that are fetched at once, 1 to 256.
        pub streams: usize = 8 => 1..=256,
    }
}

impl Options {
    /// Refuses values out of range.
    pub fn check(&self) -> anyhow::Result<()> {
        self.check_ranges("relay")?;
        for (field, key) in [("api_key", &self.api_key), ("caller_key", &self.caller_key)] {
            ensure!(
                key.as_ref().is_none_or(|key| !key.is_empty()),
                "relay.{field} is empty; leave it out or give a key"
            );
        }
        Ok(())
    }
}
