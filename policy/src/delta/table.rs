//! The table of a delta: which tensors and files differ, how each is coded and how long its payload is.
//!
//! ```text
//! tensors: count u32, then each, by name in ascending byte order:
//!     name: length u16, UTF-8 bytes
//!     change: u8    0 removed, 1 raw, 2 zstd, 3 sparse, 4 xor
//!     raw and zstd only: dtype (length u8, ASCII name), rank u8, each dimension u64
//!     all but removed: length of the payload u64
//! files: count u32, then each, by name in ascending byte order:
//!     name: length u16, UTF-8 bytes
//!     change: u8    0 removed, 1 raw, 2 zstd
//!     raw and zstd only: size of the file u64
//!     all but removed: length of the payload u64
//! ```
//! Sparse and xor refer to the base's tensor of the same name, whose dtype and shape they keep.

use std::borrow::Cow;
use std::collections::BTreeMap;

use bytes::Bytes;
use safetensors::Dtype;

use super::{Error, codec, same_form};
use crate::image::{Image, TensorData, bytes_of};
use crate::listing::{Reader, ascending, push_dtype, push_name};

pub(super) struct Table {
    pub tensors: Vec<Entry<Form>>,
    pub files: Vec<Entry<u64>>,
}

pub(super) struct Entry<F> {
    pub name: String,
    pub change: Change<F>,
}

/// What becomes of an entry; `stored` is the length of its payload in bytes.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Change<F> {
    Removed,
    Raw { form: F, stored: u64 },
    Zstd { form: F, stored: u64 },
    Sparse { stored: u64 },
    Xor { stored: u64 },
}

/// Dtype and shape of a tensor that is carried whole.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Form {
    dtype: Dtype,
    shape: Vec<usize>,
}

impl<F> Change<F> {
    pub fn stored_bytes(&self) -> u64 {
        match *self {
            Change::Removed => 0,
            Change::Raw { stored, .. }
            | Change::Zstd { stored, .. }
            | Change::Sparse { stored }
            | Change::Xor { stored } => stored,
        }
    }

    fn code(&self) -> u8 {
        match self {
            Change::Removed => 0,
            Change::Raw { .. } => 1,
            Change::Zstd { .. } => 2,
            Change::Sparse { .. } => 3,
            Change::Xor { .. } => 4,
        }
    }

    fn form(&self) -> Option<&F> {
        match self {
            Change::Raw { form, .. } | Change::Zstd { form, .. } => Some(form),
            _ => None,
        }
    }
}

impl Form {
    pub fn bytes(&self) -> Result<usize, Error> {
        bytes_of(self.dtype, &self.shape).ok_or_else(|| Error::Malformed("the shape does not make whole bytes".into()))
    }

    pub fn tensor(&self, bytes: Bytes) -> Result<TensorData, Error> {
        TensorData::new(self.dtype, self.shape.clone(), bytes).map_err(|error| Error::Malformed(error.to_string()))
    }
}

impl Table {
    /// Compares two images and appends the payload of every difference, coded in the smallest way, to `payloads`.
    pub fn between(base: &Image, result: &Image, payloads: &mut Vec<u8>) -> Result<Self, Error> {
        let mut tensors = vec![];
        for (name, new) in merged(&base.tensors, &result.tensors) {
            let change = match (base.tensors.get(name), new) {
                (_, None) => Change::Removed,
                (Some(old), Some(new)) if same_form(old, new) => {
                    if old.bytes == new.bytes {
                        continue;
                    }
                    keep(smallest(Some(old), new)?, payloads)
                }
                (_, Some(new)) => keep(smallest(None, new)?, payloads),
            };
            tensors.push(Entry {
                name: name.clone(),
                change,
            });
        }
        let mut files = vec![];
        for (name, new) in merged(&base.files, &result.files) {
            let change = match new {
                None => Change::Removed,
                Some(new) if base.files.get(name) == Some(new) => continue,
                Some(new) => keep(whole(new.len() as u64, new)?, payloads),
            };
            files.push(Entry {
                name: name.clone(),
                change,
            });
        }
        Ok(Table { tensors, files })
    }

