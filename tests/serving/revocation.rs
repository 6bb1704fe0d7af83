//! Each kind of key is stolen, used and revoked in turn, on a live stack: `control`, `ingest` and two
//! replicas as processes of the real binary, with keys required. Shows how long the thief is still
//! accepted, whether both replicas serve the same version afterwards, and whether releases go on.
//!
//! `make bench NAME=revoke` prints the table and writes it to target/bench/revoke.json.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use artifact::assignment::{Assignment, Target};
use artifact::sign::SigningKey;
use edge::audit::Actor;
use edge::auth::key::{self, Created, Grant, NewKey};
use edge::auth::{Scope, Scopes};
use edge::sampler::{self, SamplerKey};
use event_log::feedback_token::issue;
use serde_json::{Value, json};
use store::{Revocation, Store};
use time::OffsetDateTime;
use tokio::process::{Child, Command};
use uuid::Uuid;

use fixture::serving::Publisher;
use fixture::store::policy;
use fixture::{SPRINGTIDE, Stack, eventually, process};

const SOON: Duration = Duration::from_secs(90);
const TEST: Actor<'static> = Actor {
    key: None,
    name: "tests/revocation",
};
/// A thief whose documents were refused this many times in a row is out.
const REFUSED_IN_A_ROW: u32 = 15;
const FORGE_EVERY: Duration = Duration::from_millis(100);

/// A line of the table.
struct Line {
    key: String,
    /// What the thief did with it.
    used_for: &'static str,
    /// From the revocation to the last thing that was accepted from the thief.
    seconds: f64,
    /// Whether both replicas then serve the same version.
    one_version: bool,
    /// From the publication of the next version to both replicas serving it.
    release_seconds: f64,
}

/// A role as a process.
struct Role {
    process: Child,
    url: String,
}

/// What every role's environment has.
struct Settings {
    variables: Vec<(String, String)>,
}

impl Settings {
    fn new(stack: &Stack, replica_key: &str) -> Self {
        let of = |name: &str, value: &str| (format!("SPRINGTIDE__{name}"), value.to_owned());
        let mut variables = vec![
            of("POSTGRES__URL", &stack.database_url),
            of("POLICY__STORE", &stack.store_url),
            of("POLICY__KEYS", stack.keys_dir.to_str().unwrap()),
            of("AUTH__REQUIRED", "true"),
            of("SERVE__API_KEY", replica_key),
            of("TRAINER__API_KEY", "unused"),
            of("TELEMETRY__FILTER", "warn"),
        ];
        let kafka = stack.kafka_environment();
        variables.extend(kafka.map(|(name, value)| (name.to_owned(), value)));
        Self { variables }
    }

    async fn start(&self, stack: &Stack, role: &str, name: &str) -> Role {
        let [port] = edge::bind::free_ports().unwrap();
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        let folder = stack.dir.path().join(name);
        fs::create_dir_all(&folder).unwrap();
        let mut command = Command::new(&*SPRINGTIDE);
        command
            .arg(role)
            .current_dir(&folder)
            .envs(self.variables.iter().map(|(name, value)| (name, value)))
            .env("SPRINGTIDE__STATE_DIR", &folder)
            .env("SPRINGTIDE__SERVE__REPLICA", name)
            .env(
                format!("SPRINGTIDE__LISTEN__{}", role.to_uppercase()),
                address.to_string(),
            );
        let process = process::start(command, address, &stack.dir.path().join(format!("{name}.log"))).await;
        Role {
            process,
            url: format!("http://{address}"),
        }
    }
}

struct Fleet<'a> {
    stack: &'a Stack,
    settings: Settings,
    http: reqwest::Client,
    publisher: Publisher<'a>,
    version: i64,
    control: Role,
    ingest: Role,
    replicas: [Role; 2],
    /// A key that nobody steals.
    honest: String,
    lines: Vec<Line>,
}

async fn make(stack: &Stack, scopes: &[Scope]) -> Created {
    let new = NewKey {
        tenant: "default",
        grant: Grant::Scopes(Scopes::of(scopes)),
        label: "a test",
        expires_at: None,
        replica: None,
        requests_per_second: None,
    };
    key::create(&stack.pool, &new, TEST, "").await.unwrap()
}

