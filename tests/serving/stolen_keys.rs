//! Releases after a theft and after a loss: the next leader goes on at an epoch that is free in the
//! store, and replicas with and without a history follow.

use artifact::assignment::{Assignment, Target};
use artifact::sign::{Role, SigningKey, TrustedKeys};
use fixture::Stack;
use fixture::serving::{Publisher, releases, serve, wait_for};
use std::collections::BTreeMap;
use std::fs;
use store::{Revocation, Store};
use time::OffsetDateTime;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// Signs an assignment of `champion` to version 1.
async fn forge(store: &Store, publisher: &Publisher<'_>, epoch: i64, thief: &SigningKey) {
    let root = publisher.checkpoints[&1].root();
    let assignment = Assignment {
        policy: "demo".into(),
        epoch,
        aliases: BTreeMap::from([("champion".into(), Target { version: 1, root })]),
        arms: vec![],
        cluster_arms: BTreeMap::new(),
        shadow: 0.0,
        salt: String::new(),
        created_at: OffsetDateTime::now_utc(),
    };
    assert!(store.put_assignment(&assignment, thief).await.unwrap());
}

/// `control`'s release loop, as production runs it.
struct Leader {
    stop: CancellationToken,
    task: JoinHandle<anyhow::Result<()>>,
}

impl Leader {
    fn start(stack: &Stack) -> Self {
        let stop = CancellationToken::new();
        let task = tokio::spawn(release::run(releases(stack), stop.clone()));
        Leader { stop, task }
    }

    async fn stop(self) {
        self.stop.cancel();
        self.task.await.unwrap().unwrap();
    }
}

async fn newest_epoch(stack: &Stack) -> i64 {
    sqlx::query_scalar("select max(epoch) from assignment")
        .fetch_one(&stack.pool)
        .await
        .unwrap()
}

/// Writes a file that is no assignment in the place of an epoch's, as who has no key.
fn occupy(stack: &Stack, epoch: i64) {
    let store = stack.store_url.strip_prefix("file://").unwrap();
    let file = format!("{store}/policy/demo/assignment/{epoch:010}.json");
    fs::write(file, "{}").unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn releases_go_on_after_the_release_key_was_stolen_and_revoked() {
    let stack = Stack::start("stolen").await;
    let keys = &stack.keys_dir;
    let root = SigningKey::create(keys, "root", Role::Root).unwrap();
    let mut publisher = Publisher::new(&stack);
    publisher.publish(1, None, 0).await;
    let leader = Leader::start(&stack);
    let running = serve(&stack, None, stack.dir.path().join("running")).await;
    wait_for(&running.url, "demo@champion", 1).await;
    publisher.publish(2, Some(1), 0).await;
    wait_for(&running.url, "demo@champion", 2).await;
    leader.stop().await;

    let store = Store::open(&stack.store_url).unwrap();
    let thief = SigningKey::load_or_create(keys, "release").unwrap();
    forge(&store, &publisher, 3, &thief).await;
    forge(&store, &publisher, 9_999_999_999, &thief).await;
    let revocation = Revocation {
        policy: "demo".into(),
        key: thief.key_id().into(),
        reason: "stolen".into(),
        created_at: OffsetDateTime::now_utc(),
    };
    let folder = TrustedKeys::load(keys).unwrap();
    assert!(store.revoke(&revocation, &root, &folder).await.unwrap());
    let error = format!("{:#}", releases(&stack).round().await.unwrap_err());
    assert!(error.contains("is revoked"), "{error}");

    fs::remove_file(keys.join("release.key")).unwrap();
    fs::rename(keys.join("release.pub"), keys.join("release-old.pub")).unwrap();
    publisher.publish(3, Some(2), 0).await;
    // The aliases are stated again at 4, above the thief's 3. Then `champion` moves.
    let leader = Leader::start(&stack);
    wait_for(&running.url, "demo@champion", 3).await;
    assert_eq!(newest_epoch(&stack).await, 5);
    let fresh = serve(&stack, None, stack.dir.path().join("fresh")).await;
    wait_for(&fresh.url, "demo@champion", 3).await;

    // The thief takes the next epochs while the new leader leads. `champion` moves at 6 in the
    // tables; the aliases are stated again at 8.
    forge(&store, &publisher, 6, &thief).await;
    forge(&store, &publisher, 7, &thief).await;
    publisher.publish(4, Some(3), 0).await;
    for replica in [running, fresh] {
        wait_for(&replica.url, "demo@champion", 4).await;
        replica.stop().await;
    }
    assert_eq!(newest_epoch(&stack).await, 8);
    leader.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn junk_in_the_store_moves_epochs_by_one_each_and_not_far_in_an_hour() {
    let stack = Stack::start("junk").await;
    let mut publisher = Publisher::new(&stack);
    publisher.publish(1, None, 0).await;
    let releases = releases(&stack);
    assert_eq!(releases.round().await.unwrap().epoch, 1);
    // Far above the newest epoch: not in the way.
    for far in [50, 1_000, 10_001] {
        occupy(&stack, far);
    }
    publisher.publish(2, Some(1), 0).await;
    assert_eq!(releases.round().await.unwrap().epoch, 2);
    // In the way: the aliases are stated again at 5.
    occupy(&stack, 3);
    occupy(&stack, 4);
    publisher.publish(3, Some(2), 0).await;
    assert_eq!(releases.round().await.unwrap().epoch, 6);

    // Documents that verify, because the key is stolen too: releases go on above them, but not far
    // in an hour. Of the epochs up to 9,996 four were used, so 9,992 are skipped.
    let store = Store::open(&stack.store_url).unwrap();
    let thief = SigningKey::load_or_create(&stack.keys_dir, "release").unwrap();
    forge(&store, &publisher, 9_996, &thief).await;
    assert_eq!(releases.round().await.unwrap().epoch, 9_997);
    forge(&store, &publisher, 10_047, &thief).await;
    let error = format!("{:#}", releases.round().await.unwrap_err());
    assert!(error.contains("skip 10042 epochs within an hour"), "{error}");
    assert_eq!(newest_epoch(&stack).await, 9_997);
    sqlx::query("update assignment set created_at = created_at - interval '2 hours'")
        .execute(&stack.pool)
        .await
        .unwrap();
    assert_eq!(releases.round().await.unwrap().epoch, 10_048);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn releases_go_on_after_the_database_lost_its_newest_epoch() {
    let stack = Stack::start("lost").await;
    let mut publisher = Publisher::new(&stack);
    publisher.publish(1, None, 0).await;
    releases(&stack).round().await.unwrap();
    publisher.publish(2, Some(1), 0).await;
    assert_eq!(releases(&stack).round().await.unwrap().epoch, 2);
    let replica = serve(&stack, None, stack.dir.path().join("serve")).await;
    wait_for(&replica.url, "demo@champion", 2).await;
    // As after a restore from a backup. Epoch 2 is in the store and with the replica.
    sqlx::query("delete from assignment where epoch = 2")
        .execute(&stack.pool)
        .await
        .unwrap();
    publisher.publish(3, Some(2), 0).await;
    assert_eq!(releases(&stack).round().await.unwrap().epoch, 4);
    wait_for(&replica.url, "demo@champion", 3).await;
    replica.stop().await;
}
