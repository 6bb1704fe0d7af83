//! `shard`: one machine's part of a delta that is too large for one machine.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Instant;

use anyhow::{Context, ensure};
use artifact::delta::{self, FrameSpan};
use artifact::folder::LazyFolder;
use artifact::threads::Threads;
use runs::publish::put_shard;
use serde_json::json;

use super::StoreArgs;
use crate::cli::output::{Output, bytes};
use crate::config::Config;

/// Which shard, of how many.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Part {
    /// From 0.
    shard: usize,
    of: usize,
}

impl FromStr for Part {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split_once('/');
        let parts = parts.and_then(|(shard, of)| Some((shard.parse::<usize>().ok()?, of.parse::<usize>().ok()?)));
        match parts {
            Some((shard, of)) if (1..=of).contains(&shard) => Ok(Part { shard: shard - 1, of }),
            _ => Err("write 1/4 for the first of four".into()),
        }
    }
}

#[derive(Debug, Clone, clap::Args)]
pub struct Shard {
    /// Hugging Face folder of the new weights: safetensors, whole or in shards with their index.
    folder: PathBuf,
    /// Folder of the version that they were trained from, as `springtide policy pull` wrote it.
    #[arg(long, value_name = "DIR")]
    base: PathBuf,
    /// Which shard this is, of how many: 1/4 to 4/4.
    #[arg(long, value_name = "N/OF")]
    shard: Part,
    /// Name of the upload: equal for all shards of a version, different for every version. 1 to 64
    /// of a-z, 0-9, `._-`.
    #[arg(long)]
    name: String,
    #[command(flatten)]
    at: StoreArgs,
    #[command(flatten)]
    output: Output,
}

impl Shard {
    pub async fn run(self, config: &Config) -> anyhow::Result<()> {
        check_name(&self.name)?;
        let place = self.at.open(config).await?;
        let started = Instant::now();
        let Part { shard, of } = self.shard;
        let (base, folder, threads) = (self.base, self.folder, place.store.threads().clone());
        let encoded = tokio::task::spawn_blocking(move || encode(&base, &folder, shard, of, &threads)).await??;
        let encode_seconds = started.elapsed().as_secs_f64();
        let key = place.publisher_key()?;
        put_shard(&place.store, &key, &place.policy, (&self.name, shard, of), &encoded).await?;
        let upload_seconds = started.elapsed().as_secs_f64() - encode_seconds;
        let object = encoded.report.shard().object;
        let document = json!({
            "name": self.name,
            "shard": shard + 1,
            "of": of,
            "object": object,
            "seconds": { "encode": encode_seconds, "upload": upload_seconds },
        });
        self.output.print(&document, || {
            format!(
                "shard {} of {of} of {}: {}, encoded in {encode_seconds:.2} s, uploaded in {upload_seconds:.2} s",
                shard + 1,
                self.name,
                bytes(object.size_bytes)
            )
        })
    }
}

/// Reads the frames of one shard from both folders and encodes them.
fn encode(
    base: &Path,
    folder: &Path,
    shard: usize,
    of: usize,
    threads: &Threads,
) -> anyhow::Result<delta::EncodedShard> {
    let (old, new) = (open_folder(base)?, open_folder(folder)?);
    check_same_form(&old, &new, base, folder)?;
    let mut frames = vec![];
    for part in delta::partition(old.forms(), shard, of)? {
        let before = old.read(part.name, part.bytes.clone())?;
        let after = new.read(part.name, part.bytes.clone())?;
        frames.push((part, before, after));
    }
    let spans: Vec<FrameSpan> = frames
        .iter()
        .map(|(part, old, new)| FrameSpan {
            name: part.name,
            dtype: part.dtype,
            shape: part.shape,
            first_frame: part.frames.start,
            old,
            new,
        })
        .collect();
    Ok(delta::encode_shard(&spans, threads)?)
}

/// Shards are of weights that changed; a network with other tensors is another policy.
fn check_same_form(old: &LazyFolder, new: &LazyFolder, base: &Path, folder: &Path) -> anyhow::Result<()> {
    let (before, after): (Vec<_>, Vec<_>) = (old.forms().collect(), new.forms().collect());
    let differs = before.iter().find(|form| !after.contains(form));
    let differs = differs.or_else(|| after.iter().find(|form| !before.contains(form)));
    let name = differs.map_or("a tensor", |(name, ..)| name);
    ensure!(
        before == after,
        "{} and {} have different tensors, `{name}` for one; shards need the same names, types and shapes",
        base.display(),
        folder.display()
    );
    Ok(())
}

/// Opens a folder of weights without reading them.
pub(super) fn open_folder(folder: &Path) -> anyhow::Result<LazyFolder> {
    LazyFolder::open(folder).with_context(|| format!("read the weights in {}", folder.display()))
}

/// Refuses a name that cannot be part of an object's key.
pub(super) fn check_name(name: &str) -> anyhow::Result<()> {
    ensure!(
        store::check_policy(name).is_ok(),
        "`{name}` is not a valid name: use 1 to 64 of a-z, 0-9, `.`, `_` and `-`, not starting with `.`"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::Part;

    #[test]
    fn a_shard_is_written_as_number_of_total() {
        assert_eq!("1/4".parse(), Ok(Part { shard: 0, of: 4 }));
        assert_eq!("4/4".parse(), Ok(Part { shard: 3, of: 4 }));
        for text in ["", "4", "0/4", "5/4", "1/0", "-1/4", "a/b", "1/4/2"] {
            assert!(text.parse::<Part>().is_err(), "{text}");
        }
    }
}
