//! Speaks with the agent in a machine (`world/image/agent.py` has the messages). The agent is not
//! trusted: every answer is bounded in size and time.

use std::collections::BTreeMap;
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;

use crate::provider::Error;
use crate::{Command, Ended, Output};

/// What the agent takes at most.
const REQUEST_BYTES_MAX: usize = 64 << 20;
/// Answers without output.
const SHORT_ANSWER_BYTES_MAX: u64 = 64 << 10;
/// Beyond the wall limit of a command, which the agent keeps.
const GRACE: Duration = Duration::from_secs(15);
const BEGIN_TIME_MAX: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(super) struct Agent(UnixStream);

#[derive(Serialize)]
#[serde(tag = "do", rename_all = "lowercase")]
enum Request<'a> {
    Hello,
    Begin {
        id: &'a str,
        /// base64
        seed: String,
        now_ns: u128,
    },
    Run {
        program: &'a [String],
        /// base64
        stdin: String,
        /// base64, by path
        files: BTreeMap<&'a str, String>,
        limits: Limits,
    },
}

#[derive(Serialize)]
struct Limits {
    wall_ms: u128,
    cpu_ms: u128,
    memory_bytes: u64,
    output_bytes: u64,
    processes: u32,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Answer<T> {
    Refused { error: String },
    Done(T),
}

#[derive(Deserialize)]
struct Done {
    ended: Ended,
    stdout: String,
    stderr: String,
    wall_ms: f64,
}

#[derive(Deserialize)]
struct Yes {
    #[expect(dead_code, reason = "its presence is the answer")]
    ok: bool,
}

impl Agent {
    pub(super) fn new(stream: UnixStream) -> Self {
        Self(stream)
    }

    /// Returns when the services of the machine answer.
    pub(super) async fn hello(&mut self, time_max: Duration) -> Result<(), Error> {
        let _: Yes = self.ask(&Request::Hello, SHORT_ANSWER_BYTES_MAX, time_max).await?;
        Ok(())
    }

    /// Gives a fork what it must not share: a name, the time, entropy.
    pub(super) async fn begin(&mut self, id: &str) -> Result<(), Error> {
        let mut seed = [0; 64];
        getrandom::fill(&mut seed).map_err(|error| Error::Unusable(format!("the host has no entropy: {error}")))?;
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let request = Request::Begin {
            id,
            seed: BASE64_STANDARD.encode(seed),
            now_ns: now.unwrap_or_default().as_nanos(),
        };
        let _: Yes = self.ask(&request, SHORT_ANSWER_BYTES_MAX, BEGIN_TIME_MAX).await?;
        Ok(())
    }

    pub(super) async fn run(&mut self, command: &Command) -> Result<Output, Error> {
        let limits = command.limits;
        let request = Request::Run {
            program: &command.program,
            stdin: BASE64_STANDARD.encode(&command.stdin),
            files: command
                .files
                .iter()
                .map(|(path, bytes)| (path.as_str(), BASE64_STANDARD.encode(bytes)))
                .collect(),
            limits: Limits {
                wall_ms: limits.wall.as_millis(),
                cpu_ms: limits.cpu.as_millis(),
                memory_bytes: limits.memory_bytes,
                output_bytes: limits.output_bytes,
                processes: limits.processes,
            },
        };
        // Two outputs in base64.
        let answer_bytes_max = limits
            .output_bytes
            .saturating_mul(3)
            .saturating_add(SHORT_ANSWER_BYTES_MAX);
        let time_max = limits.wall.saturating_add(GRACE);
        let done: Done = self.ask(&request, answer_bytes_max, time_max).await?;
        let bytes = |text: &str| {
            let bytes = BASE64_STANDARD.decode(text);
            bytes.map_err(|error| Error::Lost(format!("its agent sent no base64: {error}")))
        };
        Ok(Output {
            ended: done.ended,
            stdout: bytes(&done.stdout)?,
            stderr: bytes(&done.stderr)?,
            wall: Duration::try_from_secs_f64(done.wall_ms / 1e3).unwrap_or_default(),
        })
    }

