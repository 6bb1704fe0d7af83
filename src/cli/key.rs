//! `springtide key`: API keys. It uses the database, because the first key cannot be made with a
//! key.

use std::num::NonZeroU32;
use std::time::Duration;

use anyhow::Context;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use control::times::{self, rfc3339};
use edge::auth::key::{self, Created, Grant, Listed, NewKey};
use edge::auth::{self, Scopes};
use time::OffsetDateTime;
use uuid::Uuid;

use super::App;
use super::audit::CommandLine;
use super::output::{Output, table};
use crate::database;

#[derive(Debug, Clone, clap::Subcommand)]
pub enum Command {
    /// Make a key and print its secret. The secret is not stored anywhere.
    ///
    /// Example: springtide key create --scope feedback --label "web client" --expires 90d
    Create(Create),
    /// List keys and what they may do. Secrets are not shown; nobody has them but their holders.
    List {
        /// Revoked and expired ones too.
        #[arg(long)]
        all: bool,
        /// Only of this tenant.
        #[arg(long)]
        tenant: Option<String>,
        #[command(flatten)]
        output: Output,
    },
    /// Make a key that may do the same, and let the old one expire. Prints the new secret.
    ///
    /// Example: springtide key rotate 019aa5e6-2f40-7abc-8def-0123456789ab --overlap 2d
    Rotate {
        /// The key's id, as `list` prints it.
        id: Uuid,
        /// How long the old key still works.
        #[arg(long, value_name = "DURATION", default_value = "24h", value_parser = times::age)]
        overlap: Duration,
        /// When the new key expires, for example 90d [default: after as long as the old one].
        #[arg(long, value_name = "DURATION", value_parser = times::age)]
        expires: Option<Duration>,
        /// Why; kept in the audit.
        #[arg(long, default_value = "")]
        reason: String,
    },
    /// Change how many requests per second each process takes of a key. Roles that reach the database
    /// follow within 5 seconds.
    ///
    /// Example: springtide key limit 019aa5e6-2f40-7abc-8def-0123456789ab --requests-per-second 5000
    Limit {
        /// The key's id, as `list` prints it.
        id: Uuid,
        /// Requests per second [default: auth.limits.key_requests_per_second].
        #[arg(long, value_name = "N")]
        requests_per_second: Option<NonZeroU32>,
        /// Why; kept in the audit.
        #[arg(long, default_value = "")]
        reason: String,
    },
    /// End a key at once. Roles that reach the database refuse it within 5 seconds.
    ///
    /// Example: springtide key revoke 019aa5e6-2f40-7abc-8def-0123456789ab --reason "laptop stolen"
    Revoke {
        /// The key's id, as `list` prints it.
        id: Uuid,
        /// Why; kept in the audit.
        #[arg(long)]
        reason: String,
    },
}

#[derive(Debug, Clone, clap::Args)]
pub struct Create {
    /// What the key may do; several, separated by commas.
    #[arg(
        long,
        value_parser = scopes(),
        value_delimiter = ',',
        required_unless_present = "role",
        conflicts_with = "role"
    )]
    scope: Vec<auth::Scope>,
    /// A set of scopes that belong together.
    #[arg(long, value_parser = roles())]
    role: Option<auth::Role>,
    /// The only replica that the key may report for: its serve.replica.
    #[arg(long, value_name = "NAME")]
    replica: Option<String>,
    /// Tenant whose data the key reads and writes.
    #[arg(long, default_value = "default")]
    tenant: String,
    /// Who holds the key; shown in audits.
    #[arg(long, default_value = "")]
    label: String,
    /// When it expires, for example 90d [default: never].
    #[arg(long, value_name = "DURATION", value_parser = times::age)]
    expires: Option<Duration>,
    /// Requests per second that each process takes of it [default:
    /// auth.limits.key_requests_per_second].
    #[arg(long, value_name = "N")]
    requests_per_second: Option<NonZeroU32>,
    /// Why; kept in the audit.
    #[arg(long, default_value = "")]
    reason: String,
}

