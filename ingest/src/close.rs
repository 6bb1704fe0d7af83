//! Turns stored events into trajectories with a reward, and scores closed trajectories again for
//! offline use.

pub(crate) mod closer;
mod episodes;
mod judged;
pub mod rescore;
pub(crate) mod unscored;

use anyhow::Context;

use event_log::event::Purpose;

/// The number of sampled tokens, as the queries count them from `generation.version_spans`.
fn tokens(tokens: i64) -> u32 {
    u32::try_from(tokens).unwrap_or(u32::MAX)
}

/// The turn of a row that has the columns of `generation`, and `tokens`.
macro_rules! turn {
    ($row:expr) => {
        $crate::reward::episode::Turn {
            id: $row.id,
            surface: $row.surface,
            policy: $row.policy,
            run_id: $row.run_id,
            segment: $row.segment,
            number: $row.turn,
            sampled_at: $row.sampled_at,
            stored_at: $row.stored_at,
            closing: $crate::reward::Closing {
                purpose: $crate::close::purpose(&$row.purpose)?,
                declined: $row.declined,
                consent: $row.consent,
                shown: $row.shown,
                tokens: $crate::close::tokens($row.tokens),
                finish_reason: $row.finish_reason,
                starts_at: $crate::reward::starts_at($row.sampled_at, $row.finished_at.unwrap_or($row.sampled_at)),
                ended_at: None,
            },
        }
    };
}
use turn;

/// Reads the column `generation.purpose`.
fn purpose(text: &str) -> anyhow::Result<Purpose> {
    [Purpose::Production, Purpose::Rollout, Purpose::Evaluation]
        .into_iter()
        .find(|purpose| purpose.as_str() == text)
        .with_context(|| format!("this version does not know the purpose {text:?}"))
}
