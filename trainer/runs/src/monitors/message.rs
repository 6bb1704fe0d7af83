//! What an alarm about a figure says. Pure.

use evidence::change::News;
use evidence::figure::Figure;

/// What one trajectory brought about.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Told {
    pub news: News,
    /// That answered it.
    pub version: i64,
}

impl Told {
    pub fn message(&self, arm: &str, surface: &str, figure: Figure, reference: u32) -> String {
        let of = |level| number(figure, level);
        let what = words(figure);
        match self.news {
            News::Changed(levels) => {
                let others = levels.others.map_or(String::new(), |others| {
                    format!("; of the arms that do not follow it {}", of(others))
                });
                format!(
                    "{arm}'s answers on `{surface}` have changed: {what} is about {} now, and was {}{others}. Seen at version \
                     {}. Compare versions with `springtide release compare --arm {arm} --versions …`, read some answers, and \
                     go back if the change is not what you want. The next {reference} answers are the new reference",
                    of(levels.recent),
                    of(levels.reference),
                    self.version
                )
            }
            News::Settled(levels) => format!(
                "{arm}'s answers on `{surface}` have a new reference: {what} is {}",
                of(levels.reference)
            ),
        }
    }
}

fn words(figure: Figure) -> &'static str {
    match figure {
        Figure::Shown => "the share of answers that are shown",
        Figure::Accepted => "the share of shown answers that users accept",
        Figure::Edited => "the share of shown answers that users edit",
        Figure::Unanswered => "the share of shown answers without any feedback",
        Figure::Unscored => "the share of shown answers without a reward",
        Figure::Disagreement => "the share of shown answers whose signals disagree",
        Figure::ToolFailed => "the share of shown answers with a failed tool call",
        Figure::Length => "the mean length, in tokens,",
        Figure::Repetition => "the share of 4-grams that repeat earlier ones of the answer",
        Figure::Entropy => "the entropy, in nats per token,",
    }
}

fn number(figure: Figure, level: f64) -> String {
    match figure {
        Figure::Length => format!("{level:.1}"),
        Figure::Entropy => format!("{level:.3}"),
        _ => format!("{:.1} %", 100.0 * level),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use evidence::change::Levels;

    #[test]
    fn the_message_says_what_changed_from_what_to_what() {
        let levels = Levels {
            reference: 0.12,
            recent: 0.414,
            others: Some(0.11),
        };
        let of = |news, figure| Told { news, version: 41 }.message("learner", "agent", figure, 1_000);
        let began = of(News::Changed(levels), Figure::Unscored);
        assert!(
            began.starts_with(
                "learner's answers on `agent` have changed: the share of shown answers without a reward is about 41.4 % now, \
                 and was 12.0 %; of the arms that do not follow it 11.0 %. Seen at version 41. "
            ),
            "{began}"
        );
        let alone = Levels {
            reference: 120.0,
            recent: 181.26,
            others: None,
        };
        let began = of(News::Changed(alone), Figure::Length);
        assert!(
            began.contains("the mean length, in tokens, is about 181.3 now, and was 120.0. Seen"),
            "{began}"
        );
        assert_eq!(
            of(News::Settled(levels), Figure::Unscored),
            "learner's answers on `agent` have a new reference: the share of shown answers without a reward is 12.0 %"
        );
    }
}
