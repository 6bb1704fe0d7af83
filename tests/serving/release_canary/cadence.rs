//! Canaries that nobody proposes, and receivers of webhooks.

use super::World;
use fixture::Stack;
use serde_json::{Value, json};

/// Nobody proposes: the loop does, as often as the configuration says, and whoever wants to know is told.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_loop_proposes_versions_of_learner_and_tells_receivers_of_each_decision() {
    let stack = Stack::start("canary_cadence").await;
    let receiver = Receiver::start().await;
    let secret_file = stack.dir.path().join("webhook-secret");
    std::fs::write(&secret_file, "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=").unwrap();
    let options = json!({
        "champion": "canary",
        "propose": {"every": "1s", "versions": 2},
        "canary": {"steps": [{"setWeight": 50}, {"pause": {"duration": "1s"}}]},
        "webhook": [{"name": "chat", "url": receiver.url, "secret_file": secret_file}],
    });
    let world = World::start_with(stack, serde_json::from_value(options).unwrap()).await;
    let stop = tokio_util::sync::CancellationToken::new();
    let task = tokio::spawn(release::run(world.releases.clone(), stop.clone()));
    fixture::eventually(
        "the loop makes learner's version champion",
        std::time::Duration::from_secs(120),
        async || (world.version_of("champion").await == Some(3)).then_some(()),
    )
    .await;
    let told = fixture::eventually("the receiver is told", std::time::Duration::from_secs(60), async || {
        let told = receiver.told();
        told.last()
            .is_some_and(|(_, last)| last["data"]["to"] == "champion")
            .then_some(told)
    })
    .await;
    let kinds: Vec<&str> = told.iter().map(|(_, told)| told["type"].as_str().unwrap()).collect();
    assert_eq!(
        kinds,
        [
            "canary.propose",
            "canary.approve",
            "canary.prepare",
            "canary.pass",
            "canary.step",
            "canary.pass"
        ],
        "in order, and the one that was refused only once more: {told:?}"
    );
    let reason = told[0].1["data"]["reason"].as_str().unwrap();
    assert!(reason.starts_with("2 versions further"), "{reason}");
    let refused = receiver.refused();
    assert_eq!(refused.as_ref(), Some(&told[0].0), "an attempt again has the same id");
    let shown = world.get("/v1/webhooks").await;
    assert_eq!(
        (&shown["webhooks"][0]["name"], &shown["webhooks"][0]["failures"]),
        (&json!("chat"), &json!(0)),
        "{shown}"
    );
    stop.cancel();
    task.await.unwrap().unwrap();
    world.end().await;
}

/// A receiver of webhooks, which refuses the first one.
struct Receiver {
    url: String,
    refused: std::sync::Arc<std::sync::Mutex<Option<String>>>,
    told: std::sync::Arc<std::sync::Mutex<Vec<(String, Value)>>>,
}

impl Receiver {
    async fn start() -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/hook", listener.local_addr().unwrap());
        let (refused, told) = (std::sync::Arc::default(), std::sync::Arc::default());
        let receiver = Receiver { url, refused, told };
        let (refused, told) = (receiver.refused.clone(), receiver.told.clone());
        let hook = async move |headers: axum::http::HeaderMap, axum::Json(body): axum::Json<Value>| {
            let id = headers["webhook-id"].to_str().unwrap().to_owned();
            assert!(headers["webhook-signature"].to_str().unwrap().starts_with("v1,"));
            let first = refused.lock().unwrap().is_none();
            if first {
                *refused.lock().unwrap() = Some(id);
                return axum::http::StatusCode::SERVICE_UNAVAILABLE;
            }
            told.lock().unwrap().push((id, body));
            axum::http::StatusCode::NO_CONTENT
        };
        let router = axum::Router::new().route("/hook", axum::routing::post(hook));
        tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        receiver
    }

    fn told(&self) -> Vec<(String, Value)> {
        self.told.lock().unwrap().clone()
    }

    fn refused(&self) -> Option<String> {
        self.refused.lock().unwrap().clone()
    }
}
