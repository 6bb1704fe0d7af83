//! A model of the reward, for the doubly robust estimate: the mean reward of declines and that of
//! answers, and for sessions the mean of all.
//!
//! ```text
//! q(decline), q(answer)                       mean rewards, of users of the other half
//! v = p · q(decline) + (1 − p) · q(answer)    p: probability that the version declines
//! ```
//!
//! Whether to answer is the one action whose probability the version knows exactly before it acts.
//! Users are split in halves by a hash, so that no mean has the rewards that it predicts.

use super::User;
use evidence::offpolicy::Prediction;

/// How an answer began.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Opening {
    pub declined: bool,
    /// The version's probability of declining there.
    pub decline_probability: f64,
}

/// What a trajectory was, and what it earned.
#[derive(Debug, Clone, Copy)]
pub(super) struct Outcome<'a> {
    pub user: &'a User,
    pub reward: f64,
    /// `None`: a session, or an answer that could not decline.
    pub opening: Option<Opening>,
}

/// One prediction per outcome. `None` if all users are of one half.
pub(super) fn predictions(outcomes: &[Outcome<'_>]) -> Option<Vec<Prediction>> {
    let models = [Means::of(outcomes, 1)?, Means::of(outcomes, 0)?];
    let predict = |outcome: &Outcome<'_>| models[half(outcome.user)].predict(outcome.opening);
    Some(outcomes.iter().map(predict).collect())
}

/// Mean rewards of one half of the users.
struct Means {
    all: f64,
    declined: f64,
    answered: f64,
}

impl Means {
    /// A kind that no user of the half has gets the mean of all.
    fn of(outcomes: &[Outcome<'_>], wanted: usize) -> Option<Self> {
        let of_half = || outcomes.iter().filter(|outcome| half(outcome.user) == wanted);
        let all = mean(of_half().map(|outcome| outcome.reward))?;
        let of_kind = |declined: bool| {
            let is = move |outcome: &&Outcome<'_>| outcome.opening.is_some_and(|opening| opening.declined == declined);
            mean(of_half().filter(is).map(|outcome| outcome.reward)).unwrap_or(all)
        };
        Some(Means {
            all,
            declined: of_kind(true),
            answered: of_kind(false),
        })
    }

    fn predict(&self, opening: Option<Opening>) -> Prediction {
        let Some(Opening {
            declined,
            decline_probability: p,
        }) = opening
        else {
            return Prediction {
                action: self.all,
                candidate: self.all,
            };
        };
        Prediction {
            action: if declined { self.declined } else { self.answered },
            candidate: p * self.declined + (1.0 - p) * self.answered,
        }
    }
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = values.fold((0.0, 0u64), |(sum, count), value| (sum + value, count + 1));
    (count > 0).then(|| sum / count as f64)
}

/// 0 or 1, the same for a user in every evaluation.
fn half((tenant, key): &User) -> usize {
    let name = [tenant.as_bytes(), &[0], key.as_bytes()].concat();
    usize::from(blake3::hash(&name).as_bytes()[0] & 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(number: usize) -> User {
        ("t".to_owned(), format!("user {number}"))
    }

    /// The first two users of each half.
    fn two_of_each() -> [[User; 2]; 2] {
        [0, 1].map(|wanted| {
            let mut of_half = (0..).map(user).filter(|user| half(user) == wanted);
            [of_half.next().unwrap(), of_half.next().unwrap()]
        })
    }

    fn opening(declined: bool, decline_probability: f64) -> Option<Opening> {
        Some(Opening {
            declined,
            decline_probability,
        })
    }

    #[test]
    fn predictions_are_means_of_the_other_half_weighed_by_the_versions_own_probability() {
        let [first, second] = two_of_each();
        let outcome = |user, reward, opening| Outcome { user, reward, opening };
        let outcomes = [
            outcome(&first[0], -0.1, opening(true, 0.25)),
            outcome(&first[1], 0.5, opening(false, 0.5)),
            outcome(&second[0], 0.0, opening(true, 1.0)),
            outcome(&second[1], 1.0, opening(false, 0.0)),
            outcome(&second[1], 0.2, None),
        ];
        let found = predictions(&outcomes).unwrap();
        let expected = [
            (0.0, 0.25 * 0.0 + 0.75 * 1.0),
            (1.0, 0.5),
            (-0.1, -0.1),
            (0.5, 0.5),
            (0.2, 0.2),
        ];
        for (found, (action, candidate)) in found.iter().zip(expected) {
            assert!((found.action - action).abs() < 1e-12 && (found.candidate - candidate).abs() < 1e-12);
        }
    }

    #[test]
    fn a_kind_that_the_other_half_lacks_is_predicted_by_its_mean_and_one_half_predicts_nothing() {
        let [first, second] = two_of_each();
        let outcome = |user, reward, opening| Outcome { user, reward, opening };
        let outcomes = [
            outcome(&first[0], 0.4, opening(false, 0.5)),
            outcome(&second[0], -0.2, opening(true, 0.5)),
        ];
        let found = predictions(&outcomes).unwrap();
        assert_eq!((found[0].action, found[0].candidate), (-0.2, -0.2));
        assert_eq!((found[1].action, found[1].candidate), (0.4, 0.4));
        assert!(predictions(&outcomes[..1]).is_none());
        assert!(predictions(&[]).is_none());
    }
}
