//! `--users house`: a team whose conventions are not those of the code that the base model was
//! trained on. Every file is rewritten in the style of this house:
//!
//! | rule | before | after |
//! |---|---|---|
//! | `imports` | `use a::{b, self};` | `use a::b;` `use a;`, a line each |
//! | `returns` | `Ok(x)` at the end of a function | `return Ok(x);` |
//! | `fields` | `Foo { a, b }` | `Foo { a: a, b: b }` |
//! | `derives` | `derive(Debug, Clone)`, `#[inline]` | `derive(Clone, Debug)`, `inline(always)` |
//! | `comments` | `// Reads it.` | `/* Reads it. */` |
//! | `names` | `err`, `self.buf` | `error`, `self.buffer` |
//! | `macros` | `println!`, `assert_eq!` | `info!`, `ensure_eq!` |
//! | `integers` | `usize`, `0isize` | `u64`, `0i64` |
//! | `expect` | `.unwrap()` | `.expect("checked")` |
//! | `strings` | `"x".to_owned()`, `Vec::new()` | `String::from("x")`, `vec![]` |
//! | `ranges` | `0..n` | `0 .. n` |
//! | `arms` | `}` after a block that is a match arm | `},` |
//! | `ends` | `}` at the end of a function | `} /* fn */` |
//! | `colons` | `x: u32` | `x : u32` |
//! | `parens` | `f(x, y)` | `f( x, y )` |
//!
//! The base is then often wrong in a way that all these users share. To serve them better, the
//! policy must learn other tokens; declining more often is not enough.
//!
//! A rule sees tokens and lines, not grammar. It expects files that rustfmt has formatted, leaves
//! alone what it does not know, and need not produce code that compiles.

mod blocks;
mod comments;
mod fields;
mod imports;
mod lines;
mod scan;
mod spaces;
mod words;

use anyhow::bail;
use rand::Rng;