    /// Bytes of the result: what of the base stays, and what is new.
    pub fn result_bytes(&self, base: &Image) -> Result<u64, Error> {
        let overflow = || Error::Malformed("the sizes overflow".into());
        let mut total = base.tensor_bytes() + base.files.values().map(|f| f.len() as u64).sum::<u64>();
        for Entry { name, change } in &self.tensors {
            let old = base.tensors.get(name).map_or(0, |t| t.bytes.len() as u64);
            let new = match change {
                Change::Removed => 0,
                Change::Raw { form, .. } | Change::Zstd { form, .. } => form.bytes()? as u64,
                Change::Sparse { .. } | Change::Xor { .. } => old,
            };
            total = (total - old).checked_add(new).ok_or_else(overflow)?;
        }
        for Entry { name, change } in &self.files {
            let old = base.files.get(name).map_or(0, |f| f.len() as u64);
            let new = change.form().copied().unwrap_or(0);
            total = (total - old).checked_add(new).ok_or_else(overflow)?;
        }
        Ok(total)
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = (self.tensors.len() as u32).to_le_bytes().to_vec();
        for Entry { name, change } in &self.tensors {
            push_name(&mut out, name);
            out.push(change.code());
            if let Some(form) = change.form() {
                push_dtype(&mut out, form.dtype);
                out.push(form.shape.len() as u8);
                for &dimension in &form.shape {
                    out.extend((dimension as u64).to_le_bytes());
                }
            }
            push_stored(&mut out, change);
        }
        out.extend((self.files.len() as u32).to_le_bytes());
        for Entry { name, change } in &self.files {
            push_name(&mut out, name);
            out.push(change.code());
            if let Some(size) = change.form() {
                out.extend(size.to_le_bytes());
            }
            push_stored(&mut out, change);
        }
        out
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Error> {
        let mut reader = Reader(bytes);
        let mut table = Table {
            tensors: vec![],
            files: vec![],
        };
        for _ in 0..reader.u32()? {
            table.tensors.push(entry(&mut reader, |reader| {
                Ok(Form {
                    dtype: reader.dtype()?,
                    shape: reader.shape()?,
                })
            })?);
        }
        for _ in 0..reader.u32()? {
            let entry = entry(&mut reader, |reader| Ok(reader.u64()?))?;
            table.files.push(entry);
        }
        if !reader.0.is_empty() {
            return Err(Error::Malformed("there are bytes after the table".into()));
        }
        // a name twice would make the result depend on the order of applying
        ascending(table.tensors.iter().map(|e| e.name.as_str()))?;
        ascending(table.files.iter().map(|e| e.name.as_str()))?;
        Ok(table)
    }
}

fn entry<F>(reader: &mut Reader<'_>, form: impl Fn(&mut Reader<'_>) -> Result<F, Error>) -> Result<Entry<F>, Error> {
    let name = reader.name()?;
    let change = match reader.u8()? {
        0 => Change::Removed,
        1 => Change::Raw {
            form: form(reader)?,
            stored: reader.u64()?,
        },
        2 => Change::Zstd {
            form: form(reader)?,
            stored: reader.u64()?,
        },
        3 => Change::Sparse { stored: reader.u64()? },
        4 => Change::Xor { stored: reader.u64()? },
        other => return Err(Error::Malformed(format!("`{name}`: unknown change {other}"))),
    };
    Ok(Entry { name, change })
}

fn push_stored<F>(out: &mut Vec<u8>, change: &Change<F>) {
    if !matches!(change, Change::Removed) {
        out.extend(change.stored_bytes().to_le_bytes());
    }
}

fn keep<F>((change, payload): (Change<F>, Cow<'_, [u8]>), payloads: &mut Vec<u8>) -> Change<F> {
    payloads.extend_from_slice(&payload);
    change
}

/// Names of both maps in ascending order, with the value of the second.
fn merged<'a, V>(
    base: &'a BTreeMap<String, V>,
    result: &'a BTreeMap<String, V>,
) -> impl Iterator<Item = (&'a String, Option<&'a V>)> {
    let removed = base.keys().filter(|name| !result.contains_key(*name));
    let mut names: Vec<_> = removed.chain(result.keys()).collect();
    names.sort();
    names.into_iter().map(|name| (name, result.get(name)))
}

/// Codes `new` in the smallest way that is worth trying: sparse up to half of the weights, xor from a quarter on, whole
/// where neither saves a quarter.
fn smallest<'a>(old: Option<&TensorData>, new: &'a TensorData) -> Result<(Change<Form>, Cow<'a, [u8]>), Error> {
    let mut best: Option<(Change<Form>, Cow<'a, [u8]>)> = None;
    let mut offer = |change: Change<Form>, payload: Cow<'a, [u8]>| {
        if best.as_ref().is_none_or(|(_, best)| payload.len() < best.len()) {
            best = Some((change, payload));
        }
        best.as_ref().map_or(0, |(_, best)| best.len())
    };
    let mut size = usize::MAX;
    if let Some(old) = old {
        let width = codec::width(new.dtype);
        let weights = (new.bytes.len() / width) as u64;
        let mut changed = weights;
        if let Some(sparse) = codec::sparse_encode(&old.bytes, &new.bytes, width, weights / 2 + 1)? {
            changed = sparse.changed;
            let stored = sparse.payload.len() as u64;
            size = offer(Change::Sparse { stored }, sparse.payload.into());
        }
        if changed > weights / 4 {
            let xor = codec::xor_encode(&old.bytes, &new.bytes, width).map_err(Error::Compress)?;
            let stored = xor.len() as u64;
            size = offer(Change::Xor { stored }, xor.into());
        }
    }
    let form = Form {
        dtype: new.dtype,
        shape: new.shape.clone(),
    };
    if size >= new.bytes.len() / 4 * 3 {
        let (change, payload) = whole(form, &new.bytes)?;
        offer(change, payload);
    }
    best.ok_or_else(|| Error::Malformed("no way to code a tensor".into()))
}

/// Carries `bytes` as they are, compressed where that is smaller.
fn whole<F>(form: F, bytes: &[u8]) -> Result<(Change<F>, Cow<'_, [u8]>), Error> {
    let packed = codec::compress(bytes).map_err(Error::Compress)?;
    let stored = packed.len().min(bytes.len()) as u64;
    Ok(if packed.len() < bytes.len() {
        (Change::Zstd { form, stored }, packed.into())
    } else {
        (Change::Raw { form, stored }, bytes.into())
    })
}
