//! What several votes of a judge say together.

use event_log::event::Value;
use event_log::judge::{Question, median};

/// What a judge says about a text.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Verdict {
    pub value: Value,
    /// Each vote. A boolean is 0 or 1.
    pub votes: Vec<f64>,
}

impl Verdict {
    /// The majority, or the median. `votes` has an odd number of them.
    pub(crate) fn of(question: Question, votes: Vec<f64>) -> Option<Self> {
        let median = median(&votes)?;
        let value = match question {
            Question::YesOrNo => Value::Bool(median > 0.5),
            Question::Number { .. } => Value::Float(median),
        };
        Some(Self { value, votes })
    }

    /// The columns `value_bool` and `value_float`, of which one is set.
    pub(crate) fn columns(&self) -> (Option<bool>, Option<f64>) {
        match self.value {
            Value::Bool(value) => (Some(value), None),
            Value::Float(value) => (None, Some(value)),
            Value::Text(_) => (None, None),
        }
    }

    /// How far the votes are apart, as a share of the largest possible distance: of booleans, the
    /// share of the minority.
    pub(crate) fn disagreement(&self, question: Question) -> f64 {
        let count = self.votes.len().max(1) as f64;
        match question {
            Question::YesOrNo => {
                let yes = self.votes.iter().sum::<f64>() / count;
                yes.min(1.0 - yes)
            }
            Question::Number { min, max } => {
                let largest = self.votes.iter().copied().fold(min, f64::max);
                let smallest = self.votes.iter().copied().fold(max, f64::min);
                ((largest - smallest) / (max - min)).clamp(0.0, 1.0)
            }
        }
    }
}
