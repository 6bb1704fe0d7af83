//! Fuzz targets for reading a damaged spool. No event is invented, no intact event is skipped, and
//! every byte belongs to a record, a damaged range or the torn end. See [`crate::fuzz`].

use std::path::Path;

use super::folder::Folder;
use super::segment::{HEADER_BYTES, RECORD_HEADER_BYTES, Scan, SegmentHeader};

const HEADER: SegmentHeader = SegmentHeader {
    number: 7,
    salt: [9; 16],
};

/// A record that was written.
struct Written {
    begin: usize,
    end: usize,
}

/// The first byte selects raw bytes, or a segment of records that is then damaged.
pub(crate) fn segment(input: &[u8]) -> bool {
    let Some((kind, input)) = input.split_first() else {
        return false;
    };
    if kind & 1 == 0 {
        let header = SegmentHeader::decode(input, HEADER.number);
        let records = input.get(HEADER_BYTES..).unwrap_or_default();
        let scan = header.unwrap_or(HEADER).scan(HEADER_BYTES as u64, records);
        check_coverage(&scan, records.len());
        return !scan.records.is_empty();
    }
    let mut input = input.iter().copied();
    let (before, written) = write(&mut input);
    let after = damage(before.clone(), &mut input);
    let scan = HEADER.scan(HEADER_BYTES as u64, &after);
    check_coverage(&scan, after.len());
    let mut found = scan.records.iter().map(|record| record.payload.clone()).peekable();
    for Written { begin, end } in written {
        let intact = after.get(begin..end) == Some(&before[begin..end]);
        let payload = begin + RECORD_HEADER_BYTES..end;
        let read = found.next_if(|record| *record == payload).is_some();
        assert_eq!(read, intact, "the record at {begin}");
    }
    assert_eq!(found.next(), None, "an event that was never written");
    true
}

/// Writes records with lengths and bytes from the input.
fn write(input: &mut impl Iterator<Item = u8>) -> (Vec<u8>, Vec<Written>) {
    let mut bytes = Vec::new();
    let mut written = Vec::new();
    for _ in 0..input.next().unwrap_or(0) % 8 {
        let length = usize::from(input.next().unwrap_or(0));
        let payload: Vec<u8> = input.by_ref().take(length).collect();
        let begin = bytes.len();
        HEADER.append_record(&mut bytes, (HEADER_BYTES + begin) as u64, 1, &payload);
        let end = bytes.len();
        written.push(Written { begin, end });
    }
    (bytes, written)
}

/// Damages bytes without moving any, because records are bound to their positions.
fn damage(mut bytes: Vec<u8>, input: &mut impl Iterator<Item = u8>) -> Vec<u8> {
    while let Some(kind) = input.next() {
        let mut number = || u16::from_le_bytes([input.next().unwrap_or(0), input.next().unwrap_or(0)]);
        let (at, length) = (usize::from(number()), usize::from(number() % 512));
        let at = at % (bytes.len() + 1);
        let end = (at + length).min(bytes.len());
        match kind % 5 {
            0 => bytes.truncate(at),
            1 => bytes[at..end].fill(0),
            2 => bytes
                .iter_mut()
                .skip(at)
                .take(1)
                .for_each(|byte| *byte ^= 1 << (length % 8)),
            3 => {
                let copy = bytes[at..end].to_vec();
                bytes.extend(copy);
            }
            _ => {
                let copy: Vec<u8> = bytes.iter().copied().take(end - at).collect();
                bytes[at..end].copy_from_slice(&copy);
            }
        }
        if bytes.len() > 16 * 1024 {
            break;
        }
    }
    bytes
}

/// Checks that records, damaged ranges and the torn end cover all bytes without overlap.
fn check_coverage(scan: &Scan, length: usize) {
    let records = scan.records.iter();
    let records = records.map(|record| record.payload.start - RECORD_HEADER_BYTES..record.payload.end);
    let mut parts: Vec<_> = records
        .chain(scan.damaged.iter().cloned())
        .chain(scan.torn.clone())
        .collect();
    parts.sort_by_key(|part| part.start);
    let mut at = 0;
    for part in parts {
        assert_eq!(part.start, at, "a gap or an overlap");
        assert!(part.end > at);
        at = part.end;
    }
    assert_eq!(at, length);
}

/// The input is files: one byte of name length, the name, two bytes of content length, the content.
pub(crate) fn folder(input: &[u8]) -> bool {
    let dir = tempfile_dir();
    let mut input = input.iter().copied();
    for _ in 0..4 {
        let length = usize::from(input.next().unwrap_or(0)) % 40;
        let name: Vec<u8> = input.by_ref().take(length).collect();
        let low = input.next().unwrap_or(0);
        let content = usize::from(u16::from_le_bytes([low, input.next().unwrap_or(0)])) % 4096;
        let content: Vec<u8> = input.by_ref().take(content).collect();
        let plain = |byte: &u8| byte.is_ascii_graphic() && *byte != b'/';
        if let Ok(name) = String::from_utf8(name)
            && name.bytes().all(|byte| plain(&byte))
            && !["", ".", ".."].contains(&&*name)
        {
            std::fs::write(dir.path().join(name), content).unwrap();
        }
    }
    let folder = Folder::open(dir.path()).unwrap();
    let first = folder.recover().expect("a spool opens with any files in its folder");
    for found in &first.segments {
        assert!(found.number < first.next_number || found.number == u64::MAX);
        let bytes = folder.read(found.number, 0, found.length).unwrap();
        assert_eq!(bytes.len() as u64, found.length);
    }
    // If the last segment was removed, the one before it is now the last and may be torn too.
    let again = folder.recover().unwrap();
    assert!(again.used <= first.used && again.segments.len() <= first.segments.len());
    !first.segments.is_empty()
}

/// In memory if possible, where flushing is free.
fn tempfile_dir() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() {
        return tempfile::tempdir_in(memory).unwrap();
    }
    tempfile::tempdir().unwrap()
}

/// An input of [`segment`]: raw bytes of a segment with one record.
pub(crate) fn segment_with(payload: &[u8]) -> Vec<u8> {
    let mut bytes = HEADER.encode().to_vec();
    HEADER.append_record(&mut bytes, HEADER_BYTES as u64, 1, payload);
    bytes.insert(0, 0);
    bytes
}
