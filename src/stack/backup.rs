//! Backups of the stack on this machine, and their restore to a moment.
//!
//! A backup is a folder for this user alone, since it has keys:
//!
//! | | |
//! |---|---|
//! | `base/` | Postgres' files and their manifest (`pg_basebackup`) |
//! | `wal/` | what Postgres wrote since (`pg_receivewal`) |
//! | `files/` | the policy store, payloads, signing keys, and the gateway's state folder; nothing is removed there |
//! | `backup.json` | [`Backup`]: which moments can be restored |
//!
//! The first run makes all of it, each later run adds what is new. Between the runs Postgres keeps its WAL for the
//! backup (a replication slot). The log is not copied: a run waits until the tables have what the log took before it
//! began. After a restore, ingest removes payloads that no row names.

use std::fs;
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail, ensure};
use ingest::offset::last_caught_up_to;
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use sqlx::PgPool;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::child::Child;
use super::exec::{self, Tie};
use super::postgres::{self, Postgres};
use super::reach;
use crate::cli::audit::HEAD_FILE;
use crate::config::Config;
use crate::database;
use crate::private;

const FORMAT: &str = "springtide-backup-1";
const RECORD: &str = "backup.json";
/// Begins the names of the slots that keep the WAL which a backup lacks.
const SLOTS: &str = "springtide_backup_";
/// Held by a run.
const LOCK: &str = "backup.lock";
/// Of a segment of WAL.
const SEGMENT_BYTES: u64 = 16 << 20;
/// The database's folder while it is restored. No longer than its name, which is part of the socket's.
const DRAFT: &str = "restored";
/// Ends the names of files that are not whole.
const COPYING: &str = ".copying";
/// How long a run waits for the tables to have what the log took.
const SINK_WAIT: Duration = Duration::from_secs(60);
/// Of a file, at a time.
const HASHED_BYTES: usize = 1 << 20;
/// Lines of Postgres' log that an error shows.
const LOG_LINES: usize = 12;

/// Any moment from `from` to `until` can be restored.
#[derive(Debug, Serialize, Deserialize)]
pub struct Backup {
    format: String,
    /// The slot. It ends when another backup is begun, and is in no restored database.
    slot: String,
    #[serde(with = "time::serde::rfc3339")]
    pub from: OffsetDateTime,
    #[serde(with = "time::serde::rfc3339")]
    pub until: OffsetDateTime,
    /// The tables have every event that the log took before this moment. `None`: there was none.
    #[serde(with = "time::serde::rfc3339::option")]
    pub events_until: Option<OffsetDateTime>,
}

/// What a restored database has.
#[derive(Debug, Serialize)]
pub struct Restored {
    #[serde(with = "time::serde::rfc3339")]
    pub to: OffsetDateTime,
    pub newest_version: Option<i64>,
    #[serde(with = "time::serde::rfc3339::option")]
    pub events_until: Option<OffsetDateTime>,
}

impl Backup {
    fn read(folder: &Path) -> anyhow::Result<Option<Self>> {
        let path = folder.join(RECORD);
        let text = match fs::read_to_string(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            text => text.with_context(|| format!("read {}", path.display()))?,
        };
        let backup: Self = serde_json::from_str(&text).with_context(|| format!("read {}", path.display()))?;
        ensure!(
            backup.format == FORMAT,
            "{} is of the format {}, and this program reads {FORMAT}: use the release that wrote it",
            path.display(),
            backup.format
        );
        Ok(Some(backup))
    }

    /// Fails if Postgres does not keep what this backup lacks.
    async fn check_slot(&self, pool: &PgPool) -> anyhow::Result<()> {
        let kept = sqlx::query_scalar!(
            r#"select exists (select from pg_replication_slots where slot_name = $1 and wal_status <> 'lost') as "kept!""#,
            self.slot
        );
        let kept = kept.fetch_one(pool).await.context("look up the slot of the backup")?;
        ensure!(
            kept,
            "Postgres has dropped the WAL that this backup needs next: another backup was begun, the database was \
             restored, or more than {} were written. Back up into a new folder",
            postgres::WAL_KEPT_MAX
        );
        Ok(())
    }

