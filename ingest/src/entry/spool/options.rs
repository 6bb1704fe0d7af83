//! The collector's configuration.

use anyhow::ensure;
use edge::options::above_to;

edge::options! {
    /// `[spool]` of the configuration file. Only `springtide ingest --spool DIR` reads it.
    pub struct Options {
        /// Base URL of the ingest role that receives the events. `--upstream` takes precedence.
        pub upstream: Option<String> = None,
        /// API key for the upstream, which determines the tenant of all events. Never printed.
        #[serde(skip_serializing)]
        pub api_key: Option<String> = None,
        /// The key that callers must send. A collector has no database for more keys. Never printed.
        /// Default: none; then only loopback addresses are allowed.
        #[serde(skip_serializing)]
        pub caller_key: Option<String> = None,
        /// Requests per second of all callers with `caller_key` together; further ones get 429. 0:
        /// no limit.
        pub requests_per_second_max: u32 = 0,
        /// The largest size of the spool on disk, bytes; beyond it events get 503.
        pub bytes_max: u64 = 1 << 30,
        /// Size at which a segment is sealed, bytes. Segments are read into memory. Its disk space is freed
        /// when all its events are forwarded.
        pub segment_bytes_max: u64 = 8 << 20 => 64 << 10..=256 << 20,
        /// How long a flush waits for further events, milliseconds.
        pub commit_wait_ms: u64 = 2 => 0..=1_000,
        /// Events that may wait for the disk; further ones get 503.
        pub waiting_max: usize = 1024 => 1..=100_000,
        /// Concurrent requests to the upstream.
        pub requests_max: usize = 8 => 1..=256,
        /// Timeout of a request, seconds.
        pub request_timeout_seconds: f64 = 10.0 => above_to(0.0, 3_600.0),
        /// Longest pause between tries, seconds. The upstream's Retry-After may ask for ten times as
        /// much.
        pub backoff_seconds_max: f64 = 30.0 => above_to(0.0, 3_600.0),
    }
}

impl Options {
    /// Refuses values out of range.
    pub fn check(&self) -> anyhow::Result<()> {
        if let Some(upstream) = &self.upstream {
            check_upstream("spool.upstream", upstream)?;
        }
        self.check_ranges("spool")?;
        let bytes_min = 4 * self.segment_bytes_max;
        ensure!(
            self.bytes_max >= bytes_min,
            "spool.bytes_max is {}; give at least four times spool.segment_bytes_max ({bytes_min})",
            self.bytes_max
        );
        for (field, key) in [("api_key", &self.api_key), ("caller_key", &self.caller_key)] {
            ensure!(
                key.as_ref().is_none_or(|key| !key.trim().is_empty()),
                "spool.{field} is empty; give a key or leave it out"
            );
        }
        Ok(())
    }
}

/// Refuses values that are not base URLs. `field` is the option's name for the error.
pub(crate) fn check_upstream(field: &str, upstream: &str) -> anyhow::Result<()> {
    ensure!(
        upstream.starts_with("https://") || upstream.starts_with("http://"),
        "{field} is {upstream:?}; give a base URL such as https://ingest.example:8001"
    );
    ensure!(
        reqwest::Url::parse(upstream).is_ok_and(|url| url.has_host() && url.query().is_none()),
        "{field} is {upstream:?}, which is not a base URL; give one such as https://ingest.example:8001"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(change: impl FnOnce(&mut Options)) -> String {
        let mut options = Options::default();
        change(&mut options);
        options.check().unwrap_err().to_string()
    }

    #[test]
    fn the_defaults_are_valid() {
        Options::default().check().unwrap();
    }

    #[test]
    fn a_value_out_of_range_is_refused_by_its_name() {
        for (why, field) in [
            (refusal(|options| options.bytes_max = 1), "spool.bytes_max"),
            (
                refusal(|options| options.segment_bytes_max = 0),
                "spool.segment_bytes_max",
            ),
            (refusal(|options| options.waiting_max = 0), "spool.waiting_max"),
            (refusal(|options| options.requests_max = 0), "spool.requests_max"),
            (
                refusal(|options| options.backoff_seconds_max = f64::NAN),
                "spool.backoff_seconds_max",
            ),
            (
                refusal(|options| options.api_key = Some(String::new())),
                "spool.api_key",
            ),
        ] {
            assert!(why.contains(field), "{why}");
        }
    }

    #[test]
    fn an_upstream_must_be_a_base_url() {
        check_upstream("--upstream", "http://127.0.0.1:8001").unwrap();
        check_upstream("--upstream", "http://127.0.0.1:8001/ingest/").unwrap();
        for upstream in ["ingest:8001", "http://", "ftp://x", "http://x?y=1"] {
            let why = check_upstream("--upstream", upstream).unwrap_err().to_string();
            assert!(why.contains("https://ingest.example:8001"), "{why}");
        }
    }

    #[test]
    fn an_https_upstream_is_accepted() {
        check_upstream("--upstream", "https://ingest.example").unwrap();
        let options = Options {
            upstream: Some("https://ingest.example".to_owned()),
            ..Options::default()
        };
        options.check().unwrap();
    }
}
