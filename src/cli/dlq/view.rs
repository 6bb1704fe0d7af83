//! How records of the dead-letter queue are printed.

use std::fmt::Write;

use control::dead_letters::Letter;
use control::dead_letters::letter::plain;
use control::times::rfc3339;
use event_log::DlqRecord;
use serde_json::Value;

use crate::cli::output::table;

/// A table of the records.
pub fn page(letters: &[Letter]) -> String {
    let cells = |letter: &Letter| {
        let event = match (letter.kind, &letter.source, &letter.id) {
            (Some(kind), Some(source), Some(id)) => format!("{kind} {source} {id}"),
            _ => "no event".to_owned(),
        };
        let shortened = letter.shortened_from_bytes.map_or("", |_| "  [shortened]");
        let replayed = match &letter.replayed {
            Some(replayed) if replayed.edited => "  [replayed, repaired]",
            Some(_) => "  [replayed]",
            None => "",
        };
        let detail = format!("{}{shortened}{replayed}", letter.detail);
        let time = letter.time.map(rfc3339).unwrap_or_default();
        [
            letter.letter.clone(),
            time,
            letter.reason.clone(),
            letter.from(),
            event,
            detail,
        ]
    };
    table(
        ["record", "time", "cause", "from", "event", "detail"],
        letters.iter().map(cells),
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
    line("key", &hex::encode(&record.key));
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
        _ => Ok(hex::encode(&record.value)),
    }
}

#[cfg(test)]
mod tests {
    use event_log::{Position, ReplayNote};

    use super::*;
    use time::macros::datetime;

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
            key: b"k".to_vec(),
            value: value.as_bytes().to_vec(),
            trace: Vec::new(),
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
        let rows = [Letter::new(&record, None), Letter::new(&record, Some(&note))];
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
        assert!(!text.contains("the prompt"), "{text}");
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
