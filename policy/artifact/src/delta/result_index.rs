//! The content index of a delta's result, derived before any payload is decoded.

use std::collections::{BTreeMap, BTreeSet};

use super::index::{Index, OpenDelta};
use super::{Error, Header, in_entry, malformed};
use crate::content_index::{ContentIndex, File, Tensor};
use crate::digest::Digest;

/// Checks that the delta leads from the version with content index `from` to the version that its
/// header names. `reverse`: from the result to the base.
pub(super) fn check(opened: &OpenDelta<'_>, from: &ContentIndex, reverse: bool) -> Result<(), Error> {
    of(&opened.header, &opened.index, from, reverse).map(drop)
}

/// The content index of that version.
pub(super) fn of(header: &Header, index: &Index, from: &ContentIndex, reverse: bool) -> Result<ContentIndex, Error> {
    let (expected, promised) = if reverse {
        (header.result, header.base)
    } else {
        (header.base, header.result)
    };
    let found = from.root();
    if found != expected {
        return Err(Error::WrongBase { expected, found });
    }
    let held = from.tensors.iter().map(|tensor| (tensor.name.as_str(), tensor.digest));
    let held: BTreeMap<&str, Digest> = held.collect();
    let named: BTreeSet<&str> = index.tensors.iter().map(|entry| entry.name.as_str()).collect();
    let unchanged = from
        .tensors
        .iter()
        .filter(|tensor| !named.contains(tensor.name.as_str()));
    let mut tensors: Vec<Tensor> = unchanged.cloned().collect();
    for entry in &index.tensors {
        let Some(tensor) = &entry.change else { continue };
        let before = if reverse { Some(tensor.result) } else { tensor.base };
        if before.is_some_and(|before| held.get(entry.name.as_str()) != Some(&before)) {
            return Err(in_entry(&entry.name, malformed("it was made from other bytes")));
        }
        tensors.push(Tensor {
            name: entry.name.clone(),
            dtype: tensor.dtype,
            shape: tensor.shape.clone(),
            size: tensor.bytes()? as u64,
            digest: match tensor.base {
                Some(base) if reverse => base,
                _ => tensor.result,
            },
        });
    }
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    let named: BTreeSet<&str> = index.files.iter().map(|entry| entry.name.as_str()).collect();
    let unchanged = from.files.iter().filter(|file| !named.contains(file.name.as_str()));
    let mut files: Vec<File> = unchanged.cloned().collect();
    for entry in &index.files {
        let Some(file) = &entry.change else { continue };
        files.push(File {
            name: entry.name.clone(),
            size: file.size,
            digest: file.digest,
        });
    }
    files.sort_by(|a, b| a.name.cmp(&b.name));
    let result = ContentIndex { tensors, files };
    match result.root() {
        found if found == promised => Ok(result),
        found => Err(Error::WrongResult {
            expected: promised,
            found,
        }),
    }
}
