//! BLAKE3 in chunks. BLAKE3 is a tree, so chunks can be hashed on any thread, while their bytes are
//! at hand, and the hashes merged into the digest of all bytes.

use blake3::Hasher;
use blake3::hazmat::{ChainingValue, HasherExt, Mode, left_subtree_len, merge_subtrees_non_root, merge_subtrees_root};

use crate::digest::Digest;
use crate::threads::Threads;

/// Bytes that one thread hashes at a time.
const CHUNK_BYTES: usize = 1 << 20;

/// The hash of one chunk of some bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChunkHash {
    /// The only chunk: the digest itself.
    Whole(Digest),
    /// The chaining value of a subtree.
    Subtree([u8; 32]),
}

impl ChunkHash {
    pub(crate) fn value(&self) -> [u8; 32] {
        match self {
            ChunkHash::Whole(digest) => digest.0,
            ChunkHash::Subtree(value) => *value,
        }
    }

    /// `only_chunk`: nothing else was hashed.
    pub(crate) fn from_value(value: Digest, only_chunk: bool) -> Self {
        match only_chunk {
            true => ChunkHash::Whole(value),
            false => ChunkHash::Subtree(value.0),
        }
    }
}

/// Hashes the chunk that starts at `offset` of `total_bytes`, given as consecutive slices. All
/// chunks but the last have the same number of bytes, a power of two and a multiple of 1024.
pub(crate) fn chunk_hash(slices: &[&[u8]], offset: usize, total_bytes: usize) -> ChunkHash {
    let mut hasher = Hasher::new();
    let only_chunk = slices.iter().map(|slice| slice.len()).sum::<usize>() == total_bytes;
    if !only_chunk {
        hasher.set_input_offset(offset as u64);
    }
    for slice in slices {
        hasher.update(slice);
    }
    match only_chunk {
        true => ChunkHash::Whole(Digest(*hasher.finalize().as_bytes())),
        false => ChunkHash::Subtree(hasher.finalize_non_root()),
    }
}

/// BLAKE3 of `bytes`, on all threads.
pub fn digest(bytes: &[u8], threads: &Threads) -> Digest {
    digests(&[bytes], threads)[0]
}

/// BLAKE3 of each of several byte strings, on all threads.
pub(crate) fn digests(all: &[&[u8]], threads: &Threads) -> Vec<Digest> {
    let jobs = all.iter().flat_map(|bytes| {
        let chunks = bytes.chunks(CHUNK_BYTES).enumerate();
        chunks.map(|(n, chunk)| (chunk, n * CHUNK_BYTES, bytes.len()))
    });
    let hashes = threads.map(jobs.collect(), |(chunk, offset, total)| {
        chunk_hash(&[chunk], offset, total)
    });
    let mut rest = hashes.as_slice();
    let digest = |bytes: &&[u8]| {
        let (own, others) = rest.split_at(bytes.len().div_ceil(CHUNK_BYTES));
        rest = others;
        merge(own, CHUNK_BYTES, bytes.len())
    };
    all.iter().map(digest).collect()
}

/// The digest of all bytes from the hashes of their chunks, in order.
pub(crate) fn merge(chunks: &[ChunkHash], chunk_bytes: usize, total_bytes: usize) -> Digest {
    match chunks {
        [] => Digest::of(&[]),
        [ChunkHash::Whole(digest)] => *digest,
        _ => {
            let (left, right) = halves(chunks, chunk_bytes, total_bytes);
            Digest(*merge_subtrees_root(&left, &right, Mode::Hash).as_bytes())
        }
    }
}

fn halves(chunks: &[ChunkHash], chunk_bytes: usize, bytes: usize) -> (ChainingValue, ChainingValue) {
    let left_bytes = left_subtree_len(bytes as u64) as usize;
    let (left, right) = chunks.split_at(left_bytes / chunk_bytes);
    let right_bytes = bytes - left_bytes;
    (
        subtree(left, chunk_bytes, left_bytes),
        subtree(right, chunk_bytes, right_bytes),
    )
}

fn subtree(chunks: &[ChunkHash], chunk_bytes: usize, bytes: usize) -> ChainingValue {
    match chunks {
        [only] => only.value(),
        _ => {
            let (left, right) = halves(chunks, chunk_bytes, bytes);
            merge_subtrees_non_root(&left, &right, Mode::Hash)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_of_chunks_merge_into_the_digest_of_all_bytes() {
        let bytes: Vec<u8> = (0..70_000u32).map(|i| ((i * 7) >> 3) as u8).collect();
        for frame in [1024, 2048, 8192] {
            for length in [0, 1, 1023, 1024, 1025, 2048, 3000, 8192, 8193, 20_000, 65_536, 69_999] {
                let bytes = &bytes[..length];
                let hashes: Vec<ChunkHash> = bytes
                    .chunks(frame)
                    .enumerate()
                    .map(|(i, chunk)| chunk_hash(&[chunk], i * frame, length))
                    .collect();
                assert_eq!(merge(&hashes, frame, length), Digest::of(bytes), "{frame} {length}");
            }
        }
    }
}
