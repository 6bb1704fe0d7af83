//! Releases after a theft and after a loss: the next leader goes on at an epoch that is free in the
//! store, and replicas with and without a history follow.

use crate::serving::{Publisher, releases, serve, wait_for};
use crate::support::Stack;
use artifact::assignment::{Assignment, Target};
use artifact::sign::{Role, SigningKey, TrustedKeys};
use std::collections::BTreeMap;
use std::fs;
use store::{Revocation, Store};
use time::OffsetDateTime;

/// Signs an assignment of `champion` to version 1.
async fn forge(store: &Store, publisher: &Publisher<'_>, epoch: i64, thief: &SigningKey) {
    let root = publisher.checkpoints[&1].root();
    let assignment = Assignment {
        policy: "demo".into(),
        epoch,
        aliases: BTreeMap::from([("champion".into(), Target { version: 1, root })]),
        arms: vec![],
        created_at: OffsetDateTime::now_utc(),
    };
    assert!(store.put_assignment(&assignment, thief).await.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn releases_go_on_after_the_release_key_was_stolen_and_revoked() {
    let stack = Stack::start("stolen").await;
    let keys = &stack.keys_dir;
    let root = SigningKey::create(keys, "root", Role::Root).unwrap();
    let mut publisher = Publisher::new(&stack);
    publisher.publish(1, None, 0).await;
    releases(&stack).round().await.unwrap();
    publisher.publish(2, Some(1), 0).await;
    assert_eq!(releases(&stack).round().await.unwrap().epoch, 2);
    let running = serve(&stack, None, stack.dir.path().join("running")).await;
    wait_for(&running.url, "demo@champion", 2).await;

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
    let next = releases(&stack);
    assert_eq!(next.round().await.unwrap().epoch, 5);
    wait_for(&running.url, "demo@champion", 3).await;
    let fresh = serve(&stack, None, stack.dir.path().join("fresh")).await;
    wait_for(&fresh.url, "demo@champion", 3).await;

    // The thief takes the next epochs too.
    forge(&store, &publisher, 6, &thief).await;
    forge(&store, &publisher, 7, &thief).await;
    publisher.publish(4, Some(3), 0).await;
    assert_eq!(next.round().await.unwrap().epoch, 9);
    for replica in [running, fresh] {
        wait_for(&replica.url, "demo@champion", 4).await;
        replica.stop().await;
    }
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
