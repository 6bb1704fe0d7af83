//! How records of the dead-letter queue are shown. A list never shows an event's content. A
//! record's detail may quote content, because decoders quote what they could not read; such quotes
//! are removed.

use std::fmt::Write;

use ingest::log::{DlqRecord, ReplayNote};
use serde_json::{Value, json};

use crate::cli::output::{cell, hex, rfc3339, table};

/// Longest part of a name that is shown, characters.
const NAME_CHARS_MAX: usize = 80;

/// One record of a list, as JSON.
pub fn row(record: &DlqRecord, replayed: Option<&ReplayNote>) -> Value {
    let identity = record.identity();
    let from = record.from.as_ref();
    json!({
        "letter": record.position.to_string(),
        "time": record.time.map(rfc3339),
        "reason": short(&record.reason),
        "topic": from.map(|from| short(&from.topic)),
        "partition": from.map(|from| from.partition),
        "offset": from.map(|from| from.offset),
        "kind": identity.as_ref().map(|identity| identity.kind),
        "tenant": identity.as_ref().map(|identity| short(&identity.tenant)),
        "source": identity.as_ref().map(|identity| short(&identity.source)),
        "id": identity.as_ref().map(|identity| short(&identity.id)),
        "detail": plain(&without_quotes(&record.detail)),
        "shortened_from_bytes": record.shortened.as_ref().map(|original| original.value_bytes),
        "replayed": replayed.map(|replayed| {
            let to = replayed.to.as_ref();
            json!({
                "time": replayed.time.map(rfc3339),
                "topic": to.map(|to| short(&to.topic)),
                "partition": to.map(|to| to.partition),
                "offset": to.map(|to| to.offset),
                "edited": replayed.edited,
            })
        }),
    })
}

/// A table of the rows.
pub fn page(rows: &[Value]) -> String {
    let cells = |row: &Value| {
        let text = |field: &str| cell(&row[field]);
        let from = match row["topic"].is_null() {
            true => "a row".to_owned(),
            false => format!("{}/{}/{}", text("topic"), row["partition"], row["offset"]),
        };
        let event = match row["kind"].is_null() {
            true => "no event".to_owned(),
            false => format!("{} {} {}", text("kind"), text("source"), text("id")),
        };
        let replayed = match row["replayed"]["edited"].as_bool() {
            Some(true) => "  [replayed, repaired]",
            Some(false) => "  [replayed]",
            None => "",
        };
        let shortened = if row["shortened_from_bytes"].is_null() {
            ""
        } else {
            "  [shortened]"
        };
        let detail = text("detail") + shortened + replayed;
        [text("letter"), text("time"), text("reason"), from, event, detail]
    };
    table(
        ["record", "time", "cause", "from", "event", "detail"],
        rows.iter().map(cells),
    )
}

/// What is known of a record besides its content.
pub fn heading(record: &DlqRecord) -> String {
    let mut heading = String::new();
    let mut line = |name: &str, value: &str| {
        let _ = writeln!(heading, "{name:<13} {}", plain(value)); // writing to a String cannot fail
    };
    line("record", &record.position.to_string());
    line("time", &record.time.map(rfc3339).unwrap_or_default());
    line("cause", &record.reason);
    line("detail", &record.detail);
    match &record.from {
        Some(from) => line("from", &format!("{}/{}/{}", from.topic, from.partition, from.offset)),
        None => line("from", "a row of the database"),
    }
    line("content-type", &record.content_type);
    line("key", &hex(&record.key));
    if let Some(original) = &record.shortened {
        let (bytes, kept, digest) = (original.value_bytes, record.value.len(), &original.value_digest);
        line(
            "shortened",
            &format!("{bytes} bytes of BLAKE3 {digest}; the first {kept} follow, the rest is where it is from"),
        );
    }
    for (name, value) in &record.trace {
        line(name, value);
    }
    heading.push_str("The content below may contain user text: keep it where such text may be kept.\n");
    heading
}

/// The event as canonical JSON; other JSON unchanged; anything else in hexadecimal.
pub fn content(record: &DlqRecord) -> anyhow::Result<String> {
    if let Ok(event) = record.event() {
        return Ok(serde_json::to_string_pretty(&event)?);
    }
    match serde_json::from_slice::<Value>(&record.value) {
        Ok(value) if record.is_json() => Ok(serde_json::to_string_pretty(&value)?),
        _ => Ok(hex(&record.value)),
    }
}

/// Without control characters, which could control a terminal or break the line.
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
    use ingest::log::Position;
    use time::macros::datetime;

    use super::*;

    fn record(content_type: &str, value: &str, detail: &str) -> DlqRecord {
        DlqRecord {
            position: "0/17".parse().unwrap(),
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
            shortened: None,
        }
    }

    #[test]
    fn a_list_never_shows_content() {
        let value =
            r#"{"tenant": "default", "source": "app", "id": "e-1", "generation": {"prompt_ids": "the prompt"}}"#;
        let detail = r#"not a JSON event: invalid type: string "the prompt", expected a sequence at line 1 column 90"#;
        let record = record("application/json", value, detail);
        let note = ReplayNote {
            record: record.position,
            time: None,
            to: None,
            edited: true,
        };
        let rows = [row(&record, None), row(&record, Some(&note))];
        let text = page(&rows);
        let line = text
            .lines()
            .nth(1)
            .unwrap()
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ");
        assert_eq!(
            line,
            "0/17 2026-11-21T03:00:00Z undecodable springtide.generation.v1/3/99 generation app e-1 \
             not a JSON event: invalid type: string \"…\", expected a sequence at line 1 column 90"
        );
        assert!(text.lines().nth(2).unwrap().ends_with("[replayed, repaired]"), "{text}");
        assert!(!text.contains("the prompt") && !rows[0].to_string().contains("the prompt"));
        let row = &rows[0];
        assert_eq!((&row["letter"], &row["offset"]), (&"0/17".into(), &99.into()));
        assert_eq!(row["replayed"], Value::Null);
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

    #[test]
    fn content_is_json_or_hexadecimal() {
        assert_eq!(
            content(&record("application/json", "{\"a\":1}", "")).unwrap(),
            "{\n  \"a\": 1\n}"
        );
        assert_eq!(content(&record("application/json", "{\"a\"", "")).unwrap(), "7b226122");
        assert_eq!(content(&record("application/protobuf", "\u{7f}", "")).unwrap(), "7f");
    }

    #[test]
    fn a_heading_warns_that_content_follows() {
        let heading = heading(&record("application/json", "{}", "d"));
        assert!(heading.contains("springtide.generation.v1/3/99"), "{heading}");
        assert!(heading.contains("may contain user text"), "{heading}");
    }
}
