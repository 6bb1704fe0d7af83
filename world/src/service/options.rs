//! Configuration of the role.

use std::net::SocketAddr;

use anyhow::ensure;

use crate::vm;

edge::options! {
    /// `[world]` of the configuration file; only `springtide world` reads it.
    #[derive(Eq)]
    pub struct Options {
        /// Address that the role listens on.
        pub listen: SocketAddr = ([127, 0, 0, 1], 8006).into(),
        /// The API key that callers must send. There is only one, because the role has no database.
        /// Without it, `listen` must be a loopback address. Never printed.
        #[serde(skip_serializing)]
        pub caller_key: Option<String> = None,
        /// Requests per second of all callers with `caller_key` together; further ones get 429. 0:
        /// no limit.
        pub requests_per_second_max: u32 = 0,
        /// What requests call the image.
        pub name: String = "postgres".to_owned(),
        /// Worlds that exist at a time, 1 to 10000. Further requests get 503.
        pub worlds_max: usize = 8 => 1..=10_000,
        /// Of these, how many are kept ready while nobody uses them.
        pub ready: usize = 2,
        /// A world ends after this time, in seconds, if its request names none, 1 to 86400.
        pub ttl_seconds: u64 = 600 => 1..=86_400,
        /// The longest that a request may ask for, in seconds, 1 to 86400.
        pub ttl_seconds_max: u64 = 7200 => 1..=86_400,
        pub machine: vm::Options,
    }
}

impl Options {
    /// Refuses values out of range.
    pub fn check(&self) -> anyhow::Result<()> {
        self.check_ranges("world")?;
        ensure!(
            self.ready <= self.worlds_max,
            "world.ready is {}, more than world.worlds_max ({}): lower it",
            self.ready,
            self.worlds_max
        );
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
