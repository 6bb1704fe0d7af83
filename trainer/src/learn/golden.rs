//! Tests: losses, gradients and advantages beside those of TRL and verl, on their random inputs.
//!
//! `make golden` makes the inputs and their results with the installed packages, and `make check NAME=losses`
//! prints how far ours are from them. TRL computes in f32, as we do; verl's functions got f64.

use super::batch::Counts;
use super::loss::{self, Tokens};
use super::preference::{LogProbs, dpo, kto, kto_reference_point};
use runs::advantage::GroupAdvantage;
use runs::sample::Sample;
use runs::settings::{Aggregation, Loss};
use serde::Deserialize;
use std::collections::BTreeMap;
use tch::{Kind, Tensor};
use uuid::Uuid;

/// Sequences of a micro-batch here. verl's micro-batches are others.
const MICRO_BATCH: usize = 4;

/// What tools/golden/policy_loss.py and verl_loss.py wrote. One row per sequence, one value per token.
#[derive(Deserialize)]
struct Case {
    method: String,
    low: f64,
    high: f64,
    /// None: no dual clip.
    dual: Option<f64>,
    /// The width of the padded batch.
    tokens_max: f64,
    group_size: Option<usize>,
    /// None: the advantages are random.
    rewards: Option<Vec<f64>>,
    policy: Vec<Vec<f64>>,
    old: Vec<Vec<f64>>,
    advantages: Vec<f64>,
    /// None: it is another one, with the same gradient.
    loss: Option<f64>,
    gradient: Vec<Vec<f64>>,
}

impl Case {
    /// The settings that docs/guide-research.md names for the method.
    fn settings(&self) -> (GroupAdvantage, Loss, Aggregation) {
        let clip = Loss::PpoClip {
            low: self.low,
            high: self.high,
            dual: self.dual,
        };
        let gspo = Loss::Gspo {
            low: self.low,
            high: self.high,
        };
        let cispo = Loss::ReinforceIs { cap: self.high };
        match &*self.method {
            "grpo" => (GroupAdvantage::Grpo, clip, Aggregation::SeqMeanTokenMean),
            "dr_grpo" => (GroupAdvantage::DrGrpo, clip, Aggregation::SeqMeanTokenSum),
            "dapo" | "ppo_clip" => (GroupAdvantage::Grpo, clip, Aggregation::TokenMean),
            "gspo" => (GroupAdvantage::Grpo, gspo, Aggregation::SeqMeanTokenMean),
            "cispo" => (GroupAdvantage::Grpo, cispo, Aggregation::TokenMean),
            "rloo" => (
                GroupAdvantage::Rloo,
                Loss::ReinforceIs { cap: 2.0 },
                Aggregation::SeqMeanTokenSum,
            ),
            other => panic!("{other}"),
        }
    }

    /// What else they divide the loss by: in Dr. GRPO a length that is always the same.
    fn constant(&self) -> f64 {
        match &*self.method {
            "dr_grpo" => self.tokens_max,
            _ => 1.0,
        }
    }

    fn of_trl() -> Vec<Case> {
        serde_json::from_str(include_str!("../../tests/golden/policy_loss.json")).unwrap()
    }

    fn of_verl() -> Vec<Case> {
        serde_json::from_str(include_str!("../../tests/golden/verl.json")).unwrap()
    }

    /// Our advantages of its rewards.
    fn computed_advantages(&self) -> Option<Vec<f64>> {
        let (kind, _, _) = self.settings();
        let groups = self.rewards.as_ref()?.chunks(self.group_size?);
        Some(groups.flat_map(|group| kind.of(group)).collect())
    }

