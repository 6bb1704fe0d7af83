//! The task of one session: a place in a file, and a conversation about the rest of its line.
//!
//! The assistant suggests the rest of the line. If it is not the user's text, the user keeps what is
//! right of it up to the first wrong character, types a few more characters, and asks again. If the
//! assistant declines, they ask again as they are. The next prompt holds all of it:
//!
//! ```text
//! …the file so far
//!     let total = <|cut|>order.len();<|eol|>
//!     let total = order.ite<|cut|>
//! ```
//!
//! A session ends when the assistant writes the user's text, or after [`TURNS_MAX`] turns. Pure:
//! everything depends only on the seed, the user, the number of the session and the suggestions.

use std::{ops::RangeInclusive, time::Duration};

use crate::{
    corpus::tokenizer::{CUT, EOL},
    developer::{self, DELAY_SIGMA, FilePart, Pause},
    random::Draws,
    stats::Reaction,
};

/// Turns after which a user gives up.
pub const TURNS_MAX: usize = 4;
/// Most characters of the file that a session begins with. The model reads 256 tokens, and three
/// suggestions that were turned down must fit beside it.
pub const CONTEXT_CHARS_MAX: usize = 240;
/// Lengths of a line's beginning and of the rest that is asked for, in characters. Longer ones leave
/// no room for four turns.
const BEGINNING_CHARS_MAX: usize = 40;
const REST_CHARS: RangeInclusive<usize> = 6..=32;
/// Characters that a user types after a wrong suggestion.
const TYPED_CHARS: usize = 3;
/// Fraction of users who say nothing about the end, and who write a message instead of a verdict.
pub const SILENT_SHARE: f64 = developer::SILENT_SHARE;
pub const MESSAGE_SHARE: f64 = 0.1;
/// Median time that a user takes for each answer, seconds. It is lognormal with [`DELAY_SIGMA`].
pub const DELAY_MEDIAN_SECONDS: f64 = 0.5;
/// Places that are looked at until one has a line of the right length.
const PLACES_MAX: u64 = 64;

/// What a user says when the session is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// Whether it was good.
    Verdict,
    /// A message, which nobody has scored yet.
    Message,
    Nothing,
}

/// One session of a user, before anything is suggested.
#[derive(Debug, Clone)]
pub struct Task {
    place: Pause,
    /// Drawn before anything is seen, so it favors no outcome.
    pub answer: Answer,
    delays: [Duration; TURNS_MAX],
}

/// A turn that did not reach the text.
#[derive(Debug, Clone, Default)]
pub struct Attempt {
    /// What was turned down. Empty if the assistant declined.
    pub shown: String,
    pub declined: bool,
}

impl Attempt {
    pub fn new(suggestion: String, declined: bool) -> Self {
        Self {
            shown: if declined { String::new() } else { suggestion },
            declined,
        }
    }
}

/// The `nth` session of `user`. `None`: none of the places that were looked at fits.
pub fn task(parts: &[FilePart], seed: u64, user: usize, nth: u64) -> Option<Task> {
    let mut places = (0..PLACES_MAX).filter_map(|k| developer::pause(parts, seed, user, nth * PLACES_MAX + k));
    let place = places.find(|place| fits(last_line(place.context(CONTEXT_CHARS_MAX)), place.rest().trim_end()))?;
    let mut draws = Draws::new("springtide demo session 1", &[seed, user as u64, nth]);
    let answer = match draws.unit() {
        share if share <= SILENT_SHARE => Answer::Nothing,
        share if share <= SILENT_SHARE + MESSAGE_SHARE => Answer::Message,
        _ => Answer::Verdict,
    };
    Some(Task {
        place,
        answer,
        delays: std::array::from_fn(|_| {
            Duration::from_secs_f64(DELAY_MEDIAN_SECONDS * (DELAY_SIGMA * draws.normal()).exp())
        }),
    })
}

/// Whether a session can be about a line that begins so and goes on with `rest`.
fn fits(beginning: &str, rest: &str) -> bool {
    beginning.chars().count() <= BEGINNING_CHARS_MAX && REST_CHARS.contains(&rest.chars().count())
}

fn last_line(text: &str) -> &str {
    text.rsplit('\n').next().unwrap_or_default()
}

/// Characters of a suggestion before the first wrong one.
fn right_chars(suggestion: &str, rest: &str) -> usize {
    let pairs = suggestion.chars().zip(rest.chars());
    pairs.take_while(|(shown, meant)| shown == meant).count()
}

impl Task {
    /// What the assistant reads after these attempts: at most `chars` characters of the file, and the
    /// whole conversation.
    pub fn prompt(&self, chars: usize, attempts: &[Attempt]) -> String {
        let context = self.place.context(chars);
        let beginning = last_line(context);
        let mut prompt = format!("{context}{CUT}");
        for (turn, attempt) in (1..).zip(attempts) {
            let (shown, typed) = (attempt.shown.trim_end(), self.typed(&attempts[..turn]));
            prompt += &format!("{shown}{EOL}\n{beginning}{typed}{CUT}");
        }
        prompt
    }

