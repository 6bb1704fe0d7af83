//! Runs, versions, lines and datasets over HTTP. Needs no libtorch.
//!
//! `/v1/runs` has the shape of `/v1/fine_tuning/jobs`: create a run, read its progress, pause,
//! resume, cancel. Handlers only write rows, and what was requested with which key into the audit.
//! The executor in `springtide train` reads them; it need not be running.

pub mod audited;
mod cohorts;
pub mod control;
pub mod create;
pub mod curve;
pub mod datasets;
mod fork;
pub mod grpo;
pub mod leases;
pub mod offline;
pub mod preference;
pub mod runs;
pub mod versions;

pub use grpo::Config;

use edge::auth::{Principal, Scope};
use edge::problem::Problem;
use edge::routes::{Routes, get, post, put};
use edge::turns::Turns;
use event_log::payload::Store as Exports;
use serde::{Deserialize, Serialize};
use sqlx::PgPool;
use std::collections::BTreeMap;
use std::sync::Arc;
use store::Store;

/// Largest request, with all its tasks.
const BODY_BYTES_MAX: usize = 32 << 20;
const PAGE_DEFAULT: i64 = 20;
const PAGE_MAX: i64 = 200;
/// A dataset's query may read every generation, so few run at a time.
const DATASETS_AT_ONCE: usize = 2;
/// Running ones and those that wait.
const DATASETS_PER_KEY: usize = 2;

/// What the handlers share.
#[derive(Debug, Clone)]
struct Shared {
    pool: PgPool,
    policy: Arc<str>,
    /// Where exports lie. `None`: none can be downloaded here.
    exports: Option<Exports>,
    /// Where trainers outside upload to. `None`: nowhere.
    store: Option<Store>,
    harness_urls: Arc<HarnessUrls>,
}

impl Shared {
    /// For callers in this process: nothing is downloaded, and no rollouts are handed out.
    fn in_process(pool: &PgPool, policy: &str) -> Self {
        Self {
            pool: pool.clone(),
            policy: policy.into(),
            exports: None,
            store: None,
            harness_urls: Arc::new(HarnessUrls {
                anywhere: String::new(),
                clusters: BTreeMap::new(),
            }),
        }
    }
}

/// Where harnesses reach the policy: base URLs of the completions API such as `http://serve:8000`.
#[derive(Debug, Clone)]
pub struct HarnessUrls {
    /// Of harnesses that name no cluster.
    pub anywhere: String,
    /// By cluster, for harnesses beside its replicas: what they ask for and the answers stay there.
    pub clusters: BTreeMap<String, String>,
}

impl HarnessUrls {
    fn of(&self, cluster: Option<&str>) -> Result<&str, Problem> {
        let Some(cluster) = cluster else {
            return Ok(&self.anywhere);
        };
        self.clusters.get(cluster).map(String::as_str).ok_or_else(|| {
            let names: Vec<&str> = self.clusters.keys().map(String::as_str).collect();
            Problem::bad_request(format!(
                "no URL of the cluster `{cluster}` is known; add it to [client.clusters] of the control role, which has: {}",
                if names.is_empty() { "none".to_owned() } else { names.join(", ") }
            ))
        })
    }
}

