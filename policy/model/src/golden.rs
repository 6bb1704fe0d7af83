//! The golden models of `tests/golden`, for unit tests, also those of `autograd`.

use artifact::checkpoint::Checkpoint;
use std::path::{Path, PathBuf};

pub fn path(folder: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../model/tests/golden")
        .join(folder)
}

pub fn checkpoint(folder: &str) -> Checkpoint {
    Checkpoint::read_dir(&path(folder)).unwrap()
}

/// Every folder that holds a model, sorted by name.
pub fn folders() -> Vec<String> {
    let entries = std::fs::read_dir(path("")).unwrap().map(|entry| entry.unwrap());
    let models = entries.filter(|entry| entry.path().join("config.json").exists());
    let mut names: Vec<String> = models.map(|entry| entry.file_name().into_string().unwrap()).collect();
    names.sort();
    assert!(names.len() >= 7, "the golden models are incomplete");
    names
}
