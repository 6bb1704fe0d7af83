//! The parts of an object, each verifiable on its own. A relay passes on parts while others still
//! arrive, and an interrupted download fetches only the missing ones.
//!
//! BLAKE3 is a tree. A part is one subtree of 8 MiB (the last may be shorter), and its hash is the
//! subtree's chaining value. The hashes of all parts merge into the digest that names the object,
//! so the list needs no signature. An object of one part has no list; its hash is its name.

use std::ops::Range;

use rayon::prelude::*;

use crate::digest::Digest;
use crate::manifest::ObjectRef;
use crate::merkle::{self, ChunkHash};

/// Bytes of a part. A power of two, as BLAKE3's subtrees must be.
pub const PART_BYTES: u64 = 8 << 20;
const HASH_BYTES: usize = 32;

/// The hashes of an object's parts, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parts {
    object: ObjectRef,
    /// Empty if the object is a single part.
    hashes: Vec<[u8; HASH_BYTES]>,
}

/// The list does not belong to the object.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("{found} bytes are no list of {parts} parts")]
    Length { found: usize, parts: u64 },
    #[error("the parts make an object {found}, not {expected}")]
    Digest { found: Digest, expected: Digest },
}

impl Parts {
    /// Hashes an object on all threads of the global pool.
    pub fn of(bytes: &[u8]) -> Self {
        Self::of_pieces(&[bytes])
    }

    /// [`of`](Self::of) an object in consecutive pieces.
    pub fn of_pieces<T: AsRef<[u8]>>(pieces: &[T]) -> Self {
        // each part as a list of slices
        let mut parts: Vec<Vec<&[u8]>> = vec![vec![]];
        let (mut size_bytes, mut room) = (0, PART_BYTES as usize);
        for piece in pieces {
            let mut rest = piece.as_ref();
            size_bytes += rest.len() as u64;
            while !rest.is_empty() {
                if room == 0 {
                    parts.push(vec![]);
                    room = PART_BYTES as usize;
                }
                let (now, later) = rest.split_at(rest.len().min(room));
                if let Some(part) = parts.last_mut() {
                    part.push(now);
                }
                room -= now.len();
                rest = later;
            }
        }
        if let [single] = &parts[..] {
            let mut hasher = blake3::Hasher::new();
            for slice in single {
                hasher.update(slice);
            }
            let digest = Digest(*hasher.finalize().as_bytes());
            let object = ObjectRef { digest, size_bytes };
            return Self { object, hashes: vec![] };
        }
        let parts = parts.par_iter().enumerate();
        let hashes: Vec<_> = parts
            .map(|(index, part)| hash(size_bytes, index as u64, part))
            .collect();
        let digest = merge(size_bytes, &hashes);
        let object = ObjectRef { digest, size_bytes };
        Self { object, hashes }
    }

    /// Bytes of the list of an object of this size.
    pub fn list_bytes(size_bytes: u64) -> u64 {
        match count(size_bytes) {
            1 => 0,
            parts => parts * HASH_BYTES as u64,
        }
    }

    /// The hash of one part of an object of this size.
    pub fn hash_part(size_bytes: u64, index: u64, part: &[u8]) -> [u8; 32] {
        hash(size_bytes, index, &[part])
    }

    /// The parts of an object that is one part; None if it is larger.
    pub fn single(object: ObjectRef) -> Option<Self> {
        let hashes = Vec::new();
        (object.size_bytes <= PART_BYTES).then_some(Self { object, hashes })
    }

    /// Reads the list of `object`, as [`Self::to_bytes`] wrote it. Returns an error if it does not
    /// merge into the object's digest.
    pub fn from_bytes(object: ObjectRef, bytes: &[u8]) -> Result<Self, Error> {
        let parts = count(object.size_bytes);
        let (hashes, rest) = bytes.as_chunks::<HASH_BYTES>();
        let expected = if parts > 1 { parts } else { 0 };
        if hashes.len() as u64 != expected || !rest.is_empty() {
            return Err(Error::Length {
                found: bytes.len(),
                parts,
            });
        }
        let parts = Self {
            object,
            hashes: hashes.to_vec(),
        };
        if parts.hashes.is_empty() {
            return Ok(parts);
        }
        let found = merge(object.size_bytes, &parts.hashes);
        if found == object.digest {
            return Ok(parts);
        }
        Err(Error::Digest {
            found,
            expected: object.digest,
        })
    }

