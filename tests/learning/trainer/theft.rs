//! Attacks by somebody who writes to the store, with and without the trainer's key, and kills in the
//! middle of a publication: a run continues from what it wrote itself, or from nothing.

use super::world::{POLICY, World};
use artifact::checkpoint::Checkpoint;
use artifact::manifest::{Manifest, ObjectRef, Parent, RunStep};
use artifact::sign::{Role, SigningKey, TrustedKeys};
use artifact::tensor::TensorData;
use fixture::eventually;
use fixture::store::trained;
use runs::publish::{Error, run_state};
use std::path::PathBuf;
use std::time::Duration;
use store::Revocation;
use time::OffsetDateTime;
use uuid::Uuid;

const SOON: Duration = Duration::from_secs(60);

/// Where the store has the manifest of a version.
pub fn manifest_file(world: &World, version: i64) -> PathBuf {
    let store = world.stack.store_url.strip_prefix("file://").unwrap();
    PathBuf::from(format!("{store}/policy/{POLICY}/version/{version:010}.json"))
}

async fn realtime_run(world: &World) -> Uuid {
    sqlx::query_scalar("select id from run where kind = 'realtime'")
        .fetch_one(&world.stack.pool)
        .await
        .unwrap()
}

/// A thief's weights, uploaded.
async fn stolen_weights(world: &World) -> (Checkpoint, ObjectRef) {
    let base = world.materialize(world.base).await;
    let weights = trained(&base, 1);
    let bytes = weights.to_bytes().unwrap();
    let object = world.publisher.store.put_object(POLICY, &bytes).await.unwrap();
    (weights, object)
}

