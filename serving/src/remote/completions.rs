//! `POST /v1/completions` with token ids in and out: `prompt` is a list of ids, and
//! `return_token_ids` and `logprobs` are asked for. vLLM has these, and so have servers that follow
//! it. No event says which weights sampled the tokens.

use super::http::Error;
use super::protocol::{self, Ending, Failure, Piece, Read, cache_salt, parse, token};
use crate::engine::{SampleRequest, Token};
use anyhow::anyhow;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;

pub const PATH: &str = "/v1/completions";

const TEXTS_FOR_IDS: &str = "the engine names the most probable tokens by their texts: it does not know \
                             return_tokens_as_token_ids, so ask without logprobs";

/// How to sample, for both of vLLM's routes.
pub fn sampling(request: &SampleRequest, seeds: bool) -> Value {
    let mut sampling = protocol::sampling(request);
    sampling["max_tokens"] = request.max_tokens.into();
    // our stop ids are complete; the server's own would come on top of them
    sampling["ignore_eos"] = true.into();
    sampling["logprobs"] = request.top_logprobs.into();
    if request.ends.min_tokens > 0 {
        sampling["min_tokens"] = request.ends.min_tokens.into();
    }
    if seeds {
        sampling["seed"] = request.seed.into();
    }
    sampling
}

/// The body that asks for one sequence. `model`: its name there, if the server needs one.
pub fn body(request: &SampleRequest, model: Option<&str>, seeds: bool) -> Value {
    let mut body = sampling(request, seeds);
    body["prompt"] = json!(&*request.prompt);
    body["stream"] = true.into();
    body["return_token_ids"] = true.into();
    body["return_tokens_as_token_ids"] = true.into();
    body["cache_salt"] = json!(cache_salt(request));
    if let Some(constraint) = &request.constraint {
        let schema = json!({"name": "answer", "schema": &*constraint.schema});
        body["response_format"] = json!({"type": "json_schema", "json_schema": schema});
    }
    if let Some(model) = model {
        body["model"] = model.into();
    }
    body
}

/// Reads the events.
#[derive(Debug, Default)]
pub struct Reader;

#[derive(Deserialize)]
struct Event {
    #[serde(default)]
    choices: Vec<Choice>,
    error: Option<Failure>,
}

