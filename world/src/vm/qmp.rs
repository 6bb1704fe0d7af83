//! QEMU's control socket (QMP): one JSON object a line.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;

use crate::provider::Error;

/// QEMU answers in milliseconds, unless the host is overloaded.
const ANSWER_SECONDS_MAX: u64 = 30;
const LINE_BYTES_MAX: u64 = 1 << 20;

#[derive(Debug)]
pub(super) struct Control(BufReader<UnixStream>);

impl Control {
    /// Greets QEMU over `stream`.
    pub(super) async fn open(stream: UnixStream) -> Result<Self, Error> {
        let mut control = Self(BufReader::new(stream));
        tokio::time::timeout(Duration::from_secs(ANSWER_SECONDS_MAX), control.line())
            .await
            .map_err(|_| Error::Lost("QEMU does not greet".to_owned()))??;
        control.execute("qmp_capabilities", json!({})).await?;
        Ok(control)
    }

    /// Has QEMU do something, and returns its answer.
    pub(super) async fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, Error> {
        let answered = tokio::time::timeout(Duration::from_secs(ANSWER_SECONDS_MAX), self.ask(command, &arguments));
        answered
            .await
            .map_err(|_| Error::Lost(format!("QEMU does not answer {command}")))?
    }

    async fn ask(&mut self, command: &str, arguments: &Value) -> Result<Value, Error> {
        let text = format!("{}\n", json!({"execute": command, "arguments": arguments}));
        let sent = self.0.get_mut().write_all(text.as_bytes()).await;
        sent.map_err(|error| Error::Lost(format!("QEMU does not take {command}: {error}")))?;
        loop {
            let mut answer = self.line().await?;
            if let Some(error) = answer.get("error") {
                let reason = error["desc"].as_str().unwrap_or("no reason");
                return Err(Error::Lost(format!("QEMU refuses {command}: {reason}")));
            }
            // Anything else is an event that nobody waits for.
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
        }
    }

    async fn line(&mut self) -> Result<Value, Error> {
        let mut line = String::new();
        let read = (&mut self.0).take(LINE_BYTES_MAX).read_line(&mut line).await;
        match read {
            Ok(0) => Err(Error::Lost("QEMU has ended".to_owned())),
            Ok(_) => serde_json::from_str(&line).map_err(|error| Error::Lost(format!("QEMU speaks no QMP: {error}"))),
            Err(error) => Err(Error::Lost(format!("QEMU is silent: {error}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn events_are_skipped_and_refusals_are_errors() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let qemu = tokio::spawn(async move {
            let mut qemu = BufReader::new(theirs);
            let mut line = String::new();
            for answer in [
                "{\"QMP\":{}}\n",
                "{\"return\":{}}\n",
                "{\"event\":\"STOP\"}\n{\"return\":{\"status\":\"paused\"}}\n",
                "{\"error\":{\"class\":\"GenericError\",\"desc\":\"not now\"}}\n",
            ] {
                if !answer.contains("QMP") {
                    qemu.read_line(&mut line).await.unwrap();
                }
                qemu.get_mut().write_all(answer.as_bytes()).await.unwrap();
            }
            line
        });
        let mut control = Control::open(ours).await.unwrap();
        assert_eq!(
            control.execute("query-status", json!({})).await.unwrap()["status"],
            "paused"
        );
        let refused = control.execute("cont", json!({})).await.unwrap_err().to_string();
        assert!(refused.contains("refuses cont: not now"), "{refused}");
        let asked = qemu.await.unwrap();
        assert!(asked.starts_with("{\"execute\":\"qmp_capabilities\""), "{asked}");
        let ended = control.execute("cont", json!({})).await.unwrap_err();
        assert!(matches!(ended, Error::Lost(_)));
    }
}
