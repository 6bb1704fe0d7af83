//! The scale that an arm is read on: what other policies would have earned on the very same pauses. Reported only; the
//! trainer never sees any of it.

use std::{collections::BTreeMap, sync::Arc};

use anyhow::Context;
use policy::image::Image;
use serde::Serialize;

use super::{
    developer::{self, Desk, Pause},
    headroom::{self, Asked, KINDS, Kind, Thresholds},
    interval::{self, Cluster, Interval},
    suggester::{Suggester, Way},
    tally::{self, FROZEN, Figures, LEARNING, Outcome, Verdict},
};

/// How many pauses show what two versions suggest.
const EXAMPLES: usize = 10;
/// Of how many the examples are drawn: those where the versions differ.
const EXAMPLE_PAUSES: usize = 120;
/// Lines of context that an example shows.
const EXAMPLE_LINES: usize = 4;

/// What one policy earns on a set of pauses.
#[derive(Debug, Clone, Serialize)]
pub struct Reference {
    /// E.g. `base, T = 1`, `base, greedy, best threshold`, `oracle`.
    pub name: String,
    pub figures: Figures,
}

/// The learning arm against one reference on the learning arm's own pauses.
#[derive(Debug, Clone, Serialize)]
pub struct Shadow {
    pub name: String,
    pub whole: Comparison,
    /// First, second and last third of the run.
    pub thirds: Vec<Comparison>,
}

/// Paired: the same pauses on both sides; intervals clustered by user.
#[derive(Debug, Clone, Serialize)]
pub struct Comparison {
    pub reference: Figures,
    /// Learning arm minus reference, reward per pause.
    pub reward: Option<Interval>,
    /// Learning arm minus reference, accepts per 100 pauses.
    pub accepts_per_100: Option<Interval>,
}

/// One pause, and what two versions suggest there (greedily, so that chance plays no part).
#[derive(Debug, Clone, Serialize)]
pub struct Example {
    pub file: String,
    /// The last lines before the cursor; the last one ends at it.
    pub context: String,
    /// What the developer really typed to the end of the line.
    pub typed: String,
    pub before: Suggested,
    pub after: Suggested,
}

#[derive(Debug, Clone, Serialize)]
pub struct Suggested {
    pub version: i64,
    /// None: it declined, nothing was shown.
    pub text: Option<String>,
    pub right: bool,
}

/// The whole scale of a run.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Headroom {
    /// Measured before the run on other users' pauses, where thresholds are chosen too.
    pub beforehand: Vec<Reference>,
    /// On the learning arm's own pauses.
    pub shadows: Vec<Shadow>,
    /// Ten pauses, before and after.
    pub examples: Vec<Example>,
}

impl Headroom {
    /// For people: the learning arm minus each reference, on the learning arm's own pauses.
    pub fn table(&self) -> String {
        let mut text = format!(
            "on the learning arm's own pauses, {LEARNING} minus\n{:<34} {:>26} {:>26} {:>22}\n",
            "", "reward, whole run", "last third", "accepts, last third"
        );
        let written = |interval: Option<Interval>, digits: usize| {
            interval.map_or(
                "–".to_owned(),
                |Interval {
                     mean,
                     ci95: [low, high],
                 }| { format!("{mean:+.digits$} ({low:+.digits$} … {high:+.digits$})") },
            )
        };
        for shadow in &self.shadows {
            let last = shadow.thirds.last();
            text += &format!(
                "{:<34} {:>26} {:>26} {:>22}\n",
                shadow.name,
                written(shadow.whole.reward, 3),
                written(last.and_then(|third| third.reward), 3),
                written(last.and_then(|third| third.accepts_per_100), 1)
            );
        }
        text
    }
}

/// What a run is read against: the base, and the thresholds that other users' pauses chose for it.
pub struct Scale {
    image: Arc<Image>,
    thresholds: Thresholds,
    temperature: f32,
    tau: f64,
    seed: u64,
    beforehand: Vec<Reference>,
}

impl Scale {
    /// Asks the base at `pauses` pauses of `others`, users who are not replayed and are numbered from `first`.
    pub fn measure(
        image: Arc<Image>,
        (others, first): (&[Vec<Desk>], usize),
        pauses: usize,
        temperature: f32,
        tau: f64,
        seed: u64,
    ) -> anyhow::Result<Self> {
        let drawn = headroom::draw(others, first, seed, pauses);
        let asked = headroom::ask(&image, &drawn, temperature, seed)?;
        let thresholds = Thresholds::choose(&asked, tau);
        Ok(Self {
            beforehand: headroom::references(&asked, &thresholds, temperature, tau),
            image,
            thresholds,
            temperature,
            tau,
            seed,
        })
    }

