//! Renders conversations from standard input, a JSON object a line, and writes the prompt or the
//! refusal of each as a line of JSON. `tools/golden/chat_matrix.py` compares them.

use std::collections::BTreeMap;
use std::io::{BufRead, Write};

use serde::Deserialize;
use text::chat::{Conversation, Templates, Value};
use time::OffsetDateTime;

#[derive(Deserialize)]
struct Case {
    template: String,
    special_tokens: BTreeMap<String, String>,
    messages: Vec<Value>,
    tools: Option<Vec<Value>>,
    #[serde(default)]
    add_generation_prompt: bool,
    continue_final_message: Option<String>,
    #[serde(default)]
    variables: BTreeMap<String, Value>,
    now: i64,
}

fn main() -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let case: Case = serde_json::from_str(&line?)?;
        let conversation = Conversation {
            messages: case.messages,
            tools: case.tools,
            add_generation_prompt: case.add_generation_prompt,
            continue_final_message: case.continue_final_message,
            variables: case.variables,
            now: Some(OffsetDateTime::from_unix_timestamp(case.now)?),
            ..Conversation::default()
        };
        let sources = [("default".to_owned(), case.template)].into();
        let rendered =
            Templates::new(sources, case.special_tokens).and_then(|templates| templates.render(&conversation));
        let answer = match rendered {
            Ok(rendered) => serde_json::json!({"text": rendered.text}),
            Err(error) => serde_json::json!({"error": error.to_string()}),
        };
        writeln!(out, "{answer}")?;
    }
    Ok(())
}
