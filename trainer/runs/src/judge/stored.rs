//! Answers of judges in the database: the tables `judge_answer` and `run_judge`.
//!
//! No text is stored. An answer is one number, and a question is a digest. A row goes when the newest
//! rollout that it graded goes.

use sqlx::PgPool;
use uuid::Uuid;

/// Rows deleted by one statement.
const DELETED_AT_ONCE_MAX: i64 = 5_000;

/// Who answers, as the endpoint says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Version {
    pub model: String,
    pub fingerprint: Option<String>,
}

/// A stored answer.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Answer {
    pub version: Version,
    pub score: f64,
}

/// The answers to questions of one policy's runs.
#[derive(Debug, Clone)]
pub(super) struct Answers {
    pub pool: PgPool,
    pub policy: String,
}

impl Answers {
    /// The newest answer of this model, or of any. It is kept as long as `rollout` is.
    pub async fn find(
        &self,
        digest: &[u8; 32],
        model: Option<&str>,
        rollout: Uuid,
    ) -> Result<Option<Answer>, sqlx::Error> {
        let row = sqlx::query!(
            r#"
            update judge_answer set rollout_id = greatest(rollout_id, $4)
            where (policy, digest, model) = (
                select policy, digest, model from judge_answer
                where policy = $1 and digest = $2 and model = coalesce($3, model)
                order by answered_at desc limit 1)
            returning model, fingerprint, score
            "#,
            self.policy,
            digest.as_slice(),
            model,
            rollout
        )
        .fetch_optional(&self.pool)
        .await?;
        Ok(row.map(|row| Answer {
            version: Version {
                model: row.model,
                fingerprint: row.fingerprint,
            },
            score: row.score,
        }))
    }

    pub async fn insert(&self, digest: &[u8; 32], answer: &Answer, rollout: Uuid) -> Result<(), sqlx::Error> {
        sqlx::query!(
            "insert into judge_answer (policy, digest, model, fingerprint, score, rollout_id)
             values ($1, $2, $3, $4, $5, $6) on conflict do nothing",
            self.policy,
            digest.as_slice(),
            answer.version.model,
            answer.version.fingerprint,
            answer.score,
            rollout
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// The versions with which a run began, by judge.
    pub async fn versions(&self, run: Uuid) -> Result<Vec<(String, Version)>, sqlx::Error> {
        let rows = sqlx::query!("select judge, model, fingerprint from run_judge where run_id = $1", run)
            .fetch_all(&self.pool)
            .await?;
        let version = |model, fingerprint| Version { model, fingerprint };
        Ok(rows
            .into_iter()
            .map(|row| (row.judge, version(row.model, row.fingerprint)))
            .collect())
    }

    /// Stores with which version a run begins.
    pub async fn begin(&self, run: Uuid, judge: &str, version: &Version) -> Result<(), sqlx::Error> {
        sqlx::query!(
            "insert into run_judge (run_id, judge, model, fingerprint) values ($1, $2, $3, $4) on conflict do nothing",
            run,
            judge,
            version.model,
            version.fingerprint
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }
}

/// Deletes answers about rollouts past retention. Returns how many.
pub async fn sweep_expired(pool: &PgPool) -> Result<u64, sqlx::Error> {
    let done = sqlx::query!(
        "delete from judge_answer where (policy, digest, model) in (
             select policy, digest, model from judge_answer
             where rollout_id < (select until_id from generation_horizon)
             order by rollout_id limit $1)",
        DELETED_AT_ONCE_MAX
    )
    .execute(pool)
    .await?;
    Ok(done.rows_affected())
}
