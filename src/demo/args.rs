//! The command line of `springtide demo`.

use std::path::PathBuf;

use super::{headroom, rehearse, users::Corpus};

/// `springtide demo`, and the two measurements beside it.
#[derive(Debug, Clone, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Command {
    #[command(subcommand)]
    pub apart: Option<Apart>,
    #[command(flatten)]
    pub replay: Args,
}

/// What needs no running stack.
#[derive(Debug, Clone, clap::Subcommand)]
pub enum Apart {
    Headroom(headroom::Args),
    Rehearse(rehearse::Args),
}

impl Apart {
    pub fn run(&self) -> anyhow::Result<()> {
        match self {
            Apart::Headroom(args) => headroom::run(args),
            Apart::Rehearse(args) => rehearse::run(args),
        }
    }
}

/// Replays developers at work on real code, and reports how both arms served them.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// How long to replay, minutes.
    #[arg(long, default_value_t = 10.0, value_parser = positive)]
    pub minutes: f64,
    /// Mean pauses per second, over all users; half to twice that at any one time.
    #[arg(long, default_value_t = 16.0, value_parser = positive)]
    pub rate: f64,
    /// Everything random follows from it.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    #[command(flatten)]
    pub corpus: Corpus,
    /// Where the report goes, `report.json` in the state folder if not given; the page for people goes beside it.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Name of the policy to ask, if not the configured one.
    #[arg(long, value_name = "NAME")]
    pub policy: Option<String>,
    /// Answers are permuted among what is shown, so that there is nothing to learn: the difference should be none.
    #[arg(long)]
    pub control: bool,
    /// Temperature that suggestions are sampled at, in both arms.
    #[arg(long, default_value_t = 1.0, value_parser = positive_f32)]
    pub temperature: f32,
    /// Pauses of other users at which the base is tried beforehand, to know what is possible; 0 leaves all references out.
    #[arg(long, default_value_t = 1500)]
    pub reference_pauses: usize,
}

pub fn positive_f32(text: &str) -> Result<f32, String> {
    positive(text).map(|value| value as f32)
}

/// A price of showing: between 0 and 1.
pub fn price(text: &str) -> Result<f64, String> {
    positive(text).and_then(|value| match value < 1.0 {
        true => Ok(value),
        false => Err("must be below 1".to_owned()),
    })
}

fn positive(text: &str) -> Result<f64, String> {
    let value = text.parse::<f64>().map_err(|error| error.to_string())?;
    if value.is_finite() && value > 0.0 {
        Ok(value)
    } else {
        Err("must be above 0".to_owned())
    }
}
