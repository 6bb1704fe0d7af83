//! Turns stored events into trajectories with a reward, and scores closed trajectories again for
//! offline use.

pub(crate) mod closer;
mod episodes;
pub mod rescore;
pub(crate) mod unscored;

use anyhow::Context;

use crate::event::Purpose;

/// The number of sampled tokens, as the queries count them from `generation.version_spans`.
fn tokens(tokens: i64) -> u32 {
    u32::try_from(tokens).unwrap_or(u32::MAX)
}

/// Reads the column `generation.purpose`.
fn purpose(text: &str) -> anyhow::Result<Purpose> {
    [Purpose::Production, Purpose::Rollout, Purpose::Evaluation]
        .into_iter()
        .find(|purpose| purpose.as_str() == text)
        .with_context(|| format!("this version does not know the purpose {text:?}"))
}
