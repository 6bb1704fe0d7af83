//! A private Postgres 18: its data folder, its command, its readiness. Does not supervise it.
//!
//! It listens on a Unix socket in its data folder and nowhere else. Only the user who runs Postgres
//! may enter that folder; Postgres checks this itself at every start. On top of that the server asks
//! the kernel who connects (peer authentication). So there is no password to leak, and no port that
//! another user could take while Postgres is down.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, ensure};
use nix::sys::signal::Signal;
use nix::unistd::{Uid, User};
use sqlx::{ConnectOptions, Connection, PgConnection, postgres::PgConnectOptions};

use super::exec::{self, NOBODY, Tie};
use super::reach;
use crate::private;

/// The database that the roles use.
pub const DATABASE: &str = "springtide";
/// Also the name of the database that always exists.
pub const SUPERUSER: &str = "postgres";
const CONNECTIONS_MAX: u16 = 200;
const CONNECT_SECONDS_MAX: u64 = 3;
/// Longest name of a Unix socket on Linux, bytes.
const SOCKET_BYTES_MAX: usize = 107;

/// Who may connect. Replaces the file of the data folder at every start.
const HBA: &str = "# Written by Springtide at every start.\nlocal all all peer map=springtide\n\
                   local replication all peer map=springtide\n";

/// How much WAL the server keeps at most for the next run of a backup.
pub const WAL_KEPT_MAX: &str = "8GB";

/// A fast shutdown: aborts transactions and stops. A smart one (SIGTERM) would wait for clients.
pub const STOP: Signal = Signal::SIGINT;

#[derive(Debug, Clone)]
pub struct Postgres {
    /// Has `bin/postgres`.
    pub installation: PathBuf,
    /// The cluster's files and its socket, or a link to them; [`Postgres::prepare`] creates it.
    pub data: PathBuf,
    /// Part of the socket's name.
    pub port: u16,
    /// False: no fsync, for data that may be lost.
    pub durable: bool,
}

impl Postgres {
    /// Creates the data folder if it does not exist, and writes who may connect. Postgres refuses
    /// root, so for root the folder belongs to another user.
    pub fn prepare(&self) -> anyhow::Result<()> {
        check_length(&self.data, self.port)?;
        let place = reach::data_folder(&self.data)?;
        if !place.join("PG_VERSION").exists() {
            self.initialize(&place)?;
        }
        let user = exec::server_user();
        private::replace(&place.join("pg_hba.conf"), HBA, user)?;
        private::replace(&place.join("pg_ident.conf"), &identities()?, user)
    }

    /// The server in the foreground, logging to its standard error.
    pub fn command(&self) -> anyhow::Result<Command> {
        let data = self
            .data
            .canonicalize()
            .with_context(|| format!("resolve {}", self.data.display()))?;
        let mut command = tied(&self.installation.join("bin/postgres"), exec::server_user())?;
        command.arg("-D").arg(&data).current_dir("/");
        let mut set = |name: &str, value: &dyn std::fmt::Display| {
            command.arg("-c").arg(format!("{name}={value}"));
        };
        set("port", &self.port);
        set("listen_addresses", &"");
        // Relative to the data folder.
        set("unix_socket_directories", &".");
        set("unix_socket_permissions", &"0700");
        set("max_connections", &CONNECTIONS_MAX);
        set("max_slot_wal_keep_size", &WAL_KEPT_MAX);
        // On solid-state disks a random page costs about as much as the next one.
        set("random_page_cost", &"1.1");
        // Details of an error quote the row, and statements may hold values: texts of users.
        set("log_error_verbosity", &"terse");
        set("log_min_error_statement", &"panic");
        set("timezone", &"UTC");
        set("log_timezone", &"UTC");
        if !self.durable {
            set("fsync", &"off");
            set("full_page_writes", &"off");
        }
        Ok(command)
    }

    /// As the superuser.
    pub fn url(&self, database: &str) -> String {
        url(&self.data, self.port, SUPERUSER, database)
    }

    /// Whether it accepts connections.
    pub async fn ready(&self) -> bool {
        connect(&self.url(SUPERUSER)).await.is_ok()
    }