/// `/v1/runs`, `/v1/cohorts`, `/v1/leases`, `/v1/versions`, `/v1/lines` and `/v1/datasets` of one policy.
/// `exports`: from [`Exports::exports`].
pub fn routes(pool: PgPool, policy: &str, exports: Option<Exports>, store: Store, harness_urls: HarnessUrls) -> Routes {
    let create = post(create::create).body_bytes_max(BODY_BYTES_MAX);
    let turns = Turns::new(DATASETS_AT_ONCE, DATASETS_PER_KEY);
    let create_dataset = post(datasets::create).in_turn(turns.clone());
    let dataset = get(datasets::one).in_turn(turns);
    let (read, research) = (Scope::Read, Scope::Research);
    Routes::new()
        .route(research, "/v1/runs", "Schedule a run", create)
        .route(read, "/v1/runs", "List runs", get(runs::list))
        .route(read, "/v1/runs/{id}", "One run", get(runs::one))
        .route(
            read,
            "/v1/runs/compare",
            "Several runs side by side",
            get(curve::compare),
        )
        .route(
            read,
            "/v1/runs/{id}/curve",
            "What the steps measured",
            get(curve::curve),
        )
        .route(
            research,
            "/v1/runs/{id}/spec",
            "The request that makes the same run",
            get(fork::spec),
        )
        .route(
            research,
            "/v1/runs/{id}/fork",
            "The same run from a version of its line",
            post(fork::fork).body_bytes_max(BODY_BYTES_MAX),
        )
        .route(read, "/v1/runs/{id}/events", "Events of a run", get(runs::events))
        .route(
            read,
            "/v1/runs/{id}/checkpoints",
            "Steps of a run",
            get(runs::checkpoints),
        )
        .route(research, "/v1/runs/{id}/cancel", "End a run", post(control::cancel))
        .route(research, "/v1/runs/{id}/pause", "Pause a run", post(control::pause))
        .route(
            research,
            "/v1/runs/{id}/resume",
            "Continue a run",
            post(control::resume),
        )
        .route(
            Scope::Train,
            "/v1/runs/{id}/cohorts",
            "Lease the cohort of the next step",
            post(cohorts::take),
        )
        .route(read, "/v1/cohorts/{id}", "One cohort", get(cohorts::one))
        .route(
            Scope::Train,
            "/v1/cohorts/{id}/renew",
            "Keep a cohort for longer",
            post(cohorts::renew),
        )
        .route(
            Scope::Train,
            "/v1/cohorts/{id}/samples/{part}",
            "A file of a cohort's samples",
            get(cohorts::samples),
        )
        .route(
            Scope::Train,
            "/v1/cohorts/{id}/files/{name}/{piece}",
            "Upload a piece of a file of weights",
            put(cohorts::upload).body_bytes_max(cohorts::PIECE_BODY_MAX),
        )
        .route(
            Scope::Train,
            "/v1/cohorts/{id}/commit",
            "Make a step of a cohort",
            post(cohorts::commit).body_bytes_max(BODY_BYTES_MAX),
        )
        .route(
            Scope::Train,
            "/v1/cohorts/{id}/abort",
            "Give a cohort back",
            post(cohorts::abort),
        )
        .route(
            Scope::Completions,
            "/v1/runs/{id}/leases",
            "Take a rollout to make",
            post(leases::take),
        )
        .route(
            read,
            "/v1/runs/{id}/rollouts",
            "How far the rollouts of a run are",
            get(leases::progress),
        )
        .route(
            Scope::Completions,
            "/v1/leases/{id}/renew",
            "Keep a rollout for longer",
            post(leases::renew),
        )
        .route(
            Scope::Completions,
            "/v1/leases/{id}/reward",
            "End a rollout with its reward",
            post(leases::reward),
        )
        .route(
            Scope::Completions,
            "/v1/leases/{id}/fail",
            "End a rollout without a reward",
            post(leases::fail),
        )
        .route(read, "/v1/versions", "List versions", get(versions::list))
        .route(read, "/v1/versions/{serial}", "One version", get(versions::one))
        .route(read, "/v1/lines", "List lines and their heads", get(versions::lines))
        .route(research, "/v1/datasets", "Make a dataset", create_dataset)
        .route(read, "/v1/datasets", "List datasets", get(datasets::list))
        .route(
            read,
            "/v1/datasets/{name}/{version}",
            "One dataset, and what is gone of it",
            dataset,
        )
        .route(
            research,
            "/v1/datasets/{name}/{version}/export",
            "The file of the newest export",
            get(datasets::export),
        )
        .with_state(Shared {
            pool,
            policy: policy.into(),
            exports,
            store: Some(store),
            harness_urls: Arc::new(harness_urls),
        })
}

/// A page of a list.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "object", rename = "list")]
pub struct List<T> {
    pub data: Vec<T>,
    pub has_more: bool,
}

impl<T> List<T> {
    /// The page, of up to `limit + 1` rows.
    pub fn page(mut data: Vec<T>, limit: i64) -> Self {
        let has_more = data.len() as i64 > limit;
        data.truncate(usize::try_from(limit).unwrap_or(0));
        List { data, has_more }
    }
}

/// The size of a page.
fn limit(requested: Option<i64>) -> Result<i64, Problem> {
    match requested.unwrap_or(PAGE_DEFAULT) {
        limit @ 1..=PAGE_MAX => Ok(limit),
        other => Err(Problem::bad_request(format!(
            "limit is {other}; it must be in 1..={PAGE_MAX}"
        ))),
    }
}

/// Whose data a caller may see of what the policy's tenant shares: that of its own tenant; `None`, for
/// administrators: all.
fn visible_tenant(principal: &Principal) -> Option<&str> {
    (!principal.scopes.allow(Scope::Admin)).then_some(principal.tenant.as_str())
}

/// A database error as a problem, which logs it.
fn database(error: sqlx::Error) -> Problem {
    Problem::of_database(error, |error| Problem::internal(format!("database: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_says_whether_there_is_more() {
        let page = List::page(vec![1, 2, 3], 2);
        assert_eq!(
            serde_json::to_value(&page).unwrap(),
            serde_json::json!({"object": "list", "data": [1, 2], "has_more": true})
        );
        assert!(!List::page(vec![1, 2], 2).has_more);
    }

    #[test]
    fn limits_out_of_range_are_refused() {
        assert_eq!(limit(None).unwrap(), PAGE_DEFAULT);
        assert!(limit(Some(0)).is_err() && limit(Some(PAGE_MAX + 1)).is_err());
    }
}
