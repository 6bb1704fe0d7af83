//! Errors in the shape of OpenAI's API, for its clients. Anthropic's read the same member.

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use edge::Problem;
use serde_json::json;

/// Adds the member `error` to a problem document, where OpenAI's clients look for it.
pub async fn add_error_member(response: Response) -> Response {
    match response.extensions().get::<Problem>() {
        None => response,
        Some(problem) => {
            let mut with_member = for_openai(problem).into_response();
            // such as an `Allow` or a trace
            for (name, value) in response.headers() {
                if !with_member.headers().contains_key(name) && name != "content-length" {
                    with_member.headers_mut().append(name, value.clone());
                }
            }
            with_member
        }
    }
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
