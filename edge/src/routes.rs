//! Routes that each name the scope they need. The router that checks it and the OpenAPI document
//! that says it are made from the same list, so they cannot differ, and no route can be added
//! without a scope.

use std::convert::Infallible;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::handler::Handler;
use axum::http::header;
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{self, MethodRouter};
use serde_json::{Map, Value, json};

use crate::auth::{Auth, Principal, Scope};
use crate::intake::Intake;
use crate::problem::Problem;
use crate::tenant::OwnerOnly;
use crate::turns::{self, Turns};

/// Largest body of a route that sets no other limit: axum's default.
const BODY_BYTES_MAX: usize = 2 << 20;
/// Bytes of all bodies together, for a role that sets no other limit.
const IN_FLIGHT_BYTES_MAX: usize = 128 << 20;
/// How much of them one tenant may hold while others hold nothing.
const TENANT_SHARE_MAX: f64 = 0.5;

/// Routes of an API.
#[derive(Debug)]
pub struct Routes<S = ()> {
    guarded: Router<S>,
    open: Router<S>,
    operations: Vec<Operation>,
    /// The largest body of all routes.
    body_bytes_max: usize,
}

/// A method and its handler.
#[derive(Debug)]
pub struct Endpoint<S> {
    method: &'static str,
    router: MethodRouter<S, Infallible>,
    body_bytes_max: usize,
    errors: Errors,
    /// A scope that is enough, too.
    other_scope: Option<Scope>,
}

#[derive(Debug, Clone, Copy)]
struct Operation {
    path: &'static str,
    method: &'static str,
    /// `None`: needs no key.
    scope: Option<Scope>,
    other_scope: Option<Scope>,
    summary: &'static str,
    errors: Errors,
}

/// What errors look like.
#[derive(Debug, Clone, Copy)]
enum Errors {
    Problem,
    ProblemOrPage,
    /// JSON in the shape of another API.
    Json,
}

macro_rules! methods {
    ($($method:ident)+) => {$(
        pub fn $method<S, T, H>(handler: H) -> Endpoint<S>
        where
            S: Clone + Send + Sync + 'static,
            T: 'static,
            H: Handler<T, S>,
        {
            Endpoint {
                method: stringify!($method),
                router: routing::$method(handler),
                body_bytes_max: BODY_BYTES_MAX,
                errors: Errors::Problem,
                other_scope: None,
            }
        }
    )+};
}

methods! { get post put delete }

impl<S: Clone + Send + Sync + 'static> Endpoint<S> {
    /// The largest body that it reads, instead of 2 MiB.
    #[must_use]
    pub fn body_bytes_max(self, bytes: usize) -> Self {
        Self {
            router: self.router.layer(DefaultBodyLimit::max(bytes)),
            body_bytes_max: bytes,
            ..self
        }
    }

    /// It is for browsers: an error may be an HTML page too.
    #[must_use]
    pub fn page(self) -> Self {
        Self {
            errors: Errors::ProblemOrPage,
            ..self
        }
    }

    /// Keys with this scope may use it, too.
    #[must_use]
    pub fn also_for(self, scope: Scope) -> Self {
        Self {
            other_scope: Some(scope),
            ..self
        }
    }

    /// Its errors have the shape of another API. A layer around all routes gives them that.
    #[must_use]
    pub fn json_errors(self) -> Self {
        Self {
            errors: Errors::Json,
            ..self
        }
    }

    /// Runs few requests at a time.
    #[must_use]
    pub fn in_turn(self, turns: Turns) -> Self {
        Self {
            router: self.router.layer(middleware::from_fn_with_state(turns, turns::in_turn)),
            ..self
        }
    }
}

impl<S: Clone + Send + Sync + 'static> Routes<S> {
    #[expect(clippy::new_without_default, reason = "no caller needs a default")]
    pub fn new() -> Self {
        Self {
            guarded: Router::new(),
            open: Router::new(),
            operations: Vec::new(),
            body_bytes_max: 0,
        }
    }

    /// Adds a route for keys with `scope`.
    #[must_use]
    pub fn route(mut self, scope: Scope, path: &'static str, summary: &'static str, endpoint: Endpoint<S>) -> Self {
        let checked = endpoint
            .router
            .route_layer(middleware::from_fn_with_state((scope, endpoint.other_scope), require));
        self.guarded = self.guarded.route(path, checked);
        self.body_bytes_max = self.body_bytes_max.max(endpoint.body_bytes_max);
        self.operations.push(Operation {
            path,
            method: endpoint.method,
            scope: Some(scope),
            other_scope: endpoint.other_scope,
            summary,
            errors: endpoint.errors,
        });
        self
    }

    /// Adds a route for everybody.
    #[must_use]
    pub fn open_route(mut self, path: &'static str, summary: &'static str, endpoint: Endpoint<S>) -> Self {
        self.open = self.open.route(path, endpoint.router);
        self.operations.push(Operation {
            path,
            method: endpoint.method,
            scope: None,
            other_scope: None,
            summary,
            errors: endpoint.errors,
        });
        self
    }

    /// Lets only keys of a policy's tenant, and administrators, use the routes added so far. Open
    /// routes stay open.
    #[must_use]
    pub fn only_for_owner(self, owner: OwnerOnly) -> Self {
        let checked = self
            .guarded
            .route_layer(middleware::from_fn_with_state(owner, require_owner));
        Self {
            guarded: checked,
            ..self
        }
    }

    #[must_use]
    pub fn merge(mut self, other: Self) -> Self {
        self.guarded = self.guarded.merge(other.guarded);
        self.open = self.open.merge(other.open);
        self.operations.extend(other.operations);
        self.body_bytes_max = self.body_bytes_max.max(other.body_bytes_max);
        self
    }

    #[must_use]
    pub fn with_state<Z>(self, state: S) -> Routes<Z> {
        Routes {
            guarded: self.guarded.with_state(state.clone()),
            open: self.open.with_state(state),
            operations: self.operations,
            body_bytes_max: self.body_bytes_max,
        }
    }
}

