//! Datasets: named, versioned queries over closed trajectories, for runs that do not learn from the
//! stream.
//!
//! A version is a row of `dataset` and never changes. The row has the query, how many trajectories it
//! selected at its creation, and a digest of the ids of their generations. Nothing is copied, so a
//! dataset gets smaller as retention deletes generations and tenants withdraw their consent. [`count`]
//! says by how much. A trajectory is in a dataset as a whole or not at all.
//!
//! ```text
//! query.rs     what a query may say
//! store.rs     the table: create, find, list
//! rows.rs      what was logged of a generation, as an export has it
//! file.rs      rows as JSON lines or Parquet, in parts
//! parquet.rs   the columns of Parquet
//! ```
//! The SQL function `dataset_members` selects the trajectories, for everybody who reads a dataset.
//! Runs are in `runs/offline`, the API in `api/datasets.rs`.

pub mod file;
pub(crate) mod parquet;
pub mod query;
pub mod rows;
pub mod store;

pub use query::{Query, Split};
pub use store::Dataset;

use artifact::digest::Digest;
use futures::TryStreamExt;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sqlx::PgConnection;
use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;
use uuid::Uuid;

const NAME_BYTES_MAX: usize = 63;

/// A version of a dataset, written `name@version`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Reference {
    pub name: String,
    pub version: i32,
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.name, self.version)
    }
}

impl From<Reference> for String {
    fn from(reference: Reference) -> Self {
        reference.to_string()
    }
}

impl TryFrom<String> for Reference {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl FromStr for Reference {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let error = || format!("`{text}` is no version of a dataset: write `name@version`, such as `accepted@1`");
        let (name, version) = text.rsplit_once('@').ok_or_else(error)?;
        check_name(name)?;
        let version = version.parse().ok().filter(|&version| version >= 1).ok_or_else(error)?;
        let name = name.to_owned();
        Ok(Reference { name, version })
    }
}

/// Refuses names that do not fit into a path or that `@` would cut.
pub fn check_name(name: &str) -> Result<(), String> {
    let valid = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '_' | '.');
    let starts = name.starts_with(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit());
    match starts && name.len() <= NAME_BYTES_MAX && name.chars().all(valid) {
        true => Ok(()),
        false => Err(format!(
            "the name of a dataset has up to {NAME_BYTES_MAX} lower-case letters, digits, `-`, `_` and `.`, and begins \
             with a letter or digit; `{}` does not",
            name.escape_debug()
        )),
    }
}

/// The trajectories that a query selects now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Count {
    /// Those that are stored.
    pub stored: Size,
    /// Those of them whose tenant consents.
    pub available: Size,
    /// Of the stored generations.
    pub digest: Digest,
    /// The generation with the highest id.
    pub last: Option<Uuid>,
    pub tenants: BTreeSet<String>,
}

/// How much something has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Size {
    pub trajectories: i64,
    /// A single generation is one trajectory; an episode has several.
    pub generations: i64,
}

/// Counts what a query selects. `only_consenting`: for a new dataset, see `dataset_members`.
pub async fn count(
    connection: &mut PgConnection,
    policy: &str,
    query: &Value,
    only_consenting: bool,
) -> Result<Count, sqlx::Error> {
    let mut rows = sqlx::query!(
        r#"
        select generation_ids as "ids!", tenant_id as "tenant!", consents as "consents!"
        from dataset_members($1, $2, $3)
        "#,
        policy,
        query,
        only_consenting
    )
    .fetch(connection);
    let mut ids: Vec<Uuid> = Vec::new();
    let (mut stored, mut available, mut tenants) = (Size::default(), Size::default(), BTreeSet::new());
    while let Some(row) = rows.try_next().await? {
        let generations = i64::try_from(row.ids.len()).unwrap_or(i64::MAX);
        for size in [Some(&mut stored), row.consents.then_some(&mut available)] {
            let Some(size) = size else { continue };
            size.trajectories += 1;
            size.generations += generations;
        }
        ids.extend(row.ids);
        if !tenants.contains(&row.tenant) {
            tenants.insert(row.tenant);
        }
    }
    ids.sort_unstable();
    let mut hasher = blake3::Hasher::new();
    for id in &ids {
        hasher.update(id.as_bytes());
    }
    Ok(Count {
        stored,
        available,
        digest: Digest(*hasher.finalize().as_bytes()),
        last: ids.last().copied(),
        tenants,
    })
}

/// A trajectory of a dataset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// `None`: it is a single generation.
    pub episode: Option<Uuid>,
    /// At least one, in the order of the session.
    pub generations: Vec<Uuid>,
}

/// The trajectories of a dataset that are stored and whose tenant consents, the oldest first.
/// `tenant`: only what it logged.
pub async fn available(
    connection: &mut PgConnection,
    dataset: &Dataset,
    tenant: Option<&str>,
) -> Result<Vec<Member>, sqlx::Error> {
    sqlx::query_as!(
        Member,
        r#"
        select episode_id as episode, generation_ids as "generations!" from dataset_members($1, $2, false)
        where consents and ($3::text is null or tenant_id = $3)
        "#,
        dataset.policy,
        dataset.query,
        tenant
    )
    .fetch_all(connection)
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reference_is_a_name_and_a_version() {
        let reference: Reference = "accepted.house-1@12".parse().unwrap();
        assert_eq!((reference.name.as_str(), reference.version), ("accepted.house-1", 12));
        assert_eq!(reference.to_string(), "accepted.house-1@12");
        let json = serde_json::to_string(&reference).unwrap();
        assert_eq!(serde_json::from_str::<Reference>(&json).unwrap(), reference);
        for wrong in [
            "accepted",
            "accepted@",
            "accepted@0",
            "accepted@-1",
            "@1",
            "A@1",
            "a/b@1",
            "..@1",
            "a@1@x",
        ] {
            assert!(wrong.parse::<Reference>().is_err(), "{wrong}");
        }
        assert!(check_name(&"a".repeat(63)).is_ok() && check_name(&"a".repeat(64)).is_err());
    }
}
