//! Compares an engine with our exact model: the engine samples from fixed prompts, and the exact
//! model scores what it sampled. Checksums alone would not do: an engine may report success and
//! still compute with other weights than it was given.

use super::client::Client;
use super::sequence::{self, End};
use crate::engine::caller::Caller;
use crate::engine::{LoadedVersion, SampleEvent, SampleRequest, Token, TrafficClass, events_max};
use anyhow::{Context, bail, ensure};
use model::exact::ExactModel;
use model::sampling::{self, Params, PreviousTokens};
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::mpsc;

const PROMPTS: usize = 16;
const PROMPT_TOKENS: usize = 24;
const SAMPLED_TOKENS: usize = 16;
/// Not 1, so that log-probabilities before the temperature are noticed.
const TEMPERATURE: f32 = 0.8;

/// What a probe found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Probed {
    pub tokens: usize,
    /// Between two log-probabilities of one token, in nats.
    pub largest_difference: f32,
}

/// Fails if the engine does not answer, or with other weights than those named `weights`. Without a model
/// nothing is compared.
pub async fn probe(
    engine: &Client,
    weights: &str,
    version: &Arc<LoadedVersion>,
    model: Option<&Arc<ExactModel>>,
) -> anyhow::Result<Probed> {
    let params = Params {
        temperature: TEMPERATURE,
        ..Params::default()
    };
    let prompts: Vec<Arc<[u32]>> = prompts(version.vocab, version.context);
    let version = &without_stops(version);
    engine.forget_routes();
    let sampled = prompts
        .iter()
        .map(|prompt| sample(engine, weights, version, prompt.clone(), params.clone()));
    let sampled = futures::future::try_join_all(sampled).await?;
    let Some(model) = model.cloned() else {
        ensure!(
            sampled.iter().flatten().all(|token| token.logprob.is_finite()),
            "the engine serves log-probabilities that are not finite"
        );
        return Ok(Probed {
            tokens: 0,
            largest_difference: 0.0,
        });
    };
    tokio::task::spawn_blocking(move || compare(&model, &params, &prompts, &sampled))
        .await
        .context("the probe's thread")?
}

/// A version whose sequences only end by their length, so that every probe has as many tokens.
fn without_stops(version: &LoadedVersion) -> Arc<LoadedVersion> {
    Arc::new(LoadedVersion {
        serial: version.serial,
        root: version.root,
        line: version.line.clone(),
        context: version.context,
        vocab: version.vocab,
        stop_ids: Vec::new(),
        experts: version.experts,
        decline_id: None,
        tokenizer: None,
        templates: version.templates.clone(),
    })
}

/// Always the same ids for a vocabulary.
fn prompts(vocab: u32, context: usize) -> Vec<Arc<[u32]>> {
    let length = PROMPT_TOKENS.min(context.saturating_sub(1)).max(1);
    let id = |prompt: usize, position: usize| {
        let mixed = (prompt * PROMPT_TOKENS + position + 1).wrapping_mul(0x9E37_79B9) >> 7;
        (mixed as u32) % vocab.max(1)
    };
    (0..PROMPTS)
        .map(|prompt| (0..length).map(|position| id(prompt, position)).collect())
        .collect()
}

async fn sample(
    engine: &Client,
    weights: &str,
    version: &Arc<LoadedVersion>,
    prompt: Arc<[u32]>,
    params: Params,
) -> anyhow::Result<Vec<Token>> {
    let max_tokens = SAMPLED_TOKENS.min(version.context.saturating_sub(prompt.len())).max(1);
    let (events, mut receiver) = mpsc::channel(events_max(max_tokens));
    let request = SampleRequest {
        version: version.clone(),
        prompt,
        max_tokens,
        params,
        seed: 0,
        suppressed: None,
        constraint: None,
        ends: Default::default(),
        score_prompt: None,
        top_logprobs: 0,
        caller: Caller::new("probe", None),
        class: TrafficClass::Production,
        priority: 0,
        session: None,
        events,
        submitted: Instant::now(),
    };
    match sequence::run(engine, weights, request, false, None, None).await {
        End::Done => {}
        End::TakenBack(_) | End::Lost(_) => bail!("nobody takes a probe back"),
        End::OtherWeights(_) => bail!("the engine holds other weights than {weights:?}"),
        End::Late(_) => bail!("the engine sampled no token in time"),
        End::Retry(_, error) | End::Failed(error) => return Err(error.context("the probe failed")),
    }
    let mut tokens = Vec::new();
    while let Some(event) = receiver.recv().await {
        match event {
            SampleEvent::Token(token) => tokens.push(token),
            SampleEvent::Finished(_) => return Ok(tokens),
            // it quotes no one but the probe
            SampleEvent::Refused(error) | SampleEvent::Failed(error) | SampleEvent::Unusable(error) => {
                bail!("the probe failed: {error}")
            }
            SampleEvent::Busy => bail!("the engine has too many requests to be probed"),
            // its log-probabilities show which weights sampled it
            SampleEvent::Versions(_) | SampleEvent::Started(_) | SampleEvent::Prompt(_) => {}
            SampleEvent::Untrainable(code) => bail!("the engine's answers cannot be probed: {code}"),
            SampleEvent::Displaced | SampleEvent::Expired | SampleEvent::VersionGone => {
                bail!("the probe was not answered")
            }
        }
    }
    bail!("the probe's answer has no end")
}

fn compare(
    model: &ExactModel,
    params: &Params,
    prompts: &[Arc<[u32]>],
    sampled: &[Vec<Token>],
) -> anyhow::Result<Probed> {
    let mut probed = Probed {
        tokens: 0,
        largest_difference: 0.0,
    };
    for (prompt, tokens) in prompts.iter().zip(sampled) {
        ensure!(!tokens.is_empty(), "the engine sampled no token for a probe");
        let ids: Vec<u32> = prompt
            .iter()
            .copied()
            .chain(tokens.iter().map(|token| token.id))
            .collect();
        // the row before a token has its logits
        let rows: Vec<usize> = (prompt.len() - 1..ids.len() - 1).collect();
        let pass = model.score(&[&ids], &rows, None).context("score a probe")?;
        for (logits, token) in pass.logits.rows().zip(tokens) {
            let exact = sampling::log_prob_of(logits, params, &PreviousTokens::default(), token.id);
            let difference = (exact - token.logprob).abs();
            ensure!(
                difference.is_finite(),
                "the exact log-probability of {} is {exact}",
                token.id
            );
            probed.largest_difference = probed.largest_difference.max(difference);
            probed.tokens += 1;
        }
    }
    Ok(probed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probes_are_different_prompts_within_vocabulary_and_context() {
        let prompts = prompts(50, 32);
        assert!(prompts.iter().flat_map(|prompt| prompt.iter()).all(|&id| id < 50));
        let different: std::collections::BTreeSet<_> = prompts.iter().collect();
        assert_eq!((different.len(), prompts[0].len()), (PROMPTS, PROMPT_TOKENS));
        assert_eq!(super::prompts(50, 4)[0].len(), 3);
    }
}
