//! The trainer replays the logged experts of a mixture of experts.

use super::SOON;
use super::context::refer;
use super::world::{Sampled, World, config};
use event_log::payload::{EXPERTS, Experts};
use fixture::eventually;
use model::config::{Experts as Mixture, Family, ModelConfig, Scoring};
use model::exact::ExactModel;
use model::router::Routing;
use model::sampling;

const COUNT: u16 = 6;

pub fn mixture() -> ModelConfig {
    ModelConfig {
        family: Family::Qwen3Moe,
        experts: Some(Mixture {
            count: COUNT.into(),
            per_token: 2,
            intermediate_size: 16,
            normalize: true,
            shared: 0,
            scoring: Scoring::Softmax,
            layers: vec![true, true],
        }),
        ..config()
    }
}

/// Experts of an engine whose router differs: neither the trainer's choice nor in its order.
pub fn logged(tokens: usize, seed: usize) -> Experts {
    let of = |token: usize| {
        (0..2).flat_map(move |layer| {
            let first = (seed + 3 * token + layer) % usize::from(COUNT);
            [(first + 2) % usize::from(COUNT), first]
        })
    };
    Experts {
        first: 0,
        layers: 2,
        per_layer: 2,
        experts: COUNT,
        ids: (0..tokens).flat_map(of).map(|id| id as u16).collect(),
    }
}

/// The log-probabilities of `one`'s tokens with these experts.
fn rescored(model: &ExactModel, one: Sampled, experts: &Experts) -> Sampled {
    let mut routing = Routing::default();
    for layer in 0..2 {
        let mut ids = Vec::new();
        for token in experts.ids.chunks_exact(4) {
            let mut two: Vec<u32> = token[2 * layer..][..2].iter().map(|&id| id.into()).collect();
            two.sort_unstable();
            ids.extend(two);
        }
        routing.record(layer as i64, ids);
    }
    let ids: Vec<u32> = one.prompt.iter().chain(&one.tokens).copied().collect();
    let read = &ids[..ids.len() - 1];
    let logit_rows: Vec<usize> = (one.prompt.len() - 1..read.len()).collect();
    let pass = model.score(&[read], &logit_rows, Some(&routing)).unwrap();
    let rows = pass.logits.rows().zip(&one.tokens);
    Sampled {
        logprobs: rows
            .map(|(logits, &id)| sampling::log_prob_of(logits, &Default::default(), &Default::default(), id))
            .collect(),
        suppressed: false,
        ..one
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn logged_experts_are_replayed_and_experts_of_another_model_are_refused() {
    let world = World::start_with("experts", &mixture()).await;
    world.follow(1, world.base, 0).await;
    let pool = &world.stack.pool;
    let checkpoint = world.materialize(world.base).await;
    let model = ExactModel::from_checkpoint(&checkpoint).unwrap();
    let mut cohort = Vec::new();
    for (seed, one) in world.sample(world.base, 9).await.into_iter().enumerate() {
        let experts = logged(one.prompt.len() + one.tokens.len() - 1, seed);
        let free = one.logprobs.clone();
        let one = rescored(&model, one, &experts);
        let moved = free
            .iter()
            .zip(&one.logprobs)
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, f32::max);
        assert!(moved > 1e-3, "other experts give other log-probabilities");
        // the oldest is refused, so the poll that fills the cohort sees it
        let experts = match seed {
            0 => Experts { experts: 8, ..experts },
            _ => experts,
        };
        world.insert_open(&one, "champion").await;
        let bytes = experts.encode().unwrap();
        let payload = world.payloads().put("default", bytes.into(), EXPERTS).await.unwrap();
        refer(pool, one.id, "experts", &payload).await;
        cohort.push(one);
    }
    for one in &cohort {
        world.close(one, one.reward.unwrap()).await;
    }

    let running = world.run(world.options());
    world.head_after(world.base).await;
    eventually("everything is decided", SOON, async || {
        (world.dispositions().await.len() == 9).then_some(())
    })
    .await;
    running.stop().await;
    let metrics = world.metrics(1).await;
    assert_eq!(metrics["replayed"], 8);
    assert_eq!(metrics["mismatch"]["difference_max"], 0.0);
    let dispositions = world.dispositions().await;
    let refused = dispositions.iter().find(|one| one.id == cohort[0].id).unwrap();
    assert_eq!(refused.code.as_deref(), Some("experts_differ"));
}
