//! `share`, and `publish --shares`: a version too large for one machine, published by several.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Instant;

use anyhow::{Context, bail};
use policy::delta::{self, Stretch};
use policy::folder::LazyFolder;
use policy::kernel::Threads;
use policy::sign::SigningKey;
use serde_json::json;
use trainer::publish::{Publisher, Shares, publish_shares, put_share};

use super::keep::PUBLISHER_KEY;
use super::{At, print_json, size};
use crate::config::Config;

/// Which of how many shares.
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
            _ => Err("give it as 1/4, the first of four".into()),
        }
    }
}

#[derive(Debug, Clone, clap::Args)]
pub struct Share {
    /// Hugging Face folder of the new weights: safetensors, whole or in shards with their index.
    folder: PathBuf,
    /// Folder of the version that they were trained from, as `springtide policy pull` wrote it.
    #[arg(long, value_name = "DIR")]
    base: PathBuf,
    /// Which share this is, of how many: 1/4 to 4/4.
    #[arg(long, value_name = "N/OF")]
    shard: Part,
    /// The same for all shares of a version, and another for each version: 1 to 64 of a-z, 0-9, `.`, `_` and `-`.
    #[arg(long)]
    name: String,
    #[command(flatten)]
    at: At,
    /// For programs.
    #[arg(long)]
    json: bool,
}

impl Share {
    pub async fn run(self, config: &Config) -> anyhow::Result<()> {
        check_name(&self.name)?;
        let place = self.at.open(config).await?;
        let started = Instant::now();
        let Part { shard, of } = self.shard;
        let (base, folder, threads) = (self.base, self.folder, place.store.threads().clone());
        let share = tokio::task::spawn_blocking(move || share(&base, &folder, shard, of, &threads)).await??;
        let encode_seconds = started.elapsed().as_secs_f64();
        let key = SigningKey::load_or_create(&place.keys_dir, PUBLISHER_KEY).context("load the signing key")?;
        put_share(&place.store, &key, &place.policy, (&self.name, shard, of), &share).await?;
        let upload_seconds = started.elapsed().as_secs_f64() - encode_seconds;
        let object = share.report.shard().object;
        if self.json {
            return print_json(&json!({
                "name": self.name,
                "shard": shard + 1,
                "of": of,
                "object": object,
                "seconds": { "encode": encode_seconds, "upload": upload_seconds },
            }));
        }
        println!(
            "share {} of {of} of {}: {}, encoded in {encode_seconds:.2} s, uploaded in {upload_seconds:.2} s",
            shard + 1,
            self.name,
            size::bytes(object.size_bytes)
        );
        Ok(())
    }
}

/// Reads, of both folders, the frames of one share, and codes them.
fn share(base: &Path, folder: &Path, shard: usize, of: usize, threads: &Threads) -> anyhow::Result<delta::Share> {
    let (old, new) = (open(base)?, open(folder)?);
    let (forms, others): (Vec<_>, Vec<_>) = (old.forms().collect(), new.forms().collect());
    if forms != others {
        let differs = forms.iter().find(|form| !others.contains(form));
        let differs = differs.or_else(|| others.iter().find(|form| !forms.contains(form)));
        let name = differs.map_or("a tensor", |(name, ..)| name);
        bail!(
            "{} and {} have different forms, `{name}` for one: shares are of weights that changed, not of other networks",
            base.display(),
            folder.display()
        );
    }
    let mut held = vec![];
    for run in delta::run(forms.iter().copied(), shard, of)? {
        let before = old.read(run.name, run.bytes.clone())?;
        let after = new.read(run.name, run.bytes.clone())?;
        held.push((run, before, after));
    }
    let stretches = held.iter().map(|(run, old, new)| Stretch {
        name: run.name,
        dtype: run.dtype,
        shape: run.shape,
        first_frame: run.frames.start,
        old,
        new,
        known: None,
    });
    Ok(delta::share(&stretches.collect::<Vec<_>>(), threads)?)
}

fn open(folder: &Path) -> anyhow::Result<LazyFolder> {
    LazyFolder::open(folder).with_context(|| format!("read the weights in {}", folder.display()))
}

/// What `publish --shares` was asked for.
pub(super) struct Publication {
    pub name: String,
    pub of: usize,
    pub line: String,
    pub parent: i64,
    pub base: PathBuf,
    pub folder: PathBuf,
}

pub(super) async fn publish(publisher: &Publisher, asked: Publication, as_json: bool) -> anyhow::Result<()> {
    check_name(&asked.name)?;
    let Publication {
        name,
        of,
        line,
        parent,
        base,
        folder,
    } = asked;
    let files = tokio::task::spawn_blocking(move || anyhow::Ok((open(&base)?.files, open(&folder)?.files)));
    let (base, files) = files.await??;
    let shares = Shares {
        name,
        of,
        line,
        parent,
        base,
        files,
    };
    let (manifest, timings) = publish_shares(publisher, shares).await.context("publish")?;
    let bytes = manifest.delta_bytes().unwrap_or_default();
    if as_json {
        return print_json(&json!({
            "version": manifest.version,
            "root": manifest.root,
            "line": manifest.line,
            "branch": manifest.branch,
            "parent": parent,
            "delta_bytes": bytes,
            "delta_shards": manifest.delta_shards,
            "tensor_bytes": manifest.tensor_bytes,
            "seconds": { "upload": timings.upload, "commit": timings.commit },
        }));
    }
    println!("version {} is the head of line {}", manifest.version, manifest.line);
    println!("root     {}", manifest.root);
    println!(
        "delta    {} in {} shards, 1/{:.0} of {}",
        size::bytes(bytes),
        manifest.delta_shards.len(),
        manifest.tensor_bytes as f64 / bytes.max(1) as f64,
        size::bytes(manifest.tensor_bytes)
    );
    println!(
        "image    none: nobody had all the weights; the next publication from one machine can write one (`--image`)"
    );
    Ok(())
}

fn check_name(name: &str) -> anyhow::Result<()> {
    let letter = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '.' | '_' | '-');
    if (1..=64).contains(&name.len()) && name.chars().all(letter) && !name.starts_with('.') {
        return Ok(());
    }
    bail!("`{name}` is not a name: 1 to 64 of a-z, 0-9, `.`, `_` and `-`, not starting with `.`")
}

#[cfg(test)]
mod tests {
    use super::Part;

    #[test]
    fn a_share_is_one_of_so_many() {
        assert_eq!("1/4".parse(), Ok(Part { shard: 0, of: 4 }));
        assert_eq!("4/4".parse(), Ok(Part { shard: 3, of: 4 }));
        for text in ["", "4", "0/4", "5/4", "1/0", "-1/4", "a/b", "1/4/2"] {
            assert!(text.parse::<Part>().is_err(), "{text}");
        }
    }
}
