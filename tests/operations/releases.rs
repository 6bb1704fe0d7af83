//! What a release wrote, later builds read and go on with: its database, log, store and spool, what its replicas ask of
//! `control`, and what its clients may ask of every role. Each folder in `releases/` is of one release.
//!
//! With SPRINGTIDE_WRITE_RELEASE=1, this build writes the folder of its own version: once, before it is tagged.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Bytes;
use axum::http::{Method, Uri};
use axum::response::IntoResponse;
use model::config::ModelConfig;
use model::random_checkpoint;
use nix::sys::signal::{Signal, kill};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use uuid::Uuid;

use super::up::{Place, Supervisor, all_gone};
use fixture::{SPRINGTIDE, eventually, run, succeed};

mod schemas;

const START: Duration = Duration::from_secs(120);
const LEARNED: Duration = Duration::from_secs(120);
const SOON: Duration = Duration::from_secs(60);
const PROMPT: &str = "fn main() {\n    let mut <|cut|>";
/// So many events wait in the spool.
const SPOOLED: usize = 3;
/// In the order of their ports.
const ROLES: [&str; 4] = ["serve", "ingest", "control", "train"];
const CONFIG: &str = "
[trainer.realtime]
cohort_size = 8
staleness_max = 64

[[ingest.surface]]
name = \"completion\"
horizon_seconds = 1.0
decline = 0.0

[[release.arm]]
alias = \"learner\"
weight = 0.5
[[release.arm]]
alias = \"base\"
weight = 0.5
";

/// What is known of a release beside its state.
#[derive(Serialize, Deserialize)]
struct Release {
    /// What it said at the end, by question.
    said: BTreeMap<String, Value>,
    /// A completion.
    greedy: Value,
    /// What its replica asked of `control`, and the status of the answer.
    asked: Vec<Asked>,
    /// Ids of the events in its collector's spool.
    spooled: Vec<Uuid>,
    /// Its API, by role; that of `train` has health and metrics alone.
    openapi: BTreeMap<String, Value>,
}

#[derive(Clone, PartialEq, Serialize, Deserialize)]
struct Asked {
    path: String,
    body: Value,
    status: u16,
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_release_wrote_is_read_and_gone_on_with() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/operations/releases");
    if std::env::var_os("SPRINGTIDE_WRITE_RELEASE").is_some() {
        write(&folder.join(env!("CARGO_PKG_VERSION"))).await;
    }
    let mut releases = 0;
    for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
        if entry.path().is_dir() {
            read(&entry.path()).await;
            releases += 1;
        }
    }
    assert!(releases > 0);
}

/// A place whose policy begins with the release's base.
struct Kept {
    place: Place,
    base: PathBuf,
}

impl Kept {
    fn new(folder: &Path) -> Self {
        let place = Place::new();
        let config = place.dir.path().join("springtide.toml");
        let text = fs::read_to_string(&config).unwrap();
        let lines = text.lines().filter(|line| !line.starts_with("policy.base"));
        fs::write(&config, lines.collect::<Vec<_>>().join("\n") + CONFIG).unwrap();
        Kept {
            place,
            base: folder.join("base"),
        }
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = self.place.command(args);
        command.env("SPRINGTIDE__POLICY__BASE", &self.base);
        command.env("SPRINGTIDE__POLICY__NAME", "kept");
        // what is kept stays, whatever the date is
        command.env("SPRINGTIDE__INGEST__RETENTION_DAYS", "0");
        command.env("SPRINGTIDE__KAFKA__LOG_RETENTION_HOURS", "876000");
        command
    }

