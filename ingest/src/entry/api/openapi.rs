//! `GET /openapi.json`: the OpenAPI 3.1 document, generated from the routes and the types of
//! requests and answers.

use axum::Extension;
use edge::routes::Document;
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityScheme};
use utoipa::openapi::{Components, OpenApi, RefOr};

use super::answer::{MethodNotAllowed, NoSuchPath, ProblemDocument};

/// What no single route declares. Each names the scope that a key needs. Requests without a key are
/// allowed if `auth.required` is false.
#[derive(utoipa::OpenApi)]
#[openapi(
    info(
        title = "Springtide ingest",
        description = "Takes generations and feedback about them. A 2xx means that the log has acknowledged the events. Unknown \
                       paths return 404 (`NoSuchPath`) and unsupported methods 405 (`MethodNotAllowed`), with or without a key.",
    ),
    security(("bearer" = []), ()),
    components(schemas(ProblemDocument), responses(NoSuchPath, MethodNotAllowed))
)]
pub(super) struct Base;

/// Adds what the routes cannot declare.
pub(super) fn complete(mut document: OpenApi) -> OpenApi {
    let bearer = SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer));
    let components = document.components.get_or_insert_with(Components::new);
    components.add_security_scheme("bearer", bearer);
    for post in document.paths.paths.values_mut().filter_map(|item| item.post.as_mut()) {
        if let Some(RefOr::T(accepted)) = post.responses.responses.get("200") {
            let mut spooled = accepted.clone();
            spooled.description = "collector only: flushed to its disk, not yet in the log".to_owned();
            post.responses.responses.insert("202".to_owned(), RefOr::T(spooled));
        }
    }
    document
}

/// As its readers get it.
pub(super) fn written(document: &OpenApi) -> Document {
    // All its keys are texts and its numbers finite, so it is a JSON value.
    Document::new(&serde_json::to_value(document).unwrap_or_default())
}

/// This document.
#[utoipa::path(
    get,
    path = "/openapi.json",
    tag = "operation",
    security(()),
    responses(
        (status = 200, description = "this document", body = serde_json::Value),
        (status = 405, response = MethodNotAllowed)
    )
)]
pub(super) async fn openapi(Extension(document): Extension<Document>) -> Document {
    document
}

#[cfg(test)]
mod tests;
