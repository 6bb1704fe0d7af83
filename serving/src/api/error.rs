//! Errors in the shape of each API, for its clients.

use axum::extract::Request;
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use edge::Problem;
use edge::json::Json;
use serde_json::{Value, json};

/// Gives errors the shape that the clients of their route read: Anthropic's on its routes, and a
/// problem document with OpenAI's member `error` on all others.
pub async fn shape_errors(request: Request, next: Next) -> Response {
    let path = request.uri().path();
    let leased = path
        .strip_prefix("/lease/")
        .and_then(|rest| rest.find('/').map(|at| &rest[at..]));
    let is_anthropic = leased.unwrap_or(path).starts_with("/v1/messages");
    let response = next.run(request).await;
    let Some(problem) = response.extensions().get::<Problem>() else {
        return response;
    };
    let mut shaped = match is_anthropic {
        true => (problem.status, Json(for_anthropic(problem))).into_response(),
        false => for_openai(problem).into_response(),
    };
    // such as an `Allow`, a `Retry-After` or a trace
    for (name, value) in response.headers() {
        if !shaped.headers().contains_key(name) && name != "content-length" {
            shaped.headers_mut().append(name, value.clone());
        }
    }
    shaped
}

/// The problem with the member `error`, whose `type` is one of OpenAI's.
pub fn for_openai(problem: &Problem) -> Problem {
    let kind = match problem.status {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        status if status.is_server_error() => "server_error",
        _ => "invalid_request_error",
    };
    problem.clone().with(
        "error",
        json!({
            "message": problem.to_string(),
            "type": kind,
            "param": problem.extensions.get("field"),
            "code": problem.type_,
        }),
    )
}

/// Anthropic's error, with the members of the problem that it has no place for.
pub fn for_anthropic(problem: &Problem) -> Value {
    let kind = match problem.status {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
        status if status.is_server_error() => "api_error",
        _ => "invalid_request_error",
    };
    let mut document = problem.document();
    document["type"] = "error".into();
    document["error"] = json!({"type": kind, "message": problem.to_string()});
    document
}
