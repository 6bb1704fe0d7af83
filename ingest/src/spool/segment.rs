//! The bytes of one segment of the spool; integers are little-endian.
//!
//! ```text
//!   0   8  SPTSPOOL
//!   8   4  format version, 1
//!  12   4  zero
//!  16   8  number of the segment, as in its file name
//!  24  16  salt: random, so that no payload can hold the bytes of a valid record
//!  40      records:
//!       4  EVNT
//!       4  length n of the payload
//!       8  when it was spooled, microseconds since 1970
//!       8  start of BLAKE3(salt, segment number, offset of the record (8), the two fields above)
//!      32  BLAKE3(the 8 bytes above, payload)
//!       n  payload: a springtide.v1.Event in Protobuf
//! ```
//!
//! Pure: nothing here touches a disk. What a record says is believed only under its checksums, which also bind it to its
//! place. The first of them covers the length, so that a record that was cut off and one whose length was damaged differ.

use std::ops::Range;

pub(super) const HEADER_BYTES: usize = 40;
pub(super) const RECORD_HEADER_BYTES: usize = 56;
/// Payload of one record.
pub(super) const PAYLOAD_BYTES_MAX: usize = 16 * 1024 * 1024;
const MAGIC: &[u8; 8] = b"SPTSPOOL";
const VERSION: u32 = 1;
const MARKER: &[u8; 4] = b"EVNT";

/// What every record of a segment is bound to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub number: u64,
    pub salt: [u8; 16],
}