/// Accepts the names of scopes, and lists what each allows.
fn scopes() -> impl TypedValueParser<Value = auth::Scope> {
    let values = auth::Scope::ALL.map(|scope| PossibleValue::new(scope.as_str()).help(scope.about()));
    PossibleValuesParser::new(values).try_map(|name| auth::Scope::parse(&name).ok_or("unknown scope"))
}

/// Accepts the names of roles, and lists their scopes.
fn roles() -> impl TypedValueParser<Value = auth::Role> {
    let values = auth::Role::ALL.map(|role| PossibleValue::new(role.as_str()).help(role.scopes().to_string()));
    PossibleValuesParser::new(values).try_map(|name| auth::Role::parse(&name).ok_or("unknown role"))
}

impl Command {
    pub async fn run(self, app: &App) -> anyhow::Result<()> {
        let pool = database::connect(&app.config).await?;
        database::check_schema(&pool).await?;
        let person = CommandLine::new();
        match self {
            Self::Create(create) => {
                let grant = match create.role {
                    Some(role) => Grant::Role(role),
                    None => Grant::Scopes(Scopes::of(&create.scope)),
                };
                let new = NewKey {
                    tenant: &create.tenant,
                    grant,
                    label: &create.label,
                    expires_at: create.expires.map(from_now).transpose()?,
                    replica: create.replica.as_deref(),
                    requests_per_second: create.requests_per_second,
                };
                print(&key::create(&pool, &new, person.actor(), &create.reason).await?);
            }
            Self::List { all, tenant, output } => {
                let now = OffsetDateTime::now_utc();
                let mut keys = key::list(&pool, tenant.as_deref()).await?;
                keys.retain(|key| all || key.status(now) == "valid");
                output.print(&keys, || page(&keys, now))?;
            }
            Self::Rotate {
                id,
                overlap,
                expires,
                reason,
            } => {
                let overlap = overlap.try_into().context("--overlap is too long")?;
                let expires_at = expires.map(from_now).transpose()?;
                let created = key::rotate(&pool, id, overlap, expires_at, person.actor(), &reason).await?;
                print(&created);
            }
            Self::Limit {
                id,
                requests_per_second,
                reason,
            } => {
                key::limit(&pool, id, requests_per_second, person.actor(), &reason).await?;
                let limit = limit(requests_per_second);
                println!("key {id}: requests per second: {limit}");
            }
            Self::Revoke { id, reason } => {
                key::revoke(&pool, id, person.actor(), &reason).await?;
                println!("key {id} is revoked; roles that reach the database refuse it within 5 seconds");
            }
        }
        Ok(())
    }
}

/// The secret alone on standard output, so that scripts can read it.
fn print(created: &Created) {
    let until = created
        .expires_at
        .map_or("never expires".to_owned(), |at| format!("expires {}", rfc3339(at)));
    eprintln!("key {}, {until}", created.id);
    println!("{}", created.secret);
}

fn limit(requests_per_second: Option<NonZeroU32>) -> String {
    requests_per_second.map_or("as configured".to_owned(), |requests| requests.to_string())
}

fn from_now(duration: Duration) -> anyhow::Result<OffsetDateTime> {
    let duration: time::Duration = duration.try_into().context("--expires is too far away")?;
    OffsetDateTime::now_utc()
        .checked_add(duration)
        .context("--expires is too far away")
}

fn page(keys: &[Listed], now: OffsetDateTime) -> String {
    let time = |at: Option<OffsetDateTime>| at.map_or_else(String::new, rfc3339);
    let row = |key: &Listed| {
        let may = match &*key.role {
            "custom" => key.scopes.join(","),
            role => format!("role {role}"),
        };
        let may = match &key.replica {
            Some(replica) => format!("{may} ({replica})"),
            None => may,
        };
        [
            key.id.to_string(),
            key.tenant.clone(),
            may,
            key.label.clone(),
            limit(key.requests_per_second),
            key.status(now).to_owned(),
            time(key.expires_at),
            time(key.last_used),
        ]
    };
    table(
        [
            "id",
            "tenant",
            "may",
            "label",
            "per second",
            "status",
            "expires",
            "last used",
        ],
        keys.iter().map(row),
    )
}
