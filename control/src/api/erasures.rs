//! `/v1/erasures`: erases what one user left. The database does it (`migrations/0009_erasure.sql`); this asks for it,
//! signs the receipt, and keeps a copy of it in the policy store. After a restore the copies say which users to erase
//! again.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context;
use axum::extract::State;
use edge::Problem;
use edge::audit::{self, Actor, Change};
use edge::auth::Principal;
use edge::json::Json;
use edge::tenant::hold_steps;
use release::ReleaseService;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sqlx::{PgConnection, PgPool};
use store::Store;
use time::OffsetDateTime;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::tables::unavailable;

/// The kind in the payload type of a receipt's signature.
const KIND: &str = artifact::sign::ERASURE_KIND;
/// Below `private/` of the policy store.
const FOLDER: &str = "erasures";
const USER_BYTES_MAX: usize = 512;
/// Between two looks for receipts of users that the database does not know: a restored one.
const LOOK_EVERY: Duration = Duration::from_secs(600);
const RETRY_AFTER: Duration = Duration::from_secs(10);

/// Erases users.
#[derive(Clone)]
pub struct Erasures {
    pub pool: PgPool,
    pub store: Store,
    /// Signs receipts.
    pub releases: ReleaseService,
}

/// The body of `POST /v1/erasures`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// The user's key, as requests named it in `user`.
    user: String,
    /// Default: the tenant of the caller's key.
    #[serde(default)]
    tenant: Option<String>,
    /// Why; kept in the audit. Do not name the user.
    reason: String,
}

/// What was erased.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Receipt {
    /// Of this form: 1.
    pub version: u32,
    pub id: Uuid,
    pub tenant: String,
    /// SHA-256 of the length of the tenant's name, `:`, the name and the user's key, hexadecimal. The key is not kept.
    pub user_digest: String,
    #[serde(with = "time::serde::rfc3339")]
    pub erased_at: OffsetDateTime,
    /// Generations that lost their user, prompt, answer, log-probabilities and signature.
    pub generations: i64,
    /// Feedback events that lost their text and tags.
    pub feedback: i64,
    /// References to objects of the store of payloads.
    pub payloads: i64,
    /// Cohorts that went back to the queue.
    pub cohorts: i64,
    /// By policy, the versions whose step was trained on the user.
    pub trained: BTreeMap<String, Vec<i64>>,
    /// By policy, these and all that continue them.
    pub tainted: BTreeMap<String, Vec<i64>>,
}

/// A receipt, and its signature over exactly its bytes.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "object", rename = "erasure")]
pub struct Erased {
    pub receipt: Receipt,
    pub envelope: Value,
}

/// `GET /v1/erasures`.
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "object", rename = "list")]
pub struct Listed {
    pub data: Vec<Receipt>,
}

/// Whom to erase.
struct Whom<'a> {
    id: Uuid,
    tenant: &'a str,
    /// `None`: only the digest is known.
    user: Option<&'a str>,
    digest: Vec<u8>,
}

/// What `erase_user` counts.
#[derive(Deserialize)]
struct Counted {
    id: Uuid,
    #[serde(default)]
    generations: i64,
    #[serde(default)]
    feedback: i64,
    #[serde(default)]
    payloads: i64,
    #[serde(default)]
    cohorts: i64,
    #[serde(default)]
    trained: Vec<Trained>,
    /// Seconds since 1970.
    erased_at: f64,
}

#[derive(Deserialize)]
struct Trained {
    policy: String,
    version: i64,
}

