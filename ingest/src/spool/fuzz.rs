//! What reading a spool holds whatever happened to its bytes: no event is invented, none that is whole is passed over, and
//! every byte is a record's, damaged, or torn. See [`crate::fuzz`].

use std::path::Path;

use super::folder::Folder;
use super::segment::{HEADER_BYTES, Header, RECORD_HEADER_BYTES, Scan};

const HEADER: Header = Header {
    number: 7,
    salt: [9; 16],
};

struct Written {
    begin: usize,
    end: usize,
}

/// A first byte that says which: bytes as they are, or a segment of records that were then damaged.
pub(crate) fn segment(input: &[u8]) -> bool {
    let Some((kind, input)) = input.split_first() else {
        return false;
    };
    if kind & 1 == 0 {
        let header = Header::decode(input, HEADER.number);
        let records = input.get(HEADER_BYTES..).unwrap_or_default();
        let scan = header.unwrap_or(HEADER).scan(HEADER_BYTES as u64, records);
        tiles(&scan, records.len());
        return !scan.records.is_empty();
    }
    let mut input = input.iter().copied();
    let (before, written) = write(&mut input);
    let after = damage(before.clone(), &mut input);
    let scan = HEADER.scan(HEADER_BYTES as u64, &after);
    tiles(&scan, after.len());
    let mut found = scan.records.iter().map(|record| record.payload.clone()).peekable();
    for Written { begin, end } in written {
        let whole = after.get(begin..end) == Some(&before[begin..end]);
        let payload = begin + RECORD_HEADER_BYTES..end;
        let read = found.next_if(|record| *record == payload).is_some();
        assert_eq!(read, whole, "the record at {begin}");
    }
    assert_eq!(found.next(), None, "an event that nobody wrote");
    true
}

/// Records whose lengths and bytes the input gives.
fn write(input: &mut impl Iterator<Item = u8>) -> (Vec<u8>, Vec<Written>) {
    let mut bytes = Vec::new();
    let mut written = Vec::new();
    for _ in 0..input.next().unwrap_or(0) % 8 {
        let length = usize::from(input.next().unwrap_or(0));
        let payload: Vec<u8> = input.by_ref().take(length).collect();
        let begin = bytes.len();
        HEADER.append(&mut bytes, (HEADER_BYTES + begin) as u64, 1, &payload);
        let end = bytes.len();
        written.push(Written { begin, end });
    }
    (bytes, written)
}

/// Changes that leave every byte in its place: a record is bound to its own.
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

fn tiles(scan: &Scan, length: usize) {
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

/// Files: a byte of the name's length, the name, two bytes of the content's length, the content.
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
    let first = folder.recover().expect("a spool opens whatever lies in it");
    for found in &first.segments {
        assert!(found.number < first.next_number || found.number == u64::MAX);
        let bytes = folder.read(found.number, 0, found.length).unwrap();
        assert_eq!(bytes.len() as u64, found.length);
    }
    // What was before a segment that went is now the last, and may be torn as well.
    let again = folder.recover().unwrap();
    assert!(again.used <= first.used && again.segments.len() <= first.segments.len());
    !first.segments.is_empty()
}

/// In memory where there is such a place: a flush there costs nothing.
fn tempfile_dir() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() {
        return tempfile::tempdir_in(memory).unwrap();
    }
    tempfile::tempdir().unwrap()
}

/// The raw kind of [`segment`]: a segment of one record.
pub(crate) fn whole(payload: &[u8]) -> Vec<u8> {
    let mut bytes = HEADER.encode().to_vec();
    HEADER.append(&mut bytes, HEADER_BYTES as u64, 1, payload);
    bytes.insert(0, 0);
    bytes
}
