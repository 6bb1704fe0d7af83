//! From bounds on a difference to a verdict, by margins that were declared before the release.
//!
//! With bounds [low, high] on candidate − baseline, the verdicts are looked for in this order:
//!
//! | verdict | condition |
//! |---|---|
//! | superior | low > superiority |
//! | non-inferior (only as a goal) | low > −noninferiority |
//! | harmful | high < −harm |
//! | equivalent | −equivalence < low and high < equivalence |
//! | futile | information ≥ information_max |
//! | inconclusive | otherwise |
//!
//! These are tests by inclusion in an interval (Piaggio et al., *Reporting of noninferiority and
//! equivalence randomized trials*, CONSORT 2012). One two-sided confidence sequence answers all of
//! them: while its bounds hold, which they do at all looks with probability 1 − α, no verdict is
//! wrong. If the goal is non-inferiority and `harm` < `noninferiority`, a candidate that is slightly
//! worse meets two conditions. The declared tolerance counts then.
//!
//! The function does not know what follows. A release may promote, roll back, wait or ask a person.

use serde::{Deserialize, Serialize};

use crate::sequence::{Bounds, NotYet};

/// What a candidate has to show.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Goal {
    /// It is better.
    Superiority,
    /// It is not much worse.
    NonInferiority,
}

/// All margins are distances in units of reward.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Margins {
    /// How much better than the baseline a superior candidate must at least be. 0: better at all.
    pub superiority: f64,
    /// The loss that non-inferiority tolerates. Above 0.
    pub noninferiority: f64,
    /// The loss from which on a candidate is harmful. 0: any loss.
    pub harm: f64,
    /// Differences below this count as none. `None`: no release stops for equivalence.
    pub equivalence: Option<f64>,
    /// The most evidence to wait for, in 1/reward² (see
    /// [`Design::information_planned`](crate::sequence::Design::information_planned)). `None`: no end.
    pub information_max: Option<f64>,
}

/// Margins that cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum Error {
    #[error("{name} is {value}; it must be at least 0")]
    Negative { name: &'static str, value: f64 },
    #[error("{name} is {value}; it must be above 0")]
    NotPositive { name: &'static str, value: f64 },
}

/// A goal with margins that were checked.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Rule {
    goal: Goal,
    margins: Margins,
}

/// What the evidence shows about a candidate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Better by more than the margin.
    Superior,
    /// Not worse by the tolerated loss or more.
    NonInferior,
    /// Worse by more than the margin.
    Harmful,
    /// Neither better nor worse by the margin or more.
    Equivalent,
    /// The evidence that was declared as the maximum showed nothing.
    Futile,
    /// More evidence may still decide.
    Inconclusive,
}

/// A verdict with its reason in one or two sentences.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Decision {
    pub verdict: Verdict,
    /// For people; programs read the verdict.
    pub reason: String,
}

impl Rule {
    /// # Errors
    /// A margin that is negative, not a finite number, or 0 where it must not be.
    pub fn new(goal: Goal, margins: Margins) -> Result<Self, Error> {
        for (name, value) in [("superiority", margins.superiority), ("harm", margins.harm)] {
            if !(value.is_finite() && value >= 0.0) {
                return Err(Error::Negative { name, value });
            }
        }
        let positive = [
            ("noninferiority", Some(margins.noninferiority)),
            ("equivalence", margins.equivalence),
            ("information_max", margins.information_max),
        ];
        for (name, value) in positive {
            if let Some(value) = value.filter(|value| !(value.is_finite() && *value > 0.0)) {
                return Err(Error::NotPositive { name, value });
            }
        }
        Ok(Self { goal, margins })
    }

    /// The verdict on one look. Missing evidence is [`Verdict::Inconclusive`].
    pub fn decide(&self, evidence: Result<Bounds, NotYet>) -> Decision {
        let bounds = match evidence {
            Ok(bounds) => bounds,
            Err(reason) => {
                return Decision {
                    verdict: Verdict::Inconclusive,
                    reason: format!("There is too little evidence: {reason}."),
                };
            }
        };
        let verdict = self.verdict(&bounds);
        Decision {
            verdict,
            reason: self.reason(verdict, &bounds),
        }
    }

    fn verdict(&self, bounds: &Bounds) -> Verdict {
        let margins = &self.margins;
        let equivalent = |margin: f64| -margin < bounds.low && bounds.high < margin;
        if bounds.low > margins.superiority {
            Verdict::Superior
        } else if self.goal == Goal::NonInferiority && bounds.low > -margins.noninferiority {
            Verdict::NonInferior
        } else if bounds.high < -margins.harm {
            Verdict::Harmful
        } else if margins.equivalence.is_some_and(equivalent) {
            Verdict::Equivalent
        } else if margins.information_max.is_some_and(|max| bounds.information >= max) {
            Verdict::Futile
        } else {
            Verdict::Inconclusive
        }
    }

    fn reason(&self, verdict: Verdict, bounds: &Bounds) -> String {
        let margins = &self.margins;
        let equivalence = margins.equivalence.unwrap_or_default();
        let words = match verdict {
            Verdict::Superior if margins.superiority == 0.0 => "The candidate is better".to_owned(),
            Verdict::Superior => format!("The candidate is better by more than {}", margins.superiority),
            Verdict::NonInferior => format!("The candidate is not worse by {} or more", margins.noninferiority),
            Verdict::Harmful if margins.harm == 0.0 => "The candidate is worse".to_owned(),
            Verdict::Harmful => format!("The candidate is worse by more than {}", margins.harm),
            Verdict::Equivalent => format!("The candidate differs by less than {equivalence}"),
            Verdict::Futile => "The declared maximum of evidence is reached without a result".to_owned(),
            Verdict::Inconclusive => "The evidence does not decide yet".to_owned(),
        };
        let range = match (bounds.low.is_finite(), bounds.high.is_finite()) {
            (true, true) => format!("between {:+.4} and {:+.4}", bounds.low, bounds.high),
            (true, false) => format!("at least {:+.4}", bounds.low),
            _ => format!("at most {:+.4}", bounds.high),
        };
        let [candidate, baseline] = bounds.users;
        format!("{words}: its difference in reward is {range}, from {candidate} users against {baseline}.")
    }
}