impl Counted {
    async fn receipt(self, connection: &mut PgConnection, tenant: String, digest: &[u8]) -> sqlx::Result<Receipt> {
        let mut trained: BTreeMap<String, Vec<i64>> = BTreeMap::new();
        for Trained { policy, version } in self.trained {
            trained.entry(policy).or_default().push(version);
        }
        let mut tainted = BTreeMap::new();
        for (policy, versions) in &trained {
            let later = sqlx::query_scalar!(r#"select descendants($1, $2) as "serial!""#, policy, versions);
            tainted.insert(policy.clone(), later.fetch_all(&mut *connection).await?);
        }
        Ok(Receipt {
            version: 1,
            id: self.id,
            tenant,
            user_digest: hex::encode(digest),
            erased_at: OffsetDateTime::UNIX_EPOCH + time::Duration::seconds_f64(self.erased_at),
            generations: self.generations,
            feedback: self.feedback,
            payloads: self.payloads,
            cohorts: self.cohorts,
            trained,
            tainted,
        })
    }
}

pub async fn create(
    State(erasures): State<Erasures>,
    principal: Principal,
    Json(request): Json<Request>,
) -> Result<Json<Erased>, Problem> {
    let Request { user, tenant, reason } = request;
    if user.is_empty() || user.len() > USER_BYTES_MAX {
        return Err(Problem::bad_request(format!(
            "user must have 1 to {USER_BYTES_MAX} bytes"
        )));
    }
    if reason.trim().is_empty() {
        return Err(Problem::bad_request(
            "reason is empty: say why, without naming the user",
        ));
    }
    // so that a caller who hangs up does not undo it half way
    let erased = tokio::spawn(async move {
        let tenant = tenant.unwrap_or_else(|| principal.tenant.clone());
        let known = sqlx::query_scalar!(
            r#"select exists (select from tenant where id = $1) as "known!""#,
            tenant
        );
        if !known.fetch_one(&erasures.pool).await.map_err(unavailable)? {
            return Err(Problem::not_found(format!("there is no tenant {tenant:?}")));
        }
        let digest = sqlx::query_scalar!(r#"select user_digest($1, $2) as "digest!""#, tenant, user);
        let whom = Whom {
            id: Uuid::now_v7(),
            tenant: &tenant,
            user: Some(&user),
            digest: digest.fetch_one(&erasures.pool).await.map_err(unavailable)?,
        };
        let receipt = erasures
            .erase(whom, principal.actor(), &reason)
            .await
            .map_err(unavailable)?;
        erasures.keep(receipt).await.map_err(|error| {
            tracing::warn!(error = format!("{error:#}"), "cannot keep the receipt of an erasure");
            Problem::unavailable(
                "the user is erased, but the policy store does not take the receipt: ask again",
                10,
            )
        })
    });
    erased.await.map_err(Problem::internal)?.map(Json)
}

pub async fn list(State(erasures): State<Erasures>) -> Result<Json<Listed>, Problem> {
    erasures
        .listed()
        .await
        .map(|data| Json(Listed { data }))
        .map_err(unavailable)
}

impl Erasures {
    async fn erase(&self, whom: Whom<'_>, actor: Actor<'_>, reason: &str) -> sqlx::Result<Receipt> {
        let mut transaction = edge::database::begin(&self.pool).await?;
        // a step that is being committed ends first; a later one knows of the erasure
        hold_steps(&mut transaction).await?;
        let registered = sqlx::query_scalar!(
            "select register_erasure($1, $2, $3, $4)",
            whom.id,
            whom.tenant,
            whom.digest,
            actor.name
        );
        registered.fetch_one(&mut *transaction).await?;
        transaction.commit().await?;
        let mut transaction = edge::database::begin(&self.pool).await?;
        let counted = sqlx::query_scalar!(
            r#"select erase_user($1, $2, $3) as "counted!""#,
            whom.tenant,
            whom.user,
            whom.digest
        );
        let counted = counted.fetch_one(&mut *transaction).await?;
        let counted: Counted = serde_json::from_value(counted).map_err(|error| sqlx::Error::Decode(error.into()))?;
        let receipt = counted
            .receipt(&mut transaction, whom.tenant.to_owned(), &whom.digest)
            .await?;
        let change = Change {
            tenant: whom.tenant,
            action: "user.erase",
            subject: &receipt.user_digest,
            detail: &format!(
                "{} generations, {} feedback events",
                receipt.generations, receipt.feedback
            ),
            reason,
        };
        audit::append(&mut transaction, actor, change).await?;
        transaction.commit().await?;
        tracing::info!(erasure = %receipt.id, generations = receipt.generations, "a user was erased");
        Ok(receipt)
    }

    /// Signs a receipt and keeps it beyond the database.
    async fn keep(&self, receipt: Receipt) -> anyhow::Result<Erased> {
        let payload = serde_json::to_vec(&receipt).context("write the receipt")?;
        let envelope = self.releases.sign(KIND, &payload)?;
        let key = format!("{FOLDER}/{}", receipt.id);
        let kept = self.store.put_private(&key, &envelope.clone().into()).await;
        kept.context("put the receipt into the policy store")?;
        let envelope = serde_json::from_slice(&envelope).context("read the envelope")?;
        Ok(Erased { receipt, envelope })
    }

    async fn listed(&self) -> sqlx::Result<Vec<Receipt>> {
        let mut connection = self.pool.acquire().await?;
        let rows = sqlx::query!(
            r#"select id, tenant_id, user_digest, extract(epoch from erased_at)::double precision as "erased_at!", receipt
               from erasure where finished order by erased_at desc"#
        );
        let mut receipts = vec![];
        for row in rows.fetch_all(&mut *connection).await? {
            let mut counted = row.receipt;
            counted["id"] = row.id.to_string().into();
            counted["erased_at"] = row.erased_at.into();
            let counted: Counted =
                serde_json::from_value(counted).map_err(|error| sqlx::Error::Decode(error.into()))?;
            receipts.push(
                counted
                    .receipt(&mut connection, row.tenant_id, &row.user_digest)
                    .await?,
            );
        }
        Ok(receipts)
    }

    /// Ends erasures that were cut off, keeps receipts that the store lacks, and erases users again whose receipts it has
    /// and the database does not: that was restored from before.
    pub async fn run(self, shutdown: CancellationToken) {
        loop {
            let Some(repeated) = shutdown.run_until_cancelled(self.repeat()).await else {
                return;
            };
            let pause = match repeated {
                Ok(()) => LOOK_EVERY,
                Err(error) => {
                    tracing::warn!(error = format!("{error:#}"), "cannot repeat erasures, will retry");
                    RETRY_AFTER
                }
            };
            shutdown.run_until_cancelled(tokio::time::sleep(pause)).await;
        }
    }

    async fn repeat(&self) -> anyhow::Result<()> {
        let name = audit::role_name("control");
        let actor = Actor { key: None, name: &name };
        let begun = sqlx::query!("select id, tenant_id, user_digest, finished from erasure").fetch_all(&self.pool);
        let begun = begun.await.context("read the erasures")?;
        for row in begun.iter().filter(|row| !row.finished) {
            let whom = Whom {
                id: row.id,
                tenant: &row.tenant_id,
                user: None,
                digest: row.user_digest.clone(),
            };
            let receipt = self.erase(whom, actor, "the erasure was cut off").await?;
            self.keep(receipt).await?;
        }
        let kept = self.store.list_private(FOLDER).await.context("list receipts")?;
        let is_kept = |id: &Uuid| kept.contains_key(&format!("{FOLDER}/{id}"));
        if begun.iter().any(|row| row.finished && !is_kept(&row.id)) {
            let receipts = self.listed().await.context("read the erasures")?;
            for receipt in receipts.into_iter().filter(|receipt| !is_kept(&receipt.id)) {
                self.keep(receipt).await?;
            }
        }
        for key in kept.into_keys() {
            if begun.iter().any(|row| key.ends_with(&row.id.to_string())) {
                continue;
            }
            let envelope = self.store.get_private(&key).await;
            let envelope = envelope.with_context(|| format!("read {key}"))?;
            let receipt = match self.releases.verified(KIND, &envelope).await {
                Ok(payload) => serde_json::from_slice::<Receipt>(&payload).context("read it"),
                Err(error) => Err(error),
            };
            let receipt = match receipt {
                Ok(receipt) => receipt,
                Err(error) => {
                    tracing::error!(
                        key,
                        error = format!("{error:#}"),
                        "the receipt of an erasure is not valid, so its user is not erased again"
                    );
                    continue;
                }
            };
            let digest = hex::decode(&receipt.user_digest).context("read the digest")?;
            if begun
                .iter()
                .any(|row| row.tenant_id == receipt.tenant && row.user_digest == digest)
            {
                continue;
            }
            let whom = Whom {
                id: receipt.id,
                tenant: &receipt.tenant,
                user: None,
                digest,
            };
            let reason = "the database was restored from before the erasure";
            let again = self.erase(whom, actor, reason).await?;
            self.keep(again).await?;
        }
        Ok(())
    }
}