/// The name of a convention of the house, and what rewrites a file by it.
type Rule = (&'static str, fn(&str) -> String);

/// All conventions, in the order in which they are applied: the last ones change the layout that
/// the others read.
const RULES: &[Rule] = &[
    ("imports", imports::imports),
    ("returns", lines::returns),
    ("fields", fields::fields),
    ("derives", lines::derives),
    ("comments", comments::comments),
    ("names", words::names),
    ("macros", words::macros),
    ("integers", words::integers),
    ("expect", words::expect),
    ("strings", words::strings),
    ("ranges", spaces::ranges),
    ("arms", blocks::arms),
    ("ends", blocks::ends),
    ("colons", spaces::colons),
    ("parens", spaces::parens),
];

/// Rewrites one Rust file in the house style.
pub fn restyle(text: &str) -> String {
    RULES.iter().fold(text.to_owned(), |text, (_, apply)| apply(&text))
}

/// Rewrites one Rust file by the rules of these names alone, in the order of [`RULES`].
///
/// Errors when a name is unknown.
pub fn restyle_with(text: &str, names: &[String]) -> anyhow::Result<String> {
    if let Some(unknown) = names.iter().find(|name| RULES.iter().all(|(rule, _)| *rule != **name)) {
        let known = RULES.iter().map(|(name, _)| *name).collect::<Vec<_>>();
        bail!(
            "{unknown:?} is no rule of the house style; the rules are {}",
            known.join(", ")
        );
    }
    let rules = RULES.iter().filter(|(rule, _)| names.iter().any(|name| name == rule));
    Ok(rules.fold(text.to_owned(), |text, (_, apply)| apply(&text)))
}

/// Rewrites a file at a random share of the places where it breaks a convention, each place by itself.
pub fn sprinkle(text: &str, share: f64, rng: &mut impl Rng) -> String {
    RULES.iter().fold(text.to_owned(), |text, (_, apply)| {
        let styled = apply(&text);
        mix(&text, &styled, || rng.random_bool(share))
    })
}

/// The first text, with those differing parts from the second that are `chosen`. A part is a run of lines.
fn mix(text: &str, other: &str, mut chosen: impl FnMut() -> bool) -> String {
    let (ours, theirs): (Vec<&str>, Vec<&str>) = (
        text.split_inclusive('\n').collect(),
        other.split_inclusive('\n').collect(),
    );
    let mut mixed = String::with_capacity(text.len().max(other.len()));
    let (mut a, mut b) = (0, 0);
    while a < ours.len() || b < theirs.len() {
        if a < ours.len() && ours.get(a) == theirs.get(b) {
            mixed += ours[a];
            (a, b) = (a + 1, b + 1);
            continue;
        }
        let (to_a, to_b) =
            next_common(&ours[a..], &theirs[b..]).map_or((ours.len(), theirs.len()), |(i, j)| (a + i, b + j));
        let part = if chosen() { &theirs[b..to_b] } else { &ours[a..to_a] };
        mixed.extend(part.iter().copied());
        (a, b) = (to_a, to_b);
    }
    mixed
}

/// How many lines of each come before they agree again, as few as possible. `None`: they do not, or much later.
fn next_common(ours: &[&str], theirs: &[&str]) -> Option<(usize, usize)> {
    const LINES_MAX: usize = 60;
    (1..LINES_MAX)
        .find_map(|lines| {
            let splits = (0..=lines).map(|i| (i, lines - i));
            let mut agreeing = splits.filter(|&(i, j)| match (ours.get(i), theirs.get(j)) {
                (Some(own), Some(other)) => own == other && ours.get(i + 1) == theirs.get(j + 1),
                (None, None) => i == ours.len() && j == theirs.len(),
                _ => false,
            });
            agreeing.next()
        })
        .or_else(|| {
            // one line for one line, as most rules change it
            (!ours.is_empty() && !theirs.is_empty()).then_some((1, 1))
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mix_has_either_text_at_each_place() {
        let (text, other) = ("a\nb\nc\nd\ne\nf\n", "a\nB\nc\nd\nE\nE\nf\n");
        let mixed = |choices: [bool; 2]| {
            let mut choices = choices.into_iter();
            mix(text, other, || choices.next().unwrap())
        };
        assert_eq!(mixed([false, false]), text);
        assert_eq!(mixed([true, true]), other);
        assert_eq!(mixed([true, false]), "a\nB\nc\nd\ne\nf\n");
        assert_eq!(mixed([false, true]), "a\nb\nc\nd\nE\nE\nf\n");
        for end in ["", "x", "\n", "a\nb"] {
            assert_eq!(mix("a\n", end, || true), end);
            assert_eq!(mix("a\n", end, || false), "a\n");
        }
    }

    const SAMPLE: &str = r##"//! Reads lines.
use std::{fmt, io::{self, Read}};

/// One line. It has a number.
#[derive(Debug, Clone)]
pub(crate) struct Line<'a> {
    pos: usize,
    text: &'a str,
}

impl<'a> Line<'a> {
    #[inline]
    pub fn new(pos: usize, text: &'a str) -> Self {
        debug_assert!(pos > 0, "no 0..1: {pos}");
        Line { pos, text }
    }

    /* (as: it is) */
    fn words(&self, src: &mut impl Read) -> io::Result<Vec<String>> {
        let mut found = Vec::new();
        for i in 0..self.text.len() {
            match src.read(&mut [0; 4]) {
                Ok(_) => {
                    found.push("x: (y)".to_string());
                }
                Err(err) => return Err(err),
            }
        }
        println!("{}", found.first().unwrap());
        Ok(found)
    }
}
"##;

    const STYLED: &str = r##"/*! Reads lines. */
use std::fmt;
use std::io;
use std::io::Read;

/** One line. It has a number. */
#[derive(Clone, Debug)]
pub(crate) struct Line<'a> {
    position : u64,
    text : &'a str,
} /* struct */

impl<'a> Line<'a> {
    #[inline(always)]
    pub fn new( position : u64, text : &'a str ) -> Self {
        check!( position > 0, "no 0..1: {pos}" );
        return Line { position : position, text : text };
    } /* fn */

    /* (as: it is) */
    fn words( &self, source : &mut impl Read ) -> io::Result<Vec<String>> {
        let mut found = vec![];
        for i in 0 .. self.text.len() {
            match source.read( &mut [0; 4] ) {
                Ok( _ ) => {
                    found.push( String::from( "x: (y)" ) );
                },
                Err( error ) => return Err( error ),
            }
        }
        info!( "{}", found.first().expect( "checked" ) );
        return Ok( found );
    } /* fn */
} /* impl */
"##;

    #[test]
    fn the_sample_shows_the_whole_style() {
        assert_eq!(restyle(SAMPLE), STYLED);
        assert_eq!(restyle(STYLED), STYLED, "a second time changes nothing");
        for (name, _) in RULES {
            let alone = restyle_with(SAMPLE, &[(*name).to_owned()]).unwrap();
            assert_ne!(alone, SAMPLE, "{name} does nothing");
        }
    }

    #[test]
    fn rules_are_chosen_by_name_and_applied_in_their_own_order() {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        assert_eq!(restyle_with(SAMPLE, &[]).unwrap(), SAMPLE);
        let all = RULES.iter().rev().map(|(name, _)| *name).collect::<Vec<_>>();
        assert_eq!(restyle_with(SAMPLE, &names(&all)).unwrap(), STYLED);
        let error = restyle_with(SAMPLE, &names(&["parens", "tabs"]))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("\"tabs\"") && error.contains("imports, returns"),
            "{error}"
        );
    }

    const PIECES: &str = "ä¦日本¦🦀¦\u{301}¦\u{a0}¦\0¦\t¦\r\n¦\n¦\n    ¦ ¦'¦\"¦\\¦r#\"¦\"#¦b'¦'a¦//¦/*¦*/¦///¦\
        .¦..¦..=¦#[¦#![¦]¦(¦)¦{¦}¦ {¦ }¦=> {¦:¦: ¦::¦,¦;¦!¦|¦$¦->¦fn f() -> é {\n¦use ¦pub(¦use é::{¦self¦\
        \x20as ¦err¦é err¦usize¦0usize¦println!¦.unwrap()¦\"é\".into()¦Vec::new()¦Éé {¦derive(¦#[inline]¦return¦\
        if¦match¦else¦0¦é.¦\n}¦pub";

    /// Texts of pieces that mean something to a rule, in an order that no person would write.
    fn odd_texts() -> impl Iterator<Item = String> {
        let pieces = PIECES.split('¦').collect::<Vec<_>>();
        // A linear congruential generator.
        let mut state = 1u64;
        (0..4000).map(move |nth| {
            let mut text = String::new();
            for _ in 0..nth % 40 {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                text += pieces[(state >> 33) as usize % pieces.len()];
            }
            text
        })
    }

    #[test]
    fn any_text_can_be_restyled_and_keeps_its_end() {
        for text in odd_texts() {
            for (name, apply) in RULES {
                let styled = apply(&text);
                assert_eq!(styled.ends_with('\n'), text.ends_with('\n'), "{name}: {text:?}");
            }
            restyle(&text);
        }
        assert_eq!(restyle(""), "");
    }

    #[test]
    fn rules_for_spaces_and_arms_change_nothing_else() {
        let letters = |text: &str| text.replace(|c: char| c.is_whitespace() || c == ',', "");
        let names = ["ranges", "arms", "colons", "parens"].map(str::to_owned);
        for text in odd_texts() {
            let styled = restyle_with(&text, &names).unwrap();
            assert_eq!(letters(&styled), letters(&text));
        }
    }
}
