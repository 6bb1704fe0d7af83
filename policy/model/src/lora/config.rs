//! An adapter's settings, with PEFT's names and meanings.

use super::Error;
use regex::Regex;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// Which modules are adapted, and how strongly.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Rank; default 8.
    pub r: usize,
    /// B · A is multiplied by `lora_alpha`/r; default 8.
    pub lora_alpha: f64,
    /// B · A is multiplied by `lora_alpha`/√r instead (Kalajdzievski 2023); default false.
    pub use_rslora: bool,
    /// The adapted modules; default `all-linear`.
    pub target_modules: Targets,
    /// Ranks of modules that do not have rank `r`. Keys are regular expressions for the end of a
    /// name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub rank_pattern: BTreeMap<String, usize>,
    /// Values of `lora_alpha` for single modules, with the same keys.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub alpha_pattern: BTreeMap<String, f64>,
}

/// Which modules are adapted: a list of names or of their ends after a dot; or one string, which is
/// `all-linear` or a regular expression for the whole name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Targets {
    Text(String),
    Names(Vec<String>),
}

pub(super) const ALL_LINEAR: &str = "all-linear";

impl Default for Targets {
    fn default() -> Self {
        Targets::Text(ALL_LINEAR.into())
    }
}

impl Default for Config {
    fn default() -> Self {
        Config {
            r: 8,
            lora_alpha: 8.0,
            use_rslora: false,
            target_modules: Targets::default(),
            rank_pattern: BTreeMap::new(),
            alpha_pattern: BTreeMap::new(),
        }
    }
}

impl Config {
    /// The largest rank of a module.
    pub fn rank_max(&self) -> usize {
        self.rank_pattern.values().copied().fold(self.r, usize::max)
    }

    /// Checks the values. The error names the field.
    pub fn check(&self) -> Result<(), String> {
        let alpha = |value: f64| value.is_finite() && value > 0.0;
        let ranks = self.rank_pattern.values().chain([&self.r]);
        let alphas = self.alpha_pattern.values().chain([&self.lora_alpha]);
        if ranks.clone().any(|&r| r == 0) {
            return Err("`r` and `rank_pattern` must be above 0".into());
        }
        if alphas.clone().any(|&value| !alpha(value)) {
            return Err("`lora_alpha` and `alpha_pattern` must be above 0".into());
        }
        for (field, patterns) in [
            ("rank_pattern", Vec::from_iter(self.rank_pattern.keys())),
            ("alpha_pattern", Vec::from_iter(self.alpha_pattern.keys())),
        ] {
            for pattern in patterns {
                ending(field, pattern)?;
            }
        }
        self.target_modules.matcher().map(drop)
    }

    /// A module's rank, and the scale of its B · A.
    pub fn of(&self, module: &str) -> Result<(usize, f32), Error> {
        let rank = chosen("rank_pattern", &self.rank_pattern, module)
            .map_err(Error::Config)?
            .unwrap_or(self.r);
        let alpha = chosen("alpha_pattern", &self.alpha_pattern, module)
            .map_err(Error::Config)?
            .unwrap_or(self.lora_alpha);
        let width = rank as f64;
        let scale = alpha / if self.use_rslora { width.sqrt() } else { width };
        Ok((rank, scale as f32))
    }
}

/// The value of the pattern that matches the end of a module's name.
///
/// PEFT takes the first match. Here two matches with different values are an error, because the
/// order of a JSON object has no meaning.
fn chosen<T: Copy + PartialEq>(field: &str, patterns: &BTreeMap<String, T>, module: &str) -> Result<Option<T>, String> {
    let mut found = None;
    for (pattern, &value) in patterns {
        if !ending(field, pattern)?.is_match(module) {
            continue;
        }
        if found.is_some_and(|other| other != value) {
            return Err(format!("`{field}` has two values for `{module}`; give only one"));
        }
        found = Some(value);
    }
    Ok(found)
}

fn ending(field: &str, pattern: &str) -> Result<Regex, String> {
    Regex::new(&format!(r"^(?:.*\.)?(?:{pattern})$")).map_err(|error| format!("`{field}`: {error}"))
}

/// Compiled [`Targets`].
#[derive(Debug)]
pub(super) enum Matcher<'a> {
    All,
    Whole(Regex),
    Names(&'a [String]),
}

impl Targets {
    pub(super) fn matcher(&self) -> Result<Matcher<'_>, String> {
        match self {
            Targets::Text(text) if text == ALL_LINEAR => Ok(Matcher::All),
            Targets::Text(pattern) => Regex::new(&format!("^(?:{pattern})$"))
                .map(Matcher::Whole)
                .map_err(|error| format!("`target_modules`: {error}")),
            Targets::Names(names) if names.is_empty() => Err("`target_modules` is empty".into()),
            Targets::Names(names) => Ok(Matcher::Names(names)),
        }
    }
}

impl Matcher<'_> {
    pub fn matches(&self, module: &str) -> bool {
        match self {
            Matcher::All => true,
            Matcher::Whole(pattern) => pattern.is_match(module),
            Matcher::Names(names) => names.iter().any(|name| {
                let before = module.strip_suffix(name.as_str());
                before.is_some_and(|before| before.is_empty() || before.ends_with('.'))
            }),
        }
    }
}

impl fmt::Display for Targets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Targets::Text(text) => write!(f, "`{text}`"),
            Targets::Names(names) => write!(f, "{names:?}"),
        }
    }
}
