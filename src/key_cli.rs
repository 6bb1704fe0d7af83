//! `springtide key …`: API keys. Talks to the database itself: the first key cannot be made with a key.

use clap::ValueEnum;
use edge::auth::{self, Role};

use crate::config::Config;
use crate::roles::database;

/// API keys.
#[derive(Debug, Clone, clap::Subcommand)]
pub enum Command {
    /// Make a key and print its secret, which is stored nowhere.
    Create {
        #[arg(long, value_enum)]
        role: RoleName,
        #[arg(long, default_value = "default")]
        tenant: String,
        /// Who holds it, for people and audits.
        #[arg(long, default_value = "")]
        label: String,
    },
}

/// What a key may do.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum RoleName {
    /// Ask for completions, log generations, give feedback.
    Serving,
    /// Schedule and read training runs.
    Research,
    /// Move versions to users.
    Release,
    /// Everything.
    Admin,
}

pub async fn run(command: Command, config: &Config) -> anyhow::Result<()> {
    let Command::Create { role, tenant, label } = command;
    let role = match role {
        RoleName::Serving => Role::Serving,
        RoleName::Research => Role::Research,
        RoleName::Release => Role::Release,
        RoleName::Admin => Role::Admin,
    };
    let pool = database::connect(config).await?;
    println!("{}", auth::create_key(&pool, &tenant, role, &label).await?);
    Ok(())
}
