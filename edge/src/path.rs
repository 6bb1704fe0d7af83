//! Path parameters whose rejection is a problem document.

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use serde::de::DeserializeOwned;

use crate::problem::Problem;

/// Replaces [`axum::extract::Path`].
#[derive(Debug, Clone, Copy, Default)]
pub struct Path<T>(pub T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for Path<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        let path = axum::extract::Path::<T>::from_request_parts(parts, state).await;
        let refused = |rejection: axum::extract::rejection::PathRejection| Problem::bad_request(rejection.body_text());
        path.map(|path| Self(path.0)).map_err(refused)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::Router;
    use axum::body::Body;
    use axum::http::{Request, StatusCode, header};
    use axum::routing::get;
    use tower::ServiceExt;

    #[tokio::test]
    async fn a_parameter_of_another_type_is_a_problem_document() {
        let router = Router::new()
            .route("/number/{n}", get(async |Path(n): Path<i64>| n.to_string()))
            .route("/text/{text}", get(async |Path(text): Path<String>| text));
        for (path, status) in [
            ("/number/1", StatusCode::OK),
            ("/number/one", StatusCode::BAD_REQUEST),
            ("/text/%ff", StatusCode::BAD_REQUEST),
        ] {
            let request = Request::builder().uri(path).body(Body::empty()).unwrap();
            let answer = router.clone().oneshot(request).await.unwrap();
            assert_eq!(answer.status(), status, "{path}");
            if status != StatusCode::OK {
                assert_eq!(
                    answer.headers()[header::CONTENT_TYPE],
                    "application/problem+json",
                    "{path}"
                );
            }
        }
    }
}
