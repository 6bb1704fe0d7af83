//! Other servers with OpenAI's `POST /v1/completions`. They take no weights from us.
//!
//! One that takes and returns token ids ([`completions`]) is probed like any engine, so it is known
//! which version it holds. One that returns only text answers for the alias that the configuration
//! names. Nothing proves what it holds, and its answers are logged with ids that our tokenizer gives
//! their text, so they are never trained on.

use super::completions;
use super::http::{Error, Http, Timeouts};
use super::options::{OpenAiServer, Server};
use super::protocol::{Ending, Failure, Piece, Read, Stream, parse, token};
use crate::engine::{Ends, SampleRequest};
use model::sampling::Params;
use serde::Deserialize;
use serde_json::{Value, json};
use text::tokenizer::Tokenizer;

#[derive(Debug)]
pub struct OpenAi {
    pub(super) http: Http,
    model: Option<String>,
    alias: Option<String>,
}

impl OpenAi {
    pub fn new(server: &OpenAiServer, timeouts: Timeouts) -> anyhow::Result<Self> {
        let OpenAiServer {
            url,
            api_key,
            model,
            alias,
            weight: _,
        } = server.clone();
        let server = Server {
            url,
            api_key,
            ..Server::default()
        };
        Ok(OpenAi {
            http: Http::new(server, timeouts)?,
            model,
            alias,
        })
    }

    pub fn alias(&self) -> Option<&str> {
        self.alias.as_deref()
    }

    /// Fails if it does not answer.
    pub async fn check(&self) -> anyhow::Result<()> {
        self.http.get::<Value>("/v1/models").await.map(drop)
    }

    /// Longest prompt and completion together, in tokens, if it says so.
    pub async fn context(&self) -> anyhow::Result<Option<usize>> {
        #[derive(Deserialize)]
        struct Models {
            data: Vec<Model>,
        }
        #[derive(Deserialize)]
        struct Model {
            id: String,
            max_model_len: Option<usize>,
        }
        let models: Models = self.http.get("/v1/models").await?;
        let named = |model: &&Model| self.model.as_ref().is_none_or(|name| model.id == *name);
        let model = models.data.iter().find(named);
        Ok(model.and_then(|model| model.max_model_len))
    }

    /// [`Client::generate`](super::client::Client::generate).
    pub async fn generate(&self, request: &SampleRequest, seeds: bool) -> Result<Stream, Error> {
        let model = self.model.as_deref();
        if self.alias.is_none() {
            let body = completions::body(request, model, seeds);
            let events = self.http.sample(completions::PATH, &body, "").await?;
            return Ok(Stream::new(events, completions::Reader));
        }
        let tokenizer = request.version.tokenizer.clone();
        let tokenizer = tokenizer.ok_or_else(|| {
            let serial = request.version.serial;
            Error::Refused(format!(
                "version {serial} came without a tokenizer, and the engine reads text"
            ))
        })?;
        if request.ends != Ends::default() {
            let reason = "the engine of this model reads text: ask without stop_token_ids, ignore_eos and min_tokens";
            return Err(Error::Refused(reason.into()));
        }
        let body = text_body(request, &tokenizer, model, seeds)?;
        let events = self.http.sample(completions::PATH, &body, "").await?;
        let reader = TextReader {
            tokenizer,
            stop_id: request.version.stop_ids.first().copied(),
            left: request.max_tokens,
        };
        Ok(Stream::new(events, reader))
    }
}

/// The body that asks for the text after the prompt's text. Parameters that OpenAI does not have are
/// refused.
fn text_body(request: &SampleRequest, tokenizer: &Tokenizer, model: Option<&str>, seeds: bool) -> Result<Value, Error> {
    let Params {
        temperature,
        top_p,
        top_k,
        min_p,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        logit_bias,
    } = request.params.clone();
    for (name, set) in [
        ("top_k", top_k != 0),
        ("min_p", min_p != 0.0),
        ("repetition_penalty", repetition_penalty != 1.0),
        ("logit_bias", !logit_bias.is_empty()),
        ("logprobs", request.top_logprobs > 0),
        // nothing would check the text against it
        ("schema or forced tool", request.constraint.is_some()),
    ] {
        if set {
            let reason = format!("the engine of this model returns no token ids, so it has no {name}: leave it out");
            return Err(Error::Refused(reason));
        }
    }
    let prompt = tokenizer.decode_whole(&request.prompt).map_err(|_| {
        let reason = "the engine of this model reads text, and the prompt has token ids without a text";
        Error::Refused(reason.into())
    })?;
    let mut body = json!({
        "prompt": prompt,
        "max_tokens": request.max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "stream": true,
    });
    if seeds {
        body["seed"] = request.seed.into();
    }
    if let Some(model) = model {
        body["model"] = model.into();
    }
    Ok(body)
}

