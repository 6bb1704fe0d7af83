//! The API of the arms: `GET /v1/experiment` and `PUT /v1/experiment`.
//!
//! A request writes the experiment, the next epoch and the audit row in one transaction, and then
//! publishes the epoch. So new arms are in force as soon as replicas have read it, without a restart.

use super::decide::ReleaseState;
use super::decide::arms::{self, ExperimentRequest, RequestError, Source};
use super::http::check_loadable;
use super::{ArmOptions, ReleaseService, audited, tables};
use axum::extract::State;
use edge::Problem;
use edge::auth::{Principal, Scope};
use edge::database::unavailable;
use edge::json::Json;
use edge::routes::{Routes, get, put};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use time::OffsetDateTime;
use uuid::Uuid;

/// The path of both routes.
const PATH: &str = "/v1/experiment";

pub fn routes() -> Routes<ReleaseService> {
    Routes::new()
        .route(Scope::Read, PATH, "The arms in force", get(experiment))
        .route(Scope::Release, PATH, "Change the arms", put(request_experiment))
}

/// The experiment in force.
#[derive(Debug, Serialize, Deserialize)]
pub struct ExperimentView {
    pub policy: String,
    pub id: Uuid,
    /// The first assignment that divides users by it.
    pub epoch: i64,
    /// Another salt draws every user's arm anew. Empty: none.
    pub salt: String,
    pub arms: Vec<ArmView>,
    /// `configuration`: a changed configuration replaces it. `request`: only a request does.
    pub source: Source,
    pub actor: String,
    pub reason: String,
    #[serde(with = "time::serde::rfc3339")]
    pub since: OffsetDateTime,
    /// The alias that the realtime run learns from.
    pub learning_alias: String,
    /// `champion` moves to the version of `learner` when it is this many versions behind.
    pub champion_every: u32,
    /// What a person should know about these arms.
    pub warnings: Vec<String>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct ArmView {
    pub alias: String,
    pub weight: f64,
    pub explore: f64,
    /// Highest temperature of users' requests. Absent: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature_max: Option<f64>,
    /// Lowest probability of a text that users are shown. Absent: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub probability_min: Option<f64>,
    /// The version that it serves. Null: none, so its users are divided among the other arms.
    pub version: Option<i64>,
}

impl From<ArmView> for ArmOptions {
    fn from(arm: ArmView) -> Self {
        Self {
            alias: arm.alias,
            weight: arm.weight,
            explore: arm.explore,
            temperature_max: arm.temperature_max,
            probability_min: arm.probability_min,
        }
    }
}

impl ExperimentView {
    /// `None`: there are no arms yet.
    fn new(service: &ReleaseService, mut state: ReleaseState) -> Option<Self> {
        let inner = &service.0;
        let experiment = state.experiment.take()?;
        let warnings = arms::warnings(&experiment, &inner.options.arms, inner.learning);
        let arms = experiment.arms.into_iter().map(|arm| ArmView {
            version: state.alias(&arm.alias).map(|alias| alias.version),
            alias: arm.alias,
            weight: arm.weight,
            explore: arm.explore,
            temperature_max: arm.temperature_max,
            probability_min: arm.probability_min,
        });
        Some(ExperimentView {
            policy: inner.policy.clone(),
            id: experiment.id,
            epoch: experiment.epoch,
            salt: experiment.salt,
            arms: arms.collect(),
            source: experiment.source,
            actor: experiment.actor,
            reason: experiment.reason,
            since: experiment.created_at,
            learning_alias: inner.learning.alias.name().to_owned(),
            champion_every: inner.options.champion_every,
            warnings,
        })
    }
}

async fn experiment(State(service): State<ReleaseService>) -> Result<Json<ExperimentView>, Problem> {
    let inner = &service.0;
    let mut connection = inner.pool.acquire().await.map_err(unavailable)?;
    let state = tables::read(&mut connection, &inner.policy, service.rules())
        .await
        .map_err(unavailable)?;
    let view = ExperimentView::new(&service, state).ok_or_else(|| {
        Problem::not_found("there are no arms yet: the release loop writes them when the first version is assigned")
    })?;
    Ok(Json(view))
}

async fn request_experiment(
    State(service): State<ReleaseService>,
    principal: Principal,
    Json(request): Json<ExperimentRequest>,
) -> Result<Json<ExperimentView>, Problem> {
    let inner = &service.0;
    let policy = &inner.policy;
    // Outside the lock on the policy's assignments: a store that does not answer delays no release.
    let mut connection = inner.pool.acquire().await.map_err(unavailable)?;
    let state = tables::read(&mut connection, policy, service.rules()).await;
    drop(connection);
    let state = state.map_err(unavailable)?;
    let draft_of = |state: &ReleaseState| {
        arms::by_request(state, inner.learning, &request).map_err(|error| {
            tracing::info!(reason = %error, "arms refused");
            into_problem(&error)
        })
    };
    draft_of(&state)?;
    let loadable = new_versions(&state, &request);
    for version in &loadable {
        check_loadable(&service, *version).await?;
    }
    let mut transaction = tables::begin(&inner.pool, policy).await.map_err(unavailable)?;
    let mut state = tables::read(&mut transaction, policy, service.rules())
        .await
        .map_err(unavailable)?;
    let Some(draft) = draft_of(&state)? else {
        return Ok(Json(ExperimentView::new(&service, state).ok_or_else(no_row)?));
    };
    if !new_versions(&state, &request).is_subset(&loadable) {
        return Err(Problem::conflict(
            "the alias of a new arm has moved while this request was looked at: send it again",
        ));
    }
    let restated = state.restate(format!("stated again with other arms: {}", draft.reason));
    let restated = restated.ok_or_else(|| into_problem(&RequestError::NothingAssigned))?;
    let (epoch, _) = tables::write(&mut transaction, policy, 0, "follow", "follow", &[restated])
        .await
        .map_err(unavailable)?;
    audited::write_experiment(&mut transaction, policy, epoch, &draft, principal.actor())
        .await
        .map_err(unavailable)?;
    state.experiment = tables::experiment(&mut transaction, policy, epoch)
        .await
        .map_err(unavailable)?;
    transaction.commit().await.map_err(unavailable)?;
    tracing::info!(epoch, arms = draft.text(), "arms changed");
    metrics::counter!("springtide_arm_changes_total").increment(1);
    // the change is committed; if the store is down, the loop publishes it later
    if let Err(error) = service.publish_missing().await {
        tracing::warn!(epoch, error = format!("{error:#}"), "assignment not published yet");
    }
    Ok(Json(ExperimentView::new(&service, state).ok_or_else(no_row)?))
}

/// The versions of arms that are new. Replicas take an assignment only if they can load every arm.
fn new_versions(state: &ReleaseState, request: &ExperimentRequest) -> BTreeSet<i64> {
    let has_arm = |alias: &str| {
        let mut arms = state.experiment.iter().flat_map(|experiment| &experiment.arms);
        arms.any(|arm| arm.alias == alias)
    };
    let new = request.arms.iter().filter(|arm| !has_arm(&arm.alias));
    new.filter_map(|arm| Some(state.alias(&arm.alias)?.version)).collect()
}

fn no_row() -> Problem {
    Problem::internal(
        "the table `experiment` has no row of this policy: restart control, which writes the arms of its configuration",
    )
}

fn into_problem(error: &RequestError) -> Problem {
    match error {
        RequestError::Arms(_) => Problem::bad_request(error),
        RequestError::NothingAssigned
        | RequestError::NoAlias(_)
        | RequestError::NoLearningArm(_)
        | RequestError::LearnerUnused
        | RequestError::CanaryServes
        | RequestError::Replaced(_) => Problem::conflict(error),
    }
}
