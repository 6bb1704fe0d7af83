//! `springtide demo headroom`: what is possible for a base and these users, before anything is learned. Also chooses the
//! confidence thresholds that runs are held against, always on other users than those it is used for.

use std::{collections::BTreeMap, path::PathBuf, sync::Mutex};

use policy::image::Image;

use super::{
    args::{positive_f32, price},
    developer::{self, Desk, Pause},
    draw::Draws,
    references::Reference,
    suggester::{Draft, Suggester, Way},
    tally::{self, Figures, Outcome, Verdict},
    users::Corpus,
};

/// Prints what the base would earn from these users under several ways of serving it.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub corpus: Corpus,
    /// Hugging Face folder of the base.
    #[arg(long, default_value = "models/demo-base")]
    pub model: PathBuf,
    /// How many pauses; as many again, of other users, choose the thresholds.
    #[arg(long, default_value_t = 2000)]
    pub pauses: usize,
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Temperatures at which the base is served.
    #[arg(long, value_delimiter = ',', default_value = "1.0", value_parser = positive_f32)]
    pub temperature: Vec<f32>,
    /// Prices of showing a suggestion.
    #[arg(long, value_delimiter = ',', default_value = "0.25", value_parser = price)]
    pub tau: Vec<f64>,
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    let image = Image::read_dir(&args.model)?;
    let files = args.corpus.files()?;
    let users = args.corpus.developers as usize;
    let desks = developer::deal(&files, 2 * users)?;
    let (replayed, others) = desks.split_at(users);
    let ours = draw(replayed, 0, args.seed, args.pauses);
    let theirs = draw(others, users, args.seed, args.pauses);
    for &temperature in &args.temperature {
        let ours = ask(&image, &ours, temperature, args.seed)?;
        let theirs = ask(&image, &theirs, temperature, args.seed)?;
        for &tau in &args.tau {
            println!("\nT = {temperature}, τ = {tau}, {} pauses", ours.len());
            print!(
                "{}",
                table(&references(&ours, &Thresholds::choose(&theirs, tau), temperature, tau))
            );
        }
    }
    Ok(())
}

/// One pause with the base's two suggestions there.
#[derive(Debug, Clone)]
pub struct Asked {
    pub user: usize,
    pub answers: bool,
    pub sampled: Judged,
    pub greedy: Judged,
}

/// A suggestion as a developer would judge it.
#[derive(Debug, Clone, Copy)]
pub struct Judged {
    pub right: bool,
    pub declined: bool,
    /// Nats, of the whole suggestion.
    pub log_prob: f64,
}

impl Judged {
    pub fn new(draft: &Draft, pause: &Pause) -> Self {
        Self {
            right: pause.is_right(&draft.text),
            declined: draft.declined,
            log_prob: draft.log_prob(),
        }
    }

    fn verdict(self, shown: bool) -> Verdict {
        match (shown, self.right) {
            (false, _) => Verdict::Declined,
            (true, true) => Verdict::Right,
            (true, false) => Verdict::Wrong,
        }
    }

    fn reward(self, shown: bool, tau: f64) -> f64 {
        self.verdict(shown).reward(tau)
    }
}

/// A policy that could be served instead of the learning one, as a function of what the base suggests.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    Sampled,
    Greedy,
    SampledAbove,
    GreedyAbove,
    /// Knows what will be typed: shows the greedy suggestion when it is right.
    Oracle,
}

pub const KINDS: [Kind; 5] = [
    Kind::Sampled,
    Kind::Greedy,
    Kind::SampledAbove,
    Kind::GreedyAbove,
    Kind::Oracle,
];

impl Kind {
    pub fn name(self, temperature: f32) -> String {
        match self {
            Kind::Sampled => format!("base, T = {temperature}"),
            Kind::Greedy => "base, greedy".to_owned(),
            Kind::SampledAbove => format!("base, T = {temperature}, best threshold"),
            Kind::GreedyAbove => "base, greedy, best threshold".to_owned(),
            Kind::Oracle => "oracle: greedy, only where right".to_owned(),
        }
    }

