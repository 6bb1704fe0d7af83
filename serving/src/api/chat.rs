//! The shapes of `POST /v1/chat/completions`: OpenAI's names and vLLM's extensions. A conversation is a completion whose
//! prompt the version's own template writes; everything after the prompt is the same.

use super::choice::TokenOut;
use super::wire::{CompletionRequest, StreamOptions};
use edge::Problem;
use policy::chat::{Conversation, Value as TemplateValue};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// OpenAI's limit.
const TOP_LOGPROBS_MAX: i64 = 20;

/// The body. A field that is not here is refused.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChatRequest {
    pub model: String,
    /// As the template reads them: `role` and `content`, and what else it knows.
    pub messages: Vec<TemplateValue>,
    /// Written into the prompt by templates that know them. What the model answers is text.
    pub tools: Option<Vec<TemplateValue>>,
    pub documents: Option<Vec<TemplateValue>>,
    /// Further variables of the template.
    pub chat_template_kwargs: Option<BTreeMap<String, TemplateValue>>,
    /// Default true, unless the final message is continued.
    pub add_generation_prompt: Option<bool>,
    /// The model goes on with the last message.
    pub continue_final_message: Option<bool>,

    pub max_completion_tokens: Option<i64>,
    pub max_tokens: Option<i64>,
    pub temperature: Option<f64>,
    pub top_p: Option<f64>,
    pub top_k: Option<i64>,
    pub min_p: Option<f64>,
    pub repetition_penalty: Option<f64>,
    pub presence_penalty: Option<f64>,
    pub frequency_penalty: Option<f64>,
    pub logit_bias: Option<Map<String, Value>>,
    pub n: Option<i64>,
    pub stop: Option<Value>,
    pub seed: Option<i64>,
    pub stream: Option<bool>,
    pub stream_options: Option<StreamOptions>,
    pub logprobs: Option<bool>,
    pub top_logprobs: Option<i64>,
    pub user: Option<String>,
    pub return_token_ids: Option<bool>,
    pub priority: Option<i64>,
    pub session_id: Option<String>,
    pub surface: Option<String>,
    pub metadata: Option<Map<String, Value>>,

    // of OpenAI's, accepted only where they change nothing
    pub tool_choice: Option<Value>,
    pub response_format: Option<Value>,
}

impl ChatRequest {
    /// The same as a completion without a prompt, and what its prompt is rendered from.
    pub fn split(self) -> Result<(CompletionRequest, Conversation), Problem> {
        let bad = |detail: String| Err(Problem::bad_request(detail));
        if self
            .tool_choice
            .as_ref()
            .is_some_and(|choice| !is(choice, &["auto", "none"]))
        {
            return bad("tool_choice must be \"auto\" or \"none\"; what is sampled cannot be constrained".into());
        }
        let format = self.response_format.as_ref().and_then(|format| format.get("type"));
        if self.response_format.is_some() && !format.is_some_and(|kind| is(kind, &["text"])) {
            return bad("response_format must be {\"type\": \"text\"}; what is sampled cannot be constrained".into());
        }
        let logprobs = match (self.logprobs.unwrap_or(false), self.top_logprobs) {
            (false, Some(k)) if k != 0 => return bad("top_logprobs needs logprobs: true".into()),
            (false, _) => None,
            (true, k) if (0..=TOP_LOGPROBS_MAX).contains(&k.unwrap_or(0)) => k.or(Some(0)),
            (true, k) => {
                let k = k.unwrap_or_default();
                return bad(format!("top_logprobs is {k}; give 0 to {TOP_LOGPROBS_MAX}"));
            }
        };
        let max_tokens = match (self.max_completion_tokens, self.max_tokens) {
            (Some(new), Some(old)) if new != old => {
                return bad(format!(
                    "max_completion_tokens is {new} and max_tokens, its old name, is {old}; give one"
                ));
            }
            (new, old) => new.or(old),
        };
        let continued = self.continue_final_message.unwrap_or(false);
        let without_tools = self.tool_choice.as_ref().is_some_and(|choice| is(choice, &["none"]));
        let conversation = Conversation {
            messages: self.messages,
            tools: self.tools.filter(|_| !without_tools),
            documents: self.documents,
            add_generation_prompt: self.add_generation_prompt.unwrap_or(!continued),
            continue_final_message: continued.then(|| "content".to_owned()),
            variables: self.chat_template_kwargs.unwrap_or_default(),
            ..Conversation::default()
        };
        let completion = CompletionRequest {
            model: self.model,
            prompt: Value::Null,
            max_tokens,
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            logit_bias: self.logit_bias,
            n: self.n,
            stop: self.stop,
            seed: self.seed,
            stream: self.stream,
            stream_options: self.stream_options,
            logprobs,
            user: self.user,
            return_token_ids: self.return_token_ids,
            priority: self.priority,
            session_id: self.session_id,
            surface: self.surface,
            metadata: self.metadata,
            best_of: None,
            echo: None,
            suffix: None,
        };
        Ok((completion, conversation))
    }
}

