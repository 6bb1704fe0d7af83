//! Connections to Postgres, and its schema.

use std::time::Duration;

use anyhow::{Context, anyhow, ensure};
use sqlx::error::DatabaseError;
use sqlx::migrate::{MigrateError, Migrator};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions, PgSslMode};
use sqlx::{Executor, PgPool};

use crate::audited;
use crate::cli::audit::CommandLine;
use crate::config::{Config, Part};

static MIGRATIONS: Migrator = sqlx::migrate!();

const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(10);
/// Together a minute: how long to wait for a server that is starting.
const ATTEMPTS_MAX: u32 = 60;
const ATTEMPT_EVERY: Duration = Duration::from_secs(1);

/// Connects as the owner of the tables, for commands. Waits a minute for a server that does not answer
/// yet. Fails at once if TLS fails.
pub async fn connect(config: &Config) -> anyhow::Result<PgPool> {
    connect_within(config, &config.postgres_url(), ATTEMPTS_MAX).await
}

/// Connects as the owner of the tables, and fails at once if the server does not answer.
pub async fn connect_now(config: &Config) -> anyhow::Result<PgPool> {
    connect_within(config, &config.postgres_url(), 1).await
}

/// Connects as the role's own user. Otherwise like [`connect`].
pub async fn connect_as(config: &Config, part: Part) -> anyhow::Result<PgPool> {
    if config.postgres.url.is_some() && config.postgres.urls.of(part).is_none() {
        tracing::warn!(
            "this role uses Postgres as the owner of all tables: set postgres.urls.{} to the URL of the user {}",
            part.name(),
            part.database_user()
        );
    }
    connect_within(config, &config.postgres_url_of(part), ATTEMPTS_MAX).await
}

async fn connect_within(config: &Config, url: &str, attempts_max: u32) -> anyhow::Result<PgPool> {
    let options: PgConnectOptions = url.parse().context("parse the URL of Postgres")?;
    let mut options = options.application_name("springtide");
    if config.postgres.url.is_none() {
        options = options.ssl_mode(PgSslMode::Disable); // the private server has none
    }
    let pool = PgPoolOptions::new()
        .max_connections(config.postgres.connections_max)
        .acquire_timeout(ACQUIRE_TIMEOUT);
    let mut attempts = 1;
    loop {
        match pool.clone().connect_with(options.clone()).await {
            Ok(pool) => return Ok(pool),
            Err(error @ (sqlx::Error::Tls(_) | sqlx::Error::Configuration(_))) => {
                return Err(error)
                    .context("connect to Postgres over TLS; are sslmode and sslrootcert in postgres.url right?");
            }
            // An external server knows who may connect, and does not change its mind.
            Err(sqlx::Error::Database(error)) if config.postgres.url.is_some() && is_refusal(&*error) => {
                return Err(error).context("log in to Postgres");
            }
            Err(sqlx::Error::Database(error)) if attempts >= attempts_max && is_refusal(&*error) => {
                return Err(error).context("log in to Postgres; `springtide migrate` makes the users of the roles");
            }
            Err(error) if attempts >= attempts_max => {
                return Err(error).context("connect to Postgres; is it running, and is postgres.url right?");
            }
            Err(error) => {
                if attempts == 1 {
                    tracing::warn!(%error, "Postgres does not answer yet; waiting");
                }
                attempts += 1;
                tokio::time::sleep(ATTEMPT_EVERY).await;
            }
        }
    }
}

/// Brings the schema up to date, makes the roles' users if it may, and says what they may do. Notes in
/// the audit what was there before it.
pub async fn migrate(pool: &PgPool) -> anyhow::Result<()> {
    MIGRATIONS
        .run(pool)
        .await
        .map_err(explained)
        .context("migrate the database")?;
    // Users may have been made, and tables added, since the migration that does the same.
    let rights = pool
        .execute("select create_database_roles(); select grant_database_rights()")
        .await;
    rights.context("grant the roles' users their rights")?;
    for user in missing_users(pool).await.context("list the roles' users")? {
        tracing::warn!("Postgres has no user {user}: `create role {user} login`, then `springtide migrate` again");
    }
    let begun = audited::begin(pool, CommandLine::new().actor()).await;
    begun.context("note in the audit what is in the tables")
}

/// What to do about it.
fn explained(error: MigrateError) -> anyhow::Error {
    match error {
        MigrateError::VersionMismatch(number) => anyhow!(
            "another migration {number} made these tables: that of a build before 0.1.0, or of something else. Use an \
             empty database, or another state_dir"
        ),
        MigrateError::VersionMissing(number) => anyhow!(
            "a newer release made these tables (they have migration {number}): use that one, or restore a backup of \
             before"
        ),
        error => error.into(),
    }
}

async fn missing_users(pool: &PgPool) -> sqlx::Result<Vec<String>> {
    let users = [Part::Serve, Part::Ingest, Part::Control, Part::Train].map(Part::database_user);
    sqlx::query_scalar!(
        r#"select name as "name!" from unnest($1::text[]) as name where not exists (select from pg_roles where rolname = name)"#,
        &users
    )
    .fetch_all(pool)
    .await
}

/// Whether the server refuses this user, host or password (SQLSTATE class 28).
fn is_refusal(error: &dyn DatabaseError) -> bool {
    error.code().is_some_and(|code| code.starts_with("28"))
}

/// Whether the server is unreachable, starting or stopping (SQLSTATE class 57P).
fn is_unavailable(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Database(error) => error.code().is_some_and(|code| code.starts_with("57P")),
        sqlx::Error::Io(_) | sqlx::Error::PoolTimedOut | sqlx::Error::Protocol(_) => true,
        _ => false,
    }
}

/// Fails if the schema is older than this program. Waits a minute if the server becomes
/// unavailable.
pub async fn check_schema(pool: &PgPool) -> anyhow::Result<()> {
    let wanted = MIGRATIONS.iter().map(|migration| migration.version).max();
    let mut attempts = 1;
    let applied = loop {
        let applied = sqlx::query_scalar::<_, Option<i64>>("select max(version) from _sqlx_migrations where success");
        match applied.fetch_one(pool).await {
            Ok(applied) => break applied,
            Err(sqlx::Error::Database(error)) if error.code().as_deref() == Some("42P01") => break None,
            Err(error) if is_unavailable(&error) && attempts < ATTEMPTS_MAX => {
                attempts += 1;
                tokio::time::sleep(ATTEMPT_EVERY).await;
            }
            Err(error) => return Err(error).context("read the schema's version"),
        }
    };
    ensure!(
        applied >= wanted,
        "the database's schema is older than this program: run `springtide migrate`"
    );
    Ok(())
}
