//! What is looked for, in all forms in which programs print it, and where others can look.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use base64::Engine;
use nix::unistd::Uid;

const NOBODY: u32 = 65_534;

/// What is looked for, and under which name.
pub struct Secrets(pub Vec<(String, String)>);

impl Secrets {
    /// A text, also as programs print bytes.
    pub fn text(&mut self, name: &str, text: &str) {
        let bytes = text.as_bytes();
        let mut forms = vec![("", text.to_owned())];
        forms.push((" as hex", bytes.iter().map(|byte| format!("{byte:02x}")).collect()));
        for separator in [", ", ","] {
            let list: Vec<String> = bytes.iter().map(u8::to_string).collect();
            forms.push((" as a list of bytes", list.join(separator)));
        }
        // Base64 of what surrounds it at each of three alignments; the ends depend on the neighbors
        for skipped in 0..3 {
            let padded = [&b"..."[..skipped], bytes].concat();
            let encoded = base64::engine::general_purpose::STANDARD_NO_PAD.encode(padded);
            forms.push((" as Base64", encoded[4..encoded.len() - 4].to_owned()));
        }
        let named = |(form, needle)| (format!("{name}{form}"), needle);
        self.0.extend(forms.into_iter().map(named));
    }

    /// Six token ids in a row, as lists are printed.
    pub fn tokens(&mut self, name: &str, ids: &[u32]) {
        let telling = |window: &&[u32]| window.iter().collect::<BTreeSet<_>>().len() >= 4;
        for window in ids.windows(6).filter(telling) {
            let ids: Vec<String> = window.iter().map(u32::to_string).collect();
            for separator in [", ", ",", " "] {
                self.0.push((name.to_owned(), ids.join(separator)));
            }
        }
    }

    pub fn assert_absent(&self, place: &str, text: &[u8]) {
        let text = String::from_utf8_lossy(text);
        for (name, needle) in &self.0 {
            let found = text.find(needle).map(|at| {
                let from = text.floor_char_boundary(at.saturating_sub(200));
                text[from..].chars().take(400).collect::<String>()
            });
            assert_eq!(found, None, "{name} is in {place}");
        }
    }
}

/// What other users see of a process.
pub fn visible_of_process(pid: i32) -> Vec<u8> {
    let mut visible = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    if Uid::effective().is_root() {
        for part in ["environ", "cmdline", "status", "comm"] {
            let mut cat = Command::new("cat");
            cat.arg(format!("/proc/{pid}/{part}"))
                .uid(NOBODY)
                .gid(NOBODY)
                .current_dir("/");
            visible.extend(cat.output().unwrap().stdout);
        }
    }
    visible
}

/// The files below a folder that others can read: their mode lets them, and those of the folders
/// above.
pub fn readable(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let Ok(metadata) = fs::symlink_metadata(&path) else {
            continue;
        };
        let mode = metadata.permissions().mode();
        if metadata.is_dir() && mode & 0o011 != 0 {
            readable(&path, found);
        } else if metadata.is_file() && mode & 0o044 != 0 {
            found.push(path);
        }
    }
}
