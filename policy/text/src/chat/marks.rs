//! Finds the assistant's text in `{% generation %}` blocks. They are rendered between two
//! characters that do not occur elsewhere, which are then removed.

use std::ops::Range;

use minijinja::State;

use super::{Conversation, Error, Rendered};

/// `{% generation %}` becomes a block of this filter. It sees and assigns namespaces outside of it,
/// which a call block of minijinja does not.
pub const GENERATION: &str = "springtide_generation";

/// Rewrites `{% generation %}` … `{% endgeneration %}` as a filter block, which minijinja supports.
pub fn with_filters_for_generation_blocks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out += before;
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let inner = &tag[2..end];
        let word = inner.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim();
        match word {
            "generation" => out += &format!("{{%{}%}}", inner.replacen(word, &format!("filter {GENERATION}"), 1)),
            "endgeneration" => out += &format!("{{%{}%}}", inner.replacen(word, "endfilter", 1)),
            _ => out += &tag[..end + 2],
        }
        rest = &tag[end + 2..];
    }
    out + rest
}

/// The filter of a generation block: puts the block between the marks, if there are any.
pub fn generation(state: &State, text: &str) -> String {
    let marks = state.lookup(GENERATION).unwrap_or_default();
    match marks.as_str().map(|marks| marks.chars().collect::<Vec<_>>()).as_deref() {
        Some([start, end]) => format!("{start}{text}{end}"),
        _ => text.to_owned(),
    }
}

/// Two Unicode noncharacters that occur in neither the template nor the conversation.
pub fn unused_characters(source: &str, conversation: &Conversation) -> Result<[char; 2], Error> {
    let Conversation {
        messages,
        tools,
        documents,
        variables,
        ..
    } = conversation;
    let data = serde_json::to_string(&(messages, tools, documents, variables))
        .map_err(|error| Error::Conversation(format!("the conversation is not plain data: {error}")))?;
    let mut free = ('\u{fdd0}'..='\u{fdef}').filter(|&mark| !source.contains(mark) && !data.contains(mark));
    match (free.next(), free.next()) {
        (Some(start), Some(end)) => Ok([start, end]),
        _ => Err(Error::Conversation(
            "the conversation contains all of U+FDD0 to U+FDEF; remove these noncharacters".into(),
        )),
    }
}

/// Removes the marks and returns their positions. A nested block is part of the outer one.
pub fn remove_marks(marked: &str, [start, end]: [char; 2]) -> Rendered {
    let mut text = String::with_capacity(marked.len());
    let mut assistant: Vec<Range<usize>> = Vec::new();
    let (mut depth, mut from) = (0, 0);
    for character in marked.chars() {
        if character == start {
            if depth == 0 {
                from = text.len();
            }
            depth += 1;
        } else if character == end {
            depth -= 1;
            if depth == 0 && from < text.len() {
                assistant.push(from..text.len());
            }
        } else {
            text.push(character);
        }
    }
    Rendered { text, assistant }
}
