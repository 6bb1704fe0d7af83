//! A conversation whose last message goes on: rendered with a tag behind that message, and cut at the tag.

use minijinja::Value;

use super::{Error, REASONING, rendering};

/// Stands after the text that is to be continued while the template runs, so that what the template adds can be cut off.
/// Its space tells whether the template trims.
const TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// Puts [`TAG`] after `field` of the last message; returns the text before it.
pub fn open_last(messages: &mut [Value], field: &str, source: &str) -> Result<String, Error> {
    let refuse = |reason: String| Err(Error::Conversation(reason));
    let Some(last) = messages.last_mut() else {
        return refuse("the conversation has no messages; send at least one".into());
    };
    let text = last.get_attr(field).unwrap_or_default();
    if text.is_undefined() {
        return refuse(format!("the last message has no `{field}` that could be continued"));
    }
    // reasoning is there under several names: whichever the template reads is the right one
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
            "the chat template does not use `{field}`, which is to be continued"
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
        return refuse(format!(
            "`{field}` of the last message has no text that could be continued"
        ));
    };
    parts[at] = changed(
        &parts[at],
        |key, value| if key == "text" { tagged(&text) } else { value },
    )?;
    let parts: Value = parts.into_iter().collect();
    *last = changed(last, |key, value| if key == field { parts.clone() } else { value })?;
    Ok(text)
}

/// A map with some values exchanged.
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
        // the template trimmed the tag, so it would have trimmed the text
        false => text[..at].trim_end().to_string(),
    })
}
