//! `/v1/datasets`: create a version, find one, say what is gone of it, stream the file of an export.
//!
//! A dataset is shown to keys of the tenant that made it, and to administrators. It may have
//! generations of all tenants that consent to the policy, for training and measuring. An export
//! has only those of the caller's tenant, or, for an administrator, all.

use super::offline::{ExportFor, Exported};
use super::{List, Shared, database, limit, visible_tenant};
use crate::dataset::file::Format;
use crate::dataset::store::{self, Dataset, Error, New};
use crate::dataset::{self, Query as DatasetQuery, Reference, check_name};
use axum::body::Body;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use edge::auth::Principal;
use edge::json::Json;
use edge::path::Path;
use edge::problem::Problem;
use edge::query::Query;
use event_log::payload::Store;
use futures::{StreamExt, stream};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use time::OffsetDateTime;

/// Postgres' code for a statement that took longer than it may.
const QUERY_CANCELED: &str = "57014";

/// The body of `POST /v1/datasets`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Request {
    name: String,
    /// Default: every closed trajectory with a reward.
    #[serde(default)]
    query: DatasetQuery,
}

/// A version of a dataset as clients see it.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "object", rename = "dataset")]
pub struct Shown {
    pub name: String,
    pub version: i32,
    pub policy: String,
    pub tenant: String,
    /// What was asked for, and what fixes it: `tenants`, `closed_before`, `last_id`, `limit`.
    pub query: Value,
    pub created_by: String,
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
    /// At its creation.
    pub trajectories: i64,
    /// Of all of them: a single generation is one trajectory, an episode has several.
    pub generations: i64,
    /// BLAKE3 of their ids in ascending order, hexadecimal.
    pub digest: String,
    #[serde(flatten)]
    pub now: Option<Now>,
}

/// What is left of it. Absent in lists.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Now {
    /// Generations that a run gets, and of how many trajectories.
    pub available: i64,
    pub available_trajectories: i64,
    /// Deleted by retention, and the rest of their episodes.
    pub expired: i64,
    /// Stored, but their tenant has withdrawn its consent.
    pub withdrawn: i64,
    /// Whether a run gets exactly the generations of its creation.
    pub complete: bool,
}

impl Shown {
    fn new(dataset: Dataset, now: Option<Now>) -> Self {
        Shown {
            name: dataset.name,
            version: dataset.version,
            policy: dataset.policy,
            tenant: dataset.tenant,
            query: dataset.query,
            created_by: dataset.created_by,
            created_at: dataset.created_at,
            trajectories: dataset.trajectories,
            generations: dataset.generations,
            digest: hex::encode(dataset.digest),
            now,
        }
    }
}

/// An error of the query that selects trajectories, as a problem.
fn of_query(error: sqlx::Error) -> Problem {
    let code = error.as_database_error().and_then(|error| error.code());
    match code.as_deref() {
        Some(QUERY_CANCELED) => Problem::unavailable(
            format!(
                "selecting the trajectories took longer than {} s: ask for a shorter time, with sampled_from and sampled_until",
                store::STATEMENT_MAX.as_secs()
            ),
            60,
        ),
        _ => database(error),
    }
}

impl Shared {
    /// A version of a dataset that the caller may use, or a 404.
    pub(super) async fn dataset(&self, reference: &Reference, principal: &Principal) -> Result<Dataset, Problem> {
        let tenant = visible_tenant(principal);
        let mut transaction = store::begin(&self.pool, tenant).await.map_err(database)?;
        let found = store::find(&mut transaction, &self.policy, reference, tenant).await;
        let missing = || Problem::not_found(format!("policy `{}` has no dataset {reference}", self.policy));
        found.map_err(database)?.ok_or_else(missing)
    }
}

pub(super) async fn create(
    State(shared): State<Shared>,
    principal: Principal,
    Json(request): Json<Request>,
) -> Result<(StatusCode, Json<Shown>), Problem> {
    check_name(&request.name).map_err(Problem::bad_request)?;
    let checked = request.query.check();
    checked.map_err(|why| Problem::bad_request(format!("query.{why}")))?;
    let new = New {
        policy: &shared.policy,
        name: &request.name,
        tenant: &principal.tenant,
        query: &request.query,
        actor: principal.actor(),
    };
    let made = store::create(&shared.pool, new).await.map_err(|error| match error {
        Error::Empty => Problem::conflict(error),
        Error::Database(error) => of_query(error),
        error => Problem::internal(error),
    })?;
    Ok((StatusCode::CREATED, Json(Shown::new(made, None))))
}

/// Which datasets to list.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Page {
    limit: Option<i64>,
    /// The last `name@version` of the page before.
    after: Option<Reference>,
    name: Option<String>,
}

pub(super) async fn list(
    State(shared): State<Shared>,
    principal: Principal,
    Query(page): Query<Page>,
) -> Result<Json<List<Shown>>, Problem> {
    let limit = limit(page.limit)?;
    let (tenant, name) = (visible_tenant(&principal), page.name.as_deref());
    let mut transaction = store::begin(&shared.pool, tenant).await.map_err(database)?;
    let found = store::list(
        &mut transaction,
        &shared.policy,
        tenant,
        name,
        page.after.as_ref(),
        limit + 1,
    )
    .await;
    let shown = found
        .map_err(database)?
        .into_iter()
        .map(|dataset| Shown::new(dataset, None));
    Ok(Json(List::page(shown.collect(), limit)))
}

