//! Listings of versions without hashing twice: what a delta says of digests, and what is known already.

use std::collections::{BTreeMap, BTreeSet};

use super::frame::WEIGHTS;
use super::index::{Opened, width};
use super::{Error, frames, in_entry, tree};
use crate::digest::Digest;
use crate::image::{Image, TensorData};
use crate::kernel::Threads;
use crate::listing::{File, Listing, Tensor};

/// The listing of `image`; tensors that have not been hashed yet are, on all threads.
pub(crate) fn of(image: &Image, threads: &Threads) -> Listing {
    let new: Vec<&TensorData> = image
        .tensors
        .values()
        .filter(|tensor| tensor.bytes.digest_if_known().is_none())
        .collect();
    let jobs: Vec<_> = new
        .iter()
        .flat_map(|&tensor| frames(tensor).map(move |at| (tensor, at)))
        .collect();
    let parts = threads.map(jobs, |(tensor, at)| {
        tree::part(&tensor.bytes[at.clone()], at.start, tensor.bytes.len())
    });
    let mut parts = parts.as_slice();
    for tensor in new {
        let (own, rest) = parts.split_at(frames(tensor).count());
        let frame_bytes = WEIGHTS * width(tensor.dtype);
        tensor.bytes.note(tree::join(own, frame_bytes, tensor.bytes.len()));
        parts = rest;
    }
    Listing::of(image)
}

/// The listing of the version that a delta leads to from the one with `listing`, `back` or forward. It is the one that the
/// header names, or the delta is refused, before any payload is looked at.
pub(super) fn after(opened: &Opened<'_>, listing: &Listing, back: bool) -> Result<Listing, Error> {
    let (expected, promised) = if back {
        (opened.header.result, opened.header.base)
    } else {
        (opened.header.base, opened.header.result)
    };
    let found = listing.root();
    if found != expected {
        return Err(Error::WrongBase { expected, found });
    }
    let index = &opened.index;
    let held = listing
        .tensors
        .iter()
        .map(|tensor| (tensor.name.as_str(), tensor.digest));
    let held: BTreeMap<&str, Digest> = held.collect();
    let named: BTreeSet<&str> = index.tensors.iter().map(|entry| entry.name.as_str()).collect();
    let kept = listing
        .tensors
        .iter()
        .filter(|tensor| !named.contains(tensor.name.as_str()));
    let mut tensors: Vec<Tensor> = kept.cloned().collect();
    for entry in &index.tensors {
        let Some(tensor) = &entry.change else { continue };
        let from = if back { Some(tensor.result) } else { tensor.base };
        if from.is_some_and(|from| held.get(entry.name.as_str()) != Some(&from)) {
            return Err(in_entry(
                &entry.name,
                Error::Malformed("it was made from other bytes".into()),
            ));
        }
        tensors.push(Tensor {
            name: entry.name.clone(),
            dtype: tensor.dtype,
            shape: tensor.shape.clone(),
            size: tensor.bytes()? as u64,
            digest: if back {
                tensor.base.unwrap_or(tensor.result)
            } else {
                tensor.result
            },
        });
    }
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    let named: BTreeSet<&str> = index.files.iter().map(|entry| entry.name.as_str()).collect();
    let kept = listing.files.iter().filter(|file| !named.contains(file.name.as_str()));
    let mut files: Vec<File> = kept.cloned().collect();
    for entry in &index.files {
        let Some(file) = &entry.change else { continue };
        files.push(File {
            name: entry.name.clone(),
            size: file.size,
            digest: file.digest,
        });
    }
    files.sort_by(|a, b| a.name.cmp(&b.name));
    let after = Listing { tensors, files };
    match after.root() {
        found if found == promised => Ok(after),
        found => Err(Error::WrongResult {
            expected: promised,
            found,
        }),
    }
}
