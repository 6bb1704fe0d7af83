//! Errors as RFC 9457 `application/problem+json`. Each crate maps its own errors to a [`Problem`]
//! where it handles them.

use std::borrow::Cow;
use std::fmt::Display;

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value};

/// A failed request, as its caller sees it.
#[derive(Debug, Clone)]
pub struct Problem {
    pub status: StatusCode,
    /// A short slug that clients branch on, such as `conflict`. Sent as `/problems/<slug>`.
    pub type_: Cow<'static, str>,
    /// The same text for every problem of this type.
    pub title: Cow<'static, str>,
    /// What happened this time, and what to do.
    pub detail: Option<String>,
    /// Sent as `Retry-After`.
    pub retry_after_seconds: Option<u32>,
    /// Further members of the document. Boxed, because every `Result` has room for them.
    pub extensions: Box<Map<String, Value>>,
}

impl Problem {
    pub fn new(status: StatusCode, type_: impl Into<Cow<'static, str>>, title: impl Into<Cow<'static, str>>) -> Self {
        Self {
            status,
            type_: type_.into(),
            title: title.into(),
            detail: None,
            retry_after_seconds: None,
            extensions: Box::default(),
        }
    }

    /// 400: the request cannot be read or breaks a rule.
    pub fn bad_request(detail: impl Display) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "bad-request", "The request is not valid").detail(detail)
    }

    /// 401: no API key, or an unknown one.
    pub fn unauthorized(detail: impl Display) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "unauthorized", "A valid API key is needed").detail(detail)
    }

    /// 403: the key is valid, but its scopes or its tenant do not allow this.
    pub fn forbidden(detail: impl Display) -> Self {
        let title = "The API key does not allow this";
        Self::new(StatusCode::FORBIDDEN, "forbidden", title).detail(detail)
    }

    /// 404.
    pub fn not_found(detail: impl Display) -> Self {
        Self::new(StatusCode::NOT_FOUND, "not-found", "Not found").detail(detail)
    }

    /// 405.
    pub fn method_not_allowed(detail: impl Display) -> Self {
        let title = "The path does not support this method";
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "method-not-allowed", title).detail(detail)
    }

    /// 409: contradicts stored data.
    pub fn conflict(detail: impl Display) -> Self {
        let title = "The request contradicts stored data";
        Self::new(StatusCode::CONFLICT, "conflict", title).detail(detail)
    }

    /// 413.
    pub fn too_large(detail: impl Display) -> Self {
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "too-large", "The request is too large").detail(detail)
    }

    /// 415: an unsupported content type or encoding.
    pub fn unsupported_media_type(detail: impl Display) -> Self {
        let (status, title) = (
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "Unsupported content type or encoding",
        );
        Self::new(status, "unsupported-media-type", title).detail(detail)
    }

    /// 429.
    pub fn too_many(detail: impl Display, retry_after_seconds: u32) -> Self {
        let problem = Self::new(StatusCode::TOO_MANY_REQUESTS, "too-many-requests", "Too many requests");
        problem.detail(detail).retry_after(retry_after_seconds)
    }

    /// 501: this server can never do it.
    pub fn not_implemented(detail: impl Display) -> Self {
        let title = "This server does not support the request";
        Self::new(StatusCode::NOT_IMPLEMENTED, "not-implemented", title).detail(detail)
    }

    /// 503: a dependency is unavailable. The same request may succeed later.
    pub fn unavailable(detail: impl Display, retry_after_seconds: u32) -> Self {
        let problem = Self::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "unavailable",
            "Temporarily unavailable",
        );
        problem.detail(detail).retry_after(retry_after_seconds)
    }

    /// 400 if the database refuses a text of the request, otherwise `other`. Postgres stores every
    /// character but NUL.
    pub fn of_database(error: sqlx::Error, other: impl FnOnce(sqlx::Error) -> Self) -> Self {
        let code = error.as_database_error().and_then(|error| error.code());
        match code.as_deref() {
            Some("22021" | "22P05") => Self::bad_request("a text has a NUL character, which cannot be stored"),
            _ => other(error),
        }
    }

    /// 500. Logs `error`, which the caller does not see.
    pub fn internal(error: impl Display) -> Self {
        tracing::error!(error = %error, "request failed");
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", "Internal server error")
    }

    #[must_use]
    pub fn detail(mut self, detail: impl Display) -> Self {
        self.detail = Some(detail.to_string());
        self
    }

    #[must_use]
    pub fn retry_after(mut self, seconds: u32) -> Self {
        self.retry_after_seconds = Some(seconds);
        self
    }

    /// Adds a member to the document. Standard members cannot be replaced.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.extensions.insert(name.to_owned(), value.into());
        self
    }

    /// The JSON document, for errors that are not a whole response (inside an event stream).
    pub fn document(&self) -> Value {
        let mut document = (*self.extensions).clone();
        document.insert("type".into(), format!("/problems/{}", self.type_).into());
        document.insert("title".into(), self.title.as_ref().into());
        document.insert("status".into(), self.status.as_u16().into());
        if let Some(detail) = &self.detail {
            document.insert("detail".into(), detail.as_str().into());
        }
        Value::Object(document)
    }
}

impl Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.detail {
            Some(detail) => write!(f, "{}: {detail}", self.title),
            None => f.write_str(&self.title),
        }
    }
}

impl std::error::Error for Problem {}

/// The problem is also an extension of its response, for middleware.
impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let mut response = (self.status, self.document().to_string()).into_response();
        let headers = response.headers_mut();
        headers.insert(
            header::CONTENT_TYPE,
            HeaderValue::from_static("application/problem+json"),
        );
        if let Some(seconds) = self.retry_after_seconds {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response.extensions_mut().insert(self);
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_carries_status_type_and_retry_after() {
        let response = Problem::unavailable("Kafka does not respond", 2).into_response();
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(response.headers()[header::RETRY_AFTER], "2");
        assert_eq!(response.headers()[header::CONTENT_TYPE], "application/problem+json");
    }

    #[test]
    fn extensions_never_replace_the_standard_members() {
        let document = Problem::not_found("no such version")
            .with("resident", vec!["7", "8"])
            .with("status", 999)
            .document();
        assert_eq!(document["resident"][1], "8");
        assert_eq!(document["status"], 404);
        assert_eq!(document["type"], "/problems/not-found");
    }
}
