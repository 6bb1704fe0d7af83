//! The whole loop with all real parts: the roles as processes of the real binary, the committed
//! base policy, a broker and a database. Feedback becomes a served version, killing a busy role
//! neither loses nor duplicates anything, and a rollback re-bases the line.

use artifact::sign::TrustedKeys;
use edge::bind::free_ports;
use fixture::{SPRINGTIDE, Stack, eventually};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use store::Store;
use uuid::Uuid;

const DEADLINE: Duration = Duration::from_secs(90);

/// The four roles, each a process; killed on drop.
pub struct Fleet {
    config: PathBuf,
    roles: BTreeMap<&'static str, Child>,
    pub serve: String,
    ingest: String,
    pub control: String,
    pub train: String,
    http: reqwest::Client,
}

impl Fleet {
    pub fn start(stack: &Stack) -> Self {
        let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("demo/models/base");
        Self::start_with(stack, &base, "")
    }

    /// `ingest_section` is added to `[ingest]`.
    pub fn start_with(stack: &Stack, base: &Path, ingest_section: &str) -> Self {
        let [serve, ingest, control, train] = free_ports().unwrap();
        let config = stack.dir.path().join("springtide.toml");
        let text = format!(
            r#"
            [policy]
            base = {base:?}
            store = {store:?}
            keys = {keys:?}
            [listen]
            serve = "127.0.0.1:{serve}"
            ingest = "127.0.0.1:{ingest}"
            control = "127.0.0.1:{control}"
            train = "127.0.0.1:{train}"
            [postgres]
            url = {database:?}
            connections_max = 6
            [postgres.urls]
            serve = {as_serve:?}
            ingest = {as_ingest:?}
            control = {as_control:?}
            train = {as_train:?}
            [kafka]
            brokers = {brokers:?}
            librdkafka_file = {kafka_file:?}
            topic_prefix = {prefix:?}
            [ingest]
            partitions = 2
            {ingest_section}
            [[ingest.surface]]
            name = "completion"
            horizon_seconds = 1.0
            [trainer.realtime]
            cohort_size = 4
            [trainer.realtime.step.optimiser]
            learning_rate = 5e-5 # the guard would refuse the first step of a cohort of four at the default
            "#,
            store = stack.store_url,
            keys = stack.keys_dir,
            database = stack.database_url,
            as_serve = stack.url_of("serve"),
            as_ingest = stack.url_of("ingest"),
            as_control = stack.url_of("control"),
            as_train = stack.url_of("train"),
            brokers = stack.kafka.brokers,
            kafka_file = stack.kafka_file,
            prefix = stack.kafka.topic_prefix,
        );
        std::fs::write(&config, text).unwrap();
        let mut fleet = Fleet {
            config,
            roles: BTreeMap::new(),
            serve: format!("http://127.0.0.1:{serve}"),
            ingest: format!("http://127.0.0.1:{ingest}"),
            control: format!("http://127.0.0.1:{control}"),
            train: format!("http://127.0.0.1:{train}"),
            http: reqwest::Client::builder()
                .timeout(Duration::from_secs(20))
                .build()
                .unwrap(),
        };
        fleet.springtide(&["migrate"]); // notes in the audit what was there before
        fleet.register_replica();
        for role in ["ingest", "control", "train", "serve"] {
            fleet.spawn(role);
        }
        fleet
    }

    /// What the replica samples may be trained on.
    fn register_replica(&self) {
        let key = self.config.with_file_name(".springtide/serve/sampler.key");
        // the replica is not running yet, so it has not made its key
        edge::sampler::SamplerKey::load_or_create(&key).unwrap();
        let key = key.to_str().unwrap();
        self.springtide(&["sampler", "add", "--name", "replica-1", "--key", key]);
    }

