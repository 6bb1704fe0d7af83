//! The stack under test: the roles of `springtide up`, a relay and a collector, with keys required.

use std::fs;
use std::os::unix::fs::OpenOptionsExt;
use std::process::Stdio;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use sqlx::PgPool;

use super::{SOON, START};
use crate::up::{Place, Supervisor, all_gone};
use fixture::eventually;

/// API keys by their use.
pub struct Keys {
    pub app: String,
    /// Of another tenant, with every scope but admin.
    pub other: String,
    pub replica: String,
    pub trainer: String,
    pub collector: String,
    /// Revoked before it is used.
    pub revoked: String,
}

impl Keys {
    /// Made while the servers run and the roles do not.
    pub async fn make(place: &Place) -> Self {
        let mut servers = place.start(&["stack", "start"]);
        servers
            .says(&["postgres ready", "kafka    ready", "Kafka:"], START)
            .await;
        let run = |args: &[&str]| {
            let output = place.command(args).output().unwrap();
            let error = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "{args:?}: {error}");
            String::from_utf8(output.stdout).unwrap().trim().to_owned()
        };
        run(&["migrate"]);
        let key = |args: &[&str]| run(&[&["key", "create"], args].concat());
        let all = "completions,generations,feedback,read,research,release";
        let keys = Self {
            app: key(&["--scope", all]),
            other: key(&["--scope", all, "--tenant", "other"]),
            replica: key(&["--scope", "replica"]),
            trainer: key(&["--scope", "completions"]),
            collector: key(&["--scope", "feedback,generations"]),
            revoked: key(&["--scope", "feedback", "--label", "doomed"]),
        };
        let listed: Vec<Value> = serde_json::from_str(&run(&["key", "list", "--json"])).unwrap();
        let doomed = listed.iter().find(|key| key["label"] == "doomed").unwrap();
        run(&["key", "revoke", doomed["id"].as_str().unwrap(), "--reason", "lost"]);
        stop(place, servers).await;
        keys
    }

    pub fn all(&self) -> [&String; 6] {
        [
            &self.app,
            &self.other,
            &self.replica,
            &self.trainer,
            &self.collector,
            &self.revoked,
        ]
    }
}

pub async fn stop(place: &Place, mut supervisor: Supervisor<'_>) {
    let family = supervisor.family();
    kill(supervisor.pid(), Signal::SIGTERM).unwrap();
    all_gone(&family, place).await;
    assert!(supervisor.process.wait().unwrap().success(), "{}", place.story());
}

/// Adds to the configuration. It holds keys, so the file is for its owner alone.
pub fn configure(place: &Place, keys: &Keys, traces: &str) {
    let file = place.dir.path().join("springtide.toml");
    let before = fs::read_to_string(&file).unwrap();
    fs::remove_file(&file).unwrap();
    let config = format!(
        "{before}
auth.required = true
auth.limits.key_requests_per_second = 0
serve.api_key = '{replica}'
trainer.api_key = '{trainer}'
telemetry.filter = 'debug'
telemetry.otlp_endpoint = 'http://{traces}/v1/traces'
trainer.realtime.cohort_size = 4
trainer.offline.empty_draws_max = 1
trainer.offline.arrival_timeout_seconds = 5
[[ingest.surface]]
name = 'completion'
horizon_seconds = 20.0
[[ingest.surface]]
name = 'broken'
horizon_seconds = 40.0
reward = 'comment == null ? null : comment.size() < 9 ? 1.0 : double(comment)'
",
        replica = keys.replica,
        trainer = keys.trainer,
    );
    let mut options = fs::OpenOptions::new();
    let mut opened = options.write(true).create_new(true).mode(0o600).open(&file).unwrap();
    std::io::Write::write_all(&mut opened, config.as_bytes()).unwrap();
}

/// A role beside those of `up`, with its log.
pub struct Beside {
    pub name: &'static str,
    pub process: std::process::Child,
    pub url: String,
}

impl Beside {
    pub async fn start(place: &Place, name: &'static str, args: &[&str], listen: &str, more: &[(&str, &str)]) -> Self {
        let [port] = edge::bind::free_ports().unwrap();
        let url = format!("127.0.0.1:{port}");
        let log = fs::File::create(place.dir.path().join(format!("{name}.log"))).unwrap();
        let mut command = place.command(args);
        command.env(listen, &url).envs(more.iter().copied());
        command.env("TMPDIR", place.dir.path().join("tmp"));
        command.stdout(log.try_clone().unwrap()).stderr(log);
        let process = command.stdin(Stdio::null()).spawn().unwrap();
        let beside = Self {
            name,
            process,
            url: format!("http://{url}"),
        };
        eventually(&format!("the {name} answers"), START, async || {
            reqwest::get(format!("{}/health", beside.url)).await.ok()
        })
        .await;
        beside
    }

    pub fn pid(&self) -> i32 {
        i32::try_from(self.process.id()).unwrap()
    }

    pub fn stop(mut self) {
        kill(Pid::from_raw(self.pid()), Signal::SIGTERM).unwrap();
        assert!(self.process.wait().unwrap().success(), "{}", self.name);
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

/// Sends requests, and keeps the answers.
pub struct World {
    pub http: reqwest::Client,
    pub serve: String,
    pub ingest: String,
    pub control: String,
    pub relay: String,
    pub collector: String,
    pub pool: PgPool,
}

pub type Headers<'a> = &'a [(&'a str, &'a str)];
const JSON: Headers<'static> = &[("content-type", "application/json")];

impl World {
    pub async fn send(
        &self,
        method: &str,
        url: &str,
        key: &str,
        headers: Headers<'_>,
        body: Vec<u8>,
    ) -> (u16, Vec<u8>) {
        let mut request = self.http.request(method.parse().unwrap(), url).body(body);
        if !key.is_empty() {
            request = request.bearer_auth(key);
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let answer = request.send().await.unwrap();
        let status = answer.status().as_u16();
        (status, answer.bytes().await.unwrap_or_default().to_vec())
    }

    pub async fn post(&self, url: &str, key: &str, body: &Value) -> (u16, Value) {
        let (status, answer) = self.send("POST", url, key, JSON, body.to_string().into_bytes()).await;
        (status, serde_json::from_slice(&answer).unwrap_or_default())
    }

    /// Posts until the answer has this status.
    pub async fn until(&self, status: u16, url: &str, key: &str, body: &Value) -> Value {
        eventually(&format!("{url} answers {status}"), SOON, async || {
            let (found, answer) = self.post(url, key, body).await;
            (found == status).then_some(answer)
        })
        .await
    }

    pub async fn count(&self, sql: &'static str) -> i64 {
        sqlx::query_scalar(sql).fetch_one(&self.pool).await.unwrap()
    }

    /// Waits until the query counts at least this many.
    pub async fn becomes(&self, what: &str, sql: &'static str, rows: i64) {
        eventually(what, SOON, async || (self.count(sql).await >= rows).then_some(())).await;
    }
}
