//! A reward definition: a stored one by its number, or one from a file.

use std::convert::Infallible;
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::Context;
use ingest::reward::stored::{self, Stored};
use ingest::reward::{Definition, Metric, Rule};
use serde::Deserialize;
use sqlx::PgPool;

use crate::config::Config;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    Version(i32),
    File(PathBuf),
}

impl FromStr for Source {
    type Err = Infallible;

    /// A file whose name is a number is `./2`.
    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(match text.parse() {
            Ok(version) => Self::Version(version),
            Err(_) => Self::File(PathBuf::from(text)),
        })
    }
}

/// The part of a configuration file that is read; other sections are ignored.
#[derive(Debug, Deserialize)]
struct File {
    ingest: Surfaces,
}

#[derive(Debug, Deserialize)]
struct Surfaces {
    #[serde(default)]
    surface: Vec<Definition>,
    #[serde(default)]
    metric: Vec<Metric>,
}

impl Source {
    /// The rule by which it scores, together with the metrics of the configuration.
    pub async fn rule(&self, pool: &PgPool, config: &Config, surface: &str) -> anyhow::Result<Rule> {
        let (definition, metrics) = match self {
            Self::Version(version) => (of_version(pool, surface, *version).await?, Vec::new()),
            Self::File(file) => {
                let text = tokio::fs::read_to_string(file).await;
                let text = text.with_context(|| format!("read {}", file.display()))?;
                read(&text, surface).with_context(|| format!("parse {}", file.display()))?
            }
        };
        config.ingest.rule_of(definition, &metrics)
    }
}

async fn of_version(pool: &PgPool, surface: &str, version: i32) -> anyhow::Result<Definition> {
    let versions = stored::versions(pool, Some(surface))
        .await
        .context("read definitions")?;
    let known: Vec<String> = versions.iter().map(|stored| stored.version.to_string()).collect();
    let found = versions.into_iter().find(|stored| stored.version == version);
    let Stored { definition, .. } = found.with_context(|| match known.is_empty() {
        true => format!("no definition of {surface:?} was ever in force"),
        false => format!("{surface:?} has the versions {}; name one of them", known.join(", ")),
    })?;
    serde_json::from_value(definition).with_context(|| {
        format!("version {version} of {surface:?} has fields that this program does not know; write it as a file")
    })
}

fn read(text: &str, surface: &str) -> anyhow::Result<(Definition, Vec<Metric>)> {
    let File { ingest } = toml::from_str(text)?;
    let mut named = ingest
        .surface
        .into_iter()
        .filter(|definition| definition.name == surface);
    let definition = named
        .next()
        .with_context(|| format!("the file has no [[ingest.surface]] name = {surface:?}"))?;
    anyhow::ensure!(
        named.next().is_none(),
        "the file has [[ingest.surface]] name = {surface:?} twice"
    );
    Ok((definition, ingest.metric))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_a_version_and_other_text_a_file() {
        assert_eq!("2".parse(), Ok(Source::Version(2)));
        for file in ["./2", "next.toml", "2.toml"] {
            assert_eq!(file.parse(), Ok(Source::File(PathBuf::from(file))));
        }
    }

    #[test]
    fn one_surface_of_a_configuration_file_is_read() {
        let text = "[trainer]\nthreads = 9\n[[ingest.surface]]\nname = \"chat\"\nhorizon_seconds = 9.0\n\
                    [[ingest.surface]]\nname = \"other\"\nhorizon_seconds = 1.0\n[[ingest.metric]]\nname = \"kept\"\ntype = \"float\"\n";
        let (definition, metrics) = read(text, "chat").unwrap();
        assert_eq!((definition.horizon_seconds, metrics[0].name.as_str()), (9.0, "kept"));
        let missing = read(text, "completion").unwrap_err().to_string();
        assert!(missing.contains("name = \"completion\""), "{missing}");
        let twice = read(&text.replace("other", "chat"), "chat").unwrap_err().to_string();
        assert!(twice.contains("twice"), "{twice}");
        assert!(read("[[ingest.surface]]\nname = \"chat\"\nhorizon = 9.0", "chat").is_err());
    }

    #[test]
    fn the_projects_configuration_can_be_read() {
        let text = std::fs::read_to_string(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("springtide.toml")).unwrap();
        assert_eq!(read(&text, "completion").unwrap().0, Definition::completion());
    }
}