/// The least that [`Routes::protected_within`] takes, if no route sets a limit of its own.
pub fn in_flight_bytes_min() -> usize {
    Intake::in_flight_bytes_min(TENANT_SHARE_MAX, BODY_BYTES_MAX)
}

impl Routes {
    /// All routes behind the keys of `auth`, and their OpenAPI document at `/openapi.json`.
    pub fn protected_by(self, auth: &Auth, title: &str) -> Router {
        self.protected_within(auth, title, IN_FLIGHT_BYTES_MAX)
    }

    /// [`Self::protected_by`], with a limit for the bytes of all requests that are open at a time.
    pub fn protected_within(self, auth: &Auth, title: &str, in_flight_bytes_max: usize) -> Router {
        let intake = Intake::new(in_flight_bytes_max, TENANT_SHARE_MAX, self.body_bytes_max);
        let mut operations = self.operations;
        operations.push(Operation {
            path: "/openapi.json",
            method: "get",
            scope: None,
            other_scope: None,
            summary: "This document",
            errors: Errors::Problem,
        });
        let document = Document::new(&document(title, &operations));
        let answer = move || std::future::ready(document.clone());
        auth.protect(intake.guard(self.guarded))
            .merge(self.open)
            .route("/openapi.json", routing::get(answer))
    }
}

impl Errors {
    /// As in the document.
    fn described(self) -> Value {
        let object = json!({"schema": {"type": "object"}});
        let (description, content) = match self {
            Errors::Problem => (
                "a problem document (RFC 9457)",
                json!({"application/problem+json": object}),
            ),
            Errors::ProblemOrPage => (
                "a problem document (RFC 9457)",
                json!({"application/problem+json": object, "text/html": {}}),
            ),
            Errors::Json => (
                "an error in the shape of the API that the route belongs to",
                json!({"application/json": object}),
            ),
        };
        json!({"description": description, "content": content})
    }
}

/// A JSON document that needs no key and is the same for everybody. It is written once, however often
/// it is asked for, and all answers share its bytes.
#[derive(Debug, Clone)]
pub struct Document(Bytes);

impl Document {
    pub fn new(document: &Value) -> Self {
        Self(document.to_string().into())
    }
}

impl IntoResponse for Document {
    fn into_response(self) -> Response {
        ([(header::CONTENT_TYPE, "application/json")], self.0).into_response()
    }
}

async fn require(
    State((scope, other)): State<(Scope, Option<Scope>)>,
    principal: Principal,
    request: Request,
    next: Next,
) -> Result<Response, Problem> {
    if !other.is_some_and(|other| principal.scopes.allow(other)) {
        principal.require(scope)?;
    }
    Ok(next.run(request).await)
}

async fn require_owner(
    State(owner): State<OwnerOnly>,
    principal: Principal,
    request: Request,
    next: Next,
) -> Result<Response, Problem> {
    owner.check(&principal).await?;
    Ok(next.run(request).await)
}

