//! The logged event of one choice. Pure.

use super::ChoiceTask;
use crate::api::outcome::{FinishedChoice, SampledToken};
use crate::api::request::GenerationRequest;
use crate::engine::TokensOfVersion;
use crate::routing::Route;
use event_log::event::{CONSTRAINT_BYTES_MAX, Constraint, FinishReason, Generation, Sampling, VersionSpan};
use model::sampling::Params;
use text::constraint::FORMAT;

/// The generation of a choice that ended. It contains every sampled id, including the stop token.
pub fn generation(choice: &ChoiceTask, finished: &FinishedChoice) -> Generation {
    let ChoiceTask {
        api,
        request,
        route,
        params,
        ..
    } = choice;
    let declined = finished.outcome.declined;
    Generation {
        id: finished.id,
        // a single completion is its own episode
        episode_id: request.episode_id.unwrap_or(finished.id),
        segment: request.segment,
        // not numbered: other replicas have other turns of the session. Ids are in the order of time
        turn: 0,
        parent_id: None,
        policy: api.policy.clone(),
        line: route.version.line.clone(),
        versions: spans(finished, route),
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
        train_mask: (!request.train).then(|| vec![false; finished.tokens.len()]),
        payload: None,
        experts: None,
        temperature: params.temperature,
        top_p: params.top_p,
        seed: Some(choice.seed),
        finish_reason: finished.reason,
        declined,
        // no user saw a declined or aborted choice; otherwise the surface may report whether one
        // did
        shown: (declined || finished.reason == FinishReason::Abort).then_some(false),
        consent: request.consent,
        decline_suppressed: choice.explores(),
        exploration_share: choice.exploration.map(|exploration| exploration.share),
        sampling: sampling(params, finished),
        untrainable: finished.outcome.untrainable.map(str::to_owned),
        engine: finished.engine.as_deref().map(str::to_owned),
        // added once the event has its time
        proof: None,
    }
}

/// Which versions sampled the tokens. They end with the last token of the choice: a stop string may
/// have ended it before the engine. Without tokens it is the version that the request was routed to.
fn spans(finished: &FinishedChoice, route: &Route) -> Vec<VersionSpan> {
    let routed = [TokensOfVersion {
        serial: route.version.serial,
        root: route.version.root,
        tokens: finished.tokens.len(),
    }];
    let said = finished.versions.as_deref();
    let mut left = finished.tokens.len();
    if left == 0 {
        return vec![VersionSpan {
            version: route.version.serial,
            root: *route.version.root.as_bytes(),
            tokens: 0,
        }];
    }
    let mut spans: Vec<VersionSpan> = Vec::new();
    for span in said.unwrap_or(&routed) {
        let tokens = span.tokens.min(left);
        left -= tokens;
        if tokens > 0 {
            spans.push(VersionSpan {
                version: span.serial,
                root: *span.root.as_bytes(),
                tokens: u32::try_from(tokens).unwrap_or(u32::MAX),
            });
        }
    }
    // tokens after the last word of the engine
    if let Some(last) = spans.last_mut() {
        last.tokens += u32::try_from(left).unwrap_or(0);
    }
    spans
}

/// What constrained an answer of this engine. `None`: nothing did, its masks are another engine's, or
/// the schema is too long for the log.
pub fn constraint(request: &GenerationRequest, engine: Option<&str>) -> Option<Constraint> {
    let constraint = request.constraint.as_ref().filter(|_| engine.is_none())?;
    let schema = constraint.schema.to_string();
    (schema.len() <= CONSTRAINT_BYTES_MAX).then(|| Constraint {
        format: FORMAT.to_owned(),
        schema,
    })
}

/// The parameters beside temperature and top-p, how many ids they kept for each token, and what
/// constrained it. `None`: all are neutral.
fn sampling(params: &Params, finished: &FinishedChoice) -> Option<Sampling> {
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
    let candidates = |token: &SampledToken| token.candidates;
    let candidates = || finished.tokens.iter().map(candidates).collect();
    let sampling = Sampling {
        top_k,
        min_p,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        logit_bias,
        kept: (params.truncates() && temperature > 0.0).then(candidates).flatten(),
        constraint: finished.constraint.clone(),
    };
    (sampling != Sampling::default()).then_some(sampling)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::outcome::ChoiceOutcome;
    use crate::routing::tests::version;
    use artifact::digest::Digest;
    use std::sync::Arc;
    use uuid::Uuid;

    fn finished(tokens: usize, versions: Option<&[(i64, usize)]>) -> FinishedChoice {
        let token = SampledToken {
            id: 1,
            logprob: -1.0,
            ..SampledToken::default()
        };
        let of = |&(serial, tokens): &(i64, usize)| TokensOfVersion {
            serial,
            root: Digest([serial as u8; 32]),
            tokens,
        };
        FinishedChoice {
            id: Uuid::now_v7(),
            prompt_ids: Arc::new([1]),
            prompt: Default::default(),
            tokens: vec![token; tokens],
            text: String::new(),
            reason: FinishReason::Length,
            versions: versions.map(|spans| spans.iter().map(of).collect()),
            engine: None,
            constraint: None,
            held_back: false,
            outcome: ChoiceOutcome {
                stop_reason: None,
                generation_id: None,
                version: 7,
                root: String::new(),
                arm: String::new(),
                declined: false,
                feedback_token: None,
                captured: None,
                untrainable: None,
            },
        }
    }

    #[test]
    fn a_schema_is_logged_if_this_engine_followed_it_and_the_log_has_room() {
        let constraint = |text: &str, engine| {
            let body = serde_json::json!({"model": "demo", "messages": [], "response_format":
                {"type": "json_schema", "json_schema": {"name": "n", "schema": {"z": 1, "a": text}}}});
            let body = serde_json::from_value(body).unwrap();
            let request = GenerationRequest::chat(body, &crate::options::Options::default(), "default").unwrap();
            constraint(&request, engine)
        };
        let logged = constraint("b", None).unwrap();
        assert_eq!(
            (logged.format.as_str(), logged.schema.as_str()),
            (FORMAT, r#"{"z":1,"a":"b"}"#)
        );
        assert_eq!(constraint("b", Some("vllm")), None);
        let around = r#"{"z":1,"a":""}"#.len();
        let longest = "b".repeat(CONSTRAINT_BYTES_MAX - around);
        assert!(constraint(&longest, None).is_some());
        assert_eq!(constraint(&format!("{longest}b"), None), None);
    }

    #[test]
    fn spans_are_the_engines_as_far_as_tokens_were_used_and_else_the_routed_versions() {
        let route = Route {
            version: version(7),
            arm: "champion".into(),
            probability: 1.0,
            explore: 0.0,
            temperature_max: None,
            probability_min: None,
        };
        let spans = |tokens, versions: Option<&[(i64, usize)]>| -> Vec<(i64, u32)> {
            let spans = spans(&finished(tokens, versions), &route).into_iter();
            spans.map(|span| (span.version, span.tokens)).collect()
        };
        assert_eq!(spans(5, None), [(7, 5)]);
        assert_eq!(spans(0, None), [(7, 0)]);
        assert_eq!(spans(5, Some(&[(7, 2), (8, 3)])), [(7, 2), (8, 3)]);
        assert_eq!(spans(4, Some(&[(7, 2), (8, 3)])), [(7, 2), (8, 2)], "a stop string");
        assert_eq!(spans(2, Some(&[(7, 2), (8, 3)])), [(7, 2)]);
        assert_eq!(spans(6, Some(&[(7, 2), (8, 3)])), [(7, 2), (8, 4)], "later tokens");
    }
}