    /// For people, before the run.
    pub fn table(&self) -> String {
        headroom::table(&self.beforehand)
    }

    /// What the references would have earned on the learning arm's own pauses, and ten pauses before and after. Pauses whose
    /// developer never answers are left out, as everywhere.
    pub fn headroom(
        self,
        outcomes: &[Outcome],
        desks: &[Vec<Desk>],
        thirds: &[f64; 2],
        latest: Option<(i64, Arc<Image>)>,
    ) -> anyhow::Result<Headroom> {
        let base = self.base(outcomes)?;
        let pause_of = |outcome: &Outcome| {
            let pause = developer::pause(&desks[outcome.user], self.seed, outcome.user, outcome.nth)?;
            Some((outcome.user, pause))
        };
        let own: Vec<&Outcome> = outcomes
            .iter()
            .filter(|outcome| outcome.arm == LEARNING && outcome.answers)
            .collect();
        let pauses: Vec<(usize, Pause)> = own.iter().filter_map(|outcome| pause_of(outcome)).collect();
        let asked = headroom::ask(&self.image, &pauses, self.temperature, self.seed)?;
        // Every pause that the server answered exists and fits, so the two lists are the same pauses in the same order.
        anyhow::ensure!(
            asked.len() == own.len(),
            "a pause that was answered does not fit the base's context"
        );
        let pairs: Vec<(&Outcome, &Asked)> = own.into_iter().zip(&asked).collect();
        let third_of = |outcome: &Outcome| thirds.iter().filter(|&&end| outcome.at.as_secs_f64() >= end).count();
        let shadow = |kind: Kind| Shadow {
            name: kind.name(self.temperature),
            whole: self.compare(kind, pairs.iter().copied()),
            thirds: (0..3)
                .map(|third| {
                    self.compare(
                        kind,
                        pairs.iter().copied().filter(|(outcome, _)| third_of(outcome) == third),
                    )
                })
                .collect(),
        };
        let examples = match latest {
            Some((version, image)) => {
                // Of the frozen arm's users: none of them was trained on.
                let frozen = outcomes.iter().filter(|outcome| outcome.arm == FROZEN);
                let pauses: Vec<Pause> = frozen.filter_map(pause_of).map(|(_, pause)| pause).collect();
                self.examples(&pauses, base, (version, &image))?
            }
            None => Vec::new(),
        };
        Ok(Headroom {
            shadows: KINDS.into_iter().map(shadow).collect(),
            beforehand: self.beforehand,
            examples,
        })
    }

    /// Serial of the frozen arm's version, which must be the weights that the references are computed with. 0: it answered
    /// nothing.
    fn base(&self, outcomes: &[Outcome]) -> anyhow::Result<i64> {
        let mut frozen = outcomes.iter().filter(|outcome| outcome.arm == FROZEN);
        let version = frozen.clone().map(|outcome| outcome.version).min().unwrap_or_default();
        let root = self.image.root().to_string();
        if let Some(other) = frozen.find(|outcome| outcome.root != root) {
            anyhow::bail!(
                "the frozen arm was answered by version {} with root {}, and the configured base has root {root}: \
                 point `policy.base` at the folder of that version",
                other.version,
                other.root
            );
        }
        Ok(version)
    }

