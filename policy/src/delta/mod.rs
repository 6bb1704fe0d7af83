//! A delta: what turns the bytes of one version into the bytes of another, named by the roots of both.
//!
//! Lossless for any dtype: values are compared and coded as bit patterns, so NaN payloads and −0.0 survive. Only what
//! differs is in it; a tensor of the base that is not mentioned stays as it is. It says nothing of serials, lines or
//! storage. How one tensor is coded is `codec`'s.
//!
//! ```text
//! offset  size
//!      0     8  "SPTDELTA"
//!      8     4  format version, 1
//!     12     4  zero
//!     16    32  root of the base
//!     48    32  root of the result
//!     80     8  length of the table before compression
//!     88     8  length of the table as stored
//!     96        the table, one zstd frame (see `table`)
//!               the payloads of the table's entries, in its order, without gaps
//!    end    32  BLAKE3 of everything before
//! ```
//! Integers are little-endian.

mod codec;
mod table;

use bytes::Bytes;

use crate::digest::Digest;
use crate::image::{Image, TensorData};
use crate::listing::{self, Reader};
use table::{Change, Entry, Table};

const MAGIC: &[u8; 8] = b"SPTDELTA";
const FORMAT_VERSION: u32 = 1;
const HEADER_BYTES: usize = 96;
const CHECKSUM_BYTES: usize = 32;
/// A table is some tens of bytes per tensor; the largest models have about 10⁵ tensors.
const TABLE_BYTES_MAX: u64 = 256 << 20;
/// What a delta's result may occupy when the caller knows no better, in bytes.
const RESULT_BYTES_MAX: u64 = 1 << 40;

/// Why a delta could not be made or was refused.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the delta does not start with its magic")]
    Magic,
    #[error("delta format version {0} is not known here; 1 is")]
    FormatVersion(u32),
    #[error("the delta ends early, or its checksum does not match its bytes")]
    Checksum,
    #[error("the delta applies to the version with root {expected}, not to {found}")]
    WrongBase { expected: Digest, found: Digest },
    #[error("the delta is malformed: {0}")]
    Malformed(String),
    #[error("the result would take {needed} bytes, more than the {limit} allowed")]
    TooLarge { needed: u64, limit: u64 },
    #[error("the delta made a version with root {found}, not {expected}")]
    WrongResult { expected: Digest, found: Digest },
    #[error("the image cannot be coded: {0}")]
    Image(listing::Error),
    #[error("compress: {0}")]
    Compress(std::io::Error),
}

/// What a delta says of itself before it is applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    pub base: Digest,
    pub result: Digest,
}

/// How much of a version a step changed. Weights of dtypes narrower than a byte are counted in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    pub changed_weights: u64,
    pub total_weights: u64,
}

/// The delta from `base` to `result`. It is applied once before it is returned: what leaves here is known to arrive.
pub fn encode(base: &Image, result: &Image) -> Result<Vec<u8>, Error> {
    let base_listing = listing::Listing::of(base);
    let result_listing = listing::Listing::of(result);
    base_listing.check().map_err(Error::Image)?;
    result_listing.check().map_err(Error::Image)?;

    let mut payloads = vec![];
    let table = Table::between(base, result, &mut payloads)?;
    let raw_table = table.to_bytes();
    let stored_table = codec::compress(&raw_table).map_err(Error::Compress)?;

    let mut out = Vec::with_capacity(HEADER_BYTES + stored_table.len() + payloads.len() + CHECKSUM_BYTES);
    out.extend(MAGIC);
    out.extend(FORMAT_VERSION.to_le_bytes());
    out.extend([0; 4]);
    out.extend(base_listing.root().0);
    out.extend(result_listing.root().0);
    out.extend((raw_table.len() as u64).to_le_bytes());
    out.extend((stored_table.len() as u64).to_le_bytes());
    out.extend(stored_table);
    out.extend(payloads);
    out.extend(Digest::of(&out).0);

    let (_, root) = decode(base, &base_listing, &out, RESULT_BYTES_MAX)?;
    debug_assert_eq!(root, result_listing.root());
    Ok(out)
}

/// The version that `delta` makes of `base`. Tensors that did not change share `base`'s memory.
pub fn apply(base: &Image, delta: &[u8]) -> Result<Image, Error> {
    apply_within(base, delta, RESULT_BYTES_MAX)
}