fn is(value: &Value, words: &[&str]) -> bool {
    value.as_str().is_some_and(|word| words.contains(&word))
}

/// What the model said, whole.
#[derive(Debug, Serialize)]
pub struct Message {
    role: &'static str,
    content: String,
}

/// What it said since the chunk before.
#[derive(Debug, Serialize)]
pub struct Delta {
    /// In a choice's first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    content: String,
}

impl Message {
    pub fn new(content: String) -> Self {
        Message {
            role: "assistant",
            content,
        }
    }
}

impl Delta {
    pub fn new(content: String, first: bool) -> Self {
        Delta {
            role: first.then_some("assistant"),
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
    token: Spelled,
    top_logprobs: Vec<Spelled>,
}

#[derive(Debug, Serialize)]
struct Spelled {
    token: String,
    logprob: f32,
    /// None where the token has no text of its own.
    bytes: Option<Vec<u8>>,
}

impl Logprobs {
    pub fn of(tokens: &[TokenOut]) -> Self {
        let spelled = |(text, logprob): &(String, f32)| Spelled {
            token: text.clone(),
            logprob: *logprob,
            bytes: (!text.starts_with("token_id:") && !text.contains('\u{fffd}')).then(|| text.as_bytes().to_vec()),
        };
        let content = tokens.iter().map(|token| TokenLogprob {
            token: spelled(&(token.text.clone(), token.logprob)),
            top_logprobs: token.top.iter().map(spelled).collect(),
        });
        Logprobs {
            content: content.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn split(fields: Value) -> Result<(CompletionRequest, Conversation), Problem> {
        let mut body = json!({"model": "demo", "messages": [{"role": "user", "content": "hi"}]});
        if let (Value::Object(body), Value::Object(fields)) = (&mut body, fields) {
            body.extend(fields);
        }
        serde_json::from_value::<ChatRequest>(body).unwrap().split()
    }

    #[test]
    fn a_conversation_is_a_completion_whose_prompt_a_template_writes() {
        let (completion, conversation) =
            split(json!({"max_completion_tokens": 7, "top_k": 4, "logprobs": true})).unwrap();
        assert_eq!(
            (completion.max_tokens, completion.top_k, completion.logprobs),
            (Some(7), Some(4), Some(0))
        );
        assert!(conversation.add_generation_prompt && conversation.continue_final_message.is_none());
        let (_, continued) = split(json!({"continue_final_message": true})).unwrap();
        assert!(!continued.add_generation_prompt && continued.continue_final_message.as_deref() == Some("content"));
    }

    #[test]
    fn what_would_constrain_the_sampling_is_refused_with_what_to_do() {
        for (fields, said) in [
            (json!({"tool_choice": "required"}), "tool_choice must be"),
            (
                json!({"response_format": {"type": "json_object"}}),
                "response_format must be",
            ),
            (json!({"top_logprobs": 3}), "top_logprobs needs logprobs"),
            (
                json!({"logprobs": true, "top_logprobs": 21}),
                "top_logprobs is 21; give 0 to 20",
            ),
            (json!({"max_tokens": 3, "max_completion_tokens": 4}), "give one"),
        ] {
            let problem = split(fields).unwrap_err().to_string();
            assert!(problem.contains(said), "{problem}");
        }
        let tools = json!([{"type": "function", "function": {"name": "f"}}]);
        let (_, conversation) = split(json!({"tools": tools, "tool_choice": "none"})).unwrap();
        assert!(conversation.tools.is_none());
    }
}
