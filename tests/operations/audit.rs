//! The audit as a whole: every change that a person, a key or a configuration makes is in it, and
//! `springtide audit verify` finds what somebody changed in the tables without Springtide.

use std::path::Path;
use std::time::Duration;

use ingest::reward::{Definition, stored};
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};

use fixture::control::Control;
use fixture::serving::Publisher;
use fixture::store::policy;
use fixture::{Stack, eventually, run, succeed};

const SOON: Duration = Duration::from_secs(60);
/// What `audit verify` compares, and the tables that explain them.
const TABLES: [&str; 12] = [
    "tenant",
    "api_key",
    "policy",
    "tenant_consent",
    "sampler",
    "reward_definition",
    "run",
    "dataset",
    "experiment",
    "assignment",
    "release",
    "transition",
];

fn springtide(stack: &Stack, args: &[&str]) -> (bool, String, String) {
    run(&mut stack.springtide(args))
}

fn done(stack: &Stack, args: &[&str]) -> String {
    succeed(&mut stack.springtide(args))
}

fn rows(stack: &Stack) -> Vec<Value> {
    let page = done(stack, &["audit", "list", "--limit", "1000", "--json"]);
    let mut rows: Vec<Value> = serde_json::from_str(&page).unwrap();
    rows.reverse();
    rows
}

/// The rows of one kind of action, oldest first.
fn rows_of(stack: &Stack, kind: &str) -> Vec<Value> {
    let of_kind = |row: &Value| row["action"].as_str().unwrap().starts_with(&format!("{kind}."));
    rows(stack).into_iter().filter(of_kind).collect()
}

fn actions(rows: &[Value]) -> Vec<&str> {
    rows.iter().map(|row| row["action"].as_str().unwrap()).collect()
}

/// Somebody who may do anything in the database.
struct Superuser(PgConnection);

impl Superuser {
    async fn connect(stack: &Stack) -> Self {
        let mut connection = PgConnection::connect(&stack.database_url).await.unwrap();
        // without triggers and foreign keys
        let replica = "set session_replication_role = replica";
        connection.execute(replica).await.unwrap();
        Self(connection)
    }

    async fn run(&mut self, sql: impl Into<String>) {
        self.0.execute(AssertSqlSafe(sql.into())).await.unwrap();
    }

    async fn keep(&mut self) {
        for table in TABLES {
            self.run(format!("create table kept_{table} as select * from {table}"))
                .await;
        }
    }

    async fn restore(&mut self) {
        for table in TABLES {
            self.run(format!(
                "delete from {table}; insert into {table} select * from kept_{table}"
            ))
            .await;
        }
    }
}

async fn post(control: &Control, path: &str, key: &str, body: Value) -> Value {
    let url = format!("http://127.0.0.1:{}{path}", control.port);
    let request = reqwest::Client::new().post(url).bearer_auth(key).json(&body);
    let answer = request.send().await.unwrap();
    let (status, body): (_, Value) = (answer.status(), answer.json().await.unwrap());
    assert!(status.is_success(), "{path}: {status} {body}");
    body
}

