//! Rows of a dataset as Apache Parquet: the same columns as the fields of a JSON line, in row groups
//! that are compressed with zstd.

use super::rows::Row;
use parquet::basic::{Compression, ZstdLevel};
use parquet::column::writer::ColumnWriterImpl;
use parquet::data_type::{
    BoolType, ByteArray, ByteArrayType, DataType, DoubleType, FixedLenByteArray, FixedLenByteArrayType, FloatType,
    Int32Type, Int64Type,
};
use parquet::errors::Result;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedColumnWriter, SerializedFileWriter};
use parquet::schema::parser::parse_message_type;
use serde_json::Value;
use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};
use time::OffsetDateTime;
use uuid::Uuid;

/// A row group ends with this many rows, or about this many bytes of tokens.
const GROUP_ROWS: usize = 10_000;
const GROUP_BYTES: usize = if cfg!(test) { 1 << 20 } else { 64 << 20 };

/// In the order in which [`write_column`] knows them.
const SCHEMA: &str = "message generation {
    required fixed_len_byte_array(16) generation_id (UUID);
    required binary tenant (UTF8);
    required binary policy (UTF8);
    required binary surface (UTF8);
    required binary arm (UTF8);
    required float arm_probability;
    required binary purpose (UTF8);
    required int64 version;
    required int64 version_oldest;
    required binary version_spans (JSON);
    required binary line (UTF8);
    required binary replica (UTF8);
    optional fixed_len_byte_array(16) run_id (UUID);
    optional binary task_id (UTF8);
    optional binary group_id (UTF8);
    required fixed_len_byte_array(16) episode_id (UUID);
    required int32 segment;
    required int32 turn;
    optional fixed_len_byte_array(16) parent_id (UUID);
    required binary user (UTF8);
    required int64 sampled_at (TIMESTAMP(MICROS, true));
    optional group prompt_ids (LIST) { repeated group list { required int32 element; } }
    optional binary prompt_missing (UTF8);
    optional group token_ids (LIST) { repeated group list { required int32 element; } }
    optional group logprobs (LIST) { repeated group list { required float element; } }
    optional group train_mask (LIST) { repeated group list { required boolean element; } }
    required float temperature;
    required float top_p;
    optional binary sampling (JSON);
    required binary finish_reason (UTF8);
    required boolean declined;
    required boolean decline_suppressed;
    optional float exploration_share;
    optional boolean shown;
    optional boolean proven;
    required double reward;
    optional double turn_reward;
    optional int32 episode_turns;
    optional binary signal (UTF8);
    optional int64 feedback_at (TIMESTAMP(MICROS, true));
    required int64 closed_at (TIMESTAMP(MICROS, true));
}";

/// After the others, in the files of a leased cohort.
const TRAINING: &str = "
    required double advantage;
    required double weight;
    required int64 bundle;
    optional binary experts;
}";

/// Writes a file. What is complete can be taken out of its buffer at any time.
pub(crate) struct Writer {
    file: SerializedFileWriter<Shared>,
    written: Shared,
    taken: Vec<u8>,
    waiting: Vec<Row>,
    waiting_bytes: usize,
}

/// Bytes that the file has written and nobody has taken.
#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Vec<u8>>>);