    /// Runs a command, which must succeed. Returns what it printed.
    pub fn springtide(&self, arguments: &[&str]) -> String {
        let mut command = Command::new(&*SPRINGTIDE);
        let output = command
            .arg("--config")
            .arg(&self.config)
            .args(arguments)
            .output()
            .unwrap();
        let (printed, errors) = (
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr),
        );
        assert!(output.status.success(), "{arguments:?}: {printed}{errors}");
        printed.into_owned()
    }

    /// Starts a role, or starts it again.
    pub fn spawn(&mut self, role: &'static str) {
        let log = std::fs::File::options()
            .create(true)
            .append(true)
            .open(self.config.with_file_name(format!("{role}.log")))
            .unwrap();
        let child = Command::new(&*SPRINGTIDE)
            .arg("--config")
            .arg(&self.config)
            .arg(role)
            .env("OMP_NUM_THREADS", "1")
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        if let Some(mut old) = self.roles.insert(role, child) {
            old.kill().ok();
            old.wait().unwrap();
        }
    }

    /// Sends SIGKILL.
    pub fn kill(&mut self, role: &'static str) {
        let child = self.roles.get_mut(role).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Sends SIGKILL and starts the role again.
    pub fn kill_and_restart(&mut self, role: &'static str) {
        self.kill(role);
        self.spawn(role);
    }

    /// Adds sections to the configuration, for roles that start later.
    pub fn configure(&self, sections: &str) {
        let before = std::fs::read_to_string(&self.config).unwrap();
        std::fs::write(&self.config, format!("{before}\n{sections}\n")).unwrap();
    }

    /// The choice of one completion; `None` while the fleet cannot answer.
    pub async fn complete(&self, user: &str) -> Option<Value> {
        let body = json!({
            "model": "demo", "prompt": "fn main() {\n    let mut map = HashMap::<|cut|>", "max_tokens": 6, "user": user,
        });
        let response = self
            .http
            .post(format!("{}/v1/completions", self.serve))
            .json(&body)
            .send()
            .await
            .ok()?;
        let ok = response.status().is_success();
        let answer: Value = response.json().await.ok()?;
        ok.then(|| answer["choices"][0].clone())
    }

    /// Sends feedback until it is acknowledged, each time with the same id, as a careful client
    /// does.
    async fn feedback(&self, generation: &str, accept: bool) {
        let id = Uuid::now_v7();
        let body = json!({"id": id, "generation_id": generation, "metric_name": "accept", "value": accept});
        eventually("feedback is acknowledged", DEADLINE, async || {
            let sent = self
                .http
                .post(format!("{}/v1/feedback", self.ingest))
                .json(&body)
                .send()
                .await
                .ok()?;
            sent.status().is_success().then_some(())
        })
        .await;
    }

    /// Users send requests and feedback until the champion serves a version above `version`;
    /// returns that choice.
    pub async fn until_version_above(&self, version: i64, acknowledged: &mut Vec<Uuid>) -> Value {
        self.until_arm_above("champion", version, acknowledged).await
    }

    async fn until_arm_above(&self, arm: &str, version: i64, acknowledged: &mut Vec<Uuid>) -> Value {
        let mut n = 0u32;
        let user_of = |n: u32| format!("user-{}", n % 20);
        eventually("a newer version serves", DEADLINE, async || {
            n += 1;
            let choice = self.complete(&user_of(n)).await?;
            let id = choice["generation_id"].as_str()?.to_string();
            acknowledged.push(id.parse().ok()?);
            if choice["declined"] != true {
                self.feedback(&id, n.is_multiple_of(3)).await;
            }
            (choice["arm"] == arm && choice["version"].as_i64()? > version).then_some(choice)
        })
        .await
    }

    async fn champion(&self) -> Option<i64> {
        let aliases: Value = self
            .http
            .get(format!("{}/v1/aliases", self.control))
            .send()
            .await
            .ok()?
            .json()
            .await
            .ok()?;
        let all = aliases["aliases"].as_array()?;
        all.iter().find(|a| a["alias"] == "champion")?["version"].as_i64()
    }
}

/// The clients of `python/` complete and give feedback, if `make test` names a Python that has them.
/// Returns the generations that were acknowledged.
async fn ask_from_python(stack: &Stack, fleet: &Fleet) -> Vec<Uuid> {
    #[derive(serde::Deserialize)]
    struct Sent {
        generations: Vec<Uuid>,
        feedback: Vec<Uuid>,
    }
    let Some(python) = std::env::var_os("SPRINGTIDE_PYTHON") else {
        eprintln!("without the clients of python/: SPRINGTIDE_PYTHON names no Python that has them");
        return vec![];
    };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("python/tests/against_stack.py");
    let mut command = tokio::process::Command::new(python);
    command
        .arg(script)
        .env("SPRINGTIDE_SERVE", &fleet.serve)
        .env("SPRINGTIDE_INGEST", &fleet.ingest)
        .env_remove("SPRINGTIDE_API_KEY")
        .kill_on_drop(true);
    let output = tokio::time::timeout(DEADLINE, command.output()).await.unwrap().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let sent: Sent = serde_json::from_slice(&output.stdout).unwrap();
    eventually("each feedback event of Python is a row", DEADLINE, async || {
        let rows: i64 = sqlx::query_scalar("select count(*) from feedback where id = any($1)")
            .bind(&sent.feedback)
            .fetch_one(&stack.pool)
            .await
            .ok()?;
        (rows == sent.feedback.len() as i64).then_some(())
    })
    .await;
    sent.generations
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for (role, child) in &mut self.roles {
            child.kill().ok();
            child.wait().ok();
            if std::thread::panicking() {
                let log =
                    std::fs::read_to_string(self.config.with_file_name(format!("{role}.log"))).unwrap_or_default();
                let from = log.len().saturating_sub(3000);
                eprintln!("--- the end of {role}'s log\n{}", log.get(from..).unwrap_or(&log));
            }
        }
    }
}

