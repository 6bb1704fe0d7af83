//! Reads the generations of a dataset in pages that fit into memory. While the store of payloads does not
//! answer, it waits.

use super::execution::Execution;
use crate::trainer::pause;
use anyhow::Context;
use event_log::payload;
use runs::dataset::{Member, rows};
use runs::sample::{ModelLimits, Sample};
use runs::select::{self, Answers};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;
use uuid::Uuid;

/// How often, and how long after each other, trajectories are asked for whose context cannot be read.
const READ_ATTEMPTS_MAX: u32 = 3;
const READ_EVERY: Duration = Duration::from_secs(1);
/// How long a run waits for a store that does not answer before it asks again.
const STORE_ASKED_MIN: Duration = Duration::from_millis(250);
const STORE_ASKED_MAX: Duration = Duration::from_secs(5);
/// Tokens that are read together, with their contexts, unless one generation has more.
const PAGE_TOKENS_MAX: u64 = 1 << 20;
/// Generations that are read together.
const PAGE_GENERATIONS_MAX: usize = 64;
/// Generations whose sizes are read together.
pub(super) const SIZED_AT_ONCE: usize = 4096;

impl Execution<'_> {
    /// The samples of a page of generations.
    async fn read(&self, ids: &[Uuid], limits: &ModelLimits, answers: Answers) -> anyhow::Result<Read> {
        let trainer = self.trainer;
        let mut store = StoreWait::default();
        let mut attempt = 0;
        loop {
            let read = select::closed(&trainer.pool, &trainer.payloads, ids, limits, answers).await;
            let Some(assembled) = store.answer(self, read.map_err(Into::into)).await? else {
                continue;
            };
            let select::Assembled {
                samples,
                broken,
                orphans,
                ..
            } = assembled;
            attempt += 1;
            let refused: usize = broken.values().map(Vec::len).sum();
            let missing = ids.len().saturating_sub(samples.len() + refused);
            // what is missing without being an orphan is gone for good
            if orphans == 0 || attempt == READ_ATTEMPTS_MAX || !pause(self.shutdown, READ_EVERY).await {
                let refused = broken.into_iter().map(|(code, ids)| (code.into_owned(), ids));
                return Ok(Read {
                    samples,
                    refused: refused.collect(),
                    missing,
                });
            }
        }
    }
}

/// Samples of a dataset's generations.
#[derive(Debug, Default)]
pub(super) struct Read {
    pub samples: Vec<Sample>,
    /// Generations that may not be used, by code.
    pub refused: BTreeMap<String, Vec<Uuid>>,
    /// How many are gone meanwhile, or have a parent that is not stored yet.
    pub missing: usize,
}

/// Waits for the store of payloads, with one event when a run begins to wait and one when it goes on.
#[derive(Debug, Default)]
pub(super) struct StoreWait {
    /// How long the run has waited last. Zero: it does not wait.
    waited: Duration,
}

impl StoreWait {
    /// The store's answer. `None` after an error of the store: it has waited, ask again. Other errors are
    /// returned.
    pub async fn answer<T>(&mut self, run: &Execution<'_>, answer: anyhow::Result<T>) -> anyhow::Result<Option<T>> {
        let (claim, pool) = (&run.claim, &run.trainer.pool);
        let error = match answer {
            Ok(answer) => {
                if !std::mem::take(&mut self.waited).is_zero() {
                    let message = "the store of payloads answers again";
                    claim.append_event(pool, "info", message).await?;
                }
                return Ok(Some(answer));
            }
            Err(error) if !is_unavailable(&error) => return Err(error),
            Err(error) => error,
        };
        if self.waited.is_zero() {
            let message = format!("waits until the store of payloads answers: {error:#}");
            tracing::warn!(run = %claim.run, "{message}");
            claim.append_event(pool, "warn", &message).await?;
        }
        self.waited = (self.waited * 2).clamp(STORE_ASKED_MIN, STORE_ASKED_MAX);
        run.pause(self.waited).await;
        run.check_requests().await?;
        Ok(None)
    }
}