impl<'a> Fleet<'a> {
    async fn start(stack: &'a Stack) -> Self {
        // As `springtide up` would: the keys are there before the roles.
        for (name, role) in [("root", "root"), ("trainer", "trainer"), ("release", "release")] {
            let (success, _, error) = policy(stack, &["new-key", name, "--role", role], true).await;
            assert!(success, "{error}");
        }
        let mut publisher = Publisher::new(stack);
        publisher.publish(1, None, 0).await;
        publisher.publish(2, Some(1), 0).await;
        let replica_key = make(stack, &[Scope::Replica]).await.secret;
        let settings = Settings::new(stack, &replica_key);
        let control = settings.start(stack, "control", "control").await;
        let (ingest, first, second) = tokio::join!(
            settings.start(stack, "ingest", "ingest"),
            settings.start(stack, "serve", "replica-1"),
            settings.start(stack, "serve", "replica-2"),
        );
        let fleet = Self {
            stack,
            settings,
            http: reqwest::Client::new(),
            publisher,
            version: 2,
            control,
            ingest,
            replicas: [first, second],
            honest: make(stack, &[Scope::Admin]).await.secret,
            lines: vec![],
        };
        fleet.until_served(2).await;
        fleet
    }

    async fn send(&self, key: &str, method: &str, url: &str, body: &Value) -> (u16, Value) {
        let request = self.http.request(method.parse().unwrap(), url).bearer_auth(key);
        let answer = request.json(body).send().await.unwrap();
        let status = answer.status().as_u16();
        (status, answer.json().await.unwrap_or_default())
    }

    async fn served(&self, replica: &Role) -> Option<i64> {
        let body = json!({"model": "demo@champion", "prompt": [5, 6, 7], "max_tokens": 1});
        let url = format!("{}/v1/completions", replica.url);
        let (_, answer) = self.send(&self.honest, "POST", &url, &body).await;
        answer["choices"][0]["version"].as_i64()
    }

    async fn until_served(&self, version: i64) {
        for replica in &self.replicas {
            eventually(&format!("both replicas serve version {version}"), SOON, async || {
                (self.served(replica).await == Some(version)).then_some(())
            })
            .await;
        }
    }

    async fn serves_one_version(&self) -> bool {
        let [first, second] = &self.replicas;
        let (first, second) = (self.served(first).await, self.served(second).await);
        first.is_some() && first == second
    }

    /// Publishes the next version of the line. Returns how long both replicas take to serve it.
    async fn release(&mut self) -> f64 {
        let (parent, next) = (self.version, self.version + 1);
        self.publisher.publish(next, Some(parent), 0).await;
        let published = Instant::now();
        self.version = next;
        self.until_served(next).await;
        published.elapsed().as_secs_f64()
    }

    async fn add(&mut self, key: String, used_for: &'static str, seconds: f64) {
        let release_seconds = self.release().await;
        let line = Line {
            key,
            used_for,
            seconds,
            one_version: self.serves_one_version().await,
            release_seconds,
        };
        eprintln!(
            "{:<24} {:<42} {:>7.2} s   one version: {}   releases go on: {:>5.2} s",
            line.key, line.used_for, line.seconds, line.one_version, line.release_seconds
        );
        self.lines.push(line);
    }

    /// The highest epoch that one of the replicas has in force. Their metrics need no key here.
    async fn epochs(&self) -> [i64; 2] {
        let mut epochs = [0; 2];
        for (epoch, replica) in epochs.iter_mut().zip(&self.replicas) {
            let text = reqwest::get(format!("{}/metrics", replica.url)).await.unwrap();
            let text = text.text().await.unwrap();
            let line = text
                .lines()
                .find(|line| line.starts_with("springtide_assignment_epoch{"));
            let value = line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
            *epoch = value.unwrap_or(0.0) as i64;
        }
        epochs
    }

    /// Lets the thief forge until nothing is accepted any longer. Returns the seconds from `revoked`
    /// to what was accepted last.
    async fn until_refused(&self, revoked: Instant, mut forge: impl AsyncFnMut()) -> f64 {
        let (mut last, mut refused, mut seconds) = (self.epochs().await, 0, 0.0);
        while refused < REFUSED_IN_A_ROW {
            assert!(revoked.elapsed() < SOON, "the thief is still accepted");
            forge().await;
            tokio::time::sleep(FORGE_EVERY).await; // the thief's own pace
            let now = self.epochs().await;
            refused += 1;
            if now != last {
                (last, refused, seconds) = (now, 0, revoked.elapsed().as_secs_f64());
            }
        }
        seconds
    }

