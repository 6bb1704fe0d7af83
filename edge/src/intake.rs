//! Reads request bodies before the handlers see them, and counts their bytes against a budget of the
//! role until the response is sent. Handlers get the whole body in memory.
//!
//! A request of which the budget has no room gets 429. It does not wait, because requests that wait
//! for each other's bytes could all stop half-way. How long a body may take is up to
//! [`crate::server::in_time`].

mod budget;

use std::convert::Infallible;
use std::error::Error;
use std::sync::{Arc, Mutex, PoisonError};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, header};
use axum::middleware::{self, Next};
use axum::response::Response;
use futures::StreamExt;
use http_body_util::LengthLimitError;

use self::budget::{Budget, Full, Permit};
use crate::auth::Principal;
use crate::held::until_sent;
use crate::problem::Problem;

/// Counted for each request with a body, besides the body.
pub const REQUEST_BYTES: usize = 4 * 1024;

/// Cheap to clone. All clones share one budget.
#[derive(Debug, Clone)]
pub struct Intake {
    budget: Budget,
    bytes_max: usize,
}

impl Intake {
    /// `in_flight_bytes_max`: of all requests together, of which one tenant may hold the fraction
    /// `tenant_share_max`. `bytes_max`: the largest body.
    pub fn new(in_flight_bytes_max: usize, tenant_share_max: f64, bytes_max: usize) -> Self {
        Self {
            budget: Budget::new(in_flight_bytes_max, tenant_share_max),
            bytes_max,
        }
    }

    /// The least `in_flight_bytes_max` with which the largest request fits into one tenant's share.
    /// With less, it could get 429 forever.
    pub fn in_flight_bytes_min(tenant_share_max: f64, bytes_max: usize) -> usize {
        ((bytes_max + REQUEST_BYTES) as f64 / tenant_share_max).ceil() as usize
    }

    /// Bytes of requests that are held in memory now.
    pub fn held_bytes(&self) -> usize {
        self.budget.held_bytes()
    }

    /// Applies to every route of `router`. Needs a [`Principal`].
    pub fn guard(self, router: Router) -> Router {
        router.layer(middleware::from_fn_with_state(self, hold))
    }
}

/// What a request holds of the budget until its response is sent. Handlers extract it; the default
/// has no limit.
#[derive(Debug, Clone, Default)]
pub struct Held(Option<Arc<Mutex<Permit>>>);

impl Held {
    /// Charges what the answer may hold in memory. `mend`: what to do if that is more than a request
    /// may ever hold.
    pub fn charge(&self, bytes: usize, mend: &str) -> Result<(), Problem> {
        let Some(permit) = self.0.as_ref().filter(|_| bytes > 0) else {
            return Ok(());
        };
        let mut permit = permit.lock().unwrap_or_else(PoisonError::into_inner);
        if !permit.ever_fits(bytes) {
            let detail = format!("the answer may take {bytes} bytes, more than a request may hold; {mend}");
            return Err(Problem::bad_request(detail));
        }
        permit.grow(bytes).map_err(|Full| busy())
    }
}

impl<S: Sync> FromRequestParts<S> for Held {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(parts.extensions.get().cloned().unwrap_or_default())
    }
}

async fn hold(State(intake): State<Intake>, request: Request, next: Next) -> Result<Response, Problem> {
    if axum::body::HttpBody::is_end_stream(request.body()) {
        return Ok(next.run(request).await);
    }
    let (mut parts, body) = request.into_parts();
    let principal = parts.extensions.get::<Principal>();
    let principal = principal.ok_or_else(|| Problem::internal("the route is not behind Auth::protect"))?;
    let key = principal.key.map(|key| key.id);
    let reserved = intake.budget.reserve(&principal.tenant, key, REQUEST_BYTES);
    let mut permit = reserved.map_err(|_| busy())?;
    let bytes = read(body, &parts.headers, intake.bytes_max, &mut permit).await?;
    let permit = Arc::new(Mutex::new(permit));
    parts.extensions.insert(Held(Some(permit.clone())));
    let response = next.run(Request::from_parts(parts, Body::from(bytes))).await;
    Ok(until_sent(response, permit))
}

async fn read(body: Body, headers: &HeaderMap, bytes_max: usize, permit: &mut Permit) -> Result<Bytes, Problem> {
    let too_large = || Problem::too_large(format!("the body is larger than {bytes_max} bytes"));
    // Refuses early if the client declares the length. Decompression removes the header.
    let declared = headers
        .get(header::CONTENT_LENGTH)
        .and_then(|length| length.to_str().ok()?.parse().ok());
    let declared_len: usize = declared.unwrap_or(0);
    if declared_len > bytes_max {
        return Err(too_large());
    }
    permit.grow(declared_len).map_err(|_| busy())?;
    let mut held = declared_len;
    let mut bytes = Vec::with_capacity(declared_len);
    let mut chunks = body.into_data_stream();
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|error| unreadable(&error).unwrap_or_else(too_large))?;
        let length = bytes.len() + chunk.len();
        if length > bytes_max {
            return Err(too_large());
        }
        if length > held {
            permit.grow(length - held).map_err(|_| busy())?;
            held = length;
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes.into())
}

/// `None`: an outer layer's limit of the body's length was exceeded.
fn unreadable(error: &axum::Error) -> Option<Problem> {
    let mut cause: Option<&dyn Error> = Some(error);
    while let Some(error) = cause {
        if error.is::<LengthLimitError>() {
            return None;
        }
        cause = error.source();
    }
    Some(Problem::bad_request(format!("the body cannot be read: {error}")))
}

fn busy() -> Problem {
    metrics::counter!("springtide_requests_limited_total", "limit" => "in_flight_bytes").increment(1);
    let problem = Problem::too_many("too many request bytes are in flight; send the same request again", 1);
    problem.with("limit", "in_flight_bytes")
}

#[cfg(test)]
mod tests;