/// Which routes there are, and which scope each needs. Bodies have no schemas.
fn document(title: &str, operations: &[Operation]) -> Value {
    let mut paths = Map::new();
    for operation in operations {
        // Axum's `{*key}` takes the rest of the path.
        let path = operation.path.replace("{*", "{");
        let parameters = path.split('/').filter_map(|part| {
            let name = part.strip_prefix('{')?.strip_suffix('}')?;
            Some(json!({"name": name, "in": "path", "required": true, "schema": {"type": "string"}}))
        });
        let mut described = json!({
            "summary": operation.summary,
            "parameters": parameters.collect::<Vec<_>>(),
            // `{}`: without a key, if auth.required is false.
            "security": match operation.scope {
                Some(scope) => {
                    let scopes = [Some(scope), operation.other_scope].into_iter().flatten();
                    let enough = scopes.map(|scope| json!({"bearer": [scope.as_str()]}));
                    enough.chain([json!({})]).collect()
                }
                None => json!([{}]),
            },
            "responses": {
                "2XX": {"description": "success"},
                "default": operation.errors.described(),
            },
        });
        if matches!(operation.method, "post" | "put") {
            described["requestBody"] = json!({"content": {"application/json": {"schema": {"type": "object"}}}});
        }
        if let Some(item) = paths.entry(path).or_insert_with(|| json!({})).as_object_mut() {
            item.insert(operation.method.to_owned(), described);
        }
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": title,
            "version": env!("CARGO_PKG_VERSION"),
            "description": "`security` names the scope that the key of a request needs.",
        },
        "paths": paths,
        "components": {"securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::Role;
    use axum::body::Body;
    use axum::http::StatusCode;
    use tower::ServiceExt;

    fn routes() -> Routes {
        Routes::new()
            .route(Scope::Read, "/v1/things", "List things", get(async || "things"))
            .route(Scope::Admin, "/v1/things", "Make a thing", post(async || "made"))
            .route(
                Scope::Admin,
                "/v1/list",
                "List",
                get(async || "list").also_for(Scope::Read),
            )
            .route(Scope::Read, "/v1/files/{*key}", "Read a file", get(async || "file"))
            .route(Scope::Read, "/v1/page", "Look", get(async || "page").page())
            .route(Scope::Read, "/v1/other", "Ask", get(async || "other").json_errors())
            .open_route("/health", "Whether it responds", get(async || "ok"))
    }

    async fn status(router: &Router, method: &str, path: &str, key: Option<&str>) -> StatusCode {
        let mut request = Request::builder().method(method).uri(path);
        if let Some(key) = key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let request = request.body(Body::empty()).unwrap();
        router.clone().oneshot(request).await.unwrap().status()
    }

    #[tokio::test]
    async fn answers_with_the_document_share_its_bytes() {
        let router = routes().protected_by(&Auth::fixed(Some("serving")), "Things");
        let mut addresses = Vec::new();
        for _ in 0..2 {
            let request = Request::builder().uri("/openapi.json").body(Body::empty()).unwrap();
            let response = router.clone().oneshot(request).await.unwrap();
            assert_eq!(response.headers()["content-type"], "application/json");
            let bytes = axum::body::to_bytes(response.into_body(), 1 << 20).await.unwrap();
            assert!(bytes.starts_with(b"{"));
            addresses.push((bytes.as_ptr(), bytes));
        }
        assert_eq!(addresses[0].0, addresses[1].0, "written for each answer");
    }

    #[tokio::test]
    async fn a_route_is_open_to_keys_with_its_scope_only() {
        assert!(!Role::Serving.scopes().allow(Scope::Admin));
        let router = routes().protected_by(&Auth::fixed(Some("serving")), "Things");
        for (method, path, key, expected) in [
            ("GET", "/v1/things", None, StatusCode::UNAUTHORIZED),
            ("GET", "/v1/things", Some("serving"), StatusCode::OK),
            ("POST", "/v1/things", None, StatusCode::UNAUTHORIZED),
            ("POST", "/v1/things", Some("serving"), StatusCode::FORBIDDEN),
            ("GET", "/v1/list", None, StatusCode::UNAUTHORIZED),
            ("GET", "/v1/list", Some("serving"), StatusCode::OK),
            ("GET", "/v1/files/a/b", None, StatusCode::UNAUTHORIZED),
            ("GET", "/v1/files/a/b", Some("serving"), StatusCode::OK),
            ("GET", "/health", None, StatusCode::OK),
            ("GET", "/openapi.json", None, StatusCode::OK),
        ] {
            let answer = status(&router, method, path, key).await;
            assert_eq!(answer, expected, "{method} {path} {key:?}");
        }
        let open = routes().protected_by(&Auth::fixed(None), "Things");
        assert_eq!(status(&open, "POST", "/v1/things", None).await, StatusCode::OK);
    }

    #[test]
    fn the_document_names_every_route_and_its_scope() {
        let document = document("Things", &routes().operations);
        let security = |path: &str, method: &str| document["paths"][path][method]["security"][0].clone();
        assert_eq!(security("/v1/things", "get"), json!({"bearer": ["read"]}));
        assert_eq!(security("/v1/things", "post"), json!({"bearer": ["admin"]}));
        assert_eq!(security("/health", "get"), json!({}));
        let either = json!([{"bearer": ["admin"]}, {"bearer": ["read"]}, {}]);
        assert_eq!(document["paths"]["/v1/list"]["get"]["security"], either);
        let file = &document["paths"]["/v1/files/{key}"]["get"];
        assert_eq!(file["parameters"][0]["name"], "key");
        let errors = |path: &str| {
            let content = &document["paths"][path]["get"]["responses"]["default"]["content"];
            content.as_object().unwrap().keys().cloned().collect::<Vec<_>>()
        };
        assert_eq!(errors("/v1/things"), ["application/problem+json"]);
        assert_eq!(errors("/v1/page"), ["application/problem+json", "text/html"]);
        assert_eq!(errors("/v1/other"), ["application/json"]);
    }
}
