//! What commands print and ask.

use std::io::{self, BufRead, IsTerminal, Write};

use anyhow::{Context, ensure};
use serde::Serialize;
use serde_json::Value;

/// `--json`, with one meaning for every command.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct Output {
    /// Print one JSON document.
    #[arg(long)]
    pub json: bool,
}

impl Output {
    /// Prints the document as JSON, or the text for people.
    pub fn print(self, document: &impl Serialize, text: impl FnOnce() -> String) -> anyhow::Result<()> {
        let text = match self.json {
            true => serde_json::to_string_pretty(document).context("write JSON")?,
            false => text(),
        };
        print(&text)
    }
}

/// Prints text and ends its last line. Empty text prints nothing.
pub fn print(text: &str) -> anyhow::Result<()> {
    match text.trim_end_matches('\n') {
        "" => Ok(()),
        text => writeln!(io::stdout(), "{text}").context("write to standard output"),
    }
}

/// `--yes`, for commands that delete something or are hard to undo.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct Confirm {
    /// Do not ask. Needed where standard input is not a terminal.
    #[arg(long)]
    pub yes: bool,
}

impl Confirm {
    /// Returns if `--yes` was given or a person agrees; fails otherwise.
    pub fn ask(self, question: &str) -> anyhow::Result<()> {
        if self.yes {
            return Ok(());
        }
        let stdin = io::stdin();
        ensure!(
            stdin.is_terminal(),
            "not confirmed: standard input is no terminal, so give --yes; nothing was changed"
        );
        eprint!("{question} [y/N] ");
        io::stderr().flush().context("ask for confirmation")?;
        let mut answer = String::new();
        stdin.lock().read_line(&mut answer).context("read the answer")?;
        ensure!(
            matches!(answer.trim(), "y" | "Y" | "yes"),
            "not confirmed; nothing was changed"
        );
        Ok(())
    }
}

/// A table whose columns fit their cells, or nothing without rows. A `>` before a name aligns its
/// column to the right.
pub fn table<const N: usize>(header: [&str; N], rows: impl IntoIterator<Item = [String; N]>) -> String {
    let right = header.map(|name| name.starts_with('>'));
    let names = header.map(|name| name.trim_start_matches('>').to_owned());
    let rows: Vec<[String; N]> = std::iter::once(names).chain(rows).collect();
    if rows.len() == 1 {
        return String::new();
    }
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; N] = std::array::from_fn(width);
    let mut page = String::new();
    for row in &rows {
        let mut line = String::new();
        for ((cell, width), right) in row.iter().zip(widths).zip(right) {
            line += &match right {
                true => format!("{cell:>width$}  "),
                false => format!("{cell:<width$}  "),
            };
        }
        page += line.trim_end();
        page.push('\n');
    }
    page
}

/// The elements of a JSON array.
pub fn rows(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// A JSON string without quotes, anything else as JSON, nothing for null.
pub fn cell(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        value => value.to_string(),
    }
}

/// Like `1.53 GB`.
pub fn bytes(count: u64) -> String {
    indicatif::DecimalBytes(count).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_fit_their_cells() {
        let rows = [["ab", "1"], ["c", "1000"]].map(|row| row.map(str::to_owned));
        assert_eq!(table(["name", ">n"], rows), "name     n\nab       1\nc     1000\n");
    }
}
