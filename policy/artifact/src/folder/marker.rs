//! Says which version a folder holds, so that later pulls can start from it.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::atomic;
use crate::digest::Digest;

/// The content of the file [`Marker::FILE`]. It is a hint: whoever uses the folder compares the
/// content hash.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Marker {
    pub policy: String,
    pub version: i64,
    /// Content hash of what is in the folder.
    pub root: Digest,
    /// Spec of a quantized copy.
    #[serde(rename = "quantised", default, skip_serializing_if = "Option::is_none")]
    pub quantized: Option<String>,
}

impl Marker {
    pub const FILE: &str = ".springtide.json";

    /// `None`: the folder has no marker. One that cannot be parsed is an error.
    pub fn read(folder: &Path) -> io::Result<Option<Self>> {
        match fs::read(folder.join(Self::FILE)) {
            Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes)?)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub fn write(&self, folder: &Path) -> io::Result<()> {
        let text = serde_json::to_vec_pretty(self)?;
        atomic::replace(&folder.join(Self::FILE), &[&text])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_marker_is_read_back_and_a_torn_one_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(Marker::read(folder.path()).unwrap(), None);
        let marker = Marker {
            policy: "demo".into(),
            version: 17,
            root: Digest::of(b"17"),
            quantized: None,
        };
        marker.write(folder.path()).unwrap();
        assert_eq!(Marker::read(folder.path()).unwrap(), Some(marker));
        fs::write(folder.path().join(Marker::FILE), "{").unwrap();
        let torn = Marker::read(folder.path()).unwrap_err();
        assert_eq!(torn.kind(), ErrorKind::UnexpectedEof);
    }
}