    /// What a key with this scope opens: method, address, body.
    fn probes(&self, scope: Scope, token: &str) -> Vec<(&'static str, String, Value)> {
        let at = |role: &Role, path: &str| format!("{}{path}", role.url);
        let (control, ingest) = (&self.control, &self.ingest);
        let of_both = |method: &'static str, path: &'static str, body: Value| {
            let probes = self
                .replicas
                .iter()
                .map(move |role| (method, at(role, path), body.clone()));
            probes.collect::<Vec<_>>()
        };
        let prompt = json!({"model": "demo@champion", "prompt": [5, 6, 7], "max_tokens": 1});
        match scope {
            Scope::Feedback | Scope::Teach => {
                let body = json!({"token": token, "metric_name": "accept", "value": true});
                vec![("POST", at(ingest, "/v1/feedback"), body)]
            }
            Scope::Generations => vec![("POST", at(ingest, "/v1/generations"), json!({}))],
            // The scope of a priority is worth nothing alone, so the thief has both.
            Scope::Completions | Scope::Priority => of_both("POST", "/v1/completions", prompt),
            Scope::Replica => {
                let report = json!({"cluster": "c", "policy": "demo", "address": "http://thief", "epoch": 1,
                                    "resident": [], "ready": true});
                vec![("POST", at(control, "/v1/replicas/thief"), report)]
            }
            Scope::Read => {
                let mut probes = of_both("GET", "/v1/models", Value::Null);
                probes.push(("GET", at(control, "/v1/aliases"), Value::Null));
                probes
            }
            Scope::Research => vec![("POST", at(control, "/v1/runs"), json!({}))],
            Scope::Train => vec![(
                "POST",
                at(control, &format!("/v1/runs/{}/cohorts", Uuid::nil())),
                json!({"client_token": "thief"}),
            )],
            Scope::Texts => vec![(
                "POST",
                at(control, &format!("/v1/generations/{}/texts", Uuid::nil())),
                json!({"reason": "theft"}),
            )],
            Scope::Release => vec![("POST", at(control, "/v1/releases"), json!({}))],
            Scope::Admin => {
                let others = Scope::ALL.into_iter().filter(|scope| *scope != Scope::Admin);
                others.flat_map(|scope| self.probes(scope, token)).collect()
            }
        }
    }

