//! `springtide tenant`: whose a policy is, and which tenants let it train on their data. It uses the
//! database.

use control::times::rfc3339;
use edge::tenant::{self, Consent, Owned};
use serde::Serialize;

use super::App;
use super::audit::CommandLine;
use super::output::{Confirm, Output, table};
use crate::database;

#[derive(Debug, Clone, clap::Subcommand)]
pub enum Command {
    /// List policies with the tenants that they belong to, and the consents of other tenants.
    List {
        /// Withdrawn consents too.
        #[arg(long)]
        all: bool,
        #[command(flatten)]
        output: Output,
    },
    /// Let a policy be trained on what a tenant logs.
    ///
    /// The tenant that owns the policy need not consent.
    ///
    /// Example: springtide tenant consent acme --reason "contract of 2026-11-01"
    Consent {
        #[command(flatten)]
        change: Change,
    },
    /// Withdraw a consent: from now on nothing of the tenant is trained on.
    ///
    /// That includes what waits for a step. Versions that were trained on it stay.
    ///
    /// Example: springtide tenant withdraw acme --reason "their request of today"
    Withdraw {
        #[command(flatten)]
        change: Change,
        #[command(flatten)]
        confirm: Confirm,
    },
    /// Hand a policy over to another tenant, whose keys then decide about its runs and releases.
    ///
    /// Set policy.tenant afterwards, before the roles start again.
    ///
    /// Example: springtide tenant transfer --to acme --reason "their product"
    Transfer {
        /// The new owner.
        #[arg(long, value_name = "TENANT")]
        to: String,
        /// The policy [default: policy.name].
        #[arg(long)]
        policy: Option<String>,
        /// Why; kept in the audit.
        #[arg(long, default_value = "")]
        reason: String,
        #[command(flatten)]
        confirm: Confirm,
    },
}

#[derive(Debug, Clone, clap::Args)]
pub struct Change {
    /// The tenant whose data it is.
    tenant: String,
    /// The policy that is trained [default: policy.name].
    #[arg(long)]
    policy: Option<String>,
    /// Why; kept in the audit.
    #[arg(long, default_value = "")]
    reason: String,
}

/// What `list` prints.
#[derive(Serialize)]
struct Listed {
    policies: Vec<Owned>,
    consents: Vec<Consent>,
}

impl Command {
    pub async fn run(self, app: &App) -> anyhow::Result<()> {
        let own = |policy: Option<String>| policy.unwrap_or_else(|| app.config.policy.name.clone());
        let person = CommandLine::new();
        match self {
            Self::List { all, output } => {
                let pool = database::connect(&app.config).await?;
                database::check_schema(&pool).await?;
                let listed = Listed {
                    policies: tenant::policies(&pool).await?,
                    consents: tenant::consents(&pool, !all).await?,
                };
                output.print(&listed, || page(&listed))
            }
            Self::Consent { change } => {
                let (policy, tenant) = (own(change.policy), change.tenant);
                let pool = database::connect(&app.config).await?;
                database::check_schema(&pool).await?;
                let is_new = tenant::consent(&pool, &policy, &tenant, person.actor(), &change.reason).await?;
                match is_new {
                    true => println!("{policy} may be trained on what {tenant} logs"),
                    false => println!("{policy} was allowed to be trained on what {tenant} logs before"),
                }
                Ok(())
            }
            Self::Withdraw { change, confirm } => {
                let (policy, tenant) = (own(change.policy), change.tenant);
                confirm.ask(&format!(
                    "{policy} will no longer be trained on what {tenant} logs. Withdraw the consent?"
                ))?;
                let pool = database::connect(&app.config).await?;
                database::check_schema(&pool).await?;
                let was_given = tenant::withdraw(&pool, &policy, &tenant, person.actor(), &change.reason).await?;
                match was_given {
                    true => println!("{policy} is no longer trained on what {tenant} logs"),
                    false => println!("{tenant} had not consented to {policy}"),
                }
                Ok(())
            }
            Self::Transfer {
                to,
                policy,
                reason,
                confirm,
            } => {
                let policy = own(policy);
                confirm.ask(&format!(
                    "Keys of {to} will decide about runs and releases of {policy}. Hand it over?"
                ))?;
                let pool = database::connect(&app.config).await?;
                database::check_schema(&pool).await?;
                tenant::transfer(&pool, &policy, &to, person.actor(), &reason).await?;
                println!("{policy} belongs to {to}: set policy.tenant = {to:?} and restart the roles");
                Ok(())
            }
        }
    }
}

fn page(listed: &Listed) -> String {
    let owner = |owned: &Owned| {
        let (policy, tenant) = (owned.policy.clone(), owned.tenant.clone());
        [
            policy,
            tenant,
            "owner".to_owned(),
            String::new(),
            rfc3339(owned.created_at),
        ]
    };
    let consent = |consent: &Consent| {
        let status = match consent.withdrawn_at {
            None => "consents".to_owned(),
            Some(at) => format!("withdrawn {}", rfc3339(at)),
        };
        let who = match &consent.withdrawn_by {
            None => consent.given_by.clone(),
            Some(by) => format!("{}, {by}", consent.given_by),
        };
        let (policy, tenant) = (consent.policy.clone(), consent.tenant.clone());
        [policy, tenant, status, who, rfc3339(consent.given_at)]
    };
    let mut rows: Vec<[String; 5]> = listed.policies.iter().map(owner).collect();
    rows.extend(listed.consents.iter().map(consent));
    rows.sort_by(|a, b| a[0].cmp(&b[0])); // stable: the owner stays first
    table(["policy", "tenant", "status", "by", "since"], rows)
}
