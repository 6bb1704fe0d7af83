//! What coding agents ask and read: calls of tools, reasoning, the order of streams, errors. The model
//! says a script.

use super::*;
use event_log::event::CONSTRAINT_BYTES_MAX;
use uuid::Uuid;

/// After the 256 bytes.
const ASSISTANT: u32 = 256;
pub(crate) const END: u32 = 257;
pub(crate) const VOCAB: u32 = 259;

/// Says its script after each prompt.
struct Script {
    answer: Vec<u32>,
    slots: Vec<Vec<u32>>,
}

impl Backend for Script {
    fn slots(&self) -> usize {
        self.slots.len()
    }

    fn advance(&mut self, segments: &[(usize, &[u32])]) -> anyhow::Result<Vec<Step>> {
        let mut steps = Vec::new();
        for (slot, ids) in segments {
            let slot = &mut self.slots[*slot];
            slot.extend_from_slice(ids);
            let said = slot.iter().rev().position(|&id| id == ASSISTANT).unwrap_or(0);
            let next = *self.answer.get(said).unwrap_or(&END);
            steps.push(Step {
                logits: (0..VOCAB).map(|id| if id == next { 60.0 } else { 0.0 }).collect(),
                routing: router::Routing::default(),
            });
        }
        Ok(steps)
    }

    fn copy_prefix(&mut self, from: usize, to: usize, tokens: usize) {
        self.slots[to] = self.slots[from][..tokens].to_vec();
    }
}

/// Bytes, and special tokens: Mistral's mark is one.
pub(crate) fn tokenizer() -> Tokenizer {
    let vocab: serde_json::Map<String, Value> = (0..=255u8)
        .map(|byte| (byte_char(byte).to_string(), byte.into()))
        .collect();
    let added: Vec<Value> = ["<|assistant|>", "<|end|>", "[TOOL_CALLS]"]
        .iter()
        .zip(ASSISTANT..)
        .map(|(content, id)| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": true})
        })
        .collect();
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    let json = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": bytes, "post_processor": null, "decoder": bytes,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []}
    });
    let files = [
        ("tokenizer.json", json.to_string()),
        ("config.json", json!({"eos_token_id": END}).to_string()),
    ];
    let files = files.map(|(name, text)| (name.to_owned(), Bytes::from(text)));
    Tokenizer::from_checkpoint(&Checkpoint {
        tensors: BTreeMap::new(),
        files: files.into(),
    })
    .unwrap()
}

/// The printable character of a byte in byte-level vocabularies.
fn byte_char(byte: u8) -> char {
    let printable = |b: u8| matches!(b, 33..=126 | 161..=172 | 174..=255);
    match printable(byte) {
        true => char::from(byte),
        false => char::from_u32(256 + (0..byte).filter(|&b| !printable(b)).count() as u32).unwrap(),
    }
}

/// The calls of a template that writes them as Qwen's does.
const HERMES: &str = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\
    {{ c.function.arguments | tojson }}</tool_call>{% endfor %}\n{% endfor %}<|assistant|>";

async fn server_saying(answer: &str, template: &str) -> Server {
    let tokenizer = tokenizer();
    let answer = tokenizer.encode(answer).unwrap();
    let version = FakeVersion {
        tokenizer,
        template: template.into(),
        context: 4096,
        vocab: VOCAB,
        stop_ids: vec![END],
        experts: None,
        decline_id: None,
    };
    let options = Options::default();
    let slots = vec![Vec::new(); options.slots];
    let model = || {
        Box::new(Script {
            answer: answer.clone(),
            slots: slots.clone(),
        }) as Box<dyn Backend>
    };
    server_of(options, version, model).await
}

impl Server {
    async fn ask(&self, path: &str, body: Value) -> Value {
        let response = self.post_to(path, body).await;
        let status = response.status();
        let text = text(response).await;
        assert_eq!(status, 200, "{text}");
        serde_json::from_str(&text).unwrap()
    }

