//! The audit: one row for each change that a person or a key made. Rows are only appended, and each
//! holds the hash of the row before.
//!
//! The chain shows that a row was changed, removed or inserted, also by somebody who may do anything
//! in the database. Such a person can still make a new chain from some row to the end, or remove the
//! last rows. [`verify`] finds both if it is given a [`Head`] that was noted outside the database.
//! [`rows`] finds changes of other tables that have no row here.
//!
//! A row's hash is the BLAKE3 of these bytes. Integers are little-endian; a text is its length
//! (`u32`) and its UTF-8.
//!
//! ```text
//! "springtide audit 1\0"  previous [32]  id i64  at i64 (µs since 1970)
//! key_id: 0, or 1 and [16]   actor  tenant  action  subject  detail  reason (texts)
//! ```

pub mod rows;

use std::fmt;
use std::str::FromStr;

use anyhow::Context;
use futures::TryStreamExt;
use serde::Serialize;
use sqlx::{PgConnection, PgExecutor, PgPool};
use time::OffsetDateTime;
use uuid::Uuid;

const MAGIC: &[u8] = b"springtide audit 1\0";
const FIRST: [u8; 32] = [0; 32];
/// In one statement.
const ROWS_AT_ONCE: usize = 1_000;

/// Who makes a change.
#[derive(Debug, Clone, Copy)]
pub struct Actor<'a> {
    /// The API key, unless none was needed.
    pub key: Option<Uuid>,
    /// Label of the key, or the user of the command line.
    pub name: &'a str,
}

/// A change.
#[derive(Debug, Clone, Copy)]
pub struct Change<'a> {
    /// The tenant that it concerns.
    pub tenant: &'a str,
    /// `thing.verb`, such as `key.create`, `release.promote`, `signing_key.revoke`.
    pub action: &'a str,
    /// Id or name of what is changed.
    pub subject: &'a str,
    /// What it is changed to. No secrets.
    pub detail: &'a str,
    /// Why, in the actor's words.
    pub reason: &'a str,
}

/// A row of the audit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Row {
    pub id: i64,
    #[serde(with = "time::serde::rfc3339")]
    pub at: OffsetDateTime,
    pub key_id: Option<Uuid>,
    pub actor: String,
    pub tenant: String,
    pub action: String,
    pub subject: String,
    pub detail: String,
    pub reason: String,
    #[serde(with = "hex::serde")]
    pub previous: Vec<u8>,
    #[serde(with = "hex::serde")]
    pub hash: Vec<u8>,
}

/// Who changes something because the configuration says so: `the role ingest on HOST`.
pub fn role_name(role: &str) -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("the role {role} on {}", host.trim())
}

/// Appends a row in the caller's transaction, so that change and row are stored together or not at
/// all. Other writers of the audit wait until that transaction ends: call this last. Needs the
/// isolation level read committed.
pub async fn append(connection: &mut PgConnection, actor: Actor<'_>, change: Change<'_>) -> sqlx::Result<()> {
    append_all(connection, actor, &[change]).await
}

/// Like [`append`], with a row for each change.
pub async fn append_all(connection: &mut PgConnection, actor: Actor<'_>, changes: &[Change<'_>]) -> sqlx::Result<()> {
    lock(connection).await?;
    for changes in changes.chunks(ROWS_AT_ONCE) {
        append_some(connection, actor, changes).await?;
    }
    Ok(())
}

/// Keeps other writers of the audit out until the transaction ends.
pub async fn lock(connection: &mut PgConnection) -> sqlx::Result<()> {
    sqlx::query!("select pg_advisory_xact_lock(hashtext('audit'))")
        .execute(connection)
        .await?;
    Ok(())
}

