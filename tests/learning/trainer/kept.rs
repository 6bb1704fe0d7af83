//! How much a user kept is selected as tokens. How they are counted and what the loss makes of them is tested in
//! `trainer/src/learn`.

use super::episodes::poll;
use super::grammar::{END, checkpoint};
use super::world::World;
use text::kept::Kept;
use trainer::learn::learner::Learner;

#[tokio::test(flavor = "multi_thread")]
async fn kept_characters_become_tokens_that_were_right_and_a_word_that_was_wrong() {
    let world = World::start_from("kept", checkpoint()).await;
    let (_, claim) = world.claimed_run().await;
    let mut sampled = world.sample(world.base, 4).await;
    for (nth, one) in sampled.iter_mut().enumerate() {
        one.tokens = b"ab cd".iter().map(|&byte| u32::from(byte)).collect();
        // a text that the request named ended the last one
        one.tokens.extend((nth < 3).then_some(END));
        one.logprobs = vec![-1.0; one.tokens.len()];
        one.suppressed = false;
        one.reward = Some(-0.25);
    }
    world.insert_all(&sampled, "champion").await;
    for (one, characters) in sampled.iter().zip([Some(2), Some(1), None, Some(2)]) {
        sqlx::query("update trajectory set kept_characters = $2 where generation_id = $1")
            .bind(one.id)
            .bind(characters)
            .execute(&world.stack.pool)
            .await
            .unwrap();
    }
    let learner = Learner::from_checkpoint(world.materialize(world.base).await).unwrap();
    let limits = learner.model_limits();
    let selected = poll(&world, &claim, (&[world.base], &limits), (8, &[]), |_| {}).await;
    let kept = |id| {
        let mut samples = selected.ready.iter().flatten();
        samples.find(|sample| sample.generation == id).unwrap().kept
    };
    assert_eq!(kept(sampled[0].id), Some(Kept { right: 2, wrong: 3 }));
    assert_eq!(kept(sampled[1].id), Some(Kept { right: 1, wrong: 1 }));
    assert_eq!(kept(sampled[2].id), None);
    assert_eq!(kept(sampled[3].id), None);
}
