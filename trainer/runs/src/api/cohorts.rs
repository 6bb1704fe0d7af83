//! The door over HTTP: lease the cohort of a run whose `trainer` is `external`, read its samples, upload the
//! new weights, commit. Every call may be repeated.

use super::runs;
use super::{Shared, database};
use crate::door::lease::{self, Cohort, Wanted};
use crate::door::{State as Phase, Submission, TrainedBy, samples, weights};
use artifact::reference::Reference;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use edge::auth::Principal;
use edge::json::Json;
use edge::path::Path;
use edge::problem::Problem;
use edge::query::Query;
use serde::Deserialize;
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::Instant;
use uuid::Uuid;

/// How long a trainer that finds no cohort should wait before it asks again, seconds.
const RETRY_SECONDS: u32 = 1;
const WAIT_SECONDS_MAX: u64 = 30;
/// How often a request that waits looks again.
const LOOK_EVERY: Duration = Duration::from_millis(100);
const TOKEN_BYTES_MAX: usize = 128;
const CODE_BYTES_MAX: usize = 64;
const STATE_BYTES_MAX: usize = 64 << 10;
const FILES_MAX: usize = 8_192;
const METRICS_MAX: usize = 256;
/// Of a piece of a file, with some room.
pub(super) const PIECE_BODY_MAX: usize = weights::PIECE_BYTES as usize + 1024;
const DIGEST: &str = "content-digest";

/// A trainer asks for a cohort.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Take {
    /// Chosen by the trainer: the same token gets the same lease again while it lasts. 1 to 128 bytes.
    client_token: String,
    /// The token of an earlier attempt of the same job, which has ended: its lease ends at once.
    #[serde(default)]
    replaces: Option<String>,
    /// How long the lease lasts without a renewal, 10 to 86400; default 60.
    #[serde(default = "lease_seconds")]
    lease_seconds: i32,
    /// How long to wait for a cohort, 0 to 30; default 0.
    #[serde(default)]
    wait_seconds: u64,
    /// Whether a cohort will do that is still filling; default false.
    #[serde(default)]
    open: bool,
}

fn lease_seconds() -> i32 {
    60
}

fn check_wait(wait_seconds: u64) -> Result<Instant, Problem> {
    match wait_seconds <= WAIT_SECONDS_MAX {
        true => Ok(Instant::now() + Duration::from_secs(wait_seconds)),
        false => Err(Problem::bad_request(format!(
            "wait_seconds is {wait_seconds}; it must be in 0..={WAIT_SECONDS_MAX}"
        ))),
    }
}

fn check_token(token: &str) -> Result<(), Problem> {
    match (1..=TOKEN_BYTES_MAX).contains(&token.len()) && !token.contains('\0') {
        true => Ok(()),
        false => Err(Problem::bad_request(format!(
            "client_token must have 1 to {TOKEN_BYTES_MAX} bytes, none of them NUL: take a new UUID for each attempt"
        ))),
    }
}

