//! The files of a version beside its tensors, such as its tokenizer, without reading the tensors.

use std::collections::BTreeMap;

use artifact::checkpoint::{Checkpoint, FilePlace, HEADER_BYTES, Header};
use artifact::delta;
use artifact::digest::Digest;
use artifact::manifest::ObjectRef;
use artifact::sign::TrustedKeys;

use super::{Error, Store};

/// Of a content index, and of a file.
const BYTES_MAX: u64 = 64 << 20;

impl Store {
    /// The named files of a version, without tensors. A file that it lacks is left out.
    pub async fn files(
        &self,
        policy: &str,
        serial: i64,
        keys: &TrustedKeys,
        names: &[&str],
    ) -> Result<Checkpoint, Error> {
        let path = self.path(policy, serial, keys).await?;
        let missing = || Error::NoPath {
            policy: policy.to_owned(),
            version: serial,
            reason: "no checkpoint leads to it".to_owned(),
        };
        let object = path.checkpoint.ok_or_else(missing)?;
        let root = self.get_manifest(policy, path.start, keys).await?.root;
        let corrupt = |reason: String| Error::Corrupt {
            key: format!("the checkpoint of version {}", path.start),
            reason,
        };
        let places = self.places_of_files(policy, &object, root, &corrupt).await?;
        let mut files = BTreeMap::new();
        for (name, FilePlace { range, digest }) in places {
            if !names.contains(&&*name) {
                continue;
            }
            if range.end - range.start > BYTES_MAX {
                return Err(corrupt(format!("`{name}` is larger than {BYTES_MAX} bytes")));
            }
            let bytes = match range.is_empty() {
                true => bytes::Bytes::new(),
                false => self.read_range(policy, &object, range).await?,
            };
            if Digest::of(&bytes) != digest {
                return Err(corrupt(format!("`{name}` does not match its digest")));
            }
            files.insert(name, bytes);
        }
        for step in &path.steps {
            let delta = self.get_object(policy, &step.delta).await?;
            let changed = delta::changed_files(&delta).map_err(|error| Error::Corrupt {
                key: format!("the delta of version {}", step.to),
                reason: error.to_string(),
            })?;
            for (name, bytes) in changed.into_iter().filter(|(name, _)| names.contains(&&**name)) {
                match bytes {
                    Some(bytes) => drop(files.insert(name, bytes)),
                    None => drop(files.remove(&name)),
                }
            }
        }
        Ok(Checkpoint {
            files,
            ..Checkpoint::default()
        })
    }

    async fn places_of_files(
        &self,
        policy: &str,
        object: &ObjectRef,
        root: Digest,
        corrupt: &impl Fn(String) -> Error,
    ) -> Result<BTreeMap<String, FilePlace>, Error> {
        let bad = |error: artifact::checkpoint::Error| corrupt(error.to_string());
        let header = self.read_range(policy, object, 0..HEADER_BYTES as u64).await?;
        let header = Header::from_bytes(&header).map_err(bad)?;
        if header.root != root {
            return Err(corrupt("its content hash is not that of the version".to_owned()));
        }
        if header.index.end > object.size_bytes.min(BYTES_MAX) {
            return Err(corrupt("its content index is too long".to_owned()));
        }
        let index = self.read_range(policy, object, header.index.clone()).await?;
        header.files(&index).map_err(bad)
    }
}
