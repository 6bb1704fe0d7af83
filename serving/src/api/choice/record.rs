//! The logged event of one choice. Pure.

use super::ChoiceTask;
use crate::api::outcome::{FinishedChoice, SampledToken};
use ingest::event::{FinishReason, Generation, Sampling, VersionSpan};
use model::sampling::Params;

/// The generation of a choice that ended. It contains every sampled id, including the stop token.
pub fn generation(choice: &ChoiceTask, finished: &FinishedChoice) -> Generation {
    let ChoiceTask {
        api, request, route, ..
    } = choice;
    let declined = finished.outcome.declined;
    Generation {
        id: finished.outcome.generation_id,
        // a single completion is its own episode
        episode_id: request.episode_id.unwrap_or(finished.outcome.generation_id),
        segment: 0,
        turn: 0,
        parent_id: None,
        policy: api.policy.clone(),
        line: route.version.line.clone(),
        versions: vec![VersionSpan {
            version: route.version.serial,
            root: *route.version.root.as_bytes(),
            tokens: u32::try_from(finished.tokens.len()).unwrap_or(u32::MAX),
        }],
        replica: api.options.replica.clone(),
        purpose: request.purpose,
        run_id: request.run_id,
        task_id: request.task_id.clone(),
        group_id: request.group_id.clone(),
        surface: request.surface.clone(),
        user_key: request.user_key.clone(),
        arm: route.arm.clone(),
        arm_probability: route.probability as f32,
        prompt_prefix: None,
        prompt_ids: finished.prompt_ids.to_vec(),
        token_ids: finished.tokens.iter().map(|token| token.id).collect(),
        logprobs: finished.tokens.iter().map(|token| token.logprob).collect(),
        train_mask: None,
        payload: None,
        experts: None,
        temperature: request.params.temperature,
        top_p: request.params.top_p,
        seed: Some(choice.seed),
        finish_reason: finished.reason,
        declined,
        // no user saw a declined or aborted choice; otherwise the surface may report whether one
        // did
        shown: (declined || finished.reason == FinishReason::Abort).then_some(false),
        consent: request.consent,
        decline_suppressed: choice.explores(),
        exploration_share: choice.exploration.map(|exploration| exploration.share),
        sampling: sampling(&request.params, &finished.tokens),
        // added once the event has its time
        proof: None,
    }
}

/// The parameters beside temperature and top-p, and how many ids they kept for each token. `None`:
/// all are neutral.
fn sampling(params: &Params, tokens: &[SampledToken]) -> Option<Sampling> {
    // without `..`: a new parameter must be logged, or the trainer rebuilds another distribution
    let Params {
        temperature,
        top_p: _,
        top_k,
        min_p,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        logit_bias,
    } = params.clone();
    let candidates = || tokens.iter().map(|token| token.candidates).collect();
    let sampling = Sampling {
        top_k,
        min_p,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        logit_bias,
        kept: (params.truncates() && temperature > 0.0).then(candidates).flatten(),
    };
    (sampling != Sampling::default()).then_some(sampling)
}
