//! The parts of a choice in the answer of `POST /v1/chat/completions`.

use crate::api::outcome::SampledToken;
use serde::Serialize;

/// The answer, or the text since the previous chunk.
#[derive(Debug, Serialize)]
pub struct Message {
    /// Not in later chunks of a choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    content: String,
}

impl Message {
    pub fn new(content: String, with_role: bool) -> Self {
        Message {
            role: with_role.then_some("assistant"),
            content,
        }
    }
}

/// `logprob` is of the distribution sampled from, `top_logprobs` at temperature 1.
#[derive(Debug, Serialize)]
pub struct Logprobs {
    content: Vec<TokenLogprob>,
}

#[derive(Debug, Serialize)]
struct TokenLogprob {
    #[serde(flatten)]
    token: TokenText,
    top_logprobs: Vec<TokenText>,
}

#[derive(Debug, Serialize)]
struct TokenText {
    token: String,
    logprob: f32,
    /// Null if the token has no text of its own.
    bytes: Option<Vec<u8>>,
}

impl Logprobs {
    pub fn of(tokens: &[SampledToken]) -> Self {
        let token_text = |(text, logprob): &(String, f32)| TokenText {
            token: text.clone(),
            logprob: *logprob,
            bytes: (!text.starts_with("token_id:") && !text.contains('\u{fffd}')).then(|| text.as_bytes().to_vec()),
        };
        let content = tokens.iter().map(|token| TokenLogprob {
            token: token_text(&(token.text.clone(), token.logprob)),
            top_logprobs: token.top.iter().map(token_text).collect(),
        });
        Logprobs {
            content: content.collect(),
        }
    }
}
