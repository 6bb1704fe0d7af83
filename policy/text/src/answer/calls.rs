//! How models write calls of tools, and how their text is read.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::Call;

/// A way to write calls. A model was trained on one; its chat template shows which.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// `<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen 2.5 and 3.
    Hermes,
    /// `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`:
    /// Qwen3-Coder. Values have no quotes; the tool's schema says which are JSON.
    QwenXml,
    /// The whole answer is `{"name": …, "parameters": {…}}`, or several with `;` between: Llama 3.
    Llama,
    /// `[TOOL_CALLS]`, then a list of objects, or `NAME[ARGS]{…}` for each call.
    Mistral,
    /// `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`, or version 3's with a JSON block.
    #[serde(rename = "deepseek")]
    DeepSeek,
    /// The whole answer is one `{"name": …, "arguments": {…}}`, or other JSON, because sampling allows
    /// nothing else.
    #[serde(skip)]
    Json,
}

/// What a held text is.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Read {
    /// At least one.
    Calls(Vec<Call>),
    /// More text may make it one.
    Incomplete,
    Malformed,
}

const DEEPSEEK_CALLS: &str = "<｜tool▁calls▁begin｜>";
const DEEPSEEK_CALLS_END: &str = "<｜tool▁calls▁end｜>";
const DEEPSEEK_CALL: &str = "<｜tool▁call▁begin｜>";
const DEEPSEEK_CALL_END: &str = "<｜tool▁call▁end｜>";
const DEEPSEEK_SEPARATOR: &str = "<｜tool▁sep｜>";
const PYTHON_TAG: &str = "<|python_tag|>";
const TOOL_CALLS: &str = "[TOOL_CALLS]";
const CALL_ID: &str = "[CALL_ID]";
const ARGS: &str = "[ARGS]";

impl Format {
    /// The format that a chat template writes calls in.
    pub fn of_template(source: &str) -> Option<Self> {
        let has = |mark: &str| source.contains(mark);
        if has("<arg_key>") {
            // GLM's, which is not read
            None
        } else if has("<function=") {
            Some(Format::QwenXml)
        } else if has("<tool_call>") {
            Some(Format::Hermes)
        } else if has(TOOL_CALLS) {
            Some(Format::Mistral)
        } else if has(DEEPSEEK_CALL) {
            Some(Format::DeepSeek)
        } else if has(PYTHON_TAG) || has(r#"{"name": function name, "parameters""#) {
            Some(Format::Llama)
        } else {
            None
        }
    }

    /// What a call may begin with.
    pub(super) fn marks(self) -> &'static [&'static str] {
        match self {
            Format::Hermes => &["<tool_call>"],
            Format::QwenXml => &["<tool_call>", "<function="],
            Format::Llama => &[PYTHON_TAG],
            Format::Mistral => &[TOOL_CALLS],
            Format::DeepSeek => &[DEEPSEEK_CALLS, DEEPSEEK_CALL],
            Format::Json => &[],
        }
    }

    /// Marks that are special tokens in some tokenizers.
    pub(super) fn special_marks(self) -> &'static [&'static str] {
        match self {
            Format::Hermes | Format::QwenXml => &["<tool_call>", "</tool_call>"],
            Format::Llama => &[PYTHON_TAG],
            Format::Mistral => &[TOOL_CALLS, CALL_ID, ARGS],
            Format::DeepSeek => &[
                DEEPSEEK_CALLS,
                DEEPSEEK_CALLS_END,
                DEEPSEEK_CALL,
                DEEPSEEK_CALL_END,
                DEEPSEEK_SEPARATOR,
            ],
            Format::Json => &[],
        }
    }

    fn end_mark(self) -> Option<&'static str> {
        match self {
            Format::Hermes | Format::QwenXml => Some("</tool_call>"),
            Format::DeepSeek => Some(DEEPSEEK_CALLS_END),
            // calls are the last of an answer
            Format::Llama | Format::Mistral | Format::Json => None,
        }
    }

    pub(super) fn longest_end(self) -> usize {
        self.end_mark().map_or(0, str::len)
    }

    /// The first end of a call in `held`, from byte `from` on.
    pub(super) fn end(self, held: &str, from: usize) -> Option<Range<usize>> {
        let mark = self.end_mark()?;
        let at = from + held.get(from..)?.find(mark)?;
        Some(at..at + mark.len())
    }

    /// Whether an answer that begins like this may be a call without a mark.
    pub(super) fn may_be_bare(self, answer: &str) -> bool {
        matches!(self, Format::Llama | Format::Json) && answer.starts_with('{')
    }

    /// Reads the text between a call's mark and its end.
    pub(super) fn calls(self, block: &str, tools: &Tools) -> Read {
        let read = match self {
            Format::Hermes | Format::QwenXml => tagged(block, tools),
            Format::Llama => objects(block, tools),
            Format::Mistral => mistral(block),
            Format::DeepSeek => deepseek(block),
            Format::Json => bare(block.trim(), tools),
        };
        match read {
            Read::Calls(calls) if !calls.iter().all(has_readable_arguments) => Read::Malformed,
            read => read,
        }
    }
}