impl Header {
    pub(super) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.number.to_le_bytes());
        bytes[24..].copy_from_slice(&self.salt);
        bytes
    }

    /// `None`: these bytes do not begin a segment of this number.
    pub(super) fn decode(bytes: &[u8], number: u64) -> Option<Self> {
        let salt = bytes.get(24..HEADER_BYTES)?.try_into().ok()?;
        let header = Self { number, salt };
        bytes.starts_with(&header.encode()).then_some(header)
    }

    /// Appends a record that will begin at `offset` of the segment.
    pub(super) fn append(&self, into: &mut Vec<u8>, offset: u64, spooled_at_us: i64, payload: &[u8]) {
        let length = u32::try_from(payload.len()).unwrap_or(u32::MAX); // longer ones are refused before
        let bound = self.bind(offset, length, spooled_at_us);
        into.extend(MARKER);
        into.extend(length.to_le_bytes());
        into.extend(spooled_at_us.to_le_bytes());
        into.extend(bound);
        into.extend(checksum(bound, payload));
        into.extend(payload);
    }

    /// What ties the head of a record to its place.
    fn bind(&self, offset: u64, length: u32, spooled_at_us: i64) -> [u8; 8] {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.salt);
        hasher.update(&self.number.to_le_bytes());
        hasher.update(&offset.to_le_bytes());
        hasher.update(&length.to_le_bytes());
        hasher.update(&spooled_at_us.to_le_bytes());
        let mut bound = [0; 8];
        bound.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
        bound
    }

    /// Reads `bytes`, which begin at `offset` of the segment and go to its end.
    pub(super) fn scan(&self, offset: u64, bytes: &[u8]) -> Scan {
        let mut scan = Scan::default();
        let mut at = 0;
        while at < bytes.len() {
            let Some(record) = self.record(offset, bytes, at) else {
                let Some(next) = self.next(offset, bytes, at + 1) else {
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

    /// Where the first valid record from `at` on begins.
    fn next(&self, offset: u64, bytes: &[u8], at: usize) -> Option<usize> {
        let candidates = bytes.get(at..)?.windows(MARKER.len()).enumerate();
        let mut candidates = candidates.filter(|(_, window)| window == MARKER);
        candidates.find_map(|(past, _)| self.record(offset, bytes, at + past).map(|_| at + past))
    }

    fn record(&self, offset: u64, bytes: &[u8], at: usize) -> Option<Record> {
        let head = self.head(offset, bytes, at)?;
        let begin = at + RECORD_HEADER_BYTES;
        let end = begin.checked_add(usize::try_from(head.length).ok()?)?;
        let payload = bytes.get(begin..end)?;
        (checksum(head.bound, payload) == head.checksum).then_some(Record {
            spooled_at_us: head.spooled_at_us,
            payload: begin..end,
        })
    }

    fn head(&self, offset: u64, bytes: &[u8], at: usize) -> Option<Head> {
        let head = bytes.get(at..at.checked_add(RECORD_HEADER_BYTES)?)?;
        let head = Head {
            length: u32::from_le_bytes(head[4..8].try_into().ok()?),
            spooled_at_us: i64::from_le_bytes(head[8..16].try_into().ok()?),
            bound: head[16..24].try_into().ok()?,
            checksum: head[24..].try_into().ok()?,
        };
        let bound = self.bind(offset + at as u64, head.length, head.spooled_at_us);
        (bytes[at..].starts_with(MARKER) && head.bound == bound).then_some(head)
    }

    /// Whether the end of a segment is what a crash leaves of a record on its way: a beginning whose rest is missing, or
    /// blocks that were never filled. A record is acknowledged only once all of it is on the disk.
    fn is_torn(&self, offset: u64, bytes: &[u8], at: usize) -> bool {
        let rest = &bytes[at..];
        let begun = rest.len().min(MARKER.len());
        if rest.len() < RECORD_HEADER_BYTES && rest[..begun] == MARKER[..begun] {
            return true;
        }
        match self.head(offset, bytes, at) {
            Some(head) => ((rest.len() - RECORD_HEADER_BYTES) as u64) < u64::from(head.length),
            None => rest.iter().all(|byte| *byte == 0),
        }
    }
}

struct Head {
    length: u32,
    spooled_at_us: i64,
    bound: [u8; 8],
    checksum: [u8; 32],
}

fn checksum(bound: [u8; 8], payload: &[u8]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&bound);
    hasher.update(payload);
    *hasher.finalize().as_bytes()
}

/// What bytes of a segment hold. Ranges are into the bytes that were scanned.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Scan {
    pub records: Vec<Record>,
    /// Between valid records, or at the end and complete: may have been acknowledged.
    pub damaged: Vec<Range<usize>>,
    /// At the end, and shorter than it says or never written: was not acknowledged.
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

    const HEADER: Header = Header {
        number: 7,
        salt: [9; 16],
    };

    fn segment(payloads: &[&[u8]]) -> Vec<u8> {
        let mut bytes = HEADER.encode().to_vec();
        for payload in payloads {
            let offset = bytes.len() as u64;
            HEADER.append(&mut bytes, offset, 1, payload);
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
        assert_eq!(Header::decode(&bytes, 7), Some(HEADER));
        let scan = scan(&bytes);
        assert_eq!(payloads(&bytes, &scan), [&b"one"[..], b"", b"three"]);
        assert_eq!((&scan.damaged[..], scan.torn), (&[][..], None));
    }

    #[test]
    fn a_header_of_another_number_version_or_magic_is_none() {
        let bytes = segment(&[]);
        assert_eq!(Header::decode(&bytes, 8), None);
        assert_eq!(Header::decode(&bytes[..39], 7), None);
        for at in 0..24 {
            let mut bytes = bytes.clone();
            bytes[at] ^= 1;
            assert_eq!(Header::decode(&bytes, 7), None, "byte {at}");
        }
    }

    #[test]
    fn a_record_of_another_place_or_segment_is_none() {
        let bytes = segment(&[b"one"]);
        let moved = HEADER.scan(HEADER_BYTES as u64 + 1, &bytes[HEADER_BYTES..]);
        assert_eq!(moved.records, []);
        let other = Header { number: 8, ..HEADER };
        let elsewhere = other.scan(HEADER_BYTES as u64, &bytes[HEADER_BYTES..]);
        assert_eq!(elsewhere.records, []);
    }

    #[test]
    fn a_record_that_is_wholly_there_and_wrong_is_damaged_also_at_the_end() {
        let mut bytes = segment(&[b"one", b"two"]);
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        let scan = scan(&bytes);
        assert_eq!(payloads(&bytes, &scan), [b"one"]);
        assert_eq!((scan.damaged.len(), scan.torn), (1, None));
    }

    #[test]
    fn blocks_that_were_never_filled_are_torn() {
        let mut bytes = segment(&[b"one"]);
        let end = bytes.len() - HEADER_BYTES;
        bytes.extend([0; 100]);
        let scan = scan(&bytes);
        assert_eq!(payloads(&bytes, &scan), [b"one"]);
        assert_eq!(scan.torn, Some(end..end + 100));
    }

    #[test]
    fn a_payload_that_imitates_a_record_is_none_when_the_record_around_it_is_damaged() {
        // It knows everything but the salt.
        let guess = Header {
            salt: [0; 16],
            ..HEADER
        };
        let mut inner = Vec::new();
        guess.append(&mut inner, (HEADER_BYTES + RECORD_HEADER_BYTES) as u64, 1, b"invented");
        let mut bytes = segment(&[&inner, b"two"]);
        bytes[HEADER_BYTES] ^= 1;
        assert_eq!(payloads(&bytes, &scan(&bytes)), [b"two"]);
    }

    proptest! {
        #[test]
        fn cut_anywhere_it_gives_the_whole_records_before_the_cut(
            contents in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..60), 0..6),
            cut in 0_usize..700,
        ) {
            let contents: Vec<&[u8]> = contents.iter().map(Vec::as_slice).collect();
            let bytes = segment(&contents);
            let cut = HEADER_BYTES + cut % (bytes.len() - HEADER_BYTES + 1);
            let mut end = HEADER_BYTES;
            let mut whole = Vec::new();
            for content in contents {
                end += RECORD_HEADER_BYTES + content.len();
                if end <= cut {
                    whole.push(content);
                }
            }
            let bytes = &bytes[..cut];
            let scan = scan(bytes);
            prop_assert_eq!(payloads(bytes, &scan), whole);
            prop_assert!(scan.damaged.is_empty());
        }

        #[test]
        fn a_flipped_byte_costs_one_record_and_is_told(
            contents in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..60), 1..6),
            at in 0_usize..700,
            bit in 0_u32..8,
        ) {
            let contents: Vec<&[u8]> = contents.iter().map(Vec::as_slice).collect();
            let mut bytes = segment(&contents);
            let at = HEADER_BYTES + at % (bytes.len() - HEADER_BYTES);
            bytes[at] ^= 1 << bit;
            let mut end = HEADER_BYTES;
            let hit = contents.iter().position(|content| {
                end += RECORD_HEADER_BYTES + content.len();
                at < end
            });
            let rest: Vec<&[u8]> = contents
                .iter()
                .enumerate()
                .filter(|(index, _)| Some(*index) != hit)
                .map(|(_, content)| *content)
                .collect();
            let scan = scan(&bytes);
            prop_assert_eq!(payloads(&bytes, &scan), rest);
            prop_assert_eq!((scan.damaged.len(), scan.torn), (1, None));
        }

        #[test]
        fn any_bytes_are_read_and_none_is_an_event(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let scan = HEADER.scan(HEADER_BYTES as u64, &bytes);
            prop_assert!(scan.records.is_empty());
        }
    }
}