/// [`apply`] with a limit on the bytes of the result (tensors and files together): memory is not taken before the limit,
/// and what the delta's own bytes can account for, are checked.
pub fn apply_within(base: &Image, delta: &[u8], result_bytes_max: u64) -> Result<Image, Error> {
    Ok(apply_rooted(base, delta, result_bytes_max)?.0)
}

/// [`apply_within`], with the root that the result was found to have.
pub(crate) fn apply_rooted(base: &Image, delta: &[u8], result_bytes_max: u64) -> Result<(Image, Digest), Error> {
    decode(base, &listing::Listing::of(base), delta, result_bytes_max)
}

/// Reads the header and verifies the checksum, without a base.
pub fn header(delta: &[u8]) -> Result<Header, Error> {
    let (header, _, _) = open(delta)?;
    Ok(header)
}

/// Counts the weights whose bit patterns differ; every weight of a new or reshaped tensor counts as changed.
pub fn stats(base: &Image, result: &Image) -> Stats {
    let mut stats = Stats::default();
    for (name, tensor) in &result.tensors {
        let width = codec::width(tensor.dtype);
        let weights = (tensor.bytes.len() / width) as u64;
        stats.total_weights += weights;
        stats.changed_weights += match base.tensors.get(name) {
            Some(old) if same_form(old, tensor) => codec::count(&old.bytes, &tensor.bytes, width),
            _ => weights,
        };
    }
    stats
}

fn same_form(a: &TensorData, b: &TensorData) -> bool {
    a.dtype == b.dtype && a.shape == b.shape
}

/// Splits a delta whose checksum holds into its header, the table before compression, and the payloads.
fn open(delta: &[u8]) -> Result<(Header, Vec<u8>, &[u8]), Error> {
    if !delta.starts_with(MAGIC) {
        return Err(Error::Magic);
    }
    let body_length = delta
        .len()
        .checked_sub(CHECKSUM_BYTES)
        .filter(|&length| length >= HEADER_BYTES)
        .ok_or(Error::Checksum)?;
    let (body, checksum) = delta.split_at(body_length);
    let mut reader = Reader(&body[MAGIC.len()..]);
    // the version first: another version may place its checksum elsewhere
    match reader.u32()? {
        FORMAT_VERSION => {}
        other => return Err(Error::FormatVersion(other)),
    }
    if Digest::of(body).0 != checksum {
        return Err(Error::Checksum);
    }
    if reader.u32()? != 0 {
        return Err(Error::Malformed("a reserved field is not zero".into()));
    }
    let header = Header {
        base: reader.digest()?,
        result: reader.digest()?,
    };
    let raw_length = reader.u64()?;
    if raw_length > TABLE_BYTES_MAX {
        return Err(Error::TooLarge {
            needed: raw_length,
            limit: TABLE_BYTES_MAX,
        });
    }
    let stored_length = reader.u64()?;
    let stored = usize::try_from(stored_length)
        .ok()
        .and_then(|length| reader.take(length).ok())
        .ok_or_else(|| Error::Malformed("the table is longer than the delta".into()))?;
    let table = codec::decompress(stored, raw_length as usize)?;
    Ok((header, table, reader.0))
}

fn decode(
    base: &Image,
    base_listing: &listing::Listing,
    delta: &[u8],
    result_bytes_max: u64,
) -> Result<(Image, Digest), Error> {
    let (header, table, payloads) = open(delta)?;
    let base_root = base_listing.root();
    if header.base != base_root {
        return Err(Error::WrongBase {
            expected: header.base,
            found: base_root,
        });
    }
    let table = Table::from_bytes(&table)?;
    let needed = table.result_bytes(base)?;
    if needed > result_bytes_max {
        return Err(Error::TooLarge {
            needed,
            limit: result_bytes_max,
        });
    }

    let mut result = base.clone();
    let mut payloads = Reader(payloads);
    for Entry { name, change } in &table.tensors {
        change_tensor(&mut result, name, change, &mut payloads).map_err(|error| in_entry(name, error))?;
    }
    for Entry { name, change } in &table.files {
        change_file(&mut result, name, change, &mut payloads).map_err(|error| in_entry(name, error))?;
    }
    if !payloads.0.is_empty() {
        return Err(Error::Malformed("there are bytes after the last payload".into()));
    }

    let found = result_listing(base_listing, &table, &result).root();
    if found != header.result {
        return Err(Error::WrongResult {
            expected: header.result,
            found,
        });
    }
    Ok((result, found))
}