    /// Makes a new cluster in `place`.
    fn initialize(&self, place: &Path) -> anyhow::Result<()> {
        // An interrupted initdb may have left files.
        for entry in fs::read_dir(place).context("list the data folder")? {
            let path = entry.context("list the data folder")?.path();
            let removed = if path.is_dir() && !path.is_symlink() {
                fs::remove_dir_all(&path)
            } else {
                fs::remove_file(&path)
            };
            removed.with_context(|| format!("remove unfinished {}", path.display()))?;
        }
        let user = exec::server_user();
        // Unlike the server, initdb must find its user's name.
        let temporary = user.map(|_| NOBODY);
        if let Some(user) = temporary {
            reach::give(place, user)?;
        }
        let mut initdb = tied(&self.installation.join("bin/initdb"), temporary)?;
        initdb
            .args(["--username", SUPERUSER, "--auth=reject", "--encoding=UTF8"])
            .args(["--locale-provider=builtin", "--builtin-locale=C.UTF-8", "--locale=C"])
            .args(["--no-sync", "--pgdata"])
            .arg(place)
            .current_dir("/");
        exec::output(&mut initdb, "the downloads of `springtide stack fetch`")?;
        user.map_or(Ok(()), |user| reach::give(place, user))
    }
}

/// `pg_ident.conf`: this process's user may connect as any database user.
fn identities() -> anyhow::Result<String> {
    let id = Uid::effective();
    let user = User::from_uid(id).context("look up own user")?;
    let user = user.with_context(|| format!("user {id} has no name; Postgres needs one"))?;
    ensure!(
        !user.name.contains(['"', '\n']),
        "the name of user {id} has a quote or a line break"
    );
    Ok(format!(
        "# Written by Springtide at every start.\nspringtide \"{}\" all\n",
        user.name
    ))
}

/// Refuses a data folder in which the socket's name would be longer than a socket's may be.
pub fn check_length(data: &Path, port: u16) -> anyhow::Result<()> {
    let socket = data.join(format!(".s.PGSQL.{port}"));
    let bytes = socket.as_os_str().len();
    ensure!(
        bytes <= SOCKET_BYTES_MAX,
        "the path {} is {} bytes too long for the socket of the private Postgres: set a shorter state_dir, \
         or a shorter TMPDIR for a temporary stack",
        socket.display(),
        bytes - SOCKET_BYTES_MAX
    );
    Ok(())
}

/// The URL of a database of the private server with this data folder, as this user. Holds no secret.
pub fn url(data: &Path, port: u16, user: &str, database: &str) -> String {
    use std::fmt::Write;
    let mut host = String::new();
    for byte in data.as_os_str().as_encoded_bytes() {
        // Writing to a string cannot fail.
        let _ = match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' => write!(host, "{}", char::from(*byte)),
            _ => write!(host, "%{byte:02X}"),
        };
    }
    format!("postgres://{user}@{host}:{port}/{database}")
}

/// Creates [`DATABASE`] unless it exists. `url`: of any database of the server.
pub async fn ensure_database(url: &str) -> anyhow::Result<()> {
    let mut connection = connect(url).await?;
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

fn tied(program: &Path, user: Option<u32>) -> anyhow::Result<Command> {
    exec::tied(program, Tie { signal: STOP, user })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_names_the_socket_in_the_data_folder() {
        let url = url(
            Path::new("/srv/my state/postgres"),
            15432,
            "springtide_serve",
            "springtide",
        );
        assert_eq!(
            url,
            "postgres://springtide_serve@%2Fsrv%2Fmy%20state%2Fpostgres:15432/springtide"
        );
        let options: PgConnectOptions = url.parse().unwrap();
        let socket = options.get_socket().unwrap();
        assert_eq!(socket, Path::new("/srv/my state/postgres"));
    }

    #[test]
    fn a_state_folder_that_is_too_deep_for_a_socket_is_refused_with_advice() {
        let server = Postgres {
            installation: "/none".into(),
            data: Path::new("/tmp").join("x".repeat(100)),
            port: 15432,
            durable: true,
        };
        let refused = server.prepare().unwrap_err().to_string();
        assert!(refused.contains("set a shorter state_dir"), "{refused}");
    }
}