async fn append_some(connection: &mut PgConnection, actor: Actor<'_>, changes: &[Change<'_>]) -> sqlx::Result<()> {
    let last = sqlx::query!(
        r#"select clock_timestamp() as "at!", (select id from audit order by id desc limit 1) as "id?",
                  (select hash from audit order by id desc limit 1) as "hash?""#
    )
    .fetch_one(&mut *connection)
    .await?;
    let (mut id, mut previous) = (last.id.unwrap_or(0), last.hash.unwrap_or_else(|| FIRST.to_vec()));
    let mut rows = Vec::with_capacity(changes.len());
    for change in changes {
        id += 1;
        let mut row = Row {
            id,
            at: last.at,
            key_id: actor.key,
            actor: actor.name.to_owned(),
            tenant: change.tenant.to_owned(),
            action: change.action.to_owned(),
            subject: change.subject.to_owned(),
            detail: change.detail.to_owned(),
            reason: change.reason.to_owned(),
            previous,
            hash: Vec::new(),
        };
        row.hash = row.digest().to_vec();
        previous = row.hash.clone();
        rows.push(row);
    }
    let column = |field: fn(&Row) -> &String| rows.iter().map(|row| field(row).clone()).collect::<Vec<_>>();
    let ids: Vec<i64> = rows.iter().map(|row| row.id).collect();
    let before: Vec<Vec<u8>> = rows.iter().map(|row| row.previous.clone()).collect();
    let hashes: Vec<Vec<u8>> = rows.iter().map(|row| row.hash.clone()).collect();
    sqlx::query!(
        "insert into audit (id, at, key_id, actor, tenant, action, subject, detail, reason, previous, hash)
         select id, $2, $3, $4, tenant, action, subject, detail, reason, previous, hash
         from unnest($1::bigint[], $5::text[], $6::text[], $7::text[], $8::text[], $9::text[], $10::bytea[], $11::bytea[])
              as t (id, tenant, action, subject, detail, reason, previous, hash)",
        &ids,
        last.at,
        actor.key,
        actor.name,
        &column(|row| &row.tenant),
        &column(|row| &row.action),
        &column(|row| &row.subject),
        &column(|row| &row.detail),
        &column(|row| &row.reason),
        &before,
        &hashes
    )
    .execute(connection)
    .await?;
    Ok(())
}

impl Row {
    fn digest(&self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new();
        hasher.update(MAGIC);
        hasher.update(&self.previous);
        hasher.update(&self.id.to_le_bytes());
        let microseconds = self.at.unix_timestamp_nanos() / 1000;
        hasher.update(&i64::try_from(microseconds).unwrap_or(i64::MAX).to_le_bytes());
        match &self.key_id {
            None => hasher.update(&[0]),
            Some(key) => hasher.update(&[1]).update(key.as_bytes()),
        };
        for text in [
            &self.actor,
            &self.tenant,
            &self.action,
            &self.subject,
            &self.detail,
            &self.reason,
        ] {
            // Postgres' texts are shorter than 1 GiB.
            let length = u32::try_from(text.len()).unwrap_or(u32::MAX);
            hasher.update(&length.to_le_bytes()).update(text.as_bytes());
        }
        *hasher.finalize().as_bytes()
    }
}

/// The newest rows, newest first.
pub async fn list(pool: &PgPool, action: Option<&str>, subject: Option<&str>, limit: i64) -> sqlx::Result<Vec<Row>> {
    sqlx::query_as!(
        Row,
        "select id, at, key_id, actor, tenant, action, subject, detail, reason, previous, hash from audit
         where ($1::text is null or action = $1 or starts_with(action, $1 || '.')) and ($2::text is null or subject = $2)
         order by id desc limit $3",
        action,
        subject,
        limit
    )
    .fetch_all(pool)
    .await
}

/// The last row of a chain. Written as `id:hash`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// 0: the audit was empty.
    pub id: i64,
    pub hash: [u8; 32],
}

impl fmt::Display for Head {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.id, hex::encode(self.hash))
    }
}

impl FromStr for Head {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let (id, hash) = text.trim().split_once(':').context("a head is `id:hash`")?;
        let mut head = Self {
            id: id.parse().context("parse the head's id")?,
            hash: FIRST,
        };
        hex::decode_to_slice(hash, &mut head.hash).context("parse the head's hash")?;
        Ok(head)
    }
}

/// What [`verify`] found.
#[derive(Debug)]
pub struct Verified {
    pub head: Head,
    /// What is wrong, in the order of the rows. At most [`FAULTS_MAX`].
    pub faults: Vec<String>,
}

/// Faults that [`verify`] lists. One removed row makes two.
pub const FAULTS_MAX: usize = 100;

/// Reads the audit from its first row and checks the chain. `noted`: a head that must still be in
/// it.
pub async fn verify<'c>(database: impl PgExecutor<'c>, noted: Option<Head>) -> sqlx::Result<Verified> {
    let mut rows = sqlx::query_as!(
        Row,
        "select id, at, key_id, actor, tenant, action, subject, detail, reason, previous, hash from audit order by id"
    )
    .fetch(database);
    let mut chain = Chain::default();
    let mut noted_hash = noted.filter(|head| head.id == 0).map(|_| FIRST.to_vec());
    while let Some(row) = rows.try_next().await? {
        chain.add(&row);
        if noted.is_some_and(|head| head.id == row.id) {
            noted_hash = Some(row.hash);
        }
    }
    if let Some(head) = noted {
        match noted_hash {
            None => chain.fault(format!("the noted row {} is missing: rows were removed", head.id)),
            Some(hash) if hash != head.hash => chain.fault(format!(
                "row {} is not the one that was noted: the chain was made anew",
                head.id
            )),
            Some(_) => {}
        }
    }
    Ok(Verified {
        head: chain.head(),
        faults: chain.faults,
    })
}