fn change_tensor(
    result: &mut Image,
    name: &str,
    change: &Change<table::Form>,
    payloads: &mut Reader<'_>,
) -> Result<(), Error> {
    let stored = take(payloads, change.stored_bytes())?;
    let tensor = match change {
        Change::Removed => {
            result.tensors.remove(name);
            return Ok(());
        }
        Change::Sparse { .. } | Change::Xor { .. } => {
            let missing = || Error::Malformed("the base has no such tensor".into());
            let old = result.tensors.get(name).ok_or_else(missing)?;
            let width = codec::width(old.dtype);
            let bytes = match change {
                Change::Sparse { .. } => codec::sparse_apply(&old.bytes, stored, width)?,
                _ => codec::xor_apply(&old.bytes, stored, width)?,
            };
            TensorData {
                bytes: bytes.into(),
                ..old.clone()
            }
        }
        Change::Raw { form, .. } => form.tensor(Bytes::copy_from_slice(stored))?,
        Change::Zstd { form, .. } => form.tensor(codec::decompress(stored, form.bytes()?)?.into())?,
    };
    result.tensors.insert(name.into(), tensor);
    Ok(())
}

fn change_file(result: &mut Image, name: &str, change: &Change<u64>, payloads: &mut Reader<'_>) -> Result<(), Error> {
    let stored = take(payloads, change.stored_bytes())?;
    let bytes = match change {
        Change::Removed => {
            result.files.remove(name);
            return Ok(());
        }
        Change::Raw { .. } => Bytes::copy_from_slice(stored),
        Change::Zstd { form: size, .. } => {
            let size = usize::try_from(*size).map_err(|_| Error::Malformed("a size".into()))?;
            codec::decompress(stored, size)?.into()
        }
        Change::Sparse { .. } | Change::Xor { .. } => {
            return Err(Error::Malformed("a file is carried whole".into()));
        }
    };
    result.files.insert(name.into(), bytes);
    Ok(())
}

fn take<'a>(payloads: &mut Reader<'a>, length: u64) -> Result<&'a [u8], Error> {
    usize::try_from(length)
        .ok()
        .and_then(|length| payloads.take(length).ok())
        .ok_or_else(|| Error::Malformed("a payload is longer than the delta".into()))
}

/// The listing of `result`, hashing only what the delta touched: the digests of the rest are the base's.
fn result_listing(base: &listing::Listing, table: &Table, result: &Image) -> listing::Listing {
    let touched = Image {
        tensors: table
            .tensors
            .iter()
            .filter_map(|entry| result.tensors.get_key_value(&entry.name))
            .map(|(name, tensor)| (name.clone(), tensor.clone()))
            .collect(),
        files: table
            .files
            .iter()
            .filter_map(|entry| result.files.get_key_value(&entry.name))
            .map(|(name, bytes)| (name.clone(), bytes.clone()))
            .collect(),
    };
    let mut listing = listing::Listing::of(&touched);
    let mentioned =
        |entries: &mut dyn Iterator<Item = &String>| entries.cloned().collect::<std::collections::BTreeSet<_>>();
    let tensors = mentioned(&mut table.tensors.iter().map(|entry| &entry.name));
    let files = mentioned(&mut table.files.iter().map(|entry| &entry.name));
    let kept = base.tensors.iter().filter(|t| !tensors.contains(&t.name));
    listing.tensors.extend(kept.cloned());
    listing.tensors.sort_by(|a, b| a.name.cmp(&b.name));
    let kept = base.files.iter().filter(|f| !files.contains(&f.name));
    listing.files.extend(kept.cloned());
    listing.files.sort_by(|a, b| a.name.cmp(&b.name));
    listing
}

impl From<listing::Error> for Error {
    fn from(error: listing::Error) -> Self {
        Error::Malformed(error.to_string())
    }
}

fn in_entry(name: &str, error: Error) -> Error {
    match error {
        Error::Malformed(reason) => Error::Malformed(format!("`{name}`: {reason}")),
        other => other,
    }
}

#[cfg(test)]
mod tests;
