//! Computes reference log-probabilities (`artifact::reference`) with the exact model.

use artifact::reference::{ANSWER_TOKENS, Answer, PROMPT_TOKENS, PROMPTS, Reference, TEMPERATURE, prompts};

use crate::exact::{Error, ExactModel, KvCache};
use crate::sampling::{self, Params, Source};

/// Log-probabilities are rounded to this, so that a manifest stays short. Nats.
const ROUNDED_TO: f32 = 1e-5;

/// What the model says to the fixed prompts, greedily. `None`: its context has no room for a prompt and
/// a token.
pub fn of(model: &ExactModel) -> Result<Option<Reference>, Error> {
    let (context, vocab) = (model.config().context() as usize, model.config().vocab_size);
    let prompt_tokens = PROMPT_TOKENS.min(context.saturating_sub(1));
    let Some(vocab) = u32::try_from(vocab).ok().filter(|_| prompt_tokens > 0) else {
        return Ok(None);
    };
    let answer_tokens = ANSWER_TOKENS.min(context - prompt_tokens);
    let prompts = prompts(vocab, prompt_tokens, PROMPTS);
    let mut cache = KvCache::new(model, PROMPTS, prompt_tokens + answer_tokens);
    let segments: Vec<(usize, &[u32])> = prompts.iter().map(Vec::as_slice).enumerate().collect();
    let mut logits = model.advance(&mut cache, &segments, None)?;
    let greedy = Params {
        temperature: 0.0,
        ..Params::default()
    };
    let mut answers = vec![Answer::default(); PROMPTS];
    loop {
        for (answer, logits) in answers.iter_mut().zip(&logits) {
            let (best, logprob) = sampling::sample(logits, &greedy, &mut Source::new(0));
            if answer.token_ids.is_empty() {
                answer.first_logprob = rounded(sampling::log_prob(logits, TEMPERATURE, best));
            }
            answer.token_ids.push(best);
            answer.logprobs.push(rounded(logprob));
        }
        if answers[0].token_ids.len() == answer_tokens {
            break;
        }
        let newest: Vec<u32> = answers
            .iter()
            .filter_map(|answer| answer.token_ids.last().copied())
            .collect();
        logits = model.decode(&mut cache, &newest)?;
    }
    let reference = Reference {
        vocab,
        prompt_tokens,
        answers,
        quantized: model.quantized().map(Into::into),
    };
    Ok(Some(reference).filter(Reference::is_sound))
}

fn rounded(logprob: f32) -> f32 {
    (logprob / ROUNDED_TO).round() * ROUNDED_TO
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::golden;
    use crate::sampling::PreviousTokens;

    #[test]
    fn answers_are_those_of_the_greedy_sampler() {
        let checkpoint = golden::checkpoint("qwen3");
        let model = ExactModel::from_checkpoint(&checkpoint).unwrap();
        let reference = of(&model).unwrap().unwrap();
        assert_eq!(
            (reference.answers.len(), reference.answers[0].token_ids.len()),
            (PROMPTS, ANSWER_TOKENS)
        );
        let (prompt, answer) = (&reference.prompts()[5], &reference.answers[5]);
        let ids: Vec<u32> = prompt.iter().chain(&answer.token_ids).copied().collect();
        let rows: Vec<usize> = (prompt.len() - 1..ids.len() - 1).collect();
        let pass = model.score(&[&ids], &rows, None).unwrap();
        let at = |temperature| Params {
            temperature,
            ..Params::default()
        };
        for ((logits, id), logprob) in pass.logits.rows().zip(&answer.token_ids).zip(&answer.logprobs) {
            let exact = sampling::log_prob_of(logits, &at(0.0), &PreviousTokens::default(), *id);
            assert!((exact - logprob).abs() <= ROUNDED_TO, "{exact} {logprob}");
        }
        let first = pass.logits.rows().next().unwrap();
        let exact = sampling::log_prob_of(first, &at(TEMPERATURE), &PreviousTokens::default(), answer.token_ids[0]);
        assert!((exact - answer.first_logprob).abs() <= ROUNDED_TO);
    }
}
