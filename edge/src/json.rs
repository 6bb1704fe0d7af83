//! A JSON body whose rejection is a problem document that gives serde's reason.

use axum::extract::rejection::JsonRejection;
use axum::extract::{FromRequest, Request};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};

use crate::problem::Problem;

/// Replaces [`axum::Json`] as extractor and as response.
#[derive(Debug, Clone, Copy, Default)]
pub struct Json<T>(pub T);

impl<S, T> FromRequest<S> for Json<T>
where
    axum::Json<T>: FromRequest<S, Rejection = JsonRejection>,
    S: Send + Sync,
{
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Self::Rejection> {
        let json = axum::Json::<T>::from_request(request, state).await;
        json.map(|axum::Json(value)| Self(value)).map_err(|rejection| {
            let problem: fn(String) -> Problem = match rejection.status() {
                StatusCode::PAYLOAD_TOO_LARGE => Problem::too_large,
                StatusCode::UNSUPPORTED_MEDIA_TYPE => Problem::unsupported_media_type,
                _ => Problem::bad_request,
            };
            problem(rejection.body_text())
        })
    }
}

impl<T: serde::Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        axum::Json(self.0).into_response()
    }
}