#[derive(Deserialize)]
struct Choice {
    token_ids: Option<Vec<u32>>,
    logprobs: Option<Logprobs>,
    finish_reason: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Logprobs {
    token_logprobs: Vec<Option<f32>>,
    /// By `token_id:<id>`.
    top_logprobs: Option<Vec<Option<BTreeMap<String, f32>>>>,
}

impl Read for Reader {
    fn read(&mut self, data: &[u8]) -> Result<Piece, Error> {
        let event: Event = parse(data)?;
        if let Some(failure) = event.error {
            return Err(failure.into());
        }
        match event.choices.into_iter().next() {
            Some(choice) => piece(choice),
            None => Ok(Piece::default()),
        }
    }
}

fn piece(choice: Choice) -> Result<Piece, Error> {
    let ending = choice.finish_reason.as_deref().map(Ending::named).transpose()?;
    let logprobs = choice.logprobs.unwrap_or_default();
    let ids = match choice.token_ids {
        Some(ids) => ids,
        // its first and last events may have neither
        None if logprobs.token_logprobs.is_empty() => Vec::new(),
        None => {
            let error = "the engine returns no token ids; one without them belongs in serve.remote.openai, with \
                         the alias that it answers for (serve.remote.openai.alias)";
            return Err(Error::Engine(anyhow!(error)));
        }
    };
    let (given, sampled) = (logprobs.token_logprobs.len(), ids.len());
    if given != sampled {
        let error = anyhow!("the engine gave {given} log-probabilities for {sampled} tokens");
        return Err(Error::Engine(error));
    }
    let mut tops = logprobs.top_logprobs.unwrap_or_default().into_iter();
    let with_logprobs = ids.into_iter().zip(logprobs.token_logprobs);
    let tokens = with_logprobs.map(|(id, logprob)| {
        let logprob = logprob.ok_or(Error::Answer("the engine gave no log-probability of a token"))?;
        let top = tops.next().flatten().unwrap_or_default();
        // a name that is no id is a text that was sampled
        let top = top.into_iter().map(|(name, logprob)| {
            let id = name.strip_prefix("token_id:").and_then(|id| id.parse().ok());
            Ok((id.ok_or(Error::Answer(TEXTS_FOR_IDS))?, logprob))
        });
        Ok(token(id, logprob, None, top.collect::<Result<_, Error>>()?))
    });
    Ok(Piece {
        tokens: tokens.collect::<Result<Vec<Token>, Error>>()?,
        ending,
        ..Piece::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(event: &Value) -> Result<Piece, Error> {
        Reader.read(event.to_string().as_bytes())
    }

    #[test]
    fn ids_come_with_their_log_probabilities_and_the_most_probable_tokens() {
        let event = json!({"choices": [{
            "index": 0, "text": " a b", "token_ids": [7, 9], "finish_reason": "stop",
            "logprobs": {
                "tokens": ["token_id:7", "token_id:9"], "token_logprobs": [-0.5, 0.000_001], "text_offset": [0, 1],
                "top_logprobs": [{"token_id:7": -0.5, "token_id:3": -0.25}, null],
            },
        }]});
        let piece = read(&event).unwrap();
        assert_eq!(piece.ending, Some(Ending::Stop));
        assert_eq!(piece.tokens[0].top, [(3, -0.25), (7, -0.5)]);
        let tokens: Vec<(u32, f32)> = piece.tokens.iter().map(|token| (token.id, token.logprob)).collect();
        assert_eq!(tokens, [(7, -0.5), (9, 0.0)]);
        assert_eq!(read(&json!({"choices": [], "usage": {}})).unwrap(), Piece::default());
    }

    #[test]
    fn an_answer_without_ids_or_log_probabilities_is_an_error_that_says_what_to_do() {
        let without_ids = json!({"choices": [{"text": "a", "logprobs": {"token_logprobs": [-1.0]}}]});
        let error = read(&without_ids).unwrap_err().to_string();
        assert!(error.contains("serve.remote.openai.alias"), "{error}");
        let without_logprobs = json!({"choices": [{"text": "a", "token_ids": [3]}]});
        let error = read(&without_logprobs).unwrap_err().to_string();
        assert!(error.contains("0 log-probabilities for 1 tokens"), "{error}");
    }

    #[test]
    fn what_a_request_can_cause_is_no_failure_of_the_engine_and_its_error_quotes_nothing() {
        let texts = json!({"choices": [{"text": "", "token_ids": [7], "logprobs": {
            "token_logprobs": [-0.5], "top_logprobs": [{"secret": -0.5}]}}]});
        let filtered = json!({"choices": [{"text": "", "finish_reason": "content_filter"}]});
        let unknown = json!({"choices": [{"text": "", "finish_reason": "secret"}]});
        for event in [texts, filtered, unknown] {
            let error = read(&event).unwrap_err();
            assert!(matches!(error, Error::Answer(_)), "{error:?}");
            assert!(!format!("{error:?}").contains("secret"), "{error:?}");
        }
        let failure = |code: u16| read(&json!({"error": {"message": "secret", "code": code}})).unwrap_err();
        assert!(matches!(failure(400), Error::Refused(reason) if reason == "secret"));
        assert!(matches!(failure(429), Error::Busy));
        assert!(matches!(failure(500), Error::Engine(_)));
        let unreadable = json!({"choices": "secret"});
        for error in [failure(400), failure(500), read(&unreadable).unwrap_err()] {
            assert!(!error.to_string().contains("secret"), "{error}");
        }
    }
}
