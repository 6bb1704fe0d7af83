//! Built-in graders of offline runs: a completion and the task's answer give a reward in [0, 1].
//! Pure text functions. Judges and environments are separate programs that post feedback.

use serde::{Deserialize, Serialize};

/// Which grader a run uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Grader {
    /// 1 if the text equals the answer, ignoring blanks at both ends; else 0.
    ExactMatch,
    /// The share of the answer's characters, from its start, that the text starts with.
    PrefixMatch,
    /// 1 if the answer occurs in the text; else 0.
    Contains,
}

impl Grader {
    /// The reward of `text`.
    pub fn grade(self, text: &str, answer: &str) -> f64 {
        match self {
            Grader::ExactMatch => f64::from(text.trim() == answer.trim()),
            Grader::PrefixMatch => {
                let wanted = answer.chars().count();
                if wanted == 0 {
                    return f64::from(text.is_empty());
                }
                let got = text.chars().zip(answer.chars()).take_while(|(t, a)| t == a).count();
                got as f64 / wanted as f64
            }
            Grader::Contains => f64::from(text.contains(answer)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exact_match_ignores_blanks_at_the_ends_only() {
        assert_eq!(Grader::ExactMatch.grade(" let x = 1; \n", "let x = 1;"), 1.0);
        assert_eq!(Grader::ExactMatch.grade("let  x = 1;", "let x = 1;"), 0.0);
        assert_eq!(Grader::ExactMatch.grade("", "x"), 0.0);
    }

    #[test]
    fn prefix_match_rewards_every_matching_character() {
        assert_eq!(Grader::PrefixMatch.grade("abcx", "abcd"), 0.75);
        assert_eq!(Grader::PrefixMatch.grade("abcd and more", "abcd"), 1.0);
        assert_eq!(Grader::PrefixMatch.grade("", "abcd"), 0.0);
        assert_eq!(Grader::PrefixMatch.grade("größe", "größer"), 5.0 / 6.0);
    }

    #[test]
    fn contains_finds_the_answer_anywhere() {
        assert_eq!(Grader::Contains.grade("the answer is 42.", "42"), 1.0);
        assert_eq!(Grader::Contains.grade("the answer is 4", "42"), 0.0);
    }
}
