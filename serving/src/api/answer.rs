//! The JSON of the answers: OpenAI's names, vLLM's extensions, and Springtide's own fields beside
//! them.

mod chat;

pub use chat::call_id;

use super::outcome::{ChoiceOutcome, EchoedPrompt, FinishedChoice, SampledToken};
use super::request::GenerationRequest;
use event_log::event::FinishReason;
use serde::Serialize;
use std::collections::BTreeMap;
use text::answer::{Layout, Parser, Part};

/// What a completion and each of its chunks begin with.
#[derive(Debug, Serialize)]
pub struct Header {
    pub id: String,
    pub object: &'static str,
    /// Unix seconds.
    pub created: i64,
    pub model: String,
}

/// A completion, or one chunk of a streamed one.
#[derive(Debug, Serialize)]
pub struct Completion<'a> {
    #[serde(flatten)]
    pub header: &'a Header,
    pub choices: Vec<Choice>,
    /// Of a chat.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<Vec<PromptLogprobs>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
}

#[derive(Debug, Serialize)]
pub struct Choice {
    pub index: usize,
    #[serde(flatten)]
    pub content: ChoiceContent,
    /// `stop`, `tool_calls` or `length`; null in every chunk but a choice's last.
    pub finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
    /// Of a completion, whose prompts may be several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<Vec<PromptLogprobs>>,
    /// Only once the generation is in the log.
    #[serde(flatten)]
    pub outcome: Option<ChoiceOutcome>,
}

/// A choice's text, in the shape of the endpoint.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub enum ChoiceContent {
    Text {
        text: String,
        logprobs: Option<Logprobs>,
    },
    Message {
        message: chat::Message,
        logprobs: Option<chat::Logprobs>,
    },
    Delta {
        delta: chat::Message,
        logprobs: Option<chat::Logprobs>,
    },
}

/// What is sent of a choice's text: all of it, or what a chunk adds.
#[derive(Debug)]
pub struct Content {
    parts: Vec<Part>,
    /// `None`: the whole.
    chunk: Option<ChunkPlace>,
}

/// Where a chunk is in its choice.
#[derive(Debug, Clone, Copy, Default)]
struct ChunkPlace {
    is_later: bool,
    /// Calls of tools in earlier chunks.
    calls: usize,
}

impl Content {
    pub fn whole(parts: Vec<Part>) -> Self {
        Content { parts, chunk: None }
    }

    fn calls(&self) -> usize {
        let calls = self.parts.iter().filter(|part| matches!(part, Part::Call(_)));
        calls.count() + self.chunk.map_or(0, |place| place.calls)
    }
}

/// Divides a choice's streamed text into the contents of its chunks.
#[derive(Debug)]
pub struct ContentStream {
    parser: Parser,
    next: ChunkPlace,
}

impl ContentStream {
    pub fn new(layout: &Layout) -> Self {
        ContentStream {
            parser: Parser::new(layout.clone()),
            next: ChunkPlace::default(),
        }
    }

    /// The content that `text` adds. `ended`: no more text comes.
    pub fn next(&mut self, text: &str, ended: bool) -> Content {
        let mut parts = self.parser.push(text);
        if ended {
            parts.extend(self.parser.finish());
        }
        let content = Content {
            parts,
            chunk: Some(self.next),
        };
        self.next = ChunkPlace {
            is_later: true,
            calls: content.calls(),
        };
        content
    }
}

impl ChoiceContent {
    fn new(
        request: &GenerationRequest,
        content: Content,
        tokens: &[SampledToken],
        finished: Option<&FinishedChoice>,
    ) -> Self {
        let wanted = request.logprobs.is_some();
        if !request.is_chat() {
            let prompt = finished.map(|finished| &finished.prompt).filter(|_| request.echo);
            let logprobs = wanted.then(|| Logprobs::of(prompt, tokens, request.logprobs.unwrap_or(0)));
            let texts = content.parts.into_iter().filter_map(|part| match part {
                Part::Text(text) => Some(text),
                Part::Reasoning(_) | Part::Call(_) => None,
            });
            let prompt = prompt.map(|prompt| prompt.text.clone());
            return ChoiceContent::Text {
                text: prompt.into_iter().chain(texts).collect(),
                logprobs,
            };
        }
        let logprobs = wanted.then(|| chat::Logprobs::of(tokens));
        match content.chunk {
            None => ChoiceContent::Message {
                message: chat::Message::whole(content.parts),
                logprobs,
            },
            Some(place) => ChoiceContent::Delta {
                delta: chat::Message::chunk(content.parts, !place.is_later, place.calls),
                logprobs,
            },
        }
    }
}

