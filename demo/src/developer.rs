//! The simulated developers: what they own, where they pause, how they judge a suggestion, and how
//! long they take. Pure: everything depends only on the seed, the user, the number of the pause and
//! the text of the suggestion.

use std::{ops::Range, sync::Arc, time::Duration};

use anyhow::ensure;
use text::kept::next_word;

use crate::{corpus::pauses, random::Draws, stats::Reaction};

/// Fraction of pauses whose developer gives no answer, whatever was shown.
pub const SILENT_SHARE: f64 = 0.2;
/// Median time from seeing a suggestion to answering it, seconds. The delay is lognormal.
pub const DELAY_MEDIAN_SECONDS: f64 = 1.0;
/// Standard deviation of the delay's logarithm: 95% of delays are between 0.38 and 2.7 s, 1.4% are
/// beyond a horizon of 3 s.
pub const DELAY_SIGMA: f64 = 0.5;

/// A file, or a part of one, that belongs to one user alone.
#[derive(Debug, Clone)]
pub struct FilePart {
    /// The whole file.
    pub text: Arc<str>,
    /// Index of the file in the corpus.
    pub file: usize,
    /// Byte ranges of the lines where this user may pause: those that are not blank.
    lines: Arc<[Range<usize>]>,
}

/// Where a developer stopped typing, and how they will answer a suggestion there.
#[derive(Debug, Clone)]
pub struct Pause {
    pub part: FilePart,
    /// Byte offset of the cursor.
    pub cursor: usize,
    /// Byte offset of the end of the line.
    line_end: usize,
    /// Whether an answer is given if something is shown. It is drawn before anything is seen, so
    /// leaving out the pauses without an answer favors neither showing nor declining.
    pub answers: bool,
    /// From seeing the suggestion to answering it.
    pub delay: Duration,
}

/// Deals the corpus out to `users`. Each gets whole files if there are enough, else parts of files.
/// Parts are dealt in rounds, in the order of a hash of their names, so every user owns code and no
/// two users share any.
///
/// Errors when there are fewer lines of code than users.
pub fn deal(files: &[(String, Arc<str>)], users: usize) -> anyhow::Result<Vec<Vec<FilePart>>> {
    let lines = files.iter().map(|(_, text)| lines_with_code(text)).collect::<Vec<_>>();
    let total = lines.iter().map(Vec::len).sum::<usize>();
    ensure!(
        users > 0 && total >= users,
        "{total} lines of code are too few for {users} users"
    );
    let mut part_lines = lines.iter().map(Vec::len).max().unwrap_or(1);
    let count = |part_lines: usize| {
        lines
            .iter()
            .map(|lines| lines.len().div_ceil(part_lines))
            .sum::<usize>()
    };
    while count(part_lines) < users {
        part_lines = (part_lines / 2).max(1);
    }

    let mut parts = Vec::new();
    for (file, ((name, text), lines)) in files.iter().zip(&lines).enumerate() {
        for (nth, lines) in lines.chunks(part_lines).enumerate() {
            let order = *blake3::hash(format!("{name}\0{nth}").as_bytes()).as_bytes();
            let part = FilePart {
                text: Arc::clone(text),
                file,
                lines: lines.into(),
            };
            parts.push((order, part));
        }
    }
    parts.sort_by_key(|(order, _)| *order);
    let mut dealt = vec![Vec::new(); users];
    for (turn, (_, part)) in parts.into_iter().enumerate() {
        dealt[turn % users].push(part);
    }
    Ok(dealt)
}

fn lines_with_code(text: &str) -> Vec<Range<usize>> {
    let mut lines = pauses::lines(text);
    lines.retain(|line| !text[line.clone()].trim().is_empty());
    lines
}

/// The `nth` pause of `user`: a random column of a random line of theirs. There is always something
/// left to type. `None`: the user owns no line.
pub fn pause(parts: &[FilePart], seed: u64, user: usize, nth: u64) -> Option<Pause> {
    let mut draws = Draws::new("springtide demo pause 1", &[seed, user as u64, nth]);
    let lines = || {
        parts
            .iter()
            .flat_map(|part| part.lines.iter().map(move |line| (part, line)))
    };
    let (part, line) = lines().nth(draws.below(lines().count().max(1)))?;
    let columns = pauses::columns(&part.text, line.clone());
    let cursor = columns[draws.below(columns.len())];
    Some(Pause {
        part: part.clone(),
        cursor,
        line_end: line.end,
        answers: !draws.chance(SILENT_SHARE),
        delay: Duration::from_secs_f64(DELAY_MEDIAN_SECONDS * (DELAY_SIGMA * draws.normal()).exp()),
    })
}

impl Pause {
    /// The file up to the cursor: at most the last `chars` characters. It starts at the start of a
    /// line, unless the cursor's own line is longer than that.
    pub fn context(&self, chars: usize) -> &str {
        pauses::tail(&self.part.text, self.cursor, chars)
    }

    /// What the developer types next, to the end of the line.
    pub fn rest(&self) -> &str {
        &self.part.text[self.cursor..self.line_end]
    }

