//! Reference log-probabilities: what the greedy sampler says to fixed prompts, and how probable it
//! is. Whoever publishes a version computes them and signs them in its manifest. An engine that
//! serves the version must agree, whatever its kernels, caches and copies of weights are.

use serde::{Deserialize, Serialize};

/// Prompts.
pub const PROMPTS: usize = 16;
/// Tokens of each, unless the context is shorter.
pub const PROMPT_TOKENS: usize = 24;
/// Tokens that follow each prompt, unless the context is shorter.
pub const ANSWER_TOKENS: usize = 16;
/// At which the first token of an answer is scored once more, so that an engine is noticed that
/// serves log-probabilities before the temperature.
pub const TEMPERATURE: f32 = 0.8;

/// What a version says to [`prompts`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Reference {
    /// Token ids of the prompts are below this.
    pub vocab: u32,
    /// Tokens of a prompt.
    pub prompt_tokens: usize,
    /// By prompt.
    pub answers: Vec<Answer>,
    /// The spec of the copy whose values say it. None: the version's own weights do.
    #[serde(rename = "quantised", default, skip_serializing_if = "Option::is_none")]
    pub quantized: Option<String>,
}

/// The greedy continuation of a prompt.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Answer {
    pub token_ids: Vec<u32>,
    /// At temperature 1 over the whole vocabulary, nats; one per token.
    pub logprobs: Vec<f32>,
    /// Of the first token at [`TEMPERATURE`].
    pub first_logprob: f32,
}

impl Reference {
    pub fn prompts(&self) -> Vec<Vec<u32>> {
        prompts(self.vocab, self.prompt_tokens, self.answers.len())
    }

    /// Whether the numbers can be compared with.
    pub fn is_sound(&self) -> bool {
        let sound = |answer: &Answer| {
            (1..=ANSWER_TOKENS).contains(&answer.token_ids.len())
                && answer.token_ids.len() == answer.logprobs.len()
                && answer.token_ids.iter().all(|id| *id < self.vocab)
                && answer
                    .logprobs
                    .iter()
                    .chain([&answer.first_logprob])
                    .all(|value| *value <= 0.0 && value.is_finite())
        };
        (1..=PROMPT_TOKENS).contains(&self.prompt_tokens)
            && self.answers.len() == PROMPTS
            && self.answers.iter().all(sound)
    }
}

/// The first `count` prompts for a vocabulary, of `tokens` tokens each. Always the same ids:
/// position n of all prompts together is `(n + 1) · 0x9E3779B9 mod 2⁶⁴ >> 7 mod 2³² mod vocab`.
pub fn prompts(vocab: u32, tokens: usize, count: usize) -> Vec<Vec<u32>> {
    let id = |prompt: usize, position: usize| {
        let mixed = ((prompt * PROMPT_TOKENS + position + 1) as u64).wrapping_mul(0x9E37_79B9) >> 7;
        (mixed as u32) % vocab.max(1)
    };
    let prompt = |prompt| (0..tokens).map(|position| id(prompt, position)).collect();
    (0..count).map(prompt).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn sample() -> Reference {
        let answer = Answer {
            token_ids: vec![1, 2],
            logprobs: vec![-0.5, -1.25],
            first_logprob: -0.25,
        };
        Reference {
            vocab: 50,
            prompt_tokens: 3,
            answers: vec![answer; PROMPTS],
            quantized: None,
        }
    }

    #[test]
    fn prompts_are_different_and_within_the_vocabulary() {
        let prompts = prompts(50, PROMPT_TOKENS, PROMPTS);
        assert!(prompts.iter().flatten().all(|&id| id < 50));
        let different: std::collections::BTreeSet<_> = prompts.iter().collect();
        assert_eq!((different.len(), prompts[0].len()), (PROMPTS, PROMPT_TOKENS));
        // as the wheel computes them
        assert_eq!(
            super::prompts(151_936, 3, 2),
            [[74_483, 148_966, 71_514], [38_854, 113_337, 35_885]]
        );
    }

    #[test]
    fn numbers_that_nobody_can_compare_with_are_refused() {
        assert!(sample().is_sound());
        let changes: [fn(&mut Reference); 6] = [
            |reference| reference.answers.clear(),
            |reference| reference.prompt_tokens = PROMPT_TOKENS + 1,
            |reference| reference.answers[1].token_ids[1] = 50,
            |reference| reference.answers[1].logprobs[0] = f32::NAN,
            |reference| reference.answers[0].first_logprob = 0.5,
            |reference| reference.answers[0].logprobs.clear(),
        ];
        for change in changes {
            let mut reference = sample();
            change(&mut reference);
            assert!(!reference.is_sound(), "{reference:?}");
        }
    }
}
