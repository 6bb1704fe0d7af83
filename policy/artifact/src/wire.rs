//! Fields that the binary formats share: names, dtypes, shapes and integers, little-endian.

use safetensors::Dtype;

use crate::digest::Digest;

/// Why a field could not be read.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    #[error("the bytes end early")]
    Truncated,
    #[error("a name is not UTF-8")]
    NotUtf8,
    #[error("unknown dtype `{0}`")]
    Dtype(String),
    #[error("a dimension does not fit this machine")]
    Dimension,
    #[error("`{0}` is out of order, or there twice")]
    Order(String),
}

/// Returns an error if the names are not strictly ascending.
pub(crate) fn ascending<'a>(names: impl Iterator<Item = &'a str>) -> Result<(), Error> {
    let mut last: Option<&str> = None;
    for name in names {
        if last.is_some_and(|last| last >= name) {
            return Err(Error::Order(name.into()));
        }
        last = Some(name);
    }
    Ok(())
}

/// Length u16, UTF-8 bytes. A longer name is cut.
pub(crate) fn push_name(out: &mut Vec<u8>, name: &str) {
    let bytes = &name.as_bytes()[..name.len().min(0xffff)];
    out.extend((bytes.len() as u16).to_le_bytes());
    out.extend(bytes);
}

/// Length u8, ASCII name as in safetensors.
pub(crate) fn push_dtype(out: &mut Vec<u8>, dtype: Dtype) {
    let name = dtype.to_string();
    out.push(name.len() as u8);
    out.extend(name.as_bytes());
}

/// Rank u8, each dimension u64.
pub(crate) fn push_shape(out: &mut Vec<u8>, shape: &[usize]) {
    out.push(shape.len() as u8);
    for &dimension in shape {
        out.extend((dimension as u64).to_le_bytes());
    }
}

/// Takes fields off the front of a slice. Every length is checked against what is left.
pub(crate) struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    pub fn take(&mut self, n: usize) -> Result<&'a [u8], Error> {
        self.0.split_off(..n).ok_or(Error::Truncated)
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Error> {
        let (head, tail) = self.0.split_first_chunk().ok_or(Error::Truncated)?;
        self.0 = tail;
        Ok(*head)
    }

    pub fn u8(&mut self) -> Result<u8, Error> {
        Ok(u8::from_le_bytes(self.array()?))
    }

    pub fn u32(&mut self) -> Result<u32, Error> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub fn u64(&mut self) -> Result<u64, Error> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub fn digest(&mut self) -> Result<Digest, Error> {
        Ok(Digest(self.array()?))
    }

    pub fn name(&mut self) -> Result<String, Error> {
        let length = u16::from_le_bytes(self.array()?);
        let bytes = self.take(length.into())?;
        String::from_utf8(bytes.to_vec()).map_err(|_| Error::NotUtf8)
    }

    pub fn dtype(&mut self) -> Result<Dtype, Error> {
        let length = self.u8()?;
        let name = String::from_utf8_lossy(self.take(length.into())?).into_owned();
        // safetensors parses its dtypes through serde only
        serde_json::from_value(serde_json::Value::String(name.clone())).map_err(|_| Error::Dtype(name))
    }

    pub fn shape(&mut self) -> Result<Vec<usize>, Error> {
        (0..self.u8()?)
            .map(|_| usize::try_from(self.u64()?).map_err(|_| Error::Dimension))
            .collect()
    }
}
