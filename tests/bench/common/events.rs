//! Server-sent events of an answer.

use anyhow::Context;
use futures::StreamExt;
use serde::de::DeserializeOwned;

/// Calls `on` with the document of each event. Returns whether `[DONE]` came.
pub async fn read<T: DeserializeOwned>(
    response: reqwest::Response,
    mut on: impl FnMut(T) -> anyhow::Result<()>,
) -> anyhow::Result<bool> {
    let mut bytes = response.bytes_stream();
    let mut unread = Vec::new();
    let mut done = false;
    while let Some(part) = bytes.next().await {
        unread.extend_from_slice(&part?);
        while let Some(end) = unread.iter().position(|&byte| byte == b'\n') {
            let line: Vec<u8> = unread.drain(..=end).collect();
            let Some(data) = line.strip_prefix(b"data:").map(<[u8]>::trim_ascii) else {
                continue;
            };
            if data == b"[DONE]" {
                done = true;
                continue;
            }
            on(serde_json::from_slice(data).context("read an event")?)?;
        }
    }
    Ok(done)
}
