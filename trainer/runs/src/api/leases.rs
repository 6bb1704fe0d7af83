//! Leases of rollouts, for the harness of a run with `environment.kind` `pull`: take one, let the
//! policy act, post the reward.
//!
//! A lease is a row of `rollout`. Handlers only change its state; the trainer offers rollouts, gives
//! up those whose lease has expired, and reads the rewards.

use super::grpo::{Config, Environment};
use super::runs;
use super::{Shared, database};
use crate::leases::{self, Rollout, Taken};
use crate::schedule::Schedule;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use edge::auth::Principal;
use edge::json::Json;
use edge::path::Path;
use edge::problem::Problem;
use event_log::lease;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sqlx::PgPool;
use std::collections::BTreeMap;
use std::time::Duration;
use time::OffsetDateTime;
use tokio::time::Instant;
use uuid::Uuid;

/// How long a harness that finds no rollout should wait before it asks again, seconds.
const RETRY_SECONDS: u32 = 1;
const WAIT_SECONDS_MAX: u64 = 30;
/// How often a request that waits looks again.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// Longest reason of a failure, bytes.
const REASON_BYTES_MAX: usize = 4 << 10;

/// A harness asks for a rollout.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Wanted {
    /// How long to wait for one, 0 to 30; default 0.
    wait_seconds: u64,
    /// Where the harness runs; one of `[client.clusters]`. The lease has the URL of its replicas.
    cluster: Option<String>,
}

/// A rollout to make, until `expires_at`.
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "object", rename = "lease")]
struct Lease {
    id: Uuid,
    run_id: Uuid,
    /// The rollouts of one task that are compared with each other.
    group_id: Uuid,
    task: Task,
    /// Base URL for OpenAI's clients. What they ask for are the turns of this rollout.
    base_url: String,
    /// The same for Anthropic's clients, which add `/v1` themselves.
    anthropic_base_url: String,
    /// What answers, whatever model a client names.
    model: String,
    #[serde(with = "time::serde::rfc3339")]
    expires_at: OffsetDateTime,
    /// How long it lasts from this answer on, and from the answer to each renewal.
    lease_seconds: u32,
    /// For the harness, which renews and ends the lease with it. Do not give it to the agent: who knows it sets
    /// the reward.
    secret: String,
}

#[derive(Debug, Clone, Serialize)]
struct Task {
    id: String,
    prompt: String,
    answer: String,
}

