//! The bytes of one segment of the spool; integers are little-endian.
//!
//! ```text
//!   0   8  SPTSPOOL
//!   8   4  format version, 1
//!  12   4  zero
//!  16   8  number of the segment, as in its file name
//!  24  16  random salt, so that no payload can contain a valid record
//!  40      records:
//!       4  EVNT
//!       4  length n of the payload
//!       8  time of spooling, microseconds since 1970
//!       8  binding: the first 8 bytes of BLAKE3(salt, segment number, offset of the record as
//!          8 bytes, length, time)
//!      32  checksum: BLAKE3(binding, payload)
//!       n  payload: a springtide.v1.Event in Protobuf
//! ```
//!
//! A record is valid only if its binding and its checksum match. The binding covers the record's
//! position, so a moved record is invalid. It also covers the length. So a valid binding with too few
//! bytes after it means that the record was cut off, and not that its length is damaged.
//!
//! This module does no I/O.

use std::ops::Range;

pub(super) const HEADER_BYTES: usize = 40;
pub(super) const RECORD_HEADER_BYTES: usize = 56;
/// The largest payload of a record.
pub(super) const RECORD_PAYLOAD_BYTES_MAX: usize = 16 * 1024 * 1024;
const MAGIC: &[u8; 8] = b"SPTSPOOL";
const VERSION: u32 = 1;
const MARKER: &[u8; 4] = b"EVNT";

/// The header of a segment. Every record is bound to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SegmentHeader {
    pub number: u64,
    pub salt: [u8; 16],
}

impl SegmentHeader {
    pub(super) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.number.to_le_bytes());
        bytes[24..].copy_from_slice(&self.salt);
        bytes
    }

    /// `None` if these bytes are not the header of segment `number`.
    pub(super) fn decode(bytes: &[u8], number: u64) -> Option<Self> {
        let salt = bytes.get(24..HEADER_BYTES)?.try_into().ok()?;
        let header = Self { number, salt };
        bytes.starts_with(&header.encode()).then_some(header)
    }

    /// Appends a record that will begin at `offset` of the segment. `Spool::append` has refused
    /// payloads above [`RECORD_PAYLOAD_BYTES_MAX`].
    pub(super) fn append_record(&self, into: &mut Vec<u8>, offset: u64, spooled_at_us: i64, payload: &[u8]) {
        debug_assert!(payload.len() <= RECORD_PAYLOAD_BYTES_MAX);
        let length = payload.len() as u32;
        let binding = self.binding(offset, length, spooled_at_us);
        into.extend(MARKER);
        into.extend(length.to_le_bytes());
        into.extend(spooled_at_us.to_le_bytes());
        into.extend(binding);
        into.extend(checksum(binding, payload));
        into.extend(payload);
    }

    /// The binding of a record that begins at `offset` of the segment.
    fn binding(&self, offset: u64, length: u32, spooled_at_us: i64) -> [u8; 8] {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.salt);
        hasher.update(&self.number.to_le_bytes());
        hasher.update(&offset.to_le_bytes());
        hasher.update(&length.to_le_bytes());
        hasher.update(&spooled_at_us.to_le_bytes());
        let mut binding = [0; 8];
        binding.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
        binding
    }

    /// Finds the records in `bytes`, the part of the segment from `offset` to its end.
    pub(super) fn scan(&self, offset: u64, bytes: &[u8]) -> Scan {
        let mut scan = Scan::default();
        let mut at = 0;
        while at < bytes.len() {
            let Some(record) = self.parse_record(offset, bytes, at) else {
                let Some(next) = self.find_record(offset, bytes, at + 1) else {
                    break;
                };
                scan.damaged.push(at..next);
                at = next;
                continue;
            };
            at = record.payload.end;
            scan.records.push(record);
        }
        if at < bytes.len() {
            let rest = at..bytes.len();
            if self.is_torn(offset, bytes, at) {
                scan.torn = Some(rest);
            } else {
                scan.damaged.push(rest);
            }
        }
        scan
    }

    /// The position of the first valid record at or after `at`.
    fn find_record(&self, offset: u64, bytes: &[u8], at: usize) -> Option<usize> {
        let candidates = bytes.get(at..)?.windows(MARKER.len()).enumerate();
        let mut candidates = candidates.filter(|(_, window)| window == MARKER);
        candidates.find_map(|(skipped, _)| self.parse_record(offset, bytes, at + skipped).map(|_| at + skipped))
    }

    fn parse_record(&self, offset: u64, bytes: &[u8], at: usize) -> Option<Record> {
        let header = self.parse_record_header(offset, bytes, at)?;
        let begin = at + RECORD_HEADER_BYTES;
        let end = begin.checked_add(usize::try_from(header.length).ok()?)?;
        let payload = bytes.get(begin..end)?;
        (checksum(header.binding, payload) == header.checksum).then_some(Record {
            spooled_at_us: header.spooled_at_us,
            payload: begin..end,
        })
    }

    /// `None` if the marker or the binding is wrong.
    fn parse_record_header(&self, offset: u64, bytes: &[u8], at: usize) -> Option<RecordHeader> {
        let fields = bytes.get(at..at.checked_add(RECORD_HEADER_BYTES)?)?;
        let header = RecordHeader {
            length: u32::from_le_bytes(fields[4..8].try_into().ok()?),
            spooled_at_us: i64::from_le_bytes(fields[8..16].try_into().ok()?),
            binding: fields[16..24].try_into().ok()?,
            checksum: fields[24..].try_into().ok()?,
        };
        let binding = self.binding(offset + at as u64, header.length, header.spooled_at_us);
        (fields.starts_with(MARKER) && header.binding == binding).then_some(header)
    }

    /// Whether the end of a segment looks like a write that a crash interrupted: an incomplete
    /// record, or only zeros. Such a record was not acknowledged.
    fn is_torn(&self, offset: u64, bytes: &[u8], at: usize) -> bool {
        let rest = &bytes[at..];
        let length = rest.len().min(MARKER.len());
        if rest.len() < RECORD_HEADER_BYTES && rest[..length] == MARKER[..length] {
            return true;
        }
        match self.parse_record_header(offset, bytes, at) {
            Some(header) => ((rest.len() - RECORD_HEADER_BYTES) as u64) < u64::from(header.length),
            None => rest.iter().all(|byte| *byte == 0),
        }
    }
}

