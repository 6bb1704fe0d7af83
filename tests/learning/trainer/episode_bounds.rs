//! What one session may do: hold its surface back, weigh, be huge, or come twice.

use super::episodes::{close, code, limits, log, poll, selected, turn};
use super::world::{POLICY, Sampled, TEST, World};
use edge::tenant;
use runs::advantage::Credit;
use runs::claim::Claim;
use runs::select::caps::Caps;
use runs::select::{self, Selection};
use uuid::Uuid;

fn ids(selection: &Selection) -> Vec<Vec<Uuid>> {
    let ids = |turns: &Vec<runs::sample::Sample>| turns.iter().map(|turn| turn.generation).collect();
    selection.ready.iter().map(ids).collect()
}

/// Two turns that continue each other, sampled by the base version.
async fn two_turns(world: &World) -> [Sampled; 2] {
    let mut context = Vec::new();
    let first = turn(world, world.base, &mut context, &[7, 3, 9]).await;
    [first, turn(world, world.base, &mut context, &[1, 2]).await]
}

async fn session(world: &World, reward: f64, rewards: &[Option<f64>]) -> [Sampled; 2] {
    let (episode, turns) = (Uuid::now_v7(), two_turns(world).await);
    log(world, episode, 0, 0, &turns).await;
    close(world, episode, reward, rewards).await;
    turns
}

