//! A private Postgres 18 on loopback TCP: its data folder, its command, its readiness. Does not
//! supervise it.

use std::ffi::OsStr;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::Context;
use nix::sys::signal::Signal;
use nix::unistd::Uid;
use sqlx::{ConnectOptions, Connection, PgConnection, postgres::PgConnectOptions};

use super::exec::{self, NOBODY, Tie};
use super::reach;

/// The database that the roles use.
pub const DATABASE: &str = "springtide";
/// Also the name of the database that always exists.
pub const SUPERUSER: &str = "postgres";
const CONNECTIONS_MAX: u16 = 200;
const CONNECT_SECONDS_MAX: u64 = 3;

/// A fast shutdown: aborts transactions and stops. A smart one (SIGTERM) would wait for clients.
pub const STOP: Signal = Signal::SIGINT;

#[derive(Debug, Clone)]
pub struct Postgres {
    /// Has `bin/postgres`.
    pub installation: PathBuf,
    /// The cluster's files, or a link to them; [`Postgres::prepare`] creates it.
    pub data: PathBuf,
    pub port: u16,
    /// False: no fsync, for data that may be lost.
    pub durable: bool,
}

impl Postgres {
    /// Creates the data folder if it does not exist. Postgres refuses root, so for root it belongs
    /// to `nobody`.
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
            .current_dir("/");
        exec::output(&mut initdb, "the downloads of `springtide stack fetch`")?;
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
        // On solid-state disks a random page costs about as much as the next one.
        set("random_page_cost", &"1.1");
        set("timezone", &"UTC");
        set("log_timezone", &"UTC");
        if !self.durable {
            set("fsync", &"off");
            set("full_page_writes", &"off");
        }
        Ok(command)
    }

    /// Whether it accepts connections.
    pub async fn ready(&self) -> bool {
        connect(&url(self.port, SUPERUSER)).await.is_ok()
    }

    /// Creates a folder for the cluster, owned by the user that will run it. Where `nobody` cannot
    /// reach the wanted place, the folder is elsewhere, with a link in its place.
    fn create_data_folder(&self) -> anyhow::Result<PathBuf> {
        let mut place = reach::folder(&self.data)?;
        if place.file_name() != self.data.file_name() {
            // A new name each time: whoever removed an earlier link wanted its state gone.
            let mut name = place.into_os_string();
            name.push(OsStr::new(&format!("-{}", uuid::Uuid::now_v7().simple())));
            place = name.into();
            fs::create_dir(&place).with_context(|| format!("create {}", place.display()))?;
            if self.data.is_symlink() {
                fs::remove_file(&self.data).context("remove a broken link")?;
            }
            symlink(&place, &self.data).with_context(|| format!("link {}", self.data.display()))?;
            tracing::info!(place = %place.display(), "Postgres keeps its data in another place, which it can reach without root");
        } else if place.exists() {
            // An interrupted initdb.
            fs::remove_dir_all(&place).with_context(|| format!("remove unfinished {}", place.display()))?;
            fs::create_dir(&place).with_context(|| format!("create {}", place.display()))?;
        } else {
            fs::create_dir(&place).with_context(|| format!("create {}", place.display()))?;
        }
        fs::set_permissions(&place, Permissions::from_mode(0o700)).context("make the data folder private")?;
        if Uid::effective().is_root() {
            chown(&place, Some(NOBODY), Some(NOBODY)).context("change the owner of the data folder")?;
        }
        Ok(place)
    }
}

/// The URL of a private server's database.
pub fn url(port: u16, database: &str) -> String {
    format!("postgres://{SUPERUSER}@127.0.0.1:{port}/{database}")
}

/// Creates [`DATABASE`] on the private server at `port` unless it exists.
pub async fn ensure_database(port: u16) -> anyhow::Result<()> {
    let mut connection = connect(&url(port, SUPERUSER)).await?;
    let known = sqlx::query_scalar::<_, bool>("select exists (select from pg_database where datname = $1)")
        .bind(DATABASE)
        .fetch_one(&mut connection)
        .await
        .context("check whether the database exists")?;
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
