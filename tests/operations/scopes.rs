//! Which scope each route needs. The routes come from the OpenAPI documents of running roles; every
//! route is tried without a key, with an unknown one, and with a key of every scope and role. What
//! the roles did must equal what their documents say, and the table in tests/scopes.txt.
//!
//! After a change of routes: `SPRINGTIDE_WRITE_DOCS=1 cargo test --workspace --test operations scopes`.

use std::fmt::Write;
use std::time::Duration;

use axum::Router;
use edge::auth::key::{self, Grant, NewKey};
use edge::auth::{Auth, AuthOptions, Role, Scope, Scopes};
use reqwest::{Client, Method};
use serde_json::{Value, json};
use serving::serve::Replica;
use store::Store;
use tokio::net::TcpListener;
use tokio_util::sync::{CancellationToken, DropGuard};

use fixture::control::Control;
use fixture::ingest::{Service, options};
use fixture::serving::replica;
use fixture::{Stack, check_page, eventually, operations};

const START: Duration = Duration::from_secs(90);
const CALLER_KEY: &str = "spring_caller";
const CLOUD_EVENT: &str = "application/cloudevents+json";

/// A request to a route. Some routes look into the body to know which scope is needed.
struct Case {
    role: &'static str,
    url: String,
    method: Method,
    /// As the document has it, with what distinguishes this body.
    name: String,
    /// What the document says: any of these. Empty: no key needed.
    scopes: Vec<Scope>,
    body: Option<(&'static str, String)>,
}

/// What a role answered: `None` if it let the request pass.
type Refusal = Option<u16>;

impl Case {
    async fn send(&self, client: &Client, key: Option<&str>) -> Refusal {
        let mut request = client.request(self.method.clone(), &self.url);
        if let Some(key) = key {
            request = request.bearer_auth(key);
        }
        if let Some((content_type, body)) = &self.body {
            request = request.header("content-type", *content_type).body(body.clone());
        }
        let response = request.send().await.unwrap();
        let mut status = response.status().as_u16();
        let answer: Value = serde_json::from_slice(&response.bytes().await.unwrap()).unwrap_or_default();
        // A batch has a status for each event.
        if let Some(of_event) = answer["results"][0]["status"].as_u64() {
            status = u16::try_from(of_event).unwrap();
        }
        matches!(status, 401 | 403).then_some(status)
    }
}

/// The cases of a role's OpenAPI document.
async fn cases(role: &'static str, base: &str) -> Vec<Case> {
    let mut cases = Vec::new();
    for (path, method, operation) in operations(base).await {
        let security = operation["security"].as_array().unwrap();
        let named = security.iter().filter_map(|one| one["bearer"].as_array()).flatten();
        let scopes: Vec<Scope> = named
            .map(|name| Scope::parse(name.as_str().unwrap()).unwrap())
            .collect();
        let case = |name: String, scopes: Vec<Scope>, body| Case {
            role,
            url: format!("{base}{}", fill(&path)),
            method: method.clone(),
            name: format!("`{method} {path}`{name}"),
            scopes,
            body,
        };
        let json = "application/json";
        // any of them is enough to read
        if scopes.len() < 2 || method == Method::GET {
            let body = (method != Method::GET).then(|| (json, "{}".to_owned()));
            cases.push(case(String::new(), scopes, body));
            continue;
        }
        for scope in scopes {
            let event = event(scope);
            let (content_type, body) = match &*path {
                "/v1/events" => (CLOUD_EVENT, event.clone()),
                _ => {
                    let kind = if scope == Scope::Feedback {
                        "feedback"
                    } else {
                        "generation"
                    };
                    let item = json!({"source": "t", "id": event["id"], "time": event["time"], kind: event["data"]});
                    (json, json!([item]))
                }
            };
            let name = format!(", an event of {}", scope.as_str());
            cases.push(case(name, vec![scope], Some((content_type, body.to_string()))));
        }
    }
    cases
}

/// Whether the route takes feedback, but no feedback token.
fn takes_no_token(role: &str, name: &str) -> bool {
    let routes = ["/v1/retractions", "/v1/episode-ends", "an event of feedback"];
    role == "ingest" && routes.into_iter().any(|route| name.contains(route))
}

/// A CloudEvent that needs the scope.
fn event(scope: Scope) -> Value {
    let id = uuid::Uuid::now_v7();
    let (kind, data) = match scope {
        Scope::Feedback => (
            "feedback",
            json!({"feedback_id": id, "generation_id": uuid::Uuid::now_v7(), "metric_name": "accept", "value": true}),
        ),
        _ => (
            "generation",
            serde_json::to_value(fixture::ingest::generation()).unwrap(),
        ),
    };
    json!({
        "specversion": "1.0",
        "type": format!("springtide.{kind}.v1"),
        "source": "t",
        "id": id,
        "time": "2026-11-21T10:00:00Z",
        "data": data,
    })
}

fn fill(path: &str) -> String {
    path.replace("{id}", "01980000-0000-7000-8000-000000000001")
        .replace("{serial}", "1")
        .replace("{name}", "accepted")
        .replace("{version}", "1")
        .replace("{digest}", &"0".repeat(64))
        .replace("{key}", "policy/demo/none")
}

/// A replica without a version: it answers, and refuses completions for lack of one.
pub async fn serve(stack: &Stack, auth: Auth) -> (String, DropGuard) {
    let (listener, url) = listener().await;
    let replica = Replica { auth, ..replica(stack) };
    let stop = CancellationToken::new();
    tokio::spawn(replica.run(listener.into(), stop.clone()));
    (url, stop.drop_guard())
}

pub async fn listener() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    (listener, url)
}

