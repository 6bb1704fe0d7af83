//! The JSON of the answers: OpenAI's names, vLLM's extensions, and Springtide's own fields beside
//! them.

mod chat;

pub use chat::call_id;

use super::outcome::{ChoiceOutcome, FinishedChoice, SampledToken};
use super::request::GenerationRequest;
use ingest::event::FinishReason;
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
    fn new(request: &GenerationRequest, content: Content, tokens: &[SampledToken]) -> Self {
        let wanted = request.logprobs.is_some();
        if !request.is_chat() {
            let logprobs = wanted.then(|| Logprobs::of(tokens));
            let texts = content.parts.into_iter().filter_map(|part| match part {
                Part::Text(text) => Some(text),
                Part::Reasoning(_) | Part::Call(_) => None,
            });
            return ChoiceContent::Text {
                text: texts.collect(),
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
    pub token_logprobs: Vec<f32>,
    pub top_logprobs: Vec<BTreeMap<String, f32>>,
    /// Characters of the completion before each token.
    pub text_offset: Vec<usize>,
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
    fn of(tokens: &[SampledToken]) -> Self {
        let mut logprobs = Logprobs::default();
        for token in tokens {
            logprobs.tokens.push(token.text.text.clone());
            logprobs.token_logprobs.push(token.logprob);
            let top = token.top.iter().map(|(token, logprob)| (token.text.clone(), *logprob));
            logprobs.top_logprobs.push(top.collect());
            logprobs.text_offset.push(token.offset);
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
            content: ChoiceContent::new(request, content, tokens),
            finish_reason: finished.map(|finished| match finished.reason {
                FinishReason::Length => "length",
                FinishReason::Stop if calls > 0 => "tool_calls",
                FinishReason::Stop | FinishReason::Abort => "stop",
            }),
            token_ids: with_ids.then(token_ids),
            prompt_token_ids: finished
                .filter(|_| with_ids)
                .map(|finished| finished.prompt_ids.to_vec()),
            outcome: finished.map(|finished| finished.outcome.clone()),
        }
    }
}
