//! What tests that kill everything around runs share: the runs that they make, and notes of other processes.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use fixture::eventually;
use fixture::servers::{Servers, Supervised};
use serde::de::DeserializeOwned;
use serde_json::Value;
use sqlx::PgPool;

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

/// A program of Python that works with control, started again whenever it ends.
pub fn program(servers: &Servers, name: &str, python: &OsString, arguments: Vec<PathBuf>) -> Supervised {
    let (python, control) = (python.clone(), servers.control());
    Supervised::start(name, servers.path().join(format!("{name}.log")), move || {
        let mut command = Command::new(&python);
        command
            .args(&arguments)
            .env("SPRINGTIDE_CONTROL", &control)
            .env_remove("SPRINGTIDE_API_KEY");
        command
    })
}

/// How many generations were trained on, and how many of them more than once.
pub async fn trained(pool: &PgPool) -> (i64, i64) {
    let uses =
        "select count(*), count(*) - count(distinct generation_id) from trajectory_use where purpose = 'trained'";
    sqlx::query_as(uses).fetch_one(pool).await.unwrap()
}

pub fn end_of(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(40)..].join("\n")
}