/// `POST /v1/runs/{id}/cohorts`: 201 with the lease of a cohort, or 204 if there is none now or somebody
/// else holds it. 409 if the run has ended or the process `train` computes its steps.
pub(super) async fn take(
    State(shared): State<Shared>,
    principal: Principal,
    Path(id): Path<Uuid>,
    Json(wanted): Json<Take>,
) -> Result<Response, Problem> {
    let until = check_wait(wanted.wait_seconds)?;
    check_token(&wanted.client_token)?;
    if !(10..=86_400).contains(&wanted.lease_seconds) {
        return Err(Problem::bad_request("lease_seconds must be in 10..=86400"));
    }
    loop {
        let run = runs::get(&shared.pool, &shared.policy, id).await?;
        if run.finished_at.is_some() {
            let why = format!("run {id} is {}: it needs no trainer any more", run.status);
            return Err(Problem::conflict(why));
        }
        let trainer = run.config.get("trainer").cloned().unwrap_or_default();
        if serde_json::from_value(trainer)
            .unwrap_or(TrainedBy::Springtide)
            .is_springtide()
        {
            return Err(Problem::conflict(format!(
                "the process `train` computes the steps of run {id}: its cohorts are not leased. Set `trainer` to \
                 `external`, for the realtime run as trainer.realtime.trainer"
            )));
        }
        if run.status == "running" {
            let wanted = Wanted {
                run: id,
                holder: &principal.label,
                client_token: &wanted.client_token,
                replaces: wanted.replaces.as_deref(),
                seconds: wanted.lease_seconds,
                open: wanted.open,
            };
            if let Some(cohort) = lease::take(&shared.pool, wanted).await.map_err(database)? {
                let (cohort, _) = shared.cohort(cohort).await?;
                return Ok((StatusCode::CREATED, Json(cohort)).into_response());
            }
        }
        if Instant::now() >= until {
            let retry = [(header::RETRY_AFTER, RETRY_SECONDS.to_string())];
            return Ok((StatusCode::NO_CONTENT, retry).into_response());
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// `GET /v1/cohorts/{id}`.
pub(super) async fn one(State(shared): State<Shared>, Path(id): Path<Uuid>) -> Result<Json<Cohort>, Problem> {
    Ok(Json(shared.cohort(id).await?.0))
}

/// The lease that a call is about.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Held {
    /// Of the lease.
    fence: i64,
}

/// `POST /v1/cohorts/{id}/renew`: the lease begins anew.
pub(super) async fn renew(
    State(shared): State<Shared>,
    Path(id): Path<Uuid>,
    Json(held): Json<Held>,
) -> Result<Json<Cohort>, Problem> {
    shared.held_cohort(id, held.fence).await?;
    let renewed = lease::renew(&shared.pool, id, held.fence).await.map_err(database)?;
    let (cohort, _) = shared.cohort(id).await?;
    match renewed {
        true => Ok(Json(cohort)),
        false => Err(lost(&cohort, held.fence)),
    }
}

/// Which files of samples, and how long to wait for one.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Page {
    fence: i64,
    /// 0 to 30; default 0.
    #[serde(default)]
    wait_seconds: u64,
}

/// `GET /v1/cohorts/{id}/samples/{part}`: a Parquet file, with its `Content-Digest`. 204 if it is not there
/// yet, and 404 if there will be none with this number.
pub(super) async fn samples(
    State(shared): State<Shared>,
    Path((id, part)): Path<(Uuid, i32)>,
    Query(page): Query<Page>,
) -> Result<Response, Problem> {
    let until = check_wait(page.wait_seconds)?;
    let exports = shared.exports.as_ref().ok_or_else(|| {
        Problem::not_implemented("this control role has no store of payloads: set ingest.payload_store, as for `train`")
    })?;
    loop {
        let (cohort, _) = shared.held_cohort(id, page.fence).await?;
        if let Some(payload) = lease::part(&shared.pool, id, part).await.map_err(database)? {
            let bytes = exports
                .get(&samples::owner(id), &payload)
                .await
                .map_err(|error| match error {
                    event_log::payload::Error::Missing => lost(&cohort, page.fence),
                    event_log::payload::Error::Unavailable { .. } => {
                        Problem::unavailable("the store of payloads does not answer", 2)
                    }
                    error => Problem::internal(error),
                })?;
            let headers = [
                (header::CONTENT_TYPE.as_str(), payload.media_type),
                (DIGEST, sha256(&bytes)),
            ];
            return Ok((headers, bytes).into_response());
        }
        if cohort.state != Phase::Filling {
            let why = format!(
                "cohort {id} has {} files of samples, and no more will come",
                cohort.parts
            );
            return Err(Problem::not_found(why));
        }
        if Instant::now() >= until {
            return Ok(StatusCode::NO_CONTENT.into_response());
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// A digest as RFC 9530 writes it.
fn sha256(bytes: &[u8]) -> String {
    format!("sha-256=:{}:", BASE64.encode(Sha256::digest(bytes)))
}

/// `PUT /v1/cohorts/{id}/files/{name}/{piece}`: a piece of a file of weights, with its `Content-Digest`.
pub(super) async fn upload(
    State(shared): State<Shared>,
    Path((id, name, piece)): Path<(Uuid, String, u64)>,
    Query(held): Query<Held>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<StatusCode, Problem> {
    if !weights::is_file_name(&name) {
        let why = format!("`{name}` is no name of a file: use letters, digits, `.`, `_` and `-`, up to 128");
        return Err(Problem::bad_request(why));
    }
    if body.is_empty() || body.len() as u64 > weights::PIECE_BYTES {
        return Err(Problem::bad_request(format!(
            "a piece has {} bytes, the last one of a file may have fewer but at least 1; this one has {}",
            weights::PIECE_BYTES,
            body.len()
        )));
    }
    let (digest, found) = (headers.get(DIGEST).and_then(|value| value.to_str().ok()), sha256(&body));
    if digest != Some(&found) {
        return Err(Problem::bad_request(format!(
            "the piece does not have its digest: give `Content-Digest: sha-256=:…:`, and send it again if it was damaged on \
             the way. What arrived has {found}"
        )));
    }
    shared.held_cohort(id, held.fence).await?;
    let store = shared.store()?;
    let key = weights::piece_key(id, held.fence, &name, piece);
    store
        .put_private(&key, &body)
        .await
        .map_err(|error| unavailable(&error))?;
    Ok(StatusCode::NO_CONTENT)
}

fn unavailable(error: &store::Error) -> Problem {
    tracing::warn!(%error, "a trainer outside cannot upload");
    Problem::unavailable("the policy store does not answer", 2)
}

/// What a trainer has made of its cohort.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Commit {
    fence: i64,
    /// The same token gets the same answer again. 1 to 128 bytes.
    client_token: String,
    /// The content hash of the version that the weights were made from.
    parent_root: String,
    /// The uploaded safetensors files, and their sizes in bytes.
    #[serde(default)]
    files: BTreeMap<String, u64>,
    /// PEFT's `adapter_config.json`, if the files are an adapter of the parent, or of what the parent adapts.
    #[serde(default)]
    adapter: Option<Value>,
    /// Instead of files: nothing of the cohort is trained on, with this code `[a-z0-9_]`.
    #[serde(default)]
    dropped_all: Option<String>,
    /// Numbers of the step, such as `loss`, `gradient_norm`, `kl`.
    #[serde(default)]
    metrics: BTreeMap<String, f64>,
    /// Generations that were not trained on, each with a code `[a-z0-9_]`.
    #[serde(default)]
    dropped: BTreeMap<Uuid, String>,
    /// What the next lease of the run is to know; at most 64 KiB.
    #[serde(default)]
    state: Value,
    /// What engines that serve the version are compared with, if our model does not compute it.
    #[serde(default)]
    reference: Option<Reference>,
    /// How long to wait for the verification, 0 to 30; default 30.
    #[serde(default = "wait_seconds")]
    wait_seconds: u64,
}

fn wait_seconds() -> u64 {
    WAIT_SECONDS_MAX
}

impl Commit {
    fn check(&self, cohort: &Cohort) -> Result<(), String> {
        if self.files.is_empty() != self.dropped_all.is_some() || self.files.len() > FILES_MAX {
            return Err(format!(
                "files must name 1 to {FILES_MAX} uploaded files; or none, with a code in `dropped_all`"
            ));
        }
        if let Some(name) = self.files.keys().find(|name| !weights::is_file_name(name)) {
            return Err(format!("files: `{name}` is no name of a file"));
        }
        if self.metrics.len() > METRICS_MAX || !self.metrics.values().all(|value| value.is_finite()) {
            return Err(format!("metrics must be at most {METRICS_MAX} finite numbers"));
        }
        let is_code = |code: &String| {
            let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
            (1..=CODE_BYTES_MAX).contains(&code.len()) && code.chars().all(allowed)
        };
        if let Some(code) = self
            .dropped
            .values()
            .chain(&self.dropped_all)
            .find(|code| !is_code(code))
        {
            return Err(format!(
                "dropped: the code {code:?} is not of `[a-z0-9_]`, up to {CODE_BYTES_MAX}"
            ));
        }
        if self.state.to_string().len() > STATE_BYTES_MAX {
            return Err("state has more than 64 KiB: store it elsewhere, and say here where".into());
        }
        if (self.adapter.as_ref()).is_some_and(|adapter| adapter.to_string().len() > STATE_BYTES_MAX) {
            return Err("adapter has more than 64 KiB: give what PEFT's adapter_config.json has".into());
        }
        if self.reference.as_ref().is_some_and(|reference| !reference.is_sound()) {
            return Err("reference: its numbers are not finite, too many, or of ids beyond its vocabulary".into());
        }
        match self.parent_root == cohort.parent_root {
            true => Ok(()),
            false => Err(format!(
                "parent_root is {}, but the cohort's parent, version {}, has {}: the weights were made from another version",
                self.parent_root, cohort.parent, cohort.parent_root
            )),
        }
    }
}

/// `POST /v1/cohorts/{id}/commit`: 200 with the version when the step is durable (without one, if nothing was
/// trained on), 202 while it is being
/// verified: repeat the call. 422 if the weights cannot be published; the lease goes on. 409 if the lease is
/// another's now.
pub(super) async fn commit(
    State(shared): State<Shared>,
    Path(id): Path<Uuid>,
    Json(commit): Json<Commit>,
) -> Result<Response, Problem> {
    let until = check_wait(commit.wait_seconds)?;
    check_token(&commit.client_token)?;
    let (fence, token, drops_all) = (commit.fence, commit.client_token.clone(), commit.dropped_all.is_some());
    let (cohort, committed) = shared.cohort(id).await?;
    if committed.as_ref() != Some(&token) {
        commit.check(&cohort).map_err(Problem::bad_request)?;
        let submission = Submission {
            client_token: commit.client_token,
            files: commit.files,
            adapter: commit.adapter,
            dropped: commit.dropped,
            dropped_all: commit.dropped_all,
            metrics: commit.metrics,
            state: commit.state,
            reference: commit.reference,
        };
        let submitted = lease::submit(&shared.pool, id, fence, &submission)
            .await
            .map_err(database)?;
        let (cohort, committed) = shared.cohort(id).await?;
        if !submitted && committed.as_ref() != Some(&token) {
            return Err(match (cohort.state, cohort.fence == fence) {
                (Phase::Filling, true) => {
                    Problem::conflict("the cohort is still filling: read its samples to the end first")
                }
                _ => lost(&cohort, fence),
            });
        }
    }
    loop {
        let (cohort, of) = shared.cohort(id).await?;
        match cohort.state {
            Phase::Committed if of.as_ref() == Some(&token) => return Ok(Json(cohort).into_response()),
            Phase::Dropped if of.as_ref() == Some(&token) && drops_all => {
                return Ok(Json(cohort).into_response());
            }
            Phase::Submitted if of.as_ref() == Some(&token) => {}
            Phase::Full if cohort.fence == fence && cohort.refusal.is_some() => {
                let why = cohort.refusal.unwrap_or_default();
                return Err(Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "about:blank", "Not published").detail(why));
            }
            _ => return Err(lost(&cohort, fence)),
        }
        if Instant::now() >= until {
            return Ok((StatusCode::ACCEPTED, Json(cohort)).into_response());
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// Why a trainer gives its lease up.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct GivenUp {
    fence: i64,
    /// For people; at most 4 KiB.
    #[serde(default)]
    reason: String,
}

/// `POST /v1/cohorts/{id}/abort`: another lease of the cohort may begin.
pub(super) async fn abort(
    State(shared): State<Shared>,
    Path(id): Path<Uuid>,
    Json(given_up): Json<GivenUp>,
) -> Result<Json<Cohort>, Problem> {
    let reason: String = given_up.reason.chars().take(4096).collect();
    shared.held_cohort(id, given_up.fence).await?;
    let done = lease::give_up(&shared.pool, id, given_up.fence, &reason)
        .await
        .map_err(database)?;
    let (cohort, _) = shared.cohort(id).await?;
    match done {
        true => Ok(Json(cohort)),
        false => Err(lost(&cohort, given_up.fence)),
    }
}

/// Why a lease has ended.
fn lost(cohort: &Cohort, fence: i64) -> Problem {
    let Cohort { id, state, .. } = cohort;
    Problem::conflict(match state {
        Phase::Dropped => format!(
            "cohort {id} went back to the queue ({}): lease the next one",
            cohort.refusal.as_deref().unwrap_or("the run began anew")
        ),
        Phase::Committed => format!("cohort {id} is step {} already, by another commit", cohort.step),
        _ if cohort.fence != fence => format!(
            "the lease with fence {fence} of cohort {id} has ended: another began, with fence {}",
            cohort.fence
        ),
        _ => format!("cohort {id} is {state}"),
    })
}

impl Shared {
    async fn cohort(&self, id: Uuid) -> Result<(Cohort, Option<String>), Problem> {
        let found = lease::find(&self.pool, &self.policy, id).await.map_err(database)?;
        found.ok_or_else(|| Problem::not_found(format!("policy `{}` has no cohort {id}", self.policy)))
    }

    /// The cohort, for the holder of its lease.
    async fn held_cohort(&self, id: Uuid, fence: i64) -> Result<(Cohort, Option<String>), Problem> {
        let found = self.cohort(id).await?;
        let is_open = matches!(found.0.state, Phase::Filling | Phase::Full | Phase::Submitted);
        match is_open && found.0.fence == fence {
            true => Ok(found),
            false => Err(lost(&found.0, fence)),
        }
    }

    fn store(&self) -> Result<&store::Store, Problem> {
        self.store
            .as_ref()
            .ok_or_else(|| Problem::not_implemented("this role has no policy store"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_written_as_rfc_9530_says() {
        let want = "sha-256=:RK/5qy6MsqBSEXXyRQ9wXrcuETvtVwX04GOUvqDAw9w=:";
        assert_eq!(sha256(br#"{"hello": "world"}"#).len(), want.len());
        assert_eq!(sha256(b""), "sha-256=:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=:");
    }
}