    /// The hashes, 32 bytes each. Empty for an object of one part.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.hashes.concat()
    }

    /// The object.
    pub fn object(&self) -> ObjectRef {
        self.object
    }

    /// Number of parts. An empty object has one.
    pub fn count(&self) -> u64 {
        count(self.object.size_bytes)
    }

    /// Byte range of a part in the object.
    pub fn range(&self, index: u64) -> Range<u64> {
        range(self.object.size_bytes, index)
    }

    /// Whether `bytes` are those of the part.
    pub fn check(&self, index: u64, bytes: &[u8]) -> bool {
        let range = self.range(index);
        if bytes.len() as u64 != range.end - range.start {
            return false;
        }
        match usize::try_from(index).ok().and_then(|index| self.hashes.get(index)) {
            Some(expected) => hash(self.object.size_bytes, index, &[bytes]) == *expected,
            None => index == 0 && self.hashes.is_empty() && Digest::of(bytes) == self.object.digest,
        }
    }
}

/// Number of parts of an object of this size.
pub fn count(size_bytes: u64) -> u64 {
    size_bytes.div_ceil(PART_BYTES).max(1)
}

/// Byte range of a part in an object of this size.
pub fn range(size_bytes: u64, index: u64) -> Range<u64> {
    let start = index.saturating_mul(PART_BYTES).min(size_bytes);
    start..start.saturating_add(PART_BYTES).min(size_bytes)
}

fn hash(size_bytes: u64, index: u64, part: &[&[u8]]) -> [u8; HASH_BYTES] {
    merkle::chunk_hash(part, (index * PART_BYTES) as usize, size_bytes as usize).value()
}

fn merge(size_bytes: u64, hashes: &[[u8; HASH_BYTES]]) -> Digest {
    let hashes: Vec<ChunkHash> = hashes.iter().map(|&hash| ChunkHash::Subtree(hash)).collect();
    merkle::merge(&hashes, PART_BYTES as usize, size_bytes as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(size: usize) -> Vec<u8> {
        (0..size).map(|index| (index * 7 + index / 1000) as u8).collect()
    }

    #[test]
    fn the_hashes_of_the_parts_merge_into_the_name_of_the_object() {
        let part = PART_BYTES as usize;
        for size in [
            0,
            1,
            part - 1,
            part,
            part + 1,
            2 * part,
            2 * part + 1025,
            3 * part,
            5 * part + 7,
        ] {
            let bytes = bytes(size);
            let parts = Parts::of(&bytes);
            assert_eq!(parts.object().digest, Digest::of(&bytes), "{size} bytes");
            assert_eq!(Parts::from_bytes(parts.object(), &parts.to_bytes()), Ok(parts.clone()));
            let (some, rest) = bytes.split_at(size / 3);
            assert_eq!(Parts::of_pieces(&[some, &[], rest]), parts, "{size} bytes in pieces");
            for index in 0..parts.count() {
                let range = parts.range(index);
                let own = &bytes[range.start as usize..range.end as usize];
                assert!(parts.check(index, own));
                let other = parts.check(index + 1, own);
                assert!(!other, "a part counts in its own place alone");
            }
        }
    }

    #[test]
    fn what_is_not_the_objects_is_refused() {
        let bytes = bytes(2 * PART_BYTES as usize + 5);
        let parts = Parts::of(&bytes);
        let mut list = parts.to_bytes();
        list[40] ^= 1;
        assert!(matches!(
            Parts::from_bytes(parts.object(), &list),
            Err(Error::Digest { .. })
        ));
        list.pop();
        assert!(matches!(
            Parts::from_bytes(parts.object(), &list),
            Err(Error::Length { .. })
        ));
        let mut part = bytes[..PART_BYTES as usize].to_vec();
        part[77] ^= 1;
        assert!(!parts.check(0, &part));
        part.pop();
        assert!(!parts.check(0, &part));
        assert!(Parts::single(parts.object()).is_none());
    }
}