#[tokio::test(flavor = "multi_thread")]
async fn every_route_is_open_to_keys_of_its_scope_only_as_the_documents_and_the_table_say() {
    let stack = Stack::start("scopes").await;
    let auth = AuthOptions {
        required: true,
        ..AuthOptions::default()
    };
    let ingest = Service::start_behind(&stack, options(), auth.clone()).await;
    let required = [
        ("SPRINGTIDE__AUTH__REQUIRED", "true"),
        ("SPRINGTIDE__SERVE__API_KEY", "unused"),
        ("SPRINGTIDE__TRAINER__API_KEY", "unused"),
    ];
    let control = Control::start(&stack, &required).await;
    let (serve, _serve) = serve(&stack, Auth::new(auth, stack.pool_of("serve"))).await;
    let mut cases_of_all = Vec::new();
    for (role, base) in [
        ("serve", serve),
        ("ingest", format!("http://{}", ingest.address)),
        ("control", format!("http://127.0.0.1:{}", control.port)),
    ] {
        cases_of_all.extend(cases(role, &base).await);
    }

    let mut keys: Vec<(String, Scopes, String)> = Vec::new();
    let grants = Scope::ALL.map(|scope| (scope.as_str().to_owned(), Grant::Scopes(Scopes::of(&[scope]))));
    let roles = Role::ALL.map(|role| (format!("role {}", role.as_str()), Grant::Role(role)));
    for (name, grant) in grants.into_iter().chain(roles) {
        let key = NewKey {
            tenant: "default",
            grant,
            label: &name,
            expires_at: None,
            replica: None,
            requests_per_second: None,
        };
        let actor = edge::audit::Actor {
            key: None,
            name: "tests/scopes",
        };
        let created = key::create(&stack.pool, &key, actor, "").await.unwrap();
        keys.push((name, grant.scopes(), created.secret));
    }

    let client = Client::new();
    let mut lines = String::new();
    for case in &cases_of_all {
        let name = format!("{} {}", case.role, case.name);
        let open = case.scopes.is_empty();
        let without = if open { None } else { Some(401) };
        assert_eq!(case.send(&client, None).await, without, "{name} without a key");
        assert_eq!(
            case.send(&client, Some("spring_x")).await,
            without,
            "{name}, unknown key"
        );
        let mut marks = String::new();
        for (held, scopes, secret) in &keys {
            let refusal = case.send(&client, Some(secret)).await;
            let trusted = [Scope::Completions, Scope::Generations, Scope::Research];
            let trusted = trusted.into_iter().any(|scope| scopes.allow(scope));
            let allowed = open || case.scopes.iter().any(|scope| scopes.allow(*scope));
            // where no token can be given, a feedback key that needs one is refused
            let allowed = allowed && (trusted || !takes_no_token(case.role, &case.name));
            let expected = if allowed { None } else { Some(403) };
            assert_eq!(refusal, expected, "{name} with a key of {held}");
            if Scope::parse(held).is_some() {
                marks += if refusal.is_none() { " yes |" } else { " |" };
            }
        }
        let open = if open { "yes" } else { "" };
        writeln!(lines, "| {} | {} | {open} |{marks}", case.role, case.name).unwrap();
    }
    lines += &fixed_keys(&stack, &client).await;

    let header: Vec<&str> = Scope::ALL.iter().map(|scope| scope.as_str()).collect();
    let mut table = format!("| role | route | no key | {} |\n", header.join(" | "));
    table += &format!("|---{}|\n{lines}", "|---".repeat(2 + header.len()));
    check_page("tests/scopes.txt", "routes", "tests/operations/scopes.rs", &table);
    ingest.stop().await;
}

/// Relay and collector have no database: one key, or none. Returns their lines of the table.
async fn fixed_keys(stack: &Stack, client: &Client) -> String {
    let stop = CancellationToken::new();
    let _stop = stop.clone().drop_guard();
    let (at_relay, relay) = listener().await;
    let (store, folder, until) = (
        Store::open(&stack.store_url).unwrap(),
        stack.dir.path().join("relay"),
        stop.clone(),
    );
    tokio::spawn(async move {
        let options = serving::relay::Options {
            caller_key: Some(CALLER_KEY.to_owned()),
            ..Default::default()
        };
        serving::relay::run(&options, &folder, store, at_relay.into(), Router::new(), until).await
    });
    let (at_collector, collector) = listener().await;
    let folder = stack.dir.path().join("spool");
    tokio::spawn(async move {
        let spool = ingest::spool::Options {
            caller_key: Some(CALLER_KEY.to_owned()),
            ..Default::default()
        };
        let nowhere = "http://127.0.0.1:1";
        let listener = at_collector.into();
        ingest::collector::run(options(), spool, &folder, nowhere, listener, Router::new(), stop).await
    });
    let mut lines = String::new();
    for (role, base) in [("relay", relay), ("collector", collector)] {
        eventually("the role answers", START, async || {
            reqwest::get(format!("{base}/health")).await.ok()
        })
        .await;
        for case in cases(role, &base).await {
            let name = format!("{role} {}", case.name);
            let open = case.scopes.is_empty();
            let without = if open { None } else { Some(401) };
            assert_eq!(case.send(client, None).await, without, "{name} without a key");
            assert_eq!(
                case.send(client, Some("spring_x")).await,
                without,
                "{name}, unknown key"
            );
            assert_eq!(case.send(client, Some(CALLER_KEY)).await, None, "{name}");
            let (open, marks) = match open {
                true => ("yes", " yes |".repeat(Scope::ALL.len())),
                false => ("", format!(" its `caller_key` |{}", " |".repeat(Scope::ALL.len() - 1))),
            };
            writeln!(lines, "| {role} | {} | {open} |{marks}", case.name).unwrap();
        }
    }
    lines
}
