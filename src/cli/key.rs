//! `springtide key`: API keys. It uses the database, because the first key cannot be made with a
//! key.

use clap::ValueEnum;
use edge::auth;

use super::App;
use crate::database;

#[derive(Debug, Clone, clap::Subcommand)]
pub enum Command {
    /// Make a key and print its secret. The secret is not stored anywhere.
    ///
    /// Example: springtide key create --role release --label "night shift"
    Create {
        /// What the key may do.
        #[arg(long, value_enum)]
        role: Role,
        /// Tenant whose data the key reads and writes.
        #[arg(long, default_value = "default")]
        tenant: String,
        /// Who holds the key; shown in audits.
        #[arg(long, default_value = "")]
        label: String,
    },
}

/// What a key may do.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Role {
    /// Ask for completions, log generations, send feedback.
    Serving,
    /// Schedule and read training runs.
    Research,
    /// Move versions to users.
    Release,
    /// Everything.
    Admin,
}

impl Command {
    pub async fn run(self, app: &App) -> anyhow::Result<()> {
        let Self::Create { role, tenant, label } = self;
        let role = match role {
            Role::Serving => auth::Role::Serving,
            Role::Research => auth::Role::Research,
            Role::Release => auth::Role::Release,
            Role::Admin => auth::Role::Admin,
        };
        let pool = database::connect(&app.config).await?;
        println!("{}", auth::create_key(&pool, &tenant, role, &label).await?);
        Ok(())
    }
}
