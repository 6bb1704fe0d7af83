//! How letters look. A list never shows what an event holds: names and reasons only, and of a reason's words those that
//! are ours, for decoders quote what they could not read.

use std::fmt::Write;

use ingest::log::{Letter, Place, Replayed};
use serde::Serialize;
use serde_json::Value;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// Characters of a name that a list shows.
const NAME_CHARS_MAX: usize = 80;

/// One letter in a list.
#[derive(Debug, Serialize)]
pub struct Row {
    letter: String,
    time: Option<String>,
    reason: String,
    topic: Option<String>,
    partition: Option<i32>,
    offset: Option<i64>,
    kind: Option<&'static str>,
    tenant: Option<String>,
    source: Option<String>,
    id: Option<String>,
    detail: String,
    replayed: Option<Note>,
    #[serde(skip)]
    order: (Option<OffsetDateTime>, Place),
}

#[derive(Debug, Serialize)]
struct Note {
    time: Option<String>,
    topic: Option<String>,
    partition: Option<i32>,
    offset: Option<i64>,
    edited: bool,
}

impl Row {
    pub fn new(letter: &Letter, note: Option<&Replayed>) -> Self {
        let identity = letter.identity();
        let from = letter.from.as_ref();
        let name = |pick: fn(&ingest::log::Identity) -> &str| identity.as_ref().map(|identity| short(pick(identity)));
        Self {
            letter: letter.place.to_string(),
            time: letter.time.and_then(rfc3339),
            reason: short(&letter.reason),
            topic: from.map(|from| short(&from.topic)),
            partition: from.map(|from| from.partition),
            offset: from.map(|from| from.offset),
            kind: identity.as_ref().map(|identity| identity.kind),
            tenant: name(|identity| &identity.tenant),
            source: name(|identity| &identity.source),
            id: name(|identity| &identity.id),
            detail: plain(&without_quotes(&letter.detail)),
            replayed: note.map(|note| Note {
                time: note.time.and_then(rfc3339),
                topic: note.to.as_ref().map(|to| short(&to.topic)),
                partition: note.to.as_ref().map(|to| to.partition),
                offset: note.to.as_ref().map(|to| to.offset),
                edited: note.edited,
            }),
            order: (letter.time, letter.place),
        }
    }

    fn line(&self) -> String {
        let from = match (&self.topic, self.partition, self.offset) {
            (Some(topic), Some(partition), Some(offset)) => format!("{topic}/{partition}/{offset}"),
            _ => "a row".to_owned(),
        };
        let event = match (self.kind, &self.source, &self.id) {
            (Some(kind), Some(source), Some(id)) => format!("{kind} {source} {id}"),
            _ => "no event".to_owned(),
        };
        let replayed = match &self.replayed {
            Some(note) if note.edited => "  [replayed, repaired]",
            Some(_) => "  [replayed]",
            None => "",
        };
        format!(
            "{:<9}  {:<24}  {:<11}  {from}  {event}  {}{replayed}",
            self.letter,
            self.time.as_deref().unwrap_or("-"),
            self.reason,
            self.detail
        )
    }
}

/// The rows in the order of their time, one a line.
pub fn page(rows: &mut [Row], json: bool) -> anyhow::Result<String> {
    rows.sort_by_key(|row| row.order);
    let mut page = String::new();
    for row in rows {
        let line = if json { serde_json::to_string(row)? } else { row.line() };
        page.push_str(&line);
        page.push('\n');
    }
    Ok(page)
}

/// What is known of a letter beside its content.
pub fn heading(letter: &Letter) -> String {
    let mut heading = String::new();
    let mut line = |name: &str, value: &str| {
        let _ = writeln!(heading, "{name:<13} {}", plain(value)); // a string takes everything
    };
    line("letter", &letter.place.to_string());
    line("time", &letter.time.and_then(rfc3339).unwrap_or_default());
    line("reason", &letter.reason);
    line("detail", &letter.detail);
    match &letter.from {
        Some(from) => line("from", &format!("{}/{}/{}", from.topic, from.partition, from.offset)),
        None => line("from", "a row of the tables"),
    }
    line("content-type", &letter.content_type);
    line("key", &hex(&letter.key));
    for (name, value) in &letter.trace {
        line(name, value);
    }
    heading.push_str("What follows may hold user text: keep it where such text may be kept.\n");
    heading
}