/// `POST /v1/runs/{id}/leases`: 201 with a lease, or 204 if no rollout is offered now. 409 if the run
/// has ended or has no environment outside.
pub(super) async fn take(
    State(shared): State<Shared>,
    principal: Principal,
    Path(id): Path<Uuid>,
    Json(wanted): Json<Wanted>,
) -> Result<Response, Problem> {
    if wanted.wait_seconds > WAIT_SECONDS_MAX {
        return Err(Problem::bad_request(format!(
            "wait_seconds is {}; it must be in 0..={WAIT_SECONDS_MAX}",
            wanted.wait_seconds
        )));
    }
    let serve_url = shared.harness_urls.of(wanted.cluster.as_deref())?;
    let until = Instant::now() + Duration::from_secs(wanted.wait_seconds);
    loop {
        let run = runs::get(&shared.pool, &shared.policy, id).await?;
        if run.finished_at.is_some() {
            return Err(Problem::conflict(format!(
                "run {id} is {}: it needs no rollouts any more",
                run.status
            )));
        }
        let pulled = pulled(&run)?;
        // what is rewarded while the run pauses would wait too long for the log
        if run.status == "running"
            && let Some(lease) = shared.take(&principal, &run, &pulled, serve_url).await?
        {
            return Ok((StatusCode::CREATED, Json(lease)).into_response());
        }
        if Instant::now() >= until {
            let retry = [(header::RETRY_AFTER, RETRY_SECONDS.to_string())];
            return Ok((StatusCode::NO_CONTENT, retry).into_response());
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// What a run whose rollouts are leased was asked for.
struct Pulled {
    config: Config,
    priority: i32,
    lease_seconds: u32,
}

fn pulled(run: &runs::Run) -> Result<Pulled, Problem> {
    let mut config = run.config.clone();
    let schedule = Schedule::take_from(&mut config).map_err(Problem::internal)?;
    let none = || {
        Problem::conflict(format!(
            "run {} has no environment of kind `pull`: its rollouts are not leased",
            run.id
        ))
    };
    if run.kind != "grpo" {
        return Err(none());
    }
    let config: Config = serde_json::from_value(config).map_err(Problem::internal)?;
    match config.environment {
        Environment::Pull { lease_seconds } => Ok(Pulled {
            config,
            priority: schedule.priority,
            lease_seconds,
        }),
        Environment::Completion | Environment::Push { .. } => Err(none()),
    }
}

impl Shared {
    async fn take(
        &self,
        principal: &Principal,
        run: &runs::Run,
        pulled: &Pulled,
        serve_url: &str,
    ) -> Result<Option<Lease>, Problem> {
        let taken = leases::take(&self.pool, run.id, &principal.label, pulled.lease_seconds).await;
        let Some(taken) = taken.map_err(database)? else {
            return Ok(None);
        };
        let Taken {
            id,
            group_id,
            task_id,
            prompt,
            answer,
            expires_at,
            secret,
        } = taken;
        let model = format!("{}@{}", self.policy, run.line);
        let lease = lease::Lease {
            id,
            run_id: run.id,
            task_id: task_id.clone(),
            group_id: group_id.to_string(),
            model: model.clone(),
            temperature: pulled.config.temperature,
            run_priority: pulled.priority,
        };
        let base_url = lease.base_url(serve_url).map_err(Problem::internal)?;
        Ok(Some(Lease {
            id,
            run_id: run.id,
            group_id,
            task: Task {
                id: task_id,
                prompt,
                answer,
            },
            anthropic_base_url: base_url.trim_end_matches("/v1").to_owned(),
            base_url,
            model,
            expires_at,
            lease_seconds: pulled.lease_seconds,
            secret,
        }))
    }

    /// The rollout after a change that a harness asked for, or why it was not made.
    async fn changed(
        &self,
        id: Uuid,
        changed: Result<Option<Rollout>, sqlx::Error>,
        request: &str,
    ) -> Result<Json<Rollout>, Problem> {
        if let Some(rollout) = changed.map_err(database)? {
            return Ok(Json(rollout));
        }
        let Rollout { state, code, .. } = &self.rollout(id).await?;
        let why = match (state.as_str(), code.as_deref()) {
            (_, Some("lease_expired")) => "the lease has expired, and the rollout was offered again".to_owned(),
            ("offered", _) => "nobody has leased it".to_owned(),
            ("leased", _) => "its run has ended".to_owned(),
            (_, Some(code)) => format!("it has ended: {code}"),
            (_, None) => "its reward has been posted".to_owned(),
        };
        Err(Problem::conflict(format!("cannot {request} rollout {id}: {why}")))
    }

    /// The rollout, for who knows the secret of its lease.
    async fn held(&self, id: Uuid, secret: &str) -> Result<Rollout, Problem> {
        let rollout = self.rollout(id).await?;
        match leases::has_secret(&self.pool, id, secret).await.map_err(database)? {
            true => Ok(rollout),
            false => Err(Problem::forbidden(format!(
                "secret is not that of lease {id}: give the `secret` of the answer that leased it"
            ))),
        }
    }

    async fn rollout(&self, id: Uuid) -> Result<Rollout, Problem> {
        let found = leases::find(&self.pool, &self.policy, id).await.map_err(database)?;
        found.ok_or_else(|| Problem::not_found(format!("policy `{}` has no lease {id}", self.policy)))
    }
}

/// Who holds a lease.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Holder {
    /// Of the lease.
    secret: String,
}

/// `POST /v1/leases/{id}/renew`: the lease begins anew.
pub(super) async fn renew(
    State(shared): State<Shared>,
    Path(id): Path<Uuid>,
    Json(holder): Json<Holder>,
) -> Result<Json<Rollout>, Problem> {
    let rollout = shared.held(id, &holder.secret).await?;
    let run = runs::get(&shared.pool, &shared.policy, rollout.run_id).await?;
    let renewed = leases::renew(&shared.pool, id, pulled(&run)?.lease_seconds).await;
    shared.changed(id, renewed, "renew").await
}

/// The end of a rollout.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Reward {
    /// Of the lease.
    secret: String,
    /// Of the whole rollout. Outside the bounds of the surface `environment` (−1 to 1 by default) it
    /// is kept and not trained on.
    reward: f64,
}

/// `POST /v1/leases/{id}/reward`: ends the rollout. The same reward again changes nothing.
pub(super) async fn reward(
    State(shared): State<Shared>,
    Path(id): Path<Uuid>,
    Json(Reward { secret, reward }): Json<Reward>,
) -> Result<Json<Rollout>, Problem> {
    if !reward.is_finite() {
        return Err(Problem::bad_request("reward is not a finite number"));
    }
    let before = shared.held(id, &secret).await?;
    pulled(&runs::get(&shared.pool, &shared.policy, before.run_id).await?)?;
    if before.reward == Some(reward) {
        return Ok(Json(before));
    }
    let rewarded = leases::reward(&shared.pool, id, &reward.into()).await;
    shared.changed(id, rewarded, "reward").await
}

/// Why a harness gives up.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct GivenUp {
    /// Of the lease.
    secret: String,
    /// For people; at most 4 KiB.
    #[serde(default)]
    reason: String,
    /// Whether the harness stopped because it took too long; default false. If so, the reward is the run's
    /// `failure_reward`.
    #[serde(default)]
    timed_out: bool,
}