    async fn start(&self, command: Command, says: &str) -> Supervisor<'_> {
        let mut running = self.place.start_command(command);
        running.says(&[says], START).await;
        running
    }

    async fn stop(&self, mut running: Supervisor<'_>) {
        let family = running.family();
        kill(running.pid(), Signal::SIGINT).unwrap();
        all_gone(&family, &self.place).await;
        assert!(running.process.wait().unwrap().success(), "{}", self.place.story());
    }

    fn url(&self, role: &str) -> String {
        let nth = ROLES.iter().position(|one| *one == role).unwrap();
        format!("http://127.0.0.1:{}", self.place.ports[nth])
    }

    /// A program of Postgres, on the stack's own server.
    fn postgres(&self, program: &str) -> Command {
        let parts: Value = serde_json::from_str(&succeed(&mut self.command(&["stack", "fetch", "--json"]))).unwrap();
        let mut command = Command::new(Path::new(parts["postgres"].as_str().unwrap()).join("bin").join(program));
        command.arg("--host").arg(self.place.state("postgres"));
        command.args(["--port", &self.place.ports[4].to_string(), "--username", "postgres"]);
        command
    }

    async fn complete(&self, user: &str) -> Value {
        let body = json!({"model": "kept", "prompt": PROMPT, "max_tokens": 4, "user": user});
        let answer = post(&format!("{}/v1/completions", self.url("serve")), &body).await;
        assert_eq!(answer.0, 200, "{}", answer.1);
        answer.1["choices"][0].clone()
    }

    /// Accepts and rejects until an answer is of a version after this one. Returns it.
    async fn learn(&self, after: i64) -> i64 {
        let mut users = 0;
        eventually("a newer version answers", LEARNED, async || {
            users += 1;
            let choice = self.complete(&format!("user-{users}")).await;
            let body =
                json!({"generation_id": choice["generation_id"], "metric_name": "accept", "value": users % 2 == 0});
            let answer = post(&format!("{}/v1/feedback", self.url("ingest")), &body).await;
            assert_eq!(answer.0, 200, "{}", answer.1);
            let version = choice["version"].as_i64().unwrap();
            (version > after).then_some(version)
        })
        .await
    }

    /// What must stay true of what is stored.
    async fn said(&self) -> BTreeMap<String, Value> {
        let mut said = BTreeMap::new();
        let ledger = format!("{}/v1/ledger", self.url("control"));
        eventually("every horizon has passed", SOON, async || {
            let ledger = get(&ledger).await;
            let over = ledger["open"] == 0;
            said.insert("ledger".to_owned(), ledger);
            over.then_some(())
        })
        .await;
        for question in ["dataset list", "tenant list", "key list", "policy versions"] {
            let mut words: Vec<&str> = question.split(' ').collect();
            words.push("--json");
            let answer = succeed(&mut self.command(&words));
            said.insert(question.to_owned(), serde_json::from_str(&answer).unwrap());
        }
        said
    }

    /// Greedily, of a version that no release moves: the same weights, computed alike.
    async fn greedy(&self) -> Value {
        let body =
            json!({"model": "kept@base", "prompt": PROMPT, "min_tokens": 16, "max_tokens": 16, "temperature": 0});
        let (_, answer) = post(&format!("{}/v1/completions", self.url("serve")), &body).await;
        let choice = &answer["choices"][0];
        assert!(!choice["text"].as_str().unwrap().is_empty(), "{answer}");
        json!({"text": choice["text"], "version": choice["version"]})
    }
}

/// Writes the folder of this build's version.
async fn write(folder: &Path) {
    let _ = fs::remove_dir_all(folder);
    write_base(&folder.join("base"));
    let kept = Kept::new(folder);
    let (asked, proxy) = record(kept.url("control")).await;
    let mut command = kept.command(&["up"]);
    command.env("SPRINGTIDE__CLIENT__CONTROL", &proxy);
    let up = kept.start(command, "Springtide is up.").await;
    kept.learn(1).await;
    let erased = kept.complete("to-erase").await;
    assert!(erased["generation_id"].is_string());
    let place = kept.place.dir.path();
    let receipt = place.join("receipt.json").display().to_string();
    for words in [
        &["tenant", "consent", "acme", "--reason", "contract"][..],
        &["key", "create", "--scope", "feedback", "--label", "web"],
        &["release", "promote", "1", "--reason", "kept"],
        &[
            "erase",
            "--user",
            "to-erase",
            "--reason",
            "asked",
            "--receipt",
            &receipt,
            "--yes",
        ],
    ] {
        succeed(&mut kept.command(words));
    }
    eventually("trajectories are old enough for a dataset", SOON, async || {
        run(&mut kept.command(&["dataset", "create", "accepted"]))
            .0
            .then_some(())
    })
    .await;
    // about an answer that comes later, or never
    let body = json!({"generation_id": Uuid::now_v7(), "metric_name": "accept", "value": true});
    assert_eq!(post(&format!("{}/v1/feedback", kept.url("ingest")), &body).await.0, 200);
    let spooled = spool(&kept).await;
    let greedy = kept.greedy().await;
    let said = kept.said().await;
    let mut openapi = BTreeMap::new();
    for role in ["serve", "ingest", "control"] {
        openapi.insert(role.to_owned(), get(&format!("{}/openapi.json", kept.url(role))).await);
    }
    kept.stop(up).await;
    let servers = kept.start(kept.command(&["stack", "start"]), "Kafka:").await;
    let dump = folder.join("database.dump");
    succeed(
        kept.postgres("pg_dump")
            .arg("--format=custom")
            .arg("--file")
            .arg(dump)
            .arg("springtide"),
    );
    kept.stop(servers).await;
    let mut tar = Command::new("tar");
    tar.args([
        "--create",
        "--gzip",
        "--sparse",
        "--numeric-owner",
        "--exclude=.springtide/postgres",
    ]);
    tar.args([
        "--exclude=.springtide/log",
        "--exclude=up.lock",
        "--exclude=up.json",
        "--file",
    ]);
    tar.arg(folder.join("state.tar.gz")).arg("--directory").arg(place);
    succeed(tar.args([".springtide", "spool", "receipt.json"]));
    let asked = asked.lock().unwrap().clone();
    let release = Release {
        said,
        greedy,
        asked,
        spooled,
        openapi,
    };
    fs::write(folder.join("release.json"), serde_json::to_vec(&release).unwrap()).unwrap();
}

