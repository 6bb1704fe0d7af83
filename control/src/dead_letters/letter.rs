//! How records of the dead-letter queue are listed. A list never shows an event's content. A record's
//! detail may quote content, because decoders quote what they could not read; such quotes are removed.

use event_log::{DlqRecord, ReplayNote};
use serde::Serialize;
use time::OffsetDateTime;

/// Longest part of a name that is shown, characters.
const NAME_CHARS_MAX: usize = 80;

/// One record of a list.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Letter {
    /// Its position, such as `0/17`.
    pub letter: String,
    #[serde(with = "time::serde::rfc3339::option")]
    pub time: Option<OffsetDateTime>,
    pub reason: String,
    /// Where it came from. `None`: it was made from a row.
    pub topic: Option<String>,
    pub partition: Option<i32>,
    pub offset: Option<i64>,
    /// The identity of its event, if that can be read.
    pub kind: Option<&'static str>,
    pub tenant: Option<String>,
    pub source: Option<String>,
    pub id: Option<String>,
    pub detail: String,
    /// `None`: the queue took it whole.
    pub shortened_from_bytes: Option<u64>,
    /// `None`: it was not put back.
    pub replayed: Option<Replayed>,
}

/// When it was put back, and where to.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Replayed {
    #[serde(with = "time::serde::rfc3339::option")]
    pub time: Option<OffsetDateTime>,
    pub topic: Option<String>,
    pub partition: Option<i32>,
    pub offset: Option<i64>,
    /// A repaired event took its place.
    pub edited: bool,
}

impl Letter {
    pub fn new(record: &DlqRecord, note: Option<&ReplayNote>) -> Self {
        let identity = record.identity();
        let from = record.from.as_ref();
        Self {
            letter: record.position.to_string(),
            time: written(record.time),
            reason: short(&record.reason),
            topic: from.map(|from| short(&from.topic)),
            partition: from.map(|from| from.partition),
            offset: from.map(|from| from.offset),
            kind: identity.as_ref().map(|identity| identity.kind),
            tenant: identity.as_ref().map(|identity| short(&identity.tenant)),
            source: identity.as_ref().map(|identity| short(&identity.source)),
            id: identity.as_ref().map(|identity| short(&identity.id)),
            detail: plain(&without_quotes(&record.detail)),
            shortened_from_bytes: record.shortened.as_ref().map(|original| original.value_bytes),
            replayed: note.map(|note| Replayed {
                time: written(note.time),
                topic: note.to.as_ref().map(|to| short(&to.topic)),
                partition: note.to.as_ref().map(|to| to.partition),
                offset: note.to.as_ref().map(|to| to.offset),
                edited: note.edited,
            }),
        }
    }

    /// `topic/partition/offset`, or that it was made from a row.
    pub fn from(&self) -> String {
        match (&self.topic, self.partition, self.offset) {
            (Some(topic), Some(partition), Some(offset)) => format!("{topic}/{partition}/{offset}"),
            _ => "a row".to_owned(),
        }
    }
}

/// A time that RFC 3339 can write. Whoever writes to the topic chooses it.
fn written(time: Option<OffsetDateTime>) -> Option<OffsetDateTime> {
    time.filter(|time| (0..=9999).contains(&time.year()))
}

/// Without control characters, which could control a terminal or break the line.
pub fn plain(text: &str) -> String {
    text.chars()
        .map(|character| if character.is_control() { '\u{fffd}' } else { character })
        .collect()
}

/// A name of any length, as it is shown.
pub fn short(name: &str) -> String {
    let mut characters = name.chars();
    let mut short = plain(&characters.by_ref().take(NAME_CHARS_MAX).collect::<String>());
    if characters.next().is_some() {
        short.push('…');
    }
    short
}

/// A detail without quoted content. Our rules and the decoders quote received values: text in
/// double quotes, numbers and names in backticks. Backticks around expected values and missing
/// fields are kept, because they quote no content.
fn without_quotes(detail: &str) -> String {
    let mut redacted = String::new();
    let mut rest = detail;
    while let Some(at) = rest.find(['"', '`']) {
        let (before, quoted) = rest.split_at(at);
        redacted.push_str(before);
        let quote = if quoted.starts_with('"') { '"' } else { '`' };
        let length = closing(&quoted[1..], quote);
        let no_content = quote == '`' && (redacted.contains("expected") || redacted.ends_with("missing field "));
        let inner = &quoted[1..1 + length];
        redacted.push(quote);
        redacted.push_str(if no_content { inner } else { "…" });
        redacted.push(quote);
        rest = quoted.get(length + 2..).unwrap_or_default();
    }
    redacted.push_str(rest);
    redacted
}

/// Bytes before the closing quote, or to the end where there is none.
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
    use super::*;
    use crate::dead_letters::tests::record;

    #[test]
    fn a_row_never_has_content() {
        let value =
            r#"{"tenant": "default", "source": "app", "id": "e-1", "generation": {"prompt_ids": "the prompt"}}"#;
        let detail = r#"not a JSON event: invalid type: string "the prompt", expected a sequence at line 1 column 90"#;
        let record = DlqRecord {
            detail: detail.to_owned(),
            content_type: "application/json".to_owned(),
            value: value.as_bytes().to_vec(),
            ..record()
        };
        let row = serde_json::to_value(Letter::new(&record, None)).unwrap();
        assert!(!row.to_string().contains("the prompt"), "{row}");
        assert_eq!((&row["letter"], &row["offset"]), (&"0/17".into(), &2.into()));
        assert_eq!((&row["kind"], &row["id"]), (&"generation".into(), &"e-1".into()));
        assert_eq!(row["time"], "2026-11-21T03:00:00Z");
        assert!(
            row["replayed"].is_null() && row.get("shortened_from_bytes").is_some(),
            "{row}"
        );
    }

    #[test]
    fn a_detail_keeps_only_what_quotes_no_content() {
        for (detail, redacted) in [
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
            assert_eq!(without_quotes(detail), redacted);
        }
    }

    #[test]
    fn names_are_shortened_and_lose_control_characters() {
        assert_eq!(short("a\u{1b}[2Jb\nc"), "a\u{fffd}[2Jb\u{fffd}c");
        assert_eq!(short(&"x".repeat(200)).chars().count(), NAME_CHARS_MAX + 1);
    }
}
