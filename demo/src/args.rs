//! The command line of `springtide demo`.

use std::{path::PathBuf, str::FromStr, sync::Arc};

use crate::{
    Settings, client, corpus,
    developer::{self, FilePart},
    house_style,
    users::Users,
};

/// So many users are replayed for each one who is not.
const USERS_PER_OTHER_USER: usize = 3;

/// Replays developers at work on real code, and reports how well the arms served them.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// How long to replay, in minutes.
    #[arg(long, default_value_t = 10.0, value_parser = positive::<f64>)]
    pub minutes: f64,
    /// What users do. `completion`: each pause is a suggestion of its own. `session`: up to four
    /// turns about one line, and a verdict at the end.
    #[arg(long, value_enum, default_value_t = Surface::Completion)]
    pub surface: Surface,
    /// Mean pauses or sessions per second, over all users [default: 16 pauses, 8 sessions]
    #[arg(long, value_parser = positive::<f64>)]
    rate: Option<f64>,
    /// Seed of everything random.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    #[command(flatten)]
    pub corpus: Corpus,
    /// Where to write the report as JSON; default: report.json or session.json in the state folder.
    /// The page of completions is written beside it.
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// Policy to ask, if not the configured one.
    #[arg(long, value_name = "NAME")]
    pub policy: Option<String>,
    /// Permute the answers among the shown suggestions, or the verdicts among the sessions, so that
    /// there is nothing to learn.
    #[arg(long)]
    pub control: bool,
    /// Sampling temperature that users ask for. An arm may bound it.
    #[arg(long, default_value_t = 1.0, value_parser = positive::<f32>)]
    pub temperature: f32,
    /// Pauses of other users at which reference policies are measured before the run; 0: no
    /// references.
    #[arg(long, default_value_t = 1500)]
    pub reference_pauses: usize,
    /// How many versions along the run, the last included, are tried at pauses of other users after it.
    #[arg(long, default_value_t = 3)]
    pub capability_points: u32,
    /// Developers accept word by word, and say how much they kept, as the feedback `kept_characters`.
    #[arg(long, conflicts_with = "control")]
    pub kept: bool,
    /// Developers who answer also send what they typed, as the feedback `demonstration`. The realtime run
    /// learns from it if `trainer.realtime.demonstration_share_max` is above 0.
    #[arg(long, conflicts_with = "control")]
    pub demonstrations: bool,
    /// With `--surface session`: users also say of each turn whether they keep at least
    /// half of the suggestion.
    #[arg(long, conflicts_with = "control")]
    pub turn_signals: bool,
    /// With `--surface session`: sessions of other users that the base is tried on before the run.
    #[arg(long, default_value_t = 600)]
    pub start_sessions: usize,
}

impl Args {
    /// Where the report goes.
    pub fn report_file(&self, settings: &Settings) -> PathBuf {
        let name = match self.surface {
            Surface::Completion => "report.json",
            Surface::Session => "session.json",
        };
        self.report.clone().unwrap_or_else(|| settings.state_dir.join(name))
    }

    pub fn rate(&self) -> f64 {
        self.rate.unwrap_or(match self.surface {
            Surface::Completion => 16.0,
            Surface::Session => 8.0,
        })
    }
}

/// The surfaces that can be replayed, by the names that the stack knows them by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Surface {
    Completion,
    Session,
}

impl Surface {
    pub fn name(self) -> &'static str {
        match self {
            Self::Completion => client::SURFACE,
            Self::Session => client::SESSION_SURFACE,
        }
    }
}

/// Whose code is replayed.
#[derive(Debug, Clone, clap::Args)]
pub struct Corpus {
    /// `house`: a team with conventions that the base does not have. `plain`: files as they are.
    #[arg(long, value_enum, default_value_t = Users::House)]
    pub users: Users,
    /// How many developers, at least 200.
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u32).range(200..=100_000))]
    pub developers: u32,
    /// Folder of code to replay, instead of the crates that this project's build has fetched.
    #[arg(long, value_name = "DIR")]
    pub corpus: Option<PathBuf>,
    /// Replay crates that are set aside for choosing parameters, instead of those of reported runs.
    #[arg(long, conflicts_with = "corpus")]
    pub development: bool,
}

impl Corpus {
    /// Name and text of every file, in the style of these users.
    pub fn files(&self) -> anyhow::Result<Vec<(String, Arc<str>)>> {
        let files = corpus::replayed_files(self.corpus.as_deref(), self.development)?;
        let styled = files.into_iter().map(|file| {
            let text = match self.users {
                Users::House if file.path.ends_with(".rs") => house_style::restyle(&file.text),
                _ => file.text,
            };
            (format!("{}/{}", file.krate, file.path), text.into())
        });
        Ok(styled.collect())
    }

    /// Deals the files out to the users that are replayed, and to others, who are numbered after them.
    pub fn deal(&self) -> anyhow::Result<Dealt> {
        let files = self.files()?;
        let users = self.developers as usize;
        let mut replayed = developer::deal(&files, users + users / USERS_PER_OTHER_USER)?;
        let others = replayed.split_off(users);
        Ok(Dealt {
            replayed,
            others,
            files: files.len(),
        })
    }
}

/// Whose code is whose.
#[derive(Debug)]
pub struct Dealt {
    pub replayed: Vec<Vec<FilePart>>,
    pub others: Vec<Vec<FilePart>>,
    /// How many files there are.
    pub files: usize,
}

pub fn positive<T: FromStr<Err: std::fmt::Display> + Copy + Into<f64>>(text: &str) -> Result<T, String> {
    let value = text.parse::<T>().map_err(|error| error.to_string())?;
    let number = value.into();
    if number.is_finite() && number > 0.0 {
        Ok(value)
    } else {
        Err("must be above 0".to_owned())
    }
}