/// The tools of a request: the JSON schema of the arguments by name.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Tools(BTreeMap<String, Value>);

impl Tools {
    /// From OpenAI's form: `{"type": "function", "function": {"name", "parameters"}}`.
    pub fn of(tools: &[Value]) -> Self {
        let functions = tools.iter().map(|tool| &tool["function"]);
        let named = functions.filter_map(|function| {
            let name = function["name"].as_str()?;
            Some((name.to_owned(), function["parameters"].clone()))
        });
        Tools(named.collect())
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Names with the schemas of their arguments.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.0.iter().map(|(name, schema)| (name.as_str(), schema))
    }

    /// The kinds of JSON that the schema allows there; empty if it does not say.
    fn kinds(&self, tool: &str, parameter: &str) -> BTreeSet<&str> {
        let mut kinds = BTreeSet::new();
        if let Some(root) = self.0.get(tool) {
            add_kinds(&root["properties"][parameter], root, SCHEMA_DEPTH_MAX, &mut kinds);
        }
        kinds
    }
}

/// Schemas may refer to themselves.
const SCHEMA_DEPTH_MAX: usize = 16;

fn add_kinds<'a>(schema: &'a Value, root: &'a Value, depth: usize, kinds: &mut BTreeSet<&'a str>) {
    let Some(depth) = depth.checked_sub(1) else {
        return;
    };
    match &schema["type"] {
        Value::String(kind) => kinds.extend([kind.as_str()]),
        Value::Array(several) => kinds.extend(several.iter().filter_map(Value::as_str)),
        _ => {
            let target = schema["$ref"]
                .as_str()
                .and_then(|place| root.pointer(place.strip_prefix('#')?));
            let branches = ["anyOf", "oneOf", "allOf"]
                .into_iter()
                .filter_map(|name| schema[name].as_array());
            for schema in target.into_iter().chain(branches.flatten()) {
                add_kinds(schema, root, depth, kinds);
            }
            let values = schema["enum"]
                .as_array()
                .into_iter()
                .flatten()
                .chain(schema.get("const"));
            kinds.extend(values.map(|value| match value {
                Value::Null => "null",
                Value::Bool(_) => "boolean",
                Value::Number(_) => "number",
                Value::String(_) => "string",
                Value::Array(_) => "array",
                Value::Object(_) => "object",
            }));
        }
    }
}

/// Whether the arguments can become an object of values. JSON may have numbers too large for that,
/// such as `1e999`, and may be nested too deeply.
fn has_readable_arguments(call: &Call) -> bool {
    serde_json::from_str::<Map<String, Value>>(&call.arguments).is_ok()
}

