//! Rows of a dataset as one file, in parts of a few megabytes.
//!
//! A file is written while its rows are read, so neither side holds more than a part of it. Writing
//! is work for a thread of its own: Parquet compresses.

use super::rows::Row;
use bytes::Bytes;
use serde::{Deserialize, Serialize};

/// A part is cut when it has at least this many bytes.
const PART_BYTES: usize = 8 << 20;

/// The form of an exported file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// A JSON document per line.
    #[default]
    Jsonl,
    /// Apache Parquet.
    Parquet,
}

impl Format {
    pub fn as_str(self) -> &'static str {
        match self {
            Format::Jsonl => "jsonl",
            Format::Parquet => "parquet",
        }
    }

    pub fn media_type(self) -> &'static str {
        match self {
            Format::Jsonl => "application/jsonl",
            Format::Parquet => "application/vnd.apache.parquet",
        }
    }
}

/// Why a file was not written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("write a row as JSON: {0}")]
    Json(#[from] serde_json::Error),
    #[error("write Parquet: {0}")]
    Parquet(#[from] ::parquet::errors::ParquetError),
}

/// Writes rows. Every call may return a finished part.
pub struct Writer {
    form: Form,
}

enum Form {
    Jsonl(Vec<u8>),
    Parquet(Box<super::parquet::Writer>),
}

impl Writer {
    pub fn new(format: Format) -> Result<Self, Error> {
        let form = match format {
            Format::Jsonl => Form::Jsonl(Vec::new()),
            Format::Parquet => Form::Parquet(Box::new(super::parquet::Writer::new()?)),
        };
        Ok(Writer { form })
    }

    /// Adds rows. Returns a part if one is full.
    pub fn add(&mut self, rows: Vec<Row>) -> Result<Option<Bytes>, Error> {
        let buffer = match &mut self.form {
            Form::Jsonl(buffer) => {
                for row in rows {
                    serde_json::to_writer(&mut *buffer, &row)?;
                    buffer.push(b'\n');
                }
                buffer
            }
            Form::Parquet(writer) => writer.add(rows)?,
        };
        Ok((buffer.len() >= PART_BYTES).then(|| std::mem::take(buffer).into()))
    }

    /// Ends the file. Returns its last part, unless it is empty.
    pub fn finish(self) -> Result<Option<Bytes>, Error> {
        let rest = match self.form {
            Form::Jsonl(buffer) => buffer,
            Form::Parquet(writer) => writer.finish()?,
        };
        Ok((!rest.is_empty()).then(|| rest.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_have_every_value_as_it_was_logged() {
        let mut row = Row::example();
        row.logprobs = vec![-0.1, f32::MIN_POSITIVE];
        let mut writer = Writer::new(Format::Jsonl).unwrap();
        assert!(writer.add(vec![row.clone(), Row::example()]).unwrap().is_none());
        let bytes = writer.finish().unwrap().unwrap();
        let lines: Vec<&str> = std::str::from_utf8(&bytes).unwrap().lines().collect();
        assert_eq!(lines.len(), 2);
        let line: serde_json::Value = serde_json::from_str(lines[0]).unwrap();
        assert_eq!(line["token_ids"], serde_json::json!([4, 5]));
        let logprobs: Vec<f32> = serde_json::from_value(line["logprobs"].clone()).unwrap();
        assert_eq!(logprobs, row.logprobs, "the same bits");
        assert_eq!(line["sampled_at"], "1970-01-01T00:00:00Z");
        assert!(line["train_mask"].is_null() && line["prompt_missing"].is_null());
    }

    #[test]
    fn a_long_file_comes_in_parts() {
        let row = Row {
            prompt_ids: Some(vec![100_000; 1 << 20]),
            ..Row::example()
        };
        let mut writer = Writer::new(Format::Jsonl).unwrap();
        let mut parts: Vec<Bytes> = Vec::new();
        for _ in 0..3 {
            parts.extend(writer.add(vec![row.clone()]).unwrap());
        }
        parts.extend(writer.finish().unwrap());
        assert!(parts.len() > 1);
        assert_eq!(parts.concat().iter().filter(|&&byte| byte == b'\n').count(), 3);
    }
}
