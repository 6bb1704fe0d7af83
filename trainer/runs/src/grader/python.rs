//! Grades by a function in Python, which runs in a sandbox: one process for each grade.
//!
//! What the grader runs in turn (a program that the policy wrote) can stop the grade, and can write
//! files that the grader reads. It cannot write the grade if it runs in a process of its own.

use super::{Cause, Error, Sample};
use serde::Deserialize;
use serde_json::json;
use std::sync::OnceLock;
use std::time::Duration;
use world::process::Sandbox;
use world::{Command, Ended, Limit, Limits};

/// Reads the sample and the item, calls `grade` and writes its number where nothing else is written.
const HARNESS: &str = include_str!("harness.py");
/// The grader's source, in the working directory.
const FILE: &str = "grader.py";
/// Of a source, as in OpenAI's interface.
const SOURCE_BYTES: usize = 256 << 10;

edge::options! {
    /// `[trainer.offline.sandbox]`: where `python` graders run.
    pub struct Options {
        /// Largest number of sandboxes at a time, of all runs.
        pub at_a_time: usize = 2 => 1..,
        /// Of one grade, from start to end.
        pub wall_seconds: u64 = 10 => 1..,
        /// Processor time of all processes of one grade.
        pub cpu_seconds: u64 = 10 => 1..,
        /// Memory and files of all processes of one grade, MiB.
        pub memory_mebibytes: u64 = 256 => 16..=1 << 20,
        /// Processes and threads of one grade at a time.
        pub processes: u32 = 32 => 1..,
    }
}

impl Options {
    fn limits(&self) -> Limits {
        Limits {
            wall: Duration::from_secs(self.wall_seconds),
            cpu: Duration::from_secs(self.cpu_seconds),
            memory_bytes: self.memory_mebibytes << 20,
            processes: self.processes,
            ..Limits::default()
        }
    }
}

/// The sandboxes of a trainer's process. The first grade that needs one finds out whether there can be any.
#[derive(Debug, Default)]
pub struct Sandboxes {
    options: Options,
    made: OnceLock<Result<Sandbox, String>>,
}

impl Sandboxes {
    pub fn new(options: Options) -> Self {
        Sandboxes {
            options,
            made: OnceLock::new(),
        }
    }

    fn sandbox(&self) -> Result<&Sandbox, Error> {
        let make = || Sandbox::new(self.options.at_a_time).map_err(|error| chain(&error));
        let made = self.made.get_or_init(make);
        made.as_ref().map_err(|why| Error::new(Cause::Failed, why.as_str()))
    }
}

/// Refuses a source that cannot be a grader.
pub(super) fn check(source: &str) -> Result<(), String> {
    if !source.contains("def grade(") {
        return Err("source: it needs a function `def grade(sample, item)`".into());
    }
    if source.len() > SOURCE_BYTES {
        return Err(format!(
            "source: it has {} bytes; {SOURCE_BYTES} are allowed",
            source.len()
        ));
    }
    Ok(())
}

/// The number that `grade(sample, item)` returns.
pub(super) async fn grade(source: &str, sandboxes: &Sandboxes, sample: &Sample<'_>) -> Result<f64, Error> {
    let command = Command {
        program: ["/usr/bin/python3", "-I", "-c", HARNESS].map(str::to_owned).into(),
        stdin: input(sample).to_string().into_bytes(),
        files: [(FILE.to_owned(), source.as_bytes().to_vec())].into(),
        limits: sandboxes.options.limits(),
    };
    let output = sandboxes.sandbox()?.run(&command).await;
    let output = output.map_err(|error| Error::new(Cause::Failed, chain(&error)))?;
    match output.ended {
        Ended::Exited(0) => reward(&output.stdout),
        Ended::Exceeded(limit) => Err(exceeded(limit, &sandboxes.options)),
        Ended::Exited(status) => Err(broke(format!("it ended with status {status}"))),
        Ended::Signalled(signal) => Err(broke(format!("it ended by signal {signal}"))),
    }
}

/// With the names of OpenAI's interface. `output_json` is there if the completion is JSON.
fn input(sample: &Sample<'_>) -> serde_json::Value {
    let mut given = json!({
        "sample": {"output_text": sample.text},
        "item": {"id": sample.id, "prompt": sample.prompt, "answer": sample.answer},
    });
    if let Ok(value) = serde_json::from_str::<serde_json::Value>(sample.text) {
        given["sample"]["output_json"] = value;
    }
    given
}

/// What the harness writes.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    Reward(f64),
    /// The type of what was returned.
    NoNumber(String),
    /// The type of an exception and its line. Its text may quote the completion.
    Raised(String),
    /// The same, before it was asked for a grade.
    NotLoaded(String),
}

fn reward(stdout: &[u8]) -> Result<f64, Error> {
    match serde_json::from_slice(stdout) {
        Ok(Answer::Reward(reward)) if reward.is_finite() => Ok(reward),
        Ok(Answer::Reward(_)) => Err(invalid("a number that is not finite")),
        Ok(Answer::NoNumber(kind)) => Err(invalid(format!("no finite number: {}", word(&kind)))),
        Ok(Answer::Raised(what)) => Err(broke(format!("it raised {}", word(&what)))),
        Ok(Answer::NotLoaded(what)) => Err(Error::new(
            Cause::Failed,
            format!("the python grader cannot be loaded: {}", word(&what)),
        )),
        Err(_) => Err(broke("it ended without a grade")),
    }
}

/// Names of types come from the grader: their start, without control characters.
fn word(text: &str) -> String {
    text.chars().filter(|letter| !letter.is_control()).take(100).collect()
}

fn exceeded(limit: Limit, options: &Options) -> Error {
    let section = "trainer.offline.sandbox";
    match limit {
        Limit::Wall => Error::new(
            Cause::Limit,
            format!(
                "the python grader took more than {section}.wall_seconds = {}",
                options.wall_seconds
            ),
        ),
        Limit::Cpu => Error::new(
            Cause::Limit,
            format!(
                "the python grader computed for more than {section}.cpu_seconds = {}",
                options.cpu_seconds
            ),
        ),
        Limit::Memory => Error::new(
            Cause::Limit,
            format!(
                "the python grader used more than {section}.memory_mebibytes = {}",
                options.memory_mebibytes
            ),
        ),
        Limit::Output => Error::new(Cause::Limit, "the python grader printed more than 64 KiB"),
    }
}

fn broke(why: impl std::fmt::Display) -> Error {
    Error::new(Cause::Broke, format!("the python grader failed: {why}"))
}

fn invalid(why: impl std::fmt::Display) -> Error {
    Error::new(Cause::Invalid, format!("the python grader returned {why}"))
}

/// The error with its causes.
fn chain(error: &world::process::Error) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

#[cfg(test)]
mod tests;