#[derive(Deserialize)]
struct JsonCall<'a> {
    name: String,
    #[serde(borrow, alias = "parameters")]
    arguments: Option<&'a RawValue>,
}

/// One call as a JSON object.
fn json(text: &str) -> Result<Call, Read> {
    let read = serde_json::from_str::<JsonCall>(text);
    let call = read.map_err(|error| match error.is_eof() {
        true => Read::Incomplete,
        false => Read::Malformed,
    })?;
    named(call).ok_or(Read::Malformed)
}

/// The only object of an answer. Beside calls, the answer may be other JSON.
fn bare(text: &str, tools: &Tools) -> Read {
    match serde_json::from_str::<JsonCall>(text) {
        Ok(call) if call.arguments.is_none() || !tools.0.contains_key(&call.name) => Read::Malformed,
        Ok(call) => named(call).map_or(Read::Malformed, |call| Read::Calls(vec![call])),
        Err(error) if error.is_eof() => Read::Incomplete,
        Err(_) => Read::Malformed,
    }
}

fn named(JsonCall { name, arguments }: JsonCall) -> Option<Call> {
    let arguments = match arguments.map_or("null", RawValue::get) {
        "null" => "{}".to_owned(),
        object if object.starts_with('{') => object.to_owned(),
        // some models write the object as a text
        text => {
            let object: String = serde_json::from_str(text).ok()?;
            let object = object.trim();
            let valid = object.starts_with('{') && serde_json::from_str::<&RawValue>(object).is_ok();
            valid.then(|| object.to_owned())?
        }
    };
    (!name.is_empty()).then_some(Call { name, arguments })
}

/// Between `<tool_call>` and `</tool_call>`: JSON, or elements.
fn tagged(block: &str, tools: &Tools) -> Read {
    let block = block.trim();
    match block.starts_with('{') {
        true => json(block).map_or_else(|read| read, |call| Read::Calls(vec![call])),
        false => elements(block, tools),
    }
}

/// `<function=NAME>`, its parameters, `</function>`; the mark may have been taken.
fn elements(mut rest: &str, tools: &Tools) -> Read {
    let mut calls = Vec::new();
    while !rest.is_empty() {
        rest = rest.strip_prefix("<function=").unwrap_or(rest);
        // what ends inside a function may go on in the next piece
        let Some((name, mut body)) = rest.split_once('>') else {
            return Read::Incomplete;
        };
        let name = name.trim();
        if name.is_empty() || name.contains(['<', '{', '\n']) {
            return Read::Malformed;
        }
        let mut arguments = Vec::new();
        loop {
            body = body.trim_start();
            if let Some(after) = body.strip_prefix("</function>") {
                rest = after.trim_start();
                break;
            }
            let Some(parameter) = body.strip_prefix("<parameter=") else {
                return match "</function>".starts_with(body) || "<parameter=".starts_with(body) {
                    true => Read::Incomplete,
                    false => Read::Malformed,
                };
            };
            let Some((key, value)) = parameter.split_once('>') else {
                return Read::Incomplete;
            };
            let Some((value, after)) = value.split_once("</parameter>") else {
                return Read::Incomplete;
            };
            arguments.push((key.trim(), argument(value, &tools.kinds(name, key.trim()))));
            body = after;
        }
        let arguments = arguments
            .iter()
            .map(|(key, value)| format!("{}: {value}", Value::from(*key)));
        calls.push(Call {
            name: name.to_owned(),
            arguments: format!("{{{}}}", arguments.collect::<Vec<_>>().join(", ")),
        });
    }
    match calls.is_empty() {
        true => Read::Malformed,
        false => Read::Calls(calls),
    }
}

