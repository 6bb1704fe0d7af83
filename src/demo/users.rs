//! Whose code is replayed, and in whose style.

use std::{path::PathBuf, sync::Arc};

use super::house;

/// Whose code is replayed.
#[derive(Debug, Clone, clap::Args)]
pub struct Corpus {
    /// `house`: a team whose formatter is set up differently from what the base has seen. `plain`: files as they are.
    #[arg(long, value_enum, default_value_t = Users::House)]
    pub users: Users,
    /// How many developers, at least 200.
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u32).range(200..=100_000))]
    pub developers: u32,
    /// Folder of code to replay instead of the crates that this project's build has fetched.
    #[arg(long, value_name = "DIR")]
    pub corpus: Option<PathBuf>,
    /// Crates kept for choosing parameters, instead of the demo's own.
    #[arg(long, hide = true, conflicts_with = "corpus")]
    pub development: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Users {
    Plain,
    House,
}

impl std::fmt::Display for Users {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Users::Plain => "plain",
            Users::House => "house",
        })
    }
}

impl Corpus {
    /// Name and text of every file, in the style of these users.
    pub fn files(&self) -> anyhow::Result<Vec<(String, Arc<str>)>> {
        let files = match self.development {
            true => crate::corpus::development_files()?,
            false => crate::corpus::demo_files(self.corpus.as_deref())?,
        };
        let restyled = files.into_iter().map(|file| {
            let text = match self.users {
                Users::House if file.path.ends_with(".rs") => house::restyle(&file.text),
                _ => file.text,
            };
            (format!("{}/{}", file.krate, file.path), text.into())
        });
        Ok(restyled.collect())
    }
}