    fn compare<'a>(&self, kind: Kind, pairs: impl Iterator<Item = (&'a Outcome, &'a Asked)> + Clone) -> Comparison {
        let reference =
            |asked: &Asked| Outcome::of_reference(asked.user, asked.answers, kind.verdict(asked, &self.thresholds));
        let references: Vec<Outcome> = pairs.clone().map(|(_, asked)| reference(asked)).collect();
        let mut rewards = BTreeMap::<usize, Cluster>::new();
        let mut accepts = BTreeMap::<usize, Cluster>::new();
        let accepted = |outcome: &Outcome| f64::from(u8::from(outcome.verdict == Verdict::Right)) * 100.0;
        for ((own, _), reference) in pairs.zip(&references) {
            rewards
                .entry(own.user)
                .or_default()
                .add(own.reward(self.tau) - reference.reward(self.tau));
            accepts
                .entry(own.user)
                .or_default()
                .add(accepted(own) - accepted(reference));
        }
        let mean = |users: BTreeMap<usize, Cluster>| {
            let clusters: Vec<Cluster> = users.into_values().collect();
            interval::ratio(&clusters).map(|estimate| estimate.interval())
        };
        Comparison {
            reference: tally::figures(references.iter(), self.tau),
            reward: mean(rewards),
            accepts_per_100: mean(accepts),
        }
    }

    /// The first pauses, in a fixed random order, at which the base and the latest version suggest different things.
    fn examples(&self, pauses: &[Pause], base: i64, (version, latest): (i64, &Image)) -> anyhow::Result<Vec<Example>> {
        let mut order: Vec<usize> = (0..pauses.len()).collect();
        let mut draws = super::draw::Draws::new("springtide demo examples 1", &[self.seed]);
        for i in 0..order.len().min(EXAMPLE_PAUSES) {
            let j = i + draws.below(order.len() - i);
            order.swap(i, j);
        }
        order.truncate(EXAMPLE_PAUSES);
        let chosen: Vec<&Pause> = order.iter().map(|&index| &pauses[index]).collect();
        let before = suggestions(&self.image, &chosen, base)?;
        let after = suggestions(latest, &chosen, version)?;
        let differing = chosen
            .iter()
            .zip(before.into_iter().zip(after))
            .filter(|(_, (before, after))| before.text != after.text);
        let examples = differing.take(EXAMPLES).map(|(pause, (before, after))| Example {
            file: pause.name.to_string(),
            context: last_lines(pause.context(super::client::CONTEXT_CHARS_MAX), EXAMPLE_LINES),
            typed: pause.rest().to_owned(),
            before,
            after,
        });
        Ok(examples.collect())
    }
}

/// What one version suggests greedily at each pause.
fn suggestions(image: &Image, pauses: &[&Pause], version: i64) -> anyhow::Result<Vec<Suggested>> {
    let mut suggester = Suggester::new(image)?;
    let mut all = Vec::new();
    for pause in pauses {
        let ids = suggester
            .prompt(pause)?
            .context("a pause that was answered does not fit the context")?;
        let draft = suggester
            .suggest(&[(&ids, vec![Way::Greedy])])?
            .swap_remove(0)
            .swap_remove(0);
        let right = pause.is_right(&draft.text);
        all.push(Suggested {
            version,
            text: (!draft.declined).then_some(draft.text),
            right: right && !draft.declined,
        });
    }
    Ok(all)
}

/// The last `n` lines of a text.
fn last_lines(text: &str, n: usize) -> String {
    let start = text.rmatch_indices('\n').nth(n - 1).map_or(0, |(at, _)| at + 1);
    text[start..].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::{
        headroom::tests::{asked, judged},
        tally::tests::outcome,
    };

    #[test]
    fn the_comparison_is_of_the_same_pauses_and_clustered_by_user() {
        let (right, wrong) = (judged(true, false, -1.0), judged(false, false, -9.0));
        let asked = [asked(1, wrong, right), asked(1, right, right), asked(2, wrong, wrong)];
        let outcomes = [
            outcome(1, LEARNING, Verdict::Right, true),
            outcome(1, LEARNING, Verdict::Right, true),
            outcome(2, LEARNING, Verdict::Declined, true),
        ];
        let image = Image::default();
        let scale = Scale {
            image: Arc::new(image),
            thresholds: Thresholds {
                sampled: -2.0,
                greedy: -2.0,
            },
            temperature: 1.0,
            tau: 0.25,
            seed: 1,
            beforehand: Vec::new(),
        };
        let compare = |kind| scale.compare(kind, outcomes.iter().zip(&asked));
        // Differences of reward: 0.75 − (−0.25), 0, 0 − (−0.25): 1.25 over three pauses.
        let mean = compare(Kind::Sampled).reward.map(|interval| interval.mean);
        assert!(mean.is_some_and(|mean| (mean - 1.25 / 3.0).abs() < 1e-9), "{mean:?}");
        let accepts = compare(Kind::Sampled).accepts_per_100.map(|interval| interval.mean);
        assert!(
            accepts.is_some_and(|mean| (mean - 100.0 / 3.0).abs() < 1e-9),
            "{accepts:?}"
        );
        // With the threshold the greedy base does what this arm did.
        assert_eq!(
            compare(Kind::GreedyAbove).reward.map(|interval| interval.mean),
            Some(0.0)
        );
    }

    #[test]
    fn an_example_shows_the_last_lines_up_to_the_cursor() {
        assert_eq!(last_lines("a\nb\nc\nlet x", 2), "c\nlet x");
        assert_eq!(last_lines("let x", 2), "let x");
    }
}
