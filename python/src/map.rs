//! Maps files of weights into memory. Processes of one machine that map the same file share its
//! pages.

use std::fs::File;
use std::io;
use std::path::Path;

use bytes::Bytes;
use memmap2::Mmap;

/// The file's bytes, mapped for reading.
pub fn map(path: &Path) -> io::Result<Bytes> {
    let file = File::open(path)?;
    if file.metadata()?.len() == 0 {
        return Ok(Bytes::new()); // cannot be mapped
    }
    #[expect(unsafe_code, reason = "memmap2 cannot know what other processes do to the file")]
    // SAFETY: the mapping is private and read-only, and `Bytes` keeps it for as long as it is used. Nobody may
    // change or truncate the file meanwhile: the callers' documentation says so, and whoever writes model folders
    // (`artifact::atomic`) writes new files and renames them.
    let mapped = unsafe { Mmap::map(&file)? };
    Ok(Bytes::from_owner(mapped))
}
