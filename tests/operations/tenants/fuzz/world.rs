//! Two tenants with a policy each, their keys and objects, and every role that answers requests.

use std::time::Duration;

use axum::Router;
use edge::auth::{Auth, AuthOptions, LimitOptions, Scope};
use reqwest::{Client, Method};
use serde_json::{Value, json};
use sqlx::PgPool;
use store::Store;
use tokio_util::sync::{CancellationToken, DropGuard};
use uuid::Uuid;

use crate::scopes::{listener, serve};
use crate::tenants::{REQUIRED, key};
use fixture::control::Control;
use fixture::ingest::{Service, count, generation, options};
use fixture::serving::{Publisher, wait_until_ready};
use fixture::{Stack, eventually, operations};

pub const SOON: Duration = Duration::from_secs(90);
/// The key of relay and collector, which have no table of keys. It is the first tenant's.
pub const CALLER_KEY: &str = "spring_caller_of_alpha";
const SCOPES: [Scope; 10] = [
    Scope::Feedback,
    Scope::Generations,
    Scope::Completions,
    Scope::Priority,
    Scope::Teach,
    Scope::Replica,
    Scope::Read,
    Scope::Texts,
    Scope::Research,
    Scope::Release,
];

/// A tenant, its keys and its objects.
pub struct Side {
    pub tenant: &'static str,
    pub policy: &'static str,
    pub canary: String,
    /// By scope; the last has all but `admin`.
    pub keys: Vec<String>,
    pub run: Uuid,
    pub generation: Uuid,
    /// Ids of generations, episodes, feedback, runs, replicas, payloads.
    pub ids: Vec<String>,
}

/// A running role.
pub struct Target {
    pub role: &'static str,
    pub base: String,
    pub routes: Vec<Route>,
    /// The only tenant that may succeed at routes about a policy.
    pub owner: Option<&'static str>,
}

pub struct Route {
    pub method: Method,
    /// As in the OpenAPI document.
    pub path: String,
    /// `None`: open to everybody.
    pub scope: Option<Scope>,
}

async fn routes(base: &str) -> Vec<Route> {
    let mut routes = Vec::new();
    for (path, method, operation) in operations(base).await {
        let scope = operation["security"][0]["bearer"][0].as_str();
        routes.push(Route {
            method,
            path,
            scope: scope.and_then(Scope::parse),
        });
    }
    routes.push(Route {
        method: Method::GET,
        path: "/metrics".to_owned(),
        scope: None,
    });
    routes
}

impl Side {
    async fn new(pool: &PgPool, tenant: &'static str, policy: &'static str) -> Self {
        let canary = format!("canary-{tenant}-{}", Uuid::now_v7().simple());
        let runs: Vec<Uuid> = sqlx::query_scalar(include_str!("../fuzz.sql"))
            .bind(policy)
            .bind(tenant)
            .bind(&canary)
            .fetch_one(pool)
            .await
            .unwrap();
        let mut keys = Vec::new();
        for scope in SCOPES {
            keys.push(key(pool, tenant, &[scope]).await);
        }
        keys.push(key(pool, tenant, &SCOPES).await);
        Side {
            tenant,
            policy,
            canary,
            keys,
            run: runs[0],
            generation: Uuid::now_v7(),
            ids: runs
                .iter()
                .map(Uuid::to_string)
                .chain([format!("replica-of-{tenant}")])
                .collect(),
        }
    }

    pub fn key_with(&self, scope: Scope) -> &str {
        let at = SCOPES.iter().position(|one| *one == scope);
        &self.keys[at.unwrap_or(SCOPES.len())]
    }