    /// What stands in the line after these attempts. Never all of the text.
    fn typed(&self, attempts: &[Attempt]) -> &str {
        let rest = self.place.rest().trim_end();
        let mut typed = 0;
        for attempt in attempts {
            if attempt.declined {
                continue;
            }
            let kept = right_chars(&attempt.shown, &rest[typed..]);
            let written = rest[typed..].chars().take(kept + TYPED_CHARS);
            typed += written.map(char::len_utf8).sum::<usize>();
        }
        let last = rest.chars().next_back().map_or(0, char::len_utf8);
        &rest[..typed.min(rest.len() - last)]
    }

    /// What the user thinks of the next suggestion. It is right if it completes their text, except for
    /// trailing blanks.
    pub fn judge(&self, attempts: &[Attempt], suggestion: &str) -> Reaction {
        self.place.judge(&format!("{}{suggestion}", self.typed(attempts)))
    }

    /// Whether the user keeps at least half of the next suggestion.
    pub fn keeps_half(&self, attempts: &[Attempt], suggestion: &str) -> bool {
        let suggestion = suggestion.trim_end();
        let rest = &self.place.rest()[self.typed(attempts).len()..];
        let kept = right_chars(suggestion, rest);
        kept > 0 && 2 * kept >= suggestion.chars().count()
    }

    /// How long the user takes to answer what they see in this turn, counted from 0.
    pub fn delay(&self, turn: usize) -> Duration {
        self.delays.get(turn).copied().unwrap_or_default()
    }
}

/// What a user writes who gives no verdict.
pub fn message(is_happy: bool) -> &'static str {
    if is_happy {
        "That is it, thank you."
    } else {
        "That was not it. I have written the line myself."
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn users() -> Vec<Vec<FilePart>> {
        let text = (0..400).map(|n| format!("    let total{n} = order.items[{n}].price;\n\n"));
        let text: Arc<str> = text.collect::<String>().into();
        developer::deal(&[("f".to_owned(), text)], 5).unwrap()
    }

    fn tasks() -> impl Iterator<Item = Task> {
        let users = users();
        (0..2000).filter_map(move |nth| task(&users[3], 1, 3, nth))
    }

    fn attempt(shown: &str) -> Attempt {
        Attempt::new(shown.to_owned(), false)
    }

    #[test]
    fn a_prompt_holds_what_was_turned_down_and_what_stands_in_the_line() {
        let task = tasks().find(|task| task.place.rest().chars().count() == 16).unwrap();
        let (context, rest) = (task.place.context(300), task.place.rest());
        let beginning = last_line(context);
        assert_eq!(task.prompt(300, &[]), format!("{context}<|cut|>"));

        // Four characters are right, and the user types three.
        let wrong = format!("{}\u{1}  \n", &rest[..4]);
        let attempts = [attempt(&wrong), Attempt::new("x".into(), true), attempt("\u{1}")];
        let (shown, seven, ten) = (wrong.trim_end(), &rest[..7], &rest[..10]);
        assert_eq!(
            task.prompt(300, &attempts),
            format!(
                "{context}<|cut|>{shown}<|eol|>\n{beginning}{seven}<|cut|><|eol|>\n{beginning}{seven}<|cut|>\u{1}<|eol|>\n\
                 {beginning}{ten}<|cut|>"
            )
        );
        assert!(task.prompt(40, &attempts).len() < task.prompt(300, &attempts).len());
        assert_eq!(task.judge(&[], rest), Reaction::Right);
        assert_eq!(task.judge(&attempts, &rest[10..]), Reaction::Right);
        assert_eq!(task.judge(&attempts, rest), Reaction::Wrong);
        assert!(task.keeps_half(&[], &format!("{}\u{1}\u{1}\n", &rest[..2])));
        assert!(!task.keeps_half(&[], &format!("{}\u{1}\u{1}\u{1}", &rest[..2])) && !task.keeps_half(&[], " "));
    }

    #[test]
    fn a_user_never_types_the_whole_text() {
        for task in tasks() {
            let rest = task.place.rest().trim_end();
            assert!(REST_CHARS.contains(&rest.chars().count()));
            let too_long = attempt(&format!("{rest} and more"));
            let wrong = attempt("\u{1}");
            for attempts in [vec![too_long; TURNS_MAX], vec![wrong; TURNS_MAX]] {
                let typed = (0..TURNS_MAX).map(|turn| task.typed(&attempts[..turn]));
                let typed: Vec<&str> = typed.collect();
                assert_eq!(typed[0], "");
                assert!(typed.iter().all(|typed| rest.starts_with(typed) && *typed != rest));
                assert!(typed.is_sorted_by_key(|typed| typed.len()));
            }
        }
    }

    #[test]
    fn some_users_are_silent_and_some_write_a_message_whatever_happens() {
        let answers: Vec<Answer> = tasks().map(|task| task.answer).collect();
        let share = |answer| answers.iter().filter(|other| **other == answer).count() * 100 / answers.len();
        assert!(answers.len() > 1900);
        assert!(share(Answer::Nothing).abs_diff(20) < 4 && share(Answer::Message).abs_diff(10) < 3);
    }
}
