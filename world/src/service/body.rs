//! What requests and answers hold. `springtide world` writes them, and [`crate::remote`] reads them.

use std::collections::BTreeMap;
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use uuid::Uuid;

use crate::{Command, Ended, Limits, Output};

/// `POST /v1/worlds`
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Create {
    /// `None`: the only image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// `None`: the configured one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<u64>,
}

/// The answer to it.
#[derive(Debug, Serialize, Deserialize)]
pub struct Created {
    pub id: Uuid,
    pub image: String,
    pub ttl_seconds: u64,
}

/// `POST /v1/worlds/{id}/run`
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    pub program: Vec<String>,
    #[serde(default)]
    pub stdin: Bytes,
    /// By path, relative to the working directory.
    #[serde(default)]
    pub files: BTreeMap<String, Bytes>,
    #[serde(default)]
    pub limits: RunLimits,
}

/// [`Limits`], with units in the names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RunLimits {
    pub wall_ms: u64,
    pub cpu_ms: u64,
    pub memory_bytes: u64,
    pub output_bytes: u64,
    pub processes: u32,
}

/// The answer to it.
#[derive(Debug, Serialize, Deserialize)]
pub struct Ran {
    /// `{"exited": 0}`, `{"signalled": 9}` or `{"exceeded": "memory"}`.
    pub ended: Ended,
    pub stdout: Bytes,
    pub stderr: Bytes,
    pub wall_ms: u64,
}

/// Bytes in JSON: a string, or `{"base64": "…"}` if they are not UTF-8.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Bytes(pub Vec<u8>);

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Written {
    Text(String),
    Encoded { base64: String },
}

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match std::str::from_utf8(&self.0) {
            Ok(text) => serializer.serialize_str(text),
            Err(_) => Written::Encoded {
                base64: BASE64_STANDARD.encode(&self.0),
            }
            .serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Written::deserialize(deserializer)? {
            Written::Text(text) => Ok(Self(text.into_bytes())),
            Written::Encoded { base64 } => {
                let bytes = BASE64_STANDARD.decode(base64);
                bytes.map(Self).map_err(serde::de::Error::custom)
            }
        }
    }
}

impl Default for RunLimits {
    fn default() -> Self {
        Limits::default().into()
    }
}

impl From<Limits> for RunLimits {
    fn from(limits: Limits) -> Self {
        let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        Self {
            wall_ms: ms(limits.wall),
            cpu_ms: ms(limits.cpu),
            memory_bytes: limits.memory_bytes,
            output_bytes: limits.output_bytes,
            processes: limits.processes,
        }
    }
}

impl From<RunLimits> for Limits {
    fn from(limits: RunLimits) -> Self {
        Self {
            wall: Duration::from_millis(limits.wall_ms),
            cpu: Duration::from_millis(limits.cpu_ms),
            memory_bytes: limits.memory_bytes,
            output_bytes: limits.output_bytes,
            processes: limits.processes,
        }
    }
}

impl From<Run> for Command {
    fn from(run: Run) -> Self {
        Self {
            program: run.program,
            stdin: run.stdin.0,
            files: run.files.into_iter().map(|(path, bytes)| (path, bytes.0)).collect(),
            limits: run.limits.into(),
        }
    }
}

impl From<&Command> for Run {
    fn from(command: &Command) -> Self {
        let files = command.files.iter();
        Self {
            program: command.program.clone(),
            stdin: Bytes(command.stdin.clone()),
            files: files
                .map(|(path, bytes)| (path.clone(), Bytes(bytes.clone())))
                .collect(),
            limits: command.limits.into(),
        }
    }
}

impl From<Output> for Ran {
    fn from(output: Output) -> Self {
        Self {
            ended: output.ended,
            stdout: Bytes(output.stdout),
            stderr: Bytes(output.stderr),
            wall_ms: u64::try_from(output.wall.as_millis()).unwrap_or(u64::MAX),
        }
    }
}

impl From<Ran> for Output {
    fn from(ran: Ran) -> Self {
        Self {
            ended: ran.ended,
            stdout: ran.stdout.0,
            stderr: ran.stderr.0,
            wall: Duration::from_millis(ran.wall_ms),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_text_where_they_can_be() {
        for (bytes, json) in [
            (&b"select 1"[..], r#""select 1""#),
            (&b"\xff\x00"[..], r#"{"base64":"/wA="}"#),
        ] {
            let written = serde_json::to_string(&Bytes(bytes.to_vec())).unwrap();
            assert_eq!(written, json);
            assert_eq!(serde_json::from_str::<Bytes>(json).unwrap().0, bytes);
        }
        assert!(serde_json::from_str::<Bytes>(r#"{"base64":"!"}"#).is_err());
    }

    #[test]
    fn a_command_keeps_its_defaults_and_refuses_what_it_does_not_know() {
        let run: Run = serde_json::from_str(r#"{"program": ["ls"], "limits": {"wall_ms": 5}}"#).unwrap();
        let command = Command::from(run);
        assert_eq!(command.limits.wall, Duration::from_millis(5));
        assert_eq!(command.limits.processes, Limits::default().processes);
        assert_eq!(Command::from(Run::from(&command)), command);
        assert!(serde_json::from_str::<Run>(r#"{"program": ["ls"], "network": true}"#).is_err());
    }
}