async fn read(folder: &Path) {
    let release: Release = serde_json::from_slice(&fs::read(folder.join("release.json")).unwrap()).unwrap();
    let kept = Kept::new(folder);
    let place = kept.place.dir.path();
    let servers = kept.start(kept.command(&["stack", "start"]), "Kafka:").await;
    for statement in ["drop database springtide", "create database springtide"] {
        succeed(
            kept.postgres("psql")
                .args(["--dbname", "postgres", "--command", statement]),
        );
    }
    let mut restore = kept.postgres("pg_restore");
    succeed(
        restore
            .args(["--exit-on-error", "--no-owner", "--dbname", "springtide"])
            .arg(folder.join("database.dump")),
    );
    // so that every record of its log is read
    let again = "update consumer_offset set next_offset = 0, caught_up_to = null where consumer = 'sink'";
    succeed(
        kept.postgres("psql")
            .args(["--dbname", "springtide", "--command", again]),
    );
    kept.stop(servers).await;
    for entry in fs::read_dir(kept.place.state("")).unwrap().map(Result::unwrap) {
        match entry.path() {
            path if path.ends_with("postgres") => {}
            path if path.is_dir() => fs::remove_dir_all(path).unwrap(),
            path => fs::remove_file(path).unwrap(),
        }
    }
    let mut tar = Command::new("tar");
    tar.arg("--extract").arg("--file").arg(folder.join("state.tar.gz"));
    succeed(tar.arg("--directory").arg(place));

    let up = kept.start(kept.command(&["up"]), "Springtide is up.").await;
    let pool = sqlx::PgPool::connect(&kept.place.database_url()).await.unwrap();
    eventually("the log is read again", SOON, async || {
        let read = "select bool_and(caught_up_to is not null and next_offset > 0) from consumer_offset where consumer = 'sink' \
                    and cluster_id <> ''";
        let read: Option<bool> = sqlx::query_scalar(read).fetch_one(&pool).await.unwrap();
        read.unwrap_or_default().then_some(())
    })
    .await;
    // spooled feedback came after what the release said
    let said = kept.said().await;
    for (question, before) in &release.said {
        schemas::within(before, &said[question], question);
    }
    assert_eq!(kept.greedy().await, release.greedy);
    succeed(&mut kept.command(&["policy", "fsck", "--deep"]));
    succeed(&mut kept.command(&["audit", "verify"]));
    succeed(kept.command(&["erase", "--verify"]).arg(place.join("receipt.json")));
    for kind in ["/v1/replicas/", "/v1/tide/", "/v1/swaps"] {
        let is_there = release.asked.iter().any(|asked| asked.path.starts_with(kind));
        assert!(is_there, "its replica asked {kind}");
    }
    for Asked { path, body, status } in &release.asked {
        let answer = post(&format!("{}{path}", kept.url("control")), body).await;
        assert_eq!(answer.0, *status, "{path} of an older replica: {}", answer.1);
    }
    for (role, before) in &release.openapi {
        let now = get(&format!("{}/openapi.json", kept.url(role))).await;
        schemas::check(before, &now, role);
    }
    let collector = collect(&kept, &kept.url("ingest")).await;
    eventually("the spool is in the tables", SOON, async || {
        let stored = sqlx::query_scalar::<_, i64>("select count(*) from feedback where id = any($1)");
        let stored = stored.bind(&release.spooled).fetch_one(&pool).await.unwrap();
        (stored == SPOOLED as i64).then_some(())
    })
    .await;
    pool.close().await;
    drop(collector);
    let newest = said["policy versions"][0]["version"].as_i64().unwrap();
    kept.learn(newest).await;
    kept.stop(up).await;
}

