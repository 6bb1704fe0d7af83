//! The files of an image: what `tools/world-image.sh` writes.

use std::path::Path;

use crate::provider::Error;

pub(super) const KERNEL: &str = "vmlinuz";
pub(super) const INITRAMFS: &str = "initramfs.gz";
pub(super) const DISK: &str = "root.ext4";

/// Refuses a folder that lacks a file.
pub(super) fn check(folder: &Path) -> Result<(), Error> {
    let missing = [KERNEL, INITRAMFS, DISK]
        .into_iter()
        .find(|name| !folder.join(name).is_file());
    match missing {
        Some(name) => Err(Error::Unusable(format!(
            "{} has no {name}: run `make world-image`, or set image to a folder that it wrote",
            folder.display()
        ))),
        None => Ok(()),
    }
}