    async fn ask<T: DeserializeOwned>(
        &mut self,
        request: &Request<'_>,
        answer_bytes_max: u64,
        time_max: Duration,
    ) -> Result<T, Error> {
        let text = serde_json::to_vec(request).map_err(|error| Error::Refused(error.to_string()))?;
        if text.len() > REQUEST_BYTES_MAX {
            return Err(Error::Refused(format!(
                "stdin and files have {} bytes as base64: give at most {REQUEST_BYTES_MAX}",
                text.len()
            )));
        }
        let lost = |error: std::io::Error| Error::Lost(format!("its machine has ended: {error}"));
        let exchange = async {
            self.0.write_u32(u32::try_from(text.len()).unwrap_or(u32::MAX)).await?;
            self.0.write_all(&text).await?;
            let size = self.0.read_u32().await?;
            if u64::from(size) > answer_bytes_max {
                return Err(std::io::Error::other("its agent sends more than was asked for"));
            }
            let mut answer = vec![0; size as usize];
            self.0.read_exact(&mut answer).await?;
            Ok(answer)
        };
        let answer = tokio::time::timeout(time_max, exchange)
            .await
            .map_err(|_| Error::Lost(format!("its agent did not answer within {} s", time_max.as_secs())))?
            .map_err(lost)?;
        match serde_json::from_slice(&answer) {
            Ok(Answer::Done(done)) => Ok(done),
            Ok(Answer::Refused { error }) => Err(Error::Refused(error)),
            Err(error) => Err(Error::Lost(format!("its agent answered nonsense: {error}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What our side makes of `answer`, from an agent that reads one request.
    async fn answered(answer: &str, size: u32) -> (Result<Output, Error>, serde_json::Value) {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let answer = answer.to_owned();
        let agent = tokio::spawn(async move {
            let size_of_request = theirs.read_u32().await.unwrap();
            let mut request = vec![0; size_of_request as usize];
            theirs.read_exact(&mut request).await.unwrap();
            theirs.write_u32(size).await.unwrap();
            theirs.write_all(answer.as_bytes()).await.unwrap();
            serde_json::from_slice(&request).unwrap()
        });
        let command = Command {
            program: vec!["cat".to_owned()],
            stdin: b"\xff".to_vec(),
            files: BTreeMap::from([("a/b".to_owned(), b"text".to_vec())]),
            limits: crate::Limits::default(),
        };
        let output = Agent::new(ours).run(&command).await;
        (output, agent.await.unwrap())
    }

    #[tokio::test]
    async fn a_command_reaches_the_agent_and_its_output_comes_back() {
        let answer = r#"{"ended": {"exceeded": "memory"}, "stdout": "/w==", "stderr": "", "wall_ms": 1.5}"#;
        let (output, request) = answered(answer, answer.len() as u32).await;
        let output = output.unwrap();
        assert_eq!(output.ended, Ended::Exceeded(crate::Limit::Memory));
        assert_eq!(output.stdout, b"\xff");
        assert_eq!(output.wall, Duration::from_micros(1500));
        assert_eq!(request["do"], "run");
        assert_eq!(request["stdin"], "/w==");
        assert_eq!(request["files"]["a/b"], "dGV4dA==");
        assert_eq!(request["limits"]["wall_ms"], 10_000);
    }

    #[tokio::test]
    async fn answers_that_break_the_protocol_cost_the_world() {
        for (answer, size) in [
            ("", 1 << 30),   // too long
            ("nonsense", 8), // no JSON
            ("half", 8),     // ends early
            (
                r#"{"ended": {"exited": 0}, "stdout": "!", "stderr": "", "wall_ms": 1}"#,
                67,
            ), // no base64
        ] {
            let (output, _) = answered(answer, size).await;
            assert!(matches!(output, Err(Error::Lost(_))), "{answer}: {output:?}");
        }
        let refusal = r#"{"error": "no such program"}"#;
        let (output, _) = answered(refusal, refusal.len() as u32).await;
        assert!(matches!(output, Err(Error::Refused(_))), "{output:?}");
    }
}