/// The event as canonical JSON; other JSON as it is; anything else in hexadecimal.
pub fn content(letter: &Letter) -> anyhow::Result<String> {
    if let Ok(event) = letter.event() {
        return Ok(serde_json::to_string_pretty(&event)?);
    }
    match serde_json::from_slice::<Value>(&letter.value) {
        Ok(value) if letter.is_json() => Ok(serde_json::to_string_pretty(&value)?),
        _ => Ok(hex(&letter.value)),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn rfc3339(time: OffsetDateTime) -> Option<String> {
    time.format(&Rfc3339).ok()
}

/// Without characters that could steer a terminal or break the line.
fn plain(text: &str) -> String {
    text.chars()
        .map(|character| if character.is_control() { '\u{fffd}' } else { character })
        .collect()
}

fn short(name: &str) -> String {
    let mut characters = name.chars();
    let mut short = plain(&characters.by_ref().take(NAME_CHARS_MAX).collect::<String>());
    if characters.next().is_some() {
        short.push('…');
    }
    short
}

/// A detail without what it quotes. Our own rules and the decoders put values that were sent into double quotes, or, if they
/// are numbers and names, into backticks; backticks around what was expected, or around a missing field, are theirs.
fn without_quotes(detail: &str) -> String {
    let mut kept = String::new();
    let mut rest = detail;
    while let Some(at) = rest.find(['"', '`']) {
        let (before, quoted) = rest.split_at(at);
        kept.push_str(before);
        let quote = if quoted.starts_with('"') { '"' } else { '`' };
        let length = closing(&quoted[1..], quote);
        let ours = quote == '`' && (kept.contains("expected") || kept.ends_with("missing field "));
        let inner = &quoted[1..1 + length];
        kept.push(quote);
        kept.push_str(if ours { inner } else { "…" });
        kept.push(quote);
        rest = quoted.get(length + 2..).unwrap_or_default();
    }
    kept.push_str(rest);
    kept
}

/// How many bytes lie before the closing quote, or to the end where none closes.
fn closing(text: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, character) in text.char_indices() {
        match character {
            _ if escaped => escaped = false,
            '\\' if quote == '"' => escaped = true,
            _ if character == quote => return at,
            _ => {}
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use ingest::log::Position;
    use time::macros::datetime;

    use super::*;

    fn letter(content_type: &str, value: &str, detail: &str) -> Letter {
        Letter {
            place: "0/17".parse().unwrap(),
            time: Some(datetime!(2026-11-21 03:00 UTC)),
            reason: "undecodable".to_owned(),
            detail: detail.to_owned(),
            from: Some(Position {
                topic: "springtide.generation.v1".to_owned(),
                partition: 3,
                offset: 99,
            }),
            content_type: content_type.to_owned(),
            trace: Vec::new(),
            key: b"k".to_vec(),
            value: value.as_bytes().to_vec(),
        }
    }

    #[test]
    fn a_list_says_what_where_from_and_why_and_never_what_is_inside() {
        let value =
            r#"{"tenant": "default", "source": "app", "id": "e-1", "generation": {"prompt_ids": "the prompt"}}"#;
        let detail = r#"not a JSON event: invalid type: string "the prompt", expected a sequence at line 1 column 90"#;
        let letter = letter("application/json", value, detail);
        let note = Replayed {
            letter: letter.place,
            time: None,
            to: None,
            edited: true,
        };
        let rows = &mut [Row::new(&letter, None), Row::new(&letter, Some(&note))];
        let text = page(rows, false).unwrap();
        let first = text.lines().next().unwrap();
        assert_eq!(
            first,
            "0/17       2026-11-21T03:00:00Z      undecodable  springtide.generation.v1/3/99  generation app e-1  \
             not a JSON event: invalid type: string \"…\", expected a sequence at line 1 column 90"
        );
        assert!(text.lines().nth(1).unwrap().ends_with("[replayed, repaired]"), "{text}");
        let json = page(rows, true).unwrap();
        assert!(!text.contains("the prompt") && !json.contains("the prompt"));
        let row: Value = serde_json::from_str(json.lines().next().unwrap()).unwrap();
        assert_eq!((&row["letter"], &row["offset"]), (&"0/17".into(), &99.into()));
        assert_eq!(row["replayed"], Value::Null);
    }

    #[test]
    fn a_detail_loses_what_was_sent_and_keeps_what_was_expected() {
        for (detail, kept) in [
            ("missing field `source` at line 1", "missing field `source` at line 1"),
            (
                "invalid type: string \"a \\\"b\\\" c\", expected u32",
                "invalid type: string \"…\", expected u32",
            ),
            (
                "invalid value: integer `-17`, expected u32",
                "invalid value: integer `…`, expected u32",
            ),
            (
                "unknown variant `x`, expected `stop` or `length`",
                "unknown variant `…`, expected `stop` or `length`",
            ),
            ("logprobs: 2 for 3 sampled tokens", "logprobs: 2 for 3 sampled tokens"),
            ("an \"unclosed quote", "an \"…\""),
            ("", ""),
        ] {
            assert_eq!(without_quotes(detail), kept);
        }
    }

    #[test]
    fn a_name_is_cut_and_cannot_steer_a_terminal() {
        assert_eq!(short("a\u{1b}[2Jb\nc"), "a\u{fffd}[2Jb\u{fffd}c");
        assert_eq!(short(&"x".repeat(200)).chars().count(), NAME_CHARS_MAX + 1);
    }

    #[test]
    fn content_is_json_where_it_can_be_and_hexadecimal_elsewhere() {
        assert_eq!(
            content(&letter("application/json", "{\"a\":1}", "")).unwrap(),
            "{\n  \"a\": 1\n}"
        );
        assert_eq!(content(&letter("application/json", "{\"a\"", "")).unwrap(), "7b226122");
        assert_eq!(content(&letter("application/protobuf", "\u{7f}", "")).unwrap(), "7f");
    }

    #[test]
    fn a_heading_warns_of_what_follows() {
        let heading = heading(&letter("application/json", "{}", "d"));
        assert!(heading.contains("springtide.generation.v1/3/99"), "{heading}");
        assert!(heading.contains("may hold user text"), "{heading}");
    }
}
