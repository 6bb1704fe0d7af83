//! Why a rollout has no grade.

/// A grader gave no reward. The rollout is left out, unless the completion is the cause ([`Cause::costs`]).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct Error {
    pub cause: Cause,
    /// For people. It quotes neither the task nor the completion.
    pub reason: String,
}

/// What kind of failure it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cause {
    /// A judge did not answer in time.
    Timeout,
    /// The grader could not work.
    Failed,
    /// The grader's answer is no reward.
    Invalid,
    /// The run replays stored answers, and this one is not stored.
    NotStored,
    /// Another model answers than when the run began.
    JudgeChanged,
    /// The sandbox ended the grader, because it took longer, used more memory or printed more than it may.
    Limit,
    /// The grader raised an error over the completion, or its process ended without a grade.
    Broke,
}

impl Cause {
    /// The code of the disposition, and in the run's events and notes.
    pub fn code(self) -> &'static str {
        match self {
            Cause::Timeout => "grade_timeout",
            Cause::Failed => "grade_failed",
            Cause::Invalid => "grade_invalid",
            Cause::NotStored => "grade_not_stored",
            Cause::JudgeChanged => "grade_judge_changed",
            Cause::Limit => "grade_limit",
            Cause::Broke => "grade_broke",
        }
    }

    /// Whether this costs the policy a reward. What a grader does with a completion is up to the completion: left out,
    /// it would be a way to lose nothing.
    pub fn costs(self) -> bool {
        matches!(self, Cause::Limit | Cause::Broke)
    }

    /// Whether the run cannot go on, because no other rollout could be compared.
    pub fn ends_the_run(self) -> bool {
        self == Cause::JudgeChanged
    }
}

impl Error {
    pub(super) fn new(cause: Cause, reason: impl Into<String>) -> Self {
        Error {
            cause,
            reason: reason.into(),
        }
    }
}
