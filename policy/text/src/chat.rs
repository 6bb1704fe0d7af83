//! Renders messages to a prompt with a version's chat templates, as `transformers` does.
//!
//! A template is a Jinja program that came with the model. It sees only plain data, and its number
//! of steps is bounded. The cases in `tests/golden/chat` are compared with `transformers`.

mod continued;
mod forms;
mod marks;
mod python;

use std::collections::BTreeMap;
use std::ops::Range;

use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, ErrorKind};
use time::OffsetDateTime;

use crate::answer::Format;
use artifact::checkpoint::Checkpoint;
use forms::Missing;

/// Plain data for templates. Maps read from JSON keep the order of their keys, which templates can
/// see.
pub use minijinja::Value;
pub use minijinja::value::ValueKind;

/// Instructions per rendering: far more than any conversation needs, and well below a second.
const FUEL: u64 = 20_000_000;

/// Why a conversation was not rendered.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the version has no chat template; send a prompt instead of messages")]
    NoTemplate,
    #[error("there is no chat template `{name}`; the version has {available}")]
    UnknownTemplate { name: String, available: String },
    #[error("{file}: {reason}")]
    Malformed { file: &'static str, reason: String },
    #[error("chat template `{name}`: {reason}")]
    Syntax { name: String, reason: String },
    /// From the template's own `raise_exception`: the model does not support the conversation.
    #[error("the chat template refuses the conversation: {0}")]
    Refused(String),
    #[error("the chat template cannot render the conversation: {0}")]
    Render(String),
    #[error("{0}")]
    Conversation(String),
}

/// What to render. Messages, tools and documents are JSON objects as in OpenAI's API.
#[derive(Debug, Clone, Default)]
pub struct Conversation {
    pub messages: Vec<Value>,
    pub tools: Option<Vec<Value>>,
    pub documents: Option<Vec<Value>>,
    /// The template's name. By default `tool_use` if there are tools and such a template, else
    /// `default`.
    pub template: Option<String>,
    /// Whether to end with the start of the model's turn.
    pub add_generation_prompt: bool,
    /// Ends inside the last message, after this field (usually `content`), so that the model
    /// continues it.
    pub continue_final_message: Option<String>,
    /// More variables, such as `enable_thinking`. They override special tokens of the same name.
    pub variables: BTreeMap<String, Value>,
    /// Whether to find the text in `{% generation %}` blocks.
    pub mark_assistant: bool,
    /// The time for `strftime_now`; by default the current time in UTC.
    pub now: Option<OffsetDateTime>,
}

/// A rendered conversation. Encode it with [`crate::tokenizer::Tokenizer::encode`], because
/// templates write special tokens themselves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    pub text: String,
    /// The bytes of `text` that the model wrote, if requested.
    pub assistant: Vec<Range<usize>>,
}

/// The chat templates of a version.
#[derive(Debug)]
pub struct Templates {
    /// Sources by name; an unnamed one is `default`.
    sources: BTreeMap<String, String>,
    environment: Environment<'static>,
    special_tokens: BTreeMap<String, Value>,
}

impl Templates {
    /// Reads templates from the first of `chat_template.jinja`, `chat_template` in
    /// `tokenizer_config.json` (a string or a list of named ones) and `chat_template` in
    /// `chat_template.json`. Reads special tokens from `tokenizer_config.json`, or else
    /// `special_tokens_map.json`.
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<Self, Error> {
        let config = json(checkpoint, "tokenizer_config.json")?;
        let mut sources = BTreeMap::new();
        if let Some(bytes) = checkpoint.files.get("chat_template.jinja") {
            sources.insert("default".into(), utf8("chat_template.jinja", bytes)?);
        } else if !absent(&config, "chat_template") {
            sources = named(&config, "tokenizer_config.json")?;
        } else {
            let file = "chat_template.json";
            let json = json(checkpoint, file)?;
            if !absent(&json, "chat_template") {
                sources = named(&json, file)?;
            }
        }
        let mut special_tokens = BTreeMap::new();
        for json in [json(checkpoint, "special_tokens_map.json")?, config] {
            for name in SPECIAL_TOKENS {
                let value = &json[*name];
                let token = value.as_str().or(value["content"].as_str());
                special_tokens.extend(token.map(|token| (name.to_string(), token.to_string())));
            }
        }
        Templates::new(sources, special_tokens)
    }