    /// The developer's reaction. A suggestion is right if it is what was typed next, except for
    /// trailing blanks.
    pub fn judge(&self, suggestion: &str) -> Reaction {
        if suggestion.trim_end() == self.rest().trim_end() {
            Reaction::Right
        } else {
            Reaction::Wrong
        }
    }

    /// How many characters of a suggestion the developer keeps: they accept word by word, as long as the
    /// next word is what they type.
    pub fn kept(&self, suggestion: &str) -> usize {
        let (rest, mut kept) = (self.rest(), 0);
        loop {
            let [word, typed] = [suggestion, rest].map(|text| &text[kept..][..next_word(&text[kept..])]);
            if word.is_empty() || word != typed {
                return suggestion[..kept].chars().count();
            }
            kept += word.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use super::*;

    fn corpus(files: usize) -> Vec<(String, Arc<str>)> {
        let file = |file| {
            let text = (0..40).map(|line| format!("    let x{line} = f({file});  \n\n"));
            (format!("krate-{file}/src/lib.rs"), text.collect::<String>().into())
        };
        (0..files).map(file).collect()
    }

    #[test]
    fn every_user_owns_something_and_no_line_has_two_owners() {
        for files in [30, 200, 1000] {
            let dealt = deal(&corpus(files), 200).unwrap();
            let mut owned = HashSet::new();
            for parts in &dealt {
                assert!(!parts.is_empty());
                for part in parts {
                    for line in part.lines.iter() {
                        assert!(owned.insert((part.file, line.start)), "a line has two owners");
                    }
                }
            }
            assert!(
                files < 200 || owned.len() == files * 40,
                "with enough files all lines are owned"
            );
        }
        assert!(deal(&corpus(2), 200).is_err(), "80 lines are too few for 200 users");
    }

    #[test]
    fn whole_files_are_dealt_where_there_are_enough() {
        let dealt = deal(&corpus(450), 300).unwrap();
        let mut owner = HashMap::new();
        for (user, parts) in dealt.iter().enumerate() {
            for part in parts {
                assert_eq!(*owner.entry(part.file).or_insert(user), user);
            }
        }
    }

    #[test]
    fn a_pause_always_leaves_something_to_type_and_repeats_for_the_same_seed_user_and_number() {
        let dealt = deal(&corpus(300), 300).unwrap();
        for nth in 0..2000 {
            let pause = pause(&dealt[7], 3, 7, nth).unwrap();
            assert!(!pause.rest().trim().is_empty());
            assert!(!pause.rest().contains('\n'));
            let again = super::pause(&dealt[7], 3, 7, nth).unwrap();
            assert_eq!(
                (pause.part.file, pause.cursor, pause.answers),
                (again.part.file, again.cursor, again.answers)
            );
            assert_eq!(pause.delay, again.delay);
        }
    }

    #[test]
    fn pauses_fall_on_every_column_from_the_indentation_to_the_last_typed_character() {
        let text: Arc<str> = "  äbc  \n".into();
        let dealt = deal(&[("f".to_owned(), text)], 1).unwrap();
        let cursors = (0..200).map(|nth| pause(&dealt[0], 1, 0, nth).unwrap().cursor);
        let boundaries = HashSet::from([2, 4, 5]);
        assert_eq!(
            cursors.collect::<HashSet<_>>(),
            boundaries,
            "character boundaries before ä, b and c"
        );
    }

    #[test]
    fn a_fifth_of_developers_does_not_answer_and_the_median_delay_is_one_second() {
        let dealt = deal(&corpus(1), 1).unwrap();
        let pauses = (0..4000)
            .map(|nth| pause(&dealt[0], 1, 0, nth).unwrap())
            .collect::<Vec<_>>();
        let silent = pauses.iter().filter(|pause| !pause.answers).count();
        assert!(silent.abs_diff(800) < 100, "{silent}");
        let fast = pauses
            .iter()
            .filter(|pause| pause.delay < Duration::from_secs(1))
            .count();
        assert!(fast.abs_diff(2000) < 130, "{fast}");
    }

    #[test]
    fn a_suggestion_is_right_iff_it_is_the_rest_of_the_line_except_for_trailing_blanks() {
        let text = "let a = b;  \nlet c";
        let pause = Pause {
            part: FilePart {
                text: text.into(),
                file: 0,
                lines: [].into(),
            },
            cursor: 4,
            line_end: 12,
            answers: true,
            delay: Duration::ZERO,
        };
        assert_eq!((pause.context(100), pause.rest()), ("let ", "a = b;  "));
        assert_eq!(
            ["a = b;", "a = b;\n"].map(|text| pause.judge(text)),
            [Reaction::Right; 2]
        );
        let kept = ["a = b;", "a = bc;", "a=", "", "a = b; // ä"].map(|text| pause.kept(text));
        assert_eq!(kept, [6, 3, 1, 0, 6]);
        assert_eq!(
            ["a = b", " a = b;", ""].map(|text| pause.judge(text)),
            [Reaction::Wrong; 3]
        );
    }
}