    /// Our loss and gradient with these advantages: sums over micro-batches, with the denominator of
    /// the whole batch.
    fn computed(&self, advantages: &[f64]) -> (f64, Vec<f64>) {
        let (_, loss, aggregation) = self.settings();
        let samples: Vec<Sample> = (self.policy.iter().enumerate())
            .map(|(number, row)| Sample {
                generation: Uuid::from_u128(number as u128),
                mask: vec![true; row.len()],
                ..Sample::example()
            })
            .collect();
        let scaled = loss::scaled(aggregation, &samples, advantages);
        let counts = Counts {
            trajectories: samples.len(),
            tokens: self.policy.iter().map(Vec::len).sum(),
        };
        let denominator = loss::denominator(aggregation, counts) * self.constant();
        let (mut total, mut gradient) = (0.0, vec![]);
        for first in (0..samples.len()).step_by(MICRO_BATCH) {
            let rows = first..(first + MICRO_BATCH).min(samples.len());
            let lengths: Vec<i64> = self.policy[rows.clone()].iter().map(|row| row.len() as i64).collect();
            let advantage: Vec<f64> = (scaled[rows.clone()].iter().zip(&lengths))
                .flat_map(|(advantage, length)| vec![*advantage; *length as usize])
                .collect();
            let logp = constant(&self.policy[rows.clone()].concat()).set_requires_grad(true);
            let advantage = constant(&advantage);
            let terms = loss::terms(
                loss,
                &Tokens {
                    logp: &logp,
                    behavior: &constant(&self.old[rows].concat()),
                    advantage: &advantage,
                    lengths: &lengths,
                    kept: &vec![None; lengths.len()],
                    masked: None,
                },
            );
            let sum = terms.per_token.sum(Kind::Float) / denominator;
            sum.backward();
            total += sum.double_value(&[]);
            gradient.extend(Vec::<f32>::try_from(&logp.grad()).unwrap().into_iter().map(f64::from));
        }
        (total, gradient)
    }
}

fn constant(values: &[f64]) -> Tensor {
    Tensor::from_slice(values).to_kind(Kind::Float)
}

/// Every value must be near the other library's. Returns the largest difference, as a share of the
/// largest value.
#[track_caller]
fn compared(what: &str, got: &[f64], want: &[f64], relative: f64) -> f64 {
    assert_eq!(got.len(), want.len(), "{what}");
    for (got, want) in got.iter().zip(want) {
        let bound = 1e-6 + relative * want.abs();
        assert!((got - want).abs() <= bound, "{what}: {got} against {want}");
    }
    let largest = want.iter().fold(0.0f64, |largest, value| largest.max(value.abs()));
    let difference = got
        .iter()
        .zip(want)
        .fold(0.0f64, |most, (g, w)| most.max((g - w).abs()));
    if largest > 0.0 {
        difference / largest
    } else {
        difference
    }
}

/// Of a method and a library: the largest differences of advantage, loss and gradient.
#[derive(Default)]
struct Row {
    cases: usize,
    advantage: Option<f64>,
    loss: Option<f64>,
    gradient: Option<f64>,
}