    /// What the developer would have seen.
    pub fn verdict(self, asked: &Asked, thresholds: &Thresholds) -> Verdict {
        let Asked { sampled, greedy, .. } = *asked;
        match self {
            Kind::Sampled => sampled.verdict(!sampled.declined),
            Kind::Greedy => greedy.verdict(!greedy.declined),
            Kind::SampledAbove => sampled.verdict(!sampled.declined && sampled.log_prob >= thresholds.sampled),
            Kind::GreedyAbove => greedy.verdict(!greedy.declined && greedy.log_prob >= thresholds.greedy),
            Kind::Oracle => greedy.verdict(greedy.right),
        }
    }
}

/// Least log-probability of a suggestion that is shown, nats.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Thresholds {
    pub sampled: f64,
    pub greedy: f64,
}

impl Thresholds {
    /// Those that earn most on these pauses.
    pub fn choose(asked: &[Asked], tau: f64) -> Self {
        let best = |of: fn(&Asked) -> Judged| {
            let mut shown: Vec<Judged> = asked.iter().map(of).filter(|judged| !judged.declined).collect();
            shown.sort_by(|a, b| b.log_prob.total_cmp(&a.log_prob));
            let (mut sum, mut most, mut threshold) = (0.0, 0.0, f64::INFINITY);
            for judged in shown {
                sum += judged.reward(true, tau);
                if sum > most {
                    (most, threshold) = (sum, judged.log_prob);
                }
            }
            threshold
        };
        Self {
            sampled: best(|asked| asked.sampled),
            greedy: best(|asked| asked.greedy),
        }
    }
}

/// `n` pauses, each of a random one of these users, who are numbered from `first`.
pub fn draw(desks: &[Vec<Desk>], first: usize, seed: u64, n: usize) -> Vec<(usize, Pause)> {
    let mut draws = Draws::new("springtide demo headroom 1", &[seed, first as u64]);
    let mut nth = BTreeMap::<usize, u64>::new();
    let pauses = (0..n).filter_map(|_| {
        let user = draws.below(desks.len());
        let count = nth.entry(user).or_default();
        *count += 1;
        Some((
            first + user,
            developer::pause(&desks[user], seed, first + user, *count)?,
        ))
    });
    pauses.collect()
}

/// Asks the base at each pause, both ways, on all cores. Pauses whose context never fits are left out.
pub fn ask(image: &Image, pauses: &[(usize, Pause)], temperature: f32, seed: u64) -> anyhow::Result<Vec<Asked>> {
    let workers = std::thread::available_parallelism().map_or(1, |n| n.get());
    let asked = Mutex::new(BTreeMap::new());
    let chunks: Vec<(usize, &[(usize, Pause)])> = pauses.chunks(64).enumerate().collect();
    let next = std::sync::atomic::AtomicUsize::new(0);
    let work = || -> anyhow::Result<()> {
        let mut suggester = Suggester::new(image)?;
        while let Some(&(index, chunk)) = chunks.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed)) {
            let answers = ask_some(&mut suggester, chunk, temperature, (seed, index as u64))?;
            asked
                .lock()
                .unwrap_or_else(|poisoned| poisoned.into_inner())
                .insert(index, answers);
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let handles: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        handles
            .into_iter()
            .try_for_each(|handle| handle.join().unwrap_or_else(|_| anyhow::bail!("a worker failed")))
    })?;
    let asked = asked.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    Ok(asked.into_values().flatten().collect())
}

fn ask_some(
    suggester: &mut Suggester,
    pauses: &[(usize, Pause)],
    temperature: f32,
    key: (u64, u64),
) -> anyhow::Result<Vec<Asked>> {
    let mut draws = Draws::new("springtide demo reference 1", &[key.0, key.1]);
    let mut fitting = Vec::new();
    for (user, pause) in pauses {
        if let Some(ids) = suggester.prompt(pause)? {
            fitting.push((*user, pause, ids));
        }
    }
    let prompts: Vec<(&[u32], Vec<Way>)> = fitting
        .iter()
        .map(|(_, _, ids)| {
            let seed = draws.below(1 << 53) as u64;
            (ids.as_slice(), vec![Way::Sampled { temperature, seed }, Way::Greedy])
        })
        .collect();
    let drafts = suggester.suggest(&prompts)?;
    let judged = fitting.iter().zip(drafts).map(|((user, pause, _), drafts)| Asked {
        user: *user,
        answers: pause.answers,
        sampled: Judged::new(&drafts[0], pause),
        greedy: Judged::new(&drafts[1], pause),
    });
    Ok(judged.collect())
}

