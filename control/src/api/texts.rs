//! `POST /v1/generations/{id}/texts`: the prompt and answer of a generation, beside other answers. Needs
//! the scope `texts`. Tables hold token ids, which a tokenizer of the policy store makes text of.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context;
use artifact::sign::TrustedKeys;
use axum::extract::State;
use edge::Problem;
use edge::audit::Change;
use edge::auth::Principal;
use edge::json::Json;
use edge::path::Path;
use serde::{Deserialize, Serialize};
use sqlx::PgPool;
use store::Store;
use text::tokenizer::Tokenizer;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::caller::{self, visible_tenant};
use crate::fields::filled;
use crate::tables::{reader, unavailable};

/// Other answers to the same prompt that are shown, and answers before and after it that are compared to find them.
const BESIDE_MAX: i32 = 5;
const LOOKED_AT_MAX: i32 = 5_000;
/// Versions whose tokenizers are remembered.
const TOKENIZERS_MAX: usize = 8;
const FILES: [&str; 3] = ["tokenizer.json", "generation_config.json", "config.json"];

/// The body of `POST /v1/generations/{id}/texts`, and the form of the page.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Asked {
    /// Why; kept in the audit.
    pub reason: String,
    /// Another answer to show beside it. Default: those to the same prompt.
    #[serde(default, deserialize_with = "filled")]
    pub beside: Option<Uuid>,
}

/// One answer with its prompt.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Text {
    pub generation: Uuid,
    /// That sampled the last token.
    pub version: i64,
    pub arm: String,
    pub purpose: String,
    #[serde(with = "time::serde::rfc3339")]
    pub sampled_at: OffsetDateTime,
    pub finish_reason: String,
    pub declined: bool,
    /// Of its trajectory. `null`: none yet, or none at all.
    pub reward: Option<f64>,
    /// With special tokens. `null`: it is long, and its context is stored in parts.
    pub prompt: Option<String>,
    /// With special tokens.
    pub answer: String,
}

/// Reads tokens from the tables and tokenizers from the store.
pub struct Texts {
    pool: PgPool,
    policy: String,
    store: Store,
    keys_dir: PathBuf,
    /// By version, the one read last at the end.
    tokenizers: Mutex<VecDeque<(i64, Tokenizer)>>,
}

/// An answer without its tokens.
struct Row {
    id: Uuid,
    tenant_id: String,
    version: i64,
    arm: String,
    purpose: String,
    sampled_at: OffsetDateTime,
    finish_reason: String,
    declined: bool,
    reward: Option<f64>,
}

struct Tokens {
    /// The prompt's context is stored elsewhere, so `prompt` is its end alone.
    in_parts: bool,
    prompt: Vec<i32>,
    answer: Vec<i32>,
}

impl Texts {
    pub fn new(pool: PgPool, policy: &str, store: Store, keys_dir: PathBuf) -> Self {
        Self {
            pool,
            policy: policy.to_owned(),
            store,
            keys_dir,
            tokenizers: Mutex::default(),
        }
    }

    /// The answer first, then those beside it. Notes in the audit who read them.
    ///
    /// # Errors
    /// 404 if the caller may not see one or it cannot be decoded, and 400 without a reason.
    pub async fn read(&self, principal: &Principal, id: Uuid, asked: &Asked) -> Result<Vec<Text>, Problem> {
        let reason = caller::reason(&asked.reason)?;
        let tenant = visible_tenant(principal, None)?;
        let ids = self.ids(tenant, id, asked.beside).await?;
        let mut rows = self.rows(tenant, &ids).await?;
        let is_asked_for = |row: &Row| row.id == id || Some(row.id) == asked.beside;
        let mut wanted = [Some(id), asked.beside].into_iter().flatten();
        if let Some(missing) = wanted.find(|id| rows.iter().all(|row| row.id != *id)) {
            return Err(Problem::not_found(format!(
                "there is no answer {missing} that this key may see: /trajectories lists them"
            )));
        }
        let mut tokenizers = BTreeMap::new();
        for version in rows.iter().map(|row| row.version).collect::<BTreeSet<_>>() {
            match self.tokenizer(version).await {
                Ok(tokenizer) => {
                    tokenizers.insert(version, tokenizer);
                }
                Err(error) => tracing::warn!(version, error = format!("{error:#}"), "no tokenizer for a version"),
            }
        }
        let unreadable = |row: &&Row| is_asked_for(row) && !tokenizers.contains_key(&row.version);
        if let Some(row) = rows.iter().find(unreadable) {
            return Err(Problem::not_found(format!(
                "version {} has no tokenizer in the policy store that could decode the answer; the log of control says why",
                row.version
            )));
        }
        // whoever logs an answer names any version, so a neighbor's may never have been
        rows.retain(|row| tokenizers.contains_key(&row.version));
        self.note(principal, &rows, reason).await?;
        let tokens = self.tokens(tenant, &rows).await?;
        let mut texts = Vec::with_capacity(rows.len());
        for row in rows {
            let (Some(found), Some(tokenizer)) = (tokens.get(&row.id), tokenizers.get(&row.version)) else {
                continue;
            };
            let decode = |ids: &[i32]| {
                let ids: Vec<u32> = ids.iter().filter_map(|id| u32::try_from(*id).ok()).collect();
                tokenizer.decode_whole(&ids).map_err(Problem::internal)
            };
            texts.push(Text {
                generation: row.id,
                version: row.version,
                arm: row.arm,
                purpose: row.purpose,
                sampled_at: row.sampled_at,
                finish_reason: row.finish_reason,
                declined: row.declined,
                reward: row.reward,
                prompt: match found.in_parts {
                    true => None,
                    false => Some(decode(&found.prompt)?),
                },
                answer: decode(&found.answer)?,
            });
        }
        Ok(texts)
    }

