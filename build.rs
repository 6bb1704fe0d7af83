//! Gives the binary its version text. Migrations are compiled in, so a changed one rebuilds it.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=migrations");
    println!("cargo::rerun-if-env-changed=SPRINGTIDE_COMMIT");
    let commit = commit().map_or(String::new(), |commit| format!(" ({commit})"));
    println!(
        "cargo::rustc-env=SPRINGTIDE_VERSION={}{commit}",
        env!("CARGO_PKG_VERSION")
    );
}

/// SPRINGTIDE_COMMIT, or git's answer in release builds. Development builds must not be rebuilt by
/// every commit.
fn commit() -> Option<String> {
    if let Some(commit) = std::env::var("SPRINGTIDE_COMMIT")
        .ok()
        .filter(|commit| !commit.is_empty())
    {
        return Some(commit);
    }
    let log = Path::new(".git/logs/HEAD");
    if std::env::var("PROFILE").as_deref() != Ok("release") || !log.exists() {
        return None;
    }
    println!("cargo::rerun-if-changed={}", log.display());
    let output = Command::new("git")
        .args(["rev-parse", "--short=12", "HEAD"])
        .output()
        .ok()?;
    let commit = String::from_utf8(output.stdout).ok()?;
    (output.status.success()).then(|| commit.trim().to_owned())
}