fn filled(tensor: &TensorData, value: f32) -> TensorData {
    let bytes = value.to_le_bytes().repeat(tensor.bytes.len() / 4);
    TensorData::new(tensor.dtype, tensor.shape.clone(), bytes).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn moments_that_somebody_replaced_in_the_store_are_not_restored() {
    let world = World::start("moments").await;
    world.follow(1, world.base, 0).await;
    world.insert_all(&world.sample(world.base, 8).await, "champion").await;
    let running = world.run(world.options());
    let first = world.head_after(world.base).await;
    running.stop().await;

    // Adam would now move every weight the same way. The hash inside is right, as are the weights.
    let run = realtime_run(&world).await;
    let key = run_state::key(run, 1, first);
    let mut state = world.publisher.read_run_state(&key, None).await.unwrap();
    for moment in state.first.values_mut() {
        *moment = filled(moment, 1e3);
    }
    for moment in state.second.values_mut() {
        *moment = filled(moment, 1e-12);
    }
    let bytes = state.encode().unwrap().bytes;
    world.publisher.store.put_private(&key, &bytes).await.unwrap();

    world.insert_all(&world.sample(first, 8).await, "champion").await;
    let running = world.run(world.options());
    let second = world.head_after(first).await;
    running.stop().await;
    let key = run_state::key(run, 2, second);
    let state = world.publisher.read_run_state(&key, None).await.unwrap();
    assert_eq!(state.optimizer_step, 1, "the optimizer is a fresh one");
    let events = world.events().await;
    assert!(
        events
            .iter()
            .any(|event| event.contains("not the run state that its step saved")),
        "{events:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thiefs_manifest_that_looks_like_the_next_step_is_not_adopted() {
    let world = World::start("thief").await;
    world.follow(1, world.base, 0).await;
    let cohort = world.sample(world.base, 8).await;
    world.insert_all(&cohort, "champion").await;
    let (run, claim) = world.claimed_run().await;
    // The thief knows run, step, cohort and fence, has the trainer's key, and takes all serials that
    // the trainer tries at once.
    let (weights, object) = stolen_weights(&world).await;
    let own = world.draft(run, &cohort).await;
    let store = &world.publisher.store;
    for version in world.base + 1..=world.base + 8 {
        let manifest = Manifest {
            policy: POLICY.into(),
            version,
            root: weights.root(),
            parent: Some(Parent {
                version: world.base,
                root: own.parent_checkpoint.root(),
            }),
            line: "realtime".into(),
            branch: 0,
            checkpoint: Some(object),
            delta: None,
            tensor_bytes: weights.tensor_bytes(),
            run: Some(RunStep {
                run,
                step: 1,
                cohort_digest: own.record.cohort_digest(),
            }),
            fence: claim.fence,
            created_at: OffsetDateTime::now_utc(),
            quantized: vec![],
            delta_shards: vec![],
            reference: None,
            adapts: None,
        };
        store.put_manifest(&manifest, &world.publisher.key).await.unwrap();
        let key = run_state::key(run, 1, version);
        store.put_private(&key, &own.run_state.bytes).await.unwrap();
    }

    let running = world.run(world.options());
    let version = world.head_after(world.base).await;
    running.stop().await;
    assert!(version > world.base + 8, "{version}");
    assert_ne!(world.materialize(version).await.root(), weights.root());
    assert_eq!(world.steps().await, 1);
    let dispositions = world.dispositions().await;
    assert!(dispositions.len() == 8 && dispositions.iter().all(|d| d.kind == "trained"));
}

#[tokio::test(flavor = "multi_thread")]
async fn other_weights_under_the_heads_number_are_not_loaded() {
    let world = World::start("replaced").await;
    let (weights, object) = stolen_weights(&world).await;
    let store = &world.publisher.store;
    let trusted = world.publisher.trusted().await.unwrap();
    let good = store.get_manifest(POLICY, world.base, &trusted).await.unwrap();
    std::fs::remove_file(manifest_file(&world, world.base)).unwrap();
    let replaced = Manifest {
        root: weights.root(),
        checkpoint: Some(object),
        ..good
    };
    store.put_manifest(&replaced, &world.publisher.key).await.unwrap();
    let refused = world.publisher.load(world.base).await;
    assert!(matches!(refused, Err(Error::OtherRoot { .. })), "{refused:?}");
}

/// The last thing that a publication had done when it was killed.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Done {
    RunState,
    Intent,
    Manifest,
    Commit,
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publication_that_is_killed_between_any_two_steps_is_adopted_or_made_again() {
    for done in [Done::RunState, Done::Intent, Done::Manifest, Done::Commit] {
        let world = World::start("killed").await;
        world.follow(1, world.base, 0).await;
        let cohort = world.sample(world.base, 8).await;
        world.insert_all(&cohort, "champion").await;
        let (run, claim) = world.claimed_run().await;
        let prepared = world.prepare(&claim, run, &cohort).await;
        let version = prepared.manifest.version;
        if matches!(done, Done::RunState | Done::Intent) {
            std::fs::remove_file(manifest_file(&world, version)).unwrap();
        }
        if done == Done::RunState {
            sqlx::query("delete from published_intent")
                .execute(&world.stack.pool)
                .await
                .unwrap();
        }
        if done == Done::Commit {
            world.publisher.commit(&claim, &prepared).await.unwrap();
        }

        let running = world.run(world.options());
        let head = world.head_after(world.base).await;
        world.settled().await;
        running.stop().await;
        let adopted = matches!(done, Done::Manifest | Done::Commit);
        assert_eq!(head == version, adopted, "{done:?}: {head}, prepared {version}");
        assert_eq!((world.line().await, world.steps().await), ((head, 0), 1), "{done:?}");
        let dispositions = world.dispositions().await;
        assert_eq!(dispositions.len(), 8, "{done:?}");
        assert!(dispositions.iter().all(|d| d.kind == "trained" && d.step == Some(1)));
        let intents: i64 = sqlx::query_scalar("select count(*) from published_intent")
            .fetch_one(&world.stack.pool)
            .await
            .unwrap();
        assert_eq!(intents, 0, "{done:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trainer_whose_key_is_revoked_pauses_and_goes_on_with_the_next_key() {
    let world = World::start("revoked").await;
    world.follow(1, world.base, 0).await;
    let (keys_dir, store) = (&world.stack.keys_dir, &world.publisher.store);
    let root = SigningKey::create(keys_dir, "root", Role::Root).unwrap();
    let next = SigningKey::create(keys_dir, "next", Role::Trainer).unwrap();
    let cohort = world.sample(world.base, 8).await;
    world.insert_all(&cohort[..4], "champion").await;
    let running = world.run(world.options());
    eventually("the run begins", SOON, async || {
        world.status().await.filter(|(status, _)| status == "running")
    })
    .await;

    let folder = TrustedKeys::load(keys_dir).unwrap();
    assert_eq!(store.resign(POLICY, &folder, &next).await.unwrap(), 1);
    let revocation = Revocation {
        policy: POLICY.into(),
        key: world.publisher.key.key_id().into(),
        reason: "stolen".into(),
        created_at: OffsetDateTime::now_utc(),
    };
    assert!(store.revoke(&revocation, &root, &folder).await.unwrap());
    world.insert_all(&cohort[4..], "champion").await;
    let reason = world.paused().await;
    assert!(reason.contains("may not sign versions"), "{reason}");
    running.stop().await;
    assert_eq!((world.line().await, world.steps().await), ((world.base, 0), 0));
    assert!(world.dispositions().await.is_empty());
    let manifests = std::fs::read_dir(manifest_file(&world, 1).parent().unwrap()).unwrap();
    assert_eq!(manifests.count(), 1, "nothing was signed");

    // As the release guide says: another key, a restart, and the run is resumed.
    std::fs::remove_file(keys_dir.join("trainer.key")).unwrap();
    std::fs::rename(keys_dir.join("trainer.pub"), keys_dir.join("trainer-old.pub")).unwrap();
    for extension in ["key", "pub"] {
        let file = |name: &str| keys_dir.join(format!("{name}.{extension}"));
        std::fs::rename(file("next"), file("trainer")).unwrap();
    }
    sqlx::query("update run set status = 'queued', reason = null where kind = 'realtime'")
        .execute(&world.stack.pool)
        .await
        .unwrap();
    let running = world.run(world.options());
    world.head_after(world.base).await;
    running.stop().await;
    assert_eq!(world.dispositions().await.len(), 8);
}
