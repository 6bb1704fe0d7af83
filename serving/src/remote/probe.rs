//! Compares an engine with the reference log-probabilities that are signed in a version's manifest: it
//! answers fixed prompts greedily, first one alone and then all at once. Checksums alone would not do: an
//! engine may report success and still compute with other weights than it was given, read a stale cache, or
//! use a wrong kernel.

use super::client::Client;
use super::sequence::{self, End};
use crate::engine::caller::Caller;
use crate::engine::{LoadedVersion, SampleEvent, SampleRequest, Token, TrafficClass, events_max};
use anyhow::{bail, ensure};
use artifact::reference::{Answer, PROMPT_TOKENS, PROMPTS, TEMPERATURE, prompts};
use model::sampling::Params;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::mpsc;

/// One in so many of the reference's tokens must be the engine's, too. An engine in other precision takes another
/// token where two are almost equally probable, and what follows it is another text.
const COMPARED_MIN: usize = 4;

/// What a probe found.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Probed {
    pub tokens: usize,
    /// Between two log-probabilities of one token, in nats.
    pub largest_difference: f32,
}

/// Fails if the engine does not answer, or with other weights than those named `weights`. A version without
/// reference is compared with nothing.
pub async fn probe(engine: &Client, weights: &str, version: &Arc<LoadedVersion>) -> anyhow::Result<Probed> {
    let (reference, version) = (version.reference.clone(), &without_stops(version));
    engine.forget_routes();
    let ask = |prompt: Vec<u32>, temperature: f32, tokens: usize| {
        let params = Params {
            temperature,
            ..Params::default()
        };
        sample(engine, weights, version, prompt.into(), params, tokens)
    };
    let Some(reference) = reference else {
        let length = PROMPT_TOKENS.min(version.context.saturating_sub(1)).max(1);
        let prompts = prompts(version.vocab, length, PROMPTS).into_iter();
        let sampled = futures::future::try_join_all(prompts.map(|prompt| ask(prompt, 0.0, 1))).await?;
        ensure!(
            sampled.iter().flatten().all(|token| token.logprob.is_finite()),
            "the engine serves log-probabilities that are not finite"
        );
        return Ok(Probed::default());
    };
    ensure!(
        reference.vocab <= version.vocab,
        "the reference of version {} has ids up to {}, and its vocabulary ends at {}",
        version.serial,
        reference.vocab,
        version.vocab
    );
    let of = |answer: &Answer| answer.token_ids.len();
    let expected = || reference.prompts().into_iter().zip(&reference.answers);
    let mut probed = Probed::default();
    if let Some((prompt, answer)) = expected().next() {
        probed.compare(answer, &ask(prompt, 0.0, of(answer)).await?)?;
    }
    let greedy = futures::future::try_join_all(expected().map(|(prompt, answer)| ask(prompt, 0.0, of(answer)))).await?;
    for (answer, sampled) in reference.answers.iter().zip(&greedy) {
        probed.compare(answer, sampled)?;
    }
    let warm = futures::future::try_join_all(expected().map(|(prompt, _)| ask(prompt, TEMPERATURE, 1))).await?;
    for (answer, sampled) in reference.answers.iter().zip(&warm) {
        probed.compare_warm(answer, sampled)?;
    }
    let total: usize = reference.answers.iter().map(of).sum();
    ensure!(
        probed.tokens * COMPARED_MIN >= total,
        "only {} of {total} tokens are those of the version: the engine has other weights or computes differently",
        probed.tokens
    );
    Ok(probed)
}

impl Probed {
    fn note(&mut self, expected: f32, found: f32) -> anyhow::Result<()> {
        let difference = (expected - found).abs();
        ensure!(
            difference.is_finite(),
            "the engine serves the log-probability {found}, which is not finite"
        );
        self.largest_difference = self.largest_difference.max(difference);
        Ok(())
    }

    /// Greedy tokens, up to the first one that is another. That one must be as probable as the expected one.
    fn compare(&mut self, answer: &Answer, sampled: &[Token]) -> anyhow::Result<()> {
        ensure!(!sampled.is_empty(), "the engine sampled no token for a probe");
        for ((id, logprob), token) in answer.token_ids.iter().zip(&answer.logprobs).zip(sampled) {
            self.note(*logprob, token.logprob)?;
            if token.id != *id {
                break;
            }
            self.tokens += 1;
        }
        Ok(())
    }

    /// A token at [`TEMPERATURE`], if it happens to be the greedy one.
    fn compare_warm(&mut self, answer: &Answer, sampled: &[Token]) -> anyhow::Result<()> {
        match sampled
            .first()
            .filter(|token| answer.token_ids.first() == Some(&token.id))
        {
            Some(token) => self.note(answer.first_logprob, token.logprob),
            None => Ok(()),
        }
    }
}

/// A version whose sequences only end by their length, so that every probe has as many tokens.
fn without_stops(version: &LoadedVersion) -> Arc<LoadedVersion> {
    Arc::new(LoadedVersion {
        serial: version.serial,
        root: version.root,
        line: version.line.clone(),
        adapts: version.adapts,
        context: version.context,
        vocab: version.vocab,
        stop_ids: Vec::new(),
        experts: version.experts,
        decline_id: None,
        tokenizer: None,
        reference: None,
        templates: version.templates.clone(),
    })
}

async fn sample(
    engine: &Client,
    weights: &str,
    version: &Arc<LoadedVersion>,
    prompt: Arc<[u32]>,
    params: Params,
    max_tokens: usize,
) -> anyhow::Result<Vec<Token>> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use model::router::Routing;

    fn sampled(tokens: &[(u32, f32)]) -> Vec<Token> {
        let token = |&(id, logprob): &(u32, f32)| Token {
            id,
            logprob,
            candidates: None,
            routing: Routing::default(),
            top: Vec::new(),
        };
        tokens.iter().map(token).collect()
    }

    #[test]
    fn tokens_are_compared_up_to_the_first_other_one() {
        let answer = Answer {
            token_ids: vec![4, 5, 6],
            logprobs: vec![-0.5, -1.0, -2.0],
            first_logprob: -0.25,
        };
        let compared = |tokens: &[(u32, f32)]| {
            let mut probed = Probed::default();
            probed
                .compare(&answer, &sampled(tokens))
                .map(|()| (probed.tokens, probed.largest_difference))
        };
        assert_eq!(compared(&[(4, -0.5), (5, -1.0), (6, -2.25)]).unwrap(), (3, 0.25));
        // as probable: another text follows, which says nothing
        assert_eq!(compared(&[(4, -0.5), (9, -1.0), (6, -7.0)]).unwrap(), (1, 0.0));
        assert_eq!(compared(&[(9, -1.5)]).unwrap(), (0, 1.0));
        assert!(compared(&[(4, f32::NAN)]).is_err() && compared(&[]).is_err());
        let mut probed = Probed::default();
        probed.compare_warm(&answer, &sampled(&[(7, -3.0)])).unwrap();
        assert_eq!(probed.largest_difference, 0.0);
        probed.compare_warm(&answer, &sampled(&[(4, -0.5)])).unwrap();
        assert_eq!(
            probed.largest_difference, 0.25,
            "a log-probability before the temperature"
        );
    }
}