/// As `springtide ingest` does when it starts.
async fn configure(stack: &Stack, surfaces: Vec<Definition>) {
    let options = ingest::Options {
        surface: surfaces,
        ..ingest::Options::default()
    };
    stored::store(&stack.pool, options.rules().unwrap()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn every_change_is_audited_and_every_change_without_springtide_is_found() {
    let stack = Stack::start("audit_all").await;
    done(&stack, &["migrate"]);
    let research = done(&stack, &["key", "create", "--role", "research"]);
    let release = done(
        &stack,
        &["key", "create", "--role", "release", "--label", "night shift"],
    );
    let keys: Vec<Value> = serde_json::from_str(&done(&stack, &["key", "list", "--json"])).unwrap();
    let id_of = |role: &str| keys.iter().find(|key| key["role"] == role).unwrap()["id"].clone();
    let mut publisher = Publisher::new(&stack);
    publisher.publish(1, None, 0).await;
    publisher.publish(2, Some(1), 0).await;
    let required = [
        ("SPRINGTIDE__AUTH__REQUIRED", "true"),
        ("SPRINGTIDE__SERVE__API_KEY", "unused"),
        ("SPRINGTIDE__TRAINER__API_KEY", "unused"),
    ];
    let control = Control::start(&stack, &required).await;
    eventually("the champion serves version 2", SOON, async || {
        let champion = "select version from alias where alias = 'champion'";
        let version: Option<i64> = sqlx::query_scalar(champion).fetch_optional(&stack.pool).await.unwrap();
        (version == Some(2)).then_some(())
    })
    .await;

    // Runs, with the key that asked.
    let task = json!({"prompt": "1 + 1 =", "answer": "2"});
    let body = json!({"kind": "grpo", "steps": 3, "tasks": [task]});
    let run = post(&control, "/v1/runs", &research, body).await["id"].clone();
    let id = run.as_str().unwrap();
    for request in ["pause", "resume", "pause"] {
        post(&control, &format!("/v1/runs/{id}/{request}"), &research, json!({})).await;
    }
    let of_run = rows_of(&stack, "run");
    let of_run: Vec<Value> = of_run.into_iter().filter(|row| row["subject"] == run).collect();
    assert_eq!(actions(&of_run), ["run.create", "run.pause", "run.resume", "run.pause"]);
    assert!(
        of_run.iter().all(|row| row["key_id"] == id_of("research")),
        "{of_run:?}"
    );
    assert!(
        of_run[0]["detail"]
            .as_str()
            .unwrap()
            .contains("1 tasks, from version 2")
    );

    // Releases.
    let pin = json!({"kind": "pin", "alias": "champion", "version": 1, "reason": "worse"});
    post(&control, "/v1/releases", &release, pin).await;
    let pinned = rows_of(&stack, "release").pop().unwrap();
    assert_eq!(
        (&pinned["action"], &pinned["key_id"]),
        (&json!("release.pin"), &id_of("release"))
    );

    // Reward definitions that change with the configuration, once each.
    configure(&stack, vec![Definition::completion()]).await;
    let before = rows_of(&stack, "reward").len();
    let changed = Definition {
        accept: 0.5,
        ..Definition::completion()
    };
    configure(&stack, vec![changed.clone()]).await;
    configure(&stack, vec![changed]).await;
    let defined = rows_of(&stack, "reward");
    assert_eq!(defined.len(), before + 1);
    let newest = defined.last().unwrap();
    assert_eq!(newest["subject"], "completion@2");
    assert!(
        newest["detail"].as_str().unwrap().contains("\"accept\":0.5"),
        "{newest}"
    );
    assert!(
        newest["actor"].as_str().unwrap().starts_with("the role ingest on "),
        "{newest}"
    );

    // A tenant, and a sampler.
    done(
        &stack,
        &[
            "key",
            "create",
            "--role",
            "serving",
            "--tenant",
            "acme",
            "--expires",
            "90d",
        ],
    );
    assert_eq!(rows_of(&stack, "tenant").pop().unwrap()["subject"], "acme");
    done(&stack, &["sampler", "new-key", "sampler.key"]);
    done(&stack, &["sampler", "add", "--name", "r1", "--key", "sampler.key"]);
    let revoked = done(&stack, &["key", "list", "--json", "--tenant", "acme"]);
    let revoked: Vec<Value> = serde_json::from_str(&revoked).unwrap();
    let acme = revoked[0]["id"].as_str().unwrap().to_owned();
    done(&stack, &["key", "revoke", &acme, "--reason", "stolen"]);
    drop(control); // its loop would answer the attacks
    let whole = done(&stack, &["audit", "verify"]);
    assert!(whole.contains("in order, as the tables say"), "{whole}");

    let mut attacker = Superuser::connect(&stack).await;
    attacker.keep().await;
    let insert_key = "insert into api_key (tenant_id, role, digest, created_at) \
                      values ('default', 'admin', sha256('mine'), '2020-01-01')";
    let insert_run = "insert into run (kind, policy, line, status, config, created_at) \
                      values ('grpo', 'demo', 'run-x', 'queued', '{}', '2020-01-01')";
    let moved = |kind: &str| {
        format!(
            "insert into assignment (policy, epoch, alias, version, follows) values ('demo', 99, 'champion', 2, 'realtime');
             with r as (insert into release (policy, alias, from_version, to_version, kind, status)
                        values ('demo', 'champion', 1, 2, '{kind}', 'done') returning id)
             insert into transition (release_id, epoch, actor, reason) select id, 99, 'night shift', 'worse' from r"
        )
    };
    let set = |table: &str, change: &str| format!("update {table} set {change}");
    // the release loop may have moved another alias after the pin
    let pinned = "where epoch = (select max(epoch) from assignment where alias = 'champion')";
    let attacks = [
        // keys
        (insert_key.to_owned(), "is not in the audit"),
        (set("api_key", "role = 'admin' where role = 'release'"), "is not what it was made by key.create"),
        (set("api_key", "digest = sha256('mine') where role = 'release'"), "is not what it was made by"),
        (set("api_key", "tenant_id = 'default' where tenant_id = 'acme'"), "is not what it was made by"),
        (set("api_key", "revoked_at = null where revoked_at is not null"), "is not what it was made by key.revoke"),
        (set("api_key", "expires_at = null where expires_at is not null"), "is not what it was made by"),
        ("delete from api_key where role = 'serving'".to_owned(), "somebody removed it"),
        ("insert into tenant (id) values ('mallory')".to_owned(), "tenant mallory is not in the audit"),
        // policies and consents
        (set("policy", "tenant_id = 'acme'"), "policy demo is not what it was made by"),
        (
            "insert into tenant_consent (policy, tenant_id, given_by) values ('demo', 'acme', 'acme')".to_owned(),
            "is not in the audit",
        ),
        // samplers
        (
            "insert into sampler (id, public_key, name) values ('x', sha256('mine'), 'r1')".to_owned(),
            "sampler x is not in the audit",
        ),
        (set("sampler", "policy = null"), "is not what it was made by sampler.add"),
        (set("sampler", "expires_at = '2020-01-01'"), "is not what it was made by sampler.add"),
        // rewards
        (
            "insert into reward_definition values ('completion', 9, '{}', '2020-01-01')".to_owned(),
            "reward completion@9 is not in the audit",
        ),
        (
            set("reward_definition", "definition = definition || '{\"accept\": 100}' where version = 2"),
            "reward completion@2 is not what it was made by",
        ),
        // runs
        (insert_run.to_owned(), "is not in the audit"),
        (set("run", "config = config || '{\"learning_rate\": 1}' where kind = 'grpo'"), "is not what it was made by"),
        (set("run", "base_version = 1 where kind = 'grpo'"), "is not what it was made by"),
        (set("run", "status = 'queued', reason = null where kind = 'grpo'"), "a request paused it, but it goes on"),
        (
            set("run", "status = 'cancelled', reason = 'cancelled by request' where kind = 'grpo'"),
            "its row says that a request canceled it, but none did",
        ),
        // datasets
        (
            "insert into dataset (policy, name, version, tenant_id, query, created_by, trajectories, generations, digest) \
             values ('demo', 'mine', 1, 'default', '{}', 'night shift', 0, 0, '')"
                .to_owned(),
            "dataset demo/mine@1 is not in the audit",
        ),
        // arms
        (
            set("experiment", "arms = jsonb_set(arms, '{0,weight}', '0.9')"),
            "is not what it was made by experiment.configure",
        ),
        (set("experiment", "salt = 'mine'"), "is not what it was made by experiment.configure"),
        (
            "insert into experiment (policy, epoch, salt, arms, source, actor, reason) \
             values ('demo', 99, '', '[]', 'request', 'night shift', '')"
                .to_owned(),
            "is not in the audit",
        ),
        ("delete from experiment".to_owned(), "somebody removed it"),
        // assignments
        (
            "insert into assignment (policy, epoch, alias, version) values ('demo', 99, 'champion', 2)".to_owned(),
            "epoch 99: no release led to it",
        ),
        (moved("pin"), "epoch 99: the audit has no request to pin it"),
        (moved("follow"), "epoch 99: nobody requested it"),
        (
            "insert into assignment (policy, epoch, alias, version, follows) values ('demo', 99, 'mine', 2, 'realtime'); \
             with r as (insert into release (policy, alias, to_version, kind, status)
                        values ('demo', 'mine', 2, 'follow', 'done') returning id)
             insert into transition (release_id, epoch, actor, reason) select id, 99, 'follow', '' from r"
                .to_owned(),
            "alias mine of demo, epoch 99: nobody requested it",
        ),
        (
            set("assignment", &format!("version = 2 {pinned}")),
            "its release names version 1",
        ),
        (
            format!("delete from assignment {pinned}"),
            "but no assignment: somebody removed it",
        ),
        (set("transition", "actor = 'day shift' where actor = 'night shift'"), "names another person or reason"),
    ];
    for (attack, found) in attacks {
        attacker.run(attack.clone()).await;
        let (success, faults, error) = springtide(&stack, &["audit", "verify"]);
        assert!(!success && faults.contains(found), "{attack}: {faults}{error}");
        attacker.restore().await;
    }
    let whole = done(&stack, &["audit", "verify"]);
    assert!(whole.contains("in order, as the tables say"), "{whole}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_there_before_the_audit_is_noted_once_and_no_time_of_a_row_is_believed() {
    let stack = Stack::start("audit_before").await;
    let old = [
        "insert into tenant (id) values ('acme')",
        "insert into api_key (tenant_id, role, digest) values ('acme', 'serving', sha256('old'))",
        "insert into sampler (id, public_key, name) values ('old', sha256('old'), 'r1')",
        "insert into reward_definition (surface, version, definition) values ('chat', 1, '{\"accept\": 0.50}')",
        "insert into run (kind, policy, line, status, reason, config) \
         values ('realtime', 'demo', 'realtime', 'paused', 'paused by request', '{}')",
        "insert into assignment (policy, epoch, alias, version) values ('demo', 7, 'champion', 1)",
    ];
    for row in old {
        stack.pool.execute(row).await.unwrap();
    }
    let (success, _, error) = springtide(&stack, &["audit", "verify"]);
    assert!(!success && error.contains("springtide migrate"), "{error}");
    done(&stack, &["migrate"]);
    let noted = rows(&stack);
    for action in [
        "tenant.known",
        "key.known",
        "sampler.known",
        "reward.known",
        "run.known",
        "release.known",
    ] {
        assert!(actions(&noted).contains(&action), "{action}: {noted:?}");
    }
    done(&stack, &["audit", "verify"]);
    // A key of before goes on like any other.
    let keys: Vec<Value> = serde_json::from_str(&done(&stack, &["key", "list", "--json"])).unwrap();
    done(&stack, &["key", "rotate", keys[0]["id"].as_str().unwrap()]);
    done(&stack, &["audit", "verify"]);

    let late = [
        "insert into api_key (tenant_id, role, digest, created_at) \
         values ('acme', 'admin', sha256('late'), '2020-01-01')",
        "insert into assignment (policy, epoch, alias, version, created_at) \
         values ('demo', 8, 'champion', 2, '2020-01-01')",
    ];
    for row in late {
        stack.pool.execute(row).await.unwrap();
    }
    let before = rows(&stack).len();
    done(&stack, &["migrate"]);
    assert_eq!(rows(&stack).len(), before, "nothing is noted later");
    let (success, faults, _) = springtide(&stack, &["audit", "verify"]);
    assert!(!success && faults.lines().count() == 2, "{faults}");
    assert!(
        faults.contains("somebody wrote it into its table") && faults.contains("epoch 8"),
        "{faults}"
    );
}

fn files(folder: &Path) -> usize {
    std::fs::read_dir(folder).map_or(0, Iterator::count)
}

#[tokio::test(flavor = "multi_thread")]
async fn changes_of_signing_keys_are_audited_or_say_that_they_are_not() {
    let stack = Stack::start("audit_signing").await;
    done(&stack, &["migrate"]);
    let new_root = ["new-key", "root", "--role", "root"];
    // Without the database nothing is made.
    let (success, _, error) = policy(&stack, &new_root, false).await;
    assert!(!success && error.contains("--no-audit"), "{error}");
    assert_eq!(files(&stack.keys_dir), 0);

    for (name, role) in [("root", "root"), ("trainer", "trainer"), ("spare", "trainer")] {
        let (success, _, error) = policy(&stack, &["new-key", name, "--role", role], true).await;
        assert!(success, "{error}");
    }
    let resign = ["resign", "--by", "spare"];
    assert!(policy(&stack, &resign, true).await.0);
    let revoke = [
        "revoke",
        "trainer",
        "--by",
        "root",
        "--reason",
        "the laptop was lost",
        "--yes",
    ];
    let (success, _, error) = policy(&stack, &revoke, false).await;
    assert!(!success && error.contains("nothing was changed"), "{error}");
    assert!(policy(&stack, &revoke, true).await.0);
    // On another machine, a person makes a key and revokes one.
    let offline = ["new-key", "late", "--role", "release", "--no-audit"];
    assert!(policy(&stack, &offline, false).await.0);
    let offline = ["revoke", "spare", "--reason", "lost too", "--yes", "--no-audit"];
    assert!(policy(&stack, &offline, false).await.0);

    let keys = rows_of(&stack, "signing_key");
    assert_eq!(
        actions(&keys),
        [
            "signing_key.create",
            "signing_key.create",
            "signing_key.create",
            "signing_key.resign",
            "signing_key.revoke"
        ]
    );
    assert_eq!(keys[4]["reason"], "the laptop was lost");
    assert_eq!(keys[4]["subject"], keys[1]["subject"]);
    assert!(
        keys[4]["detail"]
            .as_str()
            .unwrap()
            .contains("before the store was changed")
    );

    // The next role that starts notes what it finds, once.
    let noted = async || {
        let control = Control::start(&stack, &[]).await;
        drop(control);
        rows_of(&stack, "signing_key").split_off(5)
    };
    let found = noted().await;
    let mut what: Vec<(&str, bool)> = found
        .iter()
        .map(|row| {
            let about = row["detail"].as_str().unwrap();
            (row["action"].as_str().unwrap(), about.starts_with("late,"))
        })
        .collect();
    what.sort_unstable();
    assert_eq!(
        what,
        [
            ("signing_key.found", false), // the key `release`, which control made
            ("signing_key.found", true),
            ("signing_key.found_revoked", false)
        ],
        "{found:?}"
    );
    assert_eq!(noted().await, found, "nothing is noted twice");
}
