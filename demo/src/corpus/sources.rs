//! Finds the source files, and decides which split each belongs to.

use std::{
    collections::{BTreeMap, HashSet},
    path::{Path, PathBuf},
};

use anyhow::{Context, bail};

/// Names the crates that the build has fetched.
const CARGO_LOCK: &str = include_str!("../../../Cargo.lock");

/// One source file, as its author wrote it.
#[derive(Debug, Clone)]
pub struct SourceFile {
    /// `name-version` of the crate, or the folder's name for `--corpus`.
    pub krate: String,
    /// Path inside the crate.
    pub path: String,
    pub text: String,
}

/// What a crate's files are used for. It depends only on the crate's family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Split {
    Train,
    Demo,
    HeldOut,
}

/// Sizes of usable files, in bytes. Smaller files have no context; larger ones are tables or
/// generated.
const FILE_BYTES: std::ops::RangeInclusive<u64> = 400..=120_000;
/// At most this many bytes of one crate are taken, so that no author dominates.
const CRATE_BYTES_MAX: usize = 600_000;
/// Files with a longer line are tables, not typed code.
const LINE_CHARS_MAX: usize = 240;
/// Families whose crates are generated or list constants of an operating system.
const EXCLUDED: &[&str] = &["windows", "winapi", "linux", "libc", "web", "js", "wasi", "fiat"];

/// The files of a folder of code in any language, or else of the demo split, or of the held-out one if
/// they are for `development`.
pub fn replayed_files(corpus: Option<&Path>, development: bool) -> anyhow::Result<Vec<SourceFile>> {
    let files = match corpus {
        Some(dir) => files_under(dir)?,
        None if development => files_of(Split::HeldOut)?,
        None => files_of(Split::Demo)?,
    };
    if files.is_empty() {
        bail!("no usable source files were found; run `cargo fetch`, or give a folder with --corpus");
    }
    Ok(files)
}

/// The files of one split, over all crates that Cargo.lock names and cargo has unpacked. Identical
/// files are taken once, in the split that comes first.
pub fn files_of(split: Split) -> anyhow::Result<Vec<SourceFile>> {
    let mut seen = HashSet::new();
    let mut chosen = Vec::new();
    for want in [Split::Train, Split::Demo, Split::HeldOut] {
        for (name, dir) in crates()? {
            if split_of(&name) != want {
                continue;
            }
            for file in files_of_crate(&name, &dir)? {
                if seen.insert(blake3::hash(file.text.as_bytes())) && want == split {
                    chosen.push(file);
                }
            }
        }
        if want == split {
            break;
        }
    }
    Ok(chosen)
}

/// The family is the name up to its first '-' or '_', so `tokio-util` is in the split of `tokio`.
/// 80% of families train, 12% are for the demo, 8% are held out.
pub fn split_of(krate: &str) -> Split {
    let family = krate.split(['-', '_']).next().unwrap_or(krate);
    let digest = blake3::hash(family.as_bytes());
    match u16::from_le_bytes([digest.as_bytes()[0], digest.as_bytes()[1]]) % 100 {
        0..80 => Split::Train,
        80..92 => Split::Demo,
        _ => Split::HeldOut,
    }
}

/// Folder of every registry crate of Cargo.lock that is unpacked, by `name-version`.
fn crates() -> anyhow::Result<BTreeMap<String, PathBuf>> {
    let registry = registry_sources()?;
    let lock: toml::Value = toml::from_str(CARGO_LOCK).context("parse Cargo.lock")?;
    let packages = lock.get("package").and_then(|p| p.as_array());
    let mut found = BTreeMap::new();
    for package in packages.into_iter().flatten() {
        let field = |name: &str| package.get(name).and_then(|v| v.as_str());
        let (Some(name), Some(version), Some(_)) = (field("name"), field("version"), field("source")) else {
            continue;
        };
        let family = name.split(['-', '_']).next().unwrap_or(name);
        if EXCLUDED.contains(&family) || name.ends_with("-sys") {
            continue;
        }
        let id = format!("{name}-{version}");
        if let Some(dir) = registry.iter().map(|r| r.join(&id)).find(|d| d.is_dir()) {
            found.insert(id, dir);
        }
    }
    if found.is_empty() {
        bail!("cargo has unpacked no crates under {registry:?}; run `cargo fetch` first");
    }
    Ok(found)
}