impl Shared {
    fn take(&self) -> Vec<u8> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Write for Shared {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut written = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        written.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Writer {
    pub(super) fn new() -> Result<Self> {
        Self::with(SCHEMA)
    }

    /// A file of a leased cohort.
    pub(crate) fn of_cohort() -> Result<Self> {
        Self::with(&format!("{}{TRAINING}", SCHEMA.trim_end_matches('}')))
    }

    fn with(schema: &str) -> Result<Self> {
        let schema = Arc::new(parse_message_type(schema)?);
        let properties = WriterProperties::builder()
            .set_compression(Compression::ZSTD(ZstdLevel::default()))
            .set_created_by(concat!("springtide ", env!("CARGO_PKG_VERSION")).to_owned());
        let written = Shared::default();
        Ok(Writer {
            file: SerializedFileWriter::new(written.clone(), schema, Arc::new(properties.build()))?,
            written,
            taken: Vec::new(),
            waiting: Vec::new(),
            waiting_bytes: 0,
        })
    }

    /// Adds rows. Returns the bytes that are complete; take them away when there are enough.
    pub(crate) fn add(&mut self, rows: Vec<Row>) -> Result<&mut Vec<u8>> {
        for row in rows {
            let ids = row.prompt_ids.as_ref().map_or(0, Vec::len) + row.token_ids.len() + row.logprobs.len();
            self.waiting_bytes += 4 * ids;
            self.waiting.push(row);
            if self.waiting.len() >= GROUP_ROWS || self.waiting_bytes >= GROUP_BYTES {
                self.write_group()?;
            }
        }
        self.taken.extend(self.written.take());
        Ok(&mut self.taken)
    }

    /// Ends the file. Returns the rest of its bytes.
    pub(crate) fn finish(mut self) -> Result<Vec<u8>> {
        if !self.waiting.is_empty() {
            self.write_group()?;
        }
        self.file.close()?;
        self.taken.extend(self.written.take());
        Ok(self.taken)
    }

    fn write_group(&mut self) -> Result<()> {
        let rows = std::mem::take(&mut self.waiting);
        self.waiting_bytes = 0;
        let mut group = self.file.next_row_group()?;
        let mut index = 0;
        while let Some(mut column) = group.next_column()? {
            write_column(index, &mut column, &rows)?;
            column.close()?;
            index += 1;
        }
        group.close()?;
        Ok(())
    }
}

/// Writes the column at an index of [`SCHEMA`].
fn write_column(index: usize, column: &mut SerializedColumnWriter<'_>, rows: &[Row]) -> Result<()> {
    match index {
        0 => flat::<FixedLenByteArrayType>(column, rows, |row| Some(uuid(row.generation_id))),
        1 => text(column, rows, |row| Some(&row.tenant)),
        2 => text(column, rows, |row| Some(&row.policy)),
        3 => text(column, rows, |row| Some(&row.surface)),
        4 => text(column, rows, |row| Some(&row.arm)),
        5 => flat::<FloatType>(column, rows, |row| Some(row.arm_probability)),
        6 => text(column, rows, |row| Some(&row.purpose)),
        7 => flat::<Int64Type>(column, rows, |row| Some(row.version)),
        8 => flat::<Int64Type>(column, rows, |row| Some(row.version_oldest)),
        9 => flat::<ByteArrayType>(column, rows, |row| Some(json(&row.version_spans))),
        10 => text(column, rows, |row| Some(&row.line)),
        11 => text(column, rows, |row| Some(&row.replica)),
        12 => flat::<FixedLenByteArrayType>(column, rows, |row| row.run_id.map(uuid)),
        13 => text(column, rows, |row| row.task_id.as_deref()),
        14 => text(column, rows, |row| row.group_id.as_deref()),
        15 => flat::<FixedLenByteArrayType>(column, rows, |row| Some(uuid(row.episode_id))),
        16 => flat::<Int32Type>(column, rows, |row| Some(row.segment)),
        17 => flat::<Int32Type>(column, rows, |row| Some(row.turn)),
        18 => flat::<FixedLenByteArrayType>(column, rows, |row| row.parent_id.map(uuid)),
        19 => text(column, rows, |row| Some(&row.user)),
        20 => flat::<Int64Type>(column, rows, |row| Some(microseconds(row.sampled_at))),
        21 => list::<Int32Type, u32>(column, rows, |row| row.prompt_ids.as_deref(), |id| id.cast_signed()),
        22 => text(column, rows, |row| row.prompt_missing),
        23 => list::<Int32Type, u32>(column, rows, |row| Some(&row.token_ids), |id| id.cast_signed()),
        24 => list::<FloatType, f32>(column, rows, |row| Some(&row.logprobs), |logprob| logprob),
        25 => list::<BoolType, bool>(column, rows, |row| row.train_mask.as_deref(), |trained| trained),
        26 => flat::<FloatType>(column, rows, |row| Some(row.temperature)),
        27 => flat::<FloatType>(column, rows, |row| Some(row.top_p)),
        28 => flat::<ByteArrayType>(column, rows, |row| row.sampling.as_ref().map(json)),
        29 => text(column, rows, |row| Some(&row.finish_reason)),
        30 => flat::<BoolType>(column, rows, |row| Some(row.declined)),
        31 => flat::<BoolType>(column, rows, |row| Some(row.decline_suppressed)),
        32 => flat::<FloatType>(column, rows, |row| row.exploration_share),
        33 => flat::<BoolType>(column, rows, |row| row.shown),
        34 => flat::<BoolType>(column, rows, |row| row.proven),
        35 => flat::<DoubleType>(column, rows, |row| Some(row.reward)),
        36 => flat::<DoubleType>(column, rows, |row| row.turn_reward),
        37 => flat::<Int32Type>(column, rows, |row| row.episode_turns),
        38 => text(column, rows, |row| row.signal.as_deref()),
        39 => flat::<Int64Type>(column, rows, |row| row.feedback_at.map(microseconds)),
        40 => flat::<Int64Type>(column, rows, |row| Some(microseconds(row.closed_at))),
        41 => flat::<DoubleType>(column, rows, |row| row.training.as_ref().map(|of| of.advantage)),
        42 => flat::<DoubleType>(column, rows, |row| row.training.as_ref().map(|of| of.weight)),
        43 => flat::<Int64Type>(column, rows, |row| row.training.as_ref().map(|of| of.bundle)),
        _ => flat::<ByteArrayType>(column, rows, |row| {
            let experts = row.training.as_ref().and_then(|of| of.experts.clone());
            experts.map(ByteArray::from)
        }),
    }
}

fn uuid(id: Uuid) -> FixedLenByteArray {
    ByteArray::from(id.as_bytes().to_vec()).into()
}

fn json(value: &Value) -> ByteArray {
    ByteArray::from(value.to_string().into_bytes())
}

fn microseconds(at: OffsetDateTime) -> i64 {
    i64::try_from(at.unix_timestamp_nanos() / 1_000).unwrap_or(i64::MAX)
}

fn text<'r>(
    column: &mut SerializedColumnWriter<'_>,
    rows: &'r [Row],
    value: impl Fn(&'r Row) -> Option<&'r str>,
) -> Result<()> {
    flat::<ByteArrayType>(column, rows, |row| {
        value(row).map(|text| ByteArray::from(text.as_bytes().to_vec()))
    })
}

/// A column with one value per row. A column that is required has no definition levels.
fn flat<'r, T: DataType>(
    column: &mut SerializedColumnWriter<'_>,
    rows: &'r [Row],
    value: impl Fn(&'r Row) -> Option<T::T>,
) -> Result<()> {
    let writer: &mut ColumnWriterImpl<'_, T> = column.typed::<T>();
    let required = writer.get_descriptor().max_def_level() == 0;
    let found: Vec<Option<T::T>> = rows.iter().map(value).collect();
    let levels: Vec<i16> = found.iter().map(|value| i16::from(value.is_some())).collect();
    let values: Vec<T::T> = found.into_iter().flatten().collect();
    writer.write_batch(&values, (!required).then_some(&levels[..]), None)?;
    Ok(())
}

/// A list per row, or null. Definition levels: 0 null, 1 an empty list, 2 an element; repetition
/// levels: 0 the first one of a row, 1 the others.
fn list<'r, T: DataType, V: Copy + 'r>(
    column: &mut SerializedColumnWriter<'_>,
    rows: &'r [Row],
    values_of: impl Fn(&'r Row) -> Option<&'r [V]>,
    convert: impl Fn(V) -> T::T,
) -> Result<()> {
    let (mut values, mut definitions, mut repetitions) = (Vec::new(), Vec::new(), Vec::new());
    for row in rows {
        match values_of(row) {
            None | Some([]) => {
                definitions.push(i16::from(values_of(row).is_some()));
                repetitions.push(0);
            }
            Some(list) => {
                values.extend(list.iter().map(|value| convert(*value)));
                definitions.extend(list.iter().map(|_| 2));
                repetitions.extend((0..list.len()).map(|at| i16::from(at > 0)));
            }
        }
    }
    let writer: &mut ColumnWriterImpl<'_, T> = column.typed::<T>();
    writer.write_batch(&values, Some(&definitions), Some(&repetitions))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::rows::Training;
    use super::*;
    use bytes::Bytes;
    use parquet::file::reader::{FileReader, SerializedFileReader};
    use std::collections::{BTreeMap, BTreeSet};

    /// The columns of each row, as text.
    fn read(bytes: Vec<u8>) -> Vec<BTreeMap<String, String>> {
        let reader = SerializedFileReader::new(Bytes::from(bytes)).unwrap();
        let rows = reader.get_row_iter(None).unwrap().map(Result::unwrap);
        rows.map(|row| {
            let columns = row.get_column_iter();
            columns.map(|(name, value)| (name.clone(), value.to_string())).collect()
        })
        .collect()
    }

    #[test]
    fn a_file_has_every_column_of_every_row() {
        let full = Row {
            run_id: Some(Uuid::from_u128(9)),
            train_mask: Some(vec![true, false]),
            sampling: Some(serde_json::json!({"top_k": 3})),
            shown: Some(false),
            turn_reward: Some(0.5),
            episode_turns: Some(2),
            feedback_at: Some(OffsetDateTime::UNIX_EPOCH),
            ..Row::example()
        };
        let broken = Row {
            prompt_ids: None,
            prompt_missing: Some("parent_missing"),
            token_ids: vec![],
            logprobs: vec![],
            ..Row::example()
        };
        let mut writer = Writer::new().unwrap();
        writer.add(vec![Row::example(), full]).unwrap();
        let mut bytes = std::mem::take(writer.add(vec![broken]).unwrap());
        bytes.extend(writer.finish().unwrap());
        assert_eq!(&bytes[..4], b"PAR1");
        let rows = read(bytes);
        assert_eq!(rows.len(), 3);
        let fields = serde_json::to_value(Row::example()).unwrap();
        let names: BTreeSet<&String> = fields.as_object().unwrap().keys().collect();
        let columns: BTreeSet<&String> = rows[0].keys().collect();
        assert_eq!(columns, names, "the fields of a JSON line");
        for (row, column, value) in [
            (0, "token_ids", "[4, 5]"),
            (0, "prompt_ids", "[1, 2, 3]"),
            (0, "user", "\"u\""),
            (0, "version", "17"),
            (0, "reward", "0.75"),
            (0, "train_mask", "null"),
            (0, "run_id", "null"),
            (1, "train_mask", "[true, false]"),
            (1, "shown", "false"),
            (1, "turn_reward", "0.5"),
            (1, "episode_turns", "2"),
            (2, "prompt_ids", "null"),
            (2, "token_ids", "[]"),
            (2, "prompt_missing", "\"parent_missing\""),
        ] {
            assert_eq!(rows[row][column], value, "{column} of row {row}");
        }
    }

    #[test]
    fn a_cohort_has_what_training_adds() {
        let training = Some(Training {
            advantage: 1.5,
            weight: 2.0,
            bundle: 3,
            experts: Some(Bytes::from_static(b"ids")),
        });
        let mut writer = Writer::of_cohort().unwrap();
        let mut bytes = std::mem::take(
            writer
                .add(vec![Row {
                    training,
                    ..Row::example()
                }])
                .unwrap(),
        );
        bytes.extend(writer.finish().unwrap());
        let rows = read(bytes);
        let of = |column: &str| rows[0][column].as_str();
        assert_eq!(
            (of("advantage"), of("weight"), of("bundle"), of("reward")),
            ("1.5", "2.0", "3", "0.75")
        );
    }

    #[test]
    fn parts_in_their_order_are_the_file() {
        let row = Row {
            prompt_ids: Some((0..1 << 15).map(|at: u32| at.wrapping_mul(2_654_435_761)).collect()),
            ..Row::example()
        };
        let mut writer = Writer::new().unwrap();
        let mut parts: Vec<Vec<u8>> = Vec::new();
        for _ in 0..40 {
            let buffer = writer.add(vec![row.clone()]).unwrap();
            if !buffer.is_empty() {
                parts.push(std::mem::take(buffer));
            }
        }
        parts.push(writer.finish().unwrap());
        assert!(parts.len() > 1, "a row group was written before the end");
        let file = parts.concat();
        let reader = SerializedFileReader::new(Bytes::from(file)).unwrap();
        assert_eq!(reader.metadata().file_metadata().num_rows(), 40);
    }
}
