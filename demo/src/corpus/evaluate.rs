//! `springtide corpus evaluate`: how often a model's greedy suggestion is exactly what was typed.

use std::{fmt, path::PathBuf, sync::Arc};

use anyhow::ensure;
use artifact::checkpoint::Checkpoint;

use super::sources::{self, Split};
use crate::{
    developer::{self, Pause},
    house_style,
    stats::Reaction,
    suggester::{Draft, Method, Suggester},
    users::Users,
};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Hugging Face folder of the model.
    #[arg(long, default_value = "demo/models/base")]
    pub model: PathBuf,
    /// How many pauses, drawn from the held-out crates.
    #[arg(long, default_value_t = 2000)]
    pub pauses: usize,
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Whose code.
    #[arg(long, value_enum, default_value_t = Users::Plain)]
    pub users: Users,
    /// Of the house's conventions, these alone.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub rules: Option<Vec<String>>,
}

/// Users among whom the held-out crates are dealt out.
const USERS: usize = 100;

/// Prints how often suggestions on held-out crates are exactly what was typed. Pauses are `affected` if
/// what was typed there ends no line of the file as its author wrote it.
pub fn run(args: &Args) -> anyhow::Result<()> {
    ensure!(
        args.users == Users::House || args.rules.is_none(),
        "--rules are conventions of the house: add --users house"
    );
    let files = sources::files_of(Split::HeldOut)?;
    ensure!(!files.is_empty(), "there are no held-out files; run `cargo fetch`");
    let style = |text: &str| match (args.users, &args.rules) {
        (Users::Plain, _) => Ok(text.to_owned()),
        (Users::House, None) => Ok(house_style::restyle(text)),
        (Users::House, Some(rules)) => house_style::restyle_with(text, rules),
    };
    let styled = files
        .iter()
        .map(|file| Ok((file.krate.clone() + "/" + &file.path, style(&file.text)?.into())));
    let users = developer::deal(&styled.collect::<anyhow::Result<Vec<(String, Arc<str>)>>>()?, USERS)?;
    let mut suggester = Suggester::new(&Checkpoint::read_dir(&args.model)?)?;
    let (mut prompts, mut pauses) = (Vec::new(), Vec::new());
    for nth in 0..args.pauses as u64 {
        let user = nth as usize % USERS;
        let Some(pause) = developer::pause(&users[user], args.seed, user, nth) else {
            continue;
        };
        let Some(ids) = suggester.prompt(&pause)? else { continue };
        let sampled = Method::sampled(1.0, args.seed.wrapping_mul(1 << 32) + nth);
        prompts.push((ids, [Method::Greedy, sampled]));
        pauses.push(pause);
    }
    let mut counts = [Counts::default(); 2];
    for (drafts, pause) in suggester.suggest(&prompts)?.iter().zip(&pauses) {
        let rest = pause.rest().trim_end();
        let written = &files[pause.part.file].text;
        let is_affected = !written.lines().any(|line| line.trim_end().ends_with(rest));
        counts[usize::from(is_affected)].add(drafts, pause);
    }
    let [others, affected] = counts;
    println!("all       {}", others.plus(affected));
    println!("affected  {affected}");
    println!("others    {others}");
    Ok(())
}

/// Suggestions at some pauses.
#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    pauses: u32,
    /// The greedy text is what was typed, declining not allowed.
    right: u32,
    /// Greedy, declining allowed.
    shown: u32,
    shown_right: u32,
    /// Sampled at temperature 1, declining allowed.
    sampled_right: u32,
}

impl Counts {
    fn add(&mut self, [greedy, sampled]: &[Draft; 2], pause: &Pause) {
        let is_right = |draft: &Draft| pause.judge(&draft.text) == Reaction::Right;
        self.pauses += 1;
        self.right += u32::from(is_right(greedy));
        self.shown += u32::from(!greedy.declined);
        self.shown_right += u32::from(!greedy.declined && is_right(greedy));
        self.sampled_right += u32::from(!sampled.declined && is_right(sampled));
    }

    fn plus(self, other: Self) -> Self {
        Self {
            pauses: self.pauses + other.pauses,
            right: self.right + other.right,
            shown: self.shown + other.shown,
            shown_right: self.shown_right + other.shown_right,
            sampled_right: self.sampled_right + other.sampled_right,
        }
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of_100 = |n: u32, of: u32| 100.0 * f64::from(n) / f64::from(of.max(1));
        write!(
            f,
            "{} pauses: of 100, greedy right {:.1}, sampled right {:.1}; greedy shown {:.1}, of 100 shown right {:.1}",
            self.pauses,
            of_100(self.right, self.pauses),
            of_100(self.sampled_right, self.pauses),
            of_100(self.shown, self.pauses),
            of_100(self.shown_right, self.shown)
        )
    }
}
