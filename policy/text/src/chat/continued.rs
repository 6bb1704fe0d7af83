//! Continues the last message of a conversation: renders a tag after that message and truncates the
//! result at the tag.

use minijinja::Value;

use super::{Error, REASONING, rendering};

/// Marks the end of the continued text, so that whatever the template adds after it can be removed.
/// The trailing space shows whether the template trims.
const TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// Appends [`TAG`] to `field` of the last message and returns the text before it.
pub fn open_last(messages: &mut [Value], field: &str, source: &str) -> Result<String, Error> {
    let refuse = |reason: String| Err(Error::Conversation(reason));
    let Some(last) = messages.last_mut() else {
        return refuse("the conversation has no messages; send at least one".into());
    };
    let text = last.get_attr(field).unwrap_or_default();
    if text.is_undefined() {
        return refuse(format!("the last message has no `{field}` to continue"));
    }
    // Reasoning has several names; the template reads one of them.
    let fields: Vec<&str> = match REASONING.contains(&field) {
        true => REASONING
            .iter()
            .copied()
            .filter(|&name| last.get_attr(name).is_ok_and(|value| value == text))
            .collect(),
        false => vec![field],
    };
    if !fields.iter().any(|field| source.contains(field)) {
        return refuse(format!(
            "the chat template does not use `{field}`, so it cannot be continued"
        ));
    }
    let tagged = |text: &str| Value::from(format!("{text}{TAG}"));
    if let Some(text) = text.as_str() {
        *last = changed(
            last,
            |key, value| if fields.contains(&key) { tagged(text) } else { value },
        )?;
        return Ok(text.to_string());
    }
    let mut parts: Vec<Value> = text.try_iter().map_err(|error| rendering(&error))?.collect();
    let text_of = |part: &Value| {
        part.get_attr("text")
            .ok()
            .and_then(|text| text.as_str().map(str::to_string))
    };
    let Some((at, text)) = (0..parts.len()).rev().find_map(|at| Some((at, text_of(&parts[at])?))) else {
        return refuse(format!("`{field}` of the last message has no text to continue"));
    };
    parts[at] = changed(
        &parts[at],
        |key, value| if key == "text" { tagged(&text) } else { value },
    )?;
    let parts: Value = parts.into_iter().collect();
    *last = changed(last, |key, value| if key == field { parts.clone() } else { value })?;
    Ok(text)
}

/// A map with some values replaced.
fn changed(map: &Value, change: impl Fn(&str, Value) -> Value) -> Result<Value, Error> {
    let mut fields = Vec::new();
    for key in map.try_iter().map_err(|error| rendering(&error))? {
        let value = map.get_item(&key).map_err(|error| rendering(&error))?;
        let key = key.to_string();
        let value = change(&key, value);
        fields.push((key, value));
    }
    Ok(Value::from_pairs(fields))
}

pub fn cut_at_tag(text: &str, last: &str) -> Result<String, Error> {
    let at = text.rfind(TAG.trim_end()).filter(|_| text.contains(last.trim()));
    let at = at.ok_or_else(|| {
        Error::Conversation("the chat template changes the last message, so that it cannot be continued".into())
    })?;
    Ok(match text[at..].starts_with(TAG) {
        true => text[..at].to_string(),
        // The template trimmed the tag, so it would have trimmed the text.
        false => text[..at].trim_end().to_string(),
    })
}
