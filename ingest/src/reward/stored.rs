//! Reward definitions in Postgres. A changed definition becomes a new version and old versions
//! stay, so that every trajectory can refer to the definition that scored it. Each new version is a
//! row of the audit.

use std::collections::BTreeMap;

use anyhow::Context;
use edge::audit::rows::{Audited, Fingerprint};
use edge::audit::{self, Actor};
use sqlx::{PgConnection, PgPool};
use time::OffsetDateTime;

use super::{Definition, Rule};

/// The current rules by surface, each with the version of its definition.
#[derive(Debug, Clone, Default)]
pub struct Surfaces(BTreeMap<String, (i32, Rule)>);

impl Surfaces {
    pub fn get(&self, surface: &str) -> Option<(i32, &Rule)> {
        let (version, rule) = self.0.get(surface)?;
        Some((*version, rule))
    }

    pub(crate) fn rules(&self) -> impl Iterator<Item = &Rule> + Clone {
        self.0.values().map(|(_, rule)| rule)
    }

    pub fn definitions(&self) -> impl Iterator<Item = &Definition> {
        self.0.values().map(|(_, rule)| &rule.definition)
    }
}

/// A stored definition.
#[derive(Debug, Clone)]
pub struct Stored {
    pub surface: String,
    pub version: i32,
    /// JSON of a [`Definition`].
    pub definition: serde_json::Value,
    pub created_at: OffsetDateTime,
}

/// All versions of the definitions of one surface, or of all.
pub async fn versions(pool: &PgPool, surface: Option<&str>) -> sqlx::Result<Vec<Stored>> {
    sqlx::query_as!(
        Stored,
        "select surface, version, definition, created_at from reward_definition \
         where $1::text is null or surface = $1 order by surface, version",
        surface
    )
    .fetch_all(pool)
    .await
}

/// Stores changed definitions and returns the current rules.
pub async fn store(pool: &PgPool, rules: Vec<Rule>) -> anyhow::Result<Surfaces> {
    let mut surfaces = BTreeMap::new();
    for rule in rules {
        let definition = &rule.definition;
        let version = store_one(pool, definition)
            .await
            .with_context(|| format!("store reward definition of {:?}", definition.name))?;
        surfaces.insert(definition.name.clone(), (version, rule));
    }
    Ok(Surfaces(surfaces))
}

async fn store_one(pool: &PgPool, definition: &Definition) -> anyhow::Result<i32> {
    let value = serde_json::to_value(definition)?;
    // If another process stores the same change concurrently, the insert does nothing and the next
    // iteration finds the stored version.
    loop {
        let latest = sqlx::query!(
            "select version, definition from reward_definition where surface = $1 \
             order by version desc limit 1",
            definition.name
        )
        .fetch_optional(pool)
        .await?;
        let next = match latest {
            // Compared as definitions, because the same number may be written differently.
            Some(row) if same(&row.definition, definition) => return Ok(row.version),
            Some(row) => row.version + 1,
            None => 1,
        };
        insert(pool, &definition.name, next, &value).await?;
    }
}

/// Stores a version and its row in the audit, unless another process has stored that version.
async fn insert(pool: &PgPool, surface: &str, version: i32, definition: &serde_json::Value) -> anyhow::Result<()> {
    let mut transaction = edge::database::begin(pool).await?;
    let inserted = sqlx::query!(
        "insert into reward_definition (surface, version, definition) values ($1, $2, $3) on conflict do nothing",
        surface,
        version,
        definition
    )
    .execute(&mut *transaction)
    .await?;
    if inserted.rows_affected() > 0 {
        let subject = subject(surface, version);
        let rows = audited(&mut transaction).await?;
        let row = rows
            .iter()
            .find(|row| row.subject == subject)
            .context("the definition is gone")?;
        let role = audit::role_name("ingest");
        let actor = Actor { key: None, name: &role };
        let (about, reason) = (definition.to_string(), "the configuration says so");
        row.append(&mut transaction, actor, "reward.define", &about, reason)
            .await
            .context("append to the audit")?;
    }
    transaction.commit().await?;
    Ok(())
}

fn subject(surface: &str, version: i32) -> String {
    format!("{surface}@{version}")
}

/// All definitions, to be compared with the audit's actions `reward.…`. They are few.
pub async fn audited(connection: &mut PgConnection) -> sqlx::Result<Vec<Audited>> {
    let rows = sqlx::query!(
        r#"select surface, version, definition::text as "definition!" from reward_definition order by surface, version"#
    )
    .fetch_all(connection)
    .await?;
    let audited = rows.into_iter().map(|row| Audited {
        tenant: "default".to_owned(),
        subject: subject(&row.surface, row.version),
        fingerprint: Fingerprint::of("reward_definition")
            .text(&*row.surface)
            .number(i64::from(row.version))
            .text(&*row.definition)
            .finish(),
    });
    Ok(audited.collect())
}

fn same(stored: &serde_json::Value, definition: &Definition) -> bool {
    serde::Deserialize::deserialize(stored).is_ok_and(|stored: Definition| stored == *definition)
}