    /// From templates and special tokens (`bos_token`, …), both by name.
    pub fn new(sources: BTreeMap<String, String>, special_tokens: BTreeMap<String, String>) -> Result<Self, Error> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| Error::Render(error.to_string()))?);
        environment.set_fuel(Some(FUEL));
        environment.set_debug(false);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        python::install(&mut environment);
        environment.add_filter(marks::GENERATION, marks::generation);
        for (name, source) in &sources {
            // as Jinja reads line ends
            let source = source.replace("\r\n", "\n").replace('\r', "\n");
            environment
                .add_template_owned(name.clone(), marks::with_filters_for_generation_blocks(&source))
                .map_err(|error| Error::Syntax {
                    name: name.clone(),
                    reason: describe(&error),
                })?;
        }
        let special_tokens = special_tokens.into_iter().map(|(name, token)| (name, token.into()));
        Ok(Templates {
            sources,
            environment,
            special_tokens: special_tokens.collect(),
        })
    }

    /// Whether there are no templates.
    pub fn is_empty(&self) -> bool {
        self.sources.is_empty()
    }

    /// How the templates write calls of tools; `None`: in no known way.
    pub fn call_format(&self) -> Option<Format> {
        let source = self.sources.get("tool_use").or(self.sources.get("default"))?;
        Format::of_template(source)
    }

    /// Renders a conversation, in the form that the template reads ([`forms`]).
    pub fn render(&self, conversation: &Conversation) -> Result<Rendered, Error> {
        let name = self.choose(conversation)?;
        check(conversation)?;
        let source = &self.sources[name];
        let messages = conversation.messages.iter().map(|value| {
            let message = message(value)?;
            Ok(forms::with_known_role(message, source))
        });
        let messages = messages.collect::<Result<Vec<_>, Error>>()?;
        let mut failed = None;
        let mut best: Option<(Missing, Rendered)> = None;
        for forms in forms::of(&messages) {
            for form in forms {
                let messages: Vec<Value> = messages.iter().map(|message| form.of_message(message)).collect();
                match self.render_messages(name, messages.clone(), conversation) {
                    Err(error) => {
                        let may_want_another = matches!(error, Error::Render(_));
                        failed = failed.or(Some(error));
                        if !may_want_another {
                            break;
                        }
                    }
                    Ok(rendered) => {
                        let missing = Missing::of(&messages, &rendered.text);
                        if missing.is_nothing() {
                            return Ok(rendered);
                        }
                        if best.as_ref().is_none_or(|(least, _)| missing < *least) {
                            best = Some((missing, rendered));
                        }
                        break;
                    }
                }
            }
        }
        match (best, failed) {
            (Some((missing, rendered)), _) => missing.refuse(&conversation.messages).map(|()| rendered),
            (None, failed) => Err(failed.unwrap_or(Error::NoTemplate)),
        }
    }

    fn render_messages(
        &self,
        name: &str,
        mut messages: Vec<Value>,
        conversation: &Conversation,
    ) -> Result<Rendered, Error> {
        let continued = match &conversation.continue_final_message {
            Some(field) => Some(continued::open_last(&mut messages, field, &self.sources[name])?),
            None => None,
        };
        let between = match conversation.mark_assistant {
            true => Some(marks::unused_characters(&self.sources[name], conversation)?),
            false => None,
        };

        let mut variables = self.special_tokens.clone();
        variables.extend(conversation.variables.clone());
        let now = conversation.now;
        variables.extend([
            ("messages".into(), messages.into_iter().collect()),
            ("tools".into(), list(conversation.tools.as_deref())),
            ("documents".into(), list(conversation.documents.as_deref())),
            (
                "add_generation_prompt".into(),
                conversation.add_generation_prompt.into(),
            ),
            (
                "strftime_now".into(),
                Value::from_function(move |format: &str| {
                    python::strftime(now.unwrap_or_else(OffsetDateTime::now_utc), format)
                }),
            ),
            (
                marks::GENERATION.into(),
                between.map_or(Value::UNDEFINED, |marks| String::from_iter(marks).into()),
            ),
        ]);
        let template = self.environment.get_template(name).map_err(|error| rendering(&error))?;
        let text = template.render(variables).map_err(|error| rendering(&error))?;

        if let Some(text_of_last) = continued {
            let text = continued::cut_at_tag(&text, &text_of_last)?;
            return Ok(Rendered {
                text,
                assistant: vec![],
            });
        }
        Ok(match between {
            Some(between) => marks::remove_marks(&text, between),
            None => Rendered {
                text,
                assistant: vec![],
            },
        })
    }

    fn choose<'a>(&'a self, conversation: &'a Conversation) -> Result<&'a str, Error> {
        let wanted = match &conversation.template {
            Some(name) => name,
            None if conversation.tools.is_some() && self.sources.contains_key("tool_use") => "tool_use",
            None => "default",
        };
        match self.sources.get_key_value(wanted) {
            Some((name, _)) => Ok(name),
            None if self.is_empty() => Err(Error::NoTemplate),
            None => Err(Error::UnknownTemplate {
                name: wanted.into(),
                available: self.sources.keys().cloned().collect::<Vec<_>>().join(", "),
            }),
        }
    }
}

