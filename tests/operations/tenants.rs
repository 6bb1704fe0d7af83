//! Tenants: whose a policy is, what `control` shows to whom, and how consents are given and
//! withdrawn. What is trained on is in `trainer/consent.rs`.

mod fuzz;

use std::process::Output;

use edge::audit::Actor;
use edge::auth::key::{self, Grant, NewKey};
use edge::auth::{Scope, Scopes};
use edge::tenant;
use reqwest::{Client, Method};
use serde_json::{Value, json};
use sqlx::{Executor, PgPool};

use fixture::control::Control;
use fixture::{Stack, operations};

const TEST: Actor<'_> = Actor {
    key: None,
    name: "tests/tenants",
};
pub const HISTORY: &str = concat!(include_str!("two_versions.sql"), include_str!("tenants/history.sql"));
/// Trained on, of the tenants `ours` and `theirs`.
const OURS: &str = "01980000-0000-7000-8000-000000000001";
/// Of a version that a step made.
const OURS_OPEN: &str = "01980000-0000-7000-8000-000000000003";
const THEIRS_OPEN: &str = "01980000-0000-7000-8000-000000000004";
/// What `control` needs where keys are required.
const REQUIRED: [(&str, &str); 4] = [
    ("SPRINGTIDE__AUTH__REQUIRED", "true"),
    ("SPRINGTIDE__SERVE__API_KEY", "unused"),
    ("SPRINGTIDE__TRAINER__API_KEY", "unused"),
    ("SPRINGTIDE__POLICY__TENANT", "ours"),
];

/// A key of the tenant with these scopes.
async fn key(pool: &PgPool, tenant: &str, scopes: &[Scope]) -> String {
    let key = NewKey {
        tenant,
        grant: Grant::Scopes(Scopes::of(scopes)),
        label: "a test",
        expires_at: None,
        replica: None,
        requests_per_second: None,
    };
    key::create(pool, &key, TEST, "").await.unwrap().secret
}

async fn get(control: &Control, path: &str, key: &str) -> (u16, Value) {
    let url = format!("http://127.0.0.1:{}{path}", control.port);
    let answer = Client::new().get(url).bearer_auth(key).send().await.unwrap();
    (answer.status().as_u16(), answer.json().await.unwrap_or_default())
}

