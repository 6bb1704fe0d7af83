//! `springtide demo`, `rehearse` and `corpus` of a binary that was built without the feature `demo`.

use std::ffi::OsString;

use anyhow::bail;

use super::App;

pub type Corpus = Args;
pub type Rehearse = Args;

#[derive(Debug, Clone, clap::Args)]
#[command(disable_help_flag = true)]
pub struct Args {
    #[arg(hide = true, trailing_var_arg = true, allow_hyphen_values = true)]
    _arguments: Vec<OsString>,
}

impl Args {
    pub async fn run(self, _: &App) -> anyhow::Result<()> {
        bail!("this program was built without the demo: build it with `cargo build --features demo`");
    }
}