/// A random model with the demo's tokenizer.
fn write_base(folder: &Path) {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("demo/models/base");
    let whole = ModelConfig::from_json(&fs::read(demo.join("config.json")).unwrap()).unwrap();
    let config = ModelConfig {
        hidden_size: 32,
        intermediate_size: 48,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        head_dim: 16,
        tie_word_embeddings: false,
        ..whole
    };
    fs::create_dir_all(folder).unwrap();
    random_checkpoint(&config, 1).write_dir(folder).unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        fs::copy(demo.join(name), folder.join(name)).unwrap();
    }
}

/// Events that a collector took and could not pass on.
async fn spool(kept: &Kept) -> Vec<Uuid> {
    let collector = collect(kept, "http://127.0.0.1:9").await;
    let mut ids = Vec::new();
    for number in 0..SPOOLED {
        let choice = kept.complete(&format!("far-{number}")).await;
        let id = Uuid::now_v7();
        let body =
            json!({"id": id, "generation_id": choice["generation_id"], "metric_name": "comment", "value": "kept"});
        assert_eq!(post(&format!("{}/v1/feedback", collector.url), &body).await.0, 202);
        ids.push(id);
    }
    ids
}

struct Collector {
    url: String,
    process: std::process::Child,
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

async fn collect(kept: &Kept, upstream: &str) -> Collector {
    let [port] = edge::bind::free_ports().unwrap();
    let address = format!("127.0.0.1:{port}");
    let mut command = Command::new(&*SPRINGTIDE);
    command
        .args(["ingest", "--spool", "spool", "--upstream", upstream])
        .current_dir(kept.place.dir.path())
        .env("SPRINGTIDE__LISTEN__INGEST", &address)
        .stderr(std::process::Stdio::null());
    let collector = Collector {
        url: format!("http://{address}"),
        process: command.spawn().unwrap(),
    };
    eventually("the collector answers", SOON, async || {
        let health = reqwest::get(format!("{}/health", collector.url)).await;
        health.is_ok_and(|answer| answer.status() == 200).then_some(())
    })
    .await;
    collector
}

/// Passes requests on to `control`, and keeps the newest of each that replicas make.
async fn record(control: String) -> (Arc<Mutex<Vec<Asked>>>, String) {
    let asked: Arc<Mutex<Vec<Asked>>> = Arc::default();
    let kept = asked.clone();
    let pass = async move |method: Method, uri: Uri, body: Bytes| {
        let path = uri.to_string();
        let is_kept = method == Method::POST
            && ["/v1/replicas/", "/v1/tide/", "/v1/swaps"]
                .iter()
                .any(|kind| path.starts_with(kind));
        let request = reqwest::Client::new().request(method, format!("{control}{path}"));
        let answer = request
            .header("content-type", "application/json")
            .body(body.clone())
            .send()
            .await;
        let Ok(answer) = answer else {
            return axum::http::StatusCode::BAD_GATEWAY.into_response();
        };
        let status = answer.status();
        if is_kept {
            let mut kept = kept.lock().unwrap();
            kept.retain(|one| one.path != path);
            kept.push(Asked {
                path,
                body: serde_json::from_slice(&body).unwrap_or_default(),
                status: status.as_u16(),
            });
        }
        (status, answer.bytes().await.unwrap()).into_response()
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let router = axum::Router::new().fallback(pass);
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    (asked, url)
}

async fn post(url: &str, body: &Value) -> (u16, Value) {
    let answer = reqwest::Client::new().post(url).json(body).send().await.unwrap();
    (answer.status().as_u16(), answer.json().await.unwrap_or_default())
}

async fn get(url: &str) -> Value {
    reqwest::get(url).await.unwrap().json().await.unwrap()
}