/// Turns that came when their session had closed, as ingest closes too many of them.
async fn close_late(world: &World, episode: Uuid, turns: &[Sampled]) {
    log(world, episode, 7, 0, turns).await;
    sqlx::query(
        "with closed as (delete from open_generation where episode_id = $1 returning generation_id)
         insert into trajectory (generation_id, surface, reward_definition, censor_code, episode_id, episode_turns)
         select g.id, g.surface, 1, 'too_many_turns', $1, 4097 from closed join generation g on g.id = closed.generation_id",
    )
    .bind(episode)
    .execute(&world.stack.pool)
    .await
    .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn turns_that_come_after_a_session_has_closed_neither_stop_it_nor_the_run() {
    let world = World::start("late_turns").await;
    world.follow(1, world.base, 0).await;
    let (_, claim) = world.claimed_run().await;
    // of one session they have smaller ids than its turns, of the other larger ones
    let older = world.sample(world.base, 2).await;
    let (first, second) = (two_turns(&world).await, two_turns(&world).await);
    let younger = world.sample(world.base, 2).await;
    let episodes = [Uuid::now_v7(), Uuid::now_v7()];
    for (episode, turns, late) in [(episodes[0], &first, &older), (episodes[1], &second, &younger)] {
        log(&world, episode, 0, 0, turns).await;
        close(&world, episode, 0.75, &[Some(0.5), None]).await;
        close_late(&world, episode, late).await;
    }
    let versions = [world.base];
    let trajectories = selected(&world, &claim, &versions, &limits(), 8, &[]).await;
    let whole = [[first[0].id, first[1].id], [second[0].id, second[1].id]];
    let found: Vec<Vec<Uuid>> = trajectories
        .iter()
        .map(|turns| turns.iter().map(|turn| turn.generation).collect())
        .collect();
    assert_eq!(found, whole);
    for turns in &trajectories {
        let places = turns.iter().map(|turn| turn.turn.as_ref().unwrap());
        let places: Vec<(usize, usize)> = places.map(|place| (place.index, place.rewards.len())).collect();
        assert_eq!(places, [(0, 2), (1, 2)], "late turns are none of the session");
    }
}

/// What a poll selects if turns are credited like this.
async fn credited(world: &World, claim: &Claim, credit: Credit, discount: f64) -> Selection {
    poll(world, claim, (&[world.base], &limits()), (8, &[]), |criteria| {
        (criteria.credit, criteria.discount) = (credit, discount);
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_with_a_return_outside_the_bounds_is_dropped() {
    let world = World::start("returns").await;
    world.follow(1, world.base, 0).await;
    let (_, claim) = world.claimed_run().await;
    // each reward is within −1 and 1; returns of the first are 1.25 and 0.75, of the others 1 and 0.5
    let large = session(&world, 0.75, &[Some(0.5), None]).await;
    let good = session(&world, 0.5, &[Some(0.5), None]).await;
    let bad = session(&world, 0.5, &[None, Some(f64::NAN)]).await;
    let all = [&large, &good, &bad].map(|turns| turns.iter().map(|turn| turn.id).collect::<Vec<_>>());
    let selected = credited(&world, &claim, Credit::Trajectory, 1.0).await;
    assert_eq!(ids(&selected), all, "turns' own rewards do not count");
    let selected = credited(&world, &claim, Credit::ToGo, 0.5).await;
    assert_eq!(ids(&selected), all[..2], "0.5 + 0.5 · 0.75 is within the bounds");
    assert_eq!(code(&world, bad[0].id).await, "reward_not_finite");
    let selected = credited(&world, &claim, Credit::Turn, 1.0).await;
    assert_eq!(ids(&selected), all[..2]);
    let selected = credited(&world, &claim, Credit::ToGo, 1.0).await;
    assert_eq!(ids(&selected), all[1..2]);
    for turn in &large {
        assert_eq!(code(&world, turn.id).await, "quarantined_reward", "all of it");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_is_too_large_is_dropped_with_an_event_and_the_others_go_on() {
    let world = World::start("too_large").await;
    world.follow(1, world.base, 0).await;
    // 3 + 5, and 3 + 5 + 2 + 5 tokens
    let large = session(&world, 0.75, &[None, None]).await;
    world.insert_all(&world.sample(world.base, 8).await, "champion").await;
    let (_, claim) = world.claimed_run().await;
    let selected = poll(&world, &claim, (&[world.base], &limits()), (8, &[]), |criteria| {
        criteria.trajectory_tokens_max = 23;
    })
    .await;
    assert_eq!((selected.too_large, selected.ready[0].len()), (None, 2));
    let mut options = world.options();
    options.realtime.trajectory_tokens_max = 22;
    sqlx::query("delete from run").execute(&world.stack.pool).await.unwrap();
    let running = world.run(options);
    world.head_after(world.base).await;
    running.stop().await;
    for turn in &large {
        assert_eq!(code(&world, turn.id).await, "too_large");
    }
    let event = world.events().await.remove(0);
    let last = large[1].id;
    assert!(event.contains(&format!("ends with {last} has 23 tokens")), "{event}");
    assert!(event.contains("trajectory_tokens_max is 22"), "{event}");
}

#[tokio::test(flavor = "multi_thread")]
async fn turns_that_nobody_would_train_on_do_not_move_the_end_of_a_cohort() {
    let world = World::start("open_foreign").await;
    world.follow(1, world.base, 0).await;
    let (_, claim) = world.claimed_run().await;
    let select = async || {
        let trajectories = selected(&world, &claim, &[world.base], &limits(), 8, &[]).await;
        let first: Vec<Uuid> = trajectories.iter().map(|turns| turns[0].generation).collect();
        first
    };
    let episode = Uuid::now_v7();
    let first = turn(&world, world.base, &mut vec![], &[7, 3, 9]).await;
    let waiting = world.sample(world.base, 1).await.remove(0);
    let mut later = world.sample(world.base, 4).await;
    log(&world, episode, 0, 0, std::slice::from_ref(&first)).await;
    world.insert(&waiting, "champion").await;
    assert_eq!(select().await, [first.id; 0], "it waits for the session");
    // a sub-agent asks another arm, another tenant knows the session's id, somebody forges a turn
    later[1].tenant = "guest".into();
    log(&world, episode, 0, 1, &later[..3]).await;
    let pool = &world.stack.pool;
    sqlx::query("update generation set arm = 'base' where id = $1")
        .bind(later[0].id)
        .execute(pool)
        .await
        .unwrap();
    tenant::consent(pool, POLICY, "guest", TEST, "").await.unwrap();
    sqlx::query("update open_generation set proven = false where generation_id = $1")
        .bind(later[2].id)
        .execute(pool)
        .await
        .unwrap();
    assert_eq!(select().await, [first.id; 0]);
    // the session itself goes on
    log(&world, episode, 0, 4, &later[3..]).await;
    sqlx::query("delete from open_generation where generation_id = $1")
        .bind(later[1].id)
        .execute(pool)
        .await
        .unwrap();
    assert_eq!(select().await, [waiting.id]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_window_of_the_caps_is_read_past_the_rows_of_tenants_that_left() {
    let world = World::start("leavers").await;
    let pool = &world.stack.pool;
    let (run, _) = world.claimed_run().await;
    tenant::consent(pool, POLICY, "guest", TEST, "").await.unwrap();
    let mut trained = world.sample(world.base, 12).await;
    for (n, one) in trained.iter_mut().enumerate() {
        one.user = format!("user-{}", n % 3);
        one.tenant = if n < 6 { "default" } else { "guest" }.into();
    }
    for (n, one) in trained.iter().enumerate() {
        world.insert(one, "champion").await;
        sqlx::query("insert into disposition (generation_id, kind, run_id, step) values ($1, 'trained', $2, $3)")
            .bind(one.id)
            .bind(run)
            .bind(if n < 6 { 1 } else { 2 })
            .execute(pool)
            .await
            .unwrap();
    }
    // one generation without any trained token counts as one
    sqlx::query("update generation set train_mask = '{f,f,f,f,f}' where id = $1")
        .bind(trained[0].id)
        .execute(pool)
        .await
        .unwrap();
    let caps = Caps {
        window: 6,
        ..Caps::default()
    };
    let train = world.stack.pool_of("train");
    let users = async || select::trained(&train, run, caps).await.unwrap().users();
    assert_eq!(users().await, 3, "the guest's users");
    tenant::withdraw(pool, POLICY, "guest", TEST, "").await.unwrap();
    let recent = select::trained(&train, run, caps).await.unwrap();
    // 10 of 5 + 1 + 10 + 10 tokens, in six trajectories
    assert_eq!((recent.users(), recent.largest_user_share()), (3, 10.0 / 26.0));
}
