//! Several external machines → one version → serving: each uploads a shard of the delta and one
//! publishes, by commands on a real store, database and log.

use artifact::checkpoint::Checkpoint;
use fixture::serving;
use fixture::store::{json, name, policy, trained, world};
use store::Store;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shards_of_several_machines_become_one_version_and_are_served() {
    let (stack, publisher, base_checkpoint, base) = world("shards").await;
    let releases = serving::releases(&stack);
    releases.round().await.unwrap();
    let replica = serving::serve(&stack, None, stack.dir.path().join("serve")).await;
    serving::wait_for(&replica.url, "demo@champion", base).await;

    let (parent, before) = (base.to_string(), stack.dir.path().join("before"));
    json(&stack, &["pull", &parent, name(&before), "--json"], false).await;
    // Ranks write weights and one file, which differs.
    let mut checkpoint = trained(&base_checkpoint, 1);
    checkpoint.files.retain(|file, _| file == "generation_config.json");
    checkpoint
        .files
        .insert("generation_config.json".into(), "{\"do_sample\": true}".into());
    let after = stack.dir.path().join("after");
    checkpoint.write_shards(&after, 4_096).unwrap();

    let upload = async |shard: &str| {
        let arguments = [
            "shard",
            name(&after),
            "--base",
            name(&before),
            "--name",
            "step-1",
            "--shard",
            shard,
            "--json",
        ];
        json(&stack, &arguments, false).await
    };
    let publish = async |parent: &str, base: &str| {
        let arguments = [
            "publish",
            name(&after),
            "--line",
            "realtime",
            "--parent",
            parent,
            "--shards",
            "step-1",
            "--of",
            "4",
            "--base",
            base,
            "--json",
        ];
        policy(&stack, &arguments, true).await
    };
    tokio::join!(upload("1/4"), upload("2/4"), upload("4/4"));
    let (success, _, stderr) = publish(&parent, name(&before)).await;
    assert!(!success && stderr.contains("shard 3 of 4 of `step-1`"), "{stderr}");
    // A writer of the store can neither swap nor forge shards.
    let store = Store::open(&stack.store_url).unwrap();
    let of_first = store.get_private("shares/demo/step-1/1-of-4").await.unwrap();
    let mut envelope: serde_json::Value = serde_json::from_slice(&of_first).unwrap();
    envelope["payload"] = "e30=".into();
    let changed = serde_json::to_vec(&envelope).unwrap().into();
    for (report, reason) in [(of_first, "it is shard 1 of 4"), (changed, "signature")] {
        store.put_private("shares/demo/step-1/3-of-4", &report).await.unwrap();
        let (success, _, stderr) = publish(&parent, name(&before)).await;
        assert!(
            !success && stderr.contains("shard 3 of 4") && stderr.contains(reason),
            "{stderr}"
        );
    }
    // Uploading twice is harmless.
    upload("3/4").await;
    upload("3/4").await;
    // Another folder is another base.
    let (success, _, stderr) = publish(&parent, name(&after)).await;
    assert!(!success && stderr.contains("policy pull"), "{stderr}");
    let (success, stdout, stderr) = publish(&parent, name(&before)).await;
    assert!(success, "{stderr}");
    let published: serde_json::Value = serde_json::from_str(&stdout).unwrap();
    let version = published["version"].as_i64().unwrap();
    // Four shards and the file.
    assert_eq!(published["delta_shards"].as_array().unwrap().len(), 5);

    assert_eq!(releases.round().await.unwrap().changes, 2, "learner and champion");
    serving::wait_for(&replica.url, "demo@champion", version).await;

    // A pull fetches only the delta, and gets the same content.
    let mut expected = checkpoint.clone();
    for (file, bytes) in &base_checkpoint.files {
        expected.files.entry(file.clone()).or_insert_with(|| bytes.clone());
    }
    let pulled = json(&stack, &["pull", "champion", name(&before), "--json"], false).await;
    assert_eq!(pulled["fetched_bytes"], published["delta_bytes"]);
    assert_eq!(Checkpoint::read_dir(&before).unwrap(), expected);
    assert_eq!(published["root"], expected.root().to_string());
    let serial = version.to_string();
    let (success, stdout, stderr) = policy(&stack, &["verify", &serial, "--deep"], false).await;
    assert!(success, "{stdout}{stderr}");
    let (success, stdout, stderr) = policy(&stack, &["inspect", &serial], false).await;
    assert!(success && stdout.contains("5 of 5"), "{stdout}{stderr}");
    let (success, stdout, stderr) = policy(&stack, &["fsck", "--deep"], false).await;
    assert!(success, "{stdout}{stderr}");

    // The uploads are deleted, and a stale trainer is refused.
    let (success, _, stderr) = publish(&parent, name(&before)).await;
    assert!(
        !success && stderr.contains(&format!("is at version {version}")),
        "{stderr}"
    );
    assert!(store.get_private("shares/demo/step-1/1-of-4").await.is_err());

    // One machine publishes the next version, with a checkpoint.
    let next = stack.dir.path().join("next");
    trained(&expected, 2).write_dir(&next).unwrap();
    let arguments = [
        "publish",
        name(&next),
        "--line",
        "realtime",
        "--parent",
        &serial,
        "--checkpoint",
        "--json",
    ];
    let second = json(&stack, &arguments, true).await;
    assert!(second["image_bytes"].is_u64());
    drop(publisher);
    replica.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shards_that_do_not_fit_are_refused() {
    let (stack, _publisher, checkpoint, base) = world("unfit-shards").await;
    let folder = |name: &str| stack.dir.path().join(name);
    checkpoint.write_dir(&folder("before")).unwrap();
    let mut other = trained(&checkpoint, 1);
    let (first, tensor) = other.tensors.pop_first().unwrap();
    other.tensors.insert(format!("{first}.other"), tensor);
    other.write_dir(&folder("other")).unwrap();
    trained(&checkpoint, 1).write_dir(&folder("after")).unwrap();
    let upload = async |after: &str, shard: &str, under: &str| {
        let (after, before) = (folder(after), folder("before"));
        let arguments = [
            "shard",
            name(&after),
            "--base",
            name(&before),
            "--name",
            under,
            "--shard",
            shard,
        ];
        policy(&stack, &arguments, false).await
    };
    for (after, shard, under, reason) in [
        ("other", "1/1", "step", "different tensors"),
        ("nothing", "1/1", "step", "nothing"),
        ("after", "0/4", "step", "the first of four"),
        ("after", "1/1", "../step", "is not a valid name"),
    ] {
        let (success, _, stderr) = upload(after, shard, under).await;
        assert!(!success && stderr.contains(reason), "{reason}: {stderr}");
    }
    // Shards of two attempts do not mix.
    assert!(upload("after", "1/2", "twice").await.0);
    let (success, _, stderr) = upload("before", "1/2", "twice").await;
    assert!(!success && stderr.contains("a name of its own"), "{stderr}");
    // Unchanged weights are refused.
    let (success, _, stderr) = upload("before", "1/1", "same").await;
    assert!(success, "{stderr}");
    let (before, parent) = (folder("before"), base.to_string());
    let arguments = [
        "publish",
        name(&before),
        "--line",
        "realtime",
        "--parent",
        &parent,
        "--shards",
        "same",
        "--of",
        "1",
        "--base",
        name(&before),
    ];
    let (success, _, stderr) = policy(&stack, &arguments, true).await;
    assert!(!success && stderr.contains("nothing to publish"), "{stderr}");
}