#[derive(Debug)]
struct Chain {
    id: i64,
    hash: Vec<u8>,
    faults: Vec<String>,
}

impl Default for Chain {
    fn default() -> Self {
        Self {
            id: 0,
            hash: FIRST.to_vec(),
            faults: Vec::new(),
        }
    }
}

impl Chain {
    fn add(&mut self, row: &Row) {
        if row.id != self.id + 1 {
            let missing = format!("rows {} to {} are missing", self.id + 1, row.id - 1);
            self.fault(missing);
        }
        if row.previous != self.hash {
            self.fault(format!("row {} does not continue the row before it", row.id));
        }
        if row.hash != row.digest() {
            self.fault(format!("row {} was changed, or not written by Springtide", row.id));
        }
        self.id = row.id;
        self.hash.clone_from(&row.hash);
    }

    fn fault(&mut self, what: String) {
        if self.faults.len() < FAULTS_MAX {
            self.faults.push(what);
        }
    }

    fn head(&self) -> Head {
        Head {
            id: self.id,
            hash: self.hash.as_slice().try_into().unwrap_or(FIRST),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(count: i64) -> Vec<Row> {
        let mut previous = FIRST.to_vec();
        (1..=count)
            .map(|id| {
                let mut row = Row {
                    id,
                    at: OffsetDateTime::UNIX_EPOCH + time::Duration::microseconds(id),
                    key_id: (id % 2 == 0).then(|| Uuid::from_u128(7)),
                    actor: "night shift".to_owned(),
                    tenant: "default".to_owned(),
                    action: "key.create".to_owned(),
                    subject: id.to_string(),
                    detail: String::new(),
                    reason: "because".to_owned(),
                    previous: previous.clone(),
                    hash: Vec::new(),
                };
                row.hash = row.digest().to_vec();
                previous.clone_from(&row.hash);
                row
            })
            .collect()
    }

    fn faults(rows: &[Row]) -> Vec<String> {
        let mut chain = Chain::default();
        rows.iter().for_each(|row| chain.add(row));
        chain.faults
    }

    #[test]
    fn a_whole_chain_has_no_fault() {
        assert_eq!(faults(&rows(5)), Vec::<String>::new());
        assert_eq!(faults(&[]), Vec::<String>::new());
    }

    #[test]
    fn a_change_of_any_field_is_found() {
        let changes: [fn(&mut Row); 9] = [
            |row| row.at += time::Duration::microseconds(1),
            |row| row.key_id = None,
            |row| row.key_id = Some(Uuid::from_u128(8)),
            |row| row.actor.push('x'),
            |row| row.tenant.push('x'),
            |row| row.action.push('x'),
            |row| row.subject.push('x'),
            |row| row.detail.push('x'),
            |row| row.reason.clear(),
        ];
        for change in changes {
            let mut changed = rows(5);
            change(&mut changed[1]);
            assert!(faults(&changed)[0].starts_with("row 2 was changed"));
            // With a hash that fits again, the next row gives it away.
            changed[1].hash = changed[1].digest().to_vec();
            assert!(faults(&changed)[0].starts_with("row 3 does not continue"));
        }
    }

    #[test]
    fn the_border_between_two_texts_is_part_of_the_hash() {
        let mut row = rows(1).remove(0);
        (row.subject, row.detail) = ("ab".to_owned(), "c".to_owned());
        let before = row.digest();
        (row.subject, row.detail) = ("a".to_owned(), "bc".to_owned());
        assert_ne!(before, row.digest());
    }

    #[test]
    fn a_removed_and_an_inserted_row_are_found() {
        let mut removed = rows(5);
        removed.remove(2);
        assert_eq!(
            faults(&removed),
            ["rows 3 to 3 are missing", "row 4 does not continue the row before it"]
        );
        let mut renumbered = removed;
        renumbered[2].id = 3;
        renumbered[2].hash = renumbered[2].digest().to_vec();
        assert!(!faults(&renumbered).is_empty());
        let mut inserted = rows(5);
        let mut extra = inserted[4].clone();
        extra.id = 6;
        inserted.push(extra);
        assert!(!faults(&inserted).is_empty());
    }

    #[test]
    fn a_head_round_trips_through_its_text() {
        let head = Head { id: 7, hash: [9; 32] };
        assert_eq!(head.to_string().parse::<Head>().unwrap(), head);
        assert!("7".parse::<Head>().is_err());
        assert!("7:00".parse::<Head>().is_err());
    }
}
