//! `springtide run export-tensorboard`: a file of events that TensorBoard reads.
//!
//! ```text
//! file     record*
//! record   length u64 | masked CRC of the length u32 | Event | masked CRC of the Event u32    little-endian
//! ```
//! The file is a TFRecord; the CRC is CRC-32C, masked as TensorFlow's record_writer.h does. An event is
//! the Protobuf message of tensorflow/core/util/event.proto, of which only scalars are written.

use super::super::control_client::ControlClient;
use super::curve;
use anyhow::Context;
use prost::Message;
use runs::api::curve::Point;
use runs::api::runs::Run;
use std::path::{Path, PathBuf};
use time::OffsetDateTime;
use uuid::Uuid;

/// What every file begins with.
const FILE_VERSION: &str = "brain.Event:2";

#[derive(Clone, PartialEq, Message)]
struct Event {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(string, optional, tag = "3")]
    file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    summary: Option<Summary>,
}

#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    value: Vec<Scalar>,
}

#[derive(Clone, PartialEq, Message)]
struct Scalar {
    #[prost(string, tag = "1")]
    tag: String,
    /// One of several kinds of values, so it is written also where it is 0.
    #[prost(float, optional, tag = "2")]
    simple_value: Option<f32>,
}

/// Writes the points of a run into a folder. Returns the file, which has the run's id in its name.
pub(super) async fn export(client: &ControlClient, id: Uuid, dir: &Path) -> anyhow::Result<PathBuf> {
    let run: Run = client.get(&format!("/v1/runs/{id}"), &[]).await?;
    let points = curve::points(client, id).await?;
    let created = seconds(run.created_at);
    let bytes = file(created, points.iter().map(event));
    // TensorBoard reads files whose names contain `tfevents`
    let path = dir.join(format!("events.out.tfevents.{}.{id}", created as i64));
    tokio::fs::create_dir_all(dir)
        .await
        .with_context(|| format!("make the folder {}", dir.display()))?;
    // a reader that watches the folder sees the old file or the new one
    artifact::atomic::replace(&path, &[&bytes]).with_context(|| format!("write {}", path.display()))?;
    Ok(path)
}

fn event(of: &Point) -> Event {
    scalar_event(of.committed_at, of.step, curve::scalars(of))
}

fn scalar_event(at: OffsetDateTime, step: i64, scalars: Vec<(String, f64)>) -> Event {
    let value = scalars.into_iter().map(|(tag, value)| Scalar {
        tag,
        simple_value: Some(value as f32),
    });
    Event {
        wall_time: seconds(at),
        step,
        file_version: None,
        summary: Some(Summary { value: value.collect() }),
    }
}

fn file(created: f64, points: impl Iterator<Item = Event>) -> Vec<u8> {
    let first = Event {
        wall_time: created,
        file_version: Some(FILE_VERSION.to_owned()),
        ..Event::default()
    };
    let mut bytes = Vec::new();
    for event in std::iter::once(first).chain(points) {
        write(&mut bytes, &event);
    }
    bytes
}

fn write(bytes: &mut Vec<u8>, event: &Event) {
    let event = event.encode_to_vec();
    let length = (event.len() as u64).to_le_bytes();
    bytes.extend(length);
    bytes.extend(masked(crc32c(&length)).to_le_bytes());
    bytes.extend(&event);
    bytes.extend(masked(crc32c(&event)).to_le_bytes());
}

fn seconds(at: OffsetDateTime) -> f64 {
    at.unix_timestamp_nanos() as f64 / 1e9
}

/// CRC-32C (Castagnoli), RFC 3720 appendix B.4.
fn crc32c(bytes: &[u8]) -> u32 {
    const REVERSED_POLYNOMIAL: u32 = 0x82f6_3b78;
    let mut crc = !0;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            let mask = (crc & 1).wrapping_neg();
            crc = (crc >> 1) ^ (REVERSED_POLYNOMIAL & mask);
        }
    }
    !crc
}

/// So that a CRC of bytes that contain CRCs is no trivial one.
fn masked(crc: u32) -> u32 {
    const DELTA: u32 = 0xa282_ead8;
    crc.rotate_right(15).wrapping_add(DELTA)
}

#[cfg(test)]
mod tests {
    use super::*;
    use time::macros::datetime;

    #[test]
    fn the_crc_is_that_of_the_rfc() {
        // RFC 3720, B.4: 32 bytes of zeros, of ones, and ascending
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        let ascending: Vec<u8> = (0..32).collect();
        assert_eq!(crc32c(&ascending), 0x46dd_794e);
    }

    #[test]
    fn a_file_has_the_bytes_that_tensorboards_own_writer_gives() {
        let scalars = [("loss", 0.5), ("kl", 0.0), ("reward/mean", -0.25)];
        let scalars = scalars.map(|(name, value)| (name.to_owned(), value)).into();
        let event = scalar_event(datetime!(2026-11-25 12:00:00.5 UTC), 3, scalars);
        let bytes = file(1.0, std::iter::once(event));
        // `RecordWriter` of the package tensorboard 2.21.0 with the same two events
        let expected = concat!(
            "1800000000000000a37f4b2209000000000000f03f1a0d627261696e2e4576656e743a3286bf577a",
            "39000000000000008b0737f10900002070b3c1da4110032a2c0a0b0a046c6f7373150000003f0a090a02",
            "6b6c15000000000a120a0b7265776172642f6d65616e15000080be59c5551e",
        );
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, expected);
    }
}
