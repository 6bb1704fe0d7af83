//! Quantized copies of a version: fewer bits for its matrices, computed from its bytes alone.
//!
//! A copy is a [`Checkpoint`] that engines load. It has codes and scales in place of the matrices,
//! a `quantization_config` in `config.json`, and everything else as in the version. A [`Spec`]
//! names the arithmetic. The same spec gives the same bits on every machine and any number of
//! threads, so each replica makes the copy itself and compares its content hash with the
//! manifest's. Copies are not stored and have no deltas. FORMAT.md describes the specs.

mod config;
mod decode;
mod fp8;
mod int4;
mod make;
mod nvfp4;
mod select;
mod spec;
mod weight;

use crate::checkpoint::Checkpoint;
use crate::digest::Digest;
use crate::manifest::Manifest;
use crate::tensor;
use crate::threads::Threads;

pub use spec::{Spec, Unknown};

/// Why there is no quantized copy.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "`{0}` has a weight that is not finite, which has no code: repair the weights, or make no quantized copies"
    )]
    NotFinite(String),
    #[error(
        "{0} finds nothing to quantize: it takes matrices named `….NAME_proj.weight` in BF16 or F32 whose shape fits, and the model has none"
    )]
    Nothing(Spec),
    #[error("the copy would have two tensors named `{0}`: these weights are quantized already")]
    Taken(String),
    #[error("config.json {0}")]
    Config(&'static str),
    #[error(
        "version {version} names no copy made by {spec}; it names: {there}. Publishers name the specs in policy.quantised"
    )]
    NotNamed { version: i64, spec: Spec, there: String },
    #[error("the copy made by {spec} has content hash {found}, but the manifest says {expected}: do not use it")]
    WrongRoot {
        spec: Spec,
        expected: Digest,
        found: Digest,
    },
    #[error("put the copy together: {0}")]
    Tensor(#[from] tensor::WrongSize),
}

/// The copy of `checkpoint`.
pub fn quantize(checkpoint: &Checkpoint, spec: Spec, threads: &Threads) -> Result<Checkpoint, Error> {
    make::make(checkpoint, spec, threads)
}

/// `checkpoint` with the values that the codes and scales of its copy stand for, matrices in f32: what an engine that
/// serves the copy multiplies with, unless it rounds them.
pub fn dequantized(checkpoint: &Checkpoint, spec: Spec, threads: &Threads) -> Result<Checkpoint, Error> {
    decode::values(checkpoint, spec, threads)
}

/// The content hash that the manifest names for the copy.
pub fn named(manifest: &Manifest, spec: Spec) -> Result<Digest, Error> {
    let named = manifest.quantized.iter().find(|named| named.spec == spec.name());
    named.map(|named| named.root).ok_or_else(|| {
        let there: Vec<&str> = manifest.quantized.iter().map(|named| named.spec.as_str()).collect();
        Error::NotNamed {
            version: manifest.version,
            spec,
            there: if there.is_empty() {
                "none".into()
            } else {
                there.join(", ")
            },
        }
    })
}

/// The copy of `checkpoint`, the version that `manifest` describes. Returns an error if its content
/// hash is not the one that the manifest names.
pub fn verified(
    checkpoint: &Checkpoint,
    manifest: &Manifest,
    spec: Spec,
    threads: &Threads,
) -> Result<Checkpoint, Error> {
    let expected = named(manifest, spec)?;
    let copy = quantize(checkpoint, spec, threads)?;
    match copy.root_on(threads) {
        found if found == expected => Ok(copy),
        found => Err(Error::WrongRoot { spec, expected, found }),
    }
}

#[cfg(test)]
mod tests;
