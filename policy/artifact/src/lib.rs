//! The bytes of a policy version: checkpoints, deltas, manifests and signatures.
//!
//! Everything here is a pure, synchronous function of bytes. The crate reads and writes local
//! files, but knows no object store, no network, no database, no async runtime, no tokenizer and no
//! model. The Python package (`python/`) wraps it alone.
//!
//! Dependencies: `blake3`, `twox-hash`, `zstd`, `ed25519-dalek` (formats and signatures),
//! `safetensors`, `serde`, `serde_json`, `base64`, `hex`, `time`, `uuid`, `bytes` (documents and
//! buffers), `half`, `libm`, `bytemuck`, `rayon`, `nix` (arithmetic, threads, memory), `memmap2`,
//! `tempfile` (weights in files), `getrandom`
//! (new keys), `thiserror`, `tracing`. `cudarc` only with the feature `cuda`.

pub mod adapter;
pub mod assignment;
pub mod atomic;
pub mod checkpoint;
mod content_index;
pub mod delta;
#[cfg(any(test, feature = "cuda"))]
pub mod device;
pub mod digest;
pub mod folder;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
pub mod isa;
pub mod manifest;
pub mod memory;
pub mod merkle;
pub mod need;
pub mod parts;
pub mod patch;
pub mod quant;
pub mod reference;
pub mod sign;
pub mod squash;
pub mod tensor;
pub mod threads;
mod wire;