    fn write(&self, folder: &Path) -> anyhow::Result<()> {
        let text = serde_json::to_string_pretty(self).context("write the record of the backup")?;
        private::replace(&folder.join(RECORD), &text, None)
    }
}

/// Adds what is new to the backup in `folder`, or begins one there. The stack must run.
pub async fn back_up(config: &Config, folder: &Path, installation: &Path) -> anyhow::Result<Backup> {
    check_private(config)?;
    let pool = database::connect_now(config).await?;
    match private::folder(folder, 0o700) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
        created => created.with_context(|| format!("create {}", folder.display()))?,
    }
    let _lock = (lock(&config.state_dir)?, lock(folder)?);
    let before = Backup::read(folder)?;
    if let Some(before) = &before {
        before.check_slot(&pool).await?;
    }
    // once before the database, which may name objects that are about to go, and once after it for the newest
    copy_files(config, folder)?;
    let events_until = wait_for_sink(&pool).await?;
    let server = Tools { config, installation };
    let (slot, from) = match before {
        Some(before) => (before.slot, before.from),
        None => (server.copy_base(&pool, folder).await?, now(&pool).await?),
    };
    let until = now(&pool).await?;
    // The WAL up to the second mark has the commit of the first, which is later than `until`: recovery stops there.
    mark(&pool).await?;
    let end = mark(&pool).await?;
    server.receive_wal(folder, &slot, &end)?;
    copy_files(config, folder)?;
    nix::unistd::sync();
    let backup = Backup {
        format: FORMAT.to_owned(),
        slot,
        from,
        until,
        events_until,
    };
    backup.write(folder)?;
    Ok(backup)
}

/// Restores the moment `to` (default: the newest) into a state folder without a database, and checks every file of the
/// base. Nothing of it may run.
pub async fn restore(
    config: &Config,
    folder: &Path,
    to: Option<OffsetDateTime>,
    installation: &Path,
) -> anyhow::Result<Restored> {
    check_private(config)?;
    let place = config.postgres_dir();
    ensure!(
        fs::symlink_metadata(&place).is_err(),
        "there is a database in {}: stop Springtide, and move that folder away or delete it",
        place.display()
    );
    let backup = Backup::read(folder)?;
    let backup = backup.with_context(|| format!("{} has no {RECORD}: it is no backup", folder.display()))?;
    let to = to.unwrap_or(backup.until);
    ensure!(
        (backup.from..=backup.until).contains(&to),
        "this backup has the moments from {} to {}",
        shown(backup.from),
        shown(backup.until)
    );
    check_base(&folder.join("base")).context("the backup is damaged")?;
    // under another name until it is whole, or the next start would take it
    let draft = config.state_dir.join(DRAFT);
    remove(&draft)?;
    let server = Postgres {
        installation: installation.to_owned(),
        data: draft.clone(),
        port: config.postgres.port,
        durable: true,
    };
    let data = reach::data_folder(&draft)?;
    fill(&data, folder).with_context(|| format!("copy the backup to {}", data.display()))?;
    if let Some(user) = exec::server_user() {
        reach::give(&data, user)?;
    }
    server.prepare()?;
    let log = config.log_dir().join("postgres-restore.log");
    let mut running = recover(&server, to, &log)?;
    let restored = summary(&server, &mut running, to, &log).await;
    running.stop(postgres::STOP).await?;
    let restored = restored?;
    for (name, here) in files(config) {
        // what was removed of these since must not come back
        if ["keys", "serve"].contains(&name) && here.exists() {
            continue;
        }
        let copied = copy(&folder.join("files").join(name), &here, Existing::Kept);
        copied.with_context(|| format!("restore {}", here.display()))?;
    }
    // it names a row that the restored audit may lack
    let head = config.state_dir.join(HEAD_FILE);
    if head.exists() {
        let aside = head.with_extension("head.before-restore");
        fs::rename(&head, &aside).with_context(|| format!("rename {}", head.display()))?;
    }
    nix::unistd::sync();
    fs::rename(&draft, &place).with_context(|| format!("name {}", place.display()))?;
    Ok(restored)
}

fn check_private(config: &Config) -> anyhow::Result<()> {
    ensure!(
        config.postgres.url.is_none(),
        "postgres.url names a server of your own: back it up with its own tools (docs/deploy.md, \"Back up and restore\")"
    );
    Ok(())
}

