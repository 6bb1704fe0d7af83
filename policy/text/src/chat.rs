//! From messages to a prompt: the chat templates of a version, rendered as `transformers` renders them.
//!
//! A template is a Jinja program that came with the model. It sees plain data, its fuel is bounded, and it reads nothing
//! but what it is given. What is compared with `transformers`, case by case, is in `tests/golden/chat`.

mod continued;
mod marks;
mod python;

use std::collections::BTreeMap;
use std::ops::Range;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::ValueKind;
use minijinja::{AutoEscape, Environment, ErrorKind};
use time::OffsetDateTime;

use artifact::checkpoint::Checkpoint;

/// Plain data as templates see it. Read from JSON with serde, maps keep the order of their keys, which templates can see.
pub use minijinja::Value;

/// Instructions that one rendering may take: far beyond any conversation, well below a second.
const FUEL: u64 = 20_000_000;

/// Why a conversation was not rendered.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the version has no chat template; send a prompt instead of messages")]
    NoTemplate,
    #[error("there is no chat template `{name}`; there are: {there}")]
    UnknownTemplate { name: String, there: String },
    #[error("{file}: {reason}")]
    Malformed { file: &'static str, reason: String },
    #[error("chat template `{name}`: {reason}")]
    Syntax { name: String, reason: String },
    /// The template's own `raise_exception`: what was sent is not what the model was made for.
    #[error("the chat template refuses the conversation: {0}")]
    Refused(String),
    #[error("the chat template cannot render the conversation: {0}")]
    Render(String),
    #[error("{0}")]
    Conversation(String),
}

/// What is rendered. Messages, tools and documents are JSON objects in the form of OpenAI's API.
#[derive(Debug, Clone, Default)]
pub struct Conversation {
    pub messages: Vec<Value>,
    pub tools: Option<Vec<Value>>,
    pub documents: Option<Vec<Value>>,
    /// The template's name; none is `tool_use` where there are tools and such a template, else `default`.
    pub template: Option<String>,
    /// Ends with what opens the model's turn.
    pub add_generation_prompt: bool,
    /// Ends inside the last message, after this field of it (usually `content`), so that the model goes on there.
    pub continue_final_message: Option<String>,
    /// Further variables for the template, `enable_thinking` for one. They win over special tokens of the same name.
    pub variables: BTreeMap<String, Value>,
    /// Find what stands in `{% generation %}` blocks.
    pub mark_assistant: bool,
    /// What `strftime_now` says; none is now, in UTC.
    pub now: Option<OffsetDateTime>,
}

/// A rendered conversation, to be encoded with [`crate::tokenizer::Tokenizer::encode`]: a template writes its own special tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    pub text: String,
    /// Bytes of `text` that the model wrote, where they were asked for.
    pub assistant: Vec<Range<usize>>,
}

/// The chat templates of a version.
#[derive(Debug)]
pub struct Templates {
    /// Sources by name; one without a name is `default`.
    sources: BTreeMap<String, String>,
    environment: Environment<'static>,
    special_tokens: BTreeMap<String, Value>,
}

impl Templates {
    /// Reads `chat_template.jinja`, else `chat_template` of `tokenizer_config.json` (a text or a list of named ones), else that of
    /// `chat_template.json`; special tokens from `tokenizer_config.json` and, what it lacks, `special_tokens_map.json`.
    pub fn from_checkpoint(image: &Checkpoint) -> Result<Self, Error> {
        let config = json(image, "tokenizer_config.json")?;
        let mut sources = BTreeMap::new();
        if let Some(bytes) = image.files.get("chat_template.jinja") {
            sources.insert("default".into(), utf8("chat_template.jinja", bytes)?);
        } else if !absent(&config, "chat_template") {
            sources = named(&config, "tokenizer_config.json")?;
        } else {
            let file = "chat_template.json";
            let json = json(image, file)?;
            if !absent(&json, "chat_template") {
                sources = named(&json, file)?;
            }
        }
        let mut special_tokens = BTreeMap::new();
        for json in [json(image, "special_tokens_map.json")?, config] {
            for name in SPECIAL_TOKENS {
                let value = &json[*name];
                let token = value.as_str().or(value["content"].as_str());
                special_tokens.extend(token.map(|token| (name.to_string(), token.to_string())));
            }
        }
        Templates::new(sources, special_tokens)
    }

    /// Templates by name, and the special tokens by theirs (`bos_token`, …).
    pub fn new(sources: BTreeMap<String, String>, special_tokens: BTreeMap<String, String>) -> Result<Self, Error> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| Error::Render(error.to_string()))?);
        environment.set_fuel(Some(FUEL));
        environment.set_debug(false);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        python::install(&mut environment);
        for (name, source) in &sources {
            environment
                .add_template_owned(name.clone(), marks::with_calls_for_generation_blocks(source))
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

    /// Whether there is nothing to render with.
    pub fn is_empty(&self) -> bool {
        self.sources.is_empty()
    }

    /// Renders a conversation.
    pub fn render(&self, conversation: &Conversation) -> Result<Rendered, Error> {
        let name = self.choose(conversation)?;
        check(conversation)?;
        let mut messages = conversation
            .messages
            .iter()
            .map(message)
            .collect::<Result<Vec<_>, _>>()?;
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
            (marks::GENERATION.into(), marks::generation(between)),
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
            Some(between) => marks::take_out(&text, between),
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
                there: self.sources.keys().cloned().collect::<Vec<_>>().join(", "),
            }),
        }
    }
}

/// None is None: templates ask for that.
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
            return refuse("what the assistant wrote cannot be marked in a conversation whose last message goes on");
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
            "`{name}` is not a variable that can be given to the chat template"
        )),
        None => Ok(()),
    }
}

/// The fields under which a message's reasoning goes; templates of today read the first.
const REASONING: &[&str] = &["reasoning_content", "thinking", "reasoning"];

/// A message as templates expect it: without fields that are null, and its reasoning under both names that are read.
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

fn json(image: &Checkpoint, file: &'static str) -> Result<serde_json::Value, Error> {
    let Some(bytes) = image.files.get(file) else {
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

/// `chat_template`: a text, or a list of `{"name", "template"}`.
fn named(json: &serde_json::Value, file: &'static str) -> Result<BTreeMap<String, String>, Error> {
    let malformed = || Error::Malformed {
        file,
        reason: "`chat_template` is neither a text nor a list of objects with `name` and `template`".into(),
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

/// The error and its line, without the template's text and values.
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
