use super::*;

fn chat(fields: Value) -> Result<(ChatRequest, Echo), String> {
    let mut body = json!({"model": "demo", "input": "hi"});
    if let (Value::Object(body), Value::Object(fields)) = (&mut body, fields) {
        body.extend(fields);
    }
    let request: ResponsesRequest = serde_json::from_str(&body.to_string()).map_err(|error| error.to_string())?;
    let (chat, echo) = request.into_chat(None).map_err(|problem| problem.to_string())?;
    chat.clone()
        .into_conversation()
        .map_err(|problem| problem.to_string())?;
    Ok((chat, echo))
}

fn messages(fields: Value) -> Value {
    serde_json::to_value(chat(fields).unwrap().0.messages).unwrap()
}

#[test]
fn a_text_is_a_users_message() {
    assert_eq!(messages(json!({})), json!([{"role": "user", "content": "hi"}]));
}

#[test]
fn the_items_of_one_turn_become_one_message() {
    let input = json!([
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}], "id": "msg_1"},
        {"role": "user", "content": "Warm?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}],
         "encrypted_content": null},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{\"city\":\"Bonn\"}", "id": "fc_1"},
        {"type": "function_call", "call_id": "c2", "name": "time", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "21"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noon"}]},
        {"type": "function_call", "call_id": "c3", "name": "time", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c3", "output": "noon"},
        {"role": "assistant", "content": "Yes."},
        {"role": "system", "content": "Later."},
        {"role": "user", "content": "Thanks."},
    ]);
    let call = |id: &str, name: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
    assert_eq!(
        messages(json!({"instructions": "You are an agent.", "input": input})),
        json!([
            {"role": "system", "content": "You are an agent.\n\nBe brief."},
            {"role": "user", "content": "Warm?"},
            {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls":
                [call("c1", "weather", "{\"city\":\"Bonn\"}"), call("c2", "time", "{}")]},
            {"role": "tool", "tool_call_id": "c1", "content": "21"},
            {"role": "tool", "tool_call_id": "c2", "content": "noon"},
            {"role": "assistant", "content": "", "tool_calls": [call("c3", "time", "{}")]},
            {"role": "tool", "tool_call_id": "c3", "content": "noon"},
            {"role": "assistant", "content": "Yes."},
            {"role": "system", "content": "Later."},
            {"role": "user", "content": "Thanks."},
        ])
    );
}

#[test]
fn what_codex_sends_is_understood() {
    let (chat, echo) = chat(json!({
        "tools": [
            {"type": "function", "name": "exec_command", "description": "run", "strict": false, "parameters": {"type": "object"}},
            {"type": "namespace", "name": "multi_agent_v1", "tools": []},
            {"type": "web_search", "external_web_access": false},
        ],
        "tool_choice": "auto", "parallel_tool_calls": true, "reasoning": {"summary": "auto"}, "store": false,
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k", "client_metadata": {"thread_id": "t"},
        "text": {"verbosity": "low"}, "max_output_tokens": 9, "stream": true,
    }))
    .unwrap();
    let tools = serde_json::to_value(chat.tools).unwrap();
    let function = json!({"name": "exec_command", "description": "run", "parameters": {"type": "object"}});
    assert_eq!(tools, json!([{"type": "function", "function": function}]));
    assert_eq!((chat.separate_reasoning, chat.common.max_tokens), (Some(true), Some(9)));
    assert_eq!(echo.tools.len(), 1);
}

#[test]
fn what_is_not_offered_is_refused_by_name() {
    for (fields, expected) in [
        (
            json!({"previous_response_id": "resp_1"}),
            "previous_response_id is not offered",
        ),
        (json!({"conversation": "c"}), "conversation is not offered"),
        (json!({"prompt": {"id": "p"}}), "prompt is not offered"),
        (json!({"background": true}), "background is not offered"),
        (json!({"truncation": "auto"}), "truncation is not offered"),
        (
            json!({"include": ["message.output_text.logprobs"]}),
            "include is not offered",
        ),
        (json!({"tool_choice": {"type": "web_search"}}), "tool_choice must be"),
        (
            json!({"text": {"format": {"type": "grammar"}}}),
            "the type of text.format",
        ),
        (json!({"beams": 3}), "unknown field `beams`"),
        (
            json!({"max_output_tokens": 0}),
            "max_output_tokens is 0; give at least 1",
        ),
        (
            json!({"input": [{"type": "item_reference", "id": "x"}]}),
            "the type \"item_reference\"",
        ),
        (
            json!({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
            "a part of type \"input_image\"",
        ),
        (
            json!({"input": [{"role": "robot", "content": ""}]}),
            "the role \"robot\"",
        ),
    ] {
        let refused = chat(fields).map(drop).unwrap_err();
        assert!(refused.contains(expected), "{refused}");
    }
}