pub(super) async fn one(
    State(shared): State<Shared>,
    principal: Principal,
    Path((name, version)): Path<(String, i32)>,
) -> Result<Json<Shown>, Problem> {
    let dataset = shared.dataset(&Reference { name, version }, &principal).await?;
    let tenant = visible_tenant(&principal);
    let mut transaction = store::begin(&shared.pool, tenant).await.map_err(database)?;
    let count = dataset::count(&mut transaction, &shared.policy, &dataset.query, false)
        .await
        .map_err(of_query)?;
    let (stored, available) = (count.stored.generations, count.available.generations);
    let now = Now {
        available,
        available_trajectories: count.available.trajectories,
        expired: (dataset.generations - stored).max(0),
        withdrawn: stored - available,
        complete: available == dataset.generations && count.digest.0[..] == dataset.digest[..],
    };
    Ok(Json(Shown::new(dataset, Some(now))))
}

/// Which export.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Exports {
    #[serde(default)]
    format: Format,
}

pub(super) async fn export(
    State(shared): State<Shared>,
    principal: Principal,
    Path((name, version)): Path<(String, i32)>,
    Query(wanted): Query<Exports>,
) -> Result<Response, Problem> {
    let reference = Reference { name, version };
    let format = wanted.format;
    shared.dataset(&reference, &principal).await?;
    let found = shared.newest_export(&reference, format, &principal).await?;
    let (kept, exported, made_at) = found.ok_or_else(|| {
        Problem::not_found(format!(
            "no run has exported {reference} as {} for this key's tenant: create one with `{{\"kind\": \"export\", \
             \"dataset\": \"{reference}\", \"format\": \"{}\"}}`, and ask again when it has succeeded",
            format.as_str(),
            format.as_str()
        ))
    })?;
    shared.check_consents(&exported, made_at).await?;
    if exported.parts.is_empty() && exported.generations > 0 {
        return Err(Problem::conflict(
            "the file of this export has been deleted, because retention has deleted a generation that it had: export \
             the dataset again",
        ));
    }
    let exports = shared.exports.clone().ok_or_else(|| {
        Problem::not_implemented("this control role has no store of payloads: set ingest.payload_store, as for `train`")
    })?;
    // So that an export that is gone is a problem document, and not half an answer.
    for part in &exported.parts {
        exports.check_exists(&kept.tenant, part).await.map_err(unreadable)?;
    }
    let headers = [
        (header::CONTENT_TYPE, format.media_type().to_owned()),
        (header::CONTENT_LENGTH, exported.bytes.to_string()),
        (
            header::CONTENT_DISPOSITION,
            format!(
                "attachment; filename=\"{}-{}.{}\"",
                reference.name,
                reference.version,
                format.as_str()
            ),
        ),
    ];
    Ok((headers, Body::from_stream(file(exports, kept.tenant, exported))).into_response())
}

/// The bytes of an export, part by part. Each part is compared with its digest.
fn file(
    exports: Store,
    tenant: String,
    exported: Exported,
) -> impl futures::Stream<Item = Result<bytes::Bytes, event_log::payload::Error>> {
    stream::iter(exported.parts).then(move |part| {
        let (exports, tenant) = (exports.clone(), tenant.clone());
        async move { exports.get(&tenant, &part).await }
    })
}

fn unreadable(error: event_log::payload::Error) -> Problem {
    match error {
        event_log::payload::Error::Missing => Problem::not_found(
            "the file of this export has been deleted, as files are that nothing refers to: export again",
        ),
        event_log::payload::Error::Unavailable { .. } => {
            Problem::unavailable("the store of payloads does not answer", 2)
        }
        error => Problem::internal(error),
    }
}

impl Shared {
    /// The newest export that has succeeded and has what the caller may see: the rows of its
    /// tenant, or, for an administrator, of all.
    async fn newest_export(
        &self,
        reference: &Reference,
        format: Format,
        principal: &Principal,
    ) -> Result<Option<(ExportFor, Exported, OffsetDateTime)>, Problem> {
        let tenant = visible_tenant(principal);
        let row = sqlx::query!(
            r#"
            select config, result as "result!", created_at from run
            where policy = $1 and kind = 'export' and status = 'succeeded' and result is not null
              and config ->> 'dataset' = $2 and config ->> 'format' = $3
              and config ->> 'all_tenants' = case when $4::text is null then 'true' else 'false' end
              and ($4 is null or config ->> 'tenant' = $4)
            order by created_at desc
            limit 1
            "#,
            &*self.policy,
            reference.to_string(),
            format.as_str(),
            tenant
        )
        .fetch_optional(&self.pool)
        .await
        .map_err(database)?;
        let Some(row) = row else { return Ok(None) };
        let kept = serde_json::from_value(row.config).map_err(Problem::internal)?;
        let exported = serde_json::from_value(row.result).map_err(Problem::internal)?;
        Ok(Some((kept, exported, row.created_at)))
    }

    /// Fails if a tenant whose rows the file has does not consent any more, or one of its users was erased since. The
    /// trainer deletes the file soon.
    async fn check_consents(&self, exported: &Exported, made_at: OffsetDateTime) -> Result<(), Problem> {
        let withdrawn = sqlx::query_scalar!(
            r#"select exists (select from unnest($2::text[]) as one (id)
                              where one.id <> all (dataset_tenants($1))
                                 or exists (select from erasure e where e.tenant_id = one.id and e.erased_at > $3))
                      as "withdrawn!""#,
            &*self.policy,
            &exported.tenants,
            made_at
        )
        .fetch_one(&self.pool)
        .await
        .map_err(database)?;
        match withdrawn {
            true => Err(Problem::conflict(
                "since this export a tenant has withdrawn its consent, or a user was erased: export the dataset again",
            )),
            false => Ok(()),
        }
    }
}