struct RecordHeader {
    length: u32,
    spooled_at_us: i64,
    binding: [u8; 8],
    checksum: [u8; 32],
}

fn checksum(binding: [u8; 8], payload: &[u8]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&binding);
    hasher.update(payload);
    *hasher.finalize().as_bytes()
}

/// The contents of scanned bytes. Ranges are relative to these bytes.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Scan {
    pub records: Vec<Record>,
    /// Ranges that are not valid records and not [`Scan::torn`]: before or between records, or at the
    /// end. They may contain acknowledged events.
    pub damaged: Vec<Range<usize>>,
    /// The range of an incomplete or zeroed end. It was not acknowledged.
    pub torn: Option<Range<usize>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Record {
    pub spooled_at_us: i64,
    pub payload: Range<usize>,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HEADER: SegmentHeader = SegmentHeader {
        number: 7,
        salt: [9; 16],
    };

    fn segment(payloads: &[&[u8]]) -> Vec<u8> {
        let mut bytes = HEADER.encode().to_vec();
        for payload in payloads {
            let offset = bytes.len() as u64;
            HEADER.append_record(&mut bytes, offset, 1, payload);
        }
        bytes
    }

    fn scan(bytes: &[u8]) -> Scan {
        HEADER.scan(HEADER_BYTES as u64, &bytes[HEADER_BYTES..])
    }

    fn payloads<'a>(bytes: &'a [u8], scan: &Scan) -> Vec<&'a [u8]> {
        let records = scan.records.iter();
        records
            .map(|record| &bytes[HEADER_BYTES..][record.payload.clone()])
            .collect()
    }

    #[test]
    fn a_segment_reads_as_it_was_written() {
        let bytes = segment(&[b"one", b"", b"three"]);
        assert_eq!(SegmentHeader::decode(&bytes, 7), Some(HEADER));
        let scan = scan(&bytes);
        assert_eq!(payloads(&bytes, &scan), [&b"one"[..], b"", b"three"]);
        assert_eq!((&scan.damaged[..], scan.torn), (&[][..], None));
    }

    #[test]
    fn a_header_with_another_number_version_or_magic_is_refused() {
        let bytes = segment(&[]);
        assert_eq!(SegmentHeader::decode(&bytes, 8), None);
        assert_eq!(SegmentHeader::decode(&bytes[..39], 7), None);
        for at in 0..24 {
            let mut bytes = bytes.clone();
            bytes[at] ^= 1;
            assert_eq!(SegmentHeader::decode(&bytes, 7), None, "byte {at}");
        }
    }

    #[test]
    fn a_record_at_another_position_or_segment_is_invalid() {
        let bytes = segment(&[b"one"]);
        let moved = HEADER.scan(HEADER_BYTES as u64 + 1, &bytes[HEADER_BYTES..]);
        assert_eq!(moved.records, []);
        let other = SegmentHeader { number: 8, ..HEADER };
        let elsewhere = other.scan(HEADER_BYTES as u64, &bytes[HEADER_BYTES..]);
        assert_eq!(elsewhere.records, []);
    }

    #[test]
    fn a_complete_but_invalid_record_at_the_end_is_damaged_and_not_torn() {
        let mut bytes = segment(&[b"one", b"two"]);
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        let scan = scan(&bytes);
        assert_eq!(payloads(&bytes, &scan), [b"one"]);
        assert_eq!((scan.damaged.len(), scan.torn), (1, None));
    }

    #[test]
    fn zeroed_blocks_at_the_end_are_torn() {
        let mut bytes = segment(&[b"one"]);
        let end = bytes.len() - HEADER_BYTES;
        bytes.extend([0; 100]);
        let scan = scan(&bytes);
        assert_eq!(payloads(&bytes, &scan), [b"one"]);
        assert_eq!(scan.torn, Some(end..end + 100));
    }

    #[test]
    fn a_payload_that_imitates_a_record_is_ignored_when_its_record_is_damaged() {
        // The imitation has the right format and position but cannot know the salt.
        let guess = SegmentHeader {
            salt: [0; 16],
            ..HEADER
        };
        let mut inner = Vec::new();
        guess.append_record(&mut inner, (HEADER_BYTES + RECORD_HEADER_BYTES) as u64, 1, b"invented");
        let mut bytes = segment(&[&inner, b"two"]);
        bytes[HEADER_BYTES] ^= 1;
        assert_eq!(payloads(&bytes, &scan(&bytes)), [b"two"]);
    }

    proptest! {
        #[test]
        fn a_truncated_segment_yields_the_complete_records(
            contents in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..60), 0..6),
            cut in 0_usize..700,
        ) {
            let contents: Vec<&[u8]> = contents.iter().map(Vec::as_slice).collect();
            let bytes = segment(&contents);
            let cut = HEADER_BYTES + cut % (bytes.len() - HEADER_BYTES + 1);
            let mut end = HEADER_BYTES;
            let mut complete = Vec::new();
            for content in contents {
                end += RECORD_HEADER_BYTES + content.len();
                if end <= cut {
                    complete.push(content);
                }
            }
            let bytes = &bytes[..cut];
            let scan = scan(bytes);
            prop_assert_eq!(payloads(bytes, &scan), complete);
            prop_assert!(scan.damaged.is_empty());
        }

        #[test]
        fn a_flipped_bit_damages_exactly_one_record(
            contents in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..60), 1..6),
            at in 0_usize..700,
            bit in 0_u32..8,
        ) {
            let contents: Vec<&[u8]> = contents.iter().map(Vec::as_slice).collect();
            let mut bytes = segment(&contents);
            let at = HEADER_BYTES + at % (bytes.len() - HEADER_BYTES);
            bytes[at] ^= 1 << bit;
            let mut end = HEADER_BYTES;
            let damaged_index = contents.iter().position(|content| {
                end += RECORD_HEADER_BYTES + content.len();
                at < end
            });
            let rest: Vec<&[u8]> = contents
                .iter()
                .enumerate()
                .filter(|(index, _)| Some(*index) != damaged_index)
                .map(|(_, content)| *content)
                .collect();
            let scan = scan(&bytes);
            prop_assert_eq!(payloads(&bytes, &scan), rest);
            prop_assert_eq!((scan.damaged.len(), scan.torn), (1, None));
        }

        #[test]
        fn random_bytes_contain_no_record(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let scan = HEADER.scan(HEADER_BYTES as u64, &bytes);
            prop_assert!(scan.records.is_empty());
        }
    }
}
