//! Turns stored events into trajectories with a reward, and scores closed trajectories again for
//! offline use.

pub(crate) mod closer;
pub mod rescore;
pub(crate) mod unscored;

use anyhow::Context;

use crate::event::Purpose;

/// The number of sampled tokens. Counting the token ids would load the large column that stores
/// them.
fn tokens(version_spans: &serde_json::Value) -> u32 {
    let spans = version_spans.as_array().into_iter().flatten();
    let tokens: u64 = spans.filter_map(|span| span.get(1)?.as_u64()).sum();
    u32::try_from(tokens).unwrap_or(u32::MAX)
}

/// Reads the column `generation.purpose`.
fn purpose(text: &str) -> anyhow::Result<Purpose> {
    [Purpose::Production, Purpose::Rollout, Purpose::Evaluation]
        .into_iter()
        .find(|purpose| purpose.as_str() == text)
        .with_context(|| format!("this version does not know the purpose {text:?}"))
}