/// The JSON of an element's text. One line break at each side is the format's. Templates write
/// values as Python does, so models do.
fn argument(value: &str, kinds: &BTreeSet<&str>) -> String {
    let value = value.strip_prefix('\n').unwrap_or(value);
    let value = value.strip_suffix('\n').unwrap_or(value);
    let is_json = !kinds.is_empty() && !kinds.contains("string");
    match (value.trim(), serde_json::from_str::<&RawValue>(value.trim())) {
        ("null" | "None", _) if kinds.contains("null") => "null".to_owned(),
        ("True", _) if is_json && kinds.contains("boolean") => "true".to_owned(),
        ("False", _) if is_json && kinds.contains("boolean") => "false".to_owned(),
        (_, Ok(raw)) if is_json => raw.get().to_owned(),
        _ => Value::from(value).to_string(),
    }
}

/// JSON objects with `;` or white space between. Only names of tools: other JSON is an answer.
fn objects(block: &str, tools: &Tools) -> Read {
    let mut calls = Vec::new();
    let mut rest = block.trim();
    while !rest.is_empty() {
        let mut values = serde_json::Deserializer::from_str(rest).into_iter::<JsonCall>();
        let Some(Ok(call)) = values.next() else {
            return Read::Malformed;
        };
        let known = named(call).filter(|call| tools.0.contains_key(&call.name));
        let Some(call) = known else {
            return Read::Malformed;
        };
        calls.push(call);
        rest = rest[values.byte_offset()..].trim_start_matches(|c: char| c == ';' || c.is_whitespace());
    }
    match calls.is_empty() {
        true => Read::Malformed,
        false => Read::Calls(calls),
    }
}

fn mistral(block: &str) -> Read {
    let list = block.trim();
    if list.starts_with('[') && !list.starts_with(TOOL_CALLS) {
        let calls: Option<Vec<Call>> = match serde_json::from_str::<Vec<JsonCall>>(list) {
            Ok(calls) => calls.into_iter().map(named).collect(),
            Err(_) => None,
        };
        return calls
            .filter(|calls| !calls.is_empty())
            .map_or(Read::Malformed, Read::Calls);
    }
    let mut calls = Vec::new();
    let mut rest = list;
    while !rest.is_empty() {
        rest = rest.strip_prefix(TOOL_CALLS).unwrap_or(rest).trim_start();
        let Some(at) = rest.find('{') else {
            return Read::Malformed;
        };
        let head = rest[..at].trim_end().trim_end_matches(ARGS);
        let name = head.split(CALL_ID).next().unwrap_or_default().trim();
        let mut values = serde_json::Deserializer::from_str(&rest[at..]).into_iter::<&RawValue>();
        let (Some(Ok(arguments)), false) = (values.next(), name.is_empty() || name.contains(char::is_whitespace))
        else {
            return Read::Malformed;
        };
        calls.push(Call {
            name: name.to_owned(),
            arguments: arguments.get().to_owned(),
        });
        rest = rest[at + values.byte_offset()..].trim_start();
    }
    match calls.is_empty() {
        true => Read::Malformed,
        false => Read::Calls(calls),
    }
}

fn deepseek(block: &str) -> Read {
    let mut calls = Vec::new();
    for call in block.split(DEEPSEEK_CALL_END) {
        let call = call.trim().trim_start_matches(DEEPSEEK_CALL).trim();
        if call.is_empty() {
            continue;
        }
        let Some((head, body)) = call.split_once(DEEPSEEK_SEPARATOR) else {
            return Read::Malformed;
        };
        let (name, arguments) = match body.split_once("```json") {
            // version 3: the name after the kind, the arguments in a block
            Some((name, arguments)) if head.trim() == "function" => {
                (name, arguments.trim_end().trim_end_matches("```"))
            }
            _ => (head, body),
        };
        let (name, arguments) = (name.trim(), arguments.trim());
        let object = arguments.starts_with('{') && serde_json::from_str::<&RawValue>(arguments).is_ok();
        if name.is_empty() || !object {
            return Read::Malformed;
        }
        calls.push(Call {
            name: name.to_owned(),
            arguments: arguments.to_owned(),
        });
    }
    match calls.is_empty() {
        true => Read::Malformed,
        false => Read::Calls(calls),
    }
}
