//! A private Postgres 18: its data folder, how it is started, when it is ready. Loopback TCP only. Does not supervise:
//! whoever starts the command restarts it.

use std::ffi::OsStr;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use nix::sys::signal::Signal;
use nix::unistd::Uid;
use sqlx::{ConnectOptions, Connection, PgConnection, postgres::PgConnectOptions};

use super::exec::{self, NOBODY, Tie};
use super::reach;

/// The database that the roles use.
pub const DATABASE: &str = "springtide";
/// Also the name of the database that is always there.
pub const SUPERUSER: &str = "postgres";
const CONNECTIONS_MAX: u16 = 200;
const CONNECT_SECONDS_MAX: u64 = 3;

/// A smart shutdown would wait for clients; SIGINT breaks their transactions off and stops cleanly.
pub const STOP: Signal = Signal::SIGINT;

/// One private server.
#[derive(Debug, Clone)]
pub struct Postgres {
    /// Holds `bin/postgres`.
    pub installation: PathBuf,
    /// Holds (or points to) the cluster's files; created by [`Postgres::prepare`].
    pub data: PathBuf,
    pub port: u16,
    /// False: no fsync, for data that nobody misses.
    pub durable: bool,
}

impl Postgres {
    /// Creates the data folder where there is none. Run by root, it belongs to `nobody`, because Postgres refuses root.
    pub fn prepare(&self) -> anyhow::Result<()> {
        if self.data.join("PG_VERSION").exists() {
            return Ok(());
        }
        let place = self.create_data_folder()?;
        let mut initdb = tied_to_self(&self.installation.join("bin/initdb"))?;
        initdb
            .args(["--username", SUPERUSER, "--auth=trust", "--encoding=UTF8"])
            .args(["--locale-provider=builtin", "--builtin-locale=C.UTF-8", "--locale=C"])
            .args(["--no-sync", "--pgdata"])
            .arg(&place)
            .current_dir("/")
            .stdin(Stdio::null());
        let output = initdb.output().context("run initdb")?;
        if !output.status.success() {
            bail!(
                "initdb failed ({}):\n{}{}",
                output.status,
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr)
            );
        }
        Ok(())
    }

    /// The server in the foreground, logging to its standard error.
    pub fn command(&self) -> anyhow::Result<Command> {
        let data = self
            .data
            .canonicalize()
            .with_context(|| format!("resolve {}", self.data.display()))?;
        let mut command = tied_to_self(&self.installation.join("bin/postgres"))?;
        command.arg("-D").arg(data).current_dir("/");
        let mut set = |name: &str, value: &dyn std::fmt::Display| {
            command.arg("-c").arg(format!("{name}={value}"));
        };
        set("port", &self.port);
        set("listen_addresses", &"127.0.0.1");
        set("unix_socket_directories", &"");
        set("max_connections", &CONNECTIONS_MAX);
        // Solid-state disks and caches: a page out of order costs hardly more than the next one.
        set("random_page_cost", &"1.1");
        set("timezone", &"UTC");
        set("log_timezone", &"UTC");
        if !self.durable {
            set("fsync", &"off");
            set("full_page_writes", &"off");
        }
        Ok(command)
    }

    /// Whether it takes connections.
    pub async fn ready(&self) -> bool {
        connect(&url(self.port, SUPERUSER)).await.is_ok()
    }

    /// A folder for the cluster, owned by who will run it. Where `nobody` cannot get to the wanted place, the folder lies
    /// elsewhere and a link stands in its place.
    fn create_data_folder(&self) -> anyhow::Result<PathBuf> {
        let mut place = reach::folder(&self.data)?;
        if place.file_name() != self.data.file_name() {
            // A name never used before: were the link removed, the state behind it was meant to go too.
            let mut name = place.into_os_string();
            name.push(OsStr::new(&format!("-{}", uuid::Uuid::now_v7().simple())));
            place = name.into();
            fs::create_dir(&place).with_context(|| format!("create {}", place.display()))?;
            if self.data.is_symlink() {
                fs::remove_file(&self.data).context("remove a link to nowhere")?;
            }
            symlink(&place, &self.data).with_context(|| format!("link {}", self.data.display()))?;
            tracing::info!(place = %place.display(), "Postgres keeps its data elsewhere, where it can get without root");
        } else if place.exists() {
            // An initdb that was broken off.
            fs::remove_dir_all(&place).with_context(|| format!("remove unfinished {}", place.display()))?;
            fs::create_dir(&place).with_context(|| format!("create {}", place.display()))?;
        } else {
            fs::create_dir(&place).with_context(|| format!("create {}", place.display()))?;
        }
        fs::set_permissions(&place, Permissions::from_mode(0o700)).context("close the data folder to others")?;
        if Uid::effective().is_root() {
            chown(&place, Some(NOBODY), Some(NOBODY)).context("hand the data folder over")?;
        }
        Ok(place)
    }
}

/// How to reach `database` on a private server.
pub fn url(port: u16, database: &str) -> String {
    format!("postgres://{SUPERUSER}@127.0.0.1:{port}/{database}")
}

/// Creates [`DATABASE`] on the private server at `port` unless it is there.
pub async fn ensure_database(port: u16) -> anyhow::Result<()> {
    let mut connection = connect(&url(port, SUPERUSER)).await?;
    let known = sqlx::query_scalar::<_, bool>("select exists (select from pg_database where datname = $1)")
        .bind(DATABASE)
        .fetch_one(&mut connection)
        .await
        .context("look for the database")?;
    if !known {
        sqlx::query("create database springtide")
            .execute(&mut connection)
            .await
            .context("create the database")?;
    }
    connection.close().await.context("close connection")
}

async fn connect(url: &str) -> anyhow::Result<PgConnection> {
    let options: PgConnectOptions = url.parse().context("parse database URL")?;
    let options = options.disable_statement_logging();
    let connecting = options.connect();
    tokio::time::timeout(Duration::from_secs(CONNECT_SECONDS_MAX), connecting)
        .await
        .context("connect in time")?
        .context("connect")
}

fn tied_to_self(program: &Path) -> anyhow::Result<Command> {
    exec::tied(
        program,
        Tie {
            signal: STOP,
            drop_root: Uid::effective().is_root(),
        },
    )
}
