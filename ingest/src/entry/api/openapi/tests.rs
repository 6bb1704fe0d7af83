use event_log::event::{self, Event};
use serde_json::{Value, json};
use uuid::Uuid;

use super::super::tests::{generation, router};

fn document() -> Value {
    let (_, document) = super::super::document();
    serde_json::to_value(document).unwrap()
}

#[test]
fn it_is_openapi_3_1_and_every_reference_resolves() {
    fn references(value: &Value, found: &mut Vec<String>) {
        match value {
            Value::Object(members) => {
                for (name, member) in members {
                    match member {
                        Value::String(target) if name == "$ref" => found.push(target.clone()),
                        _ => references(member, found),
                    }
                }
            }
            Value::Array(items) => items.iter().for_each(|item| references(item, found)),
            _ => {}
        }
    }
    let document = document();
    assert!(document["openapi"].as_str().unwrap().starts_with("3.1"));
    let mut found = Vec::new();
    references(&document, &mut found);
    assert!(found.len() > 20, "{found:?}");
    for reference in found {
        let pointer = reference.strip_prefix('#').unwrap();
        assert!(document.pointer(pointer).is_some(), "{reference} does not resolve");
    }
}

/// Probes every path of the document with every method. The router answers 405 to unsupported
/// methods and lists the supported ones, which must be those of the document.
#[tokio::test]
async fn the_document_describes_exactly_the_routes() {
    use axum::body::Body;
    use axum::http::{Method, Request};
    use tower::ServiceExt;

    let document = document();
    let described = document["paths"].as_object().unwrap();
    let paths = [
        "/health",
        "/openapi.json",
        "/v1/feedback",
        "/v1/generations",
        "/v1/events",
        "/v1/events:batch",
        "/v1/retractions",
        "/v1/episode-ends",
        "/v1/payloads/{digest}",
    ];
    assert_eq!(described.len(), paths.len(), "{:?}", described.keys());
    let router = edge::server::with_problems(router());
    let ask = async |method: &Method, path: &str| {
        let request = Request::builder().method(method).uri(path).body(Body::empty());
        router.clone().oneshot(request.unwrap()).await.unwrap()
    };
    for path in paths {
        let methods = [Method::GET, Method::POST, Method::PUT, Method::PATCH, Method::DELETE];
        let has = |method: &Method| described[path][method.as_str().to_lowercase()].is_object();
        for method in &methods {
            let answer = ask(method, path).await;
            let status = answer.status().as_u16();
            assert_eq!(status != 405, has(method), "{method} {path}: {status}");
            if status != 405 {
                continue;
            }
            assert_eq!(answer.headers()["content-type"], "application/problem+json");
            let allowed = answer.headers()["allow"].to_str().unwrap();
            for method in &methods {
                let listed = allowed.split(',').any(|allowed| allowed == method.as_str());
                assert_eq!(listed, has(method), "{path} allows {allowed}");
            }
        }
        for operation in described[path].as_object().unwrap().values() {
            let reference = &operation["responses"]["405"]["$ref"];
            assert_eq!(reference, "#/components/responses/MethodNotAllowed", "{path}");
        }
    }
    for path in ["/v1/payloads/", "/v1/payload", "/v1/feedback/", "/"] {
        let answer = ask(&Method::PUT, path).await;
        assert_eq!(answer.status(), 404, "{path}");
        assert_eq!(answer.headers()["content-type"], "application/problem+json");
    }
    let payload = &described["/v1/payloads/{digest}"]["put"]["responses"];
    assert_eq!(payload["404"]["$ref"], "#/components/responses/NoSuchPath");
    for name in ["NoSuchPath", "MethodNotAllowed"] {
        let response = &document["components"]["responses"][name];
        assert!(response["content"]["application/problem+json"].is_object(), "{name}");
    }
}

#[test]
fn every_endpoint_describes_every_refusal() {
    let document = document();
    for (path, item) in document["paths"].as_object().unwrap() {
        let Some(operation) = item.get("post").or(item.get("put")) else {
            continue;
        };
        for status in [
            "200", "400", "401", "403", "408", "409", "413", "415", "429", "500", "503",
        ] {
            let response = &operation["responses"][status];
            assert!(response.is_object(), "{path} does not describe {status}");
            if status != "200" {
                assert!(
                    response["content"]["application/problem+json"].is_object(),
                    "{path} {status}"
                );
            }
        }
    }
}

fn keys(value: &Value) -> Vec<&str> {
    let mut keys: Vec<_> = value.as_object().unwrap().keys().map(String::as_str).collect();
    keys.sort_unstable();
    keys
}

/// `example` is a `T` with every field.
fn assert_described<T: serde::de::DeserializeOwned>(schema: &str, example: &Value) {
    let document = document();
    let schema = &document["components"]["schemas"][schema];
    assert_eq!(keys(&schema["properties"]), keys(example));
    let required: Vec<_> = schema["required"]
        .as_array()
        .unwrap()
        .iter()
        .map(|name| name.as_str().unwrap())
        .collect();
    for name in keys(example) {
        let mut without = example.clone();
        without.as_object_mut().unwrap().remove(name);
        let needed = serde_json::from_value::<T>(without).is_err();
        assert_eq!(required.contains(&name), needed, "{name}");
    }
}

#[test]
fn a_generation_has_the_fields_that_are_described() {
    let proof = event::Proof {
        sampler: "0".repeat(64),
        signature: [0; 64],
    };
    let signed = event::Generation {
        untrainable: Some("no_token_ids".to_owned()),
        engine: Some("vllm".into()),
        proof: Some(proof),
        ..generation()
    };
    let example = serde_json::to_value(signed).unwrap();
    assert_described::<event::Generation>("Generation", &example);
}

#[test]
fn a_feedback_event_has_the_fields_that_are_described() {
    let example = json!({
        "feedback_id": Uuid::now_v7(), "generation_id": Uuid::now_v7(), "episode_id": Uuid::now_v7(),
        "metric_name": "accept", "value": true, "tags": {},
    });
    let document = document();
    let schema = &document["components"]["schemas"]["Feedback"];
    assert_eq!(keys(&schema["properties"]), keys(&example));
    assert_eq!(
        schema["properties"]["value"]["$ref"],
        "#/components/schemas/FeedbackValue"
    );
    let mut about_one = example;
    about_one.as_object_mut().unwrap().remove("episode_id");
    let feedback: event::Feedback = serde_json::from_value(about_one.clone()).unwrap();
    assert_eq!(serde_json::to_value(feedback).unwrap(), about_one);
}

#[test]
fn an_event_has_the_fields_that_are_described() {
    let document = document();
    let schema = &document["components"]["schemas"]["CanonicalEvent"];
    let event: Event = generation().into_event("default", "test");
    let event = serde_json::to_value(event).unwrap();
    let mut written = keys(&event);
    written.retain(|name| *name != "tenant");
    written.extend(["feedback", "retraction", "episode_end"]);
    written.sort_unstable();
    assert_eq!(keys(&schema["properties"]), written);
}