    /// The answer, and those beside it.
    async fn ids(&self, tenant: Option<&str>, id: Uuid, beside: Option<Uuid>) -> Result<Vec<Uuid>, Problem> {
        if let Some(other) = beside {
            return Ok(vec![id, other]);
        }
        let mut reader = reader(&self.pool, tenant).await?;
        let others = sqlx::query_scalar!(
            r#"select answers_to_the_same_prompt($1, $2, $3) as "id!""#,
            id,
            LOOKED_AT_MAX,
            BESIDE_MAX
        )
        .fetch_all(&mut *reader)
        .await
        .map_err(unavailable)?;
        Ok(std::iter::once(id).chain(others).collect())
    }

    /// In the order of `ids`, those that the tenant may see.
    async fn rows(&self, tenant: Option<&str>, ids: &[Uuid]) -> Result<Vec<Row>, Problem> {
        let mut reader = reader(&self.pool, tenant).await?;
        sqlx::query_as!(
            Row,
            r#"select g.id, g.tenant_id, g.version, g.arm, g.purpose, g.sampled_at, g.finish_reason, g.declined, t.reward
               from unnest($1::uuid[]) with ordinality asked (id, place)
               join generation g on g.id = asked.id
               left join trajectory t on t.generation_id = g.id
               where g.policy = $2 and ($3::text is null or g.tenant_id = $3)
               order by asked.place"#,
            ids,
            self.policy,
            tenant
        )
        .fetch_all(&mut *reader)
        .await
        .map_err(unavailable)
    }

    /// Says in the audit who reads them. It is committed before anything is read.
    async fn note(&self, principal: &Principal, rows: &[Row], reason: &str) -> Result<(), Problem> {
        let subjects: Vec<String> = rows.iter().map(|row| row.id.to_string()).collect();
        let noted = rows.iter().zip(&subjects).map(|(row, subject)| Change {
            tenant: &row.tenant_id,
            action: "texts.read",
            subject,
            detail: "",
            reason,
        });
        let changes: Vec<Change<'_>> = noted.collect();
        caller::note(&self.pool, principal, &changes).await
    }

    async fn tokens(&self, tenant: Option<&str>, rows: &[Row]) -> Result<BTreeMap<Uuid, Tokens>, Problem> {
        let ids: Vec<Uuid> = rows.iter().map(|row| row.id).collect();
        let mut reader = reader(&self.pool, tenant).await?;
        let found = sqlx::query!(
            r#"select id as "id!", in_parts as "in_parts!", prompt_ids as "prompt!", token_ids as "answer!"
               from generation_texts($1)"#,
            &ids
        )
        .fetch_all(&mut *reader)
        .await
        .map_err(unavailable)?;
        let tokens = found.into_iter().map(|row| {
            let tokens = Tokens {
                in_parts: row.in_parts,
                prompt: row.prompt,
                answer: row.answer,
            };
            (row.id, tokens)
        });
        Ok(tokens.collect())
    }

    async fn tokenizer(&self, version: i64) -> anyhow::Result<Tokenizer> {
        if let Some(known) = self.known(version) {
            return Ok(known);
        }
        let keys = TrustedKeys::load(&self.keys_dir).context("load the trusted keys")?;
        let keys = self.store.trusted(&self.policy, keys).await;
        let keys = keys.context("look for revoked keys")?;
        let files = self.store.files(&self.policy, version, &keys, &FILES).await;
        let files = files.with_context(|| format!("read the tokenizer of version {version}"))?;
        // a large vocabulary takes a second
        let tokenizer = tokio::task::spawn_blocking(move || Tokenizer::from_checkpoint(&files)).await??;
        let mut known = self.tokenizers.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= TOKENIZERS_MAX {
            known.pop_front();
        }
        known.push_back((version, tokenizer.clone()));
        Ok(tokenizer)
    }

    fn known(&self, version: i64) -> Option<Tokenizer> {
        let known = self.tokenizers.lock().unwrap_or_else(PoisonError::into_inner);
        let found = known.iter().find(|(serial, _)| *serial == version);
        found.map(|(_, tokenizer)| tokenizer.clone())
    }
}

#[derive(Debug, Serialize)]
pub struct Shown {
    /// The answer, then those beside it.
    texts: Vec<Text>,
}

pub async fn texts(
    State(texts): State<Arc<Texts>>,
    principal: Principal,
    Path(id): Path<Uuid>,
    Json(asked): Json<Asked>,
) -> Result<Json<Shown>, Problem> {
    let texts = texts.read(&principal, id, &asked).await?;
    Ok(Json(Shown { texts }))
}
