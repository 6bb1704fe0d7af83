//! What the handlers share: the tables, read in bounded time and only as far as the viewer may.

use std::sync::Arc;

use edge::Problem;
use sqlx::PgPool;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::api::dead_letters::DeadLetters;
use crate::api::texts::Texts;
use crate::page::live::Live;
use crate::tables::{Reader, reader};

/// Sections that read many rows at a time, over all viewers.
const HEAVY_MAX: usize = 2;

/// The pages of one policy. Cheap to clone.
#[derive(Clone)]
pub struct Site(Arc<Inner>);

struct Inner {
    pool: PgPool,
    policy: String,
    heavy: Semaphore,
    live: Live,
    texts: Arc<Texts>,
    dead_letters: Arc<DeadLetters>,
}

impl Site {
    /// `shutdown` ends the live streams.
    pub fn new(
        pool: PgPool,
        policy: &str,
        texts: Arc<Texts>,
        dead_letters: Arc<DeadLetters>,
        shutdown: CancellationToken,
    ) -> Self {
        Self(Arc::new(Inner {
            pool,
            policy: policy.to_owned(),
            heavy: Semaphore::new(HEAVY_MAX),
            live: Live::new(shutdown),
            texts,
            dead_letters,
        }))
    }

    pub fn pool(&self) -> &PgPool {
        &self.0.pool
    }

    pub fn policy(&self) -> &str {
        &self.0.policy
    }

    pub fn texts(&self) -> &Texts {
        &self.0.texts
    }

    pub fn dead_letters(&self) -> &DeadLetters {
        &self.0.dead_letters
    }

    pub fn live(&self) -> &Live {
        &self.0.live
    }

    /// See [`reader`].
    pub async fn read(&self, tenant: Option<&str>) -> Result<Reader, Problem> {
        reader(&self.0.pool, tenant).await
    }

    /// Waits until few others read many rows, then does so.
    pub async fn read_many<T>(&self, reads: impl Future<Output = Result<T, Problem>>) -> Result<T, Problem> {
        let _turn = self.0.heavy.acquire().await.map_err(Problem::internal)?;
        reads.await
    }
}
