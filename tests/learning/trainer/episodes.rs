//! Sessions as trajectories: an episode joins a cohort as a whole, and each of its turns is trained
//! on, or has its reason why not.

use super::context::shorten;
use super::world::{POLICY, Sampled, World, generate};
use model::exact::ExactModel;
use runs::advantage::{BaselineKind, Credit};
use runs::claim::Claim;
use runs::sample::{ModelLimits, Sample};
use runs::select::caps::{Caps, Exhausted};
use runs::select::{self, AnswerTimes, Answers, Criteria, Selection};
use uuid::Uuid;

/// Answers a prompt that continues `context`, which then has both.
pub async fn turn(world: &World, version: i64, context: &mut Vec<u32>, prompt: &[u32]) -> Sampled {
    context.extend(prompt);
    let checkpoint = world.materialize(version).await;
    let model = ExactModel::from_checkpoint(&checkpoint).unwrap();
    let (tokens, logprobs) = generate(&model, context, u64::from(context[0]), None);
    let like = world.sample(version, 1).await.remove(0);
    let turn = Sampled {
        prompt: context.clone(),
        tokens,
        logprobs,
        suppressed: false,
        user: "session".into(),
        ..like
    };
    context.extend(&turn.tokens);
    turn
}

/// Logs turns of a session, which stays open.
pub async fn log(world: &World, episode: Uuid, segment: i32, first: usize, turns: &[Sampled]) {
    for (number, turn) in turns.iter().enumerate() {
        world.insert_open(turn, "champion").await;
        sqlx::query("update generation set episode_id = $2, segment = $3, turn = $4 where id = $1")
            .bind(turn.id)
            .bind(episode)
            .bind(segment)
            .bind(i32::try_from(first + number).unwrap())
            .execute(&world.stack.pool)
            .await
            .unwrap();
        sqlx::query("update open_generation set episode_id = $2 where generation_id = $1")
            .bind(turn.id)
            .bind(episode)
            .execute(&world.stack.pool)
            .await
            .unwrap();
    }
}

/// Closes a session, as ingest does: all turns in one transaction. `rewards`: by turn.
pub async fn close(world: &World, episode: Uuid, reward: f64, rewards: &[Option<f64>]) {
    sqlx::query(
        "with closed as (delete from open_generation where episode_id = $1 returning generation_id)
         insert into trajectory (generation_id, surface, reward_definition, reward, episode_id, episode_turns, turn_reward)
         select g.id, g.surface, 1, $2, $1, (count(*) over ())::integer, ($3::double precision[])[g.turn + 1]
         from closed join generation g on g.id = closed.generation_id",
    )
    .bind(episode)
    .bind(reward)
    .bind(rewards)
    .execute(&world.stack.pool)
    .await
    .unwrap();
}

/// Trains on four generations. Returns the head.
pub async fn second_version(world: &World) -> i64 {
    world.follow(1, world.base, 0).await;
    world.insert_all(&world.sample(world.base, 4).await, "champion").await;
    let running = world.run(options(world));
    let head = world.head_after(world.base).await;
    running.stop().await;
    head
}

fn options(world: &World) -> runs::Options {
    let mut options = world.options();
    options.realtime.cohort_size = 4;
    options
}

pub fn limits() -> ModelLimits {
    ModelLimits {
        context: 64,
        vocabulary: 61,
        ..ModelLimits::default()
    }
}

/// What a poll selects, with room for `room` trajectories beside those that end with `joined`.
pub async fn selected(
    world: &World,
    claim: &Claim,
    versions: &[i64],
    limits: &ModelLimits,
    room: usize,
    joined: &[Uuid],
) -> Vec<Vec<Sample>> {
    poll(world, claim, (versions, limits), (room, joined), |_| {})
        .await
        .ready
}