    /// Names and data of the events of a stream.
    async fn stream(&self, path: &str, mut body: Value) -> Vec<Value> {
        body["stream"] = true.into();
        let response = self.post_to(path, body).await;
        assert_eq!(response.status(), 200);
        data(&text(response).await)
    }
}

fn types(events: &[Value]) -> Vec<&str> {
    events
        .iter()
        .map(|event| event["type"].as_str().unwrap_or(""))
        .collect()
}

const ONE_CALL: &str =
    "I look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Bonn\", \"at\": 1}}\n</tool_call>";

fn chat_body() -> Value {
    json!({"model": "demo", "messages": [{"role": "user", "content": "Warm?"}],
           "tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]})
}

fn messages_body() -> Value {
    json!({"model": "demo", "messages": [{"role": "user", "content": "Warm?"}], "max_tokens": 200,
           "tools": [{"name": "weather", "input_schema": {"type": "object"}}]})
}

#[tokio::test]
async fn a_chats_answer_has_the_calls_of_tools() {
    let server = server_saying(ONE_CALL, HERMES).await;
    let answer = server.ask("/v1/chat/completions", chat_body()).await;
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["content"], "I look.");
    let call = &choice["message"]["tool_calls"][0];
    assert_eq!(
        call["function"],
        json!({"name": "weather", "arguments": "{\"city\": \"Bonn\", \"at\": 1}"})
    );
    // what is logged is what was sampled
    let logged = server.log.generations().remove(0);
    let mut said = super::agents::tokenizer().encode(ONE_CALL).unwrap();
    said.push(END);
    assert_eq!(logged.token_ids, said);

    // without tools, the text is what was sampled
    let mut plain = chat_body();
    plain["tools"] = json!([]);
    let answer = server.ask("/v1/chat/completions", plain).await;
    assert_eq!(
        answer["choices"][0]["message"],
        json!({"role": "assistant", "content": ONE_CALL})
    );
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");

    let chunks = server.stream("/v1/chat/completions", chat_body()).await;
    let deltas: Vec<&Value> = chunks.iter().map(|chunk| &chunk["choices"][0]).collect();
    let content: String = deltas.iter().filter_map(|d| d["delta"]["content"].as_str()).collect();
    assert_eq!(content, "I look.");
    let calls: Vec<&Value> = deltas
        .iter()
        .flat_map(|d| d["delta"]["tool_calls"].as_array().into_iter().flatten())
        .collect();
    assert_eq!(calls.len(), 1);
    assert_eq!((&calls[0]["index"], &calls[0]["type"]), (&json!(0), &json!("function")));
    assert_eq!(calls[0]["function"]["arguments"], "{\"city\": \"Bonn\", \"at\": 1}");
    let last = deltas.iter().rev().find(|d| d["finish_reason"].is_string()).unwrap();
    assert_eq!(last["finish_reason"], "tool_calls");
}

#[tokio::test]
async fn the_call_of_an_earlier_turn_comes_back_as_the_model_wrote_it() {
    let server = server_saying("Yes.", HERMES).await;
    let mut body = chat_body();
    body["messages"] = json!([
        {"role": "user", "content": "Warm?"},
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{\"z\": 1, \"a\": 2}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "21"},
    ]);
    server.ask("/v1/chat/completions", body).await;
    let prompt: Vec<u8> = server.log.generations()[0]
        .prompt_ids
        .iter()
        .filter_map(|&id| u8::try_from(id).ok())
        .collect();
    let prompt = String::from_utf8(prompt).unwrap();
    assert!(
        prompt.contains("<tool_call>{\"z\": 1, \"a\": 2}</tool_call>"),
        "{prompt}"
    );
}

#[tokio::test]
async fn a_message_of_anthropic_has_the_calls_of_tools() {
    let server = server_saying(ONE_CALL, HERMES).await;
    let answer = server.ask("/v1/messages", messages_body()).await;
    assert_eq!(answer["stop_reason"], "tool_use");
    assert_eq!(answer["content"][0], json!({"type": "text", "text": "I look."}));
    let block = &answer["content"][1];
    assert_eq!(
        (&block["type"], &block["name"]),
        (&json!("tool_use"), &json!("weather"))
    );
    assert_eq!(block["input"], json!({"city": "Bonn", "at": 1}));

    let events = server.stream("/v1/messages", messages_body()).await;
    let mut kinds = types(&events);
    kinds.dedup();
    assert_eq!(
        kinds,
        [
            "message_start",
            "ping",
            "content_block_start",
            "content_block_delta",
            "content_block_stop",
            "content_block_start",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
    );
    let starts: Vec<&Value> = events.iter().filter(|e| e["type"] == "content_block_start").collect();
    assert_eq!(starts[0]["content_block"], json!({"type": "text", "text": ""}));
    assert_eq!(
        (&starts[1]["index"], &starts[1]["content_block"]["input"]),
        (&json!(1), &json!({}))
    );
    let input = events
        .iter()
        .find(|e| e["delta"]["type"] == "input_json_delta")
        .unwrap();
    assert_eq!(input["delta"]["partial_json"], "{\"city\": \"Bonn\", \"at\": 1}");
    let end = &events[events.len() - 2];
    assert_eq!(end["delta"]["stop_reason"], "tool_use");
    assert_eq!(end["usage"]["output_tokens"], ONE_CALL.len() + 1);
}

#[tokio::test]
async fn reasoning_is_apart_only_if_it_was_asked_for() {
    let said = "<think>\nHm.\n</think>\n\nYes.";
    let server = server_saying(said, HERMES).await;
    let mut body = chat_body();
    let answer = server.ask("/v1/chat/completions", body.clone()).await;
    assert_eq!(answer["choices"][0]["message"]["content"], said);
    body["separate_reasoning"] = true.into();
    let answer = server.ask("/v1/chat/completions", body).await;
    let message = &answer["choices"][0]["message"];
    assert_eq!(
        (&message["content"], &message["reasoning_content"]),
        (&json!("Yes."), &json!("Hm."))
    );

    let mut body = messages_body();
    let answer = server.ask("/v1/messages", body.clone()).await;
    assert_eq!(answer["content"], json!([{"type": "text", "text": said}]));
    body["thinking"] = json!({"type": "enabled", "budget_tokens": 1024});
    let answer = server.ask("/v1/messages", body.clone()).await;
    assert_eq!(
        answer["content"],
        json!([{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "Yes."}])
    );
    let events = server.stream("/v1/messages", body).await;
    let deltas: Vec<&str> = events.iter().filter_map(|e| e["delta"]["type"].as_str()).collect();
    assert_eq!(deltas[..2], ["thinking_delta", "thinking_delta"]);
    assert!(deltas.contains(&"signature_delta"));
    let thought: String = events.iter().filter_map(|e| e["delta"]["thinking"].as_str()).collect();
    assert_eq!(thought, "Hm.");
}

#[tokio::test]
async fn a_mark_that_is_a_special_token_is_found() {
    let said = "[TOOL_CALLS][{\"name\": \"weather\", \"arguments\": {}}]";
    let server = server_saying(said, "{# [TOOL_CALLS] #}{{ messages[0].content }}<|assistant|>").await;
    let answer = server.ask("/v1/chat/completions", chat_body()).await;
    let message = &answer["choices"][0]["message"];
    assert_eq!(message["tool_calls"][0]["function"]["name"], "weather");
    assert_eq!(message["content"], Value::Null);
    let mut body = chat_body();
    body["tool_choice"] = "none".into();
    let answer = server.ask("/v1/chat/completions", body).await;
    // special tokens are no text
    let content = answer["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(content.starts_with("[{"), "{content}");
}

#[tokio::test]
async fn tokens_of_a_message_are_counted() {
    let server = server_saying("Yes.", HERMES).await;
    let mut body = messages_body();
    body.as_object_mut().unwrap().remove("max_tokens");
    let counted = server.ask("/v1/messages/count_tokens", body).await;
    let answer = server.ask("/v1/messages", messages_body()).await;
    assert_eq!(counted, json!({"input_tokens": answer["usage"]["input_tokens"]}));
    assert_eq!(server.log.generations().len(), 1, "counting samples nothing");
}

#[tokio::test]
async fn errors_have_the_shape_of_their_api() {
    let server = server_saying("Yes.", HERMES).await;
    server.log.broken.store(true, Ordering::Relaxed);
    let response = server.post_to("/v1/messages", messages_body()).await;
    assert_eq!(response.status(), 503);
    assert_eq!(response.headers()["retry-after"], "2");
    let error: Value = serde_json::from_str(&text(response).await).unwrap();
    assert_eq!(
        (&error["type"], &error["error"]["type"]),
        (&json!("error"), &json!("overloaded_error"))
    );
    let events = server.stream("/v1/messages", messages_body()).await;
    let last = events.last().unwrap();
    assert_eq!(
        (&last["type"], &last["error"]["type"]),
        (&json!("error"), &json!("overloaded_error"))
    );
    let response = server.post_to("/v1/chat/completions", json!({"model": "demo"})).await;
    let error: Value = serde_json::from_str(&text(response).await).unwrap();
    assert_eq!(error["error"]["type"], "invalid_request_error");
    assert_ne!(error["type"], "error");
}

#[tokio::test]
async fn an_agents_session_header_makes_its_requests_one_episode() {
    let server = server_saying("Yes.", HERMES).await;
    for _ in 0..2 {
        let request = Request::post("/v1/messages?beta=true")
            .header("content-type", "application/json")
            .header("x-claude-code-session-id", "s1")
            .body(Body::from(messages_body().to_string()))
            .unwrap();
        let response = server.router.clone().oneshot(request).await.unwrap();
        assert_eq!(response.status(), 200);
    }
    let logged = server.log.generations();
    assert_eq!(logged[0].episode_id, logged[1].episode_id);
}

fn responses_body() -> Value {
    json!({"model": "demo", "input": "Warm?", "max_output_tokens": 200, "tools":
        [{"type": "function", "name": "weather", "parameters": {"type": "object"}}, {"type": "web_search"}]})
}

#[tokio::test]
async fn a_response_has_items_and_the_events_of_the_specification() {
    let server = server_saying(ONE_CALL, HERMES).await;
    let answer = server.ask("/v1/responses", responses_body()).await;
    assert_eq!(
        (&answer["object"], &answer["status"]),
        (&json!("response"), &json!("completed"))
    );
    assert_eq!(answer["output"][0]["content"][0]["text"], "I look.");
    let call = &answer["output"][1];
    assert_eq!(
        (&call["type"], &call["name"]),
        (&json!("function_call"), &json!("weather"))
    );
    assert_eq!(call["arguments"], "{\"city\": \"Bonn\", \"at\": 1}");
    assert_eq!(answer["generation_id"], json!(server.log.generations()[0].id));
    assert_eq!(answer["usage"]["output_tokens"], ONE_CALL.len() + 1);

    let events = server.stream("/v1/responses", responses_body()).await;
    let numbers: Vec<u64> = events.iter().map(|e| e["sequence_number"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (0..events.len() as u64).collect::<Vec<_>>());
    let mut kinds = types(&events);
    kinds.dedup();
    assert_eq!(
        kinds,
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
    );
    let deltas = events.iter().filter(|e| e["type"] == "response.output_text.delta");
    let said: String = deltas.filter_map(|e| e["delta"].as_str()).collect();
    assert_eq!(said, "I look.");
    let response = &events[events.len() - 1]["response"];
    let done = events.iter().filter(|e| e["type"] == "response.output_item.done");
    let items: Vec<&Value> = done.map(|e| &e["item"]).collect();
    assert_eq!(response["output"], json!(items));
    assert_eq!(response["generation_id"], json!(server.log.generations()[1].id));
}

#[tokio::test]
async fn an_empty_response_is_a_message_without_text() {
    let server = server_saying("", HERMES).await;
    let answer = server.ask("/v1/responses", responses_body()).await;
    assert_eq!(answer["output"][0]["type"], "message");
    assert_eq!(answer["output"][0]["content"][0]["text"], "");
    let events = server.stream("/v1/responses", responses_body()).await;
    let kinds = types(&events);
    assert!(kinds.contains(&"response.output_item.added"), "{kinds:?}");
    assert!(!kinds.contains(&"response.output_text.delta"), "{kinds:?}");
    assert_eq!(
        events.last().unwrap()["response"]["output"][0]["content"][0]["text"],
        ""
    );
}

#[tokio::test]
async fn a_response_that_is_cut_is_incomplete_and_reasoning_is_an_item() {
    let server = server_saying("<think>\nHm.\n</think>\n\nYes, it is.", HERMES).await;
    let mut body = responses_body();
    body["max_output_tokens"] = 28.into();
    body["reasoning"] = json!({"effort": "low"});
    let answer = server.ask("/v1/responses", body.clone()).await;
    assert_eq!(answer["status"], "incomplete");
    assert_eq!(answer["incomplete_details"], json!({"reason": "max_output_tokens"}));
    assert_eq!(
        answer["output"][0]["content"],
        json!([{"type": "reasoning_text", "text": "Hm."}])
    );
    assert_eq!(
        (
            &answer["output"][1]["content"][0]["text"],
            &answer["output"][1]["status"]
        ),
        (&json!("Yes, i"), &json!("incomplete"))
    );
    let events = server.stream("/v1/responses", body).await;
    let kinds = types(&events);
    assert!(kinds.contains(&"response.reasoning_text.delta"), "{kinds:?}");
    assert_eq!(kinds.last(), Some(&"response.incomplete"));
}

#[tokio::test]
async fn a_response_that_fails_says_so_in_its_last_event() {
    let server = server_saying("Yes.", HERMES).await;
    server.log.broken.store(true, Ordering::Relaxed);
    let events = server.stream("/v1/responses", responses_body()).await;
    let last = events.last().unwrap();
    assert_eq!(last["type"], "response.failed");
    assert_eq!(
        (&last["response"]["status"], &last["response"]["error"]["code"]),
        (&json!("failed"), &json!("server_error"))
    );
}

/// What the model would say anyway, and what it never would.
const FORCED: &str = "{\"name\": \"weather\", \"arguments\": {\"city\": \"Bonn\"}}";

#[tokio::test]
async fn a_forced_tool_is_called_and_never_trained_on_for_a_user() {
    let server = server_saying(FORCED, HERMES).await;
    let mut body = chat_body();
    body["tool_choice"] = "required".into();
    let answer = server.ask("/v1/chat/completions", body.clone()).await;
    let choice = &answer["choices"][0];
    let function = json!({"name": "weather", "arguments": "{\"city\": \"Bonn\"}"});
    assert_eq!(choice["message"]["tool_calls"][0]["function"], function);
    assert_eq!(choice["untrainable"], "constrained_sampling");
    let logged = server.log.generations().remove(0);
    assert_eq!(logged.untrainable.as_deref(), Some("constrained_sampling"));
    assert!(logged.sampling.unwrap().constraint.is_some());
    // of the distribution that was sampled from: the first token had few rivals
    assert!(logged.logprobs.iter().all(|logprob| *logprob > -1e-3));

    body["tool_choice"] = json!({"type": "function", "function": {"name": "other"}});
    assert_eq!(server.post_to("/v1/chat/completions", body).await.status(), 400);

    let mut body = messages_body();
    body["tool_choice"] = json!({"type": "tool", "name": "weather"});
    let answer = server.ask("/v1/messages", body.clone()).await;
    assert_eq!(answer["content"][0]["input"], json!({"city": "Bonn"}));
    assert_eq!(
        (answer["content"].as_array().unwrap().len(), &answer["stop_reason"]),
        (1, &json!("tool_use"))
    );
    body["tool_choice"] = json!({"type": "any"});
    let events = server.stream("/v1/messages", body).await;
    assert!(events.iter().any(|e| e["content_block"]["type"] == "tool_use"));

    let mut body = responses_body();
    body["tool_choice"] = json!({"type": "function", "name": "weather"});
    let answer = server.ask("/v1/responses", body).await;
    assert_eq!(answer["output"][0]["type"], "function_call");
}

#[tokio::test]
async fn a_forced_call_of_a_rollout_is_logged_with_its_schema_and_may_be_trained_on() {
    let server = server_saying(FORCED, HERMES).await;
    let mut body = chat_body();
    body["tool_choice"] = "required".into();
    body["metadata"] = json!({"purpose": "rollout", "run_id": Uuid::now_v7()});
    let answer = server.ask("/v1/chat/completions", body.clone()).await;
    assert_eq!(answer["choices"][0].get("untrainable"), None);
    // one that is too long for the log
    let tool = &mut body["tools"][0]["function"]["parameters"];
    tool["description"] = "x".repeat(CONSTRAINT_BYTES_MAX).into();
    let answer = server.ask("/v1/chat/completions", body).await;
    assert_eq!(answer["choices"][0]["untrainable"], "constrained_sampling");

    let logged = server.log.generations();
    assert_eq!(logged[0].untrainable, None);
    let constraint = logged[0].sampling.clone().unwrap().constraint.unwrap();
    assert_eq!(constraint.format, text::constraint::FORMAT);
    let schema: Value = serde_json::from_str(&constraint.schema).unwrap();
    let call = &schema["anyOf"][0]["properties"];
    assert_eq!(
        (&call["name"], &call["arguments"]),
        (&json!({"const": "weather"}), &json!({"type": "object"}))
    );
    assert_eq!(logged[1].untrainable.as_deref(), Some("constrained_sampling"));
    assert_eq!(logged[1].sampling, None);
}

#[tokio::test]
async fn an_answer_follows_the_schema_whatever_the_model_would_say() {
    let server = server_saying("The city is Bonn.", HERMES).await;
    let schema = json!({"type": "object", "properties": {"city": {"enum": ["Bonn", "Rome"]}, "warm": {"type": "boolean"}},
        "required": ["city", "warm"], "additionalProperties": false});
    let chat = json!({"model": "demo", "messages": [{"role": "user", "content": "Where?"}], "max_tokens": 500, "n": 4,
        "seed": 3, "logprobs": true, "top_logprobs": 20,
        "response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": schema}}});
    let answer = server.ask("/v1/chat/completions", chat.clone()).await;
    for choice in answer["choices"].as_array().unwrap() {
        let said: Value = serde_json::from_str(choice["message"]["content"].as_str().unwrap()).unwrap();
        assert!(said["city"] == "Bonn" || said["city"] == "Rome", "{said}");
        assert!(said["warm"].is_boolean());
        assert_eq!(choice["finish_reason"], "stop");
        // what could not come is not listed
        let tokens = choice["logprobs"]["content"].as_array().unwrap();
        let listed = tokens
            .iter()
            .flat_map(|token| token["top_logprobs"].as_array().unwrap());
        assert!(listed.clone().count() > 0 && listed.clone().all(|one| one["logprob"].is_number()));
    }
    assert!(server.log.generations().iter().all(|one| one.untrainable.is_some()));

    let format = json!({"type": "json_schema", "name": "place", "schema": schema});
    let body = json!({"model": "demo", "input": "Where?", "max_output_tokens": 500, "text": {"format": format}});
    let answer = server.ask("/v1/responses", body).await;
    let said = answer["output"][0]["content"][0]["text"].as_str().unwrap();
    assert!(serde_json::from_str::<Value>(said).unwrap()["warm"].is_boolean());
    let body = json!({"model": "demo", "messages": [{"role": "user", "content": "Where?"}], "max_tokens": 500,
        "output_config": {"format": {"type": "json_schema", "schema": schema}}});
    let answer = server.ask("/v1/messages", body).await;
    assert!(answer["content"][0]["text"].as_str().unwrap().contains("city"));

    let mut bad = chat;
    bad["response_format"]["json_schema"]["schema"] = json!({"type": "sandwich"});
    let refused = server.post_to("/v1/chat/completions", bad).await;
    assert_eq!(refused.status(), 400);
    assert!(text(refused).await.contains("the schema cannot be followed"));
}