fn shown(time: OffsetDateTime) -> String {
    control::times::rfc3339(time)
}

async fn now(pool: &PgPool) -> anyhow::Result<OffsetDateTime> {
    let now = sqlx::query_scalar!(r#"select clock_timestamp() as "now!""#);
    now.fetch_one(pool).await.context("read Postgres' clock")
}

/// Writes something into the WAL. Returns its place there.
async fn mark(pool: &PgPool) -> anyhow::Result<String> {
    let place =
        sqlx::query_scalar!(r#"select pg_logical_emit_message(true, 'springtide', 'backup')::text as "place!""#);
    place.fetch_one(pool).await.context("mark the end of the backup")
}

/// One run at a time.
fn lock(folder: &Path) -> anyhow::Result<Flock<fs::File>> {
    let path = folder.join(LOCK);
    let file = fs::File::options().create(true).append(true).open(&path);
    let file = file.with_context(|| format!("open {}", path.display()))?;
    let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock);
    lock.map_err(|(_, errno)| anyhow!("another run of a backup holds {} ({errno})", path.display()))
}

/// Whether the log was ever read, and the moment before which the tables have all its events, if that is known.
async fn caught_up_to(pool: &PgPool) -> anyhow::Result<(bool, Option<OffsetDateTime>)> {
    let topics = sqlx::query_scalar!("select distinct topic from consumer_offset where consumer = 'sink'");
    let topics = topics.fetch_all(pool).await.context("look which topics were read")?;
    let caught_up = last_caught_up_to(pool, &topics).await;
    Ok((!topics.is_empty(), caught_up.context("look how far the log is stored")?))
}

/// Waits until the tables have what the log took before now.
async fn wait_for_sink(pool: &PgPool) -> anyhow::Result<Option<OffsetDateTime>> {
    let (began, wanted) = (Instant::now(), now(pool).await?);
    loop {
        let (is_read, caught_up) = caught_up_to(pool).await?;
        if !is_read || caught_up.is_some_and(|time| time >= wanted) {
            return Ok(caught_up);
        }
        if began.elapsed() >= SINK_WAIT {
            let until = caught_up.map_or("an unknown moment".to_owned(), shown);
            tracing::warn!("events that the log took after {until} are not in this backup: does ingest run?");
            return Ok(caught_up);
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Postgres' programs, on the private server.
struct Tools<'a> {
    config: &'a Config,
    installation: &'a Path,
}

impl Tools<'_> {
    fn run(&self, program: &str, arguments: &[&str], folder: &Path) -> anyhow::Result<String> {
        let tie = Tie {
            signal: postgres::STOP,
            user: None,
        };
        let mut command = exec::tied(&self.installation.join("bin").join(program), tie)?;
        command.arg("--host").arg(self.config.postgres_dir());
        command.args(["--port", &self.config.postgres.port.to_string()]);
        command.args(["--username", postgres::SUPERUSER, "--no-password"]);
        command.args(arguments).arg(folder);
        exec::output(&mut command, "the downloads of `springtide stack fetch`")
    }

    /// Returns the slot.
    async fn copy_base(&self, pool: &PgPool, folder: &Path) -> anyhow::Result<String> {
        let draft = folder.join("base.part");
        for left in [&draft, &folder.join("base"), &folder.join("wal")] {
            remove(left)?;
        }
        let slot = format!("{SLOTS}{}", uuid::Uuid::now_v7().simple());
        let options = [
            "--checkpoint=fast",
            "--manifest-checksums=SHA256",
            "--create-slot",
            "--slot",
            &slot,
            "--pgdata",
        ];
        self.run("pg_basebackup", &options, &draft)?;
        private::folder(&folder.join("wal"), 0o700).context("create the folder of the WAL")?;
        fs::rename(&draft, folder.join("base")).context("name the copy of Postgres' files")?;
        let others = sqlx::query!(
            "select pg_drop_replication_slot(slot_name) from pg_replication_slots
             where starts_with(slot_name, $1) and slot_name <> $2",
            SLOTS,
            slot
        );
        others.fetch_all(pool).await.context("end the backup before")?;
        Ok(slot)
    }

    /// All WAL up to `end` that the backup lacks.
    fn receive_wal(&self, folder: &Path, slot: &str, end: &str) -> anyhow::Result<()> {
        let wal = folder.join("wal");
        for entry in fs::read_dir(&wal).context("list the WAL of the backup")? {
            let entry = entry.context("list the WAL of the backup")?;
            // of a run that was killed; Postgres still has it
            if entry.path().extension().is_some_and(|end| end == "partial") && entry.metadata()?.len() != SEGMENT_BYTES
            {
                fs::remove_file(entry.path()).context("remove unfinished WAL")?;
            }
        }
        let options = [
            "--slot",
            slot,
            "--endpos",
            end,
            "--no-loop",
            "--synchronous",
            "--directory",
        ];
        let received = self.run("pg_receivewal", &options, &wal);
        received.map(drop).context("get what Postgres wrote since the last run")
    }
}

/// Compares each file with the manifest of the base. (`pg_verifybackup` of the downloaded build crashes.)
fn check_base(base: &Path) -> anyhow::Result<()> {
    #[derive(Deserialize)]
    struct Manifest {
        #[serde(rename = "Files")]
        files: Vec<Listed>,
        #[serde(rename = "Manifest-Checksum")]
        checksum: String,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Listed {
        path: String,
        checksum: String,
    }
    let text = fs::read_to_string(base.join("backup_manifest")).context("read its manifest")?;
    let manifest: Manifest = serde_json::from_str(&text).context("read its manifest")?;
    // the last line is not part of what is hashed
    let hashed = text.rfind("\"Manifest-Checksum\"").unwrap_or_default();
    ensure!(
        hex::encode(Sha256::digest(&text[..hashed])) == manifest.checksum,
        "its manifest is not what Postgres wrote"
    );
    for Listed { path, checksum } in manifest.files {
        let hashed = sha256(&base.join(&path)).with_context(|| format!("read {path} of the base"))?;
        ensure!(hashed == checksum, "{path} has other bytes");
    }
    Ok(())
}

pub(super) fn sha256(path: &Path) -> io::Result<String> {
    let (mut file, mut hash, mut block) = (fs::File::open(path)?, Sha256::new(), vec![0; HASHED_BYTES]);
    loop {
        match file.read(&mut block)? {
            0 => return Ok(hex::encode(hash.finalize())),
            read => hash.update(&block[..read]),
        }
    }
}

/// Puts the base and the WAL since it into a data folder, to be recovered.
fn fill(data: &Path, folder: &Path) -> anyhow::Result<()> {
    copy(&folder.join("base"), data, Existing::Replaced)?;
    for entry in fs::read_dir(data)? {
        let entry = entry?;
        // of the server that was copied; its number may be another process's now
        if entry.file_name().to_string_lossy().starts_with(".s.PGSQL.") {
            fs::remove_file(entry.path())?;
        }
    }
    for entry in fs::read_dir(folder.join("wal"))? {
        let entry = entry?;
        let name = entry
            .file_name()
            .to_string_lossy()
            .trim_end_matches(".partial")
            .to_owned();
        fs::copy(entry.path(), data.join("pg_wal").join(name))?;
    }
    fs::write(data.join("recovery.signal"), "")?;
    Ok(())
}

/// Starts Postgres, which recovers up to `to` and begins a new history there. It takes no connections before that.
fn recover(server: &Postgres, to: OffsetDateTime, log: &Path) -> anyhow::Result<Child> {
    let mut command = server.command()?;
    // Postgres knows no zone by name
    let to = to.format(&Rfc3339).context("write the time")?.replace('Z', "+00");
    for (name, value) in [
        // all WAL is in the data folder
        ("restore_command", "false"),
        ("recovery_target_time", &to),
        ("recovery_target_action", "promote"),
        ("hot_standby", "off"),
    ] {
        command.arg("-c").arg(format!("{name}={value}"));
    }
    if let Some(parent) = log.parent() {
        fs::create_dir_all(parent).with_context(|| format!("create {}", parent.display()))?;
    }
    let _ = fs::remove_file(log);
    let file = private::create(log).with_context(|| format!("create {}", log.display()))?;
    command
        .stderr(file.try_clone().context("share the log file")?)
        .stdout(file);
    Child::spawn(command)
}

/// What the database has, once it is recovered.
async fn summary(server: &Postgres, running: &mut Child, to: OffsetDateTime, log: &Path) -> anyhow::Result<Restored> {
    while !server.ready().await {
        if let Some(status) = running.ended()? {
            let log = fs::read_to_string(log).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            let last = lines[lines.len().saturating_sub(LOG_LINES)..].join("\n");
            bail!("Postgres could not recover ({status}):\n{last}");
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let pool = PgPool::connect(&server.url(postgres::DATABASE)).await;
    let pool = pool.context("connect to the restored database")?;
    let newest = sqlx::query_scalar!("select max(serial) from version")
        .fetch_one(&pool)
        .await;
    let restored = Restored {
        to,
        newest_version: newest.context("look up the newest version")?,
        events_until: caught_up_to(&pool).await?.1,
    };
    pool.close().await;
    Ok(restored)
}

/// What is backed up beside Postgres: a name, and where it is here.
fn files(config: &Config) -> Vec<(&'static str, PathBuf)> {
    let mut files = vec![("keys", config.keys_dir()), ("serve", config.serve.state_dir.clone())];
    files.extend(path_of(&config.store_url()).map(|path| ("store", path)));
    // without exports, which can be made again
    let payloads = config.ingest.payload_store.as_deref().and_then(path_of);
    files.extend(payloads.map(|path| ("payloads", path.join("payload"))));
    files
}

/// The buckets that no backup here has.
pub fn elsewhere(config: &Config) -> Vec<String> {
    let urls = [Some(config.store_url()), config.ingest.payload_store.clone()];
    urls.into_iter()
        .flatten()
        .filter(|url| path_of(url).is_none())
        .collect()
}

fn path_of(url: &str) -> Option<PathBuf> {
    url.strip_prefix("file://").map(PathBuf::from)
}

fn copy_files(config: &Config, folder: &Path) -> anyhow::Result<()> {
    for (name, here) in files(config) {
        let copied = copy(&here, &folder.join("files").join(name), Existing::Replaced);
        copied.with_context(|| format!("copy {}", here.display()))?;
    }
    Ok(())
}

#[derive(Clone, Copy, PartialEq)]
enum Existing {
    Kept,
    /// Unless it is as large and as old.
    Replaced,
}

/// Copies a folder, if there is one. Files that go meanwhile are left out. Each file is there whole or not at all.
fn copy(from: &Path, to: &Path, existing: Existing) -> io::Result<()> {
    let entries = match fs::read_dir(from) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    if !to.exists() {
        private::folder(to, 0o700)?;
    }
    for entry in entries {
        let source = entry?.path();
        if source.to_string_lossy().ends_with(COPYING) {
            continue;
        }
        let target = to.join(source.file_name().unwrap_or_default());
        if source.is_dir() {
            copy(&source, &target, existing)?;
            continue;
        }
        match copy_file(&source, &target, existing) {
            Err(error) if error.kind() == ErrorKind::NotFound && !source.exists() => {}
            copied => copied?,
        }
    }
    Ok(())
}

fn copy_file(source: &Path, target: &Path, existing: Existing) -> io::Result<()> {
    let here = fs::metadata(source)?;
    if let Ok(there) = fs::metadata(target) {
        let same = here.len() == there.len() && here.modified()? == there.modified()?;
        if same || existing == Existing::Kept {
            return Ok(());
        }
    }
    let mut draft = target.as_os_str().to_owned();
    draft.push(COPYING);
    fs::copy(source, &draft)?;
    fs::File::options()
        .write(true)
        .open(&draft)?
        .set_modified(here.modified()?)?;
    fs::rename(&draft, target)
}

/// A folder, or a link to one and the folder, if there is any.
fn remove(folder: &Path) -> anyhow::Result<()> {
    if let Ok(place) = folder.canonicalize() {
        fs::remove_dir_all(&place).with_context(|| format!("remove {}", place.display()))?;
    }
    match fs::symlink_metadata(folder) {
        Ok(found) if found.is_symlink() => {
            fs::remove_file(folder).with_context(|| format!("remove {}", folder.display()))
        }
        _ => Ok(()),
    }
}
