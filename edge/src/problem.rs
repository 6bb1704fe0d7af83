//! Errors as RFC 9457 `application/problem+json`. Deliberately no error enum of its own: each crate maps its errors to a
//! problem where it handles them.

use std::borrow::Cow;
use std::fmt::Display;

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value};

/// One failed request, told to its caller.
#[derive(Debug, Clone)]
pub struct Problem {
    pub status: StatusCode,
    /// What kind of problem: a short slug that clients branch on, e.g. `conflict`. Sent as `/problems/<slug>`.
    pub type_: Cow<'static, str>,
    /// The kind in words, the same for every occurrence.
    pub title: Cow<'static, str>,
    /// This occurrence in words.
    pub detail: Option<String>,
    /// Seconds, for `Retry-After`.
    pub retry_after_seconds: Option<u32>,
    /// Members beside the standard ones.
    pub extensions: Map<String, Value>,
}

impl Problem {
    pub fn new(status: StatusCode, type_: impl Into<Cow<'static, str>>, title: impl Into<Cow<'static, str>>) -> Self {
        Self {
            status,
            type_: type_.into(),
            title: title.into(),
            detail: None,
            retry_after_seconds: None,
            extensions: Map::new(),
        }
    }

    /// 400: the request cannot be understood or breaks a rule.
    pub fn bad_request(detail: impl Display) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "bad-request", "The request is not valid").detail(detail)
    }

    /// 401: no key, or one that is not known.
    pub fn unauthorized(detail: impl Display) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "unauthorized", "A valid API key is needed").detail(detail)
    }

    /// 403: the key is known, its role does not allow this.
    pub fn forbidden(detail: impl Display) -> Self {
        Self::new(
            StatusCode::FORBIDDEN,
            "forbidden",
            "The API key's role does not allow this",
        )
        .detail(detail)
    }

    /// 404.
    pub fn not_found(detail: impl Display) -> Self {
        Self::new(StatusCode::NOT_FOUND, "not-found", "There is no such thing").detail(detail)
    }

    /// 405.
    pub fn method_not_allowed(detail: impl Display) -> Self {
        Self::new(
            StatusCode::METHOD_NOT_ALLOWED,
            "method-not-allowed",
            "The path does not take this method",
        )
        .detail(detail)
    }

    /// 409: contradicts what is already there.
    pub fn conflict(detail: impl Display) -> Self {
        Self::new(
            StatusCode::CONFLICT,
            "conflict",
            "The request contradicts what is already there",
        )
        .detail(detail)
    }

    /// 413.
    pub fn too_large(detail: impl Display) -> Self {
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "too-large", "The request is too large").detail(detail)
    }

    /// 415: in a form or an encoding that is not understood.
    pub fn unsupported_media_type(detail: impl Display) -> Self {
        Self::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "unsupported-media-type",
            "The request's form is not understood",
        )
        .detail(detail)
    }

    /// 429.
    pub fn too_many(detail: impl Display, retry_after_seconds: u32) -> Self {
        Self::new(StatusCode::TOO_MANY_REQUESTS, "too-many-requests", "Too much at once")
            .detail(detail)
            .retry_after(retry_after_seconds)
    }

    /// 501: never possible here.
    pub fn not_implemented(detail: impl Display) -> Self {
        Self::new(
            StatusCode::NOT_IMPLEMENTED,
            "not-implemented",
            "This place cannot do that",
        )
        .detail(detail)
    }

    /// 503: something this service needs is away; the same request may succeed later.
    pub fn unavailable(detail: impl Display, retry_after_seconds: u32) -> Self {
        Self::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "unavailable",
            "Not available right now",
        )
        .detail(detail)
        .retry_after(retry_after_seconds)
    }

    /// 500. Logs the error here, once; the caller sees no inner detail.
    pub fn internal(error: impl Display) -> Self {
        tracing::error!(error = %error, "request failed");
        Self::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "internal",
            "Something went wrong on our side",
        )
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

    /// Adds a member beside the standard ones.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.extensions.insert(name.to_owned(), value.into());
        self
    }

    /// The JSON document, for places that are not a response of their own (an error inside an event stream).
    pub fn document(&self) -> Value {
        let mut document = self.extensions.clone();
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

/// The kind of a problem, as an extension of the response that tells it: for whoever counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kind(pub Cow<'static, str>);

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let mut response = (self.status, self.document().to_string()).into_response();
        response.extensions_mut().insert(Kind(self.type_));
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
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_carries_status_type_and_retry_after() {
        let response = Problem::unavailable("the log does not answer", 2).into_response();
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(response.headers()[header::RETRY_AFTER], "2");
        assert_eq!(response.headers()[header::CONTENT_TYPE], "application/problem+json");
    }

    #[test]
    fn extensions_stand_beside_the_standard_members_and_never_replace_them() {
        let document = Problem::not_found("no such version")
            .with("resident", vec!["7", "8"])
            .with("status", 999)
            .document();
        assert_eq!(document["resident"][1], "8");
        assert_eq!(document["status"], 404);
        assert_eq!(document["type"], "/problems/not-found");
    }
}