/// OpenAI's legacy shape. `token_logprobs` are of the distribution sampled from, `top_logprobs` at
/// temperature 1.
#[derive(Debug, Default, Serialize)]
pub struct Logprobs {
    pub tokens: Vec<String>,
    /// Null: the first token of an echoed prompt.
    pub token_logprobs: Vec<Option<f32>>,
    pub top_logprobs: Vec<Option<BTreeMap<String, f32>>>,
    /// Characters of the text before each token.
    pub text_offset: Vec<usize>,
}

/// vLLM's: of one token of the prompt, and of the most probable ones at its place, by token id. `None`:
/// the first token, which nothing precedes.
type PromptLogprobs = Option<BTreeMap<u32, PromptLogprob>>;

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PromptLogprob {
    logprob: f32,
    /// 1 is the most probable. Null: it is not among those that are listed.
    rank: Option<usize>,
    decoded_token: String,
}

/// `None`: the caller does not ask for them.
pub fn prompt_logprobs(request: &GenerationRequest, finished: &FinishedChoice) -> Option<Vec<PromptLogprobs>> {
    let top = request.prompt_logprobs?;
    let of_token = |(place, token): (usize, &SampledToken)| {
        let own = PromptLogprob {
            logprob: token.logprob,
            rank: None,
            decoded_token: token.text.text.clone(),
        };
        let listed = token.top_ids.iter().zip(&token.top).take(top).enumerate();
        let listed = listed.map(|(place, (id, (text, logprob)))| {
            let listed = PromptLogprob {
                logprob: *logprob,
                rank: Some(place + 1),
                decoded_token: text.text.clone(),
            };
            (*id, listed)
        });
        (place > 0).then(|| std::iter::once((token.id, own)).chain(listed).collect())
    };
    Some(finished.prompt.tokens.iter().enumerate().map(of_token).collect())
}

#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Usage {
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    pub total_tokens: usize,
}

impl Usage {
    pub fn new(prompt_tokens: usize, completion_tokens: usize) -> Self {
        Usage {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
        }
    }
}

impl Logprobs {
    /// `prompt`: if it is echoed. `top`: how many of the most probable tokens to list.
    fn of(prompt: Option<&EchoedPrompt>, tokens: &[SampledToken], top: usize) -> Self {
        let mut logprobs = Logprobs::default();
        let echoed = prompt.map_or(&[][..], |prompt| &prompt.tokens);
        let before = prompt.map_or(0, |prompt| prompt.text.chars().count());
        let tokens = tokens.iter().map(|token| (token, before));
        for (place, (token, before)) in echoed.iter().map(|token| (token, 0)).chain(tokens).enumerate() {
            let is_scored = place > 0 || echoed.is_empty();
            logprobs.tokens.push(token.text.text.clone());
            logprobs.token_logprobs.push(is_scored.then_some(token.logprob));
            let top = token.top.iter().take(top);
            let mut top: BTreeMap<_, _> = top.map(|(token, logprob)| (token.text.clone(), *logprob)).collect();
            if place < echoed.len() {
                // as vLLM does: how probable the prompt's own token was
                top.insert(token.text.text.clone(), token.logprob);
            }
            logprobs.top_logprobs.push(is_scored.then_some(top));
            logprobs.text_offset.push(before + token.offset);
        }
        logprobs
    }
}

impl Choice {
    /// `finished`: set once the choice is in the log. `content` and `tokens` are those to send now:
    /// all of them, or the ones since the previous chunk.
    pub fn new(
        request: &GenerationRequest,
        index: usize,
        content: Content,
        tokens: &[SampledToken],
        finished: Option<&FinishedChoice>,
    ) -> Self {
        let token_ids = || tokens.iter().map(|token| token.id).collect();
        let with_ids = request.return_token_ids;
        let calls = content.calls();
        Choice {
            index,
            content: ChoiceContent::new(request, content, tokens, finished),
            finish_reason: finished.map(|finished| match finished.reason {
                FinishReason::Length => "length",
                FinishReason::Stop if calls > 0 => "tool_calls",
                FinishReason::Stop | FinishReason::Abort => "stop",
            }),
            token_ids: with_ids.then(token_ids),
            prompt_token_ids: finished
                .filter(|_| with_ids)
                .map(|finished| finished.prompt_ids.to_vec()),
            prompt_logprobs: finished
                .filter(|_| !request.is_chat())
                .and_then(|finished| prompt_logprobs(request, finished)),
            outcome: finished.map(|finished| finished.outcome.clone()),
        }
    }
}