    /// Logs a generation of version 1002 and everything that can be said about it.
    async fn log(&mut self, ingest: &str) {
        let canary = &self.canary;
        let post = async |path: &str, body: Value| {
            let sent = Client::new()
                .post(format!("{ingest}{path}"))
                .bearer_auth(&self.keys[SCOPES.len()])
                .header("idempotency-key", format!("order of {}", self.tenant));
            let answer = sent.json(&body).send().await.unwrap();
            let (status, answer) = (answer.status(), answer.json::<Value>().await.unwrap());
            assert_eq!(status, 200, "{path}: {answer}");
            answer
        };
        let mut logged = generation();
        logged.id = self.generation;
        logged.policy = self.policy.to_owned();
        logged
            .versions
            .iter_mut()
            .for_each(|span| (span.version, span.root) = (1002, [2; 32]));
        for text in [&mut logged.user_key, &mut logged.replica, &mut logged.line] {
            text.clone_from(canary);
        }
        (logged.task_id, logged.group_id) = (Some(canary.clone()), Some(canary.clone()));
        let mut body = serde_json::to_value(&logged).unwrap();
        body["source"] = json!(canary);
        post("/v1/generations", body).await;
        let feedback = json!({"generation_id": logged.id, "metric_name": "comment", "value": canary,
                              "tags": {"note": canary}, "source": canary});
        let feedback = post("/v1/feedback", feedback).await["feedback_id"].clone();
        post(
            "/v1/retractions",
            json!({"feedback_id": feedback, "reason": canary, "source": canary}),
        )
        .await;
        post(
            "/v1/episode-ends",
            json!({"episode_id": logged.episode_id, "source": canary}),
        )
        .await;
        let payload = [canary.as_bytes(), &[0; 3]].concat();
        let digest = blake3::hash(&payload).to_hex().to_string();
        self.ids
            .extend([logged.id.to_string(), logged.episode_id.to_string(), digest]);
        self.ids.push(feedback.as_str().unwrap().to_owned());
    }
}

/// Everything that runs, with what stops it.
pub struct World {
    pub targets: Vec<Target>,
    pub sides: Vec<Side>,
    _controls: Vec<Control>,
    _stop: Vec<DropGuard>,
    pub ingest: Service,
}

impl World {
    pub async fn start(stack: &Stack) -> Self {
        let unlimited = LimitOptions {
            key_requests_per_second: 0,
            key_open_requests_max: 0,
            ..LimitOptions::default()
        };
        let auth = AuthOptions {
            required: true,
            limits: unlimited,
            oidc: None,
        };
        let mut sides = vec![
            Side::new(&stack.pool, "alpha", "demo").await,
            Side::new(&stack.pool, "beta", "demo-of-beta").await,
        ];
        let with_payloads = ::ingest::Options {
            payload_store: Some(format!("file://{}", stack.dir.path().join("payloads").display())),
            ..options()
        };
        let ingest = Service::start_behind(stack, with_payloads, auth.clone()).await;
        let at_ingest = format!("http://{}", ingest.address);
        for side in &mut sides {
            side.log(&at_ingest).await;
        }
        eventually("both generations are stored", SOON, async || {
            (count(&stack.pool, "select count(*) from episode_end").await == 2).then_some(())
        })
        .await;
        let mut controls = Vec::new();
        for side in &sides {
            let state = stack.dir.path().join(side.tenant);
            std::fs::create_dir(&state).unwrap();
            std::fs::write(state.join("report.html"), &side.canary).unwrap();
            let (state, keys) = (state.display().to_string(), stack.keys_dir.display().to_string());
            let mut more = REQUIRED.to_vec();
            more.extend([
                ("SPRINGTIDE__STATE_DIR", &*state),
                ("SPRINGTIDE__POLICY__STORE", &*stack.store_url),
                ("SPRINGTIDE__POLICY__KEYS", &*keys),
                ("SPRINGTIDE__POLICY__NAME", side.policy),
                ("SPRINGTIDE__POLICY__TENANT", side.tenant),
                ("SPRINGTIDE__AUTH__LIMITS__KEY_REQUESTS_PER_SECOND", "0"),
                ("SPRINGTIDE__AUTH__LIMITS__KEY_OPEN_REQUESTS_MAX", "0"),
                ("SPRINGTIDE__TELEMETRY__FILTER", "off"),
            ]);
            controls.push(Control::start(stack, &more).await);
        }
        // The control role of `demo` assigns this version, and the replica loads it.
        Publisher::new(stack).publish(1, None, 0).await;
        let (at_serve, stop_serve) = serve(stack, Auth::new(auth, stack.pool.clone())).await;
        wait_until_ready(&at_serve).await;
        let mut stops = vec![stop_serve];
        let mut places = vec![("serve", at_serve, None), ("ingest", at_ingest.clone(), None)];
        for (side, control) in sides.iter().zip(&controls) {
            let base = format!("http://127.0.0.1:{}", control.port);
            places.push(("control", base, Some(side.tenant)));
        }
        let (relay, stop) = relay(stack).await;
        stops.push(stop);
        places.push(("relay", relay, None));
        let (collector, stop) = collector(stack, &sides[0], at_ingest).await;
        stops.push(stop);
        places.push(("collector", collector, None));
        let mut targets = Vec::new();
        for (role, base, owner) in places {
            eventually("the role answers", SOON, async || {
                reqwest::get(format!("{base}/health")).await.ok()
            })
            .await;
            targets.push(Target {
                role,
                routes: routes(&base).await,
                base,
                owner,
            });
        }
        World {
            targets,
            sides,
            _controls: controls,
            _stop: stops,
            ingest,
        }
    }