/// Every acknowledged generation is a row, every row has one disposition, and no generation was
/// trained on twice.
async fn check_ledger(stack: &Stack, acknowledged: &[Uuid]) {
    let stored: i64 = eventually("every acknowledged generation is a row", DEADLINE, async || {
        let n: i64 = sqlx::query_scalar("select count(*) from generation where id = any($1)")
            .bind(acknowledged)
            .fetch_one(&stack.pool)
            .await
            .ok()?;
        (n == acknowledged.len() as i64).then_some(n)
    })
    .await;
    assert_eq!(stored, acknowledged.len() as i64);
    let (rows, ids): (i64, i64) = sqlx::query_as("select count(*), count(distinct generation_id) from ledger")
        .fetch_one(&stack.pool)
        .await
        .unwrap();
    assert_eq!(rows, ids, "a generation has more than one disposition");
    let uneven: i64 = sqlx::query_scalar(
        "select count(*) from (
             select s.step from step s left join disposition d on d.run_id = s.run_id and d.step = s.step and d.kind = 'trained'
             group by s.run_id, s.step having count(d.generation_id) <> 4) as t",
    )
    .fetch_one(&stack.pool)
    .await
    .unwrap();
    assert_eq!(uneven, 0, "a committed step trained on other than its cohort of 4");
}

/// The content hash of a version is the same in the choice, the database and the stored checkpoint.
async fn check_root(stack: &Stack, choice: &Value) {
    let version = choice["version"].as_i64().unwrap();
    let row: Vec<u8> = sqlx::query_scalar("select root from version where policy = 'demo' and serial = $1")
        .bind(version)
        .fetch_one(&stack.pool)
        .await
        .unwrap();
    let store = Store::open(&stack.store_url).unwrap();
    let trusted = TrustedKeys::load(&stack.keys_dir).unwrap();
    let materialized = store.materialize("demo", version, &trusted, &[]).await.unwrap();
    assert_eq!(
        materialized.checkpoint.root().to_string(),
        choice["root"].as_str().unwrap()
    );
    assert_eq!(materialized.checkpoint.root().0.as_slice(), row.as_slice());
}

#[tokio::test(flavor = "multi_thread")]
async fn feedback_becomes_a_served_version_kills_lose_nothing_and_a_rollback_rebases() {
    let stack = Stack::start("spine").await;
    let mut fleet = Fleet::start(&stack);
    let mut acknowledged = Vec::new();

    let first = eventually("the fleet answers", DEADLINE, async || fleet.complete("someone").await).await;
    acknowledged.push(first["generation_id"].as_str().unwrap().parse().unwrap());
    let base = first["version"].as_i64().unwrap();
    acknowledged.extend(ask_from_python(&stack, &fleet).await);
    let learned = fleet.until_version_above(base, &mut acknowledged).await;
    check_root(&stack, &learned).await;

    let parity: f64 = sqlx::query_scalar("select max((metrics #>> '{mismatch,difference_max}')::float8) from step")
        .fetch_one(&stack.pool)
        .await
        .unwrap();
    // another summation order would differ by about 1e-5, another version or a wrong mask by 1e-3
    // or more
    assert_eq!(
        parity, 0.0,
        "sampler and trainer must compute identical log-probabilities"
    );

    // each role is killed while the others are busy
    let mut version = learned["version"].as_i64().unwrap();
    for role in ["train", "ingest", "serve", "control"] {
        fleet.kill_and_restart(role);
        let next = fleet.until_version_above(version, &mut acknowledged).await;
        version = next["version"].as_i64().unwrap();
    }
    check_ledger(&stack, &acknowledged).await;

    // a release engineer rolls back to the base: champion stays there, and learner continues from
    // there until the engineer lets champion follow again
    fleet.springtide(&["release", "rollback", &base.to_string(), "--reason", "worse"]);
    fleet.until_arm_above("learner", version, &mut acknowledged).await;
    assert_eq!(fleet.champion().await, Some(base), "the rollback does not hold");
    fleet.springtide(&["release", "promote", "--reason", "good again"]);
    let after = fleet.until_version_above(version, &mut acknowledged).await;
    let (branch, parent): (i32, Option<i64>) = sqlx::query_as(
        "select v.branch, first.parent from version v
         join version first on first.policy = v.policy and first.branch = v.branch and first.line = v.line
         where v.serial = $1 order by first.serial limit 1",
    )
    .bind(after["version"].as_i64().unwrap())
    .fetch_one(&stack.pool)
    .await
    .unwrap();
    assert_eq!(
        (branch, parent),
        (1, Some(base)),
        "the line was not re-based on the version that served"
    );
    assert!(fleet.champion().await.unwrap() > version);
    check_root(&stack, &after).await;
    fleet.springtide(&["audit", "verify"]);
}
