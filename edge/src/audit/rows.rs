//! Rows of other tables, compared with the audit.
//!
//! Each change of a key, a sampler, a run and so on is a row of the audit, whose `detail` ends with a
//! fingerprint of the changed row. The newest fingerprint about a row must be that of the row as it
//! is. So a row is found that somebody wrote, changed or removed without Springtide.
//!
//! Rows that were there before their changes were audited are noted once, by [`begin`]. No time of a
//! row is trusted, because whoever writes the row chooses it.

use std::collections::HashMap;

use sqlx::PgConnection;
use time::OffsetDateTime;

use super::{Actor, Change};

const MAGIC: &[u8] = b"springtide row 1\0";
/// The action of [`begin`]. Its subject is the kind.
const BEGIN: &str = "audit.begin";
/// What comes before the fingerprint in a detail.
const MARK: &str = "row ";

/// Digest of the columns of a row. Written as 32 hexadecimal digits.
///
/// It is the beginning of the BLAKE3 of `"springtide row 1\0"` and the fields, the table's name
/// first. A field is a 0 if it is null, otherwise a 1, its length (`u64`, little-endian) and its
/// bytes: of a text its UTF-8, of a number or a time (µs since 1970) an `i64`.
pub struct Fingerprint(blake3::Hasher);

impl Fingerprint {
    pub fn of(table: &str) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(MAGIC);
        Self(hasher).text(table)
    }

    pub fn bytes<'a>(mut self, value: impl Into<Option<&'a [u8]>>) -> Self {
        match value.into() {
            None => self.0.update(&[0]),
            Some(value) => self
                .0
                .update(&[1])
                .update(&(value.len() as u64).to_le_bytes())
                .update(value),
        };
        self
    }

    pub fn text<'a>(self, value: impl Into<Option<&'a str>>) -> Self {
        self.bytes(value.into().map(str::as_bytes))
    }

    pub fn number(self, value: impl Into<Option<i64>>) -> Self {
        match value.into() {
            None => self.bytes(None::<&[u8]>),
            Some(value) => self.bytes(&value.to_le_bytes()[..]),
        }
    }

    pub fn time(self, value: Option<OffsetDateTime>) -> Self {
        let microseconds = |at: OffsetDateTime| i64::try_from(at.unix_timestamp_nanos() / 1000).unwrap_or(i64::MAX);
        self.number(value.map(microseconds))
    }

    pub fn finish(self) -> String {
        let digest = self.0.finalize();
        let half: String = digest.to_hex().chars().take(32).collect();
        half
    }
}

/// A row whose changes are audited.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Audited {
    pub tenant: String,
    /// As in `audit.subject`.
    pub subject: String,
    pub fingerprint: String,
}

impl Audited {
    /// The detail of a change that made the row what it is. `about`: for people.
    pub fn detail(&self, about: &str) -> String {
        match about {
            "" => format!("{MARK}{}", self.fingerprint),
            _ => format!("{about}; {MARK}{}", self.fingerprint),
        }
    }

    /// Appends to the audit what made the row what it is. Call it in the transaction of the change.
    pub async fn append(
        &self,
        connection: &mut PgConnection,
        actor: Actor<'_>,
        action: &str,
        about: &str,
        reason: &str,
    ) -> sqlx::Result<()> {
        let change = Change {
            tenant: &self.tenant,
            action,
            subject: &self.subject,
            detail: &self.detail(about),
            reason,
        };
        super::append(connection, actor, change).await
    }

    fn is_in(&self, trail: &Trail) -> bool {
        let newest = trail.0.get(&self.subject);
        newest.is_some_and(|row| fingerprint(&row.detail) == Some(&self.fingerprint))
    }
}

/// The fingerprint at the end of a detail.
fn fingerprint(detail: &str) -> Option<&str> {
    let at = detail.rfind(MARK)?;
    Some(&detail[at + MARK.len()..])
}

/// The newest row of the audit about each subject.
#[derive(Debug, Default)]
pub struct Trail(HashMap<String, Newest>);

/// A row of the audit.
#[derive(Debug, Clone)]
struct Newest {
    action: String,
    detail: String,
}

impl Trail {
    /// Of the actions `kind.…`.
    pub async fn read(connection: &mut PgConnection, kind: &str) -> sqlx::Result<Self> {
        let rows = sqlx::query!(
            "select distinct on (subject) subject, action, detail from audit
             where starts_with(action, $1 || '.') order by subject, id desc",
            kind
        )
        .fetch_all(connection)
        .await?;
        let newest = |action, detail| Newest { action, detail };
        let rows = rows
            .into_iter()
            .map(|row| (row.subject, newest(row.action, row.detail)));
        Ok(Self(rows.collect()))
    }

    pub fn newest_action(&self, subject: &str) -> Option<&str> {
        self.0.get(subject).map(|newest| newest.action.as_str())
    }
}

