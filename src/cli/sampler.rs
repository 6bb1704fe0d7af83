//! `springtide sampler`: whose generations may be trained on. It uses the database.

use std::path::PathBuf;
use std::time::Duration;

use control::times::{self, rfc3339};
use edge::sampler::{self, SamplerKey};
use time::OffsetDateTime;

use super::App;
use super::audit::CommandLine;
use super::output::{Confirm, Output, table};
use crate::database;

#[derive(Debug, Clone, clap::Subcommand)]
pub enum Command {
    /// Make a key for a gateway, a collector or a harness, and print its public key.
    ///
    /// Replicas make their own: `sampler.key` in serve.state_dir.
    ///
    /// Example: springtide sampler new-key harness.key
    NewKey {
        /// File to write. If it exists, its public key is printed.
        file: PathBuf,
    },
    /// Register a sampler: what it signs may be trained on.
    ///
    /// Repeat it with --expires to change when a registered one expires.
    ///
    /// Example: springtide sampler add --name replica-2 --key .springtide/serve/sampler.key
    Add {
        /// What its generations name as `replica`: serve.replica of a replica.
        #[arg(long)]
        name: String,
        /// Its public key, 64 hexadecimal digits.
        #[arg(long, value_name = "HEX", conflicts_with = "key", required_unless_present = "key")]
        public_key: Option<String>,
        /// The file of its private key, if it is on this machine.
        #[arg(long, value_name = "FILE")]
        key: Option<PathBuf>,
        /// The only policy it samples [default: policy.name].
        #[arg(long)]
        policy: Option<String>,
        /// For how long it is valid, for example 90d [default: until it is revoked].
        #[arg(long, value_name = "DURATION", value_parser = times::age)]
        expires: Option<Duration>,
    },
    /// List samplers.
    List {
        #[command(flatten)]
        output: Output,
    },
    /// Revoke a sampler: nothing that it signed is trained on from now on.
    ///
    /// Example: springtide sampler revoke 5d0c…
    Revoke {
        /// Its id, as `list` prints it.
        id: String,
        /// Why; kept in the audit.
        #[arg(long, default_value = "")]
        reason: String,
        #[command(flatten)]
        confirm: Confirm,
    },
}

impl Command {
    pub async fn run(self, app: &App) -> anyhow::Result<()> {
        let person = CommandLine::new();
        match self {
            Self::NewKey { file } => {
                let key = SamplerKey::load_or_create(&file)?;
                println!("{}", hex::encode(key.public_key()));
                Ok(())
            }
            Self::Add {
                name,
                public_key,
                key,
                policy,
                expires,
            } => {
                let public_key = match (public_key, key) {
                    (Some(text), _) => sampler::parse_public_key(&text)?,
                    (None, Some(file)) => SamplerKey::load(&file)?.public_key(),
                    (None, None) => anyhow::bail!("give --public-key or --key"),
                };
                let policy = policy.unwrap_or_else(|| app.config.policy.name.clone());
                let expires_at = expires.map(|expires| OffsetDateTime::now_utc() + expires);
                let pool = database::connect(&app.config).await?;
                let id =
                    sampler::register(&pool, &public_key, &name, Some(&policy), expires_at, person.actor()).await?;
                println!("{id}");
                Ok(())
            }
            Self::List { output } => {
                let pool = database::connect(&app.config).await?;
                let samplers = sampler::list(&pool).await?;
                output.print(&samplers, || {
                    let row = |sampler: &sampler::Sampler| {
                        let state = match (sampler.revoked_at, sampler.expires_at) {
                            (Some(at), _) => format!("REVOKED {}", rfc3339(at)),
                            (None, Some(at)) if at <= OffsetDateTime::now_utc() => "EXPIRED".to_owned(),
                            (None, Some(at)) => format!("until {}", rfc3339(at)),
                            (None, None) => "valid".to_owned(),
                        };
                        [
                            sampler.id.clone(),
                            sampler.name.clone(),
                            sampler.policy.clone().unwrap_or_else(|| "every".to_owned()),
                            state,
                        ]
                    };
                    table(["id", "name", "policy", "state"], samplers.iter().map(row))
                })
            }
            Self::Revoke { id, reason, confirm } => {
                confirm.ask(&format!(
                    "Nothing that sampler {id} signed will be trained on. Revoke it?"
                ))?;
                let pool = database::connect(&app.config).await?;
                match sampler::revoke(&pool, &id, person.actor(), &reason).await? {
                    true => println!("sampler {id} is revoked"),
                    false => println!("sampler {id} was revoked before"),
                }
                Ok(())
            }
        }
    }
}