/// `POST /v1/leases/{id}/fail`: the rollout has no reward, which is not a reward of 0. Another one is
/// offered in its place, a few times. One that took too long has a reward.
pub(super) async fn fail(
    State(shared): State<Shared>,
    Path(id): Path<Uuid>,
    Json(failure): Json<GivenUp>,
) -> Result<Json<Rollout>, Problem> {
    if failure.reason.len() > REASON_BYTES_MAX || failure.reason.contains('\0') {
        return Err(Problem::bad_request(format!(
            "reason has {} bytes; give at most {REASON_BYTES_MAX}, none of them NUL",
            failure.reason.len()
        )));
    }
    let before = shared.held(id, &failure.secret).await?;
    let Pulled { config, .. } = pulled(&runs::get(&shared.pool, &shared.policy, before.run_id).await?)?;
    let ended = match failure.timed_out {
        true => leases::reward(&shared.pool, id, &config.failure_reward.into()).await,
        false => leases::fail(&shared.pool, id, leases::HARNESS_FAILED, &failure.reason).await,
    };
    shared.changed(id, ended, "fail").await
}

/// How far the rollouts of a run are.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(tag = "object", rename = "rollouts")]
pub struct Progress {
    run_id: Uuid,
    /// How many are offered, leased, rewarded, failed, settled and spent.
    pub by_state: BTreeMap<String, i64>,
    /// Those without a reward, by why.
    pub lost: BTreeMap<String, i64>,
    /// How many got a reward in the last 60 s.
    pub rewarded_last_minute: i64,
    /// Over all that have one.
    reward_mean: Option<f64>,
}

/// `GET /v1/runs/{id}/rollouts`
pub(super) async fn progress(State(shared): State<Shared>, Path(id): Path<Uuid>) -> Result<Json<Progress>, Problem> {
    runs::get(&shared.pool, &shared.policy, id).await?;
    Ok(Json(rollouts(&shared.pool, id).await?))
}

/// How far the rollouts of a run are.
pub async fn rollouts(pool: &PgPool, id: Uuid) -> Result<Progress, Problem> {
    let counts = sqlx::query!(
        r#"
            select coalesce((select jsonb_object_agg(state, n) from
                       (select state, count(*) as n from rollout where run_id = $1 group by state) s), '{}') as "by_state!: Value",
                   coalesce((select jsonb_object_agg(code, n) from
                       (select code, count(*) as n from rollout where run_id = $1 and code is not null group by code) c), '{}')
                       as "lost!: Value",
                   (select count(*) from rollout
                    where run_id = $1 and reward is not null and finished_at > now() - interval '1 minute') as "recent!",
                   (select avg(reward) from rollout where run_id = $1) as reward_mean
            "#,
        id
    )
    .fetch_one(pool)
    .await
    .map_err(database)?;
    let read = |value| serde_json::from_value(value).map_err(Problem::internal);
    Ok(Progress {
        run_id: id,
        by_state: read(counts.by_state)?,
        lost: read(counts.lost)?,
        rewarded_last_minute: counts.recent,
        reward_mean: counts.reward_mean,
    })
}
