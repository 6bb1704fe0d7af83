//! The role `springtide world` over HTTP.

use std::sync::Arc;
use std::time::Duration;

use crate::support::{self, block_on, command};
use edge::server::Listener;
use reqwest::{Client, StatusCode};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use world::Ended;
use world::provider::{Error, Provider as _};
use world::remote::Remote;
use world::service::{self, Options};

struct Role {
    url: String,
    shutdown: CancellationToken,
    running: tokio::task::JoinHandle<anyhow::Result<()>>,
    client: Client,
}

impl Role {
    async fn start(name: &'static str, options: Options) -> Self {
        let listener = Listener::from(TcpListener::bind("127.0.0.1:0").await.unwrap());
        let url = listener.url().unwrap();
        let shutdown = CancellationToken::new();
        let stop = shutdown.clone();
        let running = tokio::spawn(async move {
            let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
            service::run(&options, &folder, listener, axum::Router::new(), stop).await
        });
        let role = Self {
            url,
            shutdown,
            running,
            client: Client::new(),
        };
        // It accepts connections before its image has booted, and answers afterwards.
        role.client.get(format!("{}/health", role.url)).send().await.unwrap();
        role
    }

    async fn post(&self, path: &str, body: &Value) -> (StatusCode, Value) {
        let request = self
            .client
            .post(format!("{}{path}", self.url))
            .bearer_auth("key")
            .json(body);
        let response = request.send().await.unwrap();
        (response.status(), response.json().await.unwrap())
    }

    async fn create(&self, body: &Value) -> String {
        let (status, created) = self.post("/v1/worlds", body).await;
        assert_eq!(status, StatusCode::CREATED, "{created}");
        created["id"].as_str().unwrap().to_owned()
    }

    async fn end(&self, id: &str) -> StatusCode {
        let request = self
            .client
            .delete(format!("{}/v1/worlds/{id}", self.url))
            .bearer_auth("key");
        request.send().await.unwrap().status()
    }

    async fn used(&self) -> u64 {
        let request = self.client.get(format!("{}/v1/worlds", self.url)).bearer_auth("key");
        let state: Value = request.send().await.unwrap().json().await.unwrap();
        state["used"].as_u64().unwrap()
    }

    async fn stop(self) {
        self.shutdown.cancel();
        self.running.await.unwrap().unwrap();
    }
}

fn options() -> Options {
    Options {
        caller_key: Some("key".to_owned()),
        worlds_max: 3,
        ready: 1,
        machine: support::options(),
        ..Options::default()
    }
}

#[test]
#[ignore = "needs an image: make check NAME=world"]
fn a_harness_creates_worlds_runs_programs_and_ends_them() {
    block_on(async {
        let role = Role::start("service", options()).await;
        let without_key = role.client.post(format!("{}/v1/worlds", role.url)).json(&json!({}));
        assert_eq!(without_key.send().await.unwrap().status(), StatusCode::UNAUTHORIZED);
        for (body, expected) in [
            (json!({"image": "other"}), StatusCode::NOT_FOUND),
            (json!({"ttl_seconds": 0}), StatusCode::BAD_REQUEST),
            (json!({"ttl_seconds": 1e9}), StatusCode::BAD_REQUEST),
            (json!({"network": true}), StatusCode::BAD_REQUEST),
        ] {
            let (status, problem) = role.post("/v1/worlds", &body).await;
            assert!(
                status == expected || status == StatusCode::UNPROCESSABLE_ENTITY,
                "{body}: {problem}"
            );
        }

        let id = role.create(&json!({"image": "postgres"})).await;
        let path = format!("/v1/worlds/{id}/run");
        let insert = json!({"program": ["psql", "-qAt", "-f", "a.sql"],
                            "files": {"a.sql": "insert into seed values (7); select max(v) from seed"}});
        let (status, ran) = role.post(&path, &insert).await;
        assert_eq!(status, StatusCode::OK, "{ran}");
        assert_eq!((&ran["ended"], &ran["stdout"]), (&json!({"exited": 0}), &json!("7\n")));
        let (_, ran) = role
            .post(&path, &json!({"program": ["sleep", "9"], "limits": {"wall_ms": 100}}))
            .await;
        assert_eq!(ran["ended"], json!({"exceeded": "wall"}));
        let (status, refused) = role.post(&path, &json!({"program": ["no-such-program"]})).await;
        assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{refused}");
        let (status, _) = role.post(&path, &json!({"program": []})).await;
        assert_eq!(status, StatusCode::BAD_REQUEST);

        // One program at a time; and a world can be ended while one runs.
        let long = json!({"program": ["sleep", "100"], "limits": {"wall_ms": 100_000}});
        let role = Arc::new(role);
        let running = tokio::spawn({
            let (role, path, long) = (role.clone(), path.clone(), long.clone());
            async move {
                // The programs below may be first.
                loop {
                    let answer = role.post(&path, &long).await;
                    if answer.0 != StatusCode::CONFLICT {
                        return answer;
                    }
                }
            }
        });
        loop {
            let (status, _) = role.post(&path, &json!({"program": ["true"]})).await;
            if status == StatusCode::CONFLICT {
                break;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(role.end(&id).await, StatusCode::NO_CONTENT);
        let (status, lost) = running.await.unwrap();
        assert_eq!(status, StatusCode::GONE, "{lost}");
        assert_eq!(role.end(&id).await, StatusCode::NOT_FOUND);
        assert_eq!(role.post(&path, &long).await.0, StatusCode::NOT_FOUND);
        Arc::into_inner(role).unwrap().stop().await;
    });
}

#[test]
#[ignore = "needs an image: make check NAME=world"]
fn worlds_are_bounded_die_at_their_time_to_live_and_serve_a_remote_provider() {
    block_on(async {
        let role = Role::start("ttl", options()).await;
        let remote = Remote::new(role.client.clone(), &role.url, Some("key".to_owned()), None, 600);
        let mut world = remote.create().await.unwrap();
        let mut echo = command(&["cat"]);
        echo.stdin = vec![0, 0xff, b'a'];
        let output = world.run(&echo).await.unwrap();
        assert_eq!((output.ended, output.stdout), (Ended::Exited(0), echo.stdin));
        let refused = world.run(&command(&["no-such-program"])).await.unwrap_err();
        assert!(matches!(refused, Error::Refused(_)), "{refused:?}");

        for _ in 0..2 {
            role.create(&json!({"ttl_seconds": 2})).await;
        }
        // Those two may have died already, so that this one finds a place.
        if let Err(error) = remote.create().await {
            assert!(matches!(error, Error::Full(_)), "{error:?}");
            assert!(error.to_string().contains("worlds are in use"), "{error}");
        }
        let mut used = role.used().await;
        while used > 2 {
            tokio::time::sleep(Duration::from_millis(100)).await;
            used = role.used().await;
        }
        world.destroy().await.unwrap();
        role.stop().await;
    });
}
