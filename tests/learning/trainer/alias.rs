//! Which alias the realtime run learns from, when the files of `control` and `train` differ.

use super::SOON;
use super::world::{POLICY, World};
use fixture::eventually;
use release::{Learning, LearningAlias, Options as ReleaseOptions, ReleaseService};
use store::Store;

/// The releases of a `control` whose file has arms without `learner`.
fn old_control(world: &World) -> ReleaseService {
    let options = ReleaseOptions {
        arms: ReleaseOptions::arms_without_learner(),
        ..ReleaseOptions::default()
    };
    let learning = Learning {
        alias: LearningAlias::by_arms(&options.arms),
        enabled: true,
    };
    service(world, options, learning)
}

fn service(world: &World, options: ReleaseOptions, learning: Learning) -> ReleaseService {
    let store = Store::open(&world.stack.store_url).unwrap();
    let pool = world.stack.pool_of("control");
    ReleaseService::new(options, learning, POLICY, pool, store, &world.stack.keys_dir, None).unwrap()
}

/// A trainer whose file names this alias.
fn naming(world: &World, alias: Option<&str>) -> runs::Options {
    let mut options = world.options();
    options.realtime.alias = alias.map(str::to_owned);
    options
}

async fn kinds(world: &World) -> Vec<String> {
    let decided = world.dispositions().await;
    decided.into_iter().map(|one| one.code.unwrap_or(one.kind)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trainer_learns_from_the_arms_in_force_whatever_its_own_file_says() {
    let world = World::start("other_files").await;
    // before `control` has run at all, there is nothing to say
    let running = world.run(naming(&world, None));
    world.settled().await;
    assert_eq!(world.events().await, [""; 0]);
    running.stop().await;

    old_control(&world).round().await.unwrap();
    world.insert_all(&world.sample(world.base, 8).await, "champion").await;
    // a file that names the arm that these arms do not have
    let running = world.run(naming(&world, Some("learner")));
    eventually("the run says what to do", SOON, async || {
        let advised = |event: &String| event.contains("sets nothing aside") && event.contains("remove the setting");
        world.events().await.iter().any(advised).then_some(())
    })
    .await;
    world.settled().await;
    assert_eq!(kinds(&world).await, [""; 0], "nothing is held out");
    running.stop().await;
    // a file that says nothing
    let running = world.run(naming(&world, None));
    world.head_after(world.base).await;
    running.stop().await;
    assert_eq!(kinds(&world).await, ["trained"; 8]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_of_the_learning_arm_is_an_event_that_says_what_is_held_out() {
    let world = World::start("changed_alias").await;
    // as the version before left it: assignments, and no row of arms
    world.follow(1, world.base, 0).await;
    world.insert_all(&world.sample(world.base, 8).await, "champion").await;
    let running = world.run(naming(&world, None));
    let head = world.head_after(world.base).await;
    assert_eq!(kinds(&world).await, ["trained"; 8], "learned from champion, as before");
    assert_eq!(world.events().await, [""; 0]);

    service(&world, ReleaseOptions::default(), Learning::default())
        .round()
        .await
        .unwrap();
    let event = eventually("the run learns from learner", SOON, async || {
        let events = world.events().await;
        events
            .into_iter()
            .find(|event| event.starts_with("learns from `learner`"))
    })
    .await;
    assert!(event.contains("`held_out`"), "{event}");
    world.insert_all(&world.sample(head, 2).await, "champion").await;
    world.insert_all(&world.sample(head, 8).await, "learner").await;
    world.head_after(head).await;
    running.stop().await;
    let mut codes = kinds(&world).await;
    codes.sort();
    assert_eq!(codes[..2], ["other_arm"; 2]);
    assert_eq!(codes[2..], ["trained"; 16]);
    // a restart does not say it again
    let running = world.run(naming(&world, None));
    world.settled().await;
    running.stop().await;
    let said = world.events().await;
    assert_eq!(
        said.iter().filter(|event| event.starts_with("learns from")).count(),
        1,
        "{said:?}"
    );
}
