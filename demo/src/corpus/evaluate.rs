//! `springtide corpus evaluate`: how often a model's greedy suggestion is exactly what was typed, or
//! in how many sessions a model reaches the user's text.

use std::{path::PathBuf, sync::Arc};

use anyhow::ensure;
use artifact::checkpoint::Checkpoint;
use rand::{Rng, SeedableRng, rngs::StdRng};

use super::{
    pauses,
    sources::{self, Split},
    tokenizer,
};
use crate::{
    developer,
    session::{self, start},
    suggester::{Draft, Method, Suggester},
};

/// Characters of a file in a prompt. What does not fit the context is cut on the left.
const CONTEXT_CHARS: usize = 640;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Hugging Face folder of the model.
    #[arg(long, default_value = "models/demo-base")]
    pub model: PathBuf,
    /// How many pauses, drawn from the held-out crates.
    #[arg(long, default_value_t = 2000)]
    pub pauses: usize,
    /// Hold so many sessions instead, sampled at temperature 1.
    #[arg(long, value_name = "N", conflicts_with = "pauses")]
    pub sessions: Option<usize>,
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

/// Users among whom the held-out crates are dealt out for sessions.
const USERS: usize = 100;

pub fn run(args: &Args) -> anyhow::Result<()> {
    match args.sessions {
        Some(sessions) => hold_sessions(args, sessions),
        None => suggest(args),
    }
}

/// Prints the fraction of sessions on held-out crates in which the user's text was reached.
fn hold_sessions(args: &Args, sessions: usize) -> anyhow::Result<()> {
    let files = sources::files_of(Split::HeldOut)?.into_iter();
    let files: Vec<(String, Arc<str>)> = files
        .map(|file| (file.krate + "/" + &file.path, file.text.into()))
        .collect();
    let users = developer::deal(&files, USERS)?;
    let tasks = session::tasks(&users, 0, args.seed, sessions);
    let checkpoint = Checkpoint::read_dir(&args.model)?;
    println!("{}", start::measure(&checkpoint, &tasks, 1.0, args.seed)?);
    Ok(())
}

/// Prints the fraction of exact matches on held-out crates, with and without the option to decline.
fn suggest(args: &Args) -> anyhow::Result<()> {
    let mut suggester = Suggester::new(&Checkpoint::read_dir(&args.model)?)?;
    let files = sources::files_of(Split::HeldOut)?;
    ensure!(!files.is_empty(), "there are no held-out files; run `cargo fetch`");
    let mut rng = StdRng::seed_from_u64(args.seed);
    let mut prompts = Vec::new();
    let mut typed = Vec::new();
    while prompts.len() < args.pauses {
        let file = &files[rng.random_range(0..files.len())];
        let lines = pauses::lines(&file.text);
        let line = lines[rng.random_range(0..lines.len())].clone();
        let Some(pause) = pauses::on_line(&file.text, line, &mut rng) else {
            continue;
        };
        let text = pauses::tail(&file.text, pause.at, CONTEXT_CHARS);
        let mut ids = suggester.encode(&format!("{text}{}", tokenizer::CUT))?;
        ids.drain(..ids.len().saturating_sub(suggester.prompt_tokens_max()));
        prompts.push((ids, [Method::Greedy]));
        typed.push(&file.text[pause.at..pause.end]);
    }
    let (mut matched, mut shown, mut matched_shown) = (0, 0, 0);
    for ([Draft { text, declined, .. }], typed) in suggester.suggest(&prompts)?.iter().zip(typed) {
        let right = text.trim_end() == typed;
        matched += u32::from(right);
        shown += u32::from(!declined);
        matched_shown += u32::from(right && !declined);
    }
    let share = |n: u32, of: u32| f64::from(n) / f64::from(of.max(1));
    println!(
        "pauses {}  greedy exact match {:.3}  shown {:.3}  of shown right {:.3}",
        args.pauses,
        share(matched, args.pauses as u32),
        share(shown, args.pauses as u32),
        share(matched_shown, shown)
    );
    Ok(())
}