/// Templates test for `None`.
fn list(items: Option<&[Value]>) -> Value {
    items.map_or(Value::from(()), Value::from)
}

/// The named special tokens that templates may use.
const SPECIAL_TOKENS: &[&str] = &[
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];

fn check(conversation: &Conversation) -> Result<(), Error> {
    let refuse = |reason: &str| Err(Error::Conversation(reason.into()));
    if conversation.messages.is_empty() {
        return refuse("the conversation has no messages; send at least one");
    }
    if conversation.continue_final_message.is_some() {
        if conversation.add_generation_prompt {
            return refuse("continue_final_message and add_generation_prompt exclude each other; choose one");
        }
        if conversation.mark_assistant {
            return refuse("the assistant's text cannot be marked if continue_final_message is set");
        }
    }
    let own = [
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "strftime_now",
        marks::GENERATION,
    ];
    match own.iter().find(|&&name| conversation.variables.contains_key(name)) {
        Some(name) => refuse(&format!(
            "`{name}` is set by the server; rename the chat template variable"
        )),
        None => Ok(()),
    }
}

/// The fields for a message's reasoning. Current templates read the first.
const REASONING: &[&str] = &["reasoning_content", "thinking", "reasoning"];

/// A message as templates expect it: without null fields, and with its reasoning under both names
/// in use.
fn message(value: &Value) -> Result<Value, Error> {
    if value.kind() != ValueKind::Map {
        return Err(Error::Conversation(format!(
            "a message is {}; each must be an object with a role",
            value.kind()
        )));
    }
    let mut fields: Vec<(String, Value)> = Vec::new();
    for key in value.try_iter().map_err(|error| rendering(&error))? {
        let field = value.get_item(&key).map_err(|error| rendering(&error))?;
        if !field.is_none() {
            fields.push((key.to_string(), field));
        }
    }
    let find = |fields: &[(String, Value)], name: &str| fields.iter().position(|(key, _)| key == name);
    if let Some(at) = REASONING.iter().find_map(|name| find(&fields, name)) {
        let reasoning = fields[at].1.clone();
        match find(&fields, "reasoning_content") {
            Some(at) => fields[at].1 = reasoning.clone(),
            None => fields.push(("reasoning_content".into(), reasoning.clone())),
        }
        if find(&fields, "thinking").is_none() {
            fields.insert(0, ("thinking".into(), reasoning));
        }
    }
    Ok(Value::from_pairs(fields))
}

fn json(checkpoint: &Checkpoint, file: &'static str) -> Result<serde_json::Value, Error> {
    let Some(bytes) = checkpoint.files.get(file) else {
        return Ok(serde_json::Value::Null);
    };
    serde_json::from_slice(bytes).map_err(|error| Error::Malformed {
        file,
        reason: error.to_string(),
    })
}

fn absent(json: &serde_json::Value, field: &str) -> bool {
    json[field].is_null()
}

fn utf8(file: &'static str, bytes: &[u8]) -> Result<String, Error> {
    String::from_utf8(bytes.to_vec()).map_err(|error| Error::Malformed {
        file,
        reason: error.to_string(),
    })
}

/// `chat_template`: a string, or a list of `{"name", "template"}`.
fn named(json: &serde_json::Value, file: &'static str) -> Result<BTreeMap<String, String>, Error> {
    let malformed = || Error::Malformed {
        file,
        reason: "`chat_template` must be a string or a list of objects with `name` and `template`".into(),
    };
    match &json["chat_template"] {
        serde_json::Value::String(source) => Ok([("default".to_string(), source.clone())].into()),
        serde_json::Value::Array(templates) => templates
            .iter()
            .map(
                |template| match (template["name"].as_str(), template["template"].as_str()) {
                    (Some(name), Some(source)) => Ok((name.to_string(), source.to_string())),
                    _ => Err(malformed()),
                },
            )
            .collect(),
        _ => Err(malformed()),
    }
}

fn rendering(error: &minijinja::Error) -> Error {
    match python::raised(error) {
        Some(message) => Error::Refused(message.to_string()),
        None if error.kind() == ErrorKind::OutOfFuel => {
            Error::Render("it takes too many steps; send a shorter conversation".into())
        }
        None => Error::Render(describe(error)),
    }
}

/// The error and its line, without the template's text or values.
fn describe(error: &minijinja::Error) -> String {
    match error.line() {
        Some(line) => format!("line {line}: {}{}", error.kind(), detail(error)),
        None => format!("{}{}", error.kind(), detail(error)),
    }
}

fn detail(error: &minijinja::Error) -> String {
    error.detail().map(|detail| format!(": {detail}")).unwrap_or_default()
}

#[cfg(test)]
mod tests;
