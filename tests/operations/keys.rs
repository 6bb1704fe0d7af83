//! API keys in a real database: how long they work, who may report for a replica, what the audit
//! shows, and what a flood of unknown keys costs. Over 500 lines, because all cases make the same
//! keys.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use axum::http::{HeaderMap, StatusCode};
use edge::audit::{self, Actor, Change};
use edge::auth::key::{self, Grant, NewKey};
use edge::auth::{Auth, AuthOptions, Principal, Role, Scope, Scopes};
use edge::sampler::{self, SamplerKey};
use futures::future::join_all;
use rand::TryRngCore;
use serde_json::{Value, json};
use sqlx::postgres::PgPoolOptions;
use sqlx::{Connection, Executor, PgConnection, PgPool};
use time::OffsetDateTime;
use tokio::net::TcpListener;
use uuid::Uuid;

use fixture::{SPRINGTIDE, Stack, create_key, eventually, run, succeed};

const SOON: Duration = Duration::from_secs(30);
const TEST: Actor<'_> = Actor {
    key: None,
    name: "tests/keys",
};

fn required(pool: &PgPool) -> Auth {
    Auth::new(
        AuthOptions {
            required: true,
            ..AuthOptions::default()
        },
        pool.clone(),
    )
}

fn bearer(key: &str) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert("authorization", format!("Bearer {key}").parse().unwrap());
    headers
}

async fn ask(auth: &Auth, key: &str) -> Result<Principal, StatusCode> {
    auth.principal(&bearer(key)).await.map_err(|problem| problem.status)
}

fn of_scope(scope: Scope) -> NewKey<'static> {
    NewKey {
        tenant: "default",
        grant: Grant::Scopes(Scopes::of(&[scope])),
        label: "a test",
        expires_at: None,
        replica: None,
        requests_per_second: None,
    }
}

async fn make(pool: &PgPool, key: &NewKey<'_>) -> key::Created {
    key::create(pool, key, TEST, "").await.unwrap()
}

fn random_key() -> String {
    let mut random = [0_u8; 32];
    rand::rngs::OsRng.try_fill_bytes(&mut random).unwrap();
    let digits: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("spring_{digits}")
}