/// Every reference's figures on these pauses.
pub fn references(asked: &[Asked], thresholds: &Thresholds, temperature: f32, tau: f64) -> Vec<Reference> {
    let reference = |kind: Kind| {
        let outcomes: Vec<Outcome> = asked
            .iter()
            .map(|asked| Outcome::of_reference(asked.user, asked.answers, kind.verdict(asked, thresholds)))
            .collect();
        Reference {
            name: kind.name(temperature),
            figures: tally::figures(outcomes.iter(), tau),
        }
    };
    KINDS.into_iter().map(reference).collect()
}

/// For people, one line a reference. Always declining earns 0.
pub fn table(references: &[Reference]) -> String {
    let mut text = format!(
        "{:<34} {:>8} {:>18} {:>8} {:>8} {:>8}\n{:<34} {:>8}\n",
        "", "reward", "95%", "accepts", "of shown", "shown", "always decline", "0"
    );
    for Reference { name, figures } in references {
        let Figures {
            reward_mean,
            reward_ci95,
            accepts_per_100,
            accept_rate,
            show_rate,
            ..
        } = figures;
        let number = |value: &Option<f64>, digits| super::number::or_dash(*value, digits);
        let interval = reward_ci95.map_or("–".to_owned(), |[low, high]| format!("{low:+.3} … {high:+.3}"));
        text += &format!(
            "{name:<34} {:>8} {interval:>18} {:>8} {:>8} {:>8}\n",
            number(reward_mean, 3),
            number(accepts_per_100, 1),
            number(accept_rate, 3),
            number(show_rate, 3)
        );
    }
    text
}

#[cfg(test)]
pub mod tests {
    use super::*;

    pub fn judged(right: bool, declined: bool, log_prob: f64) -> Judged {
        Judged {
            right,
            declined,
            log_prob,
        }
    }

    pub fn asked(user: usize, sampled: Judged, greedy: Judged) -> Asked {
        Asked {
            user,
            answers: true,
            sampled,
            greedy,
        }
    }

    #[test]
    fn the_threshold_is_the_one_that_earns_most() {
        // By falling log-probability: +0.75, −0.25, +0.75, −0.25: the sum is largest after the third, at −3.
        let all = [
            judged(true, false, -1.0),
            judged(false, false, -2.0),
            judged(true, false, -3.0),
            judged(false, false, -4.0),
            judged(true, true, -0.1),
        ];
        let asked: Vec<Asked> = all
            .iter()
            .map(|&one| asked(1, one, judged(false, false, -1.0)))
            .collect();
        let thresholds = Thresholds::choose(&asked, 0.25);
        assert_eq!(thresholds.sampled, -3.0);
        assert_eq!(thresholds.greedy, f64::INFINITY, "nothing is right: show nothing");
        let shown = |kind: Kind| {
            let verdicts = asked.iter().map(|asked| kind.verdict(asked, &thresholds));
            verdicts.filter(|verdict| *verdict != Verdict::Declined).count()
        };
        assert_eq!(
            KINDS.map(shown),
            [4, 5, 3, 0, 0],
            "sampled, greedy, both with a threshold, oracle"
        );
    }

    #[test]
    fn the_oracle_earns_what_the_greedy_suggestion_gets_right() {
        let asked = [
            asked(1, judged(false, true, -1.0), judged(true, true, -1.0)),
            asked(2, judged(false, false, -1.0), judged(false, false, -1.0)),
        ];
        let thresholds = Thresholds::choose(&asked, 0.25);
        let rewards: Vec<Option<f64>> = references(&asked, &thresholds, 1.0, 0.25)
            .iter()
            .map(|reference| reference.figures.reward_mean)
            .collect();
        assert_eq!(rewards[4], Some(0.375));
        assert_eq!(rewards[0], Some(-0.125), "one declined, one wrong");
    }
}
