//! The simulated developers: what they own, where they pause, what they think of a suggestion, how long they take.
//! Pure: everything a user does is a function of (seed, user, n-th pause), and of the suggestion's text.

use std::{ops::Range, sync::Arc, time::Duration};

use anyhow::ensure;

use super::draw::Draws;
use crate::corpus::pauses;

/// Share of developers' pauses after which no answer is given, whatever was shown.
pub const SILENT_SHARE: f64 = 0.2;
/// Median of the time from seeing a suggestion to answering it, seconds. The delay is lognormal.
pub const DELAY_MEDIAN_SECONDS: f64 = 1.0;
/// Standard deviation of the delay's logarithm: 95% of delays within 0.38 to 2.7 s, 1.4% beyond a horizon of 3 s.
pub const DELAY_SIGMA: f64 = 0.5;

/// A file, or a part of one, that belongs to one user: disjoint from every other user's.
#[derive(Debug, Clone)]
pub struct Desk {
    /// Of the file.
    pub name: Arc<str>,
    pub text: Arc<str>,
    /// Index of the file in the corpus.
    pub file: usize,
    /// Byte ranges of the lines where this user may pause: those with something on them, without their line end.
    lines: Arc<[Range<usize>]>,
}

/// Where a developer stopped typing, and all they will do about a suggestion there.
#[derive(Debug, Clone)]
pub struct Pause {
    /// Of the file.
    pub name: Arc<str>,
    pub text: Arc<str>,
    pub file: usize,
    /// Byte offset of the cursor.
    pub cursor: usize,
    /// Byte offset of the end of the line.
    line_end: usize,
    /// Whether an answer will be given if something is shown. Drawn before anything is seen, so that leaving out the
    /// silent ones favours neither showing nor declining.
    pub answers: bool,
    /// From seeing the suggestion to answering it.
    pub delay: Duration,
}

/// Deals the corpus out: whole files where there are at least as many as users, else parts of files. Which user gets
/// which follows the hash of its name, in rounds, so that everybody has something and nobody shares.
///
/// Errors when there are too few lines of code for that many users.
pub fn deal(files: &[(String, Arc<str>)], users: usize) -> anyhow::Result<Vec<Vec<Desk>>> {
    let lines = files.iter().map(|(_, text)| typed_lines(text)).collect::<Vec<_>>();
    let total = lines.iter().map(Vec::len).sum::<usize>();
    ensure!(
        users > 0 && total >= users,
        "{total} lines of code are too few for {users} users"
    );
    // Halve the parts until there are enough of them.
    let mut part_lines = lines.iter().map(Vec::len).max().unwrap_or(1);
    let parts = |part_lines: usize| {
        lines
            .iter()
            .map(|lines| lines.len().div_ceil(part_lines))
            .sum::<usize>()
    };
    while parts(part_lines) < users {
        part_lines = (part_lines / 2).max(1);
    }

    let mut desks = Vec::new();
    for (file, ((name, text), lines)) in files.iter().zip(&lines).enumerate() {
        for (part, lines) in lines.chunks(part_lines).enumerate() {
            let order = *blake3::hash(format!("{name}\0{part}").as_bytes()).as_bytes();
            desks.push((
                order,
                Desk {
                    name: name.as_str().into(),
                    text: Arc::clone(text),
                    file,
                    lines: lines.into(),
                },
            ));
        }
    }
    desks.sort_by_key(|(order, _)| *order);
    let mut dealt = vec![Vec::new(); users];
    for (turn, (_, desk)) in desks.into_iter().enumerate() {
        dealt[turn % users].push(desk);
    }
    Ok(dealt)
}

/// Byte ranges of the lines that are not blank.
fn typed_lines(text: &str) -> Vec<Range<usize>> {
    let mut start = 0;
    let mut lines = Vec::new();
    for line in text.split_inclusive('\n') {
        let typed = line.trim_end_matches(['\n', '\r']);
        if !typed.trim().is_empty() {
            lines.push(start..start + typed.len());
        }
        start += line.len();
    }
    lines
}

/// The `nth` pause of `user`: a random column of a random line of theirs, from the end of its indentation (editors indent
/// by themselves) to its last character that is not blank, so that there is something left to type.
pub fn pause(desks: &[Desk], seed: u64, user: usize, nth: u64) -> Option<Pause> {
    let mut draws = Draws::new("springtide demo pause 1", &[seed, user as u64, nth]);
    let mut line = draws.below(desks.iter().map(|desk| desk.lines.len()).sum::<usize>().max(1));
    let desk = desks.iter().find(|desk| match line.checked_sub(desk.lines.len()) {
        Some(left) => {
            line = left;
            false
        }
        None => true,
    })?;
    let range = desk.lines[line].clone();
    let columns = pauses::columns(&desk.text, range.clone());
    let cursor = columns[draws.below(columns.len())];
    Some(Pause {
        name: Arc::clone(&desk.name),
        text: Arc::clone(&desk.text),
        file: desk.file,
        cursor,
        line_end: range.end,
        answers: !draws.chance(SILENT_SHARE),
        delay: Duration::from_secs_f64(DELAY_MEDIAN_SECONDS * (DELAY_SIGMA * draws.normal()).exp()),
    })
}

