//! What an operator sets of the collector.

use anyhow::ensure;
use serde::{Deserialize, Serialize};

/// `[spool]` of the configuration file: for `springtide ingest --spool DIR`, and read by nobody else.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// Base URL of the ingest role that events are forwarded to; `--upstream` wins. Default: none.
    pub upstream: Option<String>,
    /// API key for the upstream. Its tenant is that of every event forwarded. Never printed. Default: none.
    #[serde(skip_serializing)]
    pub api_key: Option<String>,
    /// The one key that callers of the collector must send; there is no database to look others up in. Never printed.
    /// Default: none, and then only loopback may be listened on.
    #[serde(skip_serializing)]
    pub caller_key: Option<String>,
    /// Disk that the spool takes at most; beyond it events get 503. Default: 1 GiB.
    pub bytes_max: u64,
    /// Size at which a segment is closed; the upstream has to take all of one before its room is free again.
    /// Default: 8 MiB.
    pub segment_bytes_max: u64,
    /// How long the first event that waits for a flush waits for others to share it, milliseconds. Default: 2.
    pub commit_wait_ms: u64,
    /// Events that may wait for the disk; beyond it they get 503. Default: 1024.
    pub waiting_max: usize,
    /// Requests to the upstream at once. Default: 8.
    pub requests_max: usize,
    /// How long one of them may take, seconds. Default: 10.
    pub request_timeout_seconds: f64,
    /// Longest pause between two tries, seconds; the upstream's Retry-After may ask for up to ten times as much. Default: 30.
    pub backoff_seconds_max: f64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            upstream: None,
            api_key: None,
            caller_key: None,
            bytes_max: 1 << 30,
            segment_bytes_max: 8 << 20,
            commit_wait_ms: 2,
            waiting_max: 1024,
            requests_max: 8,
            request_timeout_seconds: 10.0,
            backoff_seconds_max: 30.0,
        }
    }
}

impl Options {
    /// Refuses values out of range.
    pub fn check(&self) -> anyhow::Result<()> {
        if let Some(upstream) = &self.upstream {
            check_upstream("spool.upstream", upstream)?;
        }
        ensure!(
            self.segment_bytes_max >= 64 << 10,
            "spool.segment_bytes_max is {}; give at least 65536",
            self.segment_bytes_max
        );
        ensure!(
            self.segment_bytes_max <= 256 << 20,
            "spool.segment_bytes_max is {}; a segment is read into memory, so give at most 268435456",
            self.segment_bytes_max
        );
        ensure!(
            self.bytes_max >= 4 * self.segment_bytes_max,
            "spool.bytes_max is {}; give at least four times spool.segment_bytes_max ({})",
            self.bytes_max,
            4 * self.segment_bytes_max
        );
        ensure!(
            self.commit_wait_ms <= 1_000,
            "spool.commit_wait_ms must be at most 1000"
        );
        ensure!(
            (1..=100_000).contains(&self.waiting_max),
            "spool.waiting_max must be between 1 and 100000"
        );
        ensure!(
            (1..=256).contains(&self.requests_max),
            "spool.requests_max must be between 1 and 256"
        );
        let seconds = |value: f64| value.is_finite() && value > 0.0 && value <= 3_600.0;
        ensure!(
            seconds(self.request_timeout_seconds),
            "spool.request_timeout_seconds must be above 0 and at most 3600"
        );
        ensure!(
            seconds(self.backoff_seconds_max),
            "spool.backoff_seconds_max must be above 0 and at most 3600"
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

/// Refuses what cannot be posted to; `field` is what the operator wrote it in.
pub(crate) fn check_upstream(field: &str, upstream: &str) -> anyhow::Result<()> {
    let secure = upstream.starts_with("https://");
    ensure!(
        secure || upstream.starts_with("http://"),
        "{field} is {upstream:?}; give a base URL such as http://ingest.example:8001"
    );
    ensure!(
        cfg!(feature = "tls") || !secure,
        "{field} is {upstream:?}, and this program was built without TLS: build with --features tls, \
         or reach the upstream through a proxy on this machine"
    );
    ensure!(
        reqwest::Url::parse(upstream).is_ok_and(|url| url.has_host() && url.query().is_none()),
        "{field} is {upstream:?}, which is no base URL; give one such as http://ingest.example:8001"
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
    fn the_defaults_are_in_order() {
        Options::default().check().unwrap();
    }

    #[test]
    fn what_is_out_of_range_is_refused_by_name() {
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
    fn an_upstream_is_a_base_url() {
        check_upstream("--upstream", "http://127.0.0.1:8001").unwrap();
        check_upstream("--upstream", "http://127.0.0.1:8001/ingest/").unwrap();
        for upstream in ["ingest:8001", "http://", "ftp://x", "http://x?y=1"] {
            let why = check_upstream("--upstream", upstream).unwrap_err().to_string();
            assert!(why.contains("http://ingest.example:8001"), "{why}");
        }
    }

    #[cfg(feature = "tls")]
    #[test]
    fn a_secure_upstream_is_taken() {
        check_upstream("--upstream", "https://ingest.example").unwrap();
        let options = Options {
            upstream: Some("https://ingest.example".to_owned()),
            ..Options::default()
        };
        options.check().unwrap();
    }

    #[cfg(not(feature = "tls"))]
    #[test]
    fn without_tls_a_secure_upstream_is_refused_with_what_to_do() {
        let why = refusal(|options| options.upstream = Some("https://ingest.example".to_owned()));
        assert!(why.contains("--features tls"), "{why}");
    }
}