/// The folders into which cargo unpacks crates, one for each registry.
fn registry_sources() -> anyhow::Result<Vec<PathBuf>> {
    let home = match std::env::var_os("CARGO_HOME") {
        Some(home) => PathBuf::from(home),
        None => PathBuf::from(std::env::var_os("HOME").context("HOME is not set")?).join(".cargo"),
    };
    let root = home.join("registry/src");
    let entries =
        std::fs::read_dir(&root).with_context(|| format!("read {}; run `cargo fetch` first", root.display()))?;
    entries
        .map(|e| Ok(e.context("read the registry folder")?.path()))
        .collect()
}

/// The Rust files of a crate, up to a limit of bytes.
fn files_of_crate(id: &str, dir: &Path) -> anyhow::Result<Vec<SourceFile>> {
    let mut files = usable_files(id, dir, |path| {
        path.extension().is_some_and(|extension| extension == "rs")
    })?;
    let mut total = 0;
    let within = files.iter().take_while(|file| {
        total += file.text.len();
        total <= CRATE_BYTES_MAX
    });
    files.truncate(within.count());
    Ok(files)
}

/// Every usable text file of a folder, in any language.
fn files_under(dir: &Path) -> anyhow::Result<Vec<SourceFile>> {
    let name = dir.file_name().unwrap_or_default().display().to_string();
    let mut files = usable_files(&name, dir, |_| true)?;
    let mut seen = HashSet::new();
    files.retain(|file| seen.insert(blake3::hash(file.text.as_bytes())));
    Ok(files)
}

fn usable_files(krate: &str, dir: &Path, wanted: impl Fn(&Path) -> bool) -> anyhow::Result<Vec<SourceFile>> {
    let mut files = Vec::new();
    for path in walk(dir)?.iter().filter(|path| wanted(path)) {
        if let Some(text) = usable(path)? {
            files.push(SourceFile {
                krate: krate.to_owned(),
                path: path.strip_prefix(dir).unwrap_or(path).display().to_string(),
                text,
            });
        }
    }
    Ok(files)
}

/// Files below a folder in name order, without hidden files and build outputs.
fn walk(dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut folders = vec![dir.to_path_buf()];
    while let Some(folder) = folders.pop() {
        let entries = std::fs::read_dir(&folder).with_context(|| format!("read {}", folder.display()))?;
        for entry in entries {
            let entry = entry.with_context(|| format!("read {}", folder.display()))?;
            let name = entry.file_name();
            let name = name.to_string_lossy();
            let kind = entry.file_type()?;
            if name.starts_with('.') || name == "target" || name == "node_modules" {
                continue;
            } else if kind.is_dir() {
                folders.push(entry.path());
            } else if kind.is_file() {
                found.push(entry.path());
            }
        }
    }
    found.sort();
    Ok(found)
}

/// The text of a file that a person could have typed. `None` if it is generated, binary or of
/// another size.
fn usable(path: &Path) -> anyhow::Result<Option<String>> {
    let size = std::fs::metadata(path)?.len();
    if !FILE_BYTES.contains(&size) {
        return Ok(None);
    }
    let bytes = std::fs::read(path).with_context(|| format!("read {}", path.display()))?;
    let Ok(text) = String::from_utf8(bytes) else {
        return Ok(None);
    };
    let head: String = text.chars().take(1000).collect::<String>().to_lowercase();
    let generated = ["@generated", "automatically generated", "auto-generated", "do not edit"]
        .iter()
        .any(|mark| head.contains(mark));
    let tabular = text.lines().any(|l| l.chars().count() > LINE_CHARS_MAX);
    let special = text.contains("<|");
    Ok((!generated && !tabular && !special).then(|| text.replace("\r\n", "\n")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn siblings_share_a_split() {
        for (a, b) in [("tokio-1.54.1", "tokio-util-0.7.1"), ("serde-1.0", "serde_json-1.0")] {
            assert_eq!(split_of(a), split_of(b));
        }
    }

    #[test]
    fn a_folder_of_any_language_can_be_replayed_and_duplicates_are_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let text = "def f(x):\n    return x + 1\n".repeat(20);
        for name in ["a.py", "b.py"] {
            std::fs::write(dir.path().join(name), &text).unwrap();
        }
        std::fs::write(dir.path().join("short.py"), "x = 1\n").unwrap();
        std::fs::write(dir.path().join("gen.py"), format!("# @generated\n{text}")).unwrap();
        let files = replayed_files(Some(dir.path()), false).unwrap();
        assert_eq!(files.len(), 1);
        assert_eq!(files[0].path, "a.py");
    }
}