/// Gives the text of an answer the ids of our tokenizer, with log-probabilities of 0.
struct TextReader {
    tokenizer: Tokenizer,
    /// Stands for the end of the answer, whatever ended it there.
    stop_id: Option<u32>,
    /// How many more tokens are wanted.
    left: usize,
}

impl Read for TextReader {
    fn read(&mut self, data: &[u8]) -> Result<Piece, Error> {
        #[derive(Deserialize)]
        struct Event {
            #[serde(default)]
            choices: Vec<Choice>,
            error: Option<Failure>,
        }
        #[derive(Deserialize)]
        struct Choice {
            #[serde(default)]
            text: String,
            finish_reason: Option<String>,
        }
        let event: Event = parse(data)?;
        if let Some(failure) = event.error {
            return Err(failure.into());
        }
        match event.choices.into_iter().next() {
            Some(Choice { text, finish_reason }) => self.piece(&text, finish_reason.as_deref()),
            None => Ok(Piece::default()),
        }
    }
}

impl TextReader {
    fn piece(&mut self, text: &str, finish_reason: Option<&str>) -> Result<Piece, Error> {
        let ids = self.tokenizer.encode(text);
        let mut ids = ids.map_err(|_| Error::Answer("the engine's text has no tokens"))?;
        let mut ending = finish_reason.map(Ending::named).transpose()?;
        if ending == Some(Ending::Stop) {
            ids.extend(self.stop_id);
        }
        // our tokenizer may need more tokens for the same text
        if ids.len() > self.left {
            ids.truncate(self.left);
            ending = Some(Ending::Length);
        }
        self.left -= ids.len();
        Ok(Piece {
            tokens: ids.into_iter().map(|id| token(id, 0.0, None, Vec::new())).collect(),
            ending,
            versions: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::engine::{SampleEvent, SampleRequest};
    use crate::remote::recorded::{self, Exchange, events, request};
    use crate::remote::sequence::{self, End};
    use serde_json::json;

    fn plain() -> (SampleRequest, tokio::sync::mpsc::Receiver<SampleEvent>) {
        let (mut request, receiver) = request(8);
        request.params.top_k = 0;
        request.top_logprobs = 0;
        request.suppressed = None;
        (request, receiver)
    }

    #[tokio::test]
    async fn a_server_with_token_ids_is_asked_for_its_model_by_name() {
        let body = json!({
            "prompt": [5, 6, 7, 8], "max_tokens": 3, "temperature": 0.75, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
            "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "stop_token_ids": [1],
            "ignore_eos": true, "stream": true, "logprobs": 0, "return_token_ids": true,
            "return_tokens_as_token_ids": true, "cache_salt": "tenant-default", "model": "theirs",
        });
        let event = json!({"choices": [{"index": 0, "token_ids": [4, 1], "finish_reason": "stop",
                                        "logprobs": {"token_logprobs": [-0.5, -0.25]}}]});
        let exchange = Exchange::post("/v1/completions", body, 200, events(&[event]));
        let models = json!({"data": [{"id": "other", "max_model_len": 8}, {"id": "theirs", "max_model_len": 64}]});
        let server = recorded::openai(vec![exchange, Exchange::get("/v1/models", &models)], None).await;
        assert_eq!(server.context().await.unwrap(), Some(64));
        let (request, mut receiver) = plain();
        let end = sequence::run(&server, "", request, false, None, None).await;
        assert!(matches!(end, End::Done), "{end:?}");
        let mut said = Vec::new();
        while let Ok(event) = receiver.try_recv() {
            said.push(event);
        }
        assert_eq!(said.len(), 3, "two tokens and the end: {said:?}");
    }

    #[tokio::test]
    async fn a_server_of_text_needs_a_tokenizer_of_the_version_that_it_answers_for() {
        let server = recorded::openai(vec![], Some("partner")).await;
        let (request, mut receiver) = plain();
        let end = sequence::run(&server, "", request, false, None, None).await;
        assert!(matches!(end, End::Done), "{end:?}");
        let Ok(SampleEvent::Refused(error)) = receiver.try_recv() else {
            panic!("a refusal was expected");
        };
        assert!(error.contains("without a tokenizer"), "{error}");
    }
}