    async fn accepted(&self, key: &str, probes: &[(&'static str, String, Value)]) -> usize {
        let mut accepted = 0;
        for (method, url, body) in probes {
            let (status, _) = self.send(key, method, url, body).await;
            accepted += usize::from(!matches!(status, 401 | 403));
        }
        accepted
    }

    async fn api_key(&mut self, scope: Scope, token: &str) {
        let scopes = match scope {
            Scope::Priority => vec![Scope::Priority, Scope::Completions],
            Scope::Teach => vec![Scope::Teach, Scope::Feedback],
            scope => vec![scope],
        };
        let stolen = make(self.stack, &scopes).await;
        let probes = self.probes(scope, token);
        let before = self.accepted(&stolen.secret, &probes).await;
        assert_eq!(before, probes.len(), "the thief gets in with {scope:?}");
        let revoked = Instant::now();
        key::revoke(&self.stack.pool, stolen.id, TEST, "stolen").await.unwrap();
        eventually("every role refuses the key", SOON, async || {
            let version = self.served(&self.replicas[0]).await;
            assert!(version.is_some(), "an honest key is refused");
            (self.accepted(&stolen.secret, &probes).await == 0).then_some(())
        })
        .await;
        let seconds = revoked.elapsed().as_secs_f64();
        let name = format!("API key, {}", scope.as_str());
        self.add(name, "every route of its scope, every role", seconds).await;
    }

    async fn sampler(&mut self) {
        let stolen = SamplerKey::from_seed(&[9; 32]);
        let pool = &self.stack.pool;
        let id = sampler::register(pool, &stolen.public_key(), "replica-9", None, None, TEST)
            .await
            .unwrap();
        let client = make(self.stack, &[Scope::Feedback]).await.secret;
        let about = async || {
            let generation = Uuid::now_v7();
            let soon = OffsetDateTime::now_utc() + time::Duration::hours(1);
            let token = issue(&stolen, "default", generation, generation, soon);
            let body = json!({"token": token, "metric_name": "accept", "value": true});
            let url = format!("{}/v1/feedback", self.ingest.url);
            self.send(&client, "POST", &url, &body).await.0
        };
        assert_eq!(about().await, 200, "the thief's tokens are good");
        let revoked = Instant::now();
        sampler::revoke(pool, &id, TEST, "stolen").await.unwrap();
        // The trainer asks the tables, so what it signed counts no longer from that moment on.
        let fault: Option<String> = sqlx::query_scalar(
            "select provenance_fault($1, 'replica-9', 'demo', 'champion', 2, now(), now() + interval '1 second')",
        )
        .bind(&id)
        .fetch_one(pool)
        .await
        .unwrap();
        assert_eq!(fault.as_deref(), Some("revoked_sampler"));
        eventually("its tokens are refused", SOON, async || {
            (about().await == 400).then_some(())
        })
        .await;
        let seconds = revoked.elapsed().as_secs_f64();
        self.add("sampler".to_owned(), "feedback tokens; generations at once", seconds)
            .await;
    }

    async fn command(&self, arguments: &[&str]) {
        let (success, output, error) = policy(self.stack, arguments, true).await;
        assert!(success, "{arguments:?}: {output}{error}");
    }

    fn move_key(&self, from: &str, to: &str) {
        for extension in ["key", "pub"] {
            let at = |name: &str| self.stack.keys_dir.join(format!("{name}.{extension}"));
            fs::rename(at(from), at(to)).unwrap();
        }
    }

    /// As the release guide says: revoke, move the files away, restart `control`.
    async fn release_key(&mut self) {
        let thief = SigningKey::load_or_create(&self.stack.keys_dir, "release").unwrap();
        let store = Store::open(&self.stack.store_url).unwrap();
        let roots = [1, 2].map(|version| (version, self.publisher.checkpoints[&version].root()));
        let mut epoch = 0;
        let mut forge = async || {
            let [first, second] = self.epochs().await;
            epoch = first.max(second).max(epoch) + 1;
            let (version, root) = roots[usize::try_from(epoch % 2).unwrap()];
            let assignment = Assignment {
                policy: "demo".into(),
                epoch,
                aliases: [("champion".into(), Target { version, root })].into(),
                arms: vec![],
                cluster_arms: Default::default(),
                shadow: 0.0,
                salt: String::new(),
                created_at: OffsetDateTime::now_utc(),
            };
            // `control` may have taken the epoch.
            let _ = store.put_assignment(&assignment, &thief).await;
        };
        eventually("the thief moves the fleet", SOON, async || {
            forge().await;
            let version = self.served(&self.replicas[0]).await;
            version.is_some_and(|version| version <= 2).then_some(())
        })
        .await;
        let revoked = Instant::now();
        self.command(&["revoke", "release", "--by", "root", "--reason", "stolen", "--yes"])
            .await;
        let seconds = self.until_refused(revoked, forge).await;
        self.move_key("release", "release-old");
        self.control.process.kill().await.unwrap();
        self.control = self.settings.start(self.stack, "control", "control").await;
        self.add(
            "release signing key".to_owned(),
            "assignments to older versions",
            seconds,
        )
        .await;
    }

    /// As the release guide says: a new key, which signs what is ours, then the revocation.
    async fn trainer_key(&mut self) {
        self.move_key("trainer", "trainer-old");
        self.command(&["new-key", "trainer", "--role", "trainer"]).await;
        self.command(&["resign", "--by", "trainer"]).await;
        let ours = self.version;
        // The publisher still has the old key: that is the thief, who also writes to the database.
        let forged = std::cell::Cell::new(ours);
        let mut thief = std::mem::replace(&mut self.publisher, Publisher::new(self.stack));
        self.publisher.checkpoints = thief.checkpoints.clone();
        let mut forge = async || {
            let next = forged.get() + 1;
            thief.publish(next, Some(forged.get()), 0).await;
            forged.set(next);
        };
        forge().await;
        self.until_served(forged.get()).await;
        let revoked = Instant::now();
        self.command(&["revoke", "trainer-old", "--by", "root", "--reason", "stolen", "--yes"])
            .await;
        let seconds = self.until_refused(revoked, forge).await;
        // The next version of ours continues from the last one of ours.
        let next = forged.get() + 1;
        self.publisher.publish(next, Some(ours), 0).await;
        self.version = next;
        self.until_served(next).await;
        self.add(
            "trainer signing key".to_owned(),
            "versions of the realtime line",
            seconds,
        )
        .await;
    }

    /// The thief revokes the trainer's key. Then the root key revokes itself, and its revocations no
    /// longer count.
    async fn root_key(&mut self) {
        let keys = &self.stack.keys_dir;
        let thief = SigningKey::load_or_create(keys, "root").unwrap();
        let trainer = SigningKey::load_or_create(keys, "trainer").unwrap();
        let store = Store::open(&self.stack.store_url).unwrap();
        let folder = artifact::sign::TrustedKeys::load(keys).unwrap();
        let revocation = |key: &SigningKey| Revocation {
            policy: "demo".into(),
            key: key.key_id().into(),
            reason: "mischief".into(),
            created_at: OffsetDateTime::now_utc(),
        };
        store.revoke(&revocation(&trainer), &thief, &folder).await.unwrap();
        let failures = self.failures().await;
        let (parent, next) = (self.version, self.version + 1);
        self.publisher.publish(next, Some(parent), 0).await;
        self.version = next;
        eventually("both replicas refuse the trainer's version", SOON, async || {
            let now = self.failures().await;
            (now[0] > failures[0] && now[1] > failures[1]).then_some(())
        })
        .await;
        let revoked = Instant::now();
        self.command(&["revoke", "root", "--by", "root", "--reason", "stolen", "--yes"])
            .await;
        self.command(&["new-key", "root-2", "--role", "root"]).await;
        // A further revocation by the thief does not count.
        let release = SigningKey::load_or_create(keys, "release").unwrap();
        let _ = store.revoke(&revocation(&release), &thief, &folder).await;
        self.until_served(next).await;
        let seconds = revoked.elapsed().as_secs_f64();
        self.add("root signing key".to_owned(), "revoking the trainer's key", seconds)
            .await;
    }

    /// How often each replica could not follow.
    async fn failures(&self) -> [f64; 2] {
        let mut failures = [0.0; 2];
        for (failed, replica) in failures.iter_mut().zip(&self.replicas) {
            let text = reqwest::get(format!("{}/metrics", replica.url)).await.unwrap();
            let text = text.text().await.unwrap();
            let line = text
                .lines()
                .find(|line| line.starts_with("springtide_follow_failures_total"));
            *failed = line
                .and_then(|line| line.rsplit(' ').next()?.parse().ok())
                .unwrap_or(0.0);
        }
        failures
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stolen_key_of_each_kind_is_taken_away_and_releases_go_on() {
    let stack = Stack::start("revocation").await;
    let mut fleet = Fleet::start(&stack).await;
    let replica = SamplerKey::from_seed(&[8; 32]);
    sampler::register(&stack.pool, &replica.public_key(), "replica-8", None, None, TEST)
        .await
        .unwrap();
    let generation = Uuid::now_v7();
    let soon = OffsetDateTime::now_utc() + time::Duration::hours(1);
    let token = issue(&replica, "default", generation, generation, soon);
    for scope in Scope::ALL {
        fleet.api_key(scope, &token).await;
    }
    fleet.sampler().await;
    fleet.release_key().await;
    fleet.trainer_key().await;
    fleet.root_key().await;
    assert!(fleet.lines.iter().all(|line| line.one_version));
    if let Ok(path) = std::env::var("SPRINGTIDE_REVOKE_JSON") {
        let line = |line: &Line| {
            json!({
                "key": line.key, "used_for": line.used_for, "seconds": line.seconds,
                "one_version": line.one_version, "release_seconds": line.release_seconds,
            })
        };
        let lines: Vec<Value> = fleet.lines.iter().map(line).collect();
        fs::create_dir_all(Path::new(&path).parent().unwrap()).unwrap();
        fs::write(&path, serde_json::to_vec_pretty(&json!({ "keys": lines })).unwrap()).unwrap();
        println!("{path}");
    }
}