/// Another pool of the stack's database, and how often its connections were used.
async fn counted(stack: &Stack) -> (PgPool, Arc<AtomicU64>) {
    let uses = Arc::new(AtomicU64::new(0));
    let counter = uses.clone();
    let options = PgPoolOptions::new().after_release(move |_, _| {
        counter.fetch_add(1, Ordering::Relaxed);
        Box::pin(async { Ok(true) })
    });
    (options.connect(&stack.database_url).await.unwrap(), uses)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_of_random_keys_costs_few_queries_and_delays_no_valid_key() {
    const RANDOM: usize = 100_000;
    const AT_ONCE: usize = 10_000;
    let stack = Stack::start("flood").await;
    let (pool, queries) = counted(&stack).await;
    let auth = required(&pool);
    let mut valid = Vec::new();
    for _ in 0..20 {
        valid.push(make(&stack.pool, &of_scope(Scope::Feedback)).await.secret);
    }
    for key in &valid {
        ask(&auth, key).await.unwrap();
    }
    let begun = Instant::now();
    let before = queries.load(Ordering::Relaxed);
    let mut honest = 0_u32;
    for _ in 0..RANDOM / AT_ONCE {
        let flood = async {
            let keys: Vec<String> = (0..AT_ONCE).map(|_| random_key()).collect();
            join_all(keys.iter().map(|key| ask(&auth, key))).await
        };
        tokio::pin!(flood);
        let refused = loop {
            tokio::select! {
                biased;
                answer = ask(&auth, &valid[honest as usize % valid.len()]) => {
                    answer.unwrap();
                    honest += 1;
                    // Lets the flood go on.
                    tokio::select! {
                        biased;
                        refused = &mut flood => break refused,
                        () = tokio::task::yield_now() => {}
                    }
                }
                refused = &mut flood => break refused,
            }
        };
        assert!(refused.iter().all(|answer| *answer == Err(StatusCode::UNAUTHORIZED)));
    }
    let queries = queries.load(Ordering::Relaxed) - before;
    // And one for the last use of each valid key.
    let allowed = begun.elapsed().as_millis() / 100 + 2 + 20;
    eprintln!("{RANDOM} random keys: {queries} queries; {honest} valid requests meanwhile");
    assert!(u128::from(queries) <= allowed, "{queries} queries");
    assert!(honest > 0);
    // A key that is made during a flood works at once.
    let new = make(&stack.pool, &of_scope(Scope::Feedback)).await.secret;
    ask(&auth, &new).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_that_goes_away_neither_ends_a_comparison_nor_begins_another() {
    let stack = Stack::start("gone").await;
    let pool = PgPoolOptions::new().connect(&stack.database_url).await.unwrap();
    let auth = required(&pool);
    let key = make(&stack.pool, &of_scope(Scope::Read)).await.secret;
    let mut locked = edge::database::begin(&stack.pool).await.unwrap();
    locked.execute("lock table api_key_revision").await.unwrap();
    let begun = Instant::now();
    for _ in 0..8 {
        let gone = tokio::time::timeout(Duration::from_millis(50), ask(&auth, &random_key())).await;
        assert!(gone.is_err(), "{gone:?}");
    }
    // The database goes on with a query whose client is gone, so those that began can be counted.
    let waiting =
        "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'";
    let waiting = eventually("a comparison waits", SOON, async || {
        let waiting: i64 = sqlx::query_scalar(waiting).fetch_one(&stack.pool).await.unwrap();
        (waiting > 0).then_some(waiting)
    })
    .await;
    let allowed = begun.elapsed().as_secs() + 1;
    assert!(waiting.unsigned_abs() <= allowed, "{waiting} comparisons");
    locked.rollback().await.unwrap();
    eventually("the key works", SOON, async || ask(&auth, &key).await.ok()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_key_is_refused_soon_while_others_work_on() {
    let stack = Stack::start("revoke").await;
    let auth = required(&stack.pool);
    let stolen = make(&stack.pool, &of_scope(Scope::Release)).await;
    let other = make(&stack.pool, &of_scope(Scope::Release)).await;
    let holder = ask(&auth, &stolen.secret).await.unwrap();
    assert_eq!(holder.key.unwrap().id, stolen.id);
    key::revoke(&stack.pool, stolen.id, TEST, "stolen").await.unwrap();
    let revoked_at = Instant::now();
    eventually("the key is refused", SOON, async || {
        ask(&auth, &other.secret).await.unwrap();
        (ask(&auth, &stolen.secret).await == Err(StatusCode::UNAUTHORIZED)).then_some(())
    })
    .await;
    eprintln!("refused {:?} after the revocation", revoked_at.elapsed());
    assert!(key::revoke(&stack.pool, stolen.id, TEST, "again").await.is_err());
    // Also without this program, by SQL or by deletion.
    for change in [
        "update api_key set revoked_at = now() where revoked_at is null",
        "delete from api_key",
    ] {
        let key = make(&stack.pool, &of_scope(Scope::Read)).await;
        ask(&auth, &key.secret).await.unwrap();
        stack.pool.execute(change).await.unwrap();
        eventually("the key is refused", SOON, async || {
            (ask(&auth, &key.secret).await == Err(StatusCode::UNAUTHORIZED)).then_some(())
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_key_is_refused_and_a_rotated_one_works_until_the_overlap_ends() {
    let stack = Stack::start("expiry").await;
    let auth = required(&stack.pool);
    let now = OffsetDateTime::now_utc();
    let brief = NewKey {
        expires_at: Some(now + Duration::from_secs(2)),
        ..of_scope(Scope::Read)
    };
    let brief = make(&stack.pool, &brief).await;
    ask(&auth, &brief.secret).await.unwrap();
    eventually("the key expires", SOON, async || {
        (ask(&auth, &brief.secret).await == Err(StatusCode::UNAUTHORIZED)).then_some(())
    })
    .await;
    let none = time::Duration::ZERO;
    let refused = key::rotate(&stack.pool, brief.id, none, None, TEST, "").await;
    assert!(refused.unwrap_err().to_string().contains("expired"));

    let old = NewKey {
        expires_at: Some(now + Duration::from_secs(90 * 86_400)),
        ..of_scope(Scope::Generations)
    };
    let old = make(&stack.pool, &old).await;
    let overlap = time::Duration::seconds(2);
    let new = key::rotate(&stack.pool, old.id, overlap, None, TEST, "quarterly")
        .await
        .unwrap();
    let (before, after) = (
        ask(&auth, &old.secret).await.unwrap(),
        ask(&auth, &new.secret).await.unwrap(),
    );
    assert_eq!(before.scopes, after.scopes);
    assert_eq!(before.key.unwrap().lineage, after.key.unwrap().lineage);
    let lifetime = new.expires_at.unwrap() - OffsetDateTime::now_utc();
    assert!(
        (89..=90).contains(&lifetime.whole_days()),
        "as long as the old one: {lifetime}"
    );
    eventually("the old key expires", SOON, async || {
        (ask(&auth, &old.secret).await == Err(StatusCode::UNAUTHORIZED)).then_some(())
    })
    .await;
    ask(&auth, &new.secret).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn known_keys_work_on_without_the_database_and_unknown_ones_are_not_called_invalid() {
    let stack = Stack::start("cut_off").await;
    let pool = sqlx::postgres::PgPoolOptions::new()
        .connect(&stack.database_url)
        .await
        .unwrap();
    let auth = required(&pool);
    let expiring = NewKey {
        expires_at: Some(OffsetDateTime::now_utc() + Duration::from_secs(3600)),
        ..of_scope(Scope::Read)
    };
    let known = make(&stack.pool, &expiring).await;
    ask(&auth, &known.secret).await.unwrap();
    pool.close().await;
    assert_eq!(ask(&auth, &random_key()).await, Err(StatusCode::SERVICE_UNAVAILABLE));
    ask(&auth, &known.secret).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_role_stands_for_its_scopes_and_an_unreadable_key_is_refused_alone() {
    let stack = Stack::start("roles_of_keys").await;
    let auth = required(&stack.pool);
    for role in Role::ALL {
        let secret = random_key();
        let digest = blake3::hash(secret.as_bytes());
        sqlx::query("insert into api_key (tenant_id, role, digest, label) values ('default', $1, $2, 'a role')")
            .bind(role.as_str())
            .bind(digest.as_bytes().as_slice())
            .execute(&stack.pool)
            .await
            .unwrap();
        let holder = ask(&auth, &secret).await.unwrap();
        assert_eq!(holder.scopes, role.scopes());
    }
    let future = make(&stack.pool, &of_scope(Scope::Read)).await;
    sqlx::query("update api_key set scopes = '{telepathy}' where id = $1")
        .bind(future.id)
        .execute(&stack.pool)
        .await
        .unwrap();
    let other = make(&stack.pool, &of_scope(Scope::Read)).await;
    ask(&auth, &other.secret).await.unwrap();
    assert_eq!(ask(&auth, &future.secret).await, Err(StatusCode::UNAUTHORIZED));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_last_use_of_a_key_is_stored_once_an_hour() {
    let stack = Stack::start("last_use").await;
    let auth = required(&stack.pool);
    let key = make(&stack.pool, &of_scope(Scope::Read)).await;
    let revision = async || -> i64 {
        let revision = sqlx::query_scalar("select revision from api_key_revision");
        revision.fetch_one(&stack.pool).await.unwrap()
    };
    let before = revision().await;
    for _ in 0..100 {
        ask(&auth, &key.secret).await.unwrap();
    }
    let last_used = async || key::list(&stack.pool, None).await.unwrap()[0].last_used;
    let used = eventually("the last use is stored", SOON, async || last_used().await).await;
    assert_eq!((used.minute(), used.second()), (0, 0), "{used}");
    assert_eq!(revision().await, before, "it is no change of the key");
}

#[tokio::test(flavor = "multi_thread")]
async fn adding_a_known_sampler_changes_when_it_expires_or_says_why_not() {
    let stack = Stack::start("renewal").await;
    let public_key = SamplerKey::from_seed(&[1; 32]).public_key();
    let now = OffsetDateTime::now_utc();
    let add = async |expires_at: Option<OffsetDateTime>| {
        sampler::register(&stack.pool, &public_key, "r", Some("demo"), expires_at, TEST).await
    };
    let expired = now - Duration::from_secs(60);
    let id = add(Some(expired)).await.unwrap();
    assert_eq!(sampler::valid_key(&stack.pool, &id).await.unwrap(), None);
    let why = add(None).await.unwrap_err().to_string();
    assert!(why.contains("--expires"), "{why}");
    let later = now + Duration::from_secs(3600);
    for _ in 0..2 {
        assert_eq!(add(Some(later)).await.unwrap(), id);
    }
    assert!(sampler::valid_key(&stack.pool, &id).await.unwrap().is_some());
    let rows: Vec<String> = sqlx::query_scalar("select action from audit order by id")
        .fetch_all(&stack.pool)
        .await
        .unwrap();
    assert_eq!(rows, ["sampler.add", "sampler.renew"]);
    sampler::revoke(&stack.pool, &id, TEST, "stolen").await.unwrap();
    assert!(add(Some(later)).await.unwrap_err().to_string().contains("revoked"));
}

async fn append(pool: &PgPool, subject: &str) {
    let mut transaction = edge::database::begin(pool).await.unwrap();
    let change = Change {
        tenant: "default",
        action: "test.change",
        subject,
        detail: "",
        reason: "because",
    };
    audit::append(&mut transaction, TEST, change).await.unwrap();
    transaction.commit().await.unwrap();
}

async fn faults(pool: &PgPool, noted: Option<audit::Head>) -> Vec<String> {
    audit::verify(pool, noted).await.unwrap().faults
}

#[tokio::test(flavor = "multi_thread")]
async fn a_superuser_cannot_change_remove_or_insert_a_row_of_the_audit_unnoticed() {
    let stack = Stack::start("audit").await;
    let pool = &stack.pool;
    join_all((0..20).map(|index| async move { append(pool, &index.to_string()).await })).await;
    let whole = audit::verify(pool, None).await.unwrap();
    assert_eq!((whole.head.id, whole.faults.len()), (20, 0), "{:?}", whole.faults);

    // The triggers refuse even a superuser.
    for change in [
        "update audit set reason = 'another' where id = 7",
        "delete from audit where id = 7",
        "truncate audit",
    ] {
        let refused = pool.execute(change).await.unwrap_err().to_string();
        assert!(refused.contains("append-only"), "{refused}");
    }

    // Without triggers and constraints, the chain tells. Each change is undone from the copy.
    let mut superuser = PgConnection::connect(&stack.database_url).await.unwrap();
    superuser
        .execute("set session_replication_role = replica")
        .await
        .unwrap();
    superuser
        .execute("create table kept as select * from audit; alter table audit drop constraint audit_previous_unique")
        .await
        .unwrap();
    for (change, found) in [
        ("update audit set reason = 'another' where id = 7", "row 7 was changed"),
        ("update audit set at = at + interval '1 microsecond' where id = 7", "row 7 was changed"),
        ("update audit set key_id = uuidv7() where id = 7", "row 7 was changed"),
        ("delete from audit where id = 7", "rows 7 to 7 are missing"),
        ("delete from audit where id = 20", "noted row 20 is missing"),
        ("truncate audit", "noted row 20 is missing"),
        (
            "insert into audit select 21, at, key_id, actor, tenant, action, subject, detail, reason, hash, sha256('')
             from audit where id = 20",
            "row 21 was changed, or not written by Springtide",
        ),
        (
            "update audit set id = id + 1000 where id > 7; \
             insert into audit select 8, at, key_id, 'someone', tenant, action, subject, detail, reason, hash, sha256('')
             from audit where id = 7; \
             update audit set id = id - 999 where id > 1000",
            "row 8 was changed",
        ),
    ] {
        superuser.execute(change).await.unwrap();
        let faults = faults(pool, Some(whole.head)).await;
        assert!(faults.iter().any(|fault| fault.contains(found)), "{change}: {faults:?}");
        superuser
            .execute("truncate audit; insert into audit select * from kept")
            .await
            .unwrap();
    }
    assert_eq!(faults(pool, Some(whole.head)).await, Vec::<String>::new());

    // A chain that was made anew has no fault of its own; what was noted outside finds it.
    superuser.execute("truncate audit").await.unwrap();
    for index in 0..20 {
        append(pool, &format!("forged {index}")).await;
    }
    assert_eq!(faults(pool, None).await, Vec::<String>::new());
    let found = faults(pool, Some(whole.head)).await;
    assert!(found[0].contains("made anew"), "{found:?}");
}

fn command(stack: &Stack, args: &[&str]) -> Command {
    let mut command = stack.springtide(args);
    command.env("SPRINGTIDE__AUTH__REQUIRED", "true");
    command
}

fn springtide(stack: &Stack, args: &[&str]) -> (bool, String, String) {
    run(&mut command(stack, args))
}

fn output(stack: &Stack, args: &[&str]) -> String {
    succeed(&mut command(stack, args))
}

#[tokio::test(flavor = "multi_thread")]
async fn every_change_by_the_command_line_is_a_row_of_the_audit() {
    let stack = Stack::start("key_commands").await;
    output(&stack, &["migrate"]);
    let auth = required(&stack.pool);
    let create = [
        "key",
        "create",
        "--scope",
        "feedback,read",
        "--label",
        "shop",
        "--expires",
        "90d",
    ];
    let first = output(&stack, &create);
    let scopes = Scopes::of(&[Scope::Feedback, Scope::Read]);
    assert_eq!(ask(&auth, &first).await.unwrap().scopes, scopes);
    let listed = |all: bool| -> Vec<Value> {
        let args = ["key", "list", "--json", "--all"];
        serde_json::from_str(&output(&stack, &args[..if all { 4 } else { 3 }])).unwrap()
    };
    let id = listed(false)[0]["id"].as_str().unwrap().to_owned();
    let second = output(&stack, &["key", "rotate", &id, "--overlap", "1h"]);
    assert_eq!(ask(&auth, &second).await.unwrap().scopes, scopes);
    assert_eq!(listed(false).len(), 2);
    output(&stack, &["key", "revoke", &id, "--reason", "left the company"]);
    assert_eq!((listed(false).len(), listed(true).len()), (1, 2));
    let page = output(&stack, &["key", "list", "--all"]);
    assert!(page.contains("feedback,read") && page.contains("revoked"), "{page}");
    assert!(!page.contains(&first) && !page.contains(&second), "no secrets");
    let (success, _, why) = springtide(&stack, &["key", "revoke", &Uuid::nil().to_string(), "--reason", "x"]);
    assert!(!success && why.contains("there is no key"), "{why}");

    let list = ["audit", "list", "--action", "key", "--json"];
    let rows: Vec<Value> = serde_json::from_str(&output(&stack, &list)).unwrap();
    let actions: Vec<&str> = rows.iter().map(|row| row["action"].as_str().unwrap()).collect();
    assert_eq!(actions, ["key.revoke", "key.rotate", "key.create", "key.create"]);
    let of_first = |row: &&Value| row["subject"] == *id;
    assert_eq!(
        rows.iter().filter(of_first).count(),
        3,
        "the new key has its own row: {rows:?}"
    );
    assert_eq!(rows[0]["reason"], "left the company");
    assert!(rows[0]["actor"].as_str().unwrap().contains('@'));
    let text = serde_json::to_string(&rows).unwrap();
    assert!(!text.contains(&first) && !text.contains(&second), "no secrets");

    let verified: Value = serde_json::from_str(&output(&stack, &["audit", "verify", "--json"])).unwrap();
    let last = verified["rows"].as_i64().unwrap();
    // The command remembers the last row, so it notices that it is gone.
    let mut superuser = PgConnection::connect(&stack.database_url).await.unwrap();
    superuser
        .execute("set session_replication_role = replica")
        .await
        .unwrap();
    let delete = format!("delete from audit where id = {last}");
    superuser.execute(sqlx::AssertSqlSafe(delete)).await.unwrap();
    let (success, found, _) = springtide(&stack, &["audit", "verify"]);
    let missing = format!("noted row {last} is missing");
    assert!(!success && found.contains(&missing), "{found}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_secrets_of_a_deployment_are_known_after_a_migration_and_a_second_one_changes_nothing() {
    let stack = Stack::start("deployment_secrets").await;
    let dir = stack.dir.path().join("secrets");
    let secrets = dir.display().to_string();
    output(&stack, &["secrets", &secrets, "--replicas", "serve-0,serve-1"]);
    output(&stack, &["migrate", "--secrets", &secrets]);
    let auth = required(&stack.pool);
    let secret = |folder: &str| std::fs::read_to_string(dir.join(folder).join("api-key")).unwrap();
    let may = [
        ("train", Scope::Completions),
        ("serve", Scope::Replica),
        ("follow", Scope::Replica),
        ("app", Scope::Feedback),
        ("prometheus", Scope::Read),
        ("admin", Scope::Admin),
    ];
    for (folder, scope) in may {
        let principal = ask(&auth, &secret(folder)).await.unwrap();
        assert!(principal.scopes.allow(scope), "{folder}");
        assert_eq!(principal.scopes.allow(Scope::Admin), folder == "admin", "{folder}");
    }
    let samplers = output(&stack, &["sampler", "list"]);
    assert!(
        samplers.contains("serve-0") && samplers.contains("serve-1"),
        "{samplers}"
    );
    let (keys, rows) = (output(&stack, &["key", "list"]), output(&stack, &["audit", "list"]));
    output(&stack, &["migrate", "--secrets", &secrets]);
    assert_eq!(
        (output(&stack, &["key", "list"]), output(&stack, &["audit", "list"])),
        (keys, rows)
    );

    // What was revoked stays so, and stops no upgrade.
    let app = ask(&auth, &secret("app")).await.unwrap().key.unwrap().id.to_string();
    output(&stack, &["key", "revoke", &app, "--reason", "a test"]);
    let sampler = sampler::list(&stack.pool).await.unwrap().remove(0).id;
    output(&stack, &["sampler", "revoke", &sampler, "--reason", "a test", "--yes"]);
    output(&stack, &["migrate", "--secrets", &secrets]);
    let listed = output(&stack, &["key", "list"]);
    assert!(!listed.contains(&app), "{listed}");
    assert!(output(&stack, &["sampler", "list"]).contains("REVOKED"));

    // A value that a file holds wins.
    let file = dir.join("admin/api-key").display().to_string();
    let mut shown = command(&stack, &["key", "list"]);
    shown.env("SPRINGTIDE_FILE__CLIENT__API_KEY", &file);
    succeed(&mut shown);
    let (success, _, error) = run(shown.env("SPRINGTIDE_FILE__CLIENT__API_KEY", format!("{file}.gone")));
    assert!(
        !success && error.contains("client.api_key") && error.contains("SPRINGTIDE_FILE__"),
        "{error}"
    );

    std::fs::write(dir.join("app/api-key"), "spring_short").unwrap();
    let (success, _, error) = springtide(&stack, &["migrate", "--secrets", &secrets]);
    assert!(
        !success && error.contains("app/api-key") && error.contains("is no API key"),
        "{error}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_need_a_key_where_other_machines_reach_the_role() {
    let folder = tempfile::tempdir().unwrap();
    let [port] = edge::bind::free_ports().unwrap();
    let mut relay = tokio::process::Command::new(&*SPRINGTIDE)
        .args(["relay", "--upstream", &format!("file://{}", folder.path().display())])
        .current_dir(folder.path())
        .env("SPRINGTIDE__STATE_DIR", folder.path())
        .env("SPRINGTIDE__RELAY__LISTEN", format!("0.0.0.0:{port}"))
        .env("SPRINGTIDE__RELAY__CALLER_KEY", "spring_caller")
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let url = format!("http://127.0.0.1:{port}");
    eventually("the relay answers", SOON, async || {
        assert!(relay.try_wait().unwrap().is_none(), "the relay has ended");
        reqwest::get(format!("{url}/health")).await.ok()
    })
    .await;
    for (key, status) in [(None, 401), (Some("spring_wrong"), 401), (Some("spring_caller"), 200)] {
        let mut request = reqwest::Client::new().get(format!("{url}/metrics"));
        if let Some(key) = key {
            request = request.bearer_auth(key);
        }
        assert_eq!(request.send().await.unwrap().status(), status, "{key:?}");
    }
}

/// The fleet's API with keys, and its address.
async fn fleet(pool: &PgPool) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let router = serving::fleet::routes(pool.clone(), "demo").protected_by(&required(pool), "fleet");
    tokio::spawn(async move { axum::serve(listener, router).await });
    url
}

async fn post(url: String, key: &str, body: Value) -> u16 {
    let request = reqwest::Client::new().post(url).bearer_auth(key).json(&body);
    request.send().await.unwrap().status().as_u16()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_reports_only_for_its_own_replica_and_adds_only_its_swaps() {
    let stack = Stack::start("replica_keys").await;
    let pool = &stack.pool;
    let url = &fleet(pool).await;
    let report = async |key: &str, replica: &str, address: &str| {
        let report =
            json!({"cluster": "c", "policy": "demo", "address": address, "epoch": 1, "resident": [], "ready": true});
        post(format!("{url}/v1/replicas/{replica}"), key, report).await
    };
    let swap = async |key: &str, replica: &str| {
        let swap = json!({"replica": replica, "policy": "demo", "version": 1, "epoch": 1,
                          "fetch_ms": 1.0, "verify_ms": 1.0, "stage_ms": 1.0, "pause_ms": 1.0});
        post(format!("{url}/v1/swaps"), key, swap).await
    };
    let first = make(pool, &of_scope(Scope::Replica)).await;
    let thief = create_key(pool, "default", Role::Serving, "thief").await;
    assert_eq!(swap(&thief, "one").await, 403, "nobody reported for it yet");
    assert_eq!(report(&first.secret, "one", "http://one").await, 204);
    assert_eq!(swap(&first.secret, "one").await, 201);
    assert_eq!(report(&thief, "one", "http://thief").await, 403);
    assert_eq!(swap(&thief, "one").await, 403);
    let address: String = sqlx::query_scalar("select address from replica where id = 'one'")
        .fetch_one(pool)
        .await
        .unwrap();
    assert_eq!(address, "http://one");

    // A key made for another replica, and one without the scope.
    let bound = NewKey {
        replica: Some("two"),
        ..of_scope(Scope::Replica)
    };
    let bound = make(pool, &bound).await.secret;
    assert_eq!(report(&bound, "one", "http://thief").await, 403);
    assert_eq!(swap(&bound, "one").await, 403);
    assert_eq!(report(&thief, "two", "http://thief").await, 204, "it is free");
    assert_eq!(
        report(&bound, "two", "http://two").await,
        204,
        "the key made for it takes it over"
    );
    assert_eq!(report(&thief, "two", "http://thief").await, 403);
    let reader = make(pool, &of_scope(Scope::Read)).await.secret;
    assert_eq!(report(&reader, "three", "http://three").await, 403);

    // A rotated key goes on, the old one too.
    let overlap = time::Duration::hours(1);
    let rotated = key::rotate(pool, first.id, overlap, None, TEST, "").await.unwrap();
    assert_eq!(report(&rotated.secret, "one", "http://one").await, 204);
    assert_eq!(report(&first.secret, "one", "http://one").await, 204);
    key::revoke(pool, first.id, TEST, "").await.unwrap();
    assert_eq!(
        report(&thief, "one", "http://thief").await,
        403,
        "its successor is valid"
    );
    // Without a valid key, the replica is free.
    key::revoke(pool, rotated.id, TEST, "").await.unwrap();
    let second = make(pool, &of_scope(Scope::Replica)).await.secret;
    assert_eq!(report(&second, "one", "http://one").await, 204);
}
