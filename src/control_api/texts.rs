//! `GET /v1/generations/{id}/texts`: the prompt and answer of a generation, beside other answers. Needs
//! the scope `texts`. Tables hold token ids, which a tokenizer of the policy store makes text of.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use artifact::sign::TrustedKeys;
use axum::extract::State;
use edge::Problem;
use edge::audit::{self, Change};
use edge::auth::Principal;
use edge::json::Json;
use edge::path::Path;
use edge::query::Query;
use futures::FutureExt;
use futures::future::BoxFuture;
use page::texts::{Asked, Text};
use serde::Serialize;
use sqlx::PgPool;
use store::Store;
use text::tokenizer::Tokenizer;
use tokio::sync::Mutex;
use uuid::Uuid;

/// Other answers to the same prompt that are shown, and answers that are compared to find them.
const BESIDE_MAX: i32 = 5;
const LOOKED_AT_MAX: i32 = 10_000;
const REASON_CHARS_MAX: usize = 500;
/// Versions whose tokenizers are remembered.
const TOKENIZERS_MAX: usize = 8;
const FILES: [&str; 3] = ["tokenizer.json", "generation_config.json", "config.json"];

/// Reads tokens from the tables and tokenizers from the store.
pub struct Texts {
    pool: PgPool,
    policy: String,
    store: Store,
    keys_dir: PathBuf,
    /// By version, the one used last at the end.
    tokenizers: Mutex<VecDeque<(i64, Tokenizer)>>,
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

    async fn read_noted(&self, principal: &Principal, id: Uuid, asked: &Asked) -> Result<Vec<Text>, Problem> {
        let reason = asked.reason.trim();
        if reason.is_empty() || reason.chars().count() > REASON_CHARS_MAX {
            return Err(Problem::bad_request(format!(
                "reason: say in 1 to {REASON_CHARS_MAX} characters why you read it; the audit keeps it"
            )));
        }
        let tenant = super::visible_tenant(principal, None)?;
        let failed =
            |error: sqlx::Error| Problem::of_database(error, |error| Problem::internal(format!("read texts: {error}")));
        let mut transaction = self.pool.begin().await.map_err(failed)?;
        super::show(&mut transaction, tenant).await.map_err(failed)?;
        let beside = match asked.beside {
            Some(other) => vec![other],
            None => sqlx::query_scalar!(
                r#"select answers_to_the_same_prompt($1, $2, $3) as "id!""#,
                id,
                LOOKED_AT_MAX,
                BESIDE_MAX
            )
            .fetch_all(&mut *transaction)
            .await
            .map_err(failed)?,
        };
        let ids: Vec<Uuid> = std::iter::once(id).chain(beside).collect();
        let rows = sqlx::query!(
            r#"select g.id, g.tenant_id, g.version, g.arm, g.purpose, g.sampled_at, g.finish_reason, g.declined, t.reward
               from unnest($1::uuid[]) with ordinality asked (id, place)
               join generation g on g.id = asked.id
               left join trajectory t on t.generation_id = g.id
               where g.policy = $2 and ($3::text is null or g.tenant_id = $3)
               order by asked.place"#,
            &ids,
            self.policy,
            tenant
        )
        .fetch_all(&mut *transaction)
        .await
        .map_err(failed)?;
        let wanted = [Some(id), asked.beside];
        if let Some(missing) = wanted
            .into_iter()
            .flatten()
            .find(|id| rows.iter().all(|row| row.id != *id))
        {
            return Err(Problem::not_found(format!(
                "there is no answer {missing} that this key may see: /trajectories lists them"
            )));
        }
        let subjects: Vec<String> = rows.iter().map(|row| row.id.to_string()).collect();
        let changes: Vec<Change<'_>> = rows
            .iter()
            .zip(&subjects)
            .map(|(row, subject)| Change {
                tenant: &row.tenant_id,
                action: "texts.read",
                subject,
                detail: "",
                reason,
            })
            .collect();
        audit::append_all(&mut transaction, principal.actor(), &changes)
            .await
            .map_err(failed)?;
        let shown: Vec<Uuid> = rows.iter().map(|row| row.id).collect();
        let tokens = sqlx::query!(
            r#"select id as "id!", in_parts as "in_parts!", prompt_ids as "prompt_ids!", token_ids as "token_ids!"
               from generation_texts($1)"#,
            &shown
        )
        .fetch_all(&mut *transaction)
        .await
        .map_err(failed)?;
        // from here on the audit says who reads them
        transaction.commit().await.map_err(failed)?;
        let mut texts = Vec::with_capacity(rows.len());
        for row in rows {
            let Some(found) = tokens.iter().find(|tokens| tokens.id == row.id) else {
                continue;
            };
            let tokenizer = self
                .tokenizer(row.version)
                .await
                .map_err(|error| Problem::internal(format!("{error:#}")))?;
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
                    false => Some(decode(&found.prompt_ids)?),
                },
                answer: decode(&found.token_ids)?,
            });
        }
        Ok(texts)
    }

    async fn tokenizer(&self, version: i64) -> anyhow::Result<Tokenizer> {
        let mut known = self.tokenizers.lock().await;
        if let Some(at) = known.iter().position(|(serial, _)| *serial == version)
            && let Some(found) = known.remove(at)
        {
            let tokenizer = found.1.clone();
            known.push_back(found);
            return Ok(tokenizer);
        }
        let keys = TrustedKeys::load(&self.keys_dir).context("load the trusted keys")?;
        let keys = self
            .store
            .trusted(&self.policy, keys)
            .await
            .context("look for revoked keys")?;
        let files = self.store.files(&self.policy, version, &keys, &FILES).await;
        let files = files.with_context(|| format!("read the tokenizer of version {version}"))?;
        let tokenizer = Tokenizer::from_checkpoint(&files)?;
        if known.len() >= TOKENIZERS_MAX {
            known.pop_front();
        }
        known.push_back((version, tokenizer.clone()));
        Ok(tokenizer)
    }
}

impl page::texts::Texts for Texts {
    fn read<'a>(
        &'a self,
        principal: &'a Principal,
        id: Uuid,
        asked: &'a Asked,
    ) -> BoxFuture<'a, Result<Vec<Text>, Problem>> {
        self.read_noted(principal, id, asked).boxed()
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
    Query(asked): Query<Asked>,
) -> Result<Json<Shown>, Problem> {
    let texts = texts.read_noted(&principal, id, &asked).await?;
    Ok(Json(Shown { texts }))
}