    /// Each tenant finds its own canary where it may, so that the fuzz looks for something.
    pub async fn see_own_canaries(&self) {
        for side in &self.sides {
            let control = self
                .targets
                .iter()
                .find(|target| target.owner == Some(side.tenant))
                .unwrap();
            let run = format!("/v1/runs/{}", side.run);
            for path in [
                "/v1/runs".to_owned(),
                format!("{run}/events"),
                format!("{run}/checkpoints"),
                run,
                "/v1/versions".to_owned(),
                "/v1/versions/1002".to_owned(),
                "/v1/releases".to_owned(),
                "/v1/replicas".to_owned(),
                "/v1/swaps".to_owned(),
                "/report".to_owned(),
                format!("/v1/generations/{}/origin", side.generation),
            ] {
                let url = format!("{}{path}", control.base);
                let request = Client::new().get(url).bearer_auth(side.key_with(Scope::Read));
                let answer = request.send().await.unwrap().bytes().await.unwrap();
                let answer = String::from_utf8_lossy(&answer).into_owned();
                assert!(answer.contains(&side.canary), "{path}: {answer}");
            }
        }
    }
}

async fn relay(stack: &Stack) -> (String, DropGuard) {
    let (at, url) = listener().await;
    let (stop, store) = (CancellationToken::new(), Store::open(&stack.store_url).unwrap());
    let (folder, until) = (stack.dir.path().join("relay"), stop.clone());
    tokio::spawn(async move {
        let options = serving::relay::Options {
            caller_key: Some(CALLER_KEY.to_owned()),
            ..Default::default()
        };
        serving::relay::run(&options, &folder, store, at.into(), Router::new(), until).await
    });
    (url, stop.drop_guard())
}

/// A collector of the first tenant.
async fn collector(stack: &Stack, side: &Side, upstream: String) -> (String, DropGuard) {
    let (at, url) = listener().await;
    let stop = CancellationToken::new();
    let (folder, until) = (stack.dir.path().join("spool"), stop.clone());
    let api_key = side.keys.last().cloned();
    tokio::spawn(async move {
        let spool = ingest::spool::Options {
            caller_key: Some(CALLER_KEY.to_owned()),
            api_key,
            ..Default::default()
        };
        ingest::collector::run(options(), spool, &folder, &upstream, at.into(), Router::new(), until).await
    });
    (url, stop.drop_guard())
}
