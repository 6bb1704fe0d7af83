//! The lease of a rollout, as the part of a URL. A harness uses
//! `http://serve:8000/lease/LEASE/v1` as the base URL of an ordinary client, and everything that the
//! client asks for is sampled and logged as a turn of the rollout.
//!
//! A lease grants nothing: its holder needs a key that may request completions, and with such a key
//! anybody may label a request as a rollout. So it is not signed.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// What the requests of a rollout have in common.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lease {
    /// Of the lease, and of the episode that its turns make.
    pub id: Uuid,
    #[serde(rename = "run")]
    pub run_id: Uuid,
    #[serde(rename = "task")]
    pub task_id: String,
    #[serde(rename = "group")]
    pub group_id: String,
    /// `policy@line`, whatever model the client names.
    pub model: String,
    /// Of all its turns, whatever the client asks for: greedy rollouts do not differ.
    pub temperature: f32,
    /// Of its run; higher goes first. −100 to 100.
    #[serde(default, rename = "priority", skip_serializing_if = "is_usual")]
    pub run_priority: i32,
}

fn is_usual(priority: &i32) -> bool {
    *priority == 0
}

/// The text is no lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the base URL has no lease in it; use the `base_url` of POST /v1/runs/{{id}}/leases unchanged")]
pub struct Unreadable;

impl Lease {
    /// The surface of generations that have a lease.
    pub const SURFACE: &'static str = "environment";

    /// As the part of a URL; needs no escaping.
    pub fn to_text(&self) -> Result<String, serde_json::Error> {
        Ok(URL_SAFE_NO_PAD.encode(serde_json::to_vec(self)?))
    }

    pub fn read(text: &str) -> Result<Self, Unreadable> {
        let bytes = URL_SAFE_NO_PAD.decode(text).map_err(|_| Unreadable)?;
        serde_json::from_slice(&bytes).map_err(|_| Unreadable)
    }

    /// The base URL for a client, on a server of completions.
    pub fn base_url(&self, serve_url: &str) -> Result<String, serde_json::Error> {
        Ok(format!(
            "{}/lease/{}/v1",
            serve_url.trim_end_matches('/'),
            self.to_text()?
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_survives_a_url() {
        let lease = Lease {
            id: Uuid::from_u128(1),
            run_id: Uuid::from_u128(2),
            task_id: "größe/1?".into(),
            group_id: "g".into(),
            model: "demo@run-1".into(),
            temperature: 0.7,
            run_priority: 7,
        };
        let url = lease.base_url("http://serve:8000/").unwrap();
        let text = url
            .strip_prefix("http://serve:8000/lease/")
            .unwrap()
            .strip_suffix("/v1")
            .unwrap();
        let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        assert!(text.chars().all(is_plain), "{text}");
        assert_eq!(Lease::read(text), Ok(lease));
    }

    #[test]
    fn what_is_no_lease_is_refused() {
        for text in ["", "v1", "e30", "bm90IGpzb24"] {
            assert_eq!(Lease::read(text), Err(Unreadable), "{text}");
        }
    }
}