/// By method and library.
type Table = BTreeMap<(String, &'static str), Row>;

fn worse(worst: &mut Option<f64>, difference: f64) {
    *worst = Some(worst.unwrap_or(0.0).max(difference));
}

fn print(table: &Table) {
    let cell = |value: Option<f64>| value.map_or("–".into(), |value| format!("{value:.0e}"));
    println!("| method | beside | cases | advantage | loss | gradient |\n|---|---|---|---|---|---|");
    for ((method, library), row) in table {
        let cells = [row.advantage, row.loss, row.gradient].map(cell).join(" | ");
        println!("| `{method}` | {library} | {} | {cells} |", row.cases);
    }
}

fn compare(table: &mut Table, library: &'static str, cases: Vec<Case>, relative: f64) {
    for case in cases {
        let what = format!("{} of {library}", case.method);
        let row = table.entry((case.method.clone(), library)).or_default();
        row.cases += 1;
        let advantages = case.computed_advantages();
        if let Some(advantages) = &advantages {
            worse(&mut row.advantage, compared(&what, advantages, &case.advantages, 1e-9));
        }
        let (loss, gradient) = case.computed(advantages.as_ref().unwrap_or(&case.advantages));
        if let Some(want) = case.loss {
            worse(&mut row.loss, compared(&what, &[loss], &[want], relative));
        }
        let want = case.gradient.concat();
        worse(&mut row.gradient, compared(&what, &gradient, &want, relative));
    }
}

/// What tools/golden/preference.py got from TRL: sums by trajectory, policy and reference; the mean
/// loss, and its derivative by each log π.
#[derive(Deserialize)]
struct Preferences {
    dpo: Vec<DpoCase>,
    kto: Vec<KtoCase>,
}

#[derive(Deserialize)]
struct DpoCase {
    beta: f64,
    chosen: Vec<[f64; 2]>,
    rejected: Vec<[f64; 2]>,
    loss: f64,
    gradient_chosen: Vec<f64>,
    gradient_rejected: Vec<f64>,
}

#[derive(Deserialize)]
struct KtoCase {
    beta: f64,
    desirable_weight: f64,
    undesirable_weight: f64,
    completions: Vec<[f64; 2]>,
    desirable: Vec<bool>,
    mismatched: Vec<[f64; 2]>,
    reference_point: f64,
    loss: f64,
    gradient: Vec<f64>,
}

fn of([policy, reference]: [f64; 2]) -> LogProbs {
    LogProbs { policy, reference }
}

impl DpoCase {
    /// The mean loss, and its derivatives: those of the chosen, then those of the rejected.
    fn computed(&self) -> (f64, Vec<f64>) {
        let n = self.chosen.len() as f64;
        let pairs: Vec<_> = (self.chosen.iter().zip(&self.rejected))
            .map(|(chosen, rejected)| dpo(of(*chosen), of(*rejected), self.beta))
            .collect();
        let gradient = [0, 1].map(|which| pairs.iter().map(|pair| pair.gradient[which] / n).collect::<Vec<_>>());
        (pairs.iter().map(|pair| pair.loss).sum::<f64>() / n, gradient.concat())
    }
}

impl KtoCase {
    /// The mean loss, and its derivatives.
    fn computed(&self) -> (f64, Vec<f64>) {
        let mismatched: Vec<LogProbs> = self.mismatched.iter().copied().map(of).collect();
        let point = kto_reference_point(&mismatched);
        compared("reference point of KTO", &[point], &[self.reference_point], 2e-5);
        let weight = |desirable| match desirable {
            true => self.desirable_weight,
            false => self.undesirable_weight,
        };
        let n = self.completions.len() as f64;
        let singles: Vec<_> = (self.completions.iter().zip(&self.desirable))
            .map(|(one, &desirable)| kto(of(*one), desirable, point, self.beta, weight(desirable)))
            .collect();
        let gradient = singles.iter().map(|one| one.gradient / n).collect();
        (singles.iter().map(|one| one.loss).sum::<f64>() / n, gradient)
    }
}

fn compare_preferences(table: &mut Table) {
    let Preferences { dpo, kto } = serde_json::from_str(include_str!("../../tests/golden/preference.json")).unwrap();
    let mut compare = |method: &str, (loss, gradient): (f64, Vec<f64>), want: f64, of_want: &[f64]| {
        let row = table.entry((method.to_owned(), "TRL")).or_default();
        row.cases += 1;
        worse(&mut row.loss, compared(method, &[loss], &[want], 2e-5));
        worse(&mut row.gradient, compared(method, &gradient, of_want, 2e-5));
    };
    for case in dpo {
        let want = [&case.gradient_chosen[..], &case.gradient_rejected].concat();
        compare("dpo", case.computed(), case.loss, &want);
    }
    for case in kto {
        compare("kto", case.computed(), case.loss, &case.gradient);
    }
}

/// Also of sequences without tokens, with extreme ratios, and of groups without variance.
#[test]
fn published_methods_have_the_losses_and_gradients_of_trl_and_verl() {
    let mut table = Table::new();
    compare(&mut table, "TRL", Case::of_trl(), 3e-5);
    compare(&mut table, "verl", Case::of_verl(), 1e-5);
    compare_preferences(&mut table);
    assert_eq!(table.len(), 16, "seven methods beside two libraries, two beside one");
    assert!(table.values().all(|row| row.cases >= 4));
    print(&table);
}
