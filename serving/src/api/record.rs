//! What the log is told of one choice. Pure.

use super::ask::Ask;
use super::choice::{Finished, TokenOut};
use super::explore::Toss;
use crate::routing::Route;
use ingest::event::{FinishReason, Generation, Sampling, VersionSpan};
use policy::sampling::Params;

/// The generation of a choice that ended. Every sampled id is in it, the stop token included.
pub fn generation(
    policy: &str,
    replica: &str,
    ask: &Ask,
    route: &Route,
    seed: u64,
    toss: Option<Toss>,
    finished: &Finished,
) -> Generation {
    let ids: Vec<u32> = finished.tokens.iter().map(|token| token.id).collect();
    let logprobs = finished.tokens.iter().map(|token: &TokenOut| token.logprob).collect();
    let version = &route.version;
    Generation {
        id: finished.generation_id,
        // a single completion is an episode of its own
        episode_id: ask.episode_id.unwrap_or(finished.generation_id),
        segment: 0,
        turn: 0,
        parent_id: None,
        policy: policy.into(),
        line: version.line.clone(),
        versions: vec![VersionSpan {
            version: version.serial,
            root: *version.root.as_bytes(),
            tokens: u32::try_from(ids.len()).unwrap_or(u32::MAX),
        }],
        replica: replica.into(),
        purpose: ask.purpose,
        run_id: ask.run_id,
        task_id: ask.task_id.clone(),
        group_id: ask.group_id.clone(),
        surface: ask.surface.clone(),
        user_key: ask.user_key.clone(),
        arm: route.arm.clone(),
        arm_probability: route.probability as f32,
        prompt_prefix: None,
        prompt_ids: finished.prompt_ids.to_vec(),
        token_ids: ids,
        logprobs,
        train_mask: None,
        payload: None,
        experts: None,
        temperature: ask.params.temperature,
        top_p: ask.params.top_p,
        seed: Some(seed),
        finish_reason: finished.reason,
        declined: finished.declined,
        // nobody saw what was declined or cut off; of the rest the surface may tell
        shown: (finished.declined || finished.reason == FinishReason::Abort).then_some(false),
        consent: ask.consent,
        decline_suppressed: toss.is_some_and(|toss| toss.suppressed.is_some()),
        exploration_share: toss.map(|toss| toss.share),
        sampling: sampling(&ask.params, &finished.tokens),
    }
}

/// What shaped the distribution beside temperature and top-p, and how many ids it left at each token.
fn sampling(params: &Params, tokens: &[TokenOut]) -> Option<Sampling> {
    let kept = || tokens.iter().map(|token| token.kept).collect();
    let sampling = Sampling {
        top_k: params.top_k,
        min_p: params.min_p,
        repetition_penalty: params.repetition_penalty,
        presence_penalty: params.presence_penalty,
        frequency_penalty: params.frequency_penalty,
        logit_bias: params.logit_bias.clone(),
        kept: (params.truncates() && params.temperature > 0.0).then(kept),
    };
    (sampling != Sampling::default()).then_some(sampling)
}

/// The seed of a choice: the request's own for the first, others derived from it. Below 2^63.
pub fn seed_of(request: u64, index: usize) -> u64 {
    if index == 0 {
        return request;
    }
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"springtide choice 1\0");
    hasher.update(&request.to_le_bytes());
    hasher.update(&(index as u64).to_le_bytes());
    let mut first = [0; 8];
    first.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
    u64::from_le_bytes(first) >> 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_of_one_seed_differ_and_repeat() {
        assert_eq!(seed_of(7, 0), 7);
        assert_ne!(seed_of(7, 1), seed_of(7, 2));
        assert_ne!(seed_of(7, 1), seed_of(8, 1));
        assert_eq!(seed_of(7, 3), seed_of(7, 3));
        assert!(seed_of(7, 1) < 1 << 63);
    }
}
