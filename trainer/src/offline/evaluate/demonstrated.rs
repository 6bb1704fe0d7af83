//! A version's capability: how often its greedy text is what the user wrote instead of the answer. An
//! answer's reward also depends on when the policy declines; this does not.

use super::User;
use crate::learn::score;
use crate::offline::demonstrations::Demonstrations;
use crate::offline::execution::Execution;
use crate::offline::pages::{Pages, generations_of};
use crate::offline::training::supervised;
use evidence::Clusters;
use model::exact::ExactModel;
use runs::dataset::Member;
use runs::sample::{ModelLimits, Sample};
use runs::select::Answers;
use serde::Serialize;
use std::sync::Arc;
use uuid::Uuid;

/// Over the generations whose user wrote what should have been written.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Demonstrated {
    pub generations: usize,
    /// Of 100 generations, those after whose prompt the version's greedy text is the user's, token by token,
    /// and declining is not allowed.
    pub right_per_100: f64,
    /// 95%, over users. `None`: fewer than two users.
    pub interval: Option<[f64; 2]>,
    /// Of a token of the users' texts, nats.
    pub logprob_mean: f64,
}

/// The version that is measured.
pub(super) struct Version<'a> {
    pub model: &'a Arc<ExactModel>,
    pub decline: Option<u32>,
    pub limits: &'a ModelLimits,
}

/// With the generations that it is of. `None`: nobody wrote anything that this model could write.
pub(super) async fn measure(
    run: &Execution<'_>,
    version: Version<'_>,
    demonstrations: &Demonstrations,
    members: &[Member],
) -> anyhow::Result<Option<(Demonstrated, Vec<Uuid>)>> {
    let members = demonstrations.with_any(members).await?;
    let (mut sums, mut used) = (Sums::default(), Vec::new());
    let mut pages = Pages::new(run, generations_of(&members));
    while let Some(read) = pages.read(version.limits, Answers::Any).await? {
        run.check().await?;
        let samples = demonstrations.instead(read).await?.samples.into_iter();
        let samples: Vec<Sample> = samples.map(supervised).collect();
        let (model, decline) = (Arc::clone(version.model), version.decline);
        let work = move || {
            let scores = score::scores(&model, &samples, decline, score::TOKENS_AT_ONCE);
            scores.map(|scores| (samples, scores))
        };
        let (samples, scores) = run.trainer.computing.on_blocking_thread(work).await??;
        for (sample, score) in samples.into_iter().zip(scores) {
            used.push(sample.generation);
            sums.add((sample.tenant, sample.user), sample.tokens.len(), score);
        }
    }
    Ok(sums.measured().map(|demonstrated| (demonstrated, used)))
}

/// Sums over generations.
#[derive(Debug, Default)]
struct Sums {
    right_per_100: Clusters<User>,
    tokens: usize,
    log_prob: f64,
}

impl Sums {
    fn add(&mut self, user: User, tokens: usize, score: score::Score) {
        self.right_per_100.add(user, if score.is_greedy { 100.0 } else { 0.0 });
        self.tokens += tokens;
        self.log_prob += score.log_prob;
    }

    /// `None`: there is nothing.
    fn measured(&self) -> Option<Demonstrated> {
        Some(Demonstrated {
            generations: usize::try_from(self.right_per_100.n()).unwrap_or(usize::MAX),
            right_per_100: self.right_per_100.mean()?,
            interval: self.right_per_100.interval().map(|interval| interval.ci95),
            logprob_mean: self.log_prob / self.tokens.max(1) as f64,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_of_right_texts_counts_generations_and_its_interval_users() {
        let mut sums = Sums::default();
        assert_eq!(sums.measured(), None);
        let mut add = |user: &str, is_greedy| {
            let score = score::Score {
                log_prob: -3.0,
                is_greedy,
            };
            sums.add(("default".into(), user.into()), 2, score);
        };
        add("a", true);
        add("a", false);
        add("b", false);
        add("b", false);
        let measured = sums.measured().unwrap();
        assert_eq!((measured.generations, measured.right_per_100), (4, 25.0));
        assert_eq!(measured.logprob_mean, -1.5);
        let [low, high] = measured.interval.unwrap();
        assert!(low < 25.0 && high > 25.0, "{low} {high}");
    }
}