fn is_unavailable(error: &anyhow::Error) -> bool {
    let unavailable = |error: &payload::Error| matches!(error, payload::Error::Unavailable { .. });
    error.chain().any(|cause| cause.downcast_ref().is_some_and(unavailable))
}

/// The generations of trajectories, in order.
pub(super) fn generations_of(members: &[Member]) -> Vec<Uuid> {
    members.iter().flat_map(|member| &member.generations).copied().collect()
}

/// Generations in pages that fit into memory.
pub(super) struct Pages<'a> {
    run: &'a Execution<'a>,
    /// Their sizes have not been read.
    rest: Vec<Uuid>,
    pages: VecDeque<Vec<Uuid>>,
}

impl<'a> Pages<'a> {
    pub fn new(run: &'a Execution<'a>, ids: Vec<Uuid>) -> Self {
        Pages {
            run,
            rest: ids,
            pages: VecDeque::new(),
        }
    }

    pub async fn next(&mut self) -> anyhow::Result<Option<Vec<Uuid>>> {
        if self.pages.is_empty() && !self.rest.is_empty() {
            let later = self.rest.split_off(SIZED_AT_ONCE.min(self.rest.len()));
            let ids = std::mem::replace(&mut self.rest, later);
            let mut connection = self.run.trainer.pool.acquire().await?;
            let tokens = rows::tokens(&mut connection, &ids).await;
            self.pages = pages(&ids, &tokens.context("read the sizes of generations")?).into();
        }
        Ok(self.pages.pop_front())
    }

    /// The samples of the next page.
    pub async fn read(&mut self, limits: &ModelLimits, answers: Answers) -> anyhow::Result<Option<Read>> {
        match self.next().await? {
            None => Ok(None),
            Some(page) => self.run.read(&page, limits, answers).await.map(Some),
        }
    }
}

/// Cuts generations into pages that fit into memory. `tokens`: of each.
fn pages(ids: &[Uuid], tokens: &BTreeMap<Uuid, u64>) -> Vec<Vec<Uuid>> {
    let mut pages: Vec<Vec<Uuid>> = Vec::new();
    let mut sum = 0;
    for id in ids {
        let tokens = tokens.get(id).copied().unwrap_or(0);
        sum += tokens;
        match pages.last_mut() {
            Some(page) if sum <= PAGE_TOKENS_MAX && page.len() < PAGE_GENERATIONS_MAX => page.push(*id),
            _ => {
                sum = tokens;
                pages.push(vec![*id]);
            }
        }
    }
    pages
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_as_many_tokens_as_fit_and_at_least_one_generation() {
        let ids: Vec<Uuid> = (0..200).map(Uuid::from_u128).collect();
        let of = |tokens: &dyn Fn(usize) -> u64| {
            let tokens = ids.iter().enumerate().map(|(at, id)| (*id, tokens(at))).collect();
            let pages = pages(&ids, &tokens);
            assert_eq!(pages.concat(), ids);
            pages.iter().map(Vec::len).collect::<Vec<_>>()
        };
        assert_eq!(of(&|_| 100), [64, 64, 64, 8], "short ones");
        assert_eq!(of(&|_| PAGE_TOKENS_MAX / 100), [64, 64, 64, 8]);
        assert_eq!(of(&|_| PAGE_TOKENS_MAX / 2), [2; 100]);
        let sizes = of(&|at| if at == 10 { 4 * PAGE_TOKENS_MAX } else { 1 });
        assert_eq!(sizes, [10, 1, 64, 64, 61], "a long one alone");
        assert!(pages(&[], &BTreeMap::new()).is_empty());
        assert_eq!(pages(&ids[..2], &BTreeMap::new()).len(), 1, "gone meanwhile");
    }
}
