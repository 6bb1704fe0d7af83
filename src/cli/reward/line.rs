//! One generation and the score of its trajectory as one line of JSON.

use control::times::rfc3339;
use ingest::rescore::Rescored;
use ingest::reward::Outcome;
use serde_json::{Value, json};

/// The score by the other definition, and under `closed` the stored one, which the trainer saw.
pub fn line(rescored: &Rescored, outcome: &Outcome) -> Value {
    let (signal, feedback_at) = match outcome {
        Outcome::Rewarded {
            signal, feedback_at, ..
        } => (Some(signal), feedback_at.map(rfc3339)),
        Outcome::Censored { .. } => (None, None),
    };
    let (reward, censor_code) = score(outcome);
    let closed = &rescored.closed;
    json!({
        "generation_id": rescored.generation_id,
        "episode_id": rescored.episode_id, // null: the generation is the trajectory
        "tenant": rescored.tenant,
        "sampled_at": rfc3339(rescored.sampled_at),
        "closes_at": rfc3339(rescored.closes_at), // later feedback does not count
        "reward": reward,
        "censor_code": censor_code,
        "signal": signal,
        "feedback_at": feedback_at,
        "turn_reward": rescored.turn_reward,
        "closed": {
            "definition": closed.definition, // 0: none
            "reward": closed.reward,
            "censor_code": closed.censor_code,
            "signal": closed.signal,
            "feedback_at": closed.feedback_at.map(rfc3339),
            "closes_at": closed.closes_at.map(rfc3339),
            "closed_at": rfc3339(closed.closed_at),
            "episode_id": closed.episode_id,
            "turn_reward": closed.turn_reward,
        },
    })
}

/// Whether the reward, the turn's own reward or the censor code differs from the stored one.
pub fn changed(rescored: &Rescored, outcome: &Outcome) -> bool {
    let closed = &rescored.closed;
    score(outcome) != (closed.reward, closed.censor_code.as_deref()) || rescored.turn_reward != closed.turn_reward
}

/// A reward, or the code of why there is none.
fn score(outcome: &Outcome) -> (Option<f64>, Option<&str>) {
    match outcome {
        Outcome::Rewarded { reward, .. } => (Some(*reward), None),
        Outcome::Censored { code } => (None, Some(code)),
    }
}