impl Pause {
    /// The file up to the cursor: at most the last `chars` characters, from the start of a line unless the cursor's own
    /// line is longer than that.
    pub fn context(&self, chars: usize) -> &str {
        pauses::tail(&self.text, self.cursor, chars)
    }

    /// What was really typed next, to the end of the line.
    pub fn rest(&self) -> &str {
        &self.text[self.cursor..self.line_end]
    }

    /// The developer's judgement: right iff it is what was really typed next, trailing blanks aside.
    pub fn is_right(&self, suggestion: &str) -> bool {
        suggestion.trim_end() == self.rest().trim_end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{HashMap, HashSet};

    fn corpus(files: usize) -> Vec<(String, Arc<str>)> {
        (0..files)
            .map(|file| {
                let text = (0..40)
                    .map(|line| format!("    let x{line} = f({file});  \n\n"))
                    .collect::<String>();
                (format!("krate-{file}/src/lib.rs"), text.into())
            })
            .collect()
    }

    #[test]
    fn every_user_owns_something_and_no_line_has_two_owners() {
        for files in [30, 200, 1000] {
            let dealt = deal(&corpus(files), 200).unwrap();
            let mut owners = HashSet::new();
            for desks in &dealt {
                assert!(!desks.is_empty());
                for desk in desks {
                    for line in desk.lines.iter() {
                        assert!(owners.insert((desk.file, line.start)), "a line has two owners");
                    }
                }
            }
            assert!(
                files < 200 || owners.len() == files * 40,
                "with enough files all lines are owned"
            );
        }
        assert!(deal(&corpus(2), 200).is_err(), "80 lines cannot feed 200 users");
    }

    #[test]
    fn whole_files_are_dealt_where_there_are_enough() {
        let dealt = deal(&corpus(450), 300).unwrap();
        let mut owner = HashMap::new();
        for (user, desks) in dealt.iter().enumerate() {
            for desk in desks {
                assert_eq!(*owner.entry(desk.file).or_insert(user), user);
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
                (pause.file, pause.cursor, pause.answers),
                (again.file, again.cursor, again.answers)
            );
            assert_eq!(pause.delay, again.delay);
        }
    }

    #[test]
    fn pauses_fall_on_every_column_from_the_indentation_to_the_last_typed_character() {
        let text: Arc<str> = "  äbc  \n".into();
        let dealt = deal(&[("f".to_owned(), text)], 1).unwrap();
        let cursors = (0..200)
            .map(|nth| pause(&dealt[0], 1, 0, nth).unwrap().cursor)
            .collect::<HashSet<_>>();
        assert_eq!(
            cursors,
            HashSet::from([2, 4, 5]),
            "character boundaries before ä, b and c"
        );
    }

    #[test]
    fn a_fifth_stays_silent_and_the_median_delay_is_one_second() {
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

    fn at(text: &str, cursor: usize) -> Pause {
        let line_end = text[cursor..].find('\n').map_or(text.len(), |end| cursor + end);
        Pause {
            name: "f".into(),
            text: text.into(),
            file: 0,
            cursor,
            line_end,
            answers: true,
            delay: Duration::ZERO,
        }
    }

    #[test]
    fn the_context_is_bounded_and_starts_on_a_line_of_its_own() {
        let text = "one\ntwo\nthree";
        let pause = at(text, 10);
        assert_eq!(pause.context(100), "one\ntwo\nth");
        assert_eq!(pause.context(10), "one\ntwo\nth");
        assert_eq!(pause.context(9), "two\nth");
        assert_eq!(
            pause.context(6),
            "two\nth",
            "a bound that falls on a line's start keeps that line"
        );
        assert_eq!(pause.context(5), "th");
        assert_eq!(pause.context(1), "h", "the cursor's own line is cut where it must be");
        assert_eq!(at("ääää", 6).context(2), "ää", "characters, not bytes");
        assert_eq!(at(text, 0).context(10), "");
    }

    #[test]
    fn a_suggestion_is_right_iff_it_is_the_rest_of_the_line_but_for_trailing_blanks() {
        let pause = at("let a = b;  \nlet c", 4);
        assert_eq!(pause.rest(), "a = b;  ");
        assert!(pause.is_right("a = b;"));
        assert!(pause.is_right("a = b;\n"));
        assert!(!pause.is_right("a = b"));
        assert!(!pause.is_right(" a = b;"));
        assert!(!pause.is_right(""));
    }
}
