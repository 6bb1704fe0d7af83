//! Keeps events that the upstream refused permanently, with the reason: one JSON document per line.
//! The line is flushed before the event counts as forwarded. After a crash a line may appear twice,
//! with the same event id.
//!
//! The file has a limit of its own: a caller whose events are refused takes no room from the others.
//! Beyond half of it the file becomes `refused.old.jsonl`, in place of the one before.

use std::fs::{self, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use serde::Serialize;
use serde_json::Value;

use super::folder::FILE_MODE;

/// One line.
#[derive(Debug, Serialize)]
pub(super) struct Refused {
    /// When it was refused, RFC 3339.
    pub time: String,
    /// The upstream's status. `None` if it was not asked, because this version cannot read the
    /// event.
    pub status: Option<u16>,
    /// The upstream's problem document, or why it was not asked.
    pub problem: Value,
    /// Canonical JSON. If the event cannot be read, its Protobuf bytes in hexadecimal.
    pub event: Value,
}

/// Bytes of the file and the one before it, plus a line.
const BYTES_MAX: u64 = 64 << 20;

/// Appends the line and flushes it. Blocks.
pub(super) fn append(path: &Path, refused: &Refused) -> io::Result<()> {
    append_within(path, refused, BYTES_MAX)
}

fn append_within(path: &Path, refused: &Refused, bytes_max: u64) -> io::Result<()> {
    let mut line = serde_json::to_vec(refused)?;
    line.push(b'\n');
    if fs::metadata(path).is_ok_and(|file| file.len() + line.len() as u64 > bytes_max / 2) {
        fs::rename(path, path.with_extension("old.jsonl"))?;
    }
    let mut options = OpenOptions::new();
    let mut file = options
        .read(true)
        .append(true)
        .create(true)
        .mode(FILE_MODE)
        .open(path)?;
    if ends_mid_line(&mut file)? {
        line.insert(0, b'\n');
    }
    file.write_all(&line)?;
    file.sync_all()
}

/// True after a crash or a full disk.
fn ends_mid_line(file: &mut std::fs::File) -> io::Result<bool> {
    if file.metadata()?.len() == 0 {
        return Ok(false);
    }
    file.seek(SeekFrom::End(-1))?;
    let mut last = [0];
    file.read_exact(&mut last)?;
    Ok(last != *b"\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_refusals_are_kept_within_the_limit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("refused.jsonl");
        for number in 0..1000 {
            let refused = Refused {
                time: String::new(),
                status: Some(409),
                problem: Value::Null,
                event: number.into(),
            };
            append_within(&path, &refused, 4096).unwrap();
        }
        let older = std::fs::read_to_string(dir.path().join("refused.old.jsonl")).unwrap();
        let newer = std::fs::read_to_string(&path).unwrap();
        assert!(older.len() + newer.len() <= 4096 && older.len() > 1024);
        let events: Vec<u64> = [older, newer]
            .iter()
            .flat_map(|text| text.lines())
            .map(|line| serde_json::from_str::<Value>(line).unwrap()["event"].as_u64().unwrap())
            .collect();
        assert_eq!(events.last(), Some(&999));
        assert!(events.windows(2).all(|two| two[1] == two[0] + 1));
    }

    #[test]
    fn a_truncated_line_does_not_break_the_next() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("refused.jsonl");
        std::fs::write(&path, "{\"half\": ").unwrap();
        let refused = Refused {
            time: "2026-11-21T03:00:00Z".to_owned(),
            status: Some(409),
            problem: Value::Null,
            event: Value::Null,
        };
        append(&path, &refused).unwrap();
        append(&path, &refused).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3);
        let line: Value = serde_json::from_str(lines[2]).unwrap();
        assert_eq!(line["status"], 409);
    }
}
