//! What tests that kill everything around runs share: the runs that they make, and notes of other processes.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fixture::eventually;
use fixture::servers::Servers;
use serde::de::DeserializeOwned;
use serde_json::Value;

const START: Duration = Duration::from_secs(120);

/// Makes a run. Control may be away.
pub async fn create(servers: &Servers, request: &Value) -> String {
    let url = format!("{}/v1/runs", servers.control());
    eventually("a run is made", START, async || {
        let answer = reqwest::Client::new().post(&url).json(request).send().await.ok()?;
        let status = answer.status();
        let created: Value = answer.json().await.ok()?;
        // 409: the trainer has not imported the base yet
        assert!(
            [201, 409].contains(&status.as_u16()) || status.is_server_error(),
            "{status}: {created}"
        );
        created["id"].as_str().map(str::to_owned)
    })
    .await
}

/// The newest run.
pub async fn state(servers: &Servers, runs: &[String]) -> Option<Value> {
    get(&format!("{}/v1/runs/{}", servers.control(), runs.last()?)).await
}

pub async fn get(url: &str) -> Option<Value> {
    reqwest::get(url).await.ok()?.error_for_status().ok()?.json().await.ok()
}

/// Names the runs for other processes, the newest last.
pub fn note(file: &Path, runs: &[String]) {
    let new = file.with_extension("new");
    fs::write(&new, runs.join("\n")).unwrap();
    fs::rename(new, file).unwrap();
}

/// The lines of JSON in these files. A process that is killed while it writes leaves half a line.
pub fn noted<T: DeserializeOwned>(files: impl Iterator<Item = PathBuf>) -> Vec<T> {
    let texts = files.filter_map(|file| fs::read_to_string(file).ok());
    let lines: Vec<String> = texts
        .flat_map(|text| text.lines().map(str::to_owned).collect::<Vec<_>>())
        .collect();
    let read = lines.iter().filter_map(|line| serde_json::from_str(line).ok());
    read.collect()
}

pub fn end_of(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(40)..].join("\n")
}
