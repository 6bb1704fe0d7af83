//! Quantised copies of a version: fewer bits for the matrices, made from its own bytes and from nothing else.
//!
//! A copy is an [`Image`] as engines load it: the matrices as codes and scales, everything else as in the version, and a
//! `quantization_config` in `config.json`. A [`Spec`] says how; its name stands for the same bits for ever, on every machine and
//! any number of threads, so whoever holds the version makes the copy himself and compares its root with the manifest's. Copies
//! are not stored and have no deltas. FORMAT.md has the specs in words.

mod config;
mod fp8;
mod int4;
mod make;
mod select;
mod spec;
mod weight;

use crate::digest::Digest;
use crate::image::{self, Image};
use crate::kernel::Threads;
use crate::manifest::Manifest;

pub use spec::{Spec, Unknown};

/// Why there is no quantised copy.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "`{0}` has a weight that is not finite, which no code stands for: repair the weights, or make no quantised copies"
    )]
    NotFinite(String),
    #[error(
        "{0} quantises nothing of this model: it takes matrices named `….NAME_proj.weight` in BF16 or F32, and there are none of a shape that fits"
    )]
    Nothing(Spec),
    #[error("the copy would have two tensors named `{0}`: these weights are quantised already")]
    Taken(String),
    #[error("config.json {0}")]
    Config(&'static str),
    #[error(
        "version {version} names no copy made by {spec}, it names {there}: publishers name those of policy.quantised"
    )]
    NotNamed { version: i64, spec: Spec, there: String },
    #[error("the copy made by {spec} has root {found}, where the manifest says {expected}: it is not to be used")]
    WrongRoot {
        spec: Spec,
        expected: Digest,
        found: Digest,
    },
    #[error("put the copy together: {0}")]
    Image(#[from] image::Error),
}

/// What a copy took to make.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Touched {
    /// Blocks of weights that have a scale of their own, in all matrices.
    pub blocks: u64,
    /// Blocks with a changed weight.
    pub touched: u64,
    /// Blocks whose scale is another.
    pub rescaled: u64,
    /// Weights whose code was computed.
    pub coded: u64,
}

impl std::ops::AddAssign for Touched {
    fn add_assign(&mut self, other: Touched) {
        self.blocks += other.blocks;
        self.touched += other.touched;
        self.rescaled += other.rescaled;
        self.coded += other.coded;
    }
}

/// The copy of `image`.
pub fn quantise(image: &Image, spec: Spec, threads: &Threads) -> Result<Image, Error> {
    Ok(make::make(image, spec, None, threads)?.0)
}

/// The copy of `after`, out of `previous`, the copy of `before`: only blocks that hold a changed weight are looked into. What
/// comes out is what [`quantise`] makes of `after`, provided that `previous` is what it makes of `before`.
pub fn requantise(
    previous: &Image,
    before: &Image,
    after: &Image,
    spec: Spec,
    threads: &Threads,
) -> Result<(Image, Touched), Error> {
    make::make(after, spec, Some((previous, before)), threads)
}

/// The root of a copy; its tensors are hashed on all threads.
pub fn root(copy: &Image, threads: &Threads) -> Digest {
    crate::delta::listing_of(copy, threads).root()
}

/// The root that the manifest names for the copy.
pub fn named(manifest: &Manifest, spec: Spec) -> Result<Digest, Error> {
    let named = manifest.quantised.iter().find(|named| named.spec == spec.name());
    named.map(|named| named.root).ok_or_else(|| {
        let there: Vec<&str> = manifest.quantised.iter().map(|named| named.spec.as_str()).collect();
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

/// The copy of `image`, the version that `manifest` describes, with the root that the manifest names. Fails closed. `from` is a
/// copy and what that is of, as for [`requantise`]; where it is not what it is said to be the copy is made from nothing.
pub fn verified(
    image: &Image,
    manifest: &Manifest,
    spec: Spec,
    from: Option<(&Image, &Image)>,
    threads: &Threads,
) -> Result<Image, Error> {
    let expected = named(manifest, spec)?;
    if let Some((previous, before)) = from {
        let (copy, _) = requantise(previous, before, image, spec, threads)?;
        if root(&copy, threads) == expected {
            return Ok(copy);
        }
    }
    let copy = quantise(image, spec, threads)?;
    match root(&copy, threads) {
        found if found == expected => Ok(copy),
        found => Err(Error::WrongRoot { spec, expected, found }),
    }
}

#[cfg(test)]
mod tests;