/// What is wrong with the rows of one kind. Empty: nothing.
pub fn compare(kind: &str, rows: &[Audited], trail: &Trail) -> Vec<String> {
    let mut faults = Vec::new();
    let mut left: HashMap<&String, &Newest> = trail.0.iter().collect();
    for row in rows {
        let subject = &row.subject;
        match left.remove(subject) {
            None => faults.push(format!(
                "{kind} {subject} is not in the audit: somebody wrote it into its table"
            )),
            Some(newest) if !row.is_in(trail) => faults.push(format!(
                "{kind} {subject} is not what it was made by {}: somebody changed its row",
                newest.action
            )),
            Some(_) => {}
        }
    }
    let mut removed: Vec<_> = left.into_keys().collect();
    removed.sort_unstable();
    let removed = removed
        .into_iter()
        .map(|subject| format!("{kind} {subject} is in the audit, but not in its table: somebody removed it"));
    faults.extend(removed);
    faults
}

/// Whether [`begin`] has noted which rows of this kind were there before.
pub async fn has_begun(connection: &mut PgConnection, kind: &str) -> sqlx::Result<bool> {
    sqlx::query_scalar!(
        r#"select exists (select from audit where action = $1 and subject = $2) as "begun!""#,
        BEGIN,
        kind
    )
    .fetch_one(connection)
    .await
}

/// What was there before its changes were audited.
#[derive(Debug, Clone)]
pub struct Known {
    pub tenant: String,
    pub subject: String,
    pub detail: String,
}

/// Notes the rows of a kind that are not in the audit as `kind.known`. Once in the life of a
/// database: what appears later must have a row of its own. The caller has taken [`super::lock`]
/// and then read the rows, in this transaction.
pub async fn begin(connection: &mut PgConnection, actor: Actor<'_>, kind: &str, rows: &[Audited]) -> sqlx::Result<()> {
    let trail = Trail::read(connection, kind).await?;
    let unknown = rows.iter().filter(|row| !row.is_in(&trail));
    let known = unknown.map(|row| Known {
        tenant: row.tenant.clone(),
        subject: row.subject.clone(),
        detail: row.detail(""),
    });
    begin_with(connection, actor, kind, &known.collect::<Vec<_>>()).await
}

/// Like [`begin`], for what is compared in another way.
pub async fn begin_with(
    connection: &mut PgConnection,
    actor: Actor<'_>,
    kind: &str,
    known: &[Known],
) -> sqlx::Result<()> {
    if has_begun(connection, kind).await? {
        return Ok(());
    }
    let action = format!("{kind}.known");
    let mut changes: Vec<Change<'_>> = known
        .iter()
        .map(|known| Change {
            tenant: &known.tenant,
            action: &action,
            subject: &known.subject,
            detail: &known.detail,
            reason: "it was there before its changes were audited",
        })
        .collect();
    let count = format!("{} rows were there before", known.len());
    changes.push(Change {
        tenant: "default",
        action: BEGIN,
        subject: kind,
        detail: &count,
        reason: "",
    });
    super::append_all(connection, actor, &changes).await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(subject: &str, label: &str) -> Audited {
        Audited {
            tenant: "default".into(),
            subject: subject.into(),
            fingerprint: Fingerprint::of("api_key").text(subject).text(label).finish(),
        }
    }

    fn trail(rows: &[(&Audited, &str)]) -> Trail {
        let newest = |row: &Audited, about: &str| Newest {
            action: "key.create".into(),
            detail: row.detail(about),
        };
        Trail(
            rows.iter()
                .map(|(row, about)| (row.subject.clone(), newest(row, about)))
                .collect(),
        )
    }

    #[test]
    fn rows_that_were_written_changed_or_removed_without_a_trace_are_found() {
        let (one, two) = (row("1", "web"), row("2", "app"));
        let written = trail(&[(&one, ""), (&two, "scopes read; label row 00")]);
        assert_eq!(
            compare("key", &[one.clone(), two.clone()], &written),
            Vec::<String>::new()
        );
        let extra = compare("key", &[one.clone(), two.clone(), row("3", "thief")], &written);
        assert_eq!(extra, ["key 3 is not in the audit: somebody wrote it into its table"]);
        let changed = compare("key", &[row("1", "admin"), two], &written);
        assert!(
            changed.len() == 1 && changed[0].contains("key 1 is not what"),
            "{changed:?}"
        );
        let removed = compare("key", &[one], &written);
        assert!(
            removed.len() == 1 && removed[0].contains("key 2 is in the audit, but"),
            "{removed:?}"
        );
    }

    #[test]
    fn a_row_of_before_without_a_fingerprint_is_no_proof() {
        let one = row("1", "web");
        let mut old = trail(&[(&one, "")]);
        old.0
            .values_mut()
            .for_each(|newest| newest.detail = "role serving".into());
        assert_eq!(compare("key", &[one], &old).len(), 1);
    }

    #[test]
    fn the_border_between_fields_and_null_are_part_of_a_fingerprint() {
        let of = |fields: &[Option<&str>]| {
            let fold = |print: Fingerprint, field: &Option<&str>| print.text(*field);
            fields.iter().fold(Fingerprint::of("t"), fold).finish()
        };
        let all = [
            of(&[Some("ab"), Some("c")]),
            of(&[Some("a"), Some("bc")]),
            of(&[Some(""), None]),
            of(&[None, Some("")]),
            of(&[]),
        ];
        for (index, one) in all.iter().enumerate() {
            assert_eq!(one.len(), 32);
            assert!(!all[..index].contains(one));
        }
    }
}
