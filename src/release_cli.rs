//! `springtide release …`: who is served by which version, and how to change that. An HTTP client of the control API; what
//! a release does is the crate `serving`'s.

mod view;

use serde_json::{Value, json};

use crate::client::Control;
use crate::config::Config;
use view::{Aliases, Releases, Replicas};

/// Rows of history read; more than enough to find the last move of every alias.
const HISTORY: &str = "200";

/// Which version serves whom.
#[derive(Debug, Clone, clap::Subcommand)]
pub enum Command {
    /// Which version serves whom, since when, why, on which replicas, and how to go back.
    List {
        /// How many of the latest moves to show.
        #[arg(long, default_value_t = 5)]
        history: usize,
    },
    /// Give an alias a version; `champion` follows the realtime line from there, any other alias stays.
    Promote(Move),
    /// Give an alias the version it served before, or the one named; for `champion` the realtime line goes on from there.
    Rollback(Move),
    /// Hold an alias at a version: it follows nothing until it is promoted or rolled back.
    Pin(Move),
}

#[derive(Debug, Clone, clap::Args)]
pub struct Move {
    /// The alias to move.
    #[arg(long, default_value = "champion")]
    alias: String,
    /// Serial of the version; `rollback` can do without (the one before), and so can `pin` (the one it serves).
    #[arg(long)]
    version: Option<i64>,
    /// For the audit: why.
    #[arg(long)]
    reason: String,
}

pub async fn run(command: Command, config: &Config) -> anyhow::Result<()> {
    let control = Control::new(config)?;
    match command {
        Command::List { history } => list(&control, config, history).await,
        Command::Promote(to) => send(&control, "promote", to).await,
        Command::Rollback(to) => send(&control, "rollback", to).await,
        Command::Pin(to) => send(&control, "pin", to).await,
    }
}

async fn list(control: &Control, config: &Config, history: usize) -> anyhow::Result<()> {
    let aliases: Aliases = control.get("/v1/aliases", &[]).await?;
    let releases: Releases = control.get("/v1/releases", &[("limit", HISTORY)]).await?;
    let replicas: Replicas = control.get("/v1/replicas", &[]).await?;
    let now = time::OffsetDateTime::now_utc();
    let page = view::page(&aliases, &releases, &replicas, &config.release.arms, history, now);
    print!("{page}");
    Ok(())
}

async fn send(control: &Control, kind: &str, to: Move) -> anyhow::Result<()> {
    let mut body = json!({"kind": kind, "alias": to.alias, "reason": to.reason});
    if let Some(version) = to.version {
        body["version"] = version.into();
    }
    let done: Value = control.post("/v1/releases", &body).await?;
    let version = |field: &str| {
        done[field]
            .as_i64()
            .map_or("none".to_owned(), |serial| serial.to_string())
    };
    println!(
        "{}: version {} → {} (epoch {})",
        to.alias,
        version("from_version"),
        version("to_version"),
        done["epoch"]
    );
    match done["follows"].as_str() {
        Some(line) => println!("it follows the line {line}"),
        None => println!("it is pinned"),
    }
    Ok(())
}
