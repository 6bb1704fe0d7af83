//! BLAKE3 of a tensor from its frames: each frame is a subtree of the tensor's hash tree, so that frames are hashed while they
//! are at hand, by any thread, and then joined.

use blake3::Hasher;
use blake3::hazmat::{ChainingValue, HasherExt, Mode, left_subtree_len, merge_subtrees_non_root, merge_subtrees_root};

use crate::digest::Digest;
use crate::kernel::Threads;

/// Of what a thread hashes at once.
const PIECE_BYTES: usize = 1 << 20;

/// What a frame contributes to its tensor's digest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The only frame: the digest itself.
    Whole(Digest),
    Subtree([u8; 32]),
}

impl Part {
    pub(super) fn value(&self) -> [u8; 32] {
        match self {
            Part::Whole(digest) => digest.0,
            Part::Subtree(value) => *value,
        }
    }

    /// `whole`: it is of the only frame.
    pub(super) fn of_value(value: Digest, whole: bool) -> Self {
        match whole {
            true => Part::Whole(value),
            false => Part::Subtree(value.0),
        }
    }
}

/// Hashes the frame that starts at `offset` of a tensor of `tensor_bytes`. All frames but the last have the same number of
/// bytes, a power of two and a multiple of BLAKE3's 1024.
pub(super) fn part(frame: &[u8], offset: usize, tensor_bytes: usize) -> Part {
    if frame.len() == tensor_bytes {
        return Part::Whole(Digest::of(frame));
    }
    let mut hasher = Hasher::new();
    hasher.set_input_offset(offset as u64).update(frame);
    Part::Subtree(hasher.finalize_non_root())
}

/// BLAKE3 of `bytes`, on all threads.
pub(super) fn digest(bytes: &[u8], threads: &Threads) -> Digest {
    let pieces = bytes.chunks(PIECE_BYTES).enumerate().collect();
    let parts = threads.map(pieces, |(n, piece)| part(piece, n * PIECE_BYTES, bytes.len()));
    join(&parts, PIECE_BYTES, bytes.len())
}

/// The tensor's digest from its frames', in their order.
pub(super) fn join(parts: &[Part], frame_bytes: usize, tensor_bytes: usize) -> Digest {
    match parts {
        [] => Digest::of(&[]),
        [Part::Whole(digest)] => *digest,
        _ => {
            let (left, right) = halves(parts, frame_bytes, tensor_bytes);
            Digest(*merge_subtrees_root(&left, &right, Mode::Hash).as_bytes())
        }
    }
}

fn halves(parts: &[Part], frame_bytes: usize, bytes: usize) -> (ChainingValue, ChainingValue) {
    let left_bytes = left_subtree_len(bytes as u64) as usize;
    let (left, right) = parts.split_at(left_bytes / frame_bytes);
    let right_bytes = bytes - left_bytes;
    (
        subtree(left, frame_bytes, left_bytes),
        subtree(right, frame_bytes, right_bytes),
    )
}

fn subtree(parts: &[Part], frame_bytes: usize, bytes: usize) -> ChainingValue {
    match parts {
        [Part::Subtree(value)] => *value,
        // a frame alone is never a part of several
        [Part::Whole(digest)] => digest.0,
        _ => {
            let (left, right) = halves(parts, frame_bytes, bytes);
            merge_subtrees_non_root(&left, &right, Mode::Hash)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_join_to_the_digest_of_the_whole() {
        let bytes: Vec<u8> = (0..70_000u32).map(|i| ((i * 7) >> 3) as u8).collect();
        for frame in [1024, 2048, 8192] {
            for length in [0, 1, 1023, 1024, 1025, 2048, 3000, 8192, 8193, 20_000, 65_536, 69_999] {
                let whole = &bytes[..length];
                let parts: Vec<Part> = whole
                    .chunks(frame)
                    .enumerate()
                    .map(|(i, chunk)| part(chunk, i * frame, length))
                    .collect();
                assert_eq!(join(&parts, frame, length), Digest::of(whole), "{frame} {length}");
            }
        }
    }
}