/// What a poll with other criteria selects.
pub async fn poll(
    world: &World,
    claim: &Claim,
    (versions, limits): (&[i64], &ModelLimits),
    (room, joined): (usize, &[Uuid]),
    change: impl FnOnce(&mut Criteria<'_>),
) -> Selection {
    let (exhausted, answer_times) = (Exhausted::default(), AnswerTimes::default());
    let arms = ["champion".to_owned()];
    let mut criteria = Criteria {
        policy: POLICY,
        arms: &arms,
        answers: Answers::Sampled,
        versions,
        credit: Credit::Turn,
        discount: 1.0,
        trajectory_tokens_max: 1 << 22,
        model_limits: limits,
        room,
        joined,
        exhausted: &exhausted,
        answer_times: &answer_times,
    };
    change(&mut criteria);
    let pool = world.stack.pool_of("train");
    select::next(&pool, &world.payloads(), claim, &criteria, None)
        .await
        .unwrap()
}

fn ids(trajectories: &[Vec<Sample>]) -> Vec<Vec<Uuid>> {
    let ids = |turns: &Vec<Sample>| turns.iter().map(|turn| turn.generation).collect();
    trajectories.iter().map(ids).collect()
}

pub async fn code(world: &World, id: Uuid) -> String {
    let decided = world.dispositions().await.into_iter().find(|decided| decided.id == id);
    let decided = decided.unwrap_or_else(|| panic!("{id} is not decided"));
    decided.code.unwrap_or(decided.kind)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_over_two_versions_is_trained_on_as_one_trajectory() {
    let world = World::start("episodes").await;
    let head = second_version(&world).await;
    let episode = Uuid::now_v7();
    let (mut before, mut after) = (Vec::new(), Vec::new());
    let first = [
        turn(&world, world.base, &mut before, &[7, 3, 9]).await,
        turn(&world, world.base, &mut before, &[11, 2]).await,
    ];
    // a summary opened a new context
    let second = [
        turn(&world, head, &mut after, &[5, 1, 8, 2]).await,
        turn(&world, head, &mut after, &[4]).await,
    ];
    log(&world, episode, 0, 0, &first).await;
    log(&world, episode, 1, 2, &second).await;
    let pool = &world.stack.pool;
    let shared = [&first[0].prompt[..], &first[0].tokens[..]].concat();
    shorten(pool, first[1].id, first[0].id, &shared, &[11, 2]).await;
    sqlx::query("update generation set train_mask = '{t,f,t,t,t}' where id = $1")
        .bind(second[1].id)
        .execute(pool)
        .await
        .unwrap();
    let others = world.sample(head, 3).await;
    world.insert_all(&others, "champion").await;

    let mut options = options(&world);
    options.realtime.staleness_max = 1;
    options.realtime.credit = Credit::ToGo;
    options.realtime.discount = 0.5;
    options.realtime.baseline = BaselineKind::Ema; // all are still 0
    let running = world.run(options);
    world.settled().await;
    assert_eq!(
        world.steps().await,
        1,
        "the others are younger, so they wait for the session"
    );
    close(&world, episode, 0.75, &[None, Some(0.5), None, Some(-0.25)]).await;
    world.head_after(head).await;
    running.stop().await;

    let decided = world.dispositions().await;
    let trained: Vec<Uuid> = decided
        .iter()
        .filter(|decided| decided.kind == "trained" && decided.step == Some(2))
        .map(|decided| decided.id)
        .collect();
    let mut cohort: Vec<Uuid> = [&first[..], &second[..], &others[..]]
        .concat()
        .iter()
        .map(|one| one.id)
        .collect();
    cohort.sort_unstable();
    assert_eq!(trained, cohort);
    let metrics = world.metrics(2).await;
    let count = |pointer: &str| metrics.pointer(pointer).unwrap().as_u64().unwrap();
    assert_eq!((count("/trajectories"), count("/sequences")), (4, 7));
    assert_eq!(count("/tokens"), 34, "seven answers of five tokens, one of them masked");
    assert_eq!((count("/mismatch/tokens"), count("/stale/tokens")), (24, 10));
    assert_eq!(metrics["mismatch"]["difference_max"], 0.0);
    let moved = metrics["stale"]["difference_max"].as_f64();
    assert!(moved > Some(0.0), "the policy has moved: {moved:?}");
    // G_3 = 0.75 − 0.25, G_2 = G_3 / 2, G_1 = 0.5 + G_2 / 2, G_0 = G_1 / 2; then the others' rewards
    let advantages = [0.5, 0.25, 0.625, 0.3125, 0.75, -0.25, -0.25];
    let close = |name: &str, want: f64| {
        let got = metrics[name].as_f64().unwrap();
        assert!((got - want).abs() < 1e-9, "{name}: {got} instead of {want}");
    };
    close("advantage_mean", advantages.iter().sum::<f64>() / 7.0);
    close("reward_mean", (0.75 + 0.75 - 0.25 - 0.25) / 4.0);
    assert_eq!(world.events().await, [""; 0], "nothing was quarantined");
    let baselines: Vec<(String, f64, f64)> =
        sqlx::query_as("select class, value, weight from baseline where step = 2 order by class")
            .fetch_all(pool)
            .await
            .unwrap();
    let of_turns = [0.3125, 0.625, 0.25, 0.5].map(|to_go| 0.05 * to_go);
    assert_eq!(
        (baselines.len(), baselines[0].0.as_str(), baselines[0].2),
        (5, "completion", 3.0)
    );
    for (turn, (baseline, value)) in baselines[1..].iter().zip(of_turns).enumerate() {
        assert_eq!(
            (baseline.0.clone(), baseline.2),
            (format!("completion\u{1f}{turn}"), 1.0)
        );
        assert!((baseline.1 - value).abs() < 1e-9, "{baseline:?}");
    }
    // the session counts once for its user, also after a restart and over several pages
    let run: Uuid = sqlx::query_scalar("select id from run").fetch_one(pool).await.unwrap();
    for (window, share) in [(5, 4.0 / 5.0), (2000, 7.0 / 8.0)] {
        let caps = Caps {
            window,
            ..Caps::default()
        };
        let recent = select::trained(&world.stack.pool_of("train"), run, caps).await.unwrap();
        assert_eq!((recent.users(), recent.largest_user_share()), (2, share));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_turn_is_dropped_alone_and_a_bad_reward_drops_the_episode() {
    let world = World::start("bad_turns").await;
    let head = second_version(&world).await;
    let (mut old, mut context) = (Vec::new(), Vec::new());
    let stale = turn(&world, world.base, &mut old, &[7, 3, 9]).await;
    let mut turns = vec![];
    for prompt in [[1, 2], [3, 4], [5, 6], [7, 8]] {
        turns.push(turn(&world, head, &mut context, &prompt).await);
    }
    turns[1].temperature = 0.0;
    turns[2].logprobs[0] -= 1.0;
    let episode = Uuid::now_v7();
    log(&world, episode, 0, 0, std::slice::from_ref(&stale)).await;
    log(&world, episode, 1, 1, &turns).await;
    let impossible = [
        turn(&world, head, &mut vec![], &[9, 9]).await,
        turn(&world, head, &mut vec![], &[9, 8]).await,
    ];
    let another = Uuid::now_v7();
    log(&world, another, 0, 0, &impossible).await;
    close(&world, episode, -0.25, &[None; 5]).await;
    // with the default credit, turns' own rewards do not matter
    close(&world, another, 7.0, &[Some(f64::NAN), None]).await;
    world.insert_all(&world.sample(head, 3).await, "champion").await;
    let running = world.run(options(&world));
    world.head_after(head).await;
    running.stop().await;
    assert_eq!(code(&world, stale.id).await, "stale");
    let mut codes = vec![];
    for one in turns.iter().chain(&impossible) {
        codes.push(code(&world, one.id).await);
    }
    assert_eq!(
        codes,
        [
            "trained",
            "greedy",
            "quarantined_logprob",
            "trained",
            "quarantined_reward",
            "quarantined_reward"
        ]
    );
    let metrics = world.metrics(2).await;
    assert_eq!(
        (&metrics["trajectories"], &metrics["sequences"]),
        (&4.into(), &5.into())
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_open_session_ends_the_cohort_at_its_last_turn_and_joins_as_a_whole() {
    let world = World::start("open_sessions").await;
    world.follow(1, world.base, 0).await;
    let (_, claim) = world.claimed_run().await;
    let versions = [world.base];
    let select =
        async |room: usize, joined: &[Uuid]| ids(&selected(&world, &claim, &versions, &limits(), room, joined).await);
    let mut context = Vec::new();
    let first = turn(&world, world.base, &mut context, &[7, 3, 9]).await;
    let older = world.sample(world.base, 1).await.remove(0);
    let last = turn(&world, world.base, &mut context, &[1]).await;
    let younger = world.sample(world.base, 1).await.remove(0);
    world.insert(&older, "champion").await;
    world.insert(&younger, "champion").await;
    let episode = Uuid::now_v7();
    log(&world, episode, 0, 0, std::slice::from_ref(&first)).await;
    assert_eq!(
        select(8, &[]).await,
        [[first.id; 0]; 0],
        "its last turn so far is the oldest of all"
    );
    log(&world, episode, 0, 1, std::slice::from_ref(&last)).await;
    assert_eq!(
        select(8, &[]).await,
        [[older.id]],
        "the younger one waits for the session"
    );
    // a turn that waits for its parent
    let parent = Sampled {
        prompt: first.prompt[..1].to_vec(),
        tokens: first.prompt[1..].to_vec(),
        logprobs: vec![-1.0; 2],
        ..older.clone().renewed()
    };
    shorten(&world.stack.pool, first.id, parent.id, &first.prompt, &[]).await;
    close(&world, episode, 0.75, &[None, None]).await;
    assert_eq!(
        select(8, &[]).await,
        [[older.id], [younger.id]],
        "the session waits as a whole"
    );
    world.insert(&parent, "base").await;
    let session = vec![first.id, last.id];
    assert_eq!(
        select(8, &[]).await,
        [vec![older.id], session.clone(), vec![younger.id]]
    );
    assert_eq!(
        select(2, &[]).await,
        [vec![older.id], session],
        "room for two trajectories"
    );
    assert_eq!(select(8, &[older.id, last.id]).await, [[younger.id]], "it has joined");
    assert_eq!(world.dispositions().await.len(), 1, "the parent is of another arm");
}

/// The claim to the realtime run, taken over by the test.
pub async fn claim(world: &World) -> Claim {
    let run: Uuid = sqlx::query_scalar("select id from run where kind = 'realtime'")
        .fetch_one(&world.stack.pool)
        .await
        .unwrap();
    Claim::take(&world.stack.pool, run).await.unwrap().unwrap()
}

/// A rollout's episode ends with its run.
#[tokio::test(flavor = "multi_thread")]
async fn turns_of_a_harness_are_dropped_when_their_run_has_ended() {
    let world = World::start("ended_episode").await;
    let turns = [
        turn(&world, world.base, &mut vec![], &[9, 9]).await,
        turn(&world, world.base, &mut vec![], &[9, 8]).await,
    ];
    let episode = Uuid::now_v7();
    log(&world, episode, 0, 0, &turns).await;
    sqlx::query(
        "with ended as (
             insert into run (id, kind, policy, line, status, config) values (uuidv7(), 'grpo', $1, 'g', 'succeeded', '{}')
             returning id)
         update generation set purpose = 'rollout', run_id = ended.id from ended where episode_id = $2",
    )
    .bind(POLICY)
    .bind(episode)
    .execute(&world.stack.pool)
    .await
    .unwrap();
    close(&world, episode, 0.75, &[None, None]).await;
    let pool = world.stack.pool_of("train");
    assert_eq!(select::sweep_abandoned(&pool, POLICY).await.unwrap(), 2);
    assert_eq!(code(&world, turns[0].id).await, "run_ended");
}
