//! What a delta makes of a version's files, for readers that have no tensors: header and index of the
//! delta, and the payloads of its files.

use std::ops::Range;

use bytes::Bytes;

use super::apply::decode_file;
use super::index::{self, File, HEADER_BYTES, Head};
use super::{Error, in_entry, malformed, result_index};
use crate::checkpoint::Contents;

/// Bytes at the beginning of a delta that say how long its head is.
pub const PREFIX_BYTES: usize = HEADER_BYTES;

/// The verified header and index of a delta.
#[derive(Debug)]
pub struct DeltaHead(Head);

impl DeltaHead {
    /// Bytes of the head, by the first [`PREFIX_BYTES`] of the delta.
    pub fn length(prefix: &[u8]) -> Result<u64, Error> {
        let length = prefix.get(80..88).and_then(|length| length.first_chunk());
        let length = length.ok_or(Error::Checksum)?;
        (HEADER_BYTES as u64)
            .checked_add(u64::from_le_bytes(*length))
            .ok_or(Error::Checksum)
    }

    pub fn from_bytes(head: &[u8]) -> Result<Self, Error> {
        if head.len() < HEADER_BYTES {
            return Err(Error::Checksum);
        }
        index::open_head(head).map(DeltaHead)
    }

    /// What the delta makes of a version of these contents. Only a delta of that version leads to the
    /// content hash that it names.
    pub fn result(&self, contents: &Contents) -> Result<Contents, Error> {
        result_index::of(&self.0.header, &self.0.index, &contents.0, false).map(Contents)
    }

    /// The changed files, and where their payloads are, counted from the first payload. `None`: removed.
    pub fn files(&self) -> impl Iterator<Item = (&str, Option<Range<u64>>)> {
        let files = &self.0.index.files;
        let stored = |file: &Option<File>| file.as_ref().map_or(0, |file| file.stored);
        // the files' payloads are the last ones, and `open_head` has checked the sum
        let mut next = self.0.payload_bytes - files.iter().map(|entry| stored(&entry.change)).sum::<u64>();
        files.iter().map(move |entry| {
            let start = next;
            next += stored(&entry.change);
            (entry.name.as_str(), entry.change.as_ref().map(|_| start..next))
        })
    }

    /// A file from its payload.
    pub fn file(&self, name: &str, mut payload: &[u8]) -> Result<Bytes, Error> {
        let entry = self.0.index.files.iter().find(|entry| entry.name == name);
        let file = entry.and_then(|entry| entry.change.as_ref());
        let file = file.ok_or_else(|| malformed("it has no such file"))?;
        decode_file(file, &mut payload).map_err(|error| in_entry(name, error))
    }

    /// Bytes of the head.
    pub fn bytes(&self) -> u64 {
        self.0.bytes as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::{Checkpoint, HEADER_BYTES as CHECKPOINT_HEADER_BYTES, Header};
    use crate::threads::Threads;

    fn contents(checkpoint: &Checkpoint) -> Contents {
        let object = checkpoint.to_bytes().unwrap();
        let header = Header::from_bytes(&object[..CHECKPOINT_HEADER_BYTES]).unwrap();
        let index = header.index.start as usize..header.index.end as usize;
        header.contents(&object[index]).unwrap()
    }

    #[test]
    fn changed_files_are_read_without_tensors_and_forged_ones_are_refused() {
        let old = crate::checkpoint::tests::sample();
        let mut new = old.clone();
        new.files
            .insert("config.json".into(), Bytes::from_static(b"{\"a\": 1}"));
        new.files.insert("tokenizer.json".into(), vec![b'x'; 5000].into());
        new.files.remove("empty.txt");
        let mut bytes = new.tensors["a.weight"].bytes.to_vec();
        bytes[0] ^= 1;
        new.tensors.get_mut("a.weight").unwrap().bytes = Bytes::from(bytes).into();
        let delta = crate::delta::encode(&old, &new, &Threads::ONE).unwrap();
        let length = DeltaHead::length(&delta[..PREFIX_BYTES]).unwrap() as usize;
        let head = DeltaHead::from_bytes(&delta[..length]).unwrap();
        assert_eq!(head.bytes() as usize, length);
        assert_eq!(head.result(&contents(&old)).unwrap(), contents(&new));
        assert!(head.result(&contents(&new)).is_err());
        let read: Vec<_> = head
            .files()
            .map(|(name, place)| {
                let bytes = place.map(|place| {
                    let payload = &delta[length + place.start as usize..length + place.end as usize];
                    let mut forged = payload.to_vec();
                    forged[0] ^= 1;
                    assert!(head.file(name, &forged).is_err());
                    head.file(name, payload).unwrap()
                });
                (name.to_owned(), bytes)
            })
            .collect();
        let expected = [
            ("config.json".to_owned(), Some(new.files["config.json"].clone())),
            ("empty.txt".to_owned(), None),
            ("tokenizer.json".to_owned(), Some(new.files["tokenizer.json"].clone())),
        ];
        assert_eq!(read, expected);
        assert!(DeltaHead::from_bytes(&delta[..length - 1]).is_err());
        assert!(DeltaHead::from_bytes(&[]).is_err() && DeltaHead::length(&[]).is_err());
    }
}