#[tokio::test(flavor = "multi_thread")]
async fn routes_about_a_policy_need_a_key_of_its_tenant() {
    let stack = Stack::start("owner").await;
    stack.pool.execute(HISTORY).await.unwrap();
    let more = [&REQUIRED[..], &[("SPRINGTIDE__POLICY__NAME", "traced")]].concat();
    let control = Control::start(&stack, &more).await;
    let admin = key(&stack.pool, "theirs", &[Scope::Admin]).await;
    let base = format!("http://127.0.0.1:{}", control.port);
    let mut refused = Vec::new();
    for (path, method, operation) in operations(&base).await {
        let Some(scope) = operation["security"][0]["bearer"][0].as_str() else {
            continue; // open to everybody
        };
        let scope = Scope::parse(scope).unwrap();
        let url = format!("{base}{}", path.replace("{serial}", "1").replace("{id}", OURS));
        let send = async |key: &str| {
            let mut request = Client::new().request(method.clone(), &url).bearer_auth(key);
            if method == Method::POST {
                request = request.json(&json!({}));
            }
            let answer = request.send().await.unwrap();
            let status = answer.status().as_u16();
            let answer: Value = answer.json().await.unwrap_or_default();
            (status, answer["detail"].as_str().unwrap_or_default().to_owned())
        };
        let name = format!("{method} {path}");
        let (ours, theirs) = (
            send(&key(&stack.pool, "ours", &[scope]).await).await,
            send(&key(&stack.pool, "theirs", &[scope]).await).await,
        );
        assert!(!matches!(ours.0, 401 | 403), "{name}: {ours:?}");
        let by_admin = send(&admin).await;
        assert!(!matches!(by_admin.0, 401 | 403), "{name}: {by_admin:?}");
        if theirs.0 == 403 {
            assert!(
                theirs.1.contains("does not belong to this key's tenant, theirs"),
                "{theirs:?}"
            );
            assert!(theirs.1.contains("springtide key create --tenant"), "{theirs:?}");
            refused.push(name);
        } else {
            // every tenant's own rows, or administrators alone
            let own_rows = name.contains("ledger") || name.contains("origin");
            assert!(own_rows || scope == Scope::Admin, "{name}: {theirs:?}");
        }
    }
    assert!(refused.len() > 15, "{refused:?}");
    assert!(refused.contains(&"POST /v1/releases".to_owned()), "{refused:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn ledger_and_origin_show_each_tenant_what_it_logged_itself() {
    let stack = Stack::start("own_rows").await;
    stack.pool.execute(HISTORY).await.unwrap();
    let more = [&REQUIRED[..], &[("SPRINGTIDE__POLICY__NAME", "traced")]].concat();
    let control = Control::start(&stack, &more).await;
    let (ours, theirs) = (
        key(&stack.pool, "ours", &[Scope::Read]).await,
        key(&stack.pool, "theirs", &[Scope::Read]).await,
    );
    let admin = key(&stack.pool, "third", &[Scope::Admin]).await;
    let counts = async |path: &str, key: &str| {
        let (status, ledger) = get(&control, path, key).await;
        assert_eq!((status, &ledger["balanced"]), (200, &true.into()), "{ledger}");
        (
            ledger["generations"].as_i64().unwrap(),
            ledger["trained"].as_i64().unwrap(),
        )
    };
    for key in [&ours, &theirs] {
        assert_eq!(counts("/v1/ledger", key).await, (2, 1));
    }
    assert_eq!(counts("/v1/ledger", &admin).await, (4, 2));
    assert_eq!(counts("/v1/ledger?tenant=theirs", &admin).await, (2, 1));
    assert_eq!(counts("/v1/ledger?tenant=ours", &ours).await, (2, 1));
    let (status, problem) = get(&control, "/v1/ledger?tenant=theirs", &ours).await;
    assert_eq!(status, 403, "{problem}");

    let origin = async |id: &str, key: &str| get(&control, &format!("/v1/generations/{id}/origin"), key).await;
    let (status, origin_of_ours) = origin(OURS_OPEN, &ours).await;
    assert_eq!(status, 200, "{origin_of_ours}");
    let trajectories = origin_of_ours["trajectories"].as_array().unwrap();
    assert_eq!(trajectories.len(), 1);
    assert_eq!(trajectories[0]["generation"], OURS);
    assert_eq!(origin_of_ours["trajectories_hidden"], 1);
    assert_eq!(origin(THEIRS_OPEN, &ours).await.0, 404);
    assert_eq!(origin(THEIRS_OPEN, &theirs).await.0, 200);
    assert_eq!(origin(OURS_OPEN, &theirs).await.0, 404);
    let (_, whole) = origin(THEIRS_OPEN, &admin).await;
    assert_eq!(whole["trajectories"].as_array().unwrap().len(), 2, "{whole}");
    assert_eq!(whole["trajectories_hidden"], 0);
}

fn springtide(stack: &Stack, variables: &[(&str, &str)], args: &[&str]) -> Output {
    let mut command = stack.springtide(args);
    command.envs(stack.kafka_environment()).envs(variables.iter().copied());
    command.output().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn consents_are_given_withdrawn_and_listed_and_leave_a_trace() {
    let stack = Stack::start("consents").await;
    let run = |args: &[&str]| {
        let output = springtide(&stack, &[], args);
        let (out, err) = (output.stdout, String::from_utf8(output.stderr).unwrap());
        assert!(output.status.success(), "{args:?}: {err}");
        String::from_utf8(out).unwrap()
    };
    let refused = |args: &[&str]| {
        let output = springtide(&stack, &[], args);
        assert!(!output.status.success(), "{args:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let error = refused(&["tenant", "consent", "acme"]);
    assert!(error.contains("there is no policy \"demo\""), "{error}");
    run(&["migrate"]);
    tenant::own(&stack.pool, "demo", "default", TEST).await.unwrap();
    let allowed = async || -> Vec<String> {
        let mut tenants: Vec<String> = sqlx::query_scalar("select unnest(consenting_tenants('demo'))")
            .fetch_all(&stack.pool)
            .await
            .unwrap();
        tenants.sort();
        tenants
    };
    assert_eq!(allowed().await, ["default"]);
    assert!(run(&["tenant", "consent", "acme", "--reason", "contract"]).contains("may be trained"));
    assert!(run(&["tenant", "consent", "acme"]).contains("before"));
    assert!(
        run(&["tenant", "consent", "default"]).contains("before"),
        "an owner always consents"
    );
    assert_eq!(allowed().await, ["acme", "default"]);
    let error = refused(&["tenant", "withdraw", "default", "--yes"]);
    assert!(error.contains("springtide run pause"), "{error}");
    let error = refused(&["tenant", "withdraw", "acme"]);
    assert!(error.contains("--yes"), "it asks: {error}");
    let withdraw = ["tenant", "withdraw", "acme", "--yes", "--reason", "their request"];
    assert!(run(&withdraw).contains("no longer trained"));
    assert!(run(&withdraw).contains("had not consented"));
    assert_eq!(allowed().await, ["default"]);
    run(&["tenant", "consent", "acme"]);

    let listed: Value = serde_json::from_str(&run(&["tenant", "list", "--all", "--json"])).unwrap();
    assert_eq!(
        listed["policies"],
        json!([{"policy": "demo", "tenant": "default",
                                          "created_at": listed["policies"][0]["created_at"]}])
    );
    let consents = listed["consents"].as_array().unwrap();
    assert_eq!(consents.len(), 2, "{listed}");
    assert!(
        consents[0]["withdrawn_at"].is_null() && consents[1]["withdrawn_at"].is_string(),
        "{listed}"
    );
    let page = run(&["tenant", "list"]);
    assert!(
        page.contains("owner") && page.contains("consents") && !page.contains("withdrawn"),
        "{page}"
    );

    run(&[
        "tenant",
        "transfer",
        "--to",
        "acme",
        "--yes",
        "--reason",
        "their product",
    ]);
    assert_eq!(allowed().await, ["acme"]);
    assert_eq!(
        tenant::owner(&stack.pool, "demo").await.unwrap().as_deref(),
        Some("acme")
    );
    let audited: Vec<(String, String, String)> =
        sqlx::query_as("select action, tenant, reason from audit where action ~ '^(consent|policy)[.]' order by id")
            .fetch_all(&stack.pool)
            .await
            .unwrap();
    let audited: Vec<_> = audited
        .iter()
        .map(|(action, tenant, reason)| (&**action, &**tenant, &**reason))
        .collect();
    assert_eq!(
        audited,
        [
            ("policy.own", "default", ""),
            ("consent.give", "acme", "contract"),
            ("consent.withdraw", "acme", "their request"),
            ("consent.give", "acme", ""),
            ("policy.transfer", "acme", "their product"),
        ]
    );
    run(&["audit", "verify"]);
    sqlx::query("update policy set tenant_id = 'default'")
        .execute(&stack.pool)
        .await
        .unwrap();
    assert!(
        !springtide(&stack, &[], &["audit", "verify"]).status.success(),
        "a change without a trace"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_of_another_tenant_is_not_taken_over() {
    let stack = Stack::start("taken").await;
    tenant::own(&stack.pool, "demo", "acme", TEST).await.unwrap();
    tenant::own(&stack.pool, "demo", "acme", TEST).await.unwrap();
    let error = tenant::own(&stack.pool, "demo", "default", TEST)
        .await
        .unwrap_err()
        .to_string();
    assert!(error.contains("belongs to the tenant acme, not to default"), "{error}");
    for role in ["control", "train"] {
        let output = springtide(&stack, &[], &[role]);
        let log = [output.stdout, output.stderr].concat();
        let log = String::from_utf8_lossy(&log);
        assert!(!output.status.success(), "{role}");
        assert!(
            log.contains("set policy.tenant = \\\"acme\\\"") || log.contains("set policy.tenant = \"acme\""),
            "{log}"
        );
        assert!(log.contains("springtide tenant transfer"), "{log}");
    }
}

/// Rollouts belong to the tenant of the trainer's key, and grades to that of its policy.
#[tokio::test(flavor = "multi_thread")]
async fn the_trainers_key_must_be_of_its_policys_tenant() {
    let stack = Stack::start("own_key").await;
    let wrong = key(&stack.pool, "theirs", &[Scope::Completions]).await;
    let variables = [
        &REQUIRED[..2],
        &REQUIRED[3..],
        &[("SPRINGTIDE__TRAINER__API_KEY", &*wrong)],
    ]
    .concat();
    let output = springtide(&stack, &variables, &["train"]);
    let log = [output.stdout, output.stderr].concat();
    let log = String::from_utf8_lossy(&log);
    assert!(!output.status.success(), "{log}");
    assert!(log.contains("trainer.api_key is a key of the tenant theirs"), "{log}");
    assert!(log.contains("--tenant ours"), "{log}");
}
